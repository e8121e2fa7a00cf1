"""Pallas GPU kernel of a residual addition and the RMSNorm of the sum: a row is read once and written once.

XLA makes three kernels of it when rows are few (the sum, the reduction, the scaling), and each lasts hardly longer than
its launch. Here a program holds a row in registers. Lowered by Pallas' Triton route, named explicitly; see
`pallas_kernels` on why.
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

MAX_WIDTH = 16384  # of a row: 64 elements a thread


@partial(jax.jit, static_argnames=("eps", "offset", "warps", "interpret"))  # lowered once for all layers
def add_rms_norm(
    x: Array, y: Array, weight: Array, *, eps: float, offset: float = 0.0, warps: int | None = None,
    interpret: Any = False,
) -> tuple[Array, Array]:  # fmt: skip
    """As `reference.add_rms_norm`, but that squares are added in another order. `warps`: a power of two, of a row.

    Raises NotImplementedError where there is no GPU, for x and y of different shapes or dtypes, rows wider than
    `MAX_WIDTH` and empty arrays. `interpret`: as of `pl.pallas_call`.
    """
    _check(x, y, interpret)
    width = x.shape[-1]
    block = pl.next_power_of_2(width)
    rows = jax.ShapeDtypeStruct((x.size // width, width), x.dtype)
    row = pl.BlockSpec((None, width), lambda r: (r, 0))
    total, normed = pl.pallas_call(
        partial(_kernel, block, eps, offset),
        grid=(rows.shape[0],),
        in_specs=[row, row, pl.BlockSpec((width,), lambda r: (0,))],
        out_specs=[row, row],
        out_shape=[rows, rows],
        compiler_params=plgpu.CompilerParams(num_warps=warps or (8 if block >= 4096 else 4), num_stages=1),
        interpret=interpret,
        name="add_rms_norm",
    )(x.reshape(rows.shape), y.reshape(rows.shape), weight)
    return total.reshape(x.shape), normed.reshape(x.shape)


def _check(x: Array, y: Array, interpret: Any) -> None:
    dispatch.require_gpu(interpret)
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        raise NotImplementedError(f"{y.dtype}{list(y.shape)} added to {x.dtype}{list(x.shape)}")
    if x.shape[-1] > MAX_WIDTH:
        raise NotImplementedError(f"rows of {x.shape[-1]}; at most {MAX_WIDTH}")
    if not x.size:
        raise NotImplementedError("no rows")


def _kernel(block: int, eps: float, offset: float, x: Any, y: Any, weight: Any, total: Any, normed: Any) -> None:
    at = jnp.arange(block, dtype=jnp.int32)
    there = at < x.shape[0]
    load = lambda ref: plgpu.load(ref.at[at], mask=there, other=0).astype(jnp.float32)
    rounded = (load(x) + load(y)).astype(x.dtype)
    plgpu.store(total.at[at], rounded, mask=there)
    s = rounded.astype(jnp.float32)
    s *= jax.lax.rsqrt(jnp.sum(s * s) / x.shape[0] + eps)
    plgpu.store(normed.at[at], (s * (load(weight) + offset)).astype(x.dtype), mask=there)


def small_case() -> tuple[Any, ...]:
    """Arguments of `add_rms_norm` in bfloat16: three rows whose width is no power of two."""
    rng = np.random.default_rng(0)
    half = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
    return half(3, 2560), half(3, 2560), half(2560)


interpreted = partial(add_rms_norm, interpret=True)
