"""What a file was made from, in sixteen hexadecimal digits each: another model, tokenizer or file is another digest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from eagle3_jax.checkpoint.source import weight_files
from eagle3_jax.errors import UserError
from train.data.mask import ChatRenderer
from train.data.shards import checksum, is_shard_folder, open_folder


def model_checksum(folder: Path) -> str:
    """Of a model: its configuration, and the names and sizes of its weights."""
    digest = hashlib.sha256((folder / "config.json").read_bytes() if (folder / "config.json").is_file() else b"")
    for file in weight_files(folder):
        digest.update(f"{file.name} {file.stat().st_size};".encode())
    return digest.hexdigest()[:16]


def file_checksum(path: Path) -> str:
    """Of a file, or of the names and contents of a folder's."""
    if path.is_file():
        return checksum(path)[:16]
    if not path.is_dir():
        raise UserError(f"{path}: no such data file")
    parts = [f"{file.name} {checksum(file)}" for file in sorted(path.rglob("*")) if file.is_file()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def tokenizer_checksum(renderer: ChatRenderer | None) -> str | None:
    """Of the vocabulary: two tokenizers with the same one give the same ids a meaning."""
    if renderer is None:
        return None
    words = sorted(renderer.tokenizer.get_vocab().items(), key=lambda item: item[1])
    return hashlib.sha256(repr(words).encode()).hexdigest()[:16]


def template_checksum(renderer: ChatRenderer | None) -> str | None:
    return hashlib.sha256(str(renderer.tokenizer.chat_template).encode()).hexdigest()[:16] if renderer else None


def check_prepared(files: Iterable[str | Path], renderer: ChatRenderer | None) -> None:
    """Raises UserError if one of `files` is a folder whose ids another tokenizer than that of `renderer` has made."""
    folders = [Path(file) for file in files if Path(file).is_dir() and is_shard_folder(Path(file))]
    ours = tokenizer_checksum(renderer) if folders else None
    for folder in folders:
        if ours is not None and (theirs := open_folder(folder).settings.get("tokenizer")) not in (None, ours):
            raise UserError(f"{folder}: its tokens are of another tokenizer ({theirs}) than the target's ({ours})")
