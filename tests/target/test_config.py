"""Configs: what is left out means what transformers takes it to mean; what is wrong is refused by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from eagle3_jax.config import RopeConfig, TargetConfig, check_aux_layers, default_aux_layers
from eagle3_jax.errors import ConfigError
from eagle3_jax.layers.rope import frequencies
from tests.helpers import assert_close

NEEDED: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 56, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
SHARED: dict[str, Any] = {**EXPERTS, "shared_expert_intermediate_size": 12}
SHORTEST: dict[str, dict[str, Any]] = {
    "qwen3_5_text": NEEDED, "qwen3_5_moe_text": {**NEEDED, **SHARED}, "qwen3_next": {**NEEDED, **SHARED},
    "qwen3": NEEDED, "qwen3_moe": {**NEEDED, **EXPERTS}, "qwen2": NEEDED, "llama": NEEDED,
}  # fmt: skip


@pytest.mark.parametrize("family", SHORTEST)
@pytest.mark.parametrize("more", [{}, {"rope_theta": 5e5}], ids=["bare", "theta"])
def test_what_a_config_leaves_out_is_as_in_transformers(family: str, more: dict[str, Any]) -> None:
    raw = {**SHORTEST[family], **more}
    full = transformers.AutoConfig.for_model(family, **raw).to_dict()
    expected = TargetConfig.from_hf(full)
    got = TargetConfig.from_hf({"model_type": family, **raw})
    # transformers keeps this default in the model, not in the config it writes.
    assert got.rope.mrope_section == ((11, 11, 10) if "qwen3_5" in family else ())
    assert got == expected


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn, factor 1": {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 512},
    "yarn, not truncated": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "truncate": False,
    },
    "yarn, betas and attention factor": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 16.0,
        "beta_slow": 2.0, "attention_factor": 0.7,
    },
    "yarn, mscales": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "mscale": 0.8,
        "mscale_all_dim": 1.2,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("theta", [1e4, 1e7])
@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_rope_scaling_as_in_transformers(name: str, theta: float, partial: float) -> None:
    rope = {"rope_theta": theta, "partial_rotary_factor": partial, **ROPES[name]}
    config = transformers.Qwen3Config(**NEEDED, head_dim=64, rope_parameters=dict(rope))
    expected, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
    ours = RopeConfig.from_hf({"max_position_embeddings": 512, "rope_parameters": rope}, 64)
    got, our_factor = frequencies(ours)
    assert ours.rotary_dim == 64 * partial
    assert_close(got, expected, 1e-6)
    assert our_factor == pytest.approx(factor)


def test_both_spellings_of_rope() -> None:
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}, "partial_rotary_factor": 0.5}
    new = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}}
    assert RopeConfig.from_hf(old, 16) == RopeConfig.from_hf(new, 16)
    assert RopeConfig.from_hf({"rope_scaling": None, "rope_theta": 5e5}, 16) == RopeConfig(5e5, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported; known are qwen3_5"),
        ({"model_type": None}, "model_type None"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"num_attention_heads": 3}, "3 heads are not a multiple of 2 key/value heads"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope type 'longrope' is not supported"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "needs low_freq_factor, high_freq_factor"),
        ({"model_type": "qwen3_moe"}, "'num_experts' is missing"),
        ({"model_type": "qwen3_moe", **EXPERTS, "num_experts_per_tok": 9}, "num_experts_per_tok 9 with 8 experts"),
        ({"model_type": "qwen3_5", "layer_types": ["full_attention"]}, "1 layer_types for 8 layers"),
        ({"model_type": "qwen3_5", "layer_types": ["sliding_attention"] * 8}, "sliding_attention"),
        ({"model_type": "qwen3_5", "linear_num_value_heads": 17}, "17 linear value heads"),
    ],
)
def test_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TargetConfig.from_hf({"model_type": "qwen3", **NEEDED, **change})


def test_configs_are_frozen_and_hashable() -> None:
    config = TargetConfig.from_hf({"model_type": "qwen3_5", **NEEDED})
    assert hash(config) == hash(dataclasses.replace(config))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.vocab_size = 3  # type: ignore[misc]


@pytest.mark.parametrize("layers", [7, 8, 32, 94])
def test_default_aux_layers_are_distinct_boundaries(layers: int) -> None:
    ids = default_aux_layers(layers)
    assert ids == (2, layers // 2, layers - 3)
    assert check_aux_layers(ids, layers) == ids


@pytest.mark.parametrize("layers", range(1, 7))
def test_too_small_for_the_default_names_a_remedy_that_works(layers: int) -> None:
    with pytest.raises(ConfigError, match=f"target of {layers} layers is too small.*aux_layers=") as error:
        default_aux_layers(layers)
    named = str(error.value).split("aux_layers=(")[1].rstrip(")")
    ids = tuple(int(n) for n in named.split(","))
    assert check_aux_layers(ids, layers) == ids


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ((2, 2, 5), "unique and in ascending order"),
        ((5, 4), "unique and in ascending order"),
        ((-1,), r"\[-1\] are outside the boundaries 0\.\.8"),
        ((2, 9), r"\[9\] are outside the boundaries 0\.\.8"),
        ((True,), "integers"),
        ((1.0,), "integers"),
    ],
)
def test_wrong_aux_layers(ids: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_aux_layers(ids, 8)


def test_boundaries_reach_from_the_embeddings_to_the_last_layer() -> None:
    assert check_aux_layers([0, 8], 8) == (0, 8)
    assert check_aux_layers([], 8) == ()
    assert check_aux_layers(list(np.arange(2).tolist()), 8) == (0, 1)
