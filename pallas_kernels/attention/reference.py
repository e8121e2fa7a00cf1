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
    return _attention(q, k, v, mask, "BSKH", k.shape[2])


def _attention(q: Array, k: Array, v: Array, mask: Array, layout: str, kv_heads: int) -> Array:
    grouped = q.reshape(*q.shape[:2], kv_heads, -1, q.shape[-1])
    scores = jnp.einsum(f"BTKRH,{layout}->BKRTS", grouped, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum(f"BKRTS,{layout}->BTKRH", weights, v, preferred_element_type=jnp.float32)
    return out.reshape(q.shape).astype(q.dtype)


def write_pages(pages: Array, values: Array, page_table: Array, positions: Array, valid: Array) -> Array:
    """Puts `values` [B,T,K,H] at `positions` [B,T] of each row's pages; invalid tokens are not written.

    Args:
      pages: [K, num_pages, page_size, H]. page_table: [B, pages_per_row] int32. valid: [B,T] bool.
    """
    count, size = pages.shape[1:3]
    slot = jnp.clip(positions // size, 0, page_table.shape[1] - 1)
    page = jnp.take_along_axis(page_table, slot, axis=1)
    inside = valid & (positions >= 0) & (positions < size * page_table.shape[1])
    page = jnp.where(inside, page, count)  # out of range, hence dropped
    values = jnp.moveaxis(values, 2, 0).astype(pages.dtype)
    return pages.at[:, page, positions % size].set(values, mode="drop")


def paged_attention(
    q: Array, key_pages: Array, value_pages: Array, page_table: Array, positions: Array, *, contiguous: bool = False
) -> Array:
    """Queries at `positions` [B,T] see the cached keys at positions up to their own.

    Args:
      q: [B,T,K*R,H]. key_pages, value_pages: [K, num_pages, page_size, H]: heads first, so that neither the product
        with the queries nor a mesh axis over heads needs another layout. page_table: [B, pages_per_row] int32.
      contiguous: the table is the identity, so that the pools can be read where they lie instead of being gathered.
    """
    heads, _, _, width = key_pages.shape
    k, v = (
        (x if contiguous else x[:, page_table]).reshape(heads, q.shape[0], -1, width) for x in (key_pages, value_pages)
    )
    mask = jnp.arange(k.shape[2])[None, None, :] <= positions[:, :, None]
    return _attention(q, k, v, mask, "KBSH", heads)
