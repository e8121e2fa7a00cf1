"""Packed rows: several sequences one after another in a row, told apart by ids [B,T] int32.

0 is padding, 1, 2, ... are the row's segments; tokens of one segment stand together.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax


def segment_positions(segment_ids: Array) -> Array:
    """[B,T] int32: each token's place in its segment, from 0."""
    index = jnp.broadcast_to(jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None], segment_ids.shape)
    starts = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], [(0, 0), (1, 0)])
    return index - lax.cummax(jnp.where(starts, index, 0), axis=1)
