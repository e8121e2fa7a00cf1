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


class Row(NamedTuple):
    """What is known of a row. The fields are [rows], or of one row inside a kernel."""

    top: Array  # its largest logit
    wanted: Array  # what must weigh at least so much


def summed(rows: Array, top: Array, walk: Walk, *, warps: int, interpret: Any = False) -> Array:
    """What rows [rows,V] weigh down to each distance below their `top` [rows], and at all: [rows,shares,8]."""
    shares = walk.shares(rows.shape[1])
    call = _Arrays(len(rows), interpret).call
    return call("threshold_sum", partial(_sum, walk), shares, warps, (rows, top), [(8, jnp.float32)])[0]


def settle(
    rows: Array, known: Row, mass: Array, *, weighed: bool, room: int = ROOM, interpret: Any = False
) -> tuple[Array, Array]:
    """The thresholds of `thresholds.threshold` [rows] int32, the bits of a uint32, and where they were found, int32.

    Args:
      rows: [rows,V] float32. mass: of `summed`. weighed: as of a `Walk`. room: logits of a row that can be gathered.
    """
    shares = min(max(SHARES, pl.next_power_of_2(pl.cdiv(PROGRAMS, len(rows)))), MOST)
    call, bits = _Arrays(len(rows), interpret).call, [(1, jnp.int32)]
    outs = [(room // shares + CHUNK, jnp.float32), *bits]
    near, held = call("threshold_gather", _gather, shares, 1, (rows, *known, mass), outs)
    search = partial(_search, weighed)
    found, sure = call("threshold_search", search, 1, WARPS, (*known, mass, near, held), 2 * bits)
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


class _Between(NamedTuple):
    """Where the threshold is: not below `low`; below `high`, or NaN; what is not below `high` weighs `above`."""

    low: Array
    high: Array
    above: Array

    def holds(self, x: Array) -> Array:
        return (x >= self.low) & ~(x >= self.high)


def _between(known: Row, mass: Array) -> _Between:
    """mass: [shares,8] of `summed`."""
    low, high, above = jnp.float32(-np.inf), jnp.float32(np.nan), jnp.float32(0)
    number, total = jnp.arange(mass.shape[1], dtype=jnp.int32), jnp.sum(mass, axis=0)
    reached = [jnp.sum(jnp.where(number == i, total, 0.0)) for i in range(len(DISTANCES))]  # never less further down
    for place, here in zip(_places(known.top), reached, strict=True):
        enough = here >= known.wanted
        low = jnp.where(enough & (low == -np.inf), place, low)
        high, above = jnp.where(enough, high, place), jnp.where(enough, above, here)
    return _Between(low, high, above)


def _gather(logits: Any, top: Any, wanted: Any, mass: Any, near: Any, held: Any) -> None:
    """The logits of this share between the two places, and how many they are, which may be more than there is room."""
    between = _between(Row(top[0], wanted[0]), mass[...])
    share, shares, size = pl.program_id(1), pl.num_programs(1), logits.shape[0]
    offsets = [i * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32) for i in range(UNROLL)]

    def step(i: Array, count: Array) -> Array:
        first = (share + i * shares) * (CHUNK * UNROLL)  # steps are dealt out, since neighbours are alike
        read = [plgpu.load(logits.at[first + at], mask=first + at < size, other=np.nan) for at in offsets]
        write = lambda count: _append(between, read, near, count)
        any_held = jnp.max(reduce(or_, map(between.holds, read)).astype(jnp.int32)) > 0
        return lax.cond(any_held, write, lambda count: count, count)

    mine = pl.cdiv(pl.cdiv(size, CHUNK * UNROLL) - share, shares)
    held[0] = lax.fori_loop(0, mine, step, jnp.int32(0))


def _append(between: _Between, read: list[Array], near: Any, count: Array) -> Array:
    """What does not count gets the places behind what does, and is not written."""
    for x in read:
        holds = between.holds(x)
        before = jnp.cumsum(holds.astype(jnp.int32)) - holds
        number = jnp.sum(holds.astype(jnp.int32))
        place = jnp.where(holds, before, number + jnp.arange(CHUNK, dtype=jnp.int32) - before)
        plgpu.store(near.at[jnp.minimum(count, near.shape[0] - CHUNK) + place], x, mask=holds)
        count += number
    return count


def _search(weighed: bool, top: Any, wanted: Any, mass: Any, near: Any, held: Any, bits: Any, sure: Any) -> None:
    """The largest threshold that leaves enough, two bits at a time."""
    known, counts = Row(top[0], wanted[0]), held[...]
    between, most = _between(known, mass[...]), jnp.max(counts)
    fits = most <= near.shape[1] - CHUNK
    sure[0] = fits.astype(jnp.int32)
    rounds = jnp.where(fits, pl.cdiv(most, COLUMNS), 0)

    def add(least: list[Array], i: Array, totals: tuple[Array, ...]) -> tuple[Array, ...]:
        at = i * COLUMNS + jnp.arange(COLUMNS, dtype=jnp.int32)
        share = jnp.arange(near.shape[0], dtype=jnp.int32)[:, None]
        x = plgpu.load(near.at[share, at[None, :]], mask=at[None, :] < counts, other=np.nan)
        own = weight(weighed, x, known.top)
        return tuple(total + jnp.where(x >= f, own, 0.0) for total, f in zip(totals, least, strict=True))

    def decide(i: Array, found: Array) -> Array:
        tried = [found + (jnp.int32(digit) << (30 - 2 * i)) for digit in (1, 2, 3)]
        nothing = (jnp.zeros((near.shape[0], COLUMNS), jnp.float32),) * 3
        totals = lax.fori_loop(0, rounds, partial(add, list(map(float_of, tried))), nothing)
        heavy = [between.above + jnp.sum(total) >= known.wanted for total in totals]
        # Sums are added in another order here; what was enough at the lower place is enough.
        low = [(bits ^ SIGN) <= order_of(between.low) for bits in tried]
        enough = [(a | b).astype(jnp.int32) for a, b in zip(heavy, low, strict=True)]
        return found + (sum(enough[1:], enough[0]) << (30 - 2 * i))

    bits[0] = lax.fori_loop(0, 16, decide, jnp.int32(0))
