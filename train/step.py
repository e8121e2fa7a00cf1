"""One optimizer step, compiled once for each bucket length."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import Partial
from jax.typing import DTypeLike

from eagle3_jax.distributed import spread
from eagle3_jax.drafters.eagle3 import Eagle3
from eagle3_jax.errors import ConfigError
from eagle3_jax.precision import join, matmul_precision, split
from eagle3_jax.sharding import MESH_AXES, axes_sharding, laid_out, param_sharding
from eagle3_jax.target import Target
from train.data.batches import Batch
from train.data.vocab import draft_index
from train.features import Features, target_features
from train.loss import StepSums, step_counts, step_sums, total_loss
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
    mesh: Mesh | None = None

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

    def draft_logits(self, params: Params, frozen: Frozen) -> Partial:
        """hidden [..., D] -> float32 logits [..., U]."""
        return self._on_head(lambda head, hidden: head.logits(hidden), params, frozen)

    def _on_head(self, function: Callable[[Eagle3, Array], Array], params: Params, frozen: Frozen) -> Partial:
        """`function` of the drafter's last matrices and hidden states, with these matrices as its leaves."""
        merge = lambda used: self.draft.merge_head(used, frozen.fixed, self.dtype)
        return Partial(lambda used, hidden: function(merge(used), hidden), self.draft.head(params))

    def see(self, frozen: Frozen, inputs: Inputs) -> Features:
        """What the target says to a batch, unless it is stored."""
        return inputs.features or target_features(
            self.target(frozen), inputs.tokens, self.aux_layers, segment_ids=inputs.segment_ids,
            log_sum=self.objective.needs_acceptance,
        )  # fmt: skip

    def sums(self, params: Params, frozen: Frozen, inputs: Inputs) -> StepSums:
        """Of a batch; differentiable in `params` alone."""
        ids, seen = inputs.segment_ids, self.see(frozen, inputs)
        outputs = self.outputs(params, frozen, seen.aux, inputs.tokens, ids)
        choice = frozen.draft_index[seen.top1]
        return step_sums(
            self.draft_logits(params, frozen), outputs, seen.hidden, frozen.teacher, choice, inputs.mask,
            segment_ids=ids, objective=self.objective, teacher_log_sum=seen.log_sum,
            normed=self._on_head(lambda head, hidden: head.norm(hidden), params, frozen),
        )  # fmt: skip

    def loss(self, params: Params, frozen: Frozen, inputs: Inputs) -> tuple[Array, StepSums]:
        """Loss and sums of a batch; differentiable in `params` alone."""
        sums = self.sums(params, frozen, inputs)
        return total_loss(sums, self.decay, self.objective), sums


def make_model(
    target: Target, drafter: Eagle3, *, num_steps: int, decay: float = 0.8, dtype: DTypeLike = jnp.float32,
    remat: bool = False, objective: Objective = KL, mesh: Mesh | None = None,
) -> tuple[Model, Params, Frozen]:  # fmt: skip
    """Takes target and drafter apart. With a mesh, the drafter's arrays are laid out like the target's.

    Raises:
      ConfigError: a regression to hidden states of another width than the drafter's.
    """
    widths = drafter.config.hidden_size, target.config.hidden_size
    if objective.hidden_weight and widths[0] != widths[1]:
        raise ConfigError(f"hidden_weight: states of width {widths[1]} are no aim for a head of width {widths[0]}")
    target_graph, leaves, tree = split(target)
    graph, params, fixed = split_drafter(drafter)
    d2t = drafter.d2t[...]
    index = jnp.asarray(draft_index(np.asarray(d2t), target.config.vocab_size))
    kernel = (target.config.hidden_size, len(d2t))
    where = None if mesh is None else axes_sharding(("embed", "vocab"), kernel, mesh)
    teacher = jax.jit(lambda leaves, ids: join(target_graph, tree, leaves).output_rows(ids), out_shardings=where)
    frozen = Frozen(leaves, fixed, teacher(leaves, d2t), index)
    model = Model(target_graph, tree, graph, drafter.config.aux_layers, num_steps, decay, dtype, remat, objective, mesh)
    if mesh is not None:
        place = lambda name, x: param_sharding(name.split("."), x.shape, mesh, drafter.config)  # noqa: E731
        params = {name: spread(x, place(name, x)) for name, x in params.items()}
        frozen = dataclasses.replace(
            frozen, **{k: _replicate(getattr(frozen, k), mesh) for k in ("fixed", "draft_index")}
        )
    return model, params, frozen


