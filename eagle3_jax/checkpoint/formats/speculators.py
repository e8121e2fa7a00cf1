"""The format of vLLM's speculators project: nested sections, `layers.0.`, aux ids are boundaries, every norm flag."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle3_jax.checkpoint.formats.flat import layer_config
from eagle3_jax.checkpoint.formats.head import FLAGS, IDS, Format, Head, Sections
from eagle3_jax.checkpoint.formats.keys import CARRIED, LAYER, Keys

MARKS = ("speculators_model_type", "speculators_config", "transformer_layer_config")
VERSION = "0.5.0"  # the first whose config class has every flag written here
TOP = {*MARKS, *FLAGS, IDS, "speculators_version", "draft_vocab_size", "target_hidden_size", "embed_requires_grad",
       "quantization_config", "model_type"}  # fmt: skip


def _recognise(raw: Mapping[str, Any], names: tuple[str, ...]) -> str:
    return next((f"config.json has {key}" for key in MARKS if key in raw), "")


def _sections(raw: Mapping[str, Any]) -> Sections:
    problems: list[str] = []
    top = Keys(raw, problems)
    layer = top.table("transformer_layer_config")
    verifier = top.table("speculators_config").table("verifier")
    warnings = []
    if "norm_before_residual" not in raw:
        warnings.append("norm_before_residual is not in config.json: false, as speculators takes it; vLLM takes true")
    quantised = {"quantization_config": raw["quantization_config"]} if raw.get("quantization_config") else {}
    return Sections(
        layer={**layer.values, **quantised}, flags={flag: top.flag(flag) for flag in FLAGS}, aux_ids=top.integers(IDS),
        convention="boundary", draft_vocab_size=top.integer("draft_vocab_size"),
        target_hidden_size=top.integer("target_hidden_size"), own_embedding=top.flag("embed_requires_grad"),
        tied=top.flag("tie_word_embeddings"), verifier=verifier.text("name_or_path"),
        verifier_architectures=verifier.texts("architectures"), carried=layer.taken(CARRIED),
        unknown=(*top.unknown(TOP | CARRIED), *layer.unknown(LAYER | CARRIED)),
        problems=tuple(problems), warnings=tuple(warnings),
    )  # fmt: skip


def _config(head: Head) -> dict[str, Any]:
    config = head.config
    layer = {"model_type": "qwen3" if config.qk_norm else "llama", **layer_config(head)}
    layer |= {"mlp_bias": False, "tie_word_embeddings": False}
    if config.rope.rotary_dim != config.head_dim:
        layer["partial_rotary_factor"] = config.rope.rotary_dim / config.head_dim
        layer["rope_parameters"] |= {"partial_rotary_factor": layer["partial_rotary_factor"]}
    narrow = config.target_hidden_size != config.hidden_size
    return {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": config.draft_vocab_size,
        "dtype": head.dtype,
        IDS: None if head.aux_layers is None else list(head.aux_layers),
        "embed_requires_grad": config.own_embedding,
        **{flag: getattr(config, flag) for flag in FLAGS},
        "speculators_config": _speculators_config(head),
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "target_hidden_size": config.target_hidden_size if narrow else None,
        "tie_word_embeddings": head.tied,
        "torch_dtype": head.dtype,
        "transformer_layer_config": layer,
    }


def _speculators_config(head: Head) -> dict[str, Any]:
    method = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [method],
        "verifier": {"name_or_path": head.verifier, "architectures": list(head.verifier_architectures)},
    }


def _cannot(head: Head) -> list[str]:
    found = []
    if head.aux_layers is None:
        found.append("aux layers that are not known: name them, or the target whose default is meant")
    if head.verifier is None:
        found.append("a head whose target is not named: name its verifier")
    return found


def _remarks(head: Head) -> list[str]:
    found = []
    if len(head.config.aux_layers) != 3:
        found.append(f"vLLM builds fc for three aux states, this head has {len(head.config.aux_layers)}: check yours")
    late = [flag for flag in ("norm_before_fc", "fc_norm", "norm_output") if getattr(head.config, flag)]
    if late:
        found.append(f"{', '.join(late)}: older versions of vLLM ignore it")
    return found


FORMAT = Format(
    "speculators", "speculators' format", "boundary", _recognise, _sections, _config, _cannot, _remarks,
    first_layer="layers.0.",
)  # fmt: skip
