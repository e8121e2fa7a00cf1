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
        (start, stop), row = bounds[0], self._nbytes(shape[1:])
        read = self._of_each_row(shape, bounds)
        extent = () if read is None else tuple(last - first for first, last in read)
        size = self._nbytes(extent)
        if read is None or size > BLOCK:
            for i in range(start, stop):
                self._copy(stream, out[i - start], shape[1:], bounds[1:], at + i * row)
            return
        skipped = read[0][0] * self._nbytes(shape[2:]) if read else 0
        inner = tuple(slice(a - first, b - first) for (a, b), (first, _) in zip(bounds[1:], read, strict=True))
        step = min(BLOCK // size, stop - start)
        buffer = np.empty(step * size, np.uint8)
        for first in range(start, stop, step):
            many = min(step, stop - first)
            block = buffer[: many * size]
            for i, piece in enumerate([block] if size == row else block.reshape(many, size)):
                self._read(stream, at + (first + i) * row + skipped, piece)
            rows = block.view(self.dtype).reshape(many, *extent)
            out[first - start : first - start + many] = rows[:, *inner]

    def _nbytes(self, shape: Sequence[int]) -> int:
        return math.prod(shape) * self.dtype.itemsize

    def _of_each_row(self, shape: tuple[int, ...], bounds: Bounds) -> Bounds | None:
        """What is read of each row: what is wanted, or all where pieces are short; None if that is not one range."""
        wanted, whole = tuple(bounds[1:]), tuple((0, n) for n in shape[1:])
        if wanted[1:] != whole[1:]:
            return None
        short = self._nbytes([last - first for first, last in wanted]) < SHORT
        return whole if short else wanted

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
