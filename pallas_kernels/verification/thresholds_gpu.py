"""Pallas GPU kernels of the search for a threshold: a launch for each digit, in which every logit is read once.

XLA makes three kernels of a digit, of which two read all logits, since it sums for no more than some thresholds at a
time. Here a program takes a row's share of the vocabulary; it first decides the digit before, from the sums that all
shares have left, and then sums for the next. Lowered by Pallas' Triton route, named explicitly; see
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

SHARE = 8192  # logits of a program
BITS = 3  # of a digit: seven sums for each logit read
SHIFTS = tuple(range(30, -1, -BITS))  # of digits, the greatest first, which has two bits only
SIGN = np.int32(-(2**31))


def threshold(
    logits: Array, top: Array | None, wanted: Array, *, share: int = SHARE, interpret: Any = False
) -> Array:  # fmt: skip
    """As `thresholds.threshold`, but that sums are added in another order. `share`: a power of two.

    Raises NotImplementedError where there is no GPU, and for logits that are not float32. `interpret`: as of
    `pl.pallas_call`.
    """
    if jax.default_backend() != "gpu" and not interpret:
        raise NotImplementedError("this kernel is for GPUs")
    if logits.dtype != jnp.float32:
        raise NotImplementedError(f"logits must be float32, not {logits.dtype}")
    rows = logits.reshape(-1, logits.shape[-1])
    shares = 1 << (-(-rows.shape[1] // share) - 1).bit_length()
    tops, least = (None if x is None else x.astype(jnp.float32).reshape(-1) for x in (top, wanted))
    assert least is not None
    found, sums, before = jnp.zeros(len(rows), jnp.int32), jnp.zeros((len(rows), shares, 1 << BITS)), 32
    for shift in SHIFTS:
        digit = _Digit(before, shift, share, weighed=top is not None)
        found, sums = _sweep(digit, rows, tops, least, found, sums, interpret)
        before = shift
    last = _decide(found, [jnp.sum(sums[:, :, digit], axis=1) for digit in _digits(before)], least, before)
    return lax.bitcast_convert_type(last, jnp.uint32).reshape(wanted.shape)


class _Digit(NamedTuple):
    """One sweep: it decides the digit at `before` (32: there is none) and sums for each value of the one at `shift`."""

    before: int
    shift: int
    share: int
    weighed: bool


def _digits(shift: int) -> range:
    return range(1, 1 << min(BITS, 32 - shift))


def _decide(found: Array, sums: list[Array], wanted: Any, shift: int) -> Array:
    """The threshold's bits so far, in an int32, with the digit at `shift`: as great as still leaves enough."""
    held = [(total >= wanted).astype(jnp.int32) for total in sums]
    return found + (sum(held[1:], held[0]) << shift)


def _sweep(
    digit: _Digit, rows: Array, top: Array | None, wanted: Array, found: Array, sums: Array, interpret: Any
) -> tuple[Array, Array]:
    count, shares, digits = sums.shape
    one = pl.BlockSpec((1,), lambda r, s: (r,))
    row = pl.BlockSpec((None, rows.shape[1]), lambda r, s: (r, 0))
    now: tuple[Array, Array] = pl.pallas_call(
        partial(_kernel, digit),
        grid=(count, shares),
        in_specs=[row, one, one, one, pl.BlockSpec((None, shares, digits), lambda r, s: (r, 0, 0))],
        out_specs=[one, pl.BlockSpec((None, None, digits), lambda r, s: (r, s, 0))],
        out_shape=[jax.ShapeDtypeStruct(found.shape, jnp.int32), jax.ShapeDtypeStruct(sums.shape, jnp.float32)],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="threshold_digit",
    )(rows, wanted if top is None else top, wanted, found, sums)
    return now


def _kernel(
    digit: _Digit, logits: Any, top: Any, wanted: Any, found: Any, sums: Any, now_found: Any, now_sums: Any
) -> None:
    bits = found[0]
    if digit.before < 32:
        bits = _decide(bits, [jnp.sum(sums[:, value]) for value in _digits(digit.before)], wanted[0], digit.before)
    now_found[0] = bits  # every share of a row writes the same
    at = pl.program_id(1) * digit.share + jnp.arange(digit.share, dtype=jnp.int32)
    there = at < logits.shape[0]
    x = plgpu.load(logits.at[at], mask=there, other=-jnp.inf)
    # A logit of -inf weighs nothing beside any other, but it is counted.
    weight = jnp.exp(x - top[0]) if digit.weighed else jnp.where(there, 1.0, 0.0)
    ordered = _ordered(x)
    for value in _digits(digit.shift):
        least = (bits + _int32(value << digit.shift)) ^ SIGN
        now_sums[value] = jnp.sum(jnp.where(ordered >= least, weight, 0.0))


def _int32(word: int) -> np.int32:
    return np.int32(word - (1 << 32) if word >> 31 else word)


def _ordered(x: Array) -> Array:
    """int32 with the order of float32: `thresholds.ordered_bits` with its first bit turned over."""
    word = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    return jnp.where(word < 0, word ^ np.int32(2**31 - 1), word)


def small_case() -> tuple[Any, ...]:
    """Arguments of `threshold`: two rows of three shares, logits of both signs, a third of which are the same."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(np.round(rng.normal(size=(2, 1, 20000)) * 4, 1), jnp.float32)
    top = logits.max(-1)
    return logits, top, 0.9 * jnp.exp(logits - top[..., None]).sum(-1)


interpreted = partial(threshold, interpret=True)
