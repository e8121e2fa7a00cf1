"""The flat config.json that EAGLE, SpecForge, AngelSlim and ModelOpt share: a llama's, with a few keys more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle3_jax.checkpoint.formats.head import FLAGS, IDS, Convention, Head, Sections
from eagle3_jax.checkpoint.formats.keys import CARRIED, LAYER, Keys
from eagle3_jax.config import DraftConfig

OUTPUTS = "aux_hidden_states_layer_ids"  # AngelSlim's second list: layer outputs
# Switches of ModelOpt's eagle_config, with the only value that describes the head implemented here.
SWITCHES: dict[str, Any] = {
    "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
    "use_mtp_layernorm": False, "parallel_draft_step": 1,
}  # fmt: skip
HARMLESS = ("next_layer_regular", "parallel_draft_heads_num_layers", "eagle_decoder_type", "has_lm_head")
EAGLE_KNOWN = {IDS, *FLAGS, *SWITCHES, *HARMLESS}
KNOWN = LAYER | CARRIED | {*FLAGS, IDS, OUTPUTS, "eagle_config", "draft_vocab_size", "target_hidden_size"}


def sections(raw: Mapping[str, Any]) -> Sections:
    """Takes a flat config apart. Norm flags may stand at the top level, where vLLM reads them, or in eagle_config."""
    problems: list[str] = []
    warnings: list[str] = []
    keys = Keys(raw, problems)
    eagle = keys.table("eagle_config")
    ids, convention = _aux_ids(keys, eagle, warnings)
    for key, value in SWITCHES.items():
        if eagle.values.get(key) is not None and eagle.values[key] != value:
            problems.append(f"eagle_config {key} = {eagle.values[key]!r} is not supported, only {value}")
    return Sections(
        layer=raw, flags={flag: keys.flag(flag) or eagle.flag(flag) for flag in FLAGS},
        aux_ids=ids, convention=convention, draft_vocab_size=keys.integer("draft_vocab_size"),
        target_hidden_size=keys.integer("target_hidden_size"), tied=keys.flag("tie_word_embeddings"),
        carried=keys.taken(CARRIED), unknown=(*keys.unknown(KNOWN), *eagle.unknown(EAGLE_KNOWN)),
        problems=tuple(problems), warnings=tuple(warnings),
    )  # fmt: skip


def _aux_ids(keys: Keys, eagle: Keys, warnings: list[str]) -> tuple[tuple[int, ...] | None, Convention]:
    """eagle_config's ids name layer outputs. Those at the top level are boundaries: vLLM alone reads them there."""
    nested, top, outputs = eagle.integers(IDS), keys.integers(IDS), keys.integers(OUTPUTS)
    if nested is not None:
        if top is not None and top != nested:
            warnings.append(f"eagle_config.{IDS} {list(nested)} is used, not {list(top)} of the top level")
        return nested, "output"
    if top is not None:
        warnings.append(f"{IDS} {list(top)} stands at the top level, where ids are boundaries as vLLM reads them")
        return top, "boundary"
    return outputs, "output"


def flat_config(head: Head, architecture: str, eagle_config: Mapping[str, Any] | None) -> dict[str, Any]:
    """config.json of a flat format. RoPE is written in both spellings, for readers of either age."""
    table: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": "llama",
        "eagle_config": dict(eagle_config or {}),
        **layer_config(head),
        "draft_vocab_size": head.config.draft_vocab_size,
        "tie_word_embeddings": head.tied,
    }
    if not eagle_config:
        del table["eagle_config"]
    if head.config.target_hidden_size != head.config.hidden_size:
        table["target_hidden_size"] = head.config.target_hidden_size
    return table


def layer_config(head: Head) -> dict[str, Any]:
    """The decoder layer, under Hugging Face's names."""
    config = head.config
    scaling = rope_scaling(config)
    return {
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "dtype": head.dtype,
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
        "torch_dtype": head.dtype,
        "use_cache": True,
        "vocab_size": config.vocab_size,
        **head.carried,
    }


def rope_scaling(config: DraftConfig) -> dict[str, Any] | None:
    """RoPE's scaling as Hugging Face spells it; None when there is none."""
    if config.rope.scaling == "default":
        return None
    numbers = {k: bool(v) if k == "truncate" else v for k, v in config.rope.params}
    return {"rope_type": config.rope.scaling, **numbers}


def eagle_ids(head: Head) -> dict[str, Any]:
    """eagle_config as SpecForge has it: ids of layer outputs, one less than boundaries."""
    if head.aux_layers is None:
        return {}
    return {IDS: [b - 1 for b in head.aux_layers], "use_aux_hidden_state": True}


def cannot(head: Head) -> list[str]:
    """What no flat format has words for."""
    config = head.config
    checks = (
        (config.norm_before_residual, "norm_before_residual"),
        (config.norm_before_fc, "norm_before_fc"),
        (config.qk_norm, "q/k norms"),
        (config.num_layers > 1, f"{config.num_layers} layers (readers disagree on the names of a second one)"),
        (0 in (head.aux_layers or ()), "aux boundary 0, the embeddings: ids name layer outputs"),
        (
            config.own_embedding and config.hidden_size == config.target_hidden_size,
            "a trained embedding (readers take the target's)",
        ),
        (
            config.rope.rotary_dim != config.head_dim,
            f"a rotation of {config.rope.rotary_dim} of {config.head_dim} dimensions",
        ),
    )
    return [text for found, text in checks if found]


def no_late_norms(head: Head) -> list[str]:
    """EAGLE-3.1's two flags, for the formats that came before it."""
    return [flag for flag in ("fc_norm", "norm_output") if getattr(head.config, flag)]
