"""Pallas TPU kernel of attention over a paged cache: a window of queries, or a chunk of prompt.

Letters as in `reference`; a query token and one of the R query heads of its key head make a row. A grid step holds all
key heads and the rows of up to `MAX_ROWS / R` tokens; it copies the pages that they see, a few hundred keys at a time,
while it computes on those before (the first ones of a step while the step before computes). Pages that nobody sees are
not read. Softmax online, in float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

MAX_KEYS = 512  # copied and computed at a time
MAX_ROWS = 512  # of one key head
BUFFER_BYTES = 8 << 20  # for keys and values, being computed on and being copied
SCORE_BYTES = 4 << 20
VMEM_BYTES = 40 << 20
MASKED = -1e30  # finite, so that a row whose keys are all masked stays a number


def paged_attention(
    q: Array, key_pages: Array, value_pages: Array, page_table: Array, positions: Array, *, interpret: Any = False
) -> Array:
    """As `reference.paged_attention` for positions >= 0; `interpret`: as of `pl.pallas_call`.

    Raises NotImplementedError for head widths that are neither multiples of 128 nor 64 (which leaves half of the lanes
    empty: the compiler may copy the pools to get there), pages that are no multiple of the memory's rows (8 in float32,
    16 in bfloat16), and types that differ.
    """
    _check(q, key_pages, value_pages)
    batch, tokens, heads, width = q.shape
    kv_heads, _, page_size, _ = key_pages.shape
    repeats = heads // kv_heads
    pages = _pages_at_once(key_pages, page_table.shape[1])
    step = _tokens_at_once(tokens, repeats, kv_heads, pages * page_size)
    steps = pl.cdiv(tokens, step)
    padding = steps * step - tokens

    positions = jnp.clip(jnp.pad(positions, [(0, 0), (0, padding)]), 0, page_table.shape[1] * page_size - 1)
    used = positions.reshape(batch, steps, step).max(-1) // page_size + 1
    grouped = jnp.pad(q, [(0, 0), (0, padding), (0, 0), (0, 0)]).reshape(batch, -1, kv_heads, repeats, width)
    grouped = jnp.moveaxis(grouped, 2, 1).reshape(batch, kv_heads, -1, width)
    rows = step * repeats
    block = pl.BlockSpec((None, kv_heads, rows, width), lambda b, t, *_: (b, 0, t, 0))
    buffer = pltpu.VMEM((2, kv_heads, pages, page_size, width), key_pages.dtype)
    out = pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, steps),
            in_specs=[
                block, pl.BlockSpec((None, rows, 1), lambda b, t, *_: (b, t, 0)),
                pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=block,
            scratch_shapes=[
                _Buffers(buffer, buffer, pltpu.SemaphoreType.DMA((2, 2)), pltpu.SMEM((1,), jnp.int32)),
                _Softmax(
                    pltpu.VMEM((kv_heads, rows, 1), jnp.float32), pltpu.VMEM((kv_heads, rows, 1), jnp.float32),
                    pltpu.VMEM((kv_heads, rows, width), jnp.float32),
                ),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(grouped.shape, q.dtype),
        # In this order: every step begins what the next one waits for.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        interpret=interpret,
        name="paged_attention",
    )(page_table, used, grouped, jnp.repeat(positions, repeats, axis=1)[..., None], key_pages, value_pages)  # fmt: skip
    out = jnp.moveaxis(out.reshape(batch, kv_heads, -1, repeats, width), 1, 2)
    return out.reshape(batch, -1, heads, width)[:, :tokens]


def _check(q: Array, key_pages: Array, value_pages: Array) -> None:
    if not q.dtype == key_pages.dtype == value_pages.dtype or q.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(f"{q.dtype} queries, {key_pages.dtype} keys; only float32 or bfloat16 throughout")
    if q.shape[-1] % 128 and q.shape[-1] != 64:
        raise NotImplementedError(f"head width {q.shape[-1]} is neither a multiple of 128 nor 64")
    lines = 32 // q.dtype.itemsize
    if key_pages.shape[2] % lines:
        raise NotImplementedError(f"pages of {key_pages.shape[2]} tokens; only multiples of {lines} in {q.dtype}")


def _pages_at_once(key_pages: Array, pages_per_row: int) -> int:
    heads, _, size, width = key_pages.shape
    fitting = BUFFER_BYTES // (4 * heads * size * width * key_pages.dtype.itemsize)
    return max(1, min(fitting, MAX_KEYS // size, pages_per_row))


def _tokens_at_once(tokens: int, repeats: int, kv_heads: int, keys: int) -> int:
    """All of them, or a multiple of 16: what a block of a larger array must be, whatever the type."""
    rows = min(MAX_ROWS, SCORE_BYTES // (4 * kv_heads * keys))
    fitting = max(rows // repeats // 16, 1) * 16
    return tokens if tokens <= fitting else fitting


class _Buffers(NamedTuple):
    """Two slots for keys and values: one is computed on while the other is filled."""

    keys: Any  # [2,K,pages,page_size,H]
    values: Any
    arrived: Any  # DMA semaphores [2 slots, keys and values]
    slot: Any  # [1] int32: the slot that holds the first keys of this grid step


class _Softmax(NamedTuple):
    """The online softmax of the rows so far."""

    top: Any  # [K,rows,1]
    total: Any  # [K,rows,1]
    out: Any  # [K,rows,H], not divided by the total yet


def _kernel(
    table: Any, used: Any, q: Any, positions: Any, keys: Any, values: Any, out: Any,
    buffers: _Buffers, softmax: _Softmax,
) -> None:  # fmt: skip
    row, step = pl.program_id(0), pl.program_id(1)
    rows, steps = pl.num_programs(0), pl.num_programs(1)
    pages = buffers.keys.shape[2]
    blocks = lax.div(used[row, step] + pages - 1, pages)

    def copies(row: Array, step: Array, block: Array, slot: Array, act: Any) -> None:
        """Starts or awaits the copies of one block: only of its pages that are in use."""

        def one(i: Array, _: None) -> None:
            page = table[row, block * pages + i]
            for n, (pool, buffer) in enumerate(((keys, buffers.keys), (values, buffers.values))):
                act(pltpu.make_async_copy(pool.at[:, page], buffer.at[slot, :, i], buffers.arrived.at[slot, n]))

        lax.fori_loop(0, jnp.minimum(used[row, step] - block * pages, pages), one, None)

    @pl.when((row == 0) & (step == 0))
    def begin() -> None:
        buffers.slot[0] = 0
        copies(row, step, jnp.int32(0), jnp.int32(0), lambda copy: copy.start())

    softmax.top[...] = jnp.full(softmax.top.shape, MASKED, jnp.float32)
    softmax.total[...] = jnp.zeros(softmax.total.shape, jnp.float32)
    softmax.out[...] = jnp.zeros(softmax.out.shape, jnp.float32)
    first = buffers.slot[0]

    def compute(block: Array, _: None) -> None:
        slot = (first + block) & 1
        last = block + 1 == blocks
        next_step = jnp.where(last, jnp.where(step + 1 == steps, 0, step + 1), step)
        next_row = jnp.where(last & (step + 1 == steps), row + 1, row)

        @pl.when(next_row < rows)
        def prefetch() -> None:
            copies(next_row, next_step, jnp.where(last, 0, block + 1), 1 - slot, lambda copy: copy.start())

        copies(row, step, block, slot, lambda copy: copy.wait())
        _clear(buffers.values, slot, used[row, step] - block * pages)
        _accumulate(q[...], positions[...], buffers, slot, block, softmax)

    lax.fori_loop(0, blocks, compute, None)
    buffers.slot[0] = (first + blocks) & 1
    out[...] = (softmax.out[...] / softmax.total[...]).astype(out.dtype)


def _clear(values: Any, slot: Array, used: Array) -> None:
    """Zeros in the pages that were not copied: their weights are zero, but zero times NaN is not."""

    def one(i: Array, _: None) -> None:
        values[slot, :, i] = jnp.zeros((values.shape[1], *values.shape[3:]), values.dtype)

    lax.fori_loop(jnp.minimum(used, values.shape[2]), values.shape[2], one, None)


def _accumulate(q: Array, positions: Array, buffers: _Buffers, slot: Array, block: Array, softmax: _Softmax) -> None:
    k, v = (x[slot].reshape(x.shape[1], -1, x.shape[-1]) for x in (buffers.keys, buffers.values))
    scores = _dot(q, k, 2) * q.shape[-1] ** -0.5
    at = block * k.shape[1] + lax.broadcasted_iota(jnp.int32, (1, positions.shape[0], k.shape[1]), 2)
    scores = jnp.where(at <= positions[None], scores, MASKED)
    top = jnp.maximum(softmax.top[...], jnp.max(scores, axis=2, keepdims=True))
    weights = jnp.exp(scores - top)
    before = jnp.exp(softmax.top[...] - top)
    softmax.top[...] = top
    softmax.total[...] = softmax.total[...] * before + jnp.sum(weights, axis=2, keepdims=True)
    softmax.out[...] = softmax.out[...] * before + _dot(weights.astype(v.dtype), v, 1)


def _dot(a: Array, b: Array, axis: int) -> Array:
    """[K,rows,.] by [K,keys,H], over the last axis of `a` and `axis` of `b`."""
    exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(a, b, (((2,), (axis,)), ((0,), (0,))), precision=exact, preferred_element_type=jnp.float32)
