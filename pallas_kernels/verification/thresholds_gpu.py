"""Pallas GPU kernels of the search for a threshold: a launch for each digit, in which every logit is read once.

XLA makes three kernels of a digit, of which two read all logits, since it sums for no more than some thresholds at a
time. Here a program takes a row's share of the vocabulary; it first decides the digit before, from the sums that all
shares have left, and then sums for the next. It walks its share by chunks, which it adds to a chunk of sums for each
value of the digit, so that threads meet at the end only. What a logit costs for each value is two instructions: one
makes 1 or 0 of a comparison of floats, one multiplies and adds. Lowered by Pallas' Triton route, named explicitly; see
`pallas_kernels.gated_delta.gpu` on why.
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

from pallas_kernels import dispatch

BITS = 3  # of a digit: seven sums for each logit read
CHUNK, UNROLL, WARPS = 512, 4, 4  # loads of 16 bytes a thread, four of them before the first is used
PROGRAMS, SHARES = 1024, 8  # in all and of a row, at least, where there are logits enough for them
SIGN, REST = np.int32(-(2**31)), np.int32(2**31 - 1)
BOTTOM = np.int32(0x7F800000) ^ np.int32(-1)  # the order of -infinity: below it are no numbers


def threshold(
    logits: Array, top: Array | None, wanted: Array, *, bits: int = BITS, share: int | None = None, chunk: int = CHUNK,
    unroll: int = UNROLL, warps: int = WARPS, interpret: Any = False,
) -> Array:  # fmt: skip
    """As `thresholds.threshold`, but that sums are added in another order; exp(logits - top) must not overflow.

    The order depends on how many rows there are, and on nothing else of them.

    Args:
      bits: of a digit. share: logits of a program, made whole steps of `unroll` chunks; None: by the number of rows.
      chunk: logits added at once, a power of two. warps: of a program. interpret: as of `pl.pallas_call`.

    Raises NotImplementedError where there is no GPU, for no logits, and for logits that are not float32.
    """
    dispatch.require_gpu(interpret)
    if logits.dtype != jnp.float32:
        raise NotImplementedError(f"logits must be float32, not {logits.dtype}")
    if not logits.size:
        raise NotImplementedError("no logits")
    rows, flat = logits.reshape(-1, logits.shape[-1]), lambda x: x.astype(jnp.float32).reshape(-1)
    share = share or pl.cdiv(rows.shape[1], max(SHARES, PROGRAMS // len(rows)))
    digit = _Digit(32, bits, chunk, chunk * unroll, pl.cdiv(share, chunk * unroll), weighed=top is not None)
    past: tuple[Array, ...] = ()
    for shift in range(31 // bits * bits, -1, -bits):
        digit = digit._replace(shift=shift)
        past = _sweep(digit, rows, flat(wanted if top is None else top), flat(wanted), past, warps, interpret)
    found, sums = past
    found = jax.vmap(partial(_decide, digit))(found, sums, flat(wanted))
    return lax.bitcast_convert_type(found, jnp.uint32).reshape(wanted.shape)


class _Digit(NamedTuple):
    """A sweep sums for each value of the digit at `shift`, of `bits` bits or what is left; a program takes `steps`."""

    shift: int
    bits: int
    chunk: int
    step: int  # logits: some chunks
    steps: int
    weighed: bool

    @property
    def values(self) -> range:
        return range(1, 1 << min(self.bits, 32 - self.shift))


def _sweep(
    digit: _Digit, rows: Array, top: Array, wanted: Array, past: tuple[Array, ...], warps: int, interpret: Any
) -> tuple[Array, ...]:
    """Bits [rows] int32 that the sums of the digit before decide, and this one's sums [rows,shares,values]."""
    count, vocab_size = rows.shape
    shares, values = pl.next_power_of_2(pl.cdiv(vocab_size, digit.steps * digit.step)), 1 << digit.bits
    one = pl.BlockSpec((1,), lambda r, s: (r,))
    before = [one, pl.BlockSpec((None, shares, values), lambda r, s: (r, 0, 0))]
    sums = jax.ShapeDtypeStruct((count, shares, values), jnp.float32)
    now: tuple[Array, ...] = pl.pallas_call(
        partial(_kernel, digit),
        grid=(count, shares),
        in_specs=[pl.BlockSpec((None, vocab_size), lambda r, s: (r, 0)), one, one, *before[: len(past)]],
        out_specs=[one, pl.BlockSpec((None, None, values), lambda r, s: (r, s, 0))],
        out_shape=[jax.ShapeDtypeStruct((count,), jnp.int32), sums],
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="threshold_digit",
    )(rows, top, wanted, *past)
    return now


