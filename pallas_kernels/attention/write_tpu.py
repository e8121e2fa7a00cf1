"""Pallas TPU kernel that puts keys or values into their pages, in place.

XLA's scatter wants the pools in another layout than a kernel that reads them by pages; with both in one loop the
compiler copies every pool in every cycle. This one keeps the layout: it reads, changes and writes the few tiles of 8 or
16 tokens that a row's new tokens fall into.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

VMEM_BYTES = 32 << 20
MAX_TOKENS = 1024


def write_pages(
    pages: Array, values: Array, page_table: Array, positions: Array, valid: Array, *, interpret: Any = False
) -> Array:
    """As `reference.write_pages`, for rows whose positions ascend by one and whose pages are nobody else's.

    Raises NotImplementedError for head widths that are neither multiples of 128 nor 64, pages that are no multiple of
    a tile, other types than float32 and bfloat16, and more than 1,024 tokens.
    """
    _check(pages, values)
    kv_heads, _, page_size, width = pages.shape
    batch, tokens = positions.shape
    tile = 32 // pages.dtype.itemsize
    inside = valid & (positions >= 0) & (positions < page_size * page_table.shape[1])
    plan = _plan(positions, inside, page_table, page_size, tile)
    steps = plan.run.size // batch
    flat = jnp.where(inside[..., None, None], values, 0).astype(pages.dtype).reshape(batch, tokens, -1)
    tiles = pl.BlockSpec(
        (kv_heads, None, tile, width), lambda b, j, page, sub, *_: (0, page[b * steps + j], sub[b * steps + j], 0)
    )
    row = lambda *shape: pl.BlockSpec((None, *shape), lambda b, j, *_: (b, 0, 0))
    return pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(batch, steps),
            in_specs=[row(tokens, kv_heads * width), row(1, tokens), tiles],
            out_specs=tiles,
        ),
        out_shape=jax.ShapeDtypeStruct(pages.shape, pages.dtype),
        input_output_aliases={6: 0},
        # In this order: neighbouring steps may share a tile.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        interpret=interpret,
        name="write_pages",
    )(*plan, flat, jnp.where(inside, positions, -1)[:, None], pages)


def _check(pages: Array, values: Array) -> None:
    if pages.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(f"pages in {pages.dtype}; only float32 or bfloat16")
    if pages.shape[-1] % 128 and pages.shape[-1] != 64:
        raise NotImplementedError(f"head width {pages.shape[-1]} is neither a multiple of 128 nor 64")
    tile = 32 // pages.dtype.itemsize
    if pages.shape[2] % tile:
        raise NotImplementedError(f"pages of {pages.shape[2]} tokens; only multiples of {tile} in {pages.dtype}")
    if values.shape[1] > MAX_TOKENS:
        raise NotImplementedError(f"{values.shape[1]} tokens a row; at most {MAX_TOKENS}")


class _Plan(NamedTuple):
    """What every grid step changes, [B * steps] int32."""

    page: Array
    sub: Array  # which tile of the page
    base: Array  # position of the tile's first token
    run: Array  # whether the step does anything: if not, it names a neighbour's tile, which then stays in place


def _plan(positions: Array, inside: Array, page_table: Array, page_size: int, tile: int) -> _Plan:
    """A step without a token must not touch a tile of its own: another row's step may be changing that one."""
    rows = jnp.arange(positions.shape[0])[:, None]
    steps = (positions.shape[1] - 1 + tile - 1) // tile + 1  # tiles that so many tokens can fall into
    base = (positions[:, :1] // tile + jnp.arange(steps)[None]) * tile
    has_token = inside[:, None] & (positions[:, None] // tile == base[..., None] // tile)
    active = has_token.any(-1).reshape(-1)
    page = page_table[rows, jnp.clip(base // page_size, 0, page_table.shape[1] - 1)]
    sub = jnp.clip(base % page_size // tile, 0, page_size // tile - 1)
    before = lax.cummax(jnp.where(active, jnp.arange(active.size), -1))
    source = jnp.where(before < 0, jnp.argmax(active), before)
    # With no token at all, every step writes one tile back as it was: that tile is what is flushed at the end.
    run = active | ~active.any()
    page, sub, base = (x.reshape(-1)[source] for x in (page, sub, base))
    return _Plan(*(x.astype(jnp.int32) for x in (page, sub, base, run)))


def _kernel(page: Any, sub: Any, base: Any, run: Any, values: Any, positions: Any, old: Any, new: Any) -> None:
    step = pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)
    kv_heads, tile, width = new.shape

    @pl.when(run[step] > 0)
    def write() -> None:
        token = base[step] + lax.broadcasted_iota(jnp.int32, (tile, positions.shape[1]), 0)
        chosen = jnp.where(token == positions[...], 1.0, 0.0)  # [tile, T]; a product with it moves rows, exactly
        exact = lax.Precision.HIGHEST if values.dtype == jnp.float32 else lax.Precision.DEFAULT
        moved = jnp.dot(chosen.astype(values.dtype), values[...], precision=exact, preferred_element_type=jnp.float32)
        is_new = jnp.max(chosen, axis=1, keepdims=True) > 0
        for head in range(kv_heads):
            mine = moved[:, head * width : (head + 1) * width]
            new[head] = jnp.where(is_new, mine, old[head].astype(jnp.float32)).astype(new.dtype)
