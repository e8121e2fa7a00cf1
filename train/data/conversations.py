"""Rows of training files, in the formats people have, as one thing: a conversation or ready tokens.

{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}     ShareGPT
{"messages": [{"role": "user", "content": ...}, ...], "tools": [...]}                  OpenAI, Hugging Face
{"prompt": text or messages, "response": text}                                       prompt and answer
{"input_ids": [...], "loss_mask": [...]}                                             tokenised elsewhere

Prompts, of which only the question is used, may also be {"turns": [text, ...]} or {"question": text}.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

Message = Mapping[str, Any]
Overlong = Literal["truncate", "drop"]
"""What becomes of a sequence longer than a recipe allows."""

_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_call": "assistant",
}
_ROLES = ("system", "developer", "user", "assistant", "tool")


class BadRow(ValueError):
    """A row that cannot be used; the message is the reason under which it is counted."""


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Messages as chat templates take them, ending with an assistant turn; `tools` goes to the template too."""

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True)
class Row:
    """One training sequence. tokens: [T] int32. mask: [T] bool, the assistant's tokens; a run of them is one turn.

    segment_ids: [T] int32 of several sequences packed into one, from 1; see `train.data.packing`.
    stored: in offline mode, where the target's states are; see `train.data.stored`.
    """

    tokens: np.ndarray
    mask: np.ndarray
    segment_ids: np.ndarray | None = None
    stored: tuple[Any, ...] = ()


def parse_record(record: Any) -> Conversation | Row:
    """Reads one record by the keys it has; a Row is one already.

    Raises:
      BadRow: no known keys, or malformed ones.
    """
    if isinstance(record, Row):
        return record
    found = _object(record)
    if "input_ids" in found:
        return _tokenised(found)
    return _trimmed(_messages(found), _tools(found))


def parse_prompt(record: Any) -> Conversation | np.ndarray:
    """What is to be answered: the messages up to the first user turn, or [T] int32 up to the first supervised token.

    Raises:
      BadRow: no known keys, malformed ones, or no question.
    """
    if not isinstance(record, Row) and "input_ids" in _object(record):
        record = _tokenised({"loss_mask": [0] * len(_object(record)["input_ids"]), **_object(record)})
    if isinstance(record, Row):
        return record.tokens[: int(np.argmax(record.mask)) if record.mask.any() else None]
    messages = _question(_object(record))
    asked = next((i for i, m in enumerate(messages) if m["role"] == "user"), None)
    if asked is None:
        raise BadRow("no user turn")
    kept = [m for m in messages[: asked + 1] if m["role"] != "assistant"]
    return Conversation(tuple(kept), _tools(_object(record)))


def _question(record: Mapping[str, Any]) -> list[Message]:
    turns = record.get("turns")
    text = turns[0] if isinstance(turns, list) and turns else record.get("question")
    if text and isinstance(text, str):
        return _prompt_messages(text)
    if record.get("prompt") and not record.get("messages") and not record.get("conversations"):
        return _prompt_messages(record["prompt"])
    return _messages(record)


def _object(record: Any) -> Mapping[str, Any]:
    if isinstance(record, BadRow):
        raise record
    if not isinstance(record, Mapping):
        raise BadRow("not an object")
    return record


def _tools(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """A list of tools, or its JSON: columns of a table keep them as text."""
    tools = record.get("tools") or ()
    if isinstance(tools, str):
        tools = _from_json(tools)
    if not isinstance(tools, list | tuple):
        raise BadRow("tools are not a list")
    return tuple(tools)


def _from_json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise BadRow("tools or arguments that are not JSON") from None


def _messages(record: Mapping[str, Any]) -> list[Message]:
    if record.get("messages"):
        return [_checked(m) for m in _listed(record["messages"])]
    if record.get("conversations"):
        return [_from_sharegpt(m) for m in _listed(record["conversations"])]
    answer = record.get("response", record.get("completion"))
    if record.get("prompt") and isinstance(answer, str):
        return _prompt_messages(record["prompt"]) + [{"role": "assistant", "content": answer}]
    raise BadRow("none of messages, conversations, prompt + response, input_ids")


def _listed(value: Any) -> Sequence[Any]:
    if not isinstance(value, list) or not all(isinstance(m, Mapping) for m in value):
        raise BadRow("messages are not a list of objects")
    return value


def _prompt_messages(prompt: Any) -> list[Message]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [_checked(m) for m in _listed(prompt)]


def _checked(message: Message) -> Message:
    if message.get("role") not in _ROLES:
        raise BadRow(f"unknown role {message.get('role')!r}")
    if message.get("content") is None and not message.get("tool_calls"):
        raise BadRow("a message without content")
    found = {"content": "", **{k: v for k, v in message.items() if v is not None}}
    if calls := found.get("tool_calls"):
        found["tool_calls"] = [_tool_call(call) for call in _listed(calls)]
    return found


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """With its arguments as a mapping: OpenAI's interface writes JSON, templates go through names and values."""
    inner = call.get("function", call)
    if not isinstance(inner, Mapping):
        raise BadRow("a tool call that is not an object")
    arguments = inner.get("arguments")
    known = {**inner, "arguments": _from_json(arguments) if isinstance(arguments, str) else arguments or {}}
    return {**call, "function": known} if "function" in call else known


def _from_sharegpt(message: Message) -> Message:
    said = message.get("from", message.get("role"))
    role, text = _SHAREGPT_ROLES.get(said), message.get("value", message.get("content"))
    if role is None:
        raise BadRow(f"unknown role {said!r}")
    if said == "function_call" and isinstance(text, str):
        calls = _from_json(text)
        return _checked({"role": role, "tool_calls": calls if isinstance(calls, list) else [calls]})
    rest = {key: value for key, value in message.items() if key not in ("from", "value", "role", "content")}
    return _checked({**rest, "role": role, "content": text})


def _trimmed(messages: Sequence[Message], tools: Sequence[Any]) -> Conversation:
    """Drops what no answer follows, and answers to nothing at the start (ShareGPT splits long chats anywhere)."""
    roles = [m["role"] for m in messages]
    asked = next((i for i, role in enumerate(roles) if role in ("user", "tool")), len(roles))
    kept = [m for i, m in enumerate(messages) if i >= asked or m["role"] != "assistant"]
    while kept and kept[-1]["role"] != "assistant":
        kept.pop()
    if not kept:
        raise BadRow("no assistant turn after a user turn")
    return Conversation(tuple(kept), tuple(tools))


def _tokenised(record: Mapping[str, Any]) -> Row:
    ids, mask = record["input_ids"], record.get("loss_mask")
    if not isinstance(ids, list) or not isinstance(mask, list) or len(ids) != len(mask):
        raise BadRow("input_ids and loss_mask are not lists of one length")
    if not all(type(t) is int and t >= 0 for t in ids) or not all(m in (0, 1) for m in mask):
        raise BadRow("input_ids must be integers from 0, loss_mask zeros and ones")
    return Row(np.asarray(ids, np.int32), np.asarray(mask, bool))
