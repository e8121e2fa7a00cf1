"""Causal attention with a branch of keys at every position, in blocks of queries: EAGLE-3's training-time test.

At step i of it, the query of position p sees what the drafter's cache would hold at inference: the step-0 keys of
positions j <= p, made of true target features, and after them its own branch, the keys that steps 1 .. i left at p. One
softmax runs over both. Without a branch this is plain causal attention. Queries are taken in blocks that the backward
pass computes again, so no T x T matrix is kept. In packed rows the step-0 keys are those of the query's own segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

_BLOCK_ELEMENTS = 2**28


def query_block(batch: int, length: int, num_heads: int) -> int:
    """Queries at a time so that a block's float32 weights stay within a gigabyte, 16 at least and 512 at most."""
    fitting = _BLOCK_ELEMENTS // (batch * num_heads * length)
    return min(length, 512, max(16, fitting // 16 * 16))


def branch_attention(
    q: Array,
    keys: Sequence[Array],
    values: Sequence[Array],
    *,
    segment_ids: Array | None = None,
    block: int | None = None,
) -> Array:
    """[B, T, N, H] from q [B, T, N, H] and the keys and values [B, T, K, H] of steps 0 .. i. Scale H**-0.5.

    segment_ids: [B, T] int32 of packed rows: tokens see those of their own number alone.
    """
    length = q.shape[1]
    block = min(block or query_block(*q.shape[:3]), length)
    padded = -(-length // block) * block
    grouped = q.reshape(*q.shape[:2], keys[0].shape[2], -1, q.shape[3])
    branch = [_branch(own, keys[0]) for own in (keys, values)]
    blocks = [_split_blocks(x, padded, block) for x in (grouped, *branch)]
    starts = jnp.arange(0, padded, block)
    ids = None if segment_ids is None else _split_blocks(segment_ids, padded, block, mode="edge")

    @jax.checkpoint
    def attend(inputs: tuple[Any, ...]) -> Array:
        start, query_ids, queries, own_keys, own_values = inputs
        visible = jnp.arange(length)[None, None] <= (start + jnp.arange(block))[None, :, None]
        if segment_ids is not None:
            visible = visible & (query_ids[:, :, None] == segment_ids[:, None, :])
        return _attend_block(visible, queries, own_keys, own_values, keys[0], values[0])

    out = lax.map(attend, (starts, ids, *blocks))
    return jnp.moveaxis(out, 0, 1).reshape(q.shape[0], padded, *q.shape[2:])[:, :length]


def _branch(steps: Sequence[Array], like: Array) -> Array:
    """[B, T, i, K, H]: what steps 1 .. i left at each position."""
    return jnp.stack(steps[1:], axis=2) if len(steps) > 1 else like[:, :, None][:, :, :0]


def _split_blocks(x: Array, padded: int, block: int, mode: str = "constant") -> Array:
    """[B, T, ...] -> [blocks, B, block, ...]. What is added after T is zeros, or with mode="edge" the last token's."""
    x = jnp.pad(x, [(0, 0), (0, padded - x.shape[1])] + [(0, 0)] * (x.ndim - 2), mode=mode)
    return jnp.moveaxis(x.reshape(x.shape[0], padded // block, block, *x.shape[2:]), 1, 0)


def _attend_block(visible: Array, q: Array, own_keys: Array, own_values: Array, keys: Array, values: Array) -> Array:
    """One block of queries q [B, Q, K, G, H], K key heads, G queries to each; visible [B or 1, Q, S], one key at least.

    The two softmaxes are merged by their common maximum; joined in one array they would take twice the memory.
    """
    scale, has_branch = q.shape[-1] ** -0.5, own_keys.shape[2] > 0
    shared = jnp.einsum("BQKGH,BSKH->BKGQS", q, keys, preferred_element_type=jnp.float32) * scale
    own = jnp.einsum("BQKGH,BQIKH->BKGQI", q, own_keys, preferred_element_type=jnp.float32) * scale
    shared = jnp.where(visible[:, None, None], shared, -jnp.inf)
    top = jnp.max(shared, axis=-1, keepdims=True)
    if has_branch:
        top = jnp.maximum(top, jnp.max(own, axis=-1, keepdims=True))
    top = lax.stop_gradient(top)
    total, out = _weighted(shared - top, values, "BKGQS,BSKH->BKGQH")
    if has_branch:
        own_total, own_out = _weighted(own - top, own_values, "BKGQI,BQIKH->BKGQH")
        total, out = total + own_total, out + own_out
    return jnp.moveaxis(out / total, 3, 1).astype(values.dtype)


def _weighted(logits: Array, values: Array, product: str) -> tuple[Array, Array]:
    """(sum of weights [..., 1], weighted sum of values), both float32 and not yet divided."""
    weights = jnp.exp(logits)
    out = jnp.einsum(product, weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
    return jnp.sum(weights, axis=-1, keepdims=True), out
