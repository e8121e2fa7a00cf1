"""Tiny random models of every family, and what they say through the engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from eagle3_jax.config import DELTA, FULL, DraftConfig, RopeConfig, TargetConfig
from eagle3_jax.drafters.eagle3 import Eagle3
from eagle3_jax.sharding import param_sharding
from eagle3_jax.target import Target
from infer.cycle import Speculation
from infer.engine import Engine, EngineConfig
from infer.params import SamplingParams
from infer.sampling import process_logits, request_key, request_state
from tests.infer.states import gumbel_noise

VOCAB = 61
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 16, "layer_types": (FULL, FULL), "rope": RopeConfig(rotary_dim=16), "max_position_embeddings": 512,
}  # fmt: skip
_HYBRID: dict[str, Any] = {
    "layer_types": (DELTA, FULL), "qk_norm": True, "attn_output_gate": True, "zero_centered_norm": True,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "rope": RopeConfig(rotary_dim=8, mrope_section=(2, 1, 1)),
}  # fmt: skip
_MIXTURE: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "moe_layers": (True, True),
}  # fmt: skip
_SHARED = {"shared_expert_intermediate_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5": _HYBRID,
    "qwen3_5_moe": {**_HYBRID, **_MIXTURE, **_SHARED},
    "qwen3_next": {**_HYBRID, **_MIXTURE, **_SHARED, "rope": RopeConfig(rotary_dim=4)},
    "qwen3": {"qk_norm": True},
    "qwen3_moe": {"qk_norm": True, **_MIXTURE},
    "qwen2": {"attention_bias": True, "tie_word_embeddings": True},
    "llama": {},
}


def target(family: str, *, seed: int = 0, **changes: Any) -> Target:
    """A random target whose next token depends on much of its context."""
    config = TargetConfig(model_type=family, **{**_BASE, **FAMILIES[family], **changes})
    model = Target(config, rngs=nnx.Rngs(seed))
    graph, state = nnx.split(model)
    louder = jax.tree.map(lambda x: x * 1.5 if x.ndim == 2 else x, state)
    return nnx.merge(graph, louder)


def drafter(config: TargetConfig, *, seed: int = 1, **changes: Any) -> Eagle3:
    """A random head: hardly ever right when greedy, often right when the noise that it shares is loud."""
    base: dict[str, Any] = {
        "hidden_size": config.hidden_size, "target_hidden_size": config.hidden_size, "intermediate_size": 48,
        "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "vocab_size": config.vocab_size,
        "draft_vocab_size": config.vocab_size, "aux_layers": (0, 1, config.num_layers),
        "rope": RopeConfig(rotary_dim=8),
    }  # fmt: skip
    return Eagle3(DraftConfig(**{**base, **changes}), rngs=nnx.Rngs(seed))


@dataclasses.dataclass(frozen=True)
class Answer:
    """What one request came to."""

    tokens: list[int]
    codes: list[int]
    reason: str | None


def spread(model: Any, mesh: Mesh) -> Any:
    """The same model, its arrays laid out over a mesh."""
    graph, state = nnx.split(model)
    paths, tree = jax.tree_util.tree_flatten_with_path(state)
    names = [[str(getattr(key, "key", getattr(key, "name", key))) for key in path] for path, _ in paths]
    placed = [
        jax.device_put(x, param_sharding([n for n in name if n != "value"], x.shape, mesh, model.config))
        for name, (_, x) in zip(names, paths, strict=True)
    ]
    return nnx.merge(graph, jax.tree.unflatten(tree, placed))


def build(model: Target, head: Eagle3 | None, how: Speculation, *, mesh: Mesh | None = None, **sizes: Any) -> Engine:
    """An engine of small sizes, so that slots are refilled, chunks are several and pages are crossed."""
    defaults: dict[str, Any] = {
        "max_num_seqs": 3,
        "max_model_len": 96,
        "prefill_chunk": 16,
        "page_size": 8,
        "cycles_per_sync": 4,
    }
    return Engine(model, head, EngineConfig(speculation=how, **{**defaults, **sizes}), mesh=mesh)


def answers(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    stop_ids: Sequence[int] = (),
    first: int = 0,
) -> list[Answer]:
    """Runs every prompt to its end. `first` is the number of the first request, on which its noise depends."""
    for i, (prompt, wish) in enumerate(zip(prompts, params, strict=True)):
        key = request_key(engine_seed=0, request_index=first + i, seed=wish.seed)
        row = request_state(wish, prompt_length=len(prompt), model_stop_ids=stop_ids, key=key)
        engine.submit(i, prompt, row, wish.max_tokens)
    found = [Answer([], [], None) for _ in prompts]
    while engine.has_work:
        for update in engine.step():
            old = found[update.request_id]
            found[update.request_id] = Answer(
                old.tokens + update.token_ids, old.codes + update.codes, update.finish_reason
            )
    return found


def margin(
    model: Target, prompt: Sequence[int], answer: Sequence[int], at: int, index: int, wish: SamplingParams
) -> float:
    """How far apart the two best processed logits (noise included) of answer token `at` are, in one full pass."""
    ids = jnp.asarray([[*prompt, *answer[:at]]], jnp.int32)
    key = request_key(engine_seed=0, request_index=index, seed=wish.seed)
    row = jax.tree.map(jnp.asarray, request_state(wish, prompt_length=len(prompt), model_stop_ids=(), key=key))
    position = jnp.asarray([[ids.shape[1]]], jnp.int32)
    logits = process_logits(model.logits(model(ids).hidden[:, -1:]), row, position)
    best = np.sort(np.asarray(logits + gumbel_noise(row, position, logits.shape[-1]))[0, 0])[-2:]
    return float(best[1] - best[0])
