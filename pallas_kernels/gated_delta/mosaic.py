"""What `triton.step` does, by Pallas' Mosaic GPU route, and faster (benchmarks/RESULTS.md). For Hopper.

A program takes some columns of one head's state. All of it is fetched into shared memory at once, by asynchronous
copies of a few rows each, so that what is on its way costs no registers; each piece is brought up to date where it
lies, and is sent back while the next one is worked on. Nothing but the products with the window's keys and queries is
kept of it, as in `triton`.

A warp has a quarter of the columns, a thread four of these, in every fourth row where there are 128 columns. The lanes
of a warp that read a key's scalars read neighbours, the products are summed across lanes by shuffles, and warps meet
only where a piece is sent back. All that does not need the state is done while it is awaited.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dispatch
from pallas_kernels.gated_delta.reference import Pending

MAX_WINDOW = 8
KEY_WIDTH = 128
WARPS, LANES, VECTOR = 4, 32, 4  # of a program; of a warp; columns of a thread
ROWS = 8  # of `_by_warp`


class Tiles(NamedTuple):
    """Of a program: columns of a state; pieces it comes and goes in; turns of the walk that are unrolled."""

    columns: int
    pieces: int
    unroll: int = 2


WHOLE, HALF, QUARTER = Tiles(128, 4), Tiles(64, 2), Tiles(32, 1)


def tiles_for(state: Array) -> Tiles:
    """What `step` takes by itself for a state [B,N,M,P], by the number of all slots' heads: the fastest on an H200."""
    heads, width = state.shape[0] * state.shape[1], state.shape[3]
    chosen = WHOLE if heads >= 1024 else HALF if heads >= 128 else QUARTER
    return chosen if width % chosen.columns == 0 else QUARTER


