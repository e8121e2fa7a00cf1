"""One optimizer step, compiled once for each bucket length."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from eagle3_jax.drafters.eagle3 import Eagle3
from eagle3_jax.precision import join, matmul_precision, split
from eagle3_jax.sharding import MESH_AXES, param_sharding
from eagle3_jax.target import Target
from train.data.batches import Batch
from train.data.vocab import draft_index
from train.features import Features, target_features
from train.loss import StepSums, step_sums, total_loss
from train.objective import KL, Objective
from train.params import DraftGraph, Params, split_drafter
from train.rows import spread_rows
from train.ttt import unroll


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What a step changes: float32 master weights and the optimizer's state."""

    params: Params
    opt_state: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Frozen:
    """What no step changes.

    target: the target's arrays. fixed: the drafter's arrays that are not trained. teacher: [D, U], the target's output
    projection for the draft vocabulary. draft_index: [V] int32, see `vocab.draft_index`.
    """

    target: list[Array]
    fixed: list[Array]
    teacher: Array
    draft_index: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Metrics:
    """Of one batch, before its update."""

    loss: Array
    grad_norm: Array
    sums: StepSums


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """tokens [B, T] int32, mask [B, T] bool, in packed rows segment_ids [B, T] int32, in offline mode features."""

    tokens: Array
    mask: Array
    segment_ids: Array | None = None
    features: Features | None = None


@dataclasses.dataclass(frozen=True)
class Model:
    """Target and drafter without their arrays, and how the drafter is unrolled."""

    target_graph: Any
    target_tree: Any
    draft: DraftGraph
    aux_layers: tuple[int, ...]
    num_steps: int
    decay: float = 0.8
    dtype: DTypeLike = jnp.float32
    remat: bool = False
    objective: Objective = KL

    def target(self, frozen: Frozen) -> Target:
        return join(self.target_graph, self.target_tree, frozen.target)

    def drafter(self, params: Params, frozen: Frozen) -> Eagle3:
        return self.draft.merge(params, frozen.fixed, self.dtype)

    def outputs(
        self,
        params: Params,
        frozen: Frozen,
        aux: tuple[Array, ...],
        tokens: Array,
        segment_ids: Array | None = None,
    ) -> Array:
        """The drafter's outputs at every step, [n, B, T, D]."""
        merge = lambda: self.drafter(params, frozen)
        owner: Any = merge() if merge().config.own_embedding else self.target(frozen)
        embeds = owner.embed_tokens(tokens).astype(self.dtype)
        aux = tuple(a.astype(self.dtype) for a in aux)
        return unroll(merge, embeds, aux, self.num_steps, segment_ids=segment_ids, remat=self.remat)

    def draft_logits(self, params: Params, frozen: Frozen) -> Callable[[Array], Array]:
        return lambda hidden: self.draft.merge_head(params, frozen.fixed, self.dtype).logits(hidden)

    def _see(self, frozen: Frozen, tokens: Array, segment_ids: Array | None) -> Features:
        log_sum = self.objective.needs_acceptance
        return target_features(self.target(frozen), tokens, self.aux_layers, segment_ids=segment_ids, log_sum=log_sum)

    def loss(self, params: Params, frozen: Frozen, inputs: Inputs) -> tuple[Array, StepSums]:
        """Loss and sums of a batch; differentiable in `params` alone."""
        tokens, ids = inputs.tokens, inputs.segment_ids
        seen = inputs.features or self._see(frozen, tokens, ids)
        outputs = self.outputs(params, frozen, seen.aux, tokens, ids)
        choice = frozen.draft_index[seen.top1]
        logits = self.draft_logits(params, frozen)
        sums = step_sums(
            logits, outputs, seen.hidden, frozen.teacher, choice, inputs.mask, segment_ids=ids,
            objective=self.objective, teacher_log_sum=seen.log_sum,
        )  # fmt: skip
        return total_loss(sums, self.decay, self.objective), sums


def make_model(
    target: Target, drafter: Eagle3, *, num_steps: int, decay: float = 0.8, dtype: DTypeLike = jnp.float32,
    remat: bool = False, objective: Objective = KL, mesh: Mesh | None = None,
) -> tuple[Model, Params, Frozen]:  # fmt: skip
    """Takes target and drafter apart. With a mesh, the drafter's arrays are laid out like the target's."""
    target_graph, leaves, tree = split(target)
    graph, params, fixed = split_drafter(drafter)
    d2t = drafter.d2t[...]
    index = jnp.asarray(draft_index(np.asarray(d2t), target.config.vocab_size))
    teacher = jax.jit(lambda leaves, ids: join(target_graph, tree, leaves).output_rows(ids))
    frozen = Frozen(leaves, fixed, teacher(leaves, d2t), index)
    model = Model(target_graph, tree, graph, drafter.config.aux_layers, num_steps, decay, dtype, remat, objective)
    if mesh is not None:
        place = lambda name, x: param_sharding(name.split("."), x.shape, mesh, drafter.config)  # noqa: E731
        params = {name: jax.device_put(x, place(name, x)) for name, x in params.items()}
        frozen = dataclasses.replace(
            frozen, **{k: _replicate(getattr(frozen, k), mesh) for k in ("fixed", "draft_index")}
        )
    return model, params, frozen


def _replicate(tree: Any, mesh: Mesh) -> Any:
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


def put_batch(batch: Batch, mesh: Mesh | None) -> Inputs:
    """Onto the device, or spread over the mesh's batch axis; of a part of a batch, onto the devices that it is for."""
    place = None if mesh is None else batch_sharding(mesh)
    arrays = (batch.tokens, batch.mask, batch.segment_ids, batch.features)
    if batch.part is None or place is None:
        return Inputs(*jax.device_put(arrays, place))
    return Inputs(*jax.tree.map(lambda x: spread_rows(x, batch.part, batch.num_rows, place), arrays))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of arrays [B, ...]."""
    return NamedSharding(mesh, PartitionSpec(MESH_AXES["batch"]))


def _norm(tree: Any) -> Array:
    return jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(tree)))


Step = Callable[[TrainState, Frozen, Inputs], tuple[TrainState, Metrics]]


def make_step(model: Model, optimizer: optax.GradientTransformation) -> Step:
    """The jitted step; the state given to it is donated."""

    def step(state: TrainState, frozen: Frozen, inputs: Inputs) -> tuple[TrainState, Metrics]:
        with matmul_precision(model.dtype):
            compute = jax.value_and_grad(model.loss, has_aux=True)
            (loss, sums), grads = compute(state.params, frozen, inputs)
        with jax.named_scope("optimizer"):
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
        return TrainState(params, opt_state), Metrics(loss, _norm(grads), sums)

    return jax.jit(step, donate_argnums=0)
