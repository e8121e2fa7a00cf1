"""A small target on disk, with the test tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from eagle3_jax.checkpoint import save_target
from eagle3_jax.config import TargetConfig
from eagle3_jax.target import Target
from tests.train.models import sharpened
from tests.train.tokenizers import CHATML, small_tokenizer

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 416, "hidden_size": 16,
    "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu",
    "rope_theta": 10000.0,
}  # fmt: skip


def write_rows(path: Path) -> Path:
    """Twelve rows of 8 to 16 tokens below 32, of which the first three are the prompt."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(8, 17, size=12)
    rows = [{"input_ids": draw.integers(0, 32, n).tolist(), "loss_mask": [0] * 3 + [1] * (int(n) - 3)} for n in lengths]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def losses(output: str | Path) -> list[float]:
    """What a run reported of its training, line by line."""
    lines = [json.loads(line) for line in (Path(output) / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def save_small_target(folder: Path) -> Path:
    """Three llama layers with opinions; stops at the tokenizer's end token."""
    tokenizer = small_tokenizer(CHATML)
    assert len(tokenizer) <= CONFIG["vocab_size"]
    config = {**CONFIG, "eos_token_id": tokenizer.eos_token_id}
    save_target(sharpened(Target(TargetConfig.from_hf(config), rngs=nnx.Rngs(0)), 3.0), folder, config)
    tokenizer.save_pretrained(folder)
    return folder
