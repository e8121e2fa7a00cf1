"""Few rows times a matrix in one byte. Letters: M rows. The floor adds up the bytes of the matrix, once each.

The way "bfloat16" is XLA's product with the same matrix in bfloat16, twice the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.cases.case import KERNEL, Case, Draw, Grid, Sizes, Way, implementations
from pallas_kernels.quantized_matmul import dequantize, quantized_matmul

ROWS = (1, 4, 64)
KINDS = {"int8": (jnp.int8, 127.0), "e4m3": (jnp.float8_e4m3fn, 448.0)}


def cases(s: Sizes, g: Grid) -> Iterator[Case]:
    for shape in ((s.hidden, 6 * s.hidden), (3 * s.hidden, s.hidden)):  # into an MLP of 3 times the width, out of it
        yield from (_product(shape, rows, kind) for kind in KINDS for rows in ROWS)


def _product(shape: tuple[int, int], rows: int, kind: str) -> Case:
    inputs, outputs = shape
    dtype, largest = KINDS[kind]

    def make(key: Array) -> tuple[Any, ...]:
        draw = Draw(key)
        values = jnp.clip(draw.half(*shape) * (largest / 4), -largest, largest)
        scale = (1 + draw.uniform(1, outputs)) / largest
        return draw.half(rows, inputs), values.astype(dtype), scale

    ways = implementations(partial(quantized_matmul, block=inputs), "reference", KERNEL)
    ways["bfloat16"] = Way(jnp.matmul, _in_bfloat16)
    size, flops = inputs * outputs, 2 * rows * inputs * outputs
    name = f"M {rows}, {inputs} x {outputs} {kind}"
    return Case("quantized_matmul", name, make, ways, _exact, _floor, bytes=size, flops=flops)


def _in_bfloat16(x: Array, values: Array, scale: Array) -> tuple[Array, Array]:
    return x, dequantize(values, scale, len(values)).astype(x.dtype)


def _exact(x: Array, values: Array, scale: Array) -> Array:
    return jnp.matmul(x, dequantize(values, scale, len(values)))


def _floor(x: Array, values: Array, scale: Array) -> Array:
    """An int32 sum of all bytes, four at a time."""
    return jnp.sum(jax.lax.bitcast_convert_type(values.reshape(-1, 4), jnp.int32), dtype=jnp.int32)
