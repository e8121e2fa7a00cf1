"""Plain jnp form of root-mean-square norms (Zhang and Sennrich 2019), computed in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


def rms_norm(x: Array, weight: Array, *, eps: float, offset: float = 0.0) -> Array:
    """x [..., D] over the root of its mean square, times `weight` [D] plus `offset`; of the dtype of x."""
    single = x.astype(jnp.float32)
    normed = single * jax.lax.rsqrt(jnp.mean(jnp.square(single), axis=-1, keepdims=True) + eps)
    scale = weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,)) + offset
    return (normed * scale).astype(x.dtype)


def add_rms_norm(x: Array, y: Array, weight: Array, *, eps: float, offset: float = 0.0) -> tuple[Array, Array]:
    """x + y [..., D], rounded to their dtype, and its `rms_norm`."""
    total = x + y
    return total, rms_norm(total, weight, eps=eps, offset=offset)
