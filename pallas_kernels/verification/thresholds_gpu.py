"""Pallas GPU kernels of the search for a threshold: near the largest logit first, else a launch for each digit.

XLA makes three kernels of a digit, of which two read all logits, since it sums for no more than some thresholds at a
time. Here a program takes a row's share of the vocabulary; it first decides the digit before, from the sums that all
shares have left, and then sums for the next. Where `nearby_gpu` has found the threshold of a row, its programs do
nothing. Lowered by Pallas' Triton route, named explicitly; see `pallas_kernels` on why.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.verification import nearby_gpu
from pallas_kernels.verification.nearby_gpu import Near
from pallas_kernels.verification.sums_gpu import Walk, float_of, require_logits, sums

BITS = 3  # of a digit: seven sums for each logit read
CHUNK, UNROLL, WARPS = 512, 4, 4  # loads of 16 bytes a thread, four of them before the first is used
PROGRAMS, SHARES = 1024, 8  # in all and of a row, at least, where there are logits enough for them


@partial(jax.jit, static_argnames=("bits", "share", "chunk", "unroll", "warps", "room", "interpret"))
def threshold(
    logits: Array, top: Array | None, wanted: Array, *, bits: int = BITS, share: int | None = None, chunk: int = CHUNK,
    unroll: int = UNROLL, warps: int = WARPS, room: int = nearby_gpu.ROOM, interpret: Any = False,
) -> Array:  # fmt: skip
    """As `thresholds.threshold`, but that sums are added in another order; exp(logits - top) must not overflow.

    The order depends on how many rows there are and on a row's own logits, and on nothing else of the others.

    Args:
      bits: of a digit. share: logits of a program, made whole steps of `unroll` chunks; None: by the number of rows.
      chunk: logits added at once, a power of two. warps: of a program. room: of `nearby_gpu.settle`.
      interpret: as of `pl.pallas_call`.

    Raises NotImplementedError where there is no GPU, for no logits, and for logits that are not float32.
    """
    require_logits(logits, interpret)
    rows, flat = logits.reshape(-1, logits.shape[-1]), lambda x: x.astype(jnp.float32).reshape(-1)
    share = share or pl.cdiv(rows.shape[1], max(SHARES, PROGRAMS // len(rows)))
    walk = Walk(chunk, chunk * unroll, pl.cdiv(share, chunk * unroll), weighed=top is not None)
    largest = flat(rows.max(-1) if top is None else top)
    mass = nearby_gpu.summed(rows, largest, walk, warps=warps, interpret=interpret)
    known = nearby_gpu.between(largest, flat(wanted) * (mass[:, -1] if walk.weighed else 1.0), mass)
    near, sure = nearby_gpu.settle(rows, known, weighed=walk.weighed, room=room, interpret=interpret)
    found = _digits(_Digit(32, bits), walk, rows, known, sure, warps, interpret)
    return lax.bitcast_convert_type(jnp.where(sure > 0, near, found), jnp.uint32).reshape(wanted.shape)


class _Digit(NamedTuple):
    """Of a threshold: `bits` bits at `shift`, or what is left. A sweep sums for each of its values but 0."""

    shift: int
    bits: int

    @property
    def values(self) -> range:
        return range(1, 1 << min(self.bits, 32 - self.shift))


def _digits(digit: _Digit, walk: Walk, rows: Array, known: Near, sure: Array, warps: int, interpret: Any) -> Array:
    """The thresholds' bits [rows] int32, of rows that are not sure yet."""
    past: tuple[Array, ...] = ()
    for shift in range(31 // digit.bits * digit.bits, -1, -digit.bits):
        digit = digit._replace(shift=shift)
        past = _sweep(digit, walk, (rows, known.top, known.wanted, sure), past, warps, interpret)
    last = lambda found, sums, wanted: _decide(digit, found, sums, wanted)
    return jax.vmap(last)(past[0], past[1], known.wanted)


def _sweep(
    digit: _Digit, walk: Walk, given: tuple[Array, ...], past: tuple[Array, ...], warps: int, interpret: Any
) -> tuple[Array, ...]:
    """Bits [rows] int32 that the sums of the digit before decide, and this one's sums [rows,shares,values]."""
    count, vocab_size = given[0].shape
    shares, values = walk.shares(vocab_size), 1 << digit.bits
    one = pl.BlockSpec((1,), lambda r, s: (r,))
    before = [one, pl.BlockSpec((None, shares, values), lambda r, s: (r, 0, 0))]
    sums_like = jax.ShapeDtypeStruct((count, shares, values), jnp.float32)
    now: tuple[Array, ...] = pl.pallas_call(
        partial(_kernel, digit, walk),
        grid=(count, shares),
        in_specs=[pl.BlockSpec((None, vocab_size), lambda r, s: (r, 0)), one, one, one, *before[: len(past)]],
        out_specs=[one, pl.BlockSpec((None, None, values), lambda r, s: (r, s, 0))],
        out_shape=[jax.ShapeDtypeStruct((count,), jnp.int32), sums_like],
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="threshold_digit",
    )(*given, *past)
    return now


def _kernel(digit: _Digit, walk: Walk, logits: Any, top: Any, wanted: Any, sure: Any, *refs: Any) -> None:
    *past, now_found, now_sums = refs
    share = pl.program_id(1)  # which cannot be asked for in a branch that is interpreted
    pl.when(sure[0] == 0)(lambda: _sum(digit, walk, share, logits, top[0], wanted[0], past, now_found, now_sums))


def _sum(
    digit: _Digit, walk: Walk, share: Array, logits: Any, top: Array, wanted: Array, past: list[Any], now_found: Any,
    now_sums: Any,
) -> None:  # fmt: skip
    before = digit._replace(shift=digit.shift + digit.bits)
    found = _decide(before, past[0][0], past[1][...], wanted) if past else jnp.int32(0)
    now_found[0] = found  # every share of a row writes the same
    least = [float_of(found + np.uint32(value << digit.shift).astype(np.int32)) for value in digit.values]
    for value, total in zip(digit.values, sums(walk, share, logits, top, least), strict=True):
        now_sums[value] = total


def _decide(digit: _Digit, found: Array, sums: Array, wanted: Array) -> Array:
    """The threshold's bits so far, int32, with this digit: as great as still leaves enough. sums: [shares,values]."""
    value = jnp.arange(sums.shape[1], dtype=jnp.int32)
    held = (jnp.sum(sums, axis=0) >= wanted) & (value >= 1) & (value <= digit.values[-1])  # others were not written
    return found + (jnp.sum(held.astype(jnp.int32)) << digit.shift)


def small_case() -> tuple[Any, ...]:
    """Arguments of `threshold`: rows of some shares of some steps, logits of both signs, a third of them the same.

    In every other row all lie near the threshold.
    """
    rng = np.random.default_rng(3)  # in no row is a sum closer to what is wanted than by a 30,000th
    drawn = np.round(rng.normal(size=(128, 1, 20000)) * 4, 1).astype(np.float32)
    drawn[1::2] /= 64
    logits = jnp.asarray(drawn)
    return logits, logits.max(-1), jnp.full((128, 1), 0.9, jnp.float32)


interpreted = partial(threshold, interpret=True)
