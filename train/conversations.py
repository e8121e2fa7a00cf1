"""Rows of training files, in the formats people have, as one thing: a conversation or ready tokens.

{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}     ShareGPT
{"messages": [{"role": "user", "content": ...}, ...], "tools": [...]}                  OpenAI, Hugging Face
{"prompt": text or messages, "response": text}                                       prompt and answer
{"input_ids": [...], "loss_mask": [...]}                                             tokenised elsewhere
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_jax.errors import UserError

Message = Mapping[str, Any]

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
    """One training sequence. tokens: [T] int32. mask: [T] bool, the assistant's tokens; a run of them is one turn."""

    tokens: np.ndarray
    mask: np.ndarray


def read_records(path: Path) -> Iterator[Any]:
    """Yields the objects of a .jsonl file (one a line) or a .json file (one list); a line that is not JSON is a BadRow.

    Raises:
      UserError: the file is neither, is absent, or does not hold a list.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such data file")
    if path.suffix == ".jsonl":
        with path.open(encoding="utf-8") as lines:
            yield from (_parse_line(line) for line in lines if line.strip())
    elif path.suffix == ".json":
        records = _parse_line(path.read_text(encoding="utf-8"))
        if not isinstance(records, list):
            raise UserError(f"{path}: not a JSON list of rows (JSON lines need the suffix .jsonl)")
        yield from records
    else:
        raise UserError(f"{path}: data files are .json or .jsonl, not {path.suffix or 'without a suffix'}")


def _parse_line(line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return BadRow("not JSON")


def parse_record(record: Any) -> Conversation | Row:
    """Reads one record by the keys it has.

    Raises:
      BadRow: no known keys, or malformed ones.
    """
    if isinstance(record, BadRow):
        raise record
    if not isinstance(record, Mapping):
        raise BadRow("not an object")
    if "input_ids" in record:
        return _tokenised(record)
    return _trimmed(_messages(record), record.get("tools") or ())


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
    return {"content": "", **{k: v for k, v in message.items() if v is not None}}


def _from_sharegpt(message: Message) -> Message:
    role = _SHAREGPT_ROLES.get(message.get("from", message.get("role")))
    if role is None:
        raise BadRow(f"unknown role {message.get('from', message.get('role'))!r}")
    return _checked({"role": role, "content": message.get("value", message.get("content"))})


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
