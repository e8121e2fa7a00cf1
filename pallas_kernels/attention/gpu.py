"""Pallas GPU kernel of attention over pages: the few queries of a window against the keys in use, split over programs.

XLA reads every key of the cache's allocation, used or not. Here a program takes one row, one key head with all of its
queries, and a share of the row's pages, as far as they are in use; the shares' softmaxes are merged afterwards. Lowered
by Pallas' Triton route, named explicitly; see `pallas_kernels` on why.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import dispatch

MAX_ROWS = 128  # queries of one key head: window times query heads of each
LEAST_ROWS = 16  # of a tensor core's product
PROGRAMS = 264  # two for each multiprocessor of a Hopper GPU
HIDDEN = -1e30  # finite, so that a share in which a query sees nothing gives no nan


def paged_attention(
    q: Array, key_pages: Array, value_pages: Array, page_table: Array, positions: Array, *, contiguous: bool = False,
    interpret: Any = False,
) -> Array:  # fmt: skip
    """As `reference.paged_attention`, for queries whose positions ascend.

    Raises NotImplementedError where there is no GPU, for widths and page sizes that are no powers of two, and for more
    than 128 queries of one key head. `interpret`: as of `pl.pallas_call`.
    """
    heads, _, size, width = key_pages.shape
    batch, tokens, queries, _ = q.shape
    repeats, pages = queries // heads, page_table.shape[1]
    _check(tokens * repeats, size, width, q.dtype, interpret)
    rows = max(LEAST_ROWS, 1 << (tokens * repeats - 1).bit_length())
    shares = max(1, min(pages, PROGRAMS // (batch * heads)))
    grouped = jnp.moveaxis(q.reshape(batch, tokens, heads, repeats, width), 2, 1).reshape(batch, heads, -1, width)
    grouped = jnp.pad(grouped, [(0, 0), (0, 0), (0, rows - tokens * repeats), (0, 0)])
    at = jnp.repeat(positions.astype(jnp.int32), repeats, axis=1)
    at = jnp.pad(at, [(0, 0), (0, rows - tokens * repeats)], mode="edge")
    used = jnp.minimum(at[:, -1] // size + 1, pages)
    outputs = lambda *last: pl.BlockSpec((None, None, None, *last), lambda b, h, s: (b, h, s, *(0 for _ in last)))
    shape = (batch, heads, shares, rows)
    out, top, total = pl.pallas_call(
        partial(_kernel, pages=pages, shares=shares, contiguous=contiguous),
        grid=(batch, heads, shares),
        in_specs=[
            pl.BlockSpec((1,), lambda b, h, s: (b,)), pl.BlockSpec((None, pages), lambda b, h, s: (b, 0)),
            pl.BlockSpec((None, rows), lambda b, h, s: (b, 0)),
            pl.BlockSpec((None, None, rows, width), lambda b, h, s: (b, h, 0, 0)),
            pl.BlockSpec(key_pages.shape, lambda b, h, s: (0, 0, 0, 0)),
            pl.BlockSpec(value_pages.shape, lambda b, h, s: (0, 0, 0, 0)),
        ],
        out_specs=[outputs(rows, width), outputs(rows), outputs(rows)],
        out_shape=[jax.ShapeDtypeStruct((*shape, width), jnp.float32)] + [jax.ShapeDtypeStruct(shape, jnp.float32)] * 2,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="paged_attention",
    )(used, page_table, at, grouped, key_pages, value_pages)  # fmt: skip
    merged = _merge(out, top, total)[:, :, : tokens * repeats]
    return jnp.moveaxis(merged.reshape(batch, heads, tokens, repeats, width), 1, 2).reshape(q.shape).astype(q.dtype)


def _merge(out: Array, top: Array, total: Array) -> Array:
    """Of shares [B,K,S,rows,...]: weighted sums not yet divided, greatest scores and sums of weights."""
    weight = jnp.exp(top - jnp.max(top, axis=2, keepdims=True))
    return jnp.sum(out * weight[..., None], axis=2) / jnp.sum(total * weight, axis=2)[..., None]


def _check(rows: int, size: int, width: int, dtype: Any, interpret: Any) -> None:
    dispatch.require_gpu(interpret)
    if dtype == jnp.float32 and not interpret:
        raise NotImplementedError("float32: tensor cores would round it")
    if any(n & (n - 1) or n < LEAST_ROWS for n in (size, width)):
        raise NotImplementedError(f"pages of {size}, heads of {width}: powers of two from {LEAST_ROWS} on")
    if rows > MAX_ROWS:
        raise NotImplementedError(f"{rows} queries of one key head; at most {MAX_ROWS}")


def _kernel(
    used: Any, table: Any, at: Any, q: Any, keys: Any, values: Any, out: Any, top: Any, total: Any,
    *, pages: int, shares: int, contiguous: bool,
) -> None:  # fmt: skip
    row, head, share = (pl.program_id(i) for i in range(3))
    size, width = keys.shape[2:]
    queries, positions = q[...], at[...]
    each = (used[0] + shares - 1) // shares
    first, last = share * each, jnp.minimum((share + 1) * each, used[0])

    def visit(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        best, weights, acc = carry
        page = row * pages + i if contiguous else table[i]
        key, value = keys[head, page], values[head, page]
        scores = plgpu.dot(queries, key, trans_b=True).astype(jnp.float32) * width**-0.5
        place = i * size + jnp.arange(size, dtype=jnp.int32)[None, :]
        scores = jnp.where(place <= positions[:, None], scores, HIDDEN)
        higher = jnp.maximum(best, jnp.max(scores, axis=1))
        scale, p = jnp.exp(best - higher), jnp.exp(scores - higher[:, None])
        acc = acc * scale[:, None] + plgpu.dot(p.astype(value.dtype), value).astype(jnp.float32)
        return higher, weights * scale + jnp.sum(p, axis=1), acc

    none = jnp.zeros(queries.shape[:1], jnp.float32)
    start = none + HIDDEN, none, jnp.zeros(queries.shape, jnp.float32)
    top[...], total[...], out[...] = lax.fori_loop(first, last, visit, start)


def small_case() -> tuple[Any, ...]:
    """Arguments of `paged_attention` in bfloat16: two rows of different lengths, pages in any order, two shares."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
    table = jnp.array([[3, 0, 4], [1, 5, 2]], jnp.int32)
    positions = jnp.array([[4, 5], [150, 151]], jnp.int32)
    return normal(2, 2, 4, 128), normal(2, 6, 64, 128), normal(2, 6, 64, 128), table, positions


interpreted = partial(paged_attention, interpret=True)
