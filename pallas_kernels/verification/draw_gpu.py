"""Pallas GPU kernel that draws a token: the logits are read once, and noise is made only around those that are kept.

XLA makes the noise of every logit, some hundred instructions for each, though filters leave few of them. Here a program
is one warp, which walks its share of a row by steps; it reads a step's logits for whether any is kept, and only then
reads them again, out of the cache, and adds their noise. Of each of its lanes it holds the best sum and where that was,
and XLA takes the best of all programs of a row. One warp needs no barrier to agree that nothing is kept. Lowered by
Pallas' Triton route, named explicitly; see `pallas_kernels` on why.
"""

from __future__ import annotations

from functools import partial, reduce
from operator import or_
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.verification import threefry
from pallas_kernels.verification.sampling import Sampling
from pallas_kernels.verification.sums_gpu import float_of, require_logits
from pallas_kernels.verification.thresholds import ordered_bits

CHUNK, UNROLL, WARPS = 128, 4, 1  # loads of 16 bytes a thread, four of them before the first is used
PROGRAMS, SHARES = 8192, 32  # in all and of a row, at least, where there are logits enough for them
NEVER = np.float32(-np.inf)


@partial(jax.jit, static_argnames=("share", "chunk", "unroll", "warps", "interpret"))
def draw(
    scaled: Array, least: Array, keys: Array, sampling: Sampling, token_ids: Array | None = None, *,
    share: int | None = None, chunk: int = CHUNK, unroll: int = UNROLL, warps: int = WARPS, interpret: Any = False,
) -> Array:  # fmt: skip
    """As `drawing.draw`, but that a NaN is never drawn; the device may round a logarithm of the noise otherwise.

    Args:
      share: logits of a program, made whole steps of `unroll` chunks; None: by the number of rows.
      chunk: logits that get their noise at once, a power of two. warps: of a program. interpret: of `pl.pallas_call`.

    Raises NotImplementedError where there is no GPU, for no logits, and for logits that are not float32.
    """
    require_logits(scaled, interpret)
    rows, window = scaled.reshape(-1, scaled.shape[-1]), scaled.shape[1]
    share = share or pl.cdiv(rows.shape[1], max(SHARES, PROGRAMS // len(rows)))
    walk = _Walk(chunk, chunk * unroll, pl.cdiv(share, chunk * unroll))
    bits = lax.bitcast_convert_type(least, jnp.int32).reshape(-1)
    sampled, ids = jnp.repeat(sampling.sampled, window), () if token_ids is None else (token_ids,)
    best, where = _call(walk, rows, bits, keys.reshape(-1, 2), sampled, ids, warps, interpret)
    first = jnp.where(best == best.max(1, keepdims=True), where, rows.shape[1]).min(1)
    return first.reshape(least.shape)


class _Walk(NamedTuple):
    """A program takes `steps`, each of some chunks."""

    chunk: int
    step: int  # logits
    steps: int


def _call(
    walk: _Walk, rows: Array, least: Array, keys: Array, sampled: Array, ids: tuple[Array, ...], warps: int,
    interpret: Any,
) -> tuple[Array, Array]:  # fmt: skip
    """The best sum of each share [rows,shares] float32, and the column of the first that has it, int32."""
    count, vocab_size = rows.shape
    shares = pl.cdiv(vocab_size, walk.steps * walk.step)
    one, mine = pl.BlockSpec((1,), lambda r, s: (r,)), pl.BlockSpec((None, 1), lambda r, s: (r, s))
    row, key = pl.BlockSpec((None, vocab_size), lambda r, s: (r, 0)), pl.BlockSpec((None, 2), lambda r, s: (r, 0))
    found: tuple[Array, Array] = pl.pallas_call(
        partial(_kernel, walk),
        grid=(count, shares),
        in_specs=[row, one, key, one, *(pl.BlockSpec((vocab_size,), lambda r, s: (0,)) for _ in ids)],
        out_specs=(mine, mine),
        out_shape=tuple(jax.ShapeDtypeStruct((count, shares), dtype) for dtype in (jnp.float32, jnp.int32)),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="draw",
    )(rows, least, keys, sampled.astype(jnp.int32), *ids)
    return found


def _kernel(walk: _Walk, logits: Any, least: Any, keys: Any, sampled: Any, *refs: Any) -> None:
    *ids, best_out, where_out = refs
    row = _Row(logits, float_of(least[0]), (keys[0], keys[1]), sampled[0] > 0, ids[0] if ids else None)
    start, size = pl.program_id(1) * walk.steps, logits.shape[0]
    stop = jnp.minimum(start + walk.steps, pl.cdiv(size, walk.step))
    nothing = jnp.full(walk.chunk, NEVER), jnp.zeros(walk.chunk, jnp.int32)  # column 0 where all are -inf
    best, where = lax.fori_loop(start, stop, partial(_step, walk, row), nothing)
    best_out[0] = top = jnp.max(best)
    where_out[0] = jnp.min(jnp.where(best == top, where, size))


class _Row(NamedTuple):
    logits: Any  # [V]
    least: Array  # a logit that is less is not kept
    key: tuple[Array, Array]
    sampled: Array  # whether there is noise
    token_ids: Any  # [V] or None

    def load(self, ref: Any, at: Array, beyond: Any) -> Array:
        return plgpu.load(ref.at[at], mask=at < self.logits.shape[0], other=beyond)

    def noise(self, at: Array) -> Array:
        tokens = at if self.token_ids is None else self.load(self.token_ids, at, 0)
        return threefry.gumbel(threefry.bits(self.key, tokens.astype(jnp.uint32)))


def _step(walk: _Walk, row: _Row, index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
    """The best sum of each lane and where it was, both [chunk], with one step more."""
    first = index * walk.step + jnp.arange(walk.chunk, dtype=jnp.int32)
    chunks = walk.step // walk.chunk
    kept = [row.load(row.logits, first + i * walk.chunk, NEVER) >= row.least for i in range(chunks)]
    look = lambda carry: lax.fori_loop(0, chunks, lambda i, c: _better(row, first + i * walk.chunk, c), carry)
    return lax.cond(_any(reduce(or_, kept)), look, lambda carry: carry, carry)


def _better(row: _Row, at: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
    """As `_step`, with the chunk at some columns."""
    x = row.load(row.logits, at, NEVER)
    kept = x >= row.least
    noise = lax.cond(row.sampled & _any(kept), row.noise, lambda at: jnp.zeros(at.shape, jnp.float32), at)
    best, where = carry
    value = jnp.where(kept, x, NEVER) + noise  # which is finite
    better = value > best  # and not where it is the same: the first stays
    return jnp.where(better, value, best), jnp.where(better, at, where)


def _any(x: Array) -> Array:
    return jnp.max(x.astype(jnp.int32)) > 0


def small_case(some: bool = False) -> tuple[Any, ...]:
    """Arguments of `draw`: sampled rows of which all, some, one and none are kept, and a greedy one, of some shares.

    some: the columns are some tokens of a larger vocabulary.
    """
    rng = np.random.default_rng(1)  # in no row is the best within a thousandth of the second
    scaled = jnp.asarray(rng.normal(size=(5, 2, 20000)) * 4, jnp.float32)
    top = scaled.max(-1)
    all_kept, none = jnp.full(2, NEVER), jnp.full(2, -NEVER)
    least = jnp.stack([all_kept, top[1] - 5, top[2], none, all_kept])
    keys = jnp.asarray(rng.integers(0, 2**32, (5, 2, 2), dtype=np.uint32))
    heat, off = jnp.asarray([1, 1, 1, 1, 0], jnp.float32), jnp.zeros(5, jnp.float32)
    sampling = Sampling(heat, off, off.astype(jnp.int32), off, jnp.zeros((5, 0), jnp.int32), jnp.zeros((5, 2), bool))
    return scaled, ordered_bits(least), keys, sampling, 3 * jnp.arange(20000, dtype=jnp.int32) if some else None


interpreted = partial(draw, interpret=True)
