"""Mixture of experts: softmax router, fused expert matrices, optional shared expert behind a gate."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from eagle3_jax.config import TargetConfig
from eagle3_jax.layers.linear import Linear
from eagle3_jax.layers.mlp import MLP
from eagle3_jax.quantization import Matrix, matrix, ragged_dot
from eagle3_jax.sharding import Layout, current_layout


class Experts(nnx.Module):
    """`gate_up_proj` [E,D,2F] (gate columns first) and `down_proj` [E,F,D]; quantised, scales [E,blocks,...] beside."""

    def __init__(self, config: TargetConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        e, d, f = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nnx.Param((jax.random.normal(rngs.params(), (e, d, 2 * f)) * d**-0.5).astype(dtype))
        self.down_proj = nnx.Param((jax.random.normal(rngs.params(), (e, f, d)) * f**-0.5).astype(dtype))
        self.gate_up_proj_scale: nnx.Param[Array] | None = None
        self.down_proj_scale: nnx.Param[Array] | None = None
        self.block = 0


Matrices = tuple[Array, Matrix, Matrix]
"""Router [D,E], and the experts' `gate_up_proj` and `down_proj`, all of them or those of one device."""


def run_experts(x: Array, group_sizes: Array, gate_up_proj: Matrix, down_proj: Matrix) -> Array:
    """x [rows, D], sorted by expert; `group_sizes` [E] rows each. What comes out for rows of no group is undefined."""
    gate, up = jnp.split(ragged_dot(x, gate_up_proj, group_sizes), 2, axis=-1)
    return ragged_dot(jax.nn.silu(gate) * up, down_proj, group_sizes)


class MoE(nnx.Module):
    """Each token goes through its `num_experts_per_tok` experts; no token is ever dropped.

    Tokens are sorted by expert, multiplied group by group (`ragged_dot`) and summed back in float32. On a mesh, each
    device sorts its own rows, takes those of its own experts, however many they are, and the parts are summed over the
    expert axis: left to itself, XLA would gather every expert on every device.
    """

    def __init__(self, config: TargetConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.gate = Linear(config.hidden_size, config.num_experts, dtype=dtype, rngs=rngs)
        self.experts = Experts(config, dtype=dtype, rngs=rngs)
        shared = config.shared_expert_intermediate_size
        self.shared_expert = MLP(config.hidden_size, shared, dtype=dtype, rngs=rngs) if shared else None
        self.shared_expert_gate = Linear(config.hidden_size, 1, dtype=dtype, rngs=rngs) if shared else None
        self.top_k, self.num_experts, self.norm_topk = (
            config.num_experts_per_tok,
            config.num_experts,
            config.norm_topk_prob,
        )

    def __call__(self, x: Array) -> Array:
        gate_up_proj, down_proj = matrix(self.experts, "gate_up_proj"), matrix(self.experts, "down_proj")
        matrices = (self.gate.kernel[...], gate_up_proj, down_proj)
        layout = current_layout()
        mixed = self._mix(x, matrices, 0) if layout is None else self._spread(layout, x, matrices)
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            mixed = mixed + jax.nn.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return mixed

    def _spread(self, layout: Layout, x: Array, matrices: Matrices) -> Array:
        """`_mix` on each device over its rows and experts; the tensor axis stays XLA's."""
        rows = layout.row_axes(x.shape[0])
        split = self.num_experts % layout.mesh.shape["expert"] == 0

        def local(x: Array, matrices: Matrices) -> Array:
            first = jax.lax.axis_index("expert") * matrices[1].shape[0] if split else 0
            mixed = self._mix(x, matrices, first, jnp.float32)
            return (jax.lax.psum(mixed, "expert") if split else mixed).astype(x.dtype)

        by_row, by_expert = PartitionSpec(rows or None), PartitionSpec("expert" if split else None)
        return jax.shard_map(
            local, mesh=layout.mesh, in_specs=(by_row, (PartitionSpec(), by_expert, by_expert)), out_specs=by_row,
            axis_names={*rows, "expert"}, check_vma=False,
        )(x, matrices)  # fmt: skip

    def _mix(self, x: Array, matrices: Matrices, first: Array | int, dtype: DTypeLike | None = None) -> Array:
        """Of x [B,T,D], what the experts from `first` on, as many as are given, add to each token."""
        router, gate_up_proj, down_proj = matrices
        flat, here = x.reshape(-1, x.shape[-1]), gate_up_proj.shape[0]
        weights, chosen = self._route(flat, router)
        expert = chosen.reshape(-1) - first
        expert = jnp.where((expert >= 0) & (expert < here), expert, here)  # those of other devices stand last
        order = jnp.argsort(expert, stable=True)
        token = order // self.top_k
        out = run_experts(flat[token], jnp.bincount(expert, length=here), gate_up_proj, down_proj)
        scale = weights.reshape(-1)[order][:, None]
        out = jnp.where((expert[order] < here)[:, None], out.astype(jnp.float32) * scale, 0.0)
        return jnp.zeros(flat.shape, jnp.float32).at[token].add(out).astype(dtype or x.dtype).reshape(x.shape)

    def _route(self, flat: Array, router: Array) -> tuple[Array, Array]:
        """Weights (float32) and expert ids [rows, top_k]; the softmax is over all experts, as in Qwen."""
        logits = jnp.matmul(flat, router, preferred_element_type=jnp.float32)
        weights, chosen = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), self.top_k)
        if self.norm_topk:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return weights, chosen
