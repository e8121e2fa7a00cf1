"""Matrices: a linear map and a token embedding, in the layout the rest of the library expects."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike


class Linear(nnx.Module):
    """y = x @ kernel (+ bias). `kernel` is [in, out]: the transpose of Hugging Face's `weight`."""

    def __init__(self, d_in: int, d_out: int, *, bias: bool = False, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        scale = d_in**-0.5
        self.kernel = nnx.Param((jax.random.normal(rngs.params(), (d_in, d_out)) * scale).astype(dtype))
        self.bias = nnx.Param(jnp.zeros((d_out,), dtype)) if bias else None

    def __call__(self, x: Array) -> Array:
        y = jnp.matmul(x, self.kernel[...])
        return y if self.bias is None else y + self.bias[...].reshape((1,) * (y.ndim - 1) + (-1,))


class Embedding(nnx.Module):
    """Rows of `weight` [V, D]; `attend` uses the same matrix as an output projection (tied embeddings)."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.weight = nnx.Param((jax.random.normal(rngs.params(), (vocab_size, hidden_size)) * 0.02).astype(dtype))

    def __call__(self, token_ids: Array) -> Array:
        # Clipped, so that an id outside the table can never read another row's memory as NaN.
        return jnp.take(self.weight[...], token_ids, axis=0, mode="clip")

    def attend(self, x: Array) -> Array:
        return jnp.einsum("...D,VD->...V", x, self.weight[...], preferred_element_type=jnp.float32)
