"""Mixture of experts: softmax router, fused expert matrices, optional shared expert behind a gate."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from eagle3_jax.config import TargetConfig
from eagle3_jax.layers.linear import Linear
from eagle3_jax.layers.mlp import MLP


class Experts(nnx.Module):
    """`gate_up_proj` [E,D,2F] (gate columns first) and `down_proj` [E,F,D]."""

    def __init__(self, config: TargetConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        e, d, f = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nnx.Param((jax.random.normal(rngs.params(), (e, d, 2 * f)) * d**-0.5).astype(dtype))
        self.down_proj = nnx.Param((jax.random.normal(rngs.params(), (e, f, d)) * f**-0.5).astype(dtype))

    def __call__(self, x: Array, group_sizes: Array) -> Array:
        """x [rows, D], sorted by expert; `group_sizes` [E] rows each."""
        gate, up = jnp.split(jax.lax.ragged_dot(x, self.gate_up_proj[...], group_sizes), 2, axis=-1)
        return jax.lax.ragged_dot(jax.nn.silu(gate) * up, self.down_proj[...], group_sizes)


class MoE(nnx.Module):
    """Each token goes through its `num_experts_per_tok` experts; no token is ever dropped.

    Tokens are sorted by expert, multiplied group by group (`ragged_dot`) and summed back in float32.
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
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self._route(flat)
        order = jnp.argsort(chosen.reshape(-1), stable=True)
        token = order // self.top_k
        group_sizes = jnp.bincount(chosen.reshape(-1), length=self.num_experts)
        out = self.experts(flat[token], group_sizes).astype(jnp.float32) * weights.reshape(-1)[order][:, None]
        mixed = jnp.zeros(flat.shape, jnp.float32).at[token].add(out).astype(x.dtype)
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            mixed = mixed + jax.nn.sigmoid(self.shared_expert_gate(flat)) * self.shared_expert(flat)
        return mixed.reshape(x.shape)

    def _route(self, flat: Array) -> tuple[Array, Array]:
        """Weights (float32) and expert ids [rows, top_k]; the softmax is over all experts, as in Qwen."""
        logits = jnp.matmul(flat, self.gate.kernel[...], preferred_element_type=jnp.float32)
        weights, chosen = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), self.top_k)
        if self.norm_topk:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return weights, chosen
