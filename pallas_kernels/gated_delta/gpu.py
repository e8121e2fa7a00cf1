"""Pallas GPU kernel of one cycle of a delta-rule layer: what was accepted is folded in, the new window is verified.

XLA reads the state three times and writes it once, in four kernels; here a program holds some columns of one head's
state in registers, so that it is read once and written once, in place. Columns do not meet in the delta rule: each is a
recurrence of its own, and only the small products of keys and queries are computed again for each group of columns.
Everything is plain float32 arithmetic, no tensor cores: the kernel is bound by the bytes of the state.

It is lowered by Pallas' Triton route, named explicitly. That route is deprecated since jax 0.11, and Mosaic GPU is to
follow it; this kernel is a page of elementwise products and sums, which Mosaic GPU does not lay out by itself.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.gated_delta.reference import Pending

MAX_WINDOW = 16
COLUMNS = 32  # of the state in one program: 128 bytes of each row, and programs enough for every multiprocessor


def step(
    state: Array, pending: Pending, q: Array, k: Array, v: Array, g: Array, beta: Array, *, interpret: Any = False
) -> tuple[Array, Array, Array]:
    """As `reference.step`, whose shapes and results it has. The state's buffer is reused where the caller donates it.

    Raises NotImplementedError where there is no GPU, and for widths that are no powers of two, windows beyond 16 and
    states that are not float32. `interpret`: as of `pl.pallas_call`.
    """
    _check(state, max(k.shape[1], pending.keys.shape[1]), interpret)
    batch, heads, key_width, value_width = state.shape
    repeats, columns = heads // k.shape[2], min(COLUMNS, value_width)
    keys = lambda x: pl.BlockSpec((None, x.shape[1], None, key_width), lambda b, h, p: (b, 0, h // repeats, 0))
    values = lambda x: pl.BlockSpec((None, x.shape[1], None, columns), lambda b, h, p: (b, 0, h, p))
    gates = lambda x: pl.BlockSpec((None, x.shape[1], None), lambda b, h, p: (b, 0, h))
    states = pl.BlockSpec((None, None, key_width, columns), lambda b, h, p: (b, h, 0, p))
    like_v = jax.ShapeDtypeStruct(v.shape, jnp.float32)
    out, updates, state = pl.pallas_call(
        _kernel,
        grid=(batch, heads, value_width // columns),
        in_specs=[
            pl.BlockSpec((1,), lambda b, h, p: (b,)), states, keys(pending.keys), values(pending.updates),
            gates(pending.log_decay), keys(q), keys(k), values(v), gates(g), gates(beta),
        ],
        out_specs=[values(v), values(v), states],
        out_shape=[like_v, like_v, jax.ShapeDtypeStruct(state.shape, jnp.float32)],
        input_output_aliases={1: 2},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="gated_delta_step",
    )(pending.accepted, state, pending.keys, pending.updates, pending.log_decay, q, k, v, g, beta)  # fmt: skip
    return out, updates, state


def _check(state: Array, window: int, interpret: Any) -> None:
    if jax.default_backend() != "gpu" and not interpret:
        raise NotImplementedError("this kernel is for GPUs")
    if state.dtype != jnp.float32:
        raise NotImplementedError(f"a state in {state.dtype}, not float32")
    if any(width & (width - 1) for width in state.shape[2:]):
        raise NotImplementedError(f"heads of {state.shape[2:]}: widths must be powers of two")
    if window > MAX_WINDOW:
        raise NotImplementedError(f"a window of {window} tokens; at most {MAX_WINDOW}")


def _kernel(
    accepted: Any, state: Any, old_keys: Any, old_updates: Any, old_decay: Any,
    q: Any, k: Any, v: Any, g: Any, beta: Any, out: Any, updates: Any, new_state: Any,
) -> None:  # fmt: skip
    s = _fold(state[...], accepted[0], old_keys, old_updates, old_decay)
    new_state[...] = s
    solved: list[Array] = []
    since_start = jnp.float32(0.0)
    for t in range(k.shape[0]):
        key, query = _row(k, t), _row(q, t)
        since_start += g[t].astype(jnp.float32)
        decay = jnp.exp(since_start)
        read, said = decay * jnp.sum(s * key[:, None], axis=0), decay * jnp.sum(s * query[:, None], axis=0)
        since = jnp.float32(0.0)
        for j in reversed(range(t)):  # each decay is a sum of its own, never a difference of two long ones
            since += g[j + 1].astype(jnp.float32)
            earlier, weight = _row(k, j), jnp.exp(since)
            read += weight * jnp.sum(earlier * key) * solved[j]
            said += weight * jnp.sum(earlier * query) * solved[j]
        solved.append(beta[t].astype(jnp.float32) * (_row(v, t) - read))
        updates[t, :] = solved[t]
        out[t, :] = said + jnp.sum(key * query) * solved[t]


def _fold(s: Array, accepted: Array, keys: Any, updates: Any, decay: Any) -> Array:
    """The state [M, columns] after the first `accepted` tokens of the last window."""
    added, to_end = jnp.zeros_like(s), jnp.float32(0.0)
    for j in reversed(range(keys.shape[0])):
        counts = j < accepted
        update = jnp.where(counts, jnp.exp(to_end) * _row(updates, j), 0.0)  # what was rejected may be anything
        added += jnp.where(counts, _row(keys, j), 0.0)[:, None] * update[None, :]
        to_end += jnp.where(counts, decay[j].astype(jnp.float32), 0.0)
    return s * jnp.exp(to_end) + added


def _row(ref: Any, t: int) -> Array:
    return ref[t, :].astype(jnp.float32)


def small_case() -> tuple[Any, ...]:
    """Arguments of `step`: three rows that accepted 0, 1 and 2 tokens, grouped heads, of the usual widths."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=(3, *shape)), jnp.float32)
    unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    decay = lambda: jnp.asarray(-rng.random((3, 2, 4)), jnp.float32)
    pending = Pending(unit(normal(2, 2, 128)), normal(2, 4, 128), decay(), jnp.arange(3, dtype=jnp.int32))
    q, k, v = unit(normal(2, 2, 128)), unit(normal(2, 2, 128)), normal(2, 4, 128)
    return normal(4, 128, 128), pending, q, k, v, decay(), -decay()


interpreted = partial(step, interpret=True)
