"""Where checkpoints go: folders and buckets, and what is said when they cannot be written."""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import jax

from eagle3_jax.distributed import from_first, is_first
from eagle3_jax.errors import UserError

UNFINISHED = ".orbax-checkpoint-tmp"
FULL = re.compile("no space left( on device)?|quota exceeded|file too large", re.IGNORECASE)


def checkpoint_place(output: Path, place: str | None) -> str:
    """A bucket's address as it is; a folder as an absolute path, by default OUTPUT/checkpoints."""
    if place is not None and is_address(place):
        return place.rstrip("/")
    return str(Path(place or output / "checkpoints").expanduser().absolute())


def is_address(place: str) -> bool:
    """Whether this is the address of a bucket and no folder."""
    return "://" in place


def prepare_place(place: str) -> None:
    """Makes a folder, removes what was not finished there, and looks whether all processes see the same one.

    Raises:
      UserError: they do not.
    """
    if is_address(place):
        return
    folder = Path(place)
    if is_first():
        folder.mkdir(parents=True, exist_ok=True)
        for unfinished in folder.glob(f"*{UNFINISHED}*"):
            shutil.rmtree(unfinished, ignore_errors=True)
    if jax.process_count() > 1:
        _check_shared(folder)


def _check_shared(folder: Path) -> None:
    mark = folder / f".seen-{int(from_first(time.time_ns() % 2**31))}"
    if is_first():
        mark.touch()
    from_first(0)  # nobody looks before it is there
    seen = mark.exists()
    from_first(0)  # nor is it taken away before all have looked
    if not seen:
        raise UserError(
            f"{folder} is not the same folder on all hosts; name one that all see, or a bucket, with checkpoints=gs://..."
        )
    if is_first():
        mark.unlink()


@contextlib.contextmanager
def storage_errors(place: str, what: str) -> Iterator[None]:
    """Errors of the file system or bucket behind `place`, in words."""
    try:
        yield
    except UserError:
        raise
    except jax.errors.JaxRuntimeError:  # another process is gone
        raise
    except Exception as error:  # tensorstore raises ValueError for a full disk, others what they like
        full = FULL.search(str(error))
        if full:
            remedy = "make room there, or name another place with checkpoints="
        elif isinstance(error, ImportError):
            remedy = "install what such addresses need: gcsfs for gs://, s3fs for s3://"
        else:
            remedy = "see that the place exists and that this host may write there"
        reason = full[0] if full else first_line(error)
        raise UserError(
            f"checkpoints in {place} cannot be {what}: {reason}; {remedy}, and give the same command again: training "
            "goes on from the last whole checkpoint"
        ) from error


def first_line(error: BaseException) -> str:
    """What an error says, without the details that follow."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return text if len(text) <= 300 else text[:300] + " ..."
