"""Writes a head as SpecForge does, which SGLang and vLLM read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from eagle3_jax.checkpoint.draft_formats import IDS
from eagle3_jax.checkpoint.hf import parameters_of
from eagle3_jax.checkpoint.hf_save import outgoing_tensors
from eagle3_jax.checkpoint.layout import EVERY_FAMILY
from eagle3_jax.checkpoint.publish import publish, write_json
from eagle3_jax.checkpoint.safetensors_file import Outgoing, write_file
from eagle3_jax.checkpoint.source import SINGLE
from eagle3_jax.checkpoint.vocab_map import as_offsets
from eagle3_jax.config import DraftConfig
from eagle3_jax.drafters.eagle3 import Eagle3
from eagle3_jax.errors import ConfigError


def save_specforge(
    model: Eagle3,
    config: DraftConfig,
    folder: str | Path,
    *,
    dtype: Any = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Writes config.json and model.safetensors; the folder appears complete or not at all.

    SGLang takes the ids for layer outputs only when the first is 1 (our boundary 2, the usual one), and vLLM reads none
    from this format: serve heads with other aux layers elsewhere only after looking at what their loader does.

    Args:
      dtype: float32 or bfloat16; by default as the model has it.
      extra: further keys of config.json, such as eos_token_id.

    Raises:
      ConfigError: the head has something that the format cannot say; every such thing is named.
    """
    if problems := inexpressible(config):
        raise ConfigError(f"SpecForge's format cannot express this head: {'; '.join(problems)}")
    state = nnx.split(model)[1]
    arrays = {".".join(map(str, path)): variable[...] for path, variable in nnx.to_flat_state(state)}
    tensors = {
        name.replace("layers.0.", "midlayer."): tensor
        for name, tensor in outgoing_tensors(parameters_of(state), arrays, EVERY_FAMILY, dtype).items()
    }
    d2t, t2d = as_offsets(np.asarray(arrays["d2t"]), config.vocab_size)
    tensors |= {"d2t": Outgoing(d2t.dtype, d2t.shape, lambda: d2t), "t2d": Outgoing(t2d.dtype, t2d.shape, lambda: t2d)}
    with publish(folder) as fresh:
        write_file(fresh / SINGLE, tensors)
        write_json(
            fresh / "config.json", {**specforge_config(config, tensors["fc.weight"].dtype.name), **(extra or {})}
        )


def inexpressible(config: DraftConfig) -> list[str]:
    """What SpecForge's config has no words for."""
    checks = (
        (config.norm_before_residual, "norm_before_residual"),
        (config.norm_before_fc, "norm_before_fc"),
        (config.qk_norm, "q/k norms"),
        (config.num_layers > 1, f"{config.num_layers} layers (its readers disagree on the names of a second one)"),
        (0 in config.aux_layers, "aux boundary 0, the embeddings: ids name layer outputs"),
        (
            config.rope.rotary_dim != config.head_dim,
            f"a rotation of {config.rope.rotary_dim} of {config.head_dim} dimensions",
        ),
    )
    return [text for found, text in checks if found]


def specforge_config(config: DraftConfig, dtype: str) -> dict[str, Any]:
    """config.json of the head. RoPE is written in both spellings, for readers of either age."""
    scaling = (
        {"rope_type": config.rope.scaling, **dict(config.rope.params)} if config.rope.scaling != "default" else None
    )
    table: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "eagle_config": {IDS: [b - 1 for b in config.aux_layers], "use_aux_hidden_state": True},
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "draft_vocab_size": config.draft_vocab_size,
        "dtype": dtype,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_theta": config.rope.theta, **(scaling or {"rope_type": "default"})},
        "rope_scaling": scaling,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }
    if config.target_hidden_size != config.hidden_size:
        table["target_hidden_size"] = config.target_hidden_size
    return table | {flag: True for flag in ("fc_norm", "norm_output") if getattr(config, flag)}
