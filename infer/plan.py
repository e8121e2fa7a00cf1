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
from infer.cycle import DecodeState, Speculation, run_cycles
from infer.engine import EngineConfig, empty_state, state_shardings

UNIT = "cycle"
DEFAULT_STEPS = 3


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
    """The engine's decoding program, lowered for a mesh of devices that need not be here."""
    configs = [c for c in (job.target, job.draft) if c is not None]
    graphs, models = zip(*(abstract_model(c, job.dtype, mesh) for c in configs), strict=True)
    state, how = abstract_state(job, mesh), engine_config(job).speculation

    def decode(models: tuple[Any, ...], state: DecodeState, limit: jax.Array, yield_slots: jax.Array) -> DecodeState:
        built = [nnx.merge(graph, model) for graph, model in zip(graphs, models, strict=True)]
        with matmul_precision(job.dtype), laid_out(mesh, "slots"):
            return run_cycles(built[0], built[1] if len(built) > 1 else None, state, how, limit, yield_slots)

    limit, yield_slots = (jax.ShapeDtypeStruct((), d, sharding=replicated(mesh)) for d in (jnp.int32, jnp.bool_))
    places = jax.tree.map(lambda x: x.sharding, state)
    return jax.jit(decode, donate_argnums=1, out_shardings=places).lower(models, state, limit, yield_slots)


def account(job: Job, shape: MeshShape) -> Account:
    """Of one cycle."""
    mesh = abstract_mesh(shape)
    target = count_weights(job.target, job.dtype, mesh)
    head = Weights() if job.draft is None else count_weights(job.draft, job.dtype, mesh)
    pages, delta, draft_pages, rest = _caches(job, mesh)
    window = engine_config(job).speculation.window
    tokens, drafts = job.batch // shape.data * window, window - 1
    copied = _copied(job, shape) * (pages + draft_pages)
    parts = {
        "target": target.bytes, "head": head.bytes, "keys and values": pages, "delta-rule states": delta,
        "the head's cache": draft_pages, "tokens and parameters": rest,
        "temporaries": copied + _temporaries(job, shape, target, tokens),
    }  # fmt: skip
    used, active = _target_use(job.target, target, tokens)
    head = head.other("^(embed_tokens|d2t)")
    once, each = head.named(r"^fc\."), head.other(r"^fc\.")
    read = used + once.bytes + drafts * (each.bytes + draft_pages) + pages + 2 * delta
    read += 4 * copied / engine_config(job).cycles_per_sync
    head_tokens = tokens + max(drafts - 1, 0) * job.batch // shape.data
    flops = 2 * tokens * active + 2 * head_tokens * head.elements + _attention_flops(job, shape, tokens)
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


def _temporaries(job: Job, shape: MeshShape, weights: Weights, tokens: int) -> float:
    """An estimate: logits and noise, attention weights, rows of experts; the compiled program knows better."""
    c = job.target
    vocab = c.vocab_size // (shape.tensor if c.vocab_size % shape.tensor == 0 else 1)
    scores = tokens * job.context * c.num_heads // shape.tensor
    experts = tokens * c.num_experts_per_tok * (c.hidden_size * 2 + 3 * c.moe_intermediate_size)
    largest = max(w.bytes for w in weights)
    return 4.0 * (6 * tokens * vocab + 2 * scores + experts) + largest


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
