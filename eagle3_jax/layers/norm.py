"""Root-mean-square norms."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike


def _normed(x: Array, eps: float) -> Array:
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)


def _broadcast(weight: Array, ndim: int) -> Array:
    return weight.astype(jnp.float32).reshape((1,) * (ndim - 1) + (-1,))


class RMSNorm(nnx.Module):
    """RMSNorm over the last axis, computed in float32. `zero_centered`: scales by 1 + weight (Qwen3.5, Qwen3-Next)."""

    def __init__(self, size: int, eps: float, *, zero_centered: bool = False, dtype: DTypeLike) -> None:
        self.weight = nnx.Param((jnp.zeros if zero_centered else jnp.ones)((size,), dtype))
        self.eps, self.zero_centered = eps, zero_centered

    def __call__(self, x: Array) -> Array:
        weight = _broadcast(self.weight[...], x.ndim) + float(self.zero_centered)
        return (_normed(x, self.eps) * weight).astype(x.dtype)


class GatedRMSNorm(nnx.Module):
    """RMSNorm(x) * silu(gate), of the delta-rule layers; scales by weight, whatever the family's other norms do."""

    def __init__(self, size: int, eps: float, *, dtype: DTypeLike) -> None:
        self.weight = nnx.Param(jnp.ones((size,), dtype))
        self.eps = eps

    def __call__(self, x: Array, gate: Array) -> Array:
        y = _normed(x, self.eps) * _broadcast(self.weight[...], x.ndim)
        return (y * jax.nn.silu(gate.astype(jnp.float32))).astype(gate.dtype)
