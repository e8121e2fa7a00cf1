"""The file that answers are appended to, a row a line: nothing is lost or written twice, whenever the writer is killed.

    {"key": "0:17:9f86d081884c", "input_ids": [...], "loss_mask": [...], ...}

A row counts once its line has ended; what a kill leaves of a line is cut off at the next start, and the keys of the
whole ones say what is done. FILE.settings.json, written first, says with what settings.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from eagle3_jax.distributed import is_first
from eagle3_jax.errors import UserError
from train.data.shards import check_settings, disk_errors, write_json


class Answers(Protocol):
    """Where answers go. keys: those of the rows that are there, in order."""

    path: Path
    keys: list[str]

    def append(self, row: Mapping[str, Any]) -> None: ...


class Elsewhere:
    """The file for other processes than the first, which answer with it and write nothing."""

    def __init__(self, path: Path) -> None:
        self.path, self.keys = path, list[str]()

    def append(self, row: Mapping[str, Any]) -> None:
        pass


def open_answers(path: Path, settings: Mapping[str, Any]) -> contextlib.AbstractContextManager[Answers]:
    """The file in the first process of a run. Raises as `AnswerFile` does."""
    return AnswerFile(path, settings) if is_first() else contextlib.nullcontext(Elsewhere(path))


class AnswerFile:
    """Open for appending, by one process at a time. `keys`: those of the rows that are there, in order.

    Raises:
      UserError: the file is another process's, not ours, damaged, or was begun with other settings.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        if path.suffix != ".jsonl":
            raise UserError(f"{path}: answers are written as JSON lines; give a name that ends with .jsonl")
        self.path = path
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._stream = path.open("a+b")
        try:
            self._lock()
            self._check_settings(json.loads(json.dumps(settings)))
            self.keys = self._read_keys()
        except BaseException:
            self._stream.close()
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{self.path}: another process is writing to it") from None

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        beside = self.path.with_name(self.path.name + ".settings.json")
        if beside.is_file():
            check_settings(self.path, json.loads(beside.read_text(encoding="utf-8")), settings)
        elif os.fstat(self._stream.fileno()).st_size:
            raise UserError(f"{self.path}: exists, without {beside.name}: not begun by this command; choose another")
        else:
            with disk_errors(beside):
                write_json(beside, settings)

    def _read_keys(self) -> list[str]:
        """Cuts off a line without an end."""
        keys, whole = list[str](), 0
        self._stream.seek(0)
        for number, line in enumerate(self._stream, 1):
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            try:
                keys.append(json.loads(line)["key"])
            except (ValueError, KeyError, TypeError):
                raise UserError(f"{self.path}, line {number}: not a row with a key; remove the line") from None
        self._stream.truncate(whole)
        return keys

    def append(self, row: Mapping[str, Any]) -> None:
        with disk_errors(self.path):
            self._stream.write(json.dumps(row).encode() + b"\n")
            self._stream.flush()

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with disk_errors(self.path):
            self._stream.close()
