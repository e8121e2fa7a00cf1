"""Plain jnp forms of attention.

Letters: B batch, T queries, S keys, K key/value heads, R query heads of one key head, H width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


def attention(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """Grouped-query attention with the softmax in float32 and scale H^-0.5.

    Args:
      q: [B,T,K*R,H]. k, v: [B,S,K,H]. mask: bool, broadcastable to [B,T,S]; each query must see at least one key.

    Returns:
      [B,T,K*R,H] in the dtype of q.
    """
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
    scores = jnp.einsum("BTKRH,BSKH->BKRTS", grouped, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("BKRTS,BSKH->BTKRH", weights, v, preferred_element_type=jnp.float32)
    return out.reshape(q.shape).astype(q.dtype)


def causal_attention(q: Array, k: Array, v: Array) -> Array:
    """Each token sees itself and what came before it. Shapes as `attention`, with T = S."""
    return attention(q, k, v, jnp.tri(q.shape[1], dtype=bool)[None])


def write_pages(pages: Array, values: Array, page_table: Array, positions: Array, valid: Array) -> Array:
    """Puts `values` [B,T,K,H] at `positions` [B,T] of each row's pages; invalid tokens are not written.

    Args:
      pages: [num_pages, page_size, K, H]. page_table: [B, pages_per_row] int32. valid: [B,T] bool.
    """
    size = pages.shape[1]
    slot = jnp.clip(positions // size, 0, page_table.shape[1] - 1)
    page = jnp.take_along_axis(page_table, slot, axis=1)
    inside = valid & (positions >= 0) & (positions < size * page_table.shape[1])
    page = jnp.where(inside, page, pages.shape[0])  # out of range, hence dropped
    return pages.at[page, positions % size].set(values.astype(pages.dtype), mode="drop")


def paged_attention(q: Array, key_pages: Array, value_pages: Array, page_table: Array, positions: Array) -> Array:
    """Queries at `positions` [B,T] see the cached keys at positions up to their own.

    Args:
      q: [B,T,K*R,H]. key_pages, value_pages: [num_pages, page_size, K, H]. page_table: [B, pages_per_row] int32.
    """
    k, v = (x[page_table].reshape(q.shape[0], -1, *x.shape[2:]) for x in (key_pages, value_pages))
    mask = jnp.arange(k.shape[1])[None, None, :] <= positions[:, :, None]
    return attention(q, k, v, mask)
