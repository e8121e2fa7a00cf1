"""The tokenizer and chat template that rows are rendered with, from the target's folder or another."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from eagle3_jax.errors import UserError
from train.data.mask import ChangedTurns, ChatRenderer


def load_renderer(
    folder: Path,
    *,
    tokenizer: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    changed_turns: ChangedTurns = "split",
) -> ChatRenderer | None:
    """Of `tokenizer` (folder or hub id) or else of the target in `folder`; None if that has no tokenizer or template.

    Raises:
      UserError: `tokenizer` cannot be loaded, or has no template.
    """
    where = tokenizer or (folder if (folder / "tokenizer.json").is_file() else None)
    if where is None:
        return None
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(where)
    except (OSError, ValueError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"no tokenizer could be read from {where}: {first}") from error
    if not loaded.chat_template and tokenizer is None:
        return None
    return ChatRenderer(loaded, template_kwargs, changed_turns)


def add_template_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokenizer", help="folder or hub id (default: the target's)")
    parser.add_argument(
        "--template-kwargs", nargs="+", default=[], metavar="KEY=VALUE",
        help="given to the chat template, such as enable_thinking=false",
    )  # fmt: skip


def parse_template_kwargs(items: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE items, values in YAML. Raises UserError for another form."""
    pairs = [item.partition("=") for item in items]
    if wrong := [item for item, (key, found, _) in zip(items, pairs, strict=True) if not key or not found]:
        raise UserError(f"--template-kwargs {wrong[0]}: expected KEY=VALUE")
    return {key: yaml.safe_load(value) for key, _, value in pairs}
