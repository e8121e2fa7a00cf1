"""Small targets and drafters with random weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from eagle3_jax.config import DELTA, FULL, DraftConfig, RopeConfig, TargetConfig
from eagle3_jax.drafters.eagle3 import Eagle3
from eagle3_jax.target import Target

TARGET = TargetConfig(
    model_type="llama", vocab_size=97, hidden_size=16, intermediate_size=24, num_layers=3, num_heads=2,
    num_kv_heads=1, head_dim=8, layer_types=(FULL,) * 3, rope=RopeConfig(rotary_dim=8),
)  # fmt: skip
HYBRID = dataclasses.replace(
    TARGET, model_type="qwen3_5", layer_types=(DELTA, FULL, DELTA), qk_norm=True, attn_output_gate=True,
    zero_centered_norm=True, linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=8,
    linear_value_head_dim=8, tie_word_embeddings=True,
)  # fmt: skip
DRAFT = DraftConfig(
    hidden_size=16, target_hidden_size=16, intermediate_size=20, num_heads=4, num_kv_heads=2, head_dim=6,
    vocab_size=97, draft_vocab_size=41, aux_layers=(1, 2, 3), rope=RopeConfig(theta=500.0, rotary_dim=6),
)  # fmt: skip


def sharpened(model: Any, factor: float = 4.0) -> Any:
    """Scales matrices up, so that random models have opinions: choices well apart, attention far from uniform."""
    for _, variable in nnx.iter_graph(model):
        if isinstance(variable, nnx.Param) and variable[...].ndim > 1:
            variable[...] = variable[...] * factor
    return model


def make_target(config: TargetConfig = TARGET, seed: int = 0) -> Target:
    return Target(config, rngs=nnx.Rngs(seed))


def make_drafter(seed: int = 1, **changes: Any) -> Eagle3:
    config = dataclasses.replace(DRAFT, **changes)
    drafter = sharpened(Eagle3(config, rngs=nnx.Rngs(seed)), 2.0)
    step = config.vocab_size // config.draft_vocab_size
    drafter.d2t[...] = jnp.arange(config.draft_vocab_size, dtype=jnp.int32) * step
    return drafter


def random_tokens(seed: int, batch: int, length: int, vocab_size: int = TARGET.vocab_size) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), (batch, length), 0, vocab_size, jnp.int32)
