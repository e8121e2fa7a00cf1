"""Planning of training: one step, counted and compiled from shapes. See `eagle3_jax.planning`."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from eagle3_jax.config import DraftConfig, TargetConfig
from eagle3_jax.errors import ConfigError, UserError
from eagle3_jax.meshes import MeshShape
from eagle3_jax.planning.account import Account, Job
from eagle3_jax.planning.shapes import abstract_mesh, abstract_model, count_weights, named, placed
from eagle3_jax.sharding import axes_sharding, replicated
from train.flops import draft_parameters, flops_per_token, target_parameters
from train.head import draft_config
from train.layout import optimizer_shardings
from train.optim import make_optimizer
from train.params import DraftGraph, is_trained
from train.recipe import DraftRecipe, OptimizerRecipe
from train.step import Frozen, Inputs, Model, TrainState, batch_sharding, make_step

DEFAULT_STEPS = 7
TOKENS_A_DEVICE = 4096


def unit(job: Job) -> str:
    return "step"


def rows(shape: MeshShape) -> int:
    """Sequences are spread over the data and fsdp axes."""
    return shape.rows


def suits(job: Job, shape: MeshShape) -> bool:
    """Any mesh is worth trying."""
    return True


def default_batch(devices: int, context: int) -> int:
    """Sequences, so that a device has 4096 tokens of its own."""
    return max(1, devices * TOKENS_A_DEVICE // context)


def default_head(target: TargetConfig) -> DraftConfig:
    """A head as a recipe that says nothing of it would make, of sizes of the target."""
    try:
        return draft_config(DraftRecipe(), target)
    except ConfigError:  # so few layers that the default boundaries collide
        last = target.num_layers
        return draft_config(DraftRecipe(aux_layers=tuple(sorted({0, last // 2, last}))), target)


def abstract_step(job: Job, mesh: Any) -> tuple[Model, tuple[TrainState, Frozen, Inputs]]:
    """The model without its arrays and, as shapes with shardings, what a step takes: packed rows, online."""
    head = _head(job)
    target_graph, target = abstract_model(job.target, job.dtype, mesh)
    leaves, tree = jax.tree.flatten(target)
    parts: tuple[Any, ...] = nnx.split(nnx.merge(*abstract_model(head, jnp.float32, mesh)), is_trained, ...)
    graph, trained, fixed = parts
    params = dict(named(trained))
    fixed_leaves, fixed_tree = jax.tree.flatten(fixed)
    draft = DraftGraph(graph, jax.tree.structure(trained), fixed_tree, tuple(params))
    optimizer = make_optimizer(OptimizerRecipe(), 1000)
    opt_state = placed(jax.eval_shape(optimizer.init, params), optimizer_shardings(optimizer, params, mesh))
    teacher_shape = (job.target.hidden_size, head.draft_vocab_size)
    teacher = _shape(teacher_shape, job.dtype, axes_sharding(("embed", "vocab"), teacher_shape, mesh))
    index = _shape((job.target.vocab_size,), jnp.int32, replicated(mesh))
    everywhere = placed(fixed_leaves, [replicated(mesh) for _ in fixed_leaves])
    batch = (job.batch, job.context)
    tokens, mask, segments = (_shape(batch, d, batch_sharding(mesh)) for d in (jnp.int32, jnp.bool_, jnp.int32))
    inputs = Inputs(tokens, mask, segments)
    model = Model(
        target_graph, tree, draft, head.aux_layers, job.steps, dtype=job.dtype, remat=True, mesh=mesh
    )  # fmt: skip
    return model, (TrainState(params, opt_state), Frozen(leaves, everywhere, teacher, index), inputs)


def _shape(shape: tuple[int, ...], dtype: Any, place: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=place)


def lower(job: Job, mesh: Any) -> Any:
    """The trainer's step, lowered for a mesh of devices that need not be here."""
    model, arguments = abstract_step(job, mesh)
    step: Any = make_step(model, make_optimizer(OptimizerRecipe(), 1000))
    return step.lower(*arguments)


