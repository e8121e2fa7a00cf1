"""Numbered safetensors files with an index: prepared rows, and what the target says to them.

    DIR/index.json            written last: {"format", "version", ..., "shards": [{"file", "sha256", "rows", ...}]}
    DIR/00000.safetensors     offsets [rows + 1] int64, tokens [N] int32, mask [N] bool; row i is offsets[i : i + 1]
    DIR/progress.json         the index as far as it goes, until then

Every file is written beside its place and renamed, the shard before the progress that speaks of it: whenever the
writer is killed, what `progress.json` names is whole, and the same command goes on from there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_jax.checkpoint.safetensors_file import Outgoing, read_header, write_file
from eagle3_jax.errors import UserError
from train.data.conversations import Row

ROWS, FEATURES, VERSION = "eagle3-rows", "eagle3-features", 1
INDEX, PROGRESS = "index.json", "progress.json"


class ShardError(UserError):
    """A folder of shards that cannot be read or gone on with."""


class ShardWriter:
    """Writes a folder, going on from where an earlier writer with the same settings was stopped.

    `state` is whatever the caller needs in order to go on after the last shard.

    Raises:
      ShardError: the folder holds something else, or was begun with other settings; the message names them.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder, self.settings = folder, json.loads(json.dumps(settings))
        self.shards: list[dict[str, Any]] = []
        self.state: dict[str, Any] = {}
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self.complete = (folder / INDEX).is_file()
        begun = folder / (INDEX if self.complete else PROGRESS)
        if begun.is_file():
            self._go_on(_read_json(begun))
        elif found := sorted(p.name for p in folder.iterdir() if not p.name.endswith(".part")):
            if found != ["00000.safetensors"]:  # killed before the first progress was written
                raise ShardError(f"{folder}: holds {found[0]} and is none of ours; choose another output folder")

    def _go_on(self, saved: Mapping[str, Any]) -> None:
        check_settings(self.folder, saved.get("settings", {}), self.settings)
        self.shards, self.state = list(saved["shards"]), dict(saved["state"])

    def write(self, tensors: Mapping[str, np.ndarray], counts: Mapping[str, int], state: Mapping[str, Any]) -> None:
        """Adds a shard of `tensors`; its entry in the index holds `counts`."""
        name = f"{len(self.shards):05}.safetensors"
        part = self.folder / (name + ".part")
        with disk_errors(self.folder):
            write_file(part, {key: _outgoing(array) for key, array in tensors.items()})
            entry = {"file": name, "sha256": checksum(part), **counts}
            _settle(part, self.folder / name)
        self.shards.append(entry)
        self.state = dict(state)
        self._write_table(PROGRESS)

    def finish(self, state: Mapping[str, Any]) -> None:
        """Writes the index: the folder is complete."""
        self.state = dict(state)
        self._write_table(INDEX)
        (self.folder / PROGRESS).unlink(missing_ok=True)
        self.complete = True

    def _write_table(self, name: str) -> None:
        head = {"format": self.settings["format"], "version": VERSION}
        table = {**head, "settings": self.settings, "state": self.state, "shards": self.shards}
        with disk_errors(self.folder):
            write_json(self.folder / name, table)


class NoWriter(ShardWriter):
    """For other processes than the first: it knows how far the first one's folder goes, and writes nothing."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], complete: bool, state: Mapping[str, Any]) -> None:
        self.folder, self.settings = folder, dict(settings)
        self.shards, self.state, self.complete = [], dict(state), complete

    def write(self, tensors: Mapping[str, np.ndarray], counts: Mapping[str, int], state: Mapping[str, Any]) -> None:
        pass

    def finish(self, state: Mapping[str, Any]) -> None:
        pass


def _outgoing(array: np.ndarray) -> Outgoing:
    return Outgoing(array.dtype, array.shape, lambda: array)


def check_settings(where: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raises ShardError naming every setting that is another than when `where` was begun."""
    if differ := [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]:
        changes = "; ".join(f"{key}: {old.get(key)!r} then, {new.get(key)!r} now" for key in differ)
        raise ShardError(f"{where} was begun with other settings ({changes}); choose another output")


