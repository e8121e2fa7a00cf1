"""Every family against transformers: hidden states at every boundary, logits and greedy text, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.target import oracle
from tests.target.oracle import HYBRID, LLAMA, QWEN2, QWEN3, QWEN3_5, QWEN3_5_MOE, QWEN3_MOE, QWEN3_NEXT

LENGTH = 70  # more than one chunk of the delta rule
NEW_TOKENS = 12
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 32}

CASES: dict[str, dict[str, Any]] = {
    "qwen3_5": QWEN3_5,
    "qwen3_5, tied, biases, three value heads a key head, convolution of 3": {
        **QWEN3_5, "tie_word_embeddings": True, "attention_bias": True, "linear_num_value_heads": 6,
        "linear_conv_kernel_dim": 3, "num_key_value_heads": 1,
    },
    "qwen3_5, yarn": {
        **QWEN3_5, "max_position_embeddings": 128, "rope_parameters": {**HYBRID["rope_parameters"], **YARN},
    },
    "qwen3_5_moe": QWEN3_5_MOE,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_next, some layers dense, weights not renormalised": {
        **QWEN3_NEXT, "mlp_only_layers": [1], "norm_topk_prob": False, "tie_word_embeddings": True,
    },
    "qwen3": QWEN3,
    "qwen3, tied, biases, yarn": {
        **QWEN3, "tie_word_embeddings": True, "attention_bias": True, "max_position_embeddings": 128,
        "rope_parameters": YARN,
    },
    "qwen3_moe": QWEN3_MOE,
    "qwen3_moe, every second layer, weights not renormalised": {
        **QWEN3_MOE, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": False,
        "num_experts_per_tok": 3,
    },
    "qwen2": QWEN2,
    "qwen2, tied": {**QWEN2, "tie_word_embeddings": True, "num_key_value_heads": 4},
    "llama": LLAMA,
    "llama, tied, biases, one key head": {
        **LLAMA, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1,
        "head_dim": None,
    },
    "llama, llama3 rope": {**LLAMA, "rope_parameters": LLAMA3},
    "llama, yarn rope": {**LLAMA, "max_position_embeddings": 128, "rope_parameters": YARN},
    "llama, linear rope": {**LLAMA, "rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 3.0}},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_matches_transformers(name: str, tmp_path: Path) -> None:
    pair = oracle.make_pair(CASES[name], tmp_path)
    ids = pair.token_ids(2, LENGTH)
    oracle.assert_same(oracle.our_trace(pair.target, ids), oracle.torch_trace(pair.model, ids))

    prompt = ids[0, : LENGTH - NEW_TOKENS]
    expected = oracle.torch_greedy(pair.model, prompt, NEW_TOKENS)
    assert oracle.our_greedy(pair.target, prompt, NEW_TOKENS, LENGTH) == expected
