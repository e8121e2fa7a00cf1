"""Pallas TPU kernel of the delta rule over a prompt: chunk after chunk, with the state in vector memory throughout.

The algebra of `reference.chunked`. A grid step is one chunk of one row and of 8 key heads with their value heads; the
triangular system is solved in blocks of 16 rows, columns one after the other within a block, a product between blocks.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.gated_delta.tpu import by_head, check_state, column, dot, key_heads_per_block

CHUNK = 64
SOLVED_AT_ONCE = 16
VMEM_BYTES = 48 << 20


def chunked(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, *, segment_ids: Array | None = None,
    interpret: Any = False,
) -> tuple[Array, Array]:  # fmt: skip
    """As `reference.chunked`, but without gradients. The state's buffer is reused where the caller donates it.

    Raises NotImplementedError for packed rows, and for states as `tpu.step` does. `interpret`: of `pl.pallas_call`.
    """
    if segment_ids is not None:
        raise NotImplementedError("rows of several segments")
    check_state(state, k.shape[2])
    batch, tokens, key_heads, key_width = k.shape
    heads, value_width = v.shape[2:]
    size = min(CHUNK, -(-tokens // SOLVED_AT_ONCE) * SOLVED_AT_ONCE)
    chunks = pl.cdiv(tokens, size)
    block_keys = key_heads_per_block(key_heads)
    block = block_keys * heads // key_heads

    pad = lambda x: jnp.pad(x, [(0, 0), (0, chunks * size - tokens), *[(0, 0)] * (x.ndim - 2)])
    by_chunk = lambda x: jnp.swapaxes(pad(x.astype(jnp.float32)).reshape(batch, chunks, size, heads), 2, 3)
    vectors = lambda n, width: pl.BlockSpec((None, size, n, width), lambda b, h, c: (b, c, h, 0))
    gates = pl.BlockSpec((None, None, block, size), lambda b, h, c: (b, c, h, 0))
    states = pl.BlockSpec((None, block, key_width, value_width), lambda b, h, c: (b, h, 0, 0))
    out, state = pl.pallas_call(
        _kernel,
        grid=(batch, key_heads // block_keys, chunks),
        in_specs=[
            states, vectors(block_keys, key_width), vectors(block_keys, key_width), vectors(block, value_width),
            gates, gates,
        ],
        out_specs=[states, vectors(block, value_width)],
        out_shape=[
            jax.ShapeDtypeStruct(state.shape, jnp.float32),
            jax.ShapeDtypeStruct((batch, chunks * size, heads, value_width), jnp.float32),
        ],
        input_output_aliases={0: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        interpret=interpret,
        name="gated_delta_chunked",
    )(state, pad(q), pad(k), pad(v), by_chunk(g), by_chunk(beta))[::-1]  # fmt: skip
    return out[:, :tokens], state


def _kernel(before: Any, q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, out: Any) -> None:
    @pl.when(pl.program_id(2) == 0)
    def begin() -> None:
        state[...] = before[...]

    repeats = state.shape[0] // k.shape[1]
    q_, k_ = (by_head(x, repeats) for x in (q, k))
    o, after = _chunk(state[...], q_, k_, by_head(v), column(g[...]), column(beta[...]))
    out[...] = jnp.swapaxes(o, 0, 1)
    state[...] = after


def _chunk(state: Array, q: Array, k: Array, v: Array, g: Array, beta: Array) -> tuple[Array, Array]:
    """state [N,M,P], q, k [N,C,M], v [N,C,P], g, beta [N,C,1]: outputs [N,C,P] and the state after them."""
    size = k.shape[1]
    i, j = (lax.broadcasted_iota(jnp.int32, (1, size, size), axis) for axis in (1, 2))
    # G_i - G_j, each summed on its own: see the reference.
    lower = jnp.broadcast_to(jnp.where(j <= i, 1.0, 0.0), (g.shape[0], size, size))
    sums = dot(lower, jnp.where(j < i, g, 0.0), ((2,), (1,)))
    decay = jnp.exp(jnp.where(j <= i, sums, -jnp.inf))
    from_start = jnp.exp(sums[:, :, :1] + g[:, :1])
    to_end = column(decay[:, size - 1])

    system = jnp.where(j < i, dot(k, k, ((2,), (2,))) * decay * beta, 0.0)
    u = _solve(system, beta * (v - from_start * dot(k, state, ((2,), (1,)))))
    out = from_start * dot(q, state, ((2,), (1,)))
    out = out + dot(dot(q, k, ((2,), (2,))) * decay, u, ((2,), (1,)))
    return out, state * from_start[:, size - 1 :] + dot(k, to_end * u, ((1,), (1,)))


def _solve(system: Array, right: Array) -> Array:
    """u of (I + system) u = right, [N,C,C] strictly lower triangular and [N,C,P]."""
    solved: list[Array] = []
    for start in range(0, system.shape[1], SOLVED_AT_ONCE):
        rows = slice(start, start + SOLVED_AT_ONCE)
        u = right[:, rows]
        if solved:
            u = u - dot(system[:, rows, :start], jnp.concatenate(solved, axis=1), ((2,), (1,)))
        own = system[:, rows, rows]
        for n in range(SOLVED_AT_ONCE):
            u = u - own[:, :, n : n + 1] * u[:, n : n + 1]
        solved.append(u)
    return jnp.concatenate(solved, axis=1)