def write_json(path: Path, table: Mapping[str, Any], indent: int | None = 1) -> None:
    """Whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(table, indent=indent) + "\n", encoding="utf-8")
    _settle(part, path)


def _settle(part: Path, path: Path) -> None:
    """Renames once the bytes are on the disk."""
    with part.open("rb") as stream:
        os.fsync(stream.fileno())
    part.replace(path)


@contextlib.contextmanager
def disk_errors(where: Path) -> Iterator[None]:
    """A full disk or an unwritable place is the user's to mend."""
    try:
        yield
    except OSError as error:
        remedy = "; make room and give the same command again" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise ShardError(f"cannot write to {where}: {error.strerror or error}{remedy}") from error


def checksum(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# ----------------------------------------------------------------------------------------------------- reading


@dataclasses.dataclass(frozen=True)
class ShardFolder:
    """A complete folder: what it was made with, what came of it, and its shards' entries in the index."""

    folder: Path
    kind: str
    settings: dict[str, Any]
    state: dict[str, Any]
    shards: list[dict[str, Any]]

    @property
    def num_tokens(self) -> int:
        return sum(shard["tokens"] for shard in self.shards)

    @property
    def checksums(self) -> list[str]:
        return [shard["sha256"] for shard in self.shards]


def is_shard_folder(folder: Path) -> bool:
    """Whether `eagle3 data` has written there, to the end or not."""
    names = [name for name in (INDEX, PROGRESS) if (folder / name).is_file()]
    return bool(names) and _read_json(folder / names[0]).get("format") in (ROWS, FEATURES)


def open_folder(folder: Path, kind: str = ROWS) -> ShardFolder:
    """The index of `folder`.

    Raises:
      ShardError: it is absent, of another kind, not finished, or of a later version.
    """
    if not (folder / INDEX).is_file():
        if (folder / PROGRESS).is_file():
            raise ShardError(f"{folder}: not finished; give the command that began it again, and it goes on")
        raise ShardError(f"{folder}: no {INDEX} there; `eagle3 data` writes such folders")
    table = _read_json(folder / INDEX)
    if table.get("format") != kind or table.get("version") != VERSION:
        found = f"{table.get('format')} version {table.get('version')}"
        raise ShardError(f"{folder}: holds {found}, where {kind} version {VERSION} is needed")
    return ShardFolder(folder, kind, table["settings"], table["state"], table["shards"])


def _read_json(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ShardError(f"{path}: not JSON: {error}") from error
    return table if isinstance(table, dict) else {}


def read_shard(folder: Path, entry: Mapping[str, Any], *, verify: bool = True) -> dict[str, np.ndarray]:
    """The tensors of one shard as memory maps, after its checksum has been found right.

    Raises:
      ShardError: the file is missing or its bytes are not those that were written.
    """
    file = folder / entry["file"]
    if not file.is_file():
        raise ShardError(f"{folder}: {entry['file']} is missing")
    if verify and checksum(file) != entry["sha256"]:
        raise ShardError(f"{file}: damaged, its checksum is not the one in {INDEX}; prepare the folder anew")
    tensors, problems = read_header(file)
    if problems:
        raise ShardError("; ".join(problems))
    return {name: info.read() for name, info in tensors.items()}


def read_rows(folder: Path) -> Iterator[Row]:
    """The rows of a prepared folder, in order; nothing is copied."""
    found = open_folder(folder)
    for entry in found.shards:
        yield from rows_of(read_shard(folder, entry))


def rows_of(tensors: Mapping[str, np.ndarray]) -> Iterator[Row]:
    """The rows of one shard."""
    offsets, tokens, mask = (np.asarray(tensors[name]) for name in ("offsets", "tokens", "mask"))  # plain views
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        yield Row(tokens[start:end], mask[start:end])


def row_tensors(rows: Sequence[Row]) -> dict[str, np.ndarray]:
    """The three tensors of a shard of `rows`."""
    lengths = [len(row.tokens) for row in rows]
    return {
        "offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        "tokens": np.concatenate([row.tokens for row in rows]).astype(np.int32),
        "mask": np.concatenate([row.mask for row in rows]).astype(np.bool_),
    }


def row_counts(rows: Sequence[Row]) -> dict[str, int]:
    """What the index says of a shard of `rows`."""
    return {
        "rows": len(rows),
        "tokens": sum(len(row.tokens) for row in rows),
        "supervised_tokens": int(sum(row.mask.sum() for row in rows)),
    }
