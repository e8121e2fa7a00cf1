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
      UserError: `tokenizer` cannot be loaded, has no template, or gives ids another meaning than the target's own.
    """
    own = folder if (folder / "tokenizer.json").is_file() else None
    where = tokenizer or own
    if where is None:
        return None
    loaded = _load(where)
    if tokenizer is not None and own is not None and loaded.get_vocab() != _load(own).get_vocab():
        raise UserError(
            f"the vocabulary of the tokenizer {tokenizer} is not that of the target's own in {folder}: ids would mean "
            "other tokens to the target; leave the tokenizer out, or name one with the same vocabulary"
        )
    if not loaded.chat_template and tokenizer is None:
        return None
    return ChatRenderer(loaded, template_kwargs, changed_turns)


def _load(where: str | Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(where)
    except (OSError, ValueError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"no tokenizer could be read from {where}: {first}") from error


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
