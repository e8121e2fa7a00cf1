"""Which rows of a batch a host copies, and how its part becomes an array that lies on the devices of all hosts."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Sharding


def own_rows(num_rows: int, place: Sharding) -> tuple[int, ...]:
    """The rows of [num_rows, ...], laid out by `place`, on this process's devices; several may have a row."""
    parts = place.addressable_devices_indices_map((num_rows,)).values()
    return tuple(sorted({row for index in parts if index for row in range(*index[0].indices(num_rows))}))


def spread_rows(values: np.ndarray, rows: Sequence[int] | None, num_rows: int, place: Sharding) -> jax.Array:
    """[num_rows, ...] of the `rows`, sorted, that this process has as values [b, ...]; others bring the rest."""
    here = np.arange(num_rows) if rows is None else np.asarray(rows)

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index
        wanted = np.arange(*index[0].indices(num_rows))
        return values[np.searchsorted(here, wanted)]

    return jax.make_array_from_callback((num_rows, *values.shape[1:]), place, part)
