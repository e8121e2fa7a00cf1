"""Prompts for a benchmark from a JSONL file, in any of the usual layouts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3_jax.errors import UserError

Conversation = list[dict[str, str]]

# Used when no dataset is given, so that the command runs by itself.
BUILT_IN = (
    "Explain in a few sentences why the sky is blue.",
    "A train travels 60 miles an hour. How far does it travel in two and a half hours?",
    "Write a Python function that returns the largest number in a list.",
    "What are the advantages and disadvantages of working from home?",
    "Natalia sold 48 clips in April and half as many in May. How many clips did she sell altogether?",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "Summarize the water cycle for a ten-year-old.",
    "Write a SQL query that counts the orders of each customer.",
)
_ROLES = {"human": "user", "user": "user", "system": "system", "gpt": "assistant", "assistant": "assistant"}


def read_conversations(path: Path | None, limit: int) -> list[Conversation]:
    """The first turn (after a system message, if there is one) of at most `limit` rows.

    A row has one of: `turns` (a list of texts), `messages` (role, content), `conversations` (from, value, or role,
    content), `prompt`, `question`.
    Raises UserError naming the file, the line and what is wrong.
    """
    if path is None:
        return [[{"role": "user", "content": text}] for text in BUILT_IN[:limit]]
    if not path.is_file():
        raise UserError(f"dataset {path}: no such file; a local JSONL file is needed")
    found: list[Conversation] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if len(found) == limit:
                break
            if line.strip():
                found.append(_first_turn(_parse(line, path, number), f"dataset {path}, line {number}"))
    if not found:
        raise UserError(f"dataset {path}: holds no rows")
    return found


def _parse(line: str, path: Path, number: int) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"dataset {path}, line {number}: is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise UserError(f"dataset {path}, line {number}: is not an object")
    return row


def _first_turn(row: Mapping[str, Any], where: str) -> Conversation:
    for key in ("messages", "conversations"):
        if row.get(key):
            return _until_first_user(row[key], where)
    turns = row.get("turns")
    text = turns[0] if isinstance(turns, list) and turns else row.get("prompt") or row.get("question")
    if not isinstance(text, str) or not text:
        raise UserError(f"{where}: has none of turns, messages, conversations, prompt, question")
    return [{"role": "user", "content": text}]


def _until_first_user(messages: Sequence[Mapping[str, Any]], where: str) -> Conversation:
    conversation: Conversation = []
    for message in messages:
        role = _ROLES.get(str(message.get("role", message.get("from"))))
        content = message.get("content", message.get("value"))
        if role is None or not isinstance(content, str):
            raise UserError(f"{where}: a message without a known role and a text: {str(message)[:60]}")
        if role != "assistant":
            conversation.append({"role": role, "content": content})
        if role == "user":
            return conversation
    raise UserError(f"{where}: no message of a user")
