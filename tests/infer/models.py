"""A small hybrid target and head with random weights, over the vocabulary of the byte-level test tokenizer."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx

from eagle3_jax.config import DraftConfig, RopeConfig, TargetConfig
from eagle3_jax.drafters.eagle3 import Eagle3
from eagle3_jax.target import Target
from tests.infer.tokenizers import END, byte_level

TOKENIZER = byte_level()
STOP_ID = TOKENIZER.convert_tokens_to_ids(END)

HF_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": len(TOKENIZER),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]},
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "eos_token_id": STOP_ID,
}
TARGET = TargetConfig.from_hf(HF_CONFIG)
DRAFT = DraftConfig(
    hidden_size=32,
    target_hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=len(TOKENIZER),
    draft_vocab_size=128,
    aux_layers=(1, 2, 3),
    rope=RopeConfig(rotary_dim=8),
    max_position_embeddings=256,
)


def make_target(**changes: Any) -> Target:
    return Target(dataclasses.replace(TARGET, **changes), rngs=nnx.Rngs(0))


def make_drafter(**changes: Any) -> Eagle3:
    drafter = Eagle3(dataclasses.replace(DRAFT, **changes), rngs=nnx.Rngs(1))
    drafter.d2t[...] = jnp.arange(drafter.config.draft_vocab_size, dtype=jnp.int32) * 2
    return drafter
