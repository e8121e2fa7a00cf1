"""The gated feed-forward layer."""

from __future__ import annotations

import jax
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from eagle3_jax.layers.linear import Linear


class MLP(nnx.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, intermediate: int, *, bias: bool = False, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.gate_proj = Linear(hidden, intermediate, bias=bias, dtype=dtype, rngs=rngs)
        self.up_proj = Linear(hidden, intermediate, bias=bias, dtype=dtype, rngs=rngs)
        self.down_proj = Linear(intermediate, hidden, bias=bias, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))