def account(job: Job, shape: MeshShape) -> Account:
    """Of one step, with remat."""
    mesh, draft = abstract_mesh(shape), _head(job)
    target = count_weights(job.target, job.dtype, mesh)
    head = count_weights(draft, jnp.float32, mesh).other("^(embed_tokens|d2t)")
    teacher_shape = (job.target.hidden_size, draft.draft_vocab_size)
    teacher = math.prod(axes_sharding(("embed", "vocab"), teacher_shape, mesh).shard_shape(teacher_shape))
    tokens, gathered = job.batch * job.context // shape.rows, target.bytes * shape.fsdp
    parts = {
        "target": target.bytes,
        "teacher": teacher * jnp.dtype(job.dtype).itemsize,
        "head, float32": head.bytes,
        "optimizer": 2 * head.bytes,
        "temporaries": _temporaries(job, shape, tokens, head.elements, gathered),
    }
    flops = tokens * _flops_per_token(job, shape) / shape.tensor
    read = 2 * gathered + 32 * head.elements + tokens * _activation_bytes(job) / shape.tensor
    return Account(parts, flops, read, _moved(job, shape, tokens, head.elements, target.bytes))


def _head(job: Job) -> DraftConfig:
    if job.draft is None:
        raise UserError("training plans for a head: it cannot be left out")
    return job.draft


def _flops_per_token(job: Job, shape: MeshShape) -> float:
    """With the drafter's forward pass computed twice, and of the experts each device's own part."""
    whole, once, each, experts = _work(dataclasses.replace(job, batch=0))
    return whole + 2 * (once + job.steps * each) - 2 * experts * (1 - 1 / shape.expert)


@functools.lru_cache(maxsize=64)
def _work(job: Job) -> tuple[float, int, int, float]:
    """Operations of a token; the head's parameters used once, and at each step; the experts' that a token uses."""
    draft = _head(job)
    whole = flops_per_token(job.target, draft, job.steps, job.context / 2)
    once, each = draft_parameters(draft)
    share = job.target.num_experts_per_tok / max(job.target.num_experts, 1)
    experts = share * sum(size for name, size in target_parameters(job.target).items() if ".experts." in name)
    return whole, once, each, experts


def _activation_bytes(job: Job) -> float:
    """Read and written for a token: a dozen states and two inner rows a layer; logits of teacher and drafter."""
    c, item = job.target, jnp.dtype(job.dtype).itemsize
    draft = _head(job)
    wide = c.intermediate_size or c.num_experts_per_tok * c.moe_intermediate_size
    layers = c.num_layers * (12 * c.hidden_size + 4 * wide) * item
    head = job.steps * 3 * (12 * draft.hidden_size + 4 * draft.intermediate_size) * item
    return layers + head + 4 * (c.vocab_size + 3 * job.steps * draft.draft_vocab_size)


def _temporaries(job: Job, shape: MeshShape, tokens: int, head: float, gathered: float) -> float:
    """An estimate: gathered layers, states that are kept, a layer's inner rows, gradients, chunks of logits."""
    c, d, item = job.target, _head(job), jnp.dtype(job.dtype).itemsize
    layers = 2 * gathered / c.num_layers if shape.fsdp > 1 else 0.0
    kept = (len(d.aux_layers) + 3 + 2 * job.steps) * d.hidden_size + 2 * job.steps * d.num_kv_heads * d.head_dim
    wide = max(c.intermediate_size, c.num_experts_per_tok * (c.moe_intermediate_size + 2 * c.hidden_size))
    inner = 3 * max(wide, d.intermediate_size, 4 * c.linear_conv_dim, 4 * c.num_heads * c.head_dim) / shape.tensor
    return layers + tokens * (kept + inner) * item + (4 + item) * head + 1.5 * 2**30


def _moved(job: Job, shape: MeshShape, tokens: int, head: float, target: float) -> float:
    """Gathered matrices, summed gradients, and the sums over tensor and expert that every layer makes."""
    c, d, item = job.target, _head(job), jnp.dtype(job.dtype).itemsize
    fsdp, along = shape.fsdp, shape.rows
    gathers = (fsdp - 1) * (target + 2 * item * head)
    gradients = 2 * (along - 1) / along * 4 * head * fsdp
    sums = 2 * (shape.tensor - 1) / shape.tensor * item * tokens
    mixtures = sum(c.moe_layers)
    target_sums = (2 * c.num_layers - (0 if c.shared_expert_intermediate_size else mixtures)) * c.hidden_size * sums
    head_sums = 6 * job.steps * d.num_layers * d.hidden_size * sums
    share = shape.expert * shape.tensor
    experts = 2 * (share - 1) / share * 4 * tokens * c.hidden_size * mixtures
    return gathers + gradients + target_sums + head_sums + experts
