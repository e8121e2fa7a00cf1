"""Root-mean-square norms."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.norm import add_rms_norm, rms_norm


class RMSNorm(nnx.Module):
    """RMSNorm over the last axis, computed in float32. `zero_centered`: scales by 1 + weight (Qwen3.5, Qwen3-Next)."""

    def __init__(self, size: int, eps: float, *, zero_centered: bool = False, dtype: DTypeLike) -> None:
        self.weight = nnx.Param((jnp.zeros if zero_centered else jnp.ones)((size,), dtype))
        self.eps, self.zero_centered = eps, zero_centered

    def __call__(self, x: Array) -> Array:
        return rms_norm(x, self.weight[...], eps=self.eps, offset=float(self.zero_centered))

    def add(self, x: Array, y: Array, implementation: str | None) -> tuple[Array, Array]:
        """x + y, the residual stream and what a block adds to it, and the norm of the sum; both [..., D].

        implementation: of `pallas_kernels.norm.add_rms_norm`, whose kernel has no gradients.
        """
        offset = float(self.zero_centered)
        return add_rms_norm(x, y, self.weight[...], eps=self.eps, offset=offset, implementation=implementation)


class GatedRMSNorm(nnx.Module):
    """RMSNorm(x) * silu(gate), of the delta-rule layers; scales by weight, whatever the family's other norms do."""

    def __init__(self, size: int, eps: float, *, dtype: DTypeLike) -> None:
        self.weight = nnx.Param(jnp.ones((size,), dtype))
        self.eps = eps

    def __call__(self, x: Array, gate: Array) -> Array:
        y = rms_norm(x.astype(jnp.float32), self.weight[...], eps=self.eps)
        return (y * jax.nn.silu(gate.astype(jnp.float32))).astype(gate.dtype)
