"""Pallas GPU kernel of what lies between a layer's projections and the delta rule, for a window.

XLA makes several small kernels of it: taking the tail, joining, convolving, two norms, gates. Here a program of one
warp takes the channels of one head of a row, of the queries, the keys or the values, and every input is read once and
every result written once. What is kept of the inputs for the next window replaces `past` in its own buffer, so that a
loop of cycles copies nothing: a program reads and writes its own channels alone, and reads them before it writes.
Lowered by Pallas' Triton route, named explicitly; see `pallas_kernels` on why.
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

from pallas_kernels import dispatch
from pallas_kernels.gated_delta.inputs_reference import EPS, Gates, Inputs

MAX_WINDOW = 16


@partial(jax.jit, static_argnames=("key_heads", "key_width", "gates_at", "interpret"))  # lowered once for all layers
def inputs(
    past: Array, start: Array, qkv: Array, gates: Gates, valid: Array, weight: Array, *, key_heads: int, key_width: int,
    gates_at: tuple[int, int] = (0, 0), interpret: Any = False,
) -> tuple[Array, Inputs]:  # fmt: skip
    """As `inputs_reference.inputs`. The buffer of `past` is reused where the caller donates it and the shape stays.

    Raises NotImplementedError where there is no GPU, for widths that are no powers of two, windows beyond 16, and where
    qkv and `past` differ in dtype. `interpret`: as of `pl.pallas_call`.
    """
    batch, window = qkv.shape[:2]
    (taps, channels), (heads,) = weight.shape, gates.a_log.shape
    value_width = (channels - 2 * key_heads * key_width) // heads
    _check(past, qkv, window, key_width, value_width, interpret)
    whole = lambda x: pl.BlockSpec(x.shape, lambda b, h: (0,) * x.ndim)
    row = lambda x: pl.BlockSpec((None, *x.shape[1:]), lambda b, h: (b, *(0 for _ in x.shape[1:])))
    shape = lambda *rest, dtype=jnp.float32: jax.ShapeDtypeStruct((batch, *rest), dtype)
    results = [
        shape(taps - 1 + window, channels, dtype=past.dtype),
        shape(window, key_heads, key_width), shape(window, key_heads, key_width), shape(window, heads, value_width),
        shape(window, heads), shape(window, heads),
    ]  # fmt: skip
    args = (past, start[:, None], qkv, *gates[:2], valid.astype(jnp.int32), *gates[2:], weight)
    history, *found = pl.pallas_call(
        partial(_kernel, gates_at),
        grid=(batch, 2 * key_heads + heads),
        in_specs=[*map(row, args[:6]), *map(whole, args[6:])],
        out_specs=list(map(row, results)),
        out_shape=results,
        input_output_aliases={0: 0} if results[0].shape == past.shape else {},
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="gated_delta_inputs",
    )(*args)
    return history, Inputs(*found)


def _check(past: Array, qkv: Array, window: int, key_width: int, value_width: int, interpret: Any) -> None:
    dispatch.require_gpu(interpret)
    if any(width & (width - 1) for width in (key_width, value_width)):
        raise NotImplementedError(f"heads of {key_width} and {value_width}: widths must be powers of two")
    if window > MAX_WINDOW:
        raise NotImplementedError(f"a window of {window} tokens; at most {MAX_WINDOW}")
    if past.dtype != qkv.dtype:
        raise NotImplementedError(f"inputs in {qkv.dtype} after others in {past.dtype}")


def _kernel(
    gates_at: tuple[int, int], past: Any, start: Any, qkv: Any, a: Any, b: Any, valid: Any, a_log: Any, dt_bias: Any,
    weight: Any, history: Any, q: Any, k: Any, v: Any, g: Any, beta: Any,
) -> None:  # fmt: skip
    part, (_, key_heads, key_width), (_, _, value_width) = pl.program_id(1), q.shape, v.shape
    convolve = partial(_convolve, past, start[0], qkv, weight, history)

    @pl.when(part < key_heads)
    def _queries() -> None:
        for t, x in enumerate(convolve(part * key_width, key_width)):
            q[t, part, :] = x * _over_length(x) * key_width**-0.5

    @pl.when((part >= key_heads) & (part < 2 * key_heads))
    def _keys() -> None:
        for t, x in enumerate(convolve(part * key_width, key_width)):
            k[t, part - key_heads, :] = x * _over_length(x)

    @pl.when(part >= 2 * key_heads)
    def _values_and_gates() -> None:
        head = part - 2 * key_heads
        for t, x in enumerate(convolve(2 * key_heads * key_width + head * value_width, value_width)):
            v[t, head, :] = x
        rate, bias = jnp.exp(a_log[head]), dt_bias[head]
        for t in range(v.shape[0]):
            decay, strength = a[t, gates_at[0] + head], b[t, gates_at[1] + head]
            counts = valid[t] != 0
            g[t, head] = jnp.where(counts, -rate * _softplus(decay.astype(jnp.float32) + bias), 0.0)
            beta[t, head] = jnp.where(counts, jax.nn.sigmoid(strength.astype(jnp.float32)), 0.0)


def _convolve(past: Any, start: Array, qkv: Any, weight: Any, history: Any, first: Array, width: int) -> list[Array]:
    """SiLU of the convolution of `width` channels from `first` on, for each token; their inputs go into `history`."""
    at, taps = pl.ds(first, width), weight.shape[0]
    seen = [past[start + i, at] for i in range(taps - 1)] + [qkv[t, at] for t in range(qkv.shape[0])]
    weights = [weight[i, at].astype(jnp.float32) for i in range(taps)]
    for i, x in enumerate(seen):
        history[i, at] = x
    seen = [x.astype(jnp.float32) for x in seen]
    found = []
    for t in range(qkv.shape[0]):
        total = jnp.zeros_like(seen[0])
        for i in range(taps):
            total += seen[t + i] * weights[i]
        # Rounded as the reference rounds what leaves the convolution.
        found.append((total * jax.nn.sigmoid(total)).astype(qkv.dtype).astype(jnp.float32))
    return found


def _over_length(x: Array) -> Array:
    return jax.lax.rsqrt(jnp.sum(x * x) + EPS)


def _softplus(x: Array) -> Array:
    return jnp.maximum(x, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(x)))


SMALL: dict[str, Any] = {"key_heads": 2, "key_width": 128, "gates_at": (1540, 1536)}
"""Options of `small_case`."""


def small_case() -> tuple[Any, ...]:
    """Arguments of `inputs` in bfloat16: three rows with tails in different places, projections side by side."""
    rng = np.random.default_rng(0)
    half = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
    side_by_side = half(3, 2, 1544)  # queries, keys, values, what gates the output, b and a
    gates = Gates(side_by_side, side_by_side, jnp.asarray(rng.random(4), jnp.float32), jnp.ones(4, jnp.float32))
    valid = jnp.asarray([[True, True], [True, False], [True, True]])
    return half(3, 5, 1024), jnp.array([0, 1, 2], jnp.int32), side_by_side, gates, valid, half(4, 1024)


interpreted = partial(inputs, interpret=True)
