"""Pallas TPU kernel of one cycle of a delta-rule layer: what was accepted is folded in, the new window is verified.

Letters as in `reference`. A grid step holds one row and 8 key heads with their value heads (or all heads, where the key
heads are no multiple of 8), so that the state is read once and written once, in place. Products with the state run on
the matrix unit in float32; decays and the triangular solve on the vector unit.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.gated_delta.reference import Pending

MAX_WINDOW = 16
MAX_STATE_BYTES = 3 << 20  # of one grid step; the pipeline holds it four times: two blocks, each read and written
VMEM_BYTES = 32 << 20


def step(
    state: Array, pending: Pending, q: Array, k: Array, v: Array, g: Array, beta: Array, *, interpret: Any = False
) -> tuple[Array, Array, Array]:
    """As `reference.step`, whose shapes and results it has. The state's buffer is reused where the caller donates it.

    Raises NotImplementedError for widths that are no multiple of 128, windows beyond 16, states that are not float32
    and heads too many for the vector memory. `interpret`: as of `pl.pallas_call`.
    """
    check_state(state, k.shape[2])
    if max(k.shape[1], pending.keys.shape[1]) > MAX_WINDOW:
        raise NotImplementedError(f"windows of {pending.keys.shape[1]} and {k.shape[1]} tokens; at most {MAX_WINDOW}")
    batch, heads, key_width, value_width = state.shape
    block_keys = key_heads_per_block(k.shape[2])
    block = block_keys * heads // k.shape[2]

    vectors = lambda x, n: pl.BlockSpec((None, x.shape[1], n, x.shape[3]), lambda b, h, _: (b, 0, h, 0))
    gates = lambda x: pl.BlockSpec((None, block, x.shape[2]), lambda b, h, _: (b, h, 0))
    states = pl.BlockSpec((None, block, key_width, value_width), lambda b, h, _: (b, h, 0, 0))
    last = lambda tokens: jnp.swapaxes(tokens.astype(jnp.float32), 1, 2)  # tokens in the lanes
    decay, g, beta = (last(x) for x in (pending.log_decay, g, beta))

    like_v = jax.ShapeDtypeStruct(v.shape, jnp.float32)
    out, updates, state = pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, k.shape[2] // block_keys),
            in_specs=[
                states, vectors(pending.keys, block_keys), vectors(pending.updates, block), gates(decay),
                vectors(q, block_keys), vectors(k, block_keys), vectors(v, block), gates(g), gates(beta),
            ],
            out_specs=[vectors(v, block), vectors(v, block), states],
        ),
        out_shape=[like_v, like_v, jax.ShapeDtypeStruct(state.shape, jnp.float32)],
        input_output_aliases={1: 2},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=VMEM_BYTES
        ),
        interpret=interpret,
        name="gated_delta_step",
    )(pending.accepted.astype(jnp.int32), state, pending.keys, pending.updates, decay, q, k, v, g, beta)  # fmt: skip
    return out, updates, state


def check_state(state: Array, key_heads: int) -> None:
    """Raises NotImplementedError for a state that no kernel here takes."""
    key_width, value_width = state.shape[2:]
    if state.dtype != jnp.float32:
        raise NotImplementedError(f"the state must be float32, not {state.dtype}")
    if key_width % 128 or value_width % 128:
        raise NotImplementedError(f"head widths {key_width} and {value_width} are no multiples of 128")
    size = math.prod(state.shape[1:]) * 4 * key_heads_per_block(key_heads) // key_heads
    if size > MAX_STATE_BYTES:
        raise NotImplementedError(f"{size} bytes of state for each row and 8 key heads; at most {MAX_STATE_BYTES}")


def key_heads_per_block(key_heads: int) -> int:
    """A block's second last axis must be a multiple of 8 or the whole axis."""
    return 8 if key_heads % 8 == 0 else key_heads


