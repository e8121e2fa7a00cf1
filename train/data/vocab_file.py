"""`eagle3 data vocab`: a draft vocabulary in a file, for every head that is trained on the same data.

    {"format": "eagle3-draft-vocab", "version": 1, "key": ..., "vocab_size": V, "size": U, ..., "target_ids": [U ids]}

`key` is a digest of V, U and the checksums of the data: the file is made anew when any of them is another.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_jax.errors import ConfigError
from train.data.conversations import Row
from train.data.shards import ShardFolder, disk_errors, open_folder, read_shard, rows_of, write_json
from train.data.vocab import choose_draft_vocab, count_supervised, coverage

FORMAT, VERSION = "eagle3-draft-vocab", 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="that `eagle3 data prepare` has written")
    parser.add_argument("--size", type=int, required=True, help="tokens of the draft vocabulary")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON, for draft.vocab_file")


def run(args: argparse.Namespace) -> int:
    folders = [open_folder(folder) for folder in args.folders]
    vocab_size = _vocab_size(folders)
    key = cache_key(vocab_size, args.size, [c for folder in folders for c in folder.checksums])
    if args.output.is_file() and _read(args.output).get("key") == key:
        print(f"{args.output}: up to date")
        return 0
    counts = count_supervised((row for folder in folders for row in _rows(folder)), vocab_size)
    table = describe(counts, args.size)
    with disk_errors(args.output):
        args.output.parent.mkdir(parents=True, exist_ok=True)
        write_json(args.output, {"format": FORMAT, "version": VERSION, "key": key, **table}, indent=None)
    print(
        f"{args.output}: {table['size']} of {vocab_size} tokens, {table['coverage']:.3%} of what the assistant says"
        + (f"; {table['padded']} of them it never says" if table["padded"] else "")
    )
    return 0


def describe(counts: np.ndarray, size: int) -> dict[str, Any]:
    """The file's contents for counts [V]; tokens never said fill up what is left, lowest ids first."""
    ids = choose_draft_vocab(counts, size)
    return {
        "vocab_size": len(counts),
        "size": size,
        "distinct_tokens": int((counts > 0).sum()),
        "padded": int((counts[ids] == 0).sum()),
        "coverage": coverage(counts, ids),
        "target_ids": ids.tolist(),
    }


def cache_key(vocab_size: int, size: int, checksums: Sequence[str]) -> str:
    """Of everything that the vocabulary follows from; the order of the data does not matter."""
    return hashlib.sha256(json.dumps([VERSION, vocab_size, size, sorted(checksums)]).encode()).hexdigest()


def _vocab_size(folders: Sequence[ShardFolder]) -> int:
    sizes = {folder.settings["vocab_size"]: folder.folder for folder in folders}
    if len(sizes) > 1:
        shown = ", ".join(f"{folder} for one of {size} tokens" for size, folder in sizes.items())
        raise ConfigError(f"these folders were prepared for different targets: {shown}")
    return next(iter(sizes))


def _rows(folder: ShardFolder) -> Iterator[Row]:
    for entry in folder.shards:
        yield from rows_of(read_shard(folder.folder, entry))


def _read(path: Path) -> dict[str, Any]:
    """Raises ConfigError if it is no such file."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: no draft vocabulary can be read from it: {error}") from error
    if not isinstance(table, dict) or (table.get("format"), table.get("version")) != (FORMAT, VERSION):
        raise ConfigError(f"{path}: not a draft vocabulary that `eagle3 data vocab` wrote")
    return table


def read_vocab_file(path: str | Path, vocab_size: int) -> np.ndarray:
    """The target ids of a draft vocabulary, ascending: int32 [U].

    Raises:
      ConfigError: the file is none, was made for a target of another vocabulary, or does not hold what it says.
    """
    table = _read(Path(path))
    if table.get("vocab_size") != vocab_size:
        raise ConfigError(
            f"{path}: made for a target of {table.get('vocab_size')} tokens, this one has {vocab_size}: make it anew"
        )
    ids = np.asarray(table.get("target_ids"))
    whole = ids.ndim == 1 and ids.dtype.kind == "i" and len(ids) == table.get("size") and len(ids) > 0
    if not whole or ids[0] < 0 or ids[-1] >= vocab_size or not (np.diff(ids) > 0).all():
        raise ConfigError(f"{path}: target_ids are not {table.get('size')} different ids of the target, ascending")
    return ids.astype(np.int32)
