"""What the GPU kernels of thresholds share: a walk over a part of a row's logits, summing what a threshold leaves.

A program walks its share by chunks, which it adds to a chunk of sums for each threshold, so that threads meet at the
end only. What a logit costs for each threshold is two instructions: one makes 1 or 0 of a comparison of floats, one
multiplies and adds.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import dispatch

SIGN, REST = np.int32(-(2**31)), np.int32(2**31 - 1)
BOTTOM = np.int32(0x7F800000) ^ np.int32(-1)  # the order of -infinity: below it are no numbers


class Walk(NamedTuple):
    """A program takes `steps`, each of some chunks. `weighed`: a logit weighs exp(logit - top), else 1."""

    chunk: int  # logits added at once, a power of two
    step: int  # logits
    steps: int
    weighed: bool

    def shares(self, vocab_size: int) -> int:
        """Programs of a row, made a power of two."""
        return pl.next_power_of_2(pl.cdiv(vocab_size, self.steps * self.step))


def require_logits(logits: Array, interpret: Any) -> None:
    """Raises NotImplementedError where there is no GPU, for no logits, and for logits that are not float32."""
    dispatch.require_gpu(interpret)
    if logits.dtype != jnp.float32:
        raise NotImplementedError(f"logits must be float32, not {logits.dtype}")
    if not logits.size:
        raise NotImplementedError("no logits")


def sums(walk: Walk, share: Array, logits: Any, top: Array, least: list[Array]) -> list[Array]:
    """What the logits of a share of a row weigh that are not below each of `least`."""
    add = partial(_add, walk, logits, top, least)
    start, whole = share * walk.steps, logits.shape[0] // walk.step
    stop = jnp.minimum(start + walk.steps, pl.cdiv(logits.shape[0], walk.step))
    found = tuple(jnp.zeros(walk.chunk, jnp.float32) for _ in least)
    found = lax.fori_loop(start, jnp.minimum(stop, whole), partial(add, False), found)
    found = lax.fori_loop(jnp.maximum(start, whole), stop, partial(add, True), found)
    return [jnp.sum(x) for x in found]


def _add(
    walk: Walk, logits: Any, top: Array, least: list[Array], last: bool, step: Array, found: tuple[Array, ...]
) -> tuple[Array, ...]:
    """The sums [chunk] at each threshold, with one step more. `last`: some of its logits may not be there."""
    first = step * walk.step + jnp.arange(walk.chunk, dtype=jnp.int32)
    places = [first + offset for offset in range(0, walk.step, walk.chunk)]
    none = -np.inf if walk.weighed else np.nan  # weighs nothing, or is not counted
    beyond = lambda at: {"mask": at < logits.shape[0], "other": none} if last else {}
    for x in [plgpu.load(logits.at[at], **beyond(at)) for at in places]:
        own = weight(walk.weighed, x, top)
        found = tuple(total + jnp.where(x >= f, 1.0, 0.0) * own for total, f in zip(found, least, strict=True))
    return found


def weight(weighed: bool, x: Array, top: Array) -> Any:
    """Of each of some logits."""
    return jnp.exp2((x - top) * np.float32(np.log2(np.e))) if weighed else 1.0  # exp costs twice as much


def float_of(bits: Array) -> Array:
    """The float32 that a number reaches if and only if its `thresholds.ordered_bits` are `bits`, int32, or more."""
    order = jnp.maximum(bits ^ SIGN, BOTTOM)  # above infinity's, a NaN: nothing reaches it
    least = lax.bitcast_convert_type(jnp.where(order < 0, order ^ REST, order), jnp.float32)
    # A device may take the least numbers for 0, logits as well as this one, which 0 must not reach.
    return jnp.where((order > 0) & (least <= 0), jnp.finfo(jnp.float32).tiny, least)


def order_of(x: Array) -> Array:
    """int32 with the order of float32: that of `thresholds.ordered_bits`, less 2**31."""
    word = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    return jnp.where(word < 0, word ^ REST, word)
