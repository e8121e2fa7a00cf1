"""Rows of files: JSON, JSON lines, Parquet, folders saved by Hugging Face `datasets`, and what `eagle3 data` wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagle3_jax.errors import UserError
from train.data.conversations import BadRow

SUFFIXES = (".jsonl", ".json", ".parquet")


def read_records(path: Path) -> Iterator[Any]:
    """Yields the rows of a file or folder, for `train.data.conversations` to read; a line that is not JSON is a BadRow.

    Raises:
      UserError: the file is absent or of another kind, or what reads it is not installed.
    """
    if path.is_dir():
        return _read_folder(path)
    if not path.is_file():
        raise UserError(f"{path}: no such data file")
    readers = {".jsonl": _read_lines, ".json": _read_list, ".parquet": _read_parquet}
    if path.suffix not in readers:
        kind = f"not {path.suffix}" if path.suffix else "not without a suffix"
        raise UserError(f"{path}: data files are {', '.join(SUFFIXES)}, {kind}")
    return readers[path.suffix](path)


def _read_lines(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8") as lines:
        yield from (_parse(line) for line in lines if line.strip())


def _read_list(path: Path) -> Iterator[Any]:
    records = _parse(path.read_text(encoding="utf-8"))
    if not isinstance(records, list):
        raise UserError(f"{path}: not a JSON list of rows (JSON lines need the suffix .jsonl)")
    yield from records


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return BadRow("not JSON")


def _read_folder(path: Path) -> Iterator[Any]:
    from train.data.shards import is_shard_folder, read_rows

    if is_shard_folder(path):
        return read_rows(path)
    if (path / "dataset_dict.json").is_file():
        splits = sorted(p.parent.name for p in path.glob("*/state.json"))
        raise UserError(f"{path}: holds the splits {', '.join(splits)}; give one of these folders")
    if (path / "state.json").is_file():
        return _read_saved_dataset(path)
    raise UserError(f"{path}: a folder written neither by `eagle3 data` nor by save_to_disk of Hugging Face datasets")


# ------------------------------------------------------------------------------------------------------ Arrow


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise UserError(f"{path}: reading Parquet and Arrow needs pyarrow: pip install 'eagle3-jax[data]'") from None
    return pyarrow


def _read_parquet(path: Path) -> Iterator[Any]:
    arrow = _pyarrow(path)
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                yield from map(_without_nulls, batch.to_pylist())
    except arrow.ArrowInvalid as error:
        raise UserError(f"{path}: not a Parquet file: {error}") from error


def _read_saved_dataset(path: Path) -> Iterator[Any]:
    """The Arrow streams that `state.json` names; `save_to_disk` has applied every selection and shuffle to them."""
    arrow = _pyarrow(path)
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    if state.get("_indices_data_files"):
        raise UserError(f"{path}: saved as indices into other rows; call flatten_indices() before save_to_disk()")
    for entry in state["_data_files"]:
        file = path / entry["filename"]
        if not file.is_file():
            raise UserError(f"{path}: {entry['filename']}, named by state.json, is missing")
        with arrow.memory_map(str(file)) as stream, arrow.ipc.open_stream(stream) as batches:
            for batch in batches:
                yield from map(_without_nulls, batch.to_pylist())


def _without_nulls(value: Any) -> Any:
    """Arrow gives every row of a column the same keys: those that a row did not have are null."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