def _replicate(tree: Any, mesh: Mesh) -> Any:
    return jax.tree.map(lambda x: spread(x, NamedSharding(mesh, PartitionSpec())), tree)


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


def batch_gradient(
    model: Model, params: Params, frozen: Frozen, inputs: Inputs, parts: int
) -> tuple[Array, StepSums, Params]:
    """Loss, sums and gradient of a batch [B, T], B/parts rows at a time: the same whatever `parts` is.

    Every mean is over the whole batch. The loss is a function of the parts' summed sums, so each part's gradient is
    pulled back from the loss's derivative at the whole; what that takes is known once the target has seen every part
    (with lk_lambda, once the drafter has run as well). The target's states of the whole batch are kept meanwhile.
    """
    if parts == 1:
        (loss, sums), grads = jax.value_and_grad(model.loss, has_aux=True)(params, frozen, inputs)
        return loss, sums, grads
    groups = jax.tree.map(lambda x: _in_parts(x, parts), inputs)
    seen = groups.features or lax.map(lambda part: model.see(frozen, part), groups)
    groups = dataclasses.replace(groups, features=seen)
    ahead = lax.map(lambda part: _sums_ahead(model, params, frozen, part), groups)
    whole = jax.tree.map(lambda x: jnp.sum(x, axis=0), ahead)
    slope = jax.grad(lambda sums: total_loss(sums, model.decay, model.objective))(whole)

    def add(total: tuple[StepSums, Params], part: Inputs) -> tuple[tuple[StepSums, Params], None]:
        sums, pull = jax.vjp(lambda p: model.sums(p, frozen, part), params)
        return jax.tree.map(jnp.add, total, (sums, *pull(slope))), None

    nothing = jax.tree.map(jnp.zeros_like, (whole, params))
    (sums, grads), _ = lax.scan(add, nothing, groups)
    return total_loss(sums, model.decay, model.objective), sums, grads


def _in_parts(x: Array, parts: int) -> Array:
    """[B, ...] -> [parts, B/parts, ...]. A part takes every `parts`-th row, so that it has rows of every device."""
    return jnp.swapaxes(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 0, 1)


def _sums_ahead(model: Model, params: Params, frozen: Frozen, part: Inputs) -> StepSums:
    """Sums of a part as far as the loss's derivative depends on them."""
    if model.objective.kind == "lk_lambda":
        return lax.stop_gradient(model.sums(params, frozen, part))
    choice = frozen.draft_index[model.see(frozen, part).top1]
    return step_counts(choice, part.mask, model.num_steps, part.segment_ids, objective=model.objective)


Step = Callable[[TrainState, Frozen, Inputs], tuple[TrainState, Metrics]]


def make_step(
    model: Model, optimizer: optax.GradientTransformation, *, parts: int = 1, state: TrainState | None = None
) -> Step:
    """The jitted step, its batch computed in `parts`; the state given to it is donated.

    state: on a mesh, one that lies as all are to lie. Without it what comes out lies alike, but says so in other words,
    and the second step is compiled anew.
    """

    def step(state: TrainState, frozen: Frozen, inputs: Inputs) -> tuple[TrainState, Metrics]:
        with matmul_precision(model.dtype), laid_out(model.mesh, "batch"):
            loss, sums, grads = batch_gradient(model, state.params, frozen, inputs, parts)
        with jax.named_scope("optimizer"):
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
        return TrainState(params, opt_state), Metrics(loss, _norm(grads), sums)

    places = None if state is None or model.mesh is None else jax.tree.map(lambda x: x.sharding, state)
    return jax.jit(step, donate_argnums=0, out_shardings=(places, None))
