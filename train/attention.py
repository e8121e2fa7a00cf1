"""Attention of the training-time test.

At step i, the query of position p sees what the drafter's cache would hold at inference: the step-0 keys of positions
j <= p, made of true target features, and after them its own branch, the keys that steps 1 .. i left at p. Softmax runs
over both at once. Queries are taken in blocks that the backward pass computes again, so no T x T matrix is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax

_BLOCK_ELEMENTS = 2**28


def query_block(batch: int, length: int, num_heads: int) -> int:
    """Queries at a time so that a block's float32 weights stay within a gigabyte, 16 at least and 512 at most."""
    fitting = _BLOCK_ELEMENTS // (batch * num_heads * length)
    return min(length, 512, max(16, fitting // 16 * 16))


def branch_attention(q: Array, keys: Sequence[Array], values: Sequence[Array], *, block: int | None = None) -> Array:
    """[B, T, N, H] from q [B, T, N, H] and the keys and values [B, T, K, H] of steps 0 .. i. Scale H**-0.5."""
    length = q.shape[1]
    block = min(block or query_block(*q.shape[:3]), length)
    padded = -(-length // block) * block
    grouped = q.reshape(*q.shape[:2], keys[0].shape[2], -1, q.shape[3])
    branch = [_branch(own, keys[0]) for own in (keys, values)]
    blocks = [_split_blocks(x, padded, block) for x in (grouped, *branch)]
    starts = jnp.arange(0, padded, block)

    @jax.checkpoint
    def attend(inputs: tuple[Array, ...]) -> Array:
        start, queries, own_keys, own_values = inputs
        return _attend_block(start, queries, own_keys, own_values, keys[0], values[0])

    out = lax.map(attend, (starts, *blocks))
    return jnp.moveaxis(out, 0, 1).reshape(q.shape[0], padded, *q.shape[2:])[:, :length]


def _branch(steps: Sequence[Array], like: Array) -> Array:
    """[B, T, i, K, H]: what steps 1 .. i left at each position."""
    return jnp.stack(steps[1:], axis=2) if len(steps) > 1 else like[:, :, None][:, :, :0]


def _split_blocks(x: Array, padded: int, block: int) -> Array:
    """[B, T, ...] -> [blocks, B, block, ...], zeros after T."""
    x = jnp.pad(x, [(0, 0), (0, padded - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], padded // block, block, *x.shape[2:]), 1, 0)


def _attend_block(start: Array, q: Array, own_keys: Array, own_values: Array, keys: Array, values: Array) -> Array:
    """One block of queries q [B, Q, K, G, H] at positions start .. start+Q-1. K key heads, G queries to each."""
    shared = jnp.einsum("BQKGH,BSKH->BKGQS", q, keys, preferred_element_type=jnp.float32)
    own = jnp.einsum("BQKGH,BQIKH->BKGQI", q, own_keys, preferred_element_type=jnp.float32)
    positions = start + jnp.arange(q.shape[1])
    visible = jnp.arange(keys.shape[1])[None] <= positions[:, None]
    shared = jnp.where(visible[None, None, None], shared, -jnp.inf)
    weights = jax.nn.softmax(jnp.concatenate([shared, own], axis=-1) * q.shape[-1] ** -0.5, axis=-1)
    weights = weights.astype(values.dtype)
    out = jnp.einsum("BKGQS,BSKH->BQKGH", weights[..., : keys.shape[1]], values, preferred_element_type=jnp.float32)
    out += jnp.einsum(
        "BKGQI,BQIKH->BQKGH", weights[..., keys.shape[1] :], own_values, preferred_element_type=jnp.float32
    )
    return out.astype(values.dtype)
