"""Attention against torch, and over pages against itself."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from pallas_kernels.attention import attention, causal_attention, paged_attention, write_pages
from tests.helpers import assert_close

Array = np.ndarray[Any, Any]
HEADS, WIDTH = 6, 8


def qkv(batch: int, queries: int, keys: int, kv_heads: int, seed: int = 0) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(seed)
    shapes = ((batch, queries, HEADS, WIDTH), *[(batch, keys, kv_heads, WIDTH)] * 2)
    q, k, v = (rng.normal(size=s).astype(np.float32) for s in shapes)
    return q, k, v


def torch_attention(q: Array, k: Array, v: Array, mask: Array) -> torch.Tensor:
    q_, k_, v_ = (torch.tensor(x).transpose(1, 2) for x in (q, k, v))
    allowed = torch.tensor(mask)[:, None]
    out = torch.nn.functional.scaled_dot_product_attention(q_, k_, v_, attn_mask=allowed, enable_gqa=True)
    return out.transpose(1, 2)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_grouped_heads_as_torch(kv_heads: int) -> None:
    q, k, v = qkv(2, 5, 9, kv_heads)
    mask = np.random.default_rng(1).random((2, 5, 9)) < 0.5
    mask[..., 0] = True
    assert_close(attention(q, k, v, jnp.asarray(mask)), torch_attention(q, k, v, mask), 1e-6)


def test_causal_as_torch() -> None:
    q, k, v = qkv(2, 7, 7, 2)
    mask = np.tri(7, dtype=bool)[None].repeat(2, axis=0)
    assert_close(causal_attention(q, k, v), torch_attention(q, k, v, mask), 1e-6)


def test_causal_in_packed_rows_as_torch() -> None:
    q, k, v = qkv(2, 9, 9, 2)
    ids = np.array([[1, 1, 1, 2, 2, 2, 2, 3, 3], [1, 1, 1, 1, 1, 2, 2, 0, 0]], np.int32)
    mask = np.tri(9, dtype=bool)[None] & (ids[:, :, None] == ids[:, None, :])
    found = causal_attention(q, k, v, segment_ids=jnp.asarray(ids))
    assert_close(found, torch_attention(q, k, v, mask), 1e-6)


def test_cudnn_says_why_it_cannot() -> None:
    q, k, v = qkv(1, 4, 4, 2)
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU"):
        causal_attention(q, k, v, implementation="cudnn")


def test_scores_beyond_the_range_of_an_exponential() -> None:
    q, k, v = qkv(1, 4, 4, 2)
    mask = np.tri(4, dtype=bool)[None]
    assert_close(causal_attention(100 * q, 10 * k, v), torch_attention(100 * q, 10 * k, v, mask), 1e-5)


def test_pages_in_any_order_hold_the_same_keys() -> None:
    """Rows of different lengths, written a few at a time to shuffled pages, read by queries in the middle."""
    size, per_row, kv_heads = 4, 3, 2
    q, k, v = qkv(2, 3, size * per_row, kv_heads)
    table = jnp.asarray(np.random.default_rng(2).permutation(2 * per_row).reshape(2, per_row))
    pools = [jnp.full((kv_heads, 2 * per_row, size, WIDTH), 1e3) for _ in range(2)]  # what was there before
    for start in (0, 5, 7):
        at = np.arange(start, min(start + 5, 12))[None].repeat(2, axis=0)
        pools = [
            write_pages(pool, x[:, at[0]], table, jnp.asarray(at), jnp.ones(at.shape, bool))
            for pool, x in zip(pools, (k, v), strict=True)
        ]
    positions = np.array([[2, 3, 4], [9, 10, 11]])
    mask = np.arange(12)[None, None] <= positions[..., None]
    got = paged_attention(q, pools[0], pools[1], table, jnp.asarray(positions))
    assert_close(got, torch_attention(q, k, v, mask), 1e-6)


def test_contiguous_pages_are_read_where_they_lie() -> None:
    q, k, v = qkv(2, 3, 12, 2)
    table = jnp.arange(6).reshape(2, 3)
    at = np.arange(12)[None].repeat(2, axis=0)
    pools = [
        write_pages(jnp.zeros((2, 6, 4, WIDTH)), x, table, jnp.asarray(at), jnp.ones((2, 12), bool)) for x in (k, v)
    ]
    positions = jnp.asarray([[2, 3, 4], [9, 10, 11]])
    got, want = (paged_attention(q, *pools, table, positions, contiguous=flag) for flag in (True, False))
    assert_close(got, want, 1e-7)


def test_only_valid_tokens_inside_the_row_are_written() -> None:
    size, table = 4, jnp.asarray([[2, 0]])
    values = jnp.ones((1, 4, 1, 1))
    positions = jnp.asarray([[0, 7, 8, -1]])  # the last two lie outside the row's two pages
    pages = write_pages(jnp.zeros((1, 3, size, 1)), values, table, positions, jnp.ones((1, 4), bool))
    assert np.argwhere(np.asarray(pages)[0, ..., 0]).tolist() == [[0, 3], [2, 0]]
    untouched = write_pages(jnp.zeros((1, 3, size, 1)), values, table, positions, jnp.zeros((1, 4), bool))
    assert not np.asarray(untouched).any()
