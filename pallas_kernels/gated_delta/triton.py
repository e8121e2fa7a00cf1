"""Pallas GPU kernel of one cycle of a delta-rule layer: what was accepted is folded in, the new window is verified.

XLA reads the state three times and writes it once, in four kernels; here it is read once and written once, in place.
Columns do not meet in the delta rule: each is a recurrence of its own, and a program takes some of one head's. A row of
the state needs what was accepted added to it, and then gives its part to the products of the window's keys and queries
with the state, which is all that the window needs of it. Two ways of doing this:

- walking down the rows, each thread for itself, keeping the products and nothing of the state. The scalars of keys are
  the same for all threads, which therefore never wait for one another; but a walk is long.
- holding all rows at once, spread over the threads, and adding across these. Short, and so better where heads are few.

Everything is plain float32 arithmetic: products on tensor cores (float32 in three parts of TF32) were slower
(benchmarks/RESULTS.md). `mosaic` does the same faster, and is taken where it can do the job; what is left for this one
are windows of 9 to 16 tokens, and heads that are not 128 wide.
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
from pallas_kernels.gated_delta.reference import Pending

MAX_WINDOW = 16


class Tiles(NamedTuple):
    """Of a program: columns of a state; warps; rows that a walk reads before it uses the first, 0 for no walk."""

    columns: int
    warps: int
    rows: int


HOLD, WALK = Tiles(32, 4, 0), Tiles(128, 1, 4)
MANY = 512  # heads of all slots together, from which on they are walked down


def tiles_for(state: Array) -> Tiles:
    """What `step` takes by itself for a state [B,N,M,P]."""
    return WALK if state.shape[0] * state.shape[1] >= MANY and _alone(WALK, state.shape[3]) else HOLD


def _alone(tiles: Tiles, value_width: int) -> bool:
    """Whether each column of a walk has one thread, so that none reads what another has written meanwhile."""
    return min(tiles.columns, value_width) >= 32 * tiles.warps


@partial(jax.jit, static_argnames=("tiles", "interpret"))  # so that a program of many layers lowers it once
def step(
    state: Array, pending: Pending, q: Array, k: Array, v: Array, g: Array, beta: Array, *, tiles: Tiles | None = None,
    interpret: Any = False,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """As `reference.step`, whose shapes and results it has.

    The buffers of the state and of the pending updates are reused where the caller donates them. Raises
    NotImplementedError where there is no GPU, and for widths that are no powers of two, windows beyond 16 and states
    that are not float32. `tiles`: for measuring. `interpret`: as of `pl.pallas_call`.
    """
    _check(state, max(k.shape[1], pending.keys.shape[1]), interpret)
    batch, heads, key_width, value_width = state.shape
    tiles = tiles or tiles_for(state)
    if tiles.rows and not _alone(tiles, value_width):
        raise NotImplementedError(f"{tiles.warps} warps do not walk down {value_width} columns alone")
    repeats, columns = heads // k.shape[2], min(tiles.columns, value_width)
    keys = lambda x: pl.BlockSpec((None, x.shape[1], None, key_width), lambda b, h, p: (b, 0, h // repeats, 0))
    values = lambda x: pl.BlockSpec((None, x.shape[1], None, columns), lambda b, h, p: (b, 0, h, p))
    gates = lambda x: pl.BlockSpec((None, x.shape[1], None), lambda b, h, p: (b, 0, h))
    states = pl.BlockSpec((None, None, key_width, columns), lambda b, h, p: (b, h, 0, p))
    like_v = jax.ShapeDtypeStruct(v.shape, jnp.float32)
    in_place = pending.updates.shape == v.shape and pending.updates.dtype == jnp.float32
    out, updates, state = pl.pallas_call(
        partial(_kernel, min(tiles.rows, key_width)),
        grid=(batch, heads, value_width // columns),
        in_specs=[
            pl.BlockSpec((1,), lambda b, h, p: (b,)), states, keys(pending.keys), values(pending.updates),
            gates(pending.log_decay), keys(q), keys(k), values(v), gates(g), gates(beta),
        ],
        out_specs=[values(v), values(v), states],
        out_shape=[like_v, like_v, jax.ShapeDtypeStruct(state.shape, jnp.float32)],
        input_output_aliases={1: 2, 3: 1} if in_place else {1: 2},
        compiler_params=plgpu.CompilerParams(num_warps=tiles.warps, num_stages=1),
        interpret=interpret,
        name="gated_delta_step",
    )(pending.accepted, state, pending.keys, pending.updates, pending.log_decay, q, k, v, g, beta)  # fmt: skip
    return out, updates, state


def _check(state: Array, window: int, interpret: Any) -> None:
    dispatch.require_gpu(interpret)
    if state.dtype != jnp.float32:
        raise NotImplementedError(f"a state in {state.dtype}, not float32")
    if any(width & (width - 1) for width in state.shape[2:]):
        raise NotImplementedError(f"heads of {state.shape[2:]}: widths must be powers of two")
    if window > MAX_WINDOW:
        raise NotImplementedError(f"a window of {window} tokens; at most {MAX_WINDOW}")


def _kernel(
    rows: int, accepted: Any, state: Any, old_keys: Any, old_updates: Any, old_decay: Any,
    q: Any, k: Any, v: Any, g: Any, beta: Any, out: Any, updates: Any, new_state: Any,
) -> None:  # fmt: skip
    counts = [j < accepted[0] for j in range(old_keys.shape[0])]
    added, decay = _to_add(counts, old_updates, old_decay)
    old = _Last(counts, old_keys, added, decay)
    vectors = [(x, t) for x in (k, q) for t in range(k.shape[0])]
    products = _walk(rows, state, old, vectors, new_state) if rows else _hold(state, old, vectors, new_state)
    _solve(products[: k.shape[0]], products[k.shape[0] :], q, k, v, g, beta, out, updates)


class _Last(NamedTuple):
    """The last window: which of its tokens count, their keys, their updates [columns], the state's decay over it."""

    counts: list[Array]
    keys: Any
    updates: list[Array]
    decay: Array


