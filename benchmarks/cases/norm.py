"""The residual addition with the norm of the sum. The floor reads and writes as much, without a sum along a row."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from jax import Array

from benchmarks.cases.case import KERNEL, Case, Draw, Grid, Sizes, implementations
from pallas_kernels import norm

ROWS = (1, 4, 64, 256)  # tokens of a cycle


def cases(s: Sizes, g: Grid) -> Iterator[Case]:
    yield from (add_rms_norm(s, rows) for rows in ROWS)


def add_rms_norm(s: Sizes, rows: int) -> Case:
    def make(key: Array) -> tuple[Any, ...]:
        draw = Draw(key)
        return draw.half(rows, s.hidden), draw.half(rows, s.hidden), draw.half(s.hidden)

    ways = implementations(partial(norm.add_rms_norm, eps=1e-6, offset=1.0), "reference", KERNEL)
    size, exact = 2 * s.hidden * (4 * rows + 1), ways["reference"].run
    return Case("norm.add_rms_norm", f"rows {rows}, D {s.hidden}", make, ways, exact, _floor, bytes=size)


def _floor(x: Array, y: Array, weight: Array) -> tuple[Array, Array]:
    return x + y, (x - y) * weight[None]
