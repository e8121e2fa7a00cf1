"""Real configs made small: every flag, key and ratio stays, widths, experts, vocabulary and repeated layers go."""

from __future__ import annotations

import copy
from typing import Any

LAYERS = 8
VOCAB = 101


def shrunk(config: dict[str, Any]) -> dict[str, Any]:
    """The same config.json for a model of thousands instead of billions of parameters. Nested configs stay nested."""
    config = copy.deepcopy(config)
    # The dense Qwen3 files are keyword arguments of transformers' Qwen3Config and do not repeat its model_type.
    config.setdefault("model_type", "qwen3")
    text = config.get("text_config", config)
    period = text.get("full_attention_interval", 1)
    assert LAYERS % period == 0
    text.update(num_hidden_layers=LAYERS, vocab_size=VOCAB)
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][:LAYERS]
    _shrink_attention(text)
    _shrink_delta(text)
    _shrink_mixture(text)
    return config


def _shrink_attention(text: dict[str, Any]) -> None:
    heads, kv, width = text["num_attention_heads"], text["num_key_value_heads"], text["head_dim"]
    few = 2 if heads // kv <= 5 else 1
    text.update(num_key_value_heads=few, num_attention_heads=few * (heads // kv), head_dim=width // 8)
    # hidden / (heads * head_dim) is what separates these models: 4B is wider inside attention than outside, 14B is not.
    text["hidden_size"] = _ratio(text["hidden_size"], heads * width, text["num_attention_heads"] * text["head_dim"])
    if text.get("intermediate_size"):
        text["intermediate_size"] = 48
    if section := (text.get("rope_parameters") or {}).get("mrope_section"):
        text["rope_parameters"]["mrope_section"] = _shrink_sections(section, len_now=text["head_dim"] // 8)


def _ratio(numerator: int, denominator: int, small: int) -> int:
    """A width that stands to `small` as numerator to denominator, nearly: a multiple of 4."""
    return max(4, round(numerator * small / denominator / 4) * 4)


def _shrink_sections(section: list[int], len_now: int) -> list[int]:
    """11, 11, 10 of 32 frequencies becomes 2, 1, 1 of 4: the first section takes what rounding leaves."""
    smaller = [n * len_now // sum(section) for n in section]
    return [smaller[0] + len_now - sum(smaller), *smaller[1:]]


def _shrink_delta(text: dict[str, Any]) -> None:
    if "linear_num_key_heads" not in text:
        return
    keys, values = text["linear_num_key_heads"], text["linear_num_value_heads"]
    text.update(linear_num_key_heads=2, linear_num_value_heads=2 * (values // keys))
    text.update({key: text[key] // 8 for key in ("linear_key_head_dim", "linear_value_head_dim")})


def _shrink_mixture(text: dict[str, Any]) -> None:
    if "num_experts" not in text:
        return
    per_token = 2
    text["num_experts"] = per_token * text["num_experts"] // text["num_experts_per_tok"]
    text.update(num_experts_per_tok=per_token, moe_intermediate_size=12)
    if "shared_expert_intermediate_size" in text:
        text["shared_expert_intermediate_size"] = 12
