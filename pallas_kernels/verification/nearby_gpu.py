"""Pallas GPU kernels that find a threshold among the few logits near it, where they are few.

A language model is mostly sure: all but some of its 248,320 logits lie far below the threshold. So the mass is summed
at some distances below the largest logit; what lies between the two distances where it becomes enough is gathered; and
the threshold is found among these alone. That reads the logits twice, where finding it digit by digit reads them eleven
times. A row with more logits there than there is room for is left to the digits. Lowered by Pallas' Triton route, named
explicitly; see `pallas_kernels` on why.
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

from pallas_kernels.verification.sums_gpu import SIGN, Walk, float_of, order_of, sums, weight

DISTANCES = (1.0, 2.0, 3.0, 4.5, 6.5, 9.0, 13.0)  # below the largest logit
ROOM = 16384  # logits of a row that can be gathered
CHUNK, UNROLL = 128, 4  # of a program of one warp that gathers: loads of 16 bytes a thread
PROGRAMS, SHARES, MOST = 8192, 32, 256  # that gather, in all; of a row, at least and at most
COLUMNS, WARPS = 16, 4  # of a program that settles: gathered logits of each share that it looks at at once


class Near(NamedTuple):
    """Of each row: its threshold is not below `low`, and below `high`, or NaN where nothing is known of that."""

    top: Array  # the largest logit
    wanted: Array  # what must weigh at least so much
    low: Array
    high: Array
    above: Array  # what weighs so much is not below `high`


def summed(rows: Array, top: Array, walk: Walk, *, warps: int, interpret: Any = False) -> Array:
    """What rows [rows,V] weigh down to each distance below their `top` [rows], and at all: [rows,8]."""
    shares = walk.shares(rows.shape[1])
    call = _Arrays(len(rows), interpret).call
    return call("threshold_sum", partial(_sum, walk), shares, warps, (rows, top), [(8, jnp.float32)])[0].sum(1)


def between(top: Array, wanted: Array, mass: Array) -> Near:
    """Decided once for all kernels: each would add up its own sums in its own order. mass: of `summed`."""
    low, high, above = jnp.full_like(top, -np.inf), jnp.full_like(top, np.nan), jnp.zeros_like(top)
    for place, here in zip(_places(top), mass.T, strict=False):  # which is never less further down
        enough = here >= wanted
        low = jnp.where(enough & (low == -np.inf), place, low)
        high, above = jnp.where(enough, high, place), jnp.where(enough, above, here)
    return Near(top, wanted, low, high, above)


def settle(rows: Array, near: Near, *, weighed: bool, room: int = ROOM, interpret: Any = False) -> tuple[Array, Array]:
    """The thresholds of `thresholds.threshold` [rows] int32, the bits of a uint32, and where they were found, int32.

    Args:
      rows: [rows,V] float32. weighed: as of a `Walk`. room: logits of a row that can be gathered.
    """
    steps = pl.next_power_of_2(pl.cdiv(rows.shape[1], CHUNK * UNROLL))
    shares = min(max(SHARES, pl.next_power_of_2(pl.cdiv(PROGRAMS, len(rows)))), MOST, steps)
    call, bits = _Arrays(len(rows), interpret).call, [(1, jnp.int32)]
    outs = [(room // shares + CHUNK, jnp.float32), *bits]
    gathered, counts = call("threshold_gather", _gather, shares, 1, (rows, *near), outs)
    found, sure = call("threshold_search", partial(_search, weighed), 1, WARPS, (*near, gathered, counts), 2 * bits)
    return found.reshape(-1), sure.reshape(-1)


class _Arrays(NamedTuple):
    rows: int
    interpret: Any

    def call(
        self, name: str, kernel: Any, shares: int, warps: int, args: tuple[Array, ...], outs: list[tuple[int, Any]]
    ) -> list[Array]:
        """Programs [rows,shares], of which each gets what there is of its row and writes some [rows,shares,size]."""
        whole = lambda x: pl.BlockSpec((None, *x.shape[1:]), lambda r, s: (r,) + (0,) * (x.ndim - 1))
        args = tuple(x[:, None] if x.ndim == 1 else x for x in args)
        made: list[Array] = pl.pallas_call(
            kernel,
            grid=(self.rows, shares),
            in_specs=[whole(x) for x in args],
            out_specs=[pl.BlockSpec((None, None, size), lambda r, s: (r, s, 0)) for size, _ in outs],
            out_shape=[jax.ShapeDtypeStruct((self.rows, shares, size), dtype) for size, dtype in outs],
            compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
            interpret=self.interpret,
            name=name,
        )(*args)
        return made


def _sum(walk: Walk, logits: Any, top: Any, mass: Any) -> None:
    """Of this share."""
    least = [*_places(top[0]), jnp.float32(-np.inf)]
    for i, total in enumerate(sums(walk, pl.program_id(1), logits, top[0], least)):
        mass[i] = total


def _places(top: Array) -> list[Array]:
    return [top - np.float32(distance) for distance in DISTANCES]


def _holds(near: Near, x: Array) -> Array:
    return (x >= near.low) & ~(x >= near.high)


def _gather(logits: Any, *refs: Any) -> None:
    """The logits of this share between the two places, and how many they are, which may be more than there is room."""
    near, (gathered, counts) = Near(*(ref[0] for ref in refs[:5])), refs[5:]
    share, shares, size = pl.program_id(1), pl.num_programs(1), logits.shape[0]
    offsets = [i * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32) for i in range(UNROLL)]

    def step(i: Array, count: Array) -> Array:
        first = (share + i * shares) * (CHUNK * UNROLL)  # steps are dealt out, since neighbours are alike
        read = [plgpu.load(logits.at[first + at], mask=first + at < size, other=np.nan) for at in offsets]
        write = lambda count: _append(near, read, gathered, count)
        any_held = jnp.max(reduce(or_, (_holds(near, x) for x in read)).astype(jnp.int32)) > 0
        return lax.cond(any_held, write, lambda count: count, count)

    mine = pl.cdiv(pl.cdiv(size, CHUNK * UNROLL) - share, shares)
    counts[0] = lax.fori_loop(0, mine, step, jnp.int32(0))


def _append(near: Near, read: list[Array], gathered: Any, count: Array) -> Array:
    """What does not count gets the places behind what does, and is not written."""
    for x in read:
        holds = _holds(near, x)
        before = jnp.cumsum(holds.astype(jnp.int32)) - holds
        number = jnp.sum(holds.astype(jnp.int32))
        place = jnp.where(holds, before, number + jnp.arange(CHUNK, dtype=jnp.int32) - before)
        plgpu.store(gathered.at[jnp.minimum(count, gathered.shape[0] - CHUNK) + place], x, mask=holds)
        count += number
    return count


def _search(weighed: bool, *refs: Any) -> None:
    """The largest threshold that leaves enough, two bits at a time."""
    near, (gathered, counts, bits, sure) = Near(*(ref[0] for ref in refs[:5])), refs[5:]
    held = counts[...]
    most, room = jnp.max(held), gathered.shape[1] - CHUNK
    sure[0] = (most <= room).astype(jnp.int32)
    rounds = jnp.where(most <= room, pl.cdiv(most, COLUMNS), 0)

    def add(least: list[Array], i: Array, totals: tuple[Array, ...]) -> tuple[Array, ...]:
        at = i * COLUMNS + jnp.arange(COLUMNS, dtype=jnp.int32)
        share = jnp.arange(gathered.shape[0], dtype=jnp.int32)[:, None]
        x = plgpu.load(gathered.at[share, at[None, :]], mask=at[None, :] < held, other=np.nan)
        own = weight(weighed, x, near.top)
        return tuple(total + jnp.where(x >= f, own, 0.0) for total, f in zip(totals, least, strict=True))

    def decide(i: Array, found: Array) -> Array:
        tried = [found + (jnp.int32(digit) << (30 - 2 * i)) for digit in (1, 2, 3)]
        nothing = (jnp.zeros((gathered.shape[0], COLUMNS), jnp.float32),) * 3
        totals = lax.fori_loop(0, rounds, partial(add, list(map(float_of, tried))), nothing)
        heavy = [near.above + jnp.sum(total) >= near.wanted for total in totals]
        # Sums are added in another order here; what was enough at the lower place is enough.
        low = [(bits ^ SIGN) <= order_of(near.low) for bits in tried]
        enough = [(a | b).astype(jnp.int32) for a, b in zip(heavy, low, strict=True)]
        return found + (sum(enough[1:], enough[0]) << (30 - 2 * i))

    bits[0] = lax.fori_loop(0, 16, decide, jnp.int32(0))
