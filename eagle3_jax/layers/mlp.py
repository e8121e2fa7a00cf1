"""The gated feed-forward layer."""

from __future__ import annotations

import jax
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from eagle3_jax.layers.linear import Linear
from eagle3_jax.layers.merged import MergedLinear, merge, project


class MLP(nnx.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, intermediate: int, *, bias: bool = False, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.gate_proj: Linear | None = Linear(hidden, intermediate, bias=bias, dtype=dtype, rngs=rngs)
        self.up_proj: Linear | None = Linear(hidden, intermediate, bias=bias, dtype=dtype, rngs=rngs)
        self.gate_up_proj: MergedLinear | None = None
        self.down_proj = Linear(intermediate, hidden, bias=bias, dtype=dtype, rngs=rngs)

    def merge(self) -> None:
        """One product for gate and up, see `eagle3_jax.layers.merged`."""
        merge(self, "gate_up_proj", ("gate_proj", "up_proj"))

    def __call__(self, x: Array) -> Array:
        gate, up = project(x, self.gate_up_proj, self.gate_proj, self.up_proj)
        return self.down_proj(jax.nn.silu(gate) * up)