@partial(jax.jit, static_argnames=("tiles", "interpret"))  # so that a program of many layers lowers it once
def step(
    state: Array, pending: Pending, q: Array, k: Array, v: Array, g: Array, beta: Array, *, tiles: Tiles | None = None,
    interpret: Any = False,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """As `reference.step`, whose shapes and results it has.

    The buffers of the state and of the pending updates are reused where the caller donates them. Raises
    NotImplementedError where there is no GPU, for keys that are not 128 wide, values whose width is no multiple of a
    program's columns, windows beyond 8 and states that are not float32. `tiles`: for measuring. `interpret`: as of
    `pl.kernel`.
    """
    tiles = tiles or tiles_for(state)
    check(state, pending, k, tiles, interpret)
    in_place = pending.updates.shape == v.shape and pending.updates.dtype == jnp.float32
    q, k, v, g, beta = (x.astype(jnp.float32) for x in (q, k, v, g, beta))
    old_keys, old_updates, old_decay = (x.astype(jnp.float32) for x in pending[:3])
    state_ref, like_v = jax.new_ref(state, memory_space=plgpu.GMEM), jax.ShapeDtypeStruct(v.shape, jnp.float32)
    updates_ref: Any = jax.new_ref(old_updates, memory_space=plgpu.GMEM) if in_place else old_updates
    body = partial(_kernel, tiles, state.shape[1] // k.shape[2])
    near = _scratch(tiles, k.shape[1], old_keys.shape[1])
    kernel = pl.kernel(
        lambda *refs: pl.run_scoped(partial(body, *refs), near),
        out_type=[like_v] if in_place else [like_v, like_v],
        mesh=plgpu.Mesh(
            grid=(*state.shape[:2], state.shape[3] // tiles.columns),
            grid_names=("slot", "head", "part"),
            kernel_name="gated_delta_step",
        ),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,  # a thread reads again only what it has written itself: see `_kernel`
            reduction_scratch_bytes=0,  # of sums across warps, which there are none of
        ),
        interpret=interpret,
        name="gated_delta_step",
    )
    out, *updates = kernel(state_ref, pending.accepted, old_keys, updates_ref, old_decay, q, k, v, g, beta)
    return out, jax.freeze(updates_ref) if in_place else updates[0], jax.freeze(state_ref)


def check(state: Array, pending: Pending, k: Array, tiles: Tiles | None = None, interpret: Any = False) -> None:
    """Raises NotImplementedError for what `step` says."""
    dispatch.require_gpu(interpret)
    tiles, window = tiles or tiles_for(state), max(k.shape[1], pending.keys.shape[1])
    if state.dtype != jnp.float32:
        raise NotImplementedError(f"a state in {state.dtype}, not float32")
    if state.shape[2] != KEY_WIDTH or state.shape[3] % tiles.columns:
        raise NotImplementedError(f"heads of {state.shape[2:]}: not {KEY_WIDTH} and a multiple of {tiles.columns}")
    if window > MAX_WINDOW:
        raise NotImplementedError(f"a window of {window} tokens; at most {MAX_WINDOW}")


class _Near(NamedTuple):
    """What a program has in shared memory, and the barriers that say when it has come."""

    state: Any  # [M,columns]
    old_keys: Any  # [C,M]
    vectors: Any  # [2*W or more,M]: the window's keys, its queries, and what fills up `_by_warp`
    values: Any  # [W,columns]
    scores: Any  # [W,2*W or more]: each key with each of the vectors
    window_came: Any
    piece_came: Any  # [pieces]


def _scratch(tiles: Tiles, window: int, before: int) -> _Near:
    of = lambda *shape: plgpu.SMEM(shape, jnp.float32)
    vectors = -(-2 * window // ROWS) * ROWS
    barriers = plgpu.Barrier(num_arrivals=4), plgpu.Barrier(num_barriers=tiles.pieces)
    keys, values = (of(before, KEY_WIDTH), of(vectors, KEY_WIDTH)), of(window, tiles.columns)
    return _Near(of(KEY_WIDTH, tiles.columns), *keys, values, of(window, vectors), *barriers)  # type: ignore[call-arg]


class _Here(NamedTuple):
    """Where a program is."""

    slot: Array
    head: Array
    columns: Any

    def tokens(self, ref: Any) -> Any:
        """Of values, updates or outputs [B,W,N,P]: [W,columns]."""
        return ref.at[self.slot, :, self.head, self.columns]

    def gates(self, ref: Any) -> list[Array]:
        """Of [B,W,N]: a scalar a token."""
        return [ref[self.slot, t, self.head] for t in range(ref.shape[1])]


def _kernel(
    tiles: Tiles, repeats: int, state: Any, accepted: Any, old_keys: Any, old_updates: Any, old_decay: Any,
    q: Any, k: Any, v: Any, g: Any, beta: Any, out: Any, *updates_and_near: Any,
) -> None:  # fmt: skip
    """Without barriers of Mosaic's own: a thread reads and writes the same places of the state and of the updates."""
    *updates, near = updates_and_near
    head = lax.axis_index("head")
    here = _Here(lax.axis_index("slot"), head, pl.ds(lax.axis_index("part") * tiles.columns, tiles.columns))
    mine, updates = state.at[here.slot, head, :, here.columns], here.tokens(updates[0] if updates else old_updates)
    keys = [x.at[here.slot, :, head // repeats, :] for x in (old_keys, k, q)]
    _fetch(mine, [*keys, here.tokens(v)], near)
    layout = _layout(tiles.columns)
    counts = [j < accepted[here.slot] for j in range(old_keys.shape[1])]
    old, decay = _to_add(counts, here.tokens(old_updates), here.gates(old_decay), layout.reduce(0))
    decays, strengths = [jnp.exp(x) for x in here.gates(g)], here.gates(beta)
    plgpu.barrier_wait(near.window_came)
    for j, counted in enumerate(counts):  # what was rejected may be anything
        near.old_keys[j, :] = jnp.where(counted, _load(near.old_keys.at[j, :], _by_warp().reduce(0)), 0.0)
    _score(near)
    plgpu.commit_smem()
    products = _walk(tiles, mine, near, old, decay, layout)
    solved = _solve(products, near, decays, strengths, layout.reduce(0))
    for t, (update, output) in enumerate(zip(*solved, strict=True)):
        updates[t, :] = update
        here.tokens(out)[t, :] = output
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _fetch(state: Any, window: list[Any], near: _Near) -> None:
    size = near.values.shape[0]
    keys, queries = (near.vectors.at[pl.ds(at, size), :] for at in (0, size))
    for source, target in zip(window, (near.old_keys, keys, queries, near.values), strict=True):
        plgpu.copy_gmem_to_smem(source, target, near.window_came)
    pieces = near.piece_came.shape[0]
    for piece in range(pieces):
        rows = _rows(piece, pieces)
        plgpu.copy_gmem_to_smem(state.at[rows, :], near.state.at[rows, :], near.piece_came.at[piece])


def _rows(piece: int, pieces: int) -> Any:
    return pl.ds(piece * (KEY_WIDTH // pieces), KEY_WIDTH // pieces)


def _layout(columns: int) -> Any:
    """Of [rows, columns]: columns over warps, then over lanes by fours; further lanes have rows of their own."""
    tiling = plgpu.Tiling(((_down(columns), columns), (columns // WARPS,), (VECTOR,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-4, -2), vector_dim=-1)


def _down(columns: int) -> int:
    """Rows that a warp holds at once."""
    return LANES * WARPS * VECTOR // columns


def _by_warp() -> Any:
    """Of [vectors,M]: no vector is of two warps, so that a warp sums by itself; each warp has two of every eight."""
    tiling = plgpu.Tiling(((ROWS, KEY_WIDTH), (ROWS // WARPS, LANES // 2 * VECTOR), (VECTOR,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def _load(ref: Any, layout: Any) -> Array:
    index = () if jax.__version_info__ >= (0, 11) else (...,)  # which 0.11 deprecates, and 0.10 demands
    loaded: Array = plgpu.load(ref, *index, layout=layout, optimized=False)
    return loaded


def _wide(x: Array, dimension: int, shape: tuple[int, ...], layout: Any) -> Array:
    """[rows] or [columns], by `dimension`, as [rows, columns]."""
    wide: Array = plgpu.layout_cast(lax.broadcast_in_dim(x, shape, (dimension,)), layout)
    return wide


def _to_add(counts: list[Array], updates: Any, log_decay: list[Array], layout: Any) -> tuple[list[Array], Array]:
    """The last window's updates [columns] as they stand at its end, 0 for those not accepted; the state's decay."""
    found, to_end = [], jnp.float32(0.0)
    for j, rate in reversed(list(enumerate(log_decay))):
        found.append(jnp.where(counts[j], jnp.exp(to_end) * _load(updates.at[j, :], layout), 0.0))
        to_end += jnp.where(counts[j], rate, 0.0)
    return found[::-1], jnp.exp(to_end)


def _score(near: _Near) -> None:
    layout = _by_warp()
    vectors = _load(near.vectors, layout)
    for j in range(near.values.shape[0]):
        key = _load(near.vectors.at[j, :], layout.reduce(0))
        near.scores[j, :] = jnp.sum(_wide(key, 1, vectors.shape, layout) * vectors, axis=1)


def _walk(tiles: Tiles, state: Any, near: _Near, old: list[Array], decay: Array, layout: Any) -> list[Array]:
    """The products [columns] of keys, then of queries with the state, which is brought up to date on the way."""
    vectors = [near.vectors.at[i] for i in range(2 * near.values.shape[0])]
    old_keys = [near.old_keys.at[j] for j in range(len(old))]
    height = _down(tiles.columns)
    shape = height, tiles.columns
    turns = KEY_WIDTH // tiles.pieces // height
    old = [_wide(x, 1, shape, layout) for x in old]

    def turn(i: Array, products: list[Array]) -> list[Array]:
        rows = pl.ds(i * height, height)
        scalars = lambda x: _wide(_load(x.at[rows], layout.reduce(1)), 0, shape, layout)
        held = _load(near.state.at[rows, :], layout) * decay
        for key, update in zip(old_keys, old, strict=True):
            held += scalars(key) * update
        near.state[rows, :] = held
        return [total + scalars(x) * held for total, x in zip(products, vectors, strict=True)]

    products = [plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)] * len(vectors)
    for piece in range(tiles.pieces):
        plgpu.barrier_wait(near.piece_came.at[piece])
        products = lax.fori_loop(piece * turns, (piece + 1) * turns, turn, products, unroll=min(tiles.unroll, turns))
        plgpu.commit_smem()
        rows = _rows(piece, tiles.pieces)
        plgpu.copy_smem_to_gmem(near.state.at[rows, :], state.at[rows, :])
    return [jnp.sum(x, axis=0) for x in products]


def _solve(
    products: list[Array], near: _Near, decays: list[Array], strengths: list[Array], layout: Any
) -> tuple[list[Array], list[Array]]:
    """Updates and outputs [columns] of the window's tokens, one after another."""
    window = len(decays)
    solved: list[Array] = []
    outputs = []
    start: Array = jnp.float32(1.0)  # what a token keeps of the state
    since: list[Array] = []  # and of the update of each token before it: no difference of two long sums
    for t, decay in enumerate(decays):
        start, since = start * decay, [x * decay for x in since]
        read, said = start * products[t], start * products[window + t]
        for j, kept in enumerate(since):
            read += kept * near.scores[j, t] * solved[j]
            said += kept * near.scores[j, window + t] * solved[j]
        solved.append(strengths[t] * (_load(near.values.at[t, :], layout) - read))
        outputs.append(said + near.scores[t, window + t] * solved[t])
        since.append(jnp.float32(1.0))
    return solved, outputs
