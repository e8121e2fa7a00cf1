"""Tiny random checkpoints of every family, written by transformers itself, in several shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

SHARD = "60KB"
COMMON: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "eos_token_id": 5, "bos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
HYBRID: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}  # fmt: skip
MIXTURE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED: dict[str, Any] = {**MIXTURE, "shared_expert_intermediate_size": 24}
VISION: dict[str, Any] = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48, "patch_size": 4,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [],
}  # fmt: skip


def _qwen3_5(**more: Any) -> Any:
    rope = {"mrope_interleaved": True, "mrope_section": [1, 1, 0], "rope_type": "default", "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25}  # fmt: skip
    return {**COMMON, **HYBRID, "num_hidden_layers": 3, "rope_parameters": rope, **more}


def make_model(kind: str) -> Any:
    """A randomly initialised transformers model, weights widened so that every tensor matters."""
    t = transformers
    torch.manual_seed(0)
    if kind == "qwen3_5":
        model = t.Qwen3_5ForCausalLM(t.Qwen3_5TextConfig(**_qwen3_5(tie_word_embeddings=False)))
    elif kind == "qwen3_5_tied":
        model = t.Qwen3_5ForCausalLM(t.Qwen3_5TextConfig(**_qwen3_5(tie_word_embeddings=True)))
    elif kind == "qwen3_5_vl":
        config = t.Qwen3_5Config(text_config=_qwen3_5(), vision_config=VISION, tie_word_embeddings=False)
        model = t.Qwen3_5ForConditionalGeneration(config)
    elif kind == "qwen3_5_moe":
        model = t.Qwen3_5MoeForCausalLM(t.Qwen3_5MoeTextConfig(**_qwen3_5(tie_word_embeddings=False, **SHARED)))
    elif kind == "qwen3_next":
        config = t.Qwen3NextConfig(
            **{**COMMON, **HYBRID, **SHARED, "num_hidden_layers": 3, "tie_word_embeddings": False}
        )
        model = t.Qwen3NextForCausalLM(config)
    elif kind == "qwen3_moe":
        config = t.Qwen3MoeConfig(**{**COMMON, **MIXTURE, "num_hidden_layers": 2, "tie_word_embeddings": False})
        model = t.Qwen3MoeForCausalLM(config)
    elif kind == "llama":
        config = t.LlamaConfig(**{**COMMON, "num_hidden_layers": 2, "tie_word_embeddings": False})
        model = t.LlamaForCausalLM(config)
    else:
        raise ValueError(kind)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model.eval().float()


KINDS = ("qwen3_5", "qwen3_5_tied", "qwen3_5_vl", "qwen3_5_moe", "qwen3_next", "qwen3_moe", "llama")


def save(kind: str, folder: Path) -> Path:
    """Writes the model of `kind` to `folder` in several shards, where it is not yet."""
    if not (folder / "config.json").exists():
        make_model(kind).save_pretrained(folder, max_shard_size=SHARD)
    return folder
