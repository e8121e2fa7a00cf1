"""What `benchmarks.kernels` measures, a file a folder of `pallas_kernels`."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.cases import attention, delta, matmul, norm, verification
from benchmarks.cases.case import TINY, Case, Grid, Sizes, Way

__all__ = ["TINY", "Case", "Grid", "Sizes", "Way", "all_cases"]


def all_cases(sizes: Sizes, grid: Grid) -> Iterator[Case]:
    for room in (delta, attention, norm, matmul, verification):
        yield from room.cases(sizes, grid)
