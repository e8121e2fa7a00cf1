"""Planning of generation: one cycle of a batch, counted and compiled from shapes. See `eagle3_jax.planning`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from eagle3_jax.cache import DeltaState
from eagle3_jax.config import DELTA, TargetConfig
from eagle3_jax.meshes import MeshShape
from eagle3_jax.planning.account import Account, Job
from eagle3_jax.planning.shapes import (
    Weights,
    abstract_mesh,
    abstract_model,
    count_weights,
    held,
    placed,
    shortened,
)
from eagle3_jax.precision import matmul_precision
from eagle3_jax.sharding import laid_out, replicated
from infer.cycle import DecodeState, Speculation, prefill, run_cycles
from infer.engine import EngineConfig, empty_state, state_shardings

DEFAULT_STEPS = 3


def unit(job: Job) -> str:
    return "pass" if job.prefill else "cycle"


def rows(shape: MeshShape) -> int:
    """Slots are spread over the data axis."""
    return shape.data


def suits(job: Job, shape: MeshShape) -> bool:
    """A width cut by fsdp would have to be gathered."""
    return shape.fsdp == 1


def default_batch(devices: int, context: int) -> int:
    """Slots of an engine, however many devices."""
    return 16


def engine_config(job: Job) -> EngineConfig:
    drafts = job.steps if job.draft is not None else 0
    return EngineConfig(job.batch, job.context, Speculation(drafts), dtype=job.dtype)


def abstract_state(job: Job, mesh: Any) -> DecodeState:
    """The state of a batch, as shapes with shardings."""
    state = _empty(job)
    return placed(state, state_shardings(state, mesh))


@functools.lru_cache(maxsize=64)
def _empty(job: Job) -> DecodeState:
    return jax.eval_shape(lambda: empty_state(job.target, job.draft, engine_config(job)))


def lower(job: Job, mesh: Any) -> Any:
    """The engine's program for a cycle or a prefill pass, lowered for a mesh of devices that need not be here."""
    target = abstract_model(job.target, job.dtype, mesh, job.quantization)
    pairs = [target] if job.draft is None else [target, abstract_model(job.draft, job.dtype, mesh)]
    graphs, models = zip(*pairs, strict=True)
    state, how = abstract_state(job, mesh), engine_config(job).speculation

    def run(models: tuple[Any, ...], state: DecodeState, *arguments: jax.Array) -> DecodeState:
        target, *head = (nnx.merge(graph, model) for graph, model in zip(graphs, models, strict=True))
        drafter = head[0] if head else None
        with matmul_precision(job.dtype), laid_out(mesh, "slots"):
            if job.prefill:
                return prefill(target, drafter, state, job.prefill)
            limit, enough_idle = arguments
            return run_cycles(target, drafter, state, how, limit, enough_idle)

    given = () if job.prefill else (jnp.int32, jnp.int32)
    arguments = [jax.ShapeDtypeStruct((), dtype, sharding=replicated(mesh)) for dtype in given]
    places = jax.tree.map(lambda x: x.sharding, state)
    # Kept though a pass may not use it, since it is held all the same: the head's last matrix, for one.
    step = jax.jit(run, donate_argnums=1, out_shardings=places, keep_unused=True)
    return step.lower(models, state, *arguments)


def account(job: Job, shape: MeshShape) -> Account:
    """Of one cycle, or of one prefill pass."""
    mesh = abstract_mesh(shape)
    target = count_weights(job.target, job.dtype, mesh, job.quantization)
    head = Weights() if job.draft is None else count_weights(job.draft, job.dtype, mesh)
    pages, delta, draft_pages, rest = _caches(job, mesh)
    slots = job.batch // shape.data
    tokens = slots * (job.prefill or engine_config(job).speculation.window)
    copied = 0 if job.prefill else _copied(job, shape) * (pages + draft_pages)
    parts = {
        "target": target.bytes, "head": head.bytes, "keys and values": pages, "delta-rule states": delta,
        "the head's cache": draft_pages, "tokens and parameters": rest,
        "temporaries": copied + _temporaries(job, shape, target, tokens, slots),
    }  # fmt: skip
    used, active = _target_use(job.target, target, tokens)
    read, flops = used + pages + 2 * delta, 2 * tokens * active + _attention_flops(job, shape, tokens)
    head = head.other("^(embed_tokens|d2t)")
    once, each = head.named(r"^fc\."), head.other(r"^fc\.")
    if job.prefill:  # logits are those of a slot's last token; the head makes none
        flops -= 2 * (tokens - slots) * target.named("^embed" if job.target.tie_word_embeddings else "^lm_").elements
        flops += 2 * tokens * head.other(r"^lm_head\.").elements
        read += head.bytes + draft_pages
    else:
        drafts = engine_config(job).speculation.num_drafts
        flops += 2 * (tokens + max(drafts - 1, 0) * slots) * head.elements
        read += once.bytes + drafts * (each.bytes + draft_pages) + 4 * copied / engine_config(job).cycles_per_sync
    return Account(parts, flops, read, _moved(job, shape, tokens))


