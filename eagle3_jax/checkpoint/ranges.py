"""Reads a part of a tensor out of a file: the byte ranges that hold it, a block at a time, and counts them.

A part that is rows of the tensor is one range. Of a part that is columns each row's piece is a range, unless pieces are
shorter than `SHORT`: then rows are read whole, since asking costs more than the bytes between. Plain reads, not a
memory map: what is read is known, and a file that lost its end meanwhile is an error instead of a signal.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_jax.checkpoint.problems import CheckpointError

Bounds = Sequence[tuple[int, int]]
"""First and last + 1 of every dimension."""
Host = np.ndarray[Any, Any]

BLOCK = 16 * 2**20  # bytes in memory beside the part itself
SHORT = 1024  # bytes


@dataclasses.dataclass
class Tally:
    """Bytes of tensors read from files by this process: in all, and by the largest single read."""

    bytes: int = 0
    largest: int = 0

    def add(self, count: int, largest: int) -> None:
        self.bytes += count
        self.largest = max(self.largest, largest)


_TALLY: contextvars.ContextVar[Tally | None] = contextvars.ContextVar("tally", default=None)


@contextlib.contextmanager
def counted() -> Iterator[Tally]:
    """Counts what is read inside the block; a block around it counts it too."""
    outer, tally = _TALLY.get(), Tally()
    token = _TALLY.set(tally)
    try:
        yield tally
    finally:
        _TALLY.reset(token)
        if outer is not None:
            outer.add(tally.bytes, tally.largest)


def count(nbytes: int) -> None:
    """One read of so many bytes."""
    if (tally := _TALLY.get()) is not None:
        tally.add(nbytes, nbytes)


def bounds_of(index: Sequence[slice], shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Slices of step 1 as numbers."""
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor laid out row by row, `offset` bytes into `file`."""

    name: str
    file: Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int

    def read_into(self, out: Host, bounds: Bounds) -> None:
        """Copies a part into `out`, which has its shape and any dtype and strides.

        Raises:
          CheckpointError: the file cannot be read, or ends before the tensor does.
        """
        if not out.size:
            return
        if not self.shape:
            dataclasses.replace(self, shape=(1,)).read_into(out[None], [(0, 1)])
            return
        try:
            with self.file.open("rb", buffering=0) as stream:
                self._copy(stream, out, self.shape, bounds, self.offset)
        except OSError as error:
            fault = f"{self.file.name} cannot be read for {self.name}: {error.strerror or error}"
            raise CheckpointError(self.file.parent, [fault]) from error

    def _copy(self, stream: io.FileIO, out: Host, shape: tuple[int, ...], bounds: Bounds, at: int) -> None:
        """The part `bounds` of a tensor, or of one of its rows, that starts at byte `at`."""
        (start, stop), row = bounds[0], math.prod(shape[1:]) * self.dtype.itemsize
        if row > BLOCK or not self._rows_whole(shape, bounds):
            for i in range(start, stop):
                self._copy(stream, out[i - start], shape[1:], bounds[1:], at + i * row)
            return
        inner = tuple(slice(*pair) for pair in bounds[1:])
        step = min(BLOCK // row, stop - start)
        buffer = np.empty(step * row, np.uint8)
        for first in range(start, stop, step):
            last = min(first + step, stop)
            block = buffer[: (last - first) * row]
            self._read(stream, at + first * row, block)
            rows = block.view(self.dtype).reshape(last - first, *shape[1:])
            out[first - start : last - start] = rows[:, *inner]

    def _rows_whole(self, shape: tuple[int, ...], bounds: Bounds) -> bool:
        """Whether rows are read whole: all of them is wanted, or pieces too short to be read alone."""
        wanted = [pair == (0, n) for pair, n in zip(bounds[1:], shape[1:], strict=True)]
        if all(wanted):
            return True
        (left, right), after = bounds[1], math.prod(shape[2:])
        return all(wanted[1:]) and (right - left) * after * self.dtype.itemsize < SHORT

    def _read(self, stream: io.FileIO, at: int, block: Host) -> None:
        """Fills `block` with the bytes from `at` on."""
        rest = memoryview(block)
        stream.seek(at)
        while len(rest):
            if not (got := stream.readinto(rest)):
                fault = f"{self.file.name} has become shorter: {self.name} needs bytes up to {at + block.nbytes}"
                raise CheckpointError(self.file.parent, [fault])
            rest = rest[got:]
        count(block.nbytes)