def _kernel(digit: _Digit, logits: Any, top: Any, wanted: Any, *refs: Any) -> None:
    *past, now_found, now_sums = refs
    before = digit._replace(shift=digit.shift + digit.bits)
    found = _decide(before, past[0][0], past[1][...], wanted[0]) if past else jnp.int32(0)
    now_found[0] = found  # every share of a row writes the same
    least = [_float(found + np.uint32(value << digit.shift).astype(np.int32)) for value in digit.values]
    add = partial(_add, digit, logits, top[0], least)
    start, whole = pl.program_id(1) * digit.steps, logits.shape[0] // digit.step
    stop = jnp.minimum(start + digit.steps, pl.cdiv(logits.shape[0], digit.step))
    sums = tuple(jnp.zeros(digit.chunk, jnp.float32) for _ in least)
    sums = lax.fori_loop(start, jnp.minimum(stop, whole), partial(add, False), sums)
    sums = lax.fori_loop(jnp.maximum(start, whole), stop, partial(add, True), sums)
    for value, total in zip(digit.values, sums, strict=True):
        now_sums[value] = jnp.sum(total)


def _decide(digit: _Digit, found: Array, sums: Array, wanted: Array) -> Array:
    """The threshold's bits so far, int32, with this digit: as great as still leaves enough. sums: [shares,values]."""
    value = jnp.arange(sums.shape[1], dtype=jnp.int32)
    held = (jnp.sum(sums, axis=0) >= wanted) & (value >= 1) & (value <= digit.values[-1])  # others were not written
    return found + (jnp.sum(held.astype(jnp.int32)) << digit.shift)


def _add(
    digit: _Digit, logits: Any, top: Array, least: list[Array], last: bool, step: Array, sums: tuple[Array, ...]
) -> tuple[Array, ...]:
    """The sums [chunk] for each value, with one step more. `last`: some of its logits may not be there."""
    first = step * digit.step + jnp.arange(digit.chunk, dtype=jnp.int32)
    places = [first + offset for offset in range(0, digit.step, digit.chunk)]
    none = -np.inf if digit.weighed else np.nan  # weighs nothing, or is not counted
    beyond = lambda at: {"mask": at < logits.shape[0], "other": none} if last else {}
    for x in [plgpu.load(logits.at[at], **beyond(at)) for at in places]:
        weight = jnp.exp2((x - top) * np.float32(np.log2(np.e))) if digit.weighed else 1.0  # exp costs twice as much
        sums = tuple(total + jnp.where(x >= f, 1.0, 0.0) * weight for total, f in zip(sums, least, strict=True))
    return sums


def _float(bits: Array) -> Array:
    """The float32 that a number reaches if and only if its `thresholds.ordered_bits` are `bits` or more."""
    order = jnp.maximum(bits ^ SIGN, BOTTOM)  # above infinity's, a NaN: nothing reaches it
    least = lax.bitcast_convert_type(jnp.where(order < 0, order ^ REST, order), jnp.float32)
    # A device may take the least numbers for 0, logits as well as this one, which 0 must not reach.
    return jnp.where((order > 0) & (least <= 0), jnp.finfo(jnp.float32).tiny, least)


def small_case() -> tuple[Any, ...]:
    """Arguments of `threshold`: rows of some shares of some steps, logits of both signs, a third of them the same."""
    rng = np.random.default_rng(3)  # in no row is a sum closer to what is wanted than a ten-thousandth
    logits = jnp.asarray(np.round(rng.normal(size=(128, 1, 20000)) * 4, 1), jnp.float32)
    top = logits.max(-1)
    return logits, top, 0.9 * jnp.exp(logits - top[..., None]).sum(-1)


interpreted = partial(threshold, interpret=True)