def _copied(job: Job, shape: MeshShape) -> int:
    """How many copies of keys and values are held besides. With several heads on a device, XLA for TPUs gives them
    another layout inside the loop: it copies all of them in and out every time the host has looked."""
    heads = job.target.num_kv_heads
    return int((heads // shape.tensor if heads % shape.tensor == 0 else heads) > 1)


def _caches(job: Job, mesh: Any) -> tuple[float, float, float, float]:
    """Bytes on one device: keys and values, delta-rule states, the head's keys and values, all the rest."""
    short, times = shortened(job.target)
    state = abstract_state(dataclasses.replace(job, target=short), mesh)
    sizes = [(isinstance(x, DeltaState), held(x), n) for x, n in zip(state.target.layers, times, strict=True)]
    drafter = 0.0 if state.drafter is None else held(state.drafter.layers)
    rest = held(state) - drafter - sum(size for _, size, _ in sizes)
    kinds = [sum(size * n for is_delta, size, n in sizes if is_delta == kind) for kind in (False, True)]
    return kinds[0], kinds[1], drafter, rest


def _target_use(config: TargetConfig, weights: Weights, tokens: int) -> tuple[float, float]:
    """(bytes read, matrix elements that work on a token) on one device.

    Of a mixture: the experts that so many tokens choose, if they choose evenly. A token uses its own part of them.
    """
    lookup = "^$" if config.tie_word_embeddings else "^embed_tokens"
    experts, others = weights.named(r"\.experts\."), weights.other(r"\.experts\.|" + lookup)
    share = config.num_experts_per_tok / max(config.num_experts, 1)
    seen = 1 - (1 - share) ** tokens
    return others.bytes + seen * experts.bytes, others.elements + share * experts.elements


def _attention_flops(job: Job, shape: MeshShape, tokens: int) -> float:
    c = job.target
    full = sum(kind != DELTA for kind in c.layer_types)
    softmax = 4 * full * job.context * c.num_heads * c.head_dim
    state = c.linear_num_value_heads * c.linear_key_head_dim * c.linear_value_head_dim
    return tokens * (softmax + 6 * (c.num_layers - full) * state) / shape.tensor


def _temporaries(job: Job, shape: MeshShape, weights: Weights, tokens: int, slots: int) -> float:
    """An estimate: logits and noise, attention weights, rows of experts; the compiled program knows better."""
    c = job.target
    vocab = c.vocab_size // (shape.tensor if c.vocab_size % shape.tensor == 0 else 1)
    scores = tokens * job.context * c.num_heads // shape.tensor
    experts = tokens * c.num_experts_per_tok * (c.hidden_size * 2 + 3 * c.moe_intermediate_size)
    largest = max(max(w.bytes, w.elements * jnp.dtype(job.dtype).itemsize) for w in weights)  # written out, it may be
    return 4.0 * (6 * (slots if job.prefill else tokens) * vocab + 2 * scores + experts) + largest


def _moved(job: Job, shape: MeshShape, tokens: int) -> float:
    """Two sums a layer over the devices that share its matrices, those of experts in float32; the head's likewise."""
    c = job.target
    item, mixtures = jnp.dtype(job.dtype).itemsize, sum(c.moe_layers)
    ring = _ring(shape.tensor * shape.fsdp) * item
    dense = 2 * c.num_layers - (0 if c.shared_expert_intermediate_size else mixtures)
    experts = _ring(shape.expert * shape.tensor) * 4 * mixtures
    # What fsdp cuts in generation is not gathered: inner products are summed, of every expert of a token.
    inner = _ring(shape.fsdp) * 4 * mixtures * 2 * c.num_experts_per_tok * c.moe_intermediate_size / shape.tensor
    head = 0 if job.draft is None else 3 * job.steps * job.draft.num_layers * job.draft.hidden_size
    return tokens * (c.hidden_size * (dense * ring + experts) + inner) + tokens // max(job.steps, 1) * head * ring


def _ring(devices: int) -> float:
    """Of a sum's bytes, how many times over a device passes them on."""
    return 2 * (devices - 1) / devices
