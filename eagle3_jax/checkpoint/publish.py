"""Writing a folder so that a reader, or a crash, never meets half of it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*")


@contextlib.contextmanager
def publish(folder: str | Path) -> Iterator[Path]:
    """A new folder beside `folder` to write into; it takes its place by renaming, or vanishes when writing fails.

    Files of the old folder that were not written anew (a tokenizer, a README) are carried over, weights are not.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        fresh.chmod(0o777 & ~_umask())  # mkdtemp makes it private
        yield fresh
        if folder.is_dir():
            _carry_over(folder, fresh)
            old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
            os.replace(folder, old)
            os.replace(fresh, folder)
            shutil.rmtree(old)
        else:
            os.replace(fresh, folder)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _carry_over(folder: Path, fresh: Path) -> None:
    for entry in folder.iterdir():
        if (fresh / entry.name).exists() or any(entry.match(pattern) for pattern in WEIGHTS):
            continue
        if entry.is_dir():
            shutil.copytree(entry, fresh / entry.name, symlinks=True)
        else:
            shutil.copy2(entry, fresh / entry.name, follow_symlinks=False)


def write_json(file: Path, table: Mapping[str, Any]) -> None:
    """The table as Hugging Face writes it, two spaces deep, with a last newline."""
    file.write_text(json.dumps(table, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
