"""Targets and heads of any config with random weights, made on the device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from eagle3_jax.config import DraftConfig, RopeConfig, TargetConfig, default_aux_layers
from eagle3_jax.drafters.eagle3 import Eagle3
from eagle3_jax.target import Target


def read_target_config(path: Path) -> TargetConfig:
    """Of a published config.json."""
    return TargetConfig.from_hf(json.loads(path.read_text(encoding="utf-8")))


def head_config(target: TargetConfig, draft_vocab_size: int = 32000) -> DraftConfig:
    """One layer of the target's sizes, as published heads have; attention as wide as the model."""
    heads = max(target.hidden_size // 128, 1)
    return DraftConfig(
        hidden_size=target.hidden_size, target_hidden_size=target.hidden_size, num_heads=heads,
        intermediate_size=target.intermediate_size or 4 * target.hidden_size, num_kv_heads=max(heads // 4, 1),
        head_dim=128, vocab_size=target.vocab_size, draft_vocab_size=min(draft_vocab_size, target.vocab_size),
        aux_layers=_aux_layers(target.num_layers), rope=RopeConfig(target.rope.theta, 128),
        max_position_embeddings=target.max_position_embeddings,
    )  # fmt: skip


def _aux_layers(num_layers: int) -> tuple[int, ...]:
    return default_aux_layers(num_layers) if num_layers >= 7 else (0, 1, num_layers)


def random_model(kind: type[Target] | type[Eagle3], config: Any, dtype: Any, seed: int = 0) -> Any:
    """A model whose arrays are normal numbers of the scale that keeps a layer's output near its input's."""
    graph, abstract = nnx.split(nnx.eval_shape(lambda: kind(config, dtype=dtype, rngs=nnx.Rngs(0))))
    leaves, tree = jax.tree.flatten(abstract)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return nnx.merge(graph, jax.tree.unflatten(tree, [_fill(x, key) for x, key in zip(leaves, keys, strict=True)]))


def _fill(like: Any, key: jax.Array) -> jax.Array:
    if jnp.issubdtype(like.dtype, jnp.integer):  # the draft vocabulary
        return jnp.arange(like.size, dtype=like.dtype)
    scale = 0.02 if like.ndim < 2 else like.shape[-2] ** -0.5
    return _normal(key, like.shape, like.dtype, scale)


@jax.jit(static_argnums=(1, 2, 3))
def _normal(key: jax.Array, shape: tuple[int, ...], dtype: Any, scale: float) -> jax.Array:
    return (jax.random.normal(key, shape, jnp.bfloat16) * scale).astype(dtype)
