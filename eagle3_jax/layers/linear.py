"""Matrices: a linear map and a token embedding, in the layout the rest of the library expects."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from eagle3_jax.quantization import matmul, matrix
from eagle3_jax.sharding import pin, pin_rows


@jax.custom_vjp
def logits(x: Array, kernel: Array) -> Array:
    """float32 [..., V] of x [..., D] and kernel [D, V]. Gradients are multiplied in the dtype of x.

    Differentiated automatically, half-precision operands would be widened to meet the float32 gradient: products at
    half the speed and twice the bytes, of the largest array there is.
    """
    return jnp.matmul(x, kernel, preferred_element_type=jnp.float32)


def _logits_forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return logits(x, kernel), (x, kernel)


def _logits_backward(kept: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, kernel = kept
    gradient = gradient.astype(x.dtype)
    return jnp.matmul(gradient, kernel.T), jnp.einsum("...D,...V->DV", x, gradient).astype(kernel.dtype)


logits.defvjp(_logits_forward, _logits_backward)


class Linear(nnx.Module):
    """y = x @ kernel (+ bias). `kernel` is [in, out]: the transpose of Hugging Face's `weight`.

    Quantised (`eagle3_jax.quantization`), it holds bytes, and `kernel_scale` [blocks, out] what they are multiplied by.
    """

    def __init__(self, d_in: int, d_out: int, *, bias: bool = False, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        scale = d_in**-0.5
        self.kernel = nnx.Param((jax.random.normal(rngs.params(), (d_in, d_out)) * scale).astype(dtype))
        self.kernel_scale: nnx.Param[Array] | None = None
        self.block = 0
        self.bias = nnx.Param(jnp.zeros((d_out,), dtype)) if bias else None

    def __call__(self, x: Array) -> Array:
        y = matmul(x, matrix(self, "kernel"))
        return y if self.bias is None else y + self.bias[...].reshape((1,) * (y.ndim - 1) + (-1,))


class Embedding(nnx.Module):
    """Rows of `weight` [V, D]; `attend` uses the same matrix as an output projection (tied embeddings)."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.weight = nnx.Param((jax.random.normal(rngs.params(), (vocab_size, hidden_size)) * 0.02).astype(dtype))

    def __call__(self, token_ids: Array) -> Array:
        # Clipped, so that an id outside the table can never read another row's memory as NaN.
        found = jnp.take(self.weight[...], token_ids, axis=0, mode="clip")
        # Where one axis of a mesh cuts both the table's width and the rows, XLA must be shown the way from one to the
        # other: it would hold all rows of the batch on every device.
        return pin_rows(pin(found, "slots", "replicated", "embed"))

    def attend(self, x: Array) -> Array:
        return jnp.einsum("...D,VD->...V", x, self.weight[...], preferred_element_type=jnp.float32)