def _walk(rows: int, state: Any, old: _Last, vectors: list[tuple[Any, int]], new_state: Any) -> list[Array]:
    """The products [columns] of each of the vectors with the state, which is brought up to date on the way."""

    def further(block: Array, products: list[Array]) -> list[Array]:
        """All rows are read before the first is written, which the next to be read might be."""
        at = [block * rows + r for r in range(rows)]
        held = [state[i, :] for i in at]
        keys = [[_scalar(old.keys, j, i) for j in range(len(old.counts))] for i in at]
        scalars = [[_scalar(x, t, i) for x, t in vectors] for i in at]
        for r in range(rows):
            held[r] *= old.decay
            for counts, key, update in zip(old.counts, keys[r], old.updates, strict=True):
                held[r] += jnp.where(counts, key, 0.0) * update  # what was rejected may be anything
            products = [total + x * held[r] for total, x in zip(products, scalars[r], strict=True)]
        for i, row in zip(at, held, strict=True):
            new_state[i, :] = row
        return products

    nothing = [jnp.zeros(state.shape[1:], jnp.float32)] * len(vectors)
    products: list[Array] = lax.fori_loop(0, state.shape[0] // rows, further, nothing)
    return products


def _hold(state: Any, old: _Last, vectors: list[tuple[Any, int]], new_state: Any) -> list[Array]:
    """As `_walk`. After the sums across warps at its end no thread has updates of the last window yet to read."""
    added = jnp.zeros(state.shape, jnp.float32)
    for j, (counts, update) in enumerate(zip(old.counts, old.updates, strict=True)):
        added += jnp.where(counts, _row(old.keys, j), 0.0)[:, None] * update[None, :]
    held = state[...] * old.decay + added
    new_state[...] = held
    return [jnp.sum(held * _row(x, t)[:, None], axis=0) for x, t in vectors]


def _to_add(counts: list[Array], updates: Any, decay: Any) -> tuple[list[Array], Array]:
    """The last window's updates [columns] as they stand at its end, 0 for those not accepted; the state's decay."""
    found, to_end = [], jnp.float32(0.0)
    for j in reversed(range(len(counts))):
        found.append(jnp.where(counts[j], jnp.exp(to_end) * _row(updates, j), 0.0))
        to_end += jnp.where(counts[j], decay[j].astype(jnp.float32), 0.0)
    return found[::-1], jnp.exp(to_end)


def _solve(
    by_keys: list[Array], by_queries: list[Array], q: Any, k: Any, v: Any, g: Any, beta: Any, out: Any, updates: Any
) -> None:
    """The window's tokens one after another, from the products of their keys and queries with the state before it."""
    solved: list[Array] = []
    since_start = jnp.float32(0.0)
    for t in range(k.shape[0]):
        key, query = _row(k, t), _row(q, t)
        since_start += g[t].astype(jnp.float32)
        decay = jnp.exp(since_start)
        read, said = decay * by_keys[t], decay * by_queries[t]
        since = jnp.float32(0.0)
        for j in reversed(range(t)):  # each decay is a sum of its own, never a difference of two long ones
            since += g[j + 1].astype(jnp.float32)
            earlier, weight = _row(k, j), jnp.exp(since)
            read += weight * jnp.sum(earlier * key) * solved[j]
            said += weight * jnp.sum(earlier * query) * solved[j]
        solved.append(beta[t].astype(jnp.float32) * (_row(v, t) - read))
        updates[t, :] = solved[t]
        out[t, :] = said + jnp.sum(key * query) * solved[t]


def _scalar(ref: Any, t: int, i: Array) -> Array:
    return ref[t, i].astype(jnp.float32)


def _row(ref: Any, t: int) -> Array:
    return ref[t, :].astype(jnp.float32)


def small_case(window: int = 2) -> tuple[Any, ...]:
    """Arguments of `step`: three rows that accepted none, one and all tokens, grouped heads, of the usual widths."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=(3, *shape)), jnp.float32)
    unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    decay = lambda: jnp.asarray(-rng.random((3, window, 4)), jnp.float32)
    keys, values = (window, 2, 128), (window, 4, 128)
    pending = Pending(unit(normal(*keys)), normal(*values), decay(), jnp.asarray([0, 1, window], jnp.int32))
    q, k, v = unit(normal(*keys)), unit(normal(*keys)), normal(*values)
    return normal(4, 128, 128), pending, q, k, v, decay(), -decay()


interpreted = partial(step, interpret=True)
