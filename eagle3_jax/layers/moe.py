"""Mixture of experts: softmax router, experts' matrices side by side, optional shared expert behind a gate."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from eagle3_jax.config import TargetConfig
from eagle3_jax.layers.linear import Linear
from eagle3_jax.layers.mlp import MLP
from eagle3_jax.quantization import Matrix, Quantized, matrix, ragged_dot
from eagle3_jax.sharding import Layout, current_layout

AT_ONCE = 8192  # tokens of a device, of which each has a row for each of its experts; fewer leave matrix units idle


class Experts(nnx.Module):
    """`gate_proj` and `up_proj` [E,D,F], `down_proj` [E,F,D]; quantised, scales [E,blocks,...] beside.

    Gate and up are apart, though one product of both would do: so a cut of F over devices is a cut of both.
    """

    def __init__(self, config: TargetConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        e, d, f = config.num_experts, config.hidden_size, config.moe_intermediate_size
        normal = lambda *shape: (jax.random.normal(rngs.params(), shape) * shape[1] ** -0.5).astype(dtype)
        self.gate_proj, self.up_proj = nnx.Param(normal(e, d, f)), nnx.Param(normal(e, d, f))
        self.down_proj = nnx.Param(normal(e, f, d))
        self.gate_proj_scale: nnx.Param[Array] | None = None
        self.up_proj_scale: nnx.Param[Array] | None = None
        self.down_proj_scale: nnx.Param[Array] | None = None
        self.block = 0


class Matrices(NamedTuple):
    """Router [D,E], and the experts' matrices: all of them, or a device's part."""

    router: Array
    gate: Matrix
    up: Matrix
    down: Matrix


def run_experts(x: Array, sizes: Array, matrices: Matrices, width: str | None = None) -> Array:
    """float32 [rows, D] of x [rows, D], sorted by expert, `sizes` [E] rows each; undefined for rows of no expert.

    width: the mesh axis that cuts D of x and of the matrices, if one does: the inner products are summed over it.
    """

    def product(w: Matrix) -> Array:
        if width is None:
            return ragged_dot(x, w, sizes)
        return jax.lax.psum(ragged_dot(x, w, sizes, jnp.float32), width).astype(x.dtype)

    return ragged_dot(jax.nn.silu(product(matrices.gate)) * product(matrices.up), matrices.down, sizes, jnp.float32)


def _placed(w: Matrix, spec: PartitionSpec, mesh: Mesh) -> tuple[Matrix, Any]:
    """`w` so that it can be cut by `spec`, and the specs of its arrays: scales go with the inputs that they scale."""
    if not isinstance(w, Quantized):
        return w, spec
    expert, inputs, outputs = spec
    w = w.in_parts(mesh.shape[inputs] if inputs else 1)
    scale: Any = PartitionSpec(expert, inputs if w.scale.shape[-2] > 1 else None, outputs)
    return w, dataclasses.replace(w, values=spec, scale=scale)  # type: ignore[arg-type]


class MoE(nnx.Module):
    """Each token goes through its `num_experts_per_tok` experts; no token is ever dropped.

    Tokens are sorted by expert, multiplied group by group (`ragged_dot`) and summed back in float32. On a mesh, each
    device sorts its own rows, takes those of its own experts, however many they are, through its own features of them,
    and gives them back to their tokens. Then one sum over the devices that share the experts ends the layer: nothing
    else of it is passed on, as XLA would if it were left to it.
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
        experts = (matrix(self.experts, name) for name in ("gate_proj", "up_proj", "down_proj"))
        matrices, layout = Matrices(self.gate.kernel[...], *experts), current_layout()
        mixed = self._mix(x, matrices).astype(x.dtype) if layout is None else self._spread(layout, x, matrices)
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            mixed = mixed + jax.nn.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return mixed

    def _spread(self, layout: Layout, x: Array, matrices: Matrices) -> Array:
        """`_mix` on each device over its rows and its part of the experts; no axis of the mesh is left to XLA.

        Where rows are spread over the axis that cuts D, as in training, the matrices are gathered over it first.
        """
        rows = layout.row_axes(x.shape[0])
        inward, outward = (
            layout.product_spec(axes, w.shape, rows)
            for axes, w in ((("expert", "embed", "mlp"), matrices.gate), (("expert", "mlp", "embed"), matrices.down))
        )
        expert, width, features = inward

        def local(x: Array, matrices: Matrices) -> Array:
            first = jax.lax.axis_index(expert) * matrices.gate.shape[0] if expert else 0
            mixed = self._mix(x, matrices, first, width)
            return jax.lax.psum(mixed, tuple(axis for axis in (expert, features) if axis)).astype(x.dtype)

        placed = [
            _placed(w, spec, layout.mesh) for w, spec in zip(matrices[1:], (inward, inward, outward), strict=True)
        ]
        cut = Matrices._make((matrices.router, *(w for w, _ in placed)))
        specs = Matrices._make((PartitionSpec(), *(spec for _, spec in placed)))
        return jax.shard_map(
            local, mesh=layout.mesh, in_specs=(PartitionSpec(rows or None), specs),
            out_specs=PartitionSpec(rows or None, None, width), check_vma=False,
        )(x, cut)  # fmt: skip

    def _mix(self, x: Array, matrices: Matrices, first: Array | int = 0, width: str | None = None) -> Array:
        """Of x [B,T,D], what the experts from `first` on, as many as are given, add to each token, in float32.

        width: the mesh axis that cuts D of the matrices, and then of the result. Many tokens go through in parts, one
        after another, since their rows and sums take `top_k` times their own memory.
        """
        flat = x.reshape(-1, x.shape[-1])
        some = partial(self._mix_some, matrices=matrices, first=first, width=width)
        parts = -(-len(flat) // AT_ONCE)
        if parts <= 1:
            return some(flat).reshape(*x.shape[:-1], -1)
        each = -(-len(flat) // parts)
        padded = jnp.pad(flat, ((0, parts * each - len(flat)), (0, 0)))
        mixed = jax.lax.map(some, padded.reshape(parts, each, -1))
        return mixed.reshape(parts * each, -1)[: len(flat)].reshape(*x.shape[:-1], -1)

    def _mix_some(self, flat: Array, matrices: Matrices, first: Array | int, width: str | None) -> Array:
        here = matrices.gate.shape[0]
        weights, chosen = self._route(flat, matrices.router)
        expert = chosen.reshape(-1) - first
        expert = jnp.where((expert >= 0) & (expert < here), expert, here)  # those of other devices stand last
        order = jnp.argsort(expert, stable=True)
        token = order // self.top_k
        if width is not None:
            own = matrices.gate.shape[1]
            flat = jax.lax.dynamic_slice_in_dim(flat, jax.lax.axis_index(width) * own, own, axis=1)
        out = run_experts(flat[token], jnp.bincount(expert, length=here), matrices, width)
        out = jnp.where((expert[order] < here)[:, None], out * weights.reshape(-1)[order][:, None], 0.0)
        return jnp.zeros(flat.shape, jnp.float32).at[token].add(out)

    def _route(self, flat: Array, router: Array) -> tuple[Array, Array]:
        """Weights (float32) and expert ids [rows, top_k]; the softmax is over all experts, as in Qwen."""
        logits = jnp.matmul(flat, router, preferred_element_type=jnp.float32)
        weights, chosen = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), self.top_k)
        if self.norm_topk:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return weights, chosen
