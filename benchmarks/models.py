"""Targets and heads of any config with random weights, made on the device."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from eagle3_jax.config import DraftConfig, RopeConfig, TargetConfig, default_aux_layers
from eagle3_jax.drafters.eagle3 import Eagle3
from eagle3_jax.sharding import model_shardings
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


def random_model(
    kind: type[Target] | type[Eagle3], config: Any, dtype: Any, seed: int = 0, mesh: Mesh | None = None
) -> Any:
    """A model whose arrays are normal numbers of the scale that keeps a layer's output near its input's.

    mesh: over which they are made, each device its own part.
    """
    graph, abstract = nnx.split(nnx.eval_shape(lambda: kind(config, dtype=dtype, rngs=nnx.Rngs(0))))
    leaves, tree = jax.tree.flatten(abstract)
    places = [None] * len(leaves) if mesh is None else jax.tree.leaves(model_shardings(abstract, mesh, config))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    filled = [_fill(x, key, place) for x, key, place in zip(leaves, keys, places, strict=True)]
    return nnx.merge(graph, jax.tree.unflatten(tree, filled))


def _fill(like: Any, key: jax.Array, place: Any) -> jax.Array:
    if jnp.issubdtype(like.dtype, jnp.integer):  # the draft vocabulary
        ids = jnp.arange(like.size, dtype=like.dtype)
        return ids if place is None else jax.device_put(ids, place)
    scale = 0.02 if like.ndim < 2 else like.shape[-2] ** -0.5
    return _normal(like.shape, like.dtype, scale, place)(key)


@functools.cache
def _normal(shape: tuple[int, ...], dtype: Any, scale: float, place: Any) -> Any:
    make = lambda key: (jax.random.normal(key, shape, jnp.bfloat16) * scale).astype(dtype)
    return jax.jit(make) if place is None else jax.jit(make, out_shardings=place)
