"""Which tokens end a text: the union of what generation_config, config and tokenizer say.

They disagree in published checkpoints (Qwen3.5: 248044 in config.json, 248046 in the tokenizer), and a model that
emits the one its loader did not read runs on to the length limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from eagle3_jax.checkpoint.source import read_json


def stop_ids(folder: Path) -> tuple[tuple[int, ...], list[str]]:
    """Sorted ids, and notes on what could not be read."""
    config = read_json(folder, "config.json")
    ids = {*_ids(read_json(folder, "generation_config.json")), *_ids(config), *_ids(config.get("text_config") or {})}
    token = read_json(folder, "tokenizer_config.json").get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if not text:
        return tuple(sorted(ids)), []
    found = _token_id(folder, text)
    if found is None:
        return tuple(sorted(ids)), [f"the tokenizer's eos_token {text!r} has no id in {folder}, so it does not stop"]
    return tuple(sorted(ids | {found})), []


def _ids(table: Mapping[str, Any]) -> Iterator[int]:
    value = table.get("eos_token_id")
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, int) and item >= 0:  # some configs write -1 for none
            yield item


def _token_id(folder: Path, text: str) -> int | None:
    """The id of a token in the tokenizer's files, smallest file first."""
    decoder = read_json(folder, "tokenizer_config.json").get("added_tokens_decoder") or {}
    for key, entry in decoder.items():
        if entry.get("content") == text:
            return int(key)
    tokenizer = read_json(folder, "tokenizer.json")
    for entry in tokenizer.get("added_tokens") or []:
        if entry.get("content") == text:
            return int(entry["id"])
    vocabularies = [
        (tokenizer.get("model") or {}).get("vocab"),
        read_json(folder, "added_tokens.json"),
        read_json(folder, "vocab.json"),
    ]
    for table in vocabularies:
        if isinstance(table, dict) and text in table:
            return int(table[text])
    return None