def _kernel(
    count: Any, state: Any, old_keys: Any, old_updates: Any, old_decay: Any, q: Any, k: Any, v: Any, g: Any, beta: Any,
    out: Any, updates: Any, new_state: Any,
) -> None:  # fmt: skip
    repeats = state.shape[0] // k.shape[1]
    folded = _fold(
        state[...], by_head(old_keys, repeats), by_head(old_updates), old_decay[...], count[pl.program_id(0)]
    )
    new_state[...] = folded
    u, o = _window(folded, by_head(q, repeats), by_head(k, repeats), by_head(v), g[...], beta[...])
    updates[...] = jnp.swapaxes(u, 0, 1)
    out[...] = jnp.swapaxes(o, 0, 1)


def by_head(tokens: Any, repeats: int = 1) -> Array:
    """[C,N,M] -> [N*repeats,C,M] float32."""
    x = jnp.swapaxes(tokens[...].astype(jnp.float32), 0, 1)
    return x if repeats == 1 else jnp.repeat(x, repeats, axis=0)


def _fold(state: Array, keys: Array, updates: Array, log_decay: Array, count: Array) -> Array:
    """state [N,M,P], keys [N,C,M], updates [N,C,P], log_decay [N,C]: the state after the first `count` tokens."""
    row = column(log_decay)  # [N,C,1]
    token = jax.lax.broadcasted_iota(jnp.int32, row.shape, 1)
    row = jnp.where(token < count, row, 0.0)
    to_end = jnp.zeros_like(row)
    for i in range(1, row.shape[1]):
        to_end = to_end + jnp.where(token < i, row[:, i : i + 1], 0.0)
    total = to_end[:, :1] + row[:, :1]
    weighted = jnp.where(token < count, jnp.exp(to_end) * updates, 0.0)
    return state * jnp.exp(total) + dot(keys, weighted, ((1,), (1,)))


def _window(state: Array, q: Array, k: Array, v: Array, g: Array, beta: Array) -> tuple[Array, Array]:
    """state [N,M,P], q, k [N,C,M], v [N,C,P], g, beta [N,C]: updates and outputs [N,C,P].

    The unit triangular system is solved column by column: once u_j is known, what it adds to later tokens' u and to
    its own and later tokens' outputs is taken out of them.
    """
    size = k.shape[1]
    g, beta = column(g), column(beta)
    i = jax.lax.broadcasted_iota(jnp.int32, (1, size, size), 1)
    j = jax.lax.broadcasted_iota(jnp.int32, (1, size, size), 2)
    # G_i - G_j, each summed on its own: see the reference.
    sums, from_start = jnp.zeros((g.shape[0], size, size), jnp.float32), jnp.zeros_like(g)
    for n in range(size):
        sums = sums + jnp.where((j < n) & (n <= i), g[:, n : n + 1], 0.0)
        from_start = from_start + jnp.where(n <= i[:, :, :1], g[:, n : n + 1], 0.0)
    decay = jnp.exp(jnp.where(j <= i, sums, -jnp.inf))
    from_start = jnp.exp(from_start)

    lower = jnp.where(j < i, dot(k, k, ((2,), (2,))) * decay * beta, 0.0)
    scores = dot(q, k, ((2,), (2,))) * decay
    u = beta * (v - from_start * dot(k, state, ((2,), (1,))))
    out = from_start * dot(q, state, ((2,), (1,)))
    for n in range(size):
        solved = u[:, n : n + 1]
        out = out + scores[:, :, n : n + 1] * solved
        u = u - lower[:, :, n : n + 1] * solved
    return u, out


def column(gates: Array) -> Array:
    """[N,C] -> [N,C,1]: from the lanes to the sublanes."""
    size = gates.shape[1]
    i = jax.lax.broadcasted_iota(jnp.int32, (1, size, size), 1)
    j = jax.lax.broadcasted_iota(jnp.int32, (1, size, size), 2)
    return jnp.sum(jnp.where(i == j, gates[:, None, :], 0.0), axis=2, keepdims=True)


def dot(a: Array, b: Array, contract: tuple[tuple[int], tuple[int]]) -> Array:
    return jax.lax.dot_general(
        a, b, (contract, ((0,), (0,))), precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
