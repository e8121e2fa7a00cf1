"""The published configs of Qwen3, Qwen3-Next and Qwen3.5, shrunk: they parse, and match transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle3_jax.config import TargetConfig, default_aux_layers
from tests.helpers import published
from tests.target import oracle
from tests.target.shrink import LAYERS, shrunk

NAMES = (
    *[f"Qwen3.5-{size}" for size in ("0.8B", "2B", "4B", "9B", "27B", "35B-A3B", "122B-A10B", "397B-A17B")],
    *("Qwen3-235B-A22B", "Qwen3-Next-80B-A3B-Thinking", "maxtext_qwen3_235b_a22b_thinking_2507_config"),
    *[f"maxtext_qwen3_{size}_config" for size in ("0_6b", "1_7b", "4b", "8b", "14b", "32b", "30b_a3b_thinking_2507")],
)
TOKENS = 24


def read(name: str) -> dict[str, Any]:
    return json.loads(published(f"configs/{name}.json").read_text())


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The flat config of the text model alone, with what the outer config says of its embeddings."""
    if "text_config" not in config:
        return config
    return {**config["text_config"], "tie_word_embeddings": config["tie_word_embeddings"]}


@pytest.mark.parametrize("name", NAMES)
def test_shrunk_config_matches_transformers(name: str, tmp_path: Path) -> None:
    config = shrunk(read(name))
    pair = oracle.make_pair(text_config(config), tmp_path)
    # transformers has rewritten the config on its way through the folder; the file as published says the same.
    assert TargetConfig.from_hf(config) == pair.config

    ids = pair.token_ids(2, TOKENS)
    ours = oracle.our_trace(pair.target, ids)
    oracle.assert_same(ours, oracle.torch_trace(pair.model, ids))
    assert default_aux_layers(LAYERS) == (2, 4, 5)

    prompt, count = ids[0, : TOKENS // 2], TOKENS // 2
    assert oracle.our_greedy(pair.target, prompt, count, TOKENS) == oracle.torch_greedy(pair.model, prompt, count)


@pytest.mark.parametrize("name", NAMES)
def test_full_size_config_keeps_its_numbers(name: str) -> None:
    raw = {"model_type": "qwen3", **read(name)}
    config, text = TargetConfig.from_hf(raw), text_config(raw)
    assert (config.num_layers, config.hidden_size) == (text["num_hidden_layers"], text["hidden_size"])
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (
        text["num_attention_heads"], text["num_key_value_heads"], text["head_dim"],
    )  # fmt: skip
    assert config.rope.theta == text.get("rope_theta", text.get("rope_parameters", {}).get("rope_theta"))
    assert config.num_experts == text.get("num_experts", 0)
    assert config.layer_types.count("full_attention") == config.num_layers // text.get("full_attention_interval", 1)
