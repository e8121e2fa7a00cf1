"""Plain jnp form of a product with a matrix in one byte."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

FEW_ROWS = 64
"""Up to so many, products of single blocks of inputs are fewer bytes than a matrix written out and read again."""

Tree = TypeVar("Tree", bound=Any)


def held(weights: Tree, x: Array) -> Tree:
    """`weights`, as something that depends on x.

    Weights do not change in a loop of decoding steps. XLA for GPUs would therefore widen them once, before the loop,
    and then read in every step the very bytes that were to be saved.
    """
    return jax.lax.optimization_barrier((weights, x))[0] if jax.default_backend() == "gpu" else weights


def quantized_matmul(x: Array, values: Array, scale: Array, *, block: int, parts: int = 1) -> Array:
    """x [..., in] @ (values [in, out] times their scales), in the dtype of x; see the package.

    The values are exact in bfloat16, so that the conversion is all that stands before the product and XLA can fuse it
    in. Scales by block come in between, and then XLA writes the matrix out in full in all but the smallest programs.
    With few rows the blocks' own products are scaled and summed instead; more rows outweigh the matrix.
    """
    values, scale = held((values, scale), x)
    if len(scale) == 1:
        y = jnp.matmul(x, values.astype(x.dtype), preferred_element_type=jnp.float32)
        return (y * scale.reshape((1,) * (y.ndim - 1) + (-1,))).astype(x.dtype)
    if x.size <= FEW_ROWS * x.shape[-1] and x.shape[-1] % (block * parts) == 0:
        return sum_of_blocks(x, values, scale, block)
    return jnp.matmul(x, dequantize(values, scale, block).astype(x.dtype))


def sum_of_blocks(x: Array, values: Array, scale: Array, block: int) -> Array:
    """Without the matrix in full, but with a product [rows, out] for each block, which must be whole."""
    inputs = x.reshape(-1, len(scale), block)
    matrices = values.reshape(-1, block, values.shape[-1]).astype(x.dtype)
    y = jnp.einsum("mbk,bkn->bmn", inputs, matrices, preferred_element_type=jnp.float32)
    return jnp.sum(y * scale[:, None], axis=0).astype(x.dtype).reshape(*x.shape[:-1], -1)


def dequantize(values: Array, scale: Array, block: int) -> Array:
    """values [..., in, out] times scale [..., blocks, out], in float32."""
    return values.astype(jnp.float32) * spread(scale, block, values.shape[-2])


def spread(scale: Array, block: int, inputs: int) -> Array:
    """Each input's own scale; of one block, something that broadcasts."""
    return scale if scale.shape[-2] == 1 else jnp.repeat(scale, block, axis=-2)[..., :inputs, :]
