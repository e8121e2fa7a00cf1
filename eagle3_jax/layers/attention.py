"""Projections of grouped-query attention, with optional q/k norms and output gate. Where keys live is the caller's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from eagle3_jax.layers.linear import Linear
from eagle3_jax.layers.merged import MergedLinear, merge, project
from eagle3_jax.layers.norm import RMSNorm
from eagle3_jax.layers.rope import rotate
from eagle3_jax.sharding import pin_rows

Attend = Callable[[Array, Array, Array], Array]
"""(q [B,T,N,H], k [B,T,K,H], v [B,T,K,H]) -> [B,T,N,H]: keeps k and v wherever they live, and attends."""


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """Sizes and switches of one attention layer. `d_in` may be wider than `d_out` (an EAGLE-3 head's first layer)."""

    d_in: int
    d_out: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    qk_norm: bool = False
    zero_centered_norm: bool = False
    output_gate: bool = False
    bias: bool = False
    out_bias: bool = False


class Attention(nnx.Module):
    """Attention of the Llama and Qwen families. With `output_gate`, q_proj is doubled: each head is [query | gate]."""

    def __init__(self, shape: AttentionShape, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        s = shape
        q_out = s.num_heads * s.head_dim * (2 if s.output_gate else 1)
        kv_out = s.num_kv_heads * s.head_dim
        self.q_proj: Linear | None = Linear(s.d_in, q_out, bias=s.bias, dtype=dtype, rngs=rngs)
        self.k_proj: Linear | None = Linear(s.d_in, kv_out, bias=s.bias, dtype=dtype, rngs=rngs)
        self.v_proj: Linear | None = Linear(s.d_in, kv_out, bias=s.bias, dtype=dtype, rngs=rngs)
        self.qkv_proj: MergedLinear | None = None
        self.o_proj = Linear(s.num_heads * s.head_dim, s.d_out, bias=s.out_bias, dtype=dtype, rngs=rngs)
        norm = partial(RMSNorm, s.head_dim, s.norm_eps, zero_centered=s.zero_centered_norm, dtype=dtype)
        self.q_norm = norm() if s.qk_norm else None
        self.k_norm = norm() if s.qk_norm else None
        self.shape = shape

    def merge(self) -> None:
        """One product for queries (with their gate), keys and values, see `eagle3_jax.layers.merged`."""
        merge(self, "qkv_proj", ("q_proj", "k_proj", "v_proj"))

    def __call__(self, x: Array, cos_sin: tuple[Array, Array], attend: Attend) -> Array:
        q, k, v, gate = self._project(pin_rows(x))
        out = attend(rotate(q, *cos_sin), rotate(k, *cos_sin), v)
        out = out.reshape(*x.shape[:2], -1)
        if gate is not None:
            out = out * jax.nn.sigmoid(gate)
        return self.o_proj(out)

    def _project(self, x: Array) -> tuple[Array, Array, Array, Array | None]:
        width, gate = self.shape.head_dim, None
        q, k, v = project(x, self.qkv_proj, self.q_proj, self.k_proj, self.v_proj)
        if self.shape.output_gate:
            paired = q.reshape(*x.shape[:2], -1, 2 * width)
            q, gate = paired[..., :width], paired[..., width:].reshape(*x.shape[:2], -1)
        q, k, v = (y.reshape(*x.shape[:2], -1, width) for y in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v, gate
