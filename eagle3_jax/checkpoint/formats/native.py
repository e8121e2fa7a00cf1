"""This library's own format: the fields of `DraftConfig`, and the config.json that the head came with.

So that nothing is lost and nothing is guessed again: `source` holds the first folder's format, its ids and what they
mean there, its tensors' names and its config.json.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from eagle3_jax.checkpoint.formats.head import FLAGS, Format, Head, Origin, Sections
from eagle3_jax.checkpoint.formats.keys import Keys, finite
from eagle3_jax.config import DraftConfig, RopeConfig

MODEL_TYPE = "eagle3_jax_head"
VERSION = 1
LAYER_NAMES = {  # our fields as a Hugging Face layer calls them
    "hidden_size": "hidden_size", "intermediate_size": "intermediate_size", "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads", "head_dim": "head_dim", "num_layers": "num_hidden_layers",
    "vocab_size": "vocab_size", "rms_norm_eps": "rms_norm_eps", "max_position_embeddings": "max_position_embeddings",
    "attention_bias": "attention_bias",
}  # fmt: skip
OWN = {"format_version", "num_target_layers", "verifier", "verifier_architectures", "source", "model_type", "qk_norm"}


def _recognise(raw: Mapping[str, Any], names: tuple[str, ...]) -> str:
    return f"model_type {MODEL_TYPE}" if raw.get("model_type") == MODEL_TYPE else ""


def _sections(raw: Mapping[str, Any]) -> Sections:
    problems: list[str] = []
    keys = Keys(raw, problems)
    if keys.integer("format_version") != VERSION:
        problems.append(f"config.json: format_version {raw.get('format_version')!r}; this version reads {VERSION}")
    layer = {theirs: raw.get(ours) for ours, theirs in LAYER_NAMES.items()}
    layer["model_type"] = "qwen3" if keys.flag("qk_norm") else "llama"
    return Sections(
        layer=layer, flags={flag: keys.flag(flag) for flag in FLAGS}, aux_ids=keys.integers("aux_layers"),
        convention="boundary", draft_vocab_size=keys.integer("draft_vocab_size"),
        target_hidden_size=keys.integer("target_hidden_size"), own_embedding=keys.flag("own_embedding"),
        tied=keys.flag("tie_word_embeddings"), verifier=keys.text("verifier"),
        verifier_architectures=keys.texts("verifier_architectures"),
        num_target_layers=keys.integer("num_target_layers"), rope=_rope(keys.table("rope")),
        unknown=tuple(keys.unknown({*DraftConfig.__dataclass_fields__, *OWN})), problems=tuple(problems),
    )  # fmt: skip


def _rope(keys: Keys) -> RopeConfig | None:
    params = keys.table("params").values
    rotary = keys.integer("rotary_dim", 2)
    scaling = keys.text("scaling") or "default"
    if rotary is None or not all(finite(v) for v in params.values()):
        keys.problems.append("config.json: rope needs rotary_dim, and numbers in params")
        return None
    if scaling not in ("default", "linear", "llama3", "yarn"):
        keys.problems.append(f"config.json: rope scaling {scaling!r} is not known")
    return RopeConfig(
        keys.number("theta", 10000.0), rotary, scaling, tuple(sorted((k, float(v)) for k, v in params.items()))
    )


def origin_of(raw: Mapping[str, Any]) -> Origin | None:
    """The recorded source; None when there is none, or none that can be understood (it only matters for going back)."""
    source = raw.get("source")
    if not isinstance(source, Mapping) or not isinstance(source.get("config"), Mapping):
        return None
    names, ids, convention = source.get("names"), source.get("aux_ids"), source.get("aux_convention")
    if not isinstance(names, Mapping) or not all(isinstance(n, str) for n in names.values()):
        return None
    if convention not in ("boundary", "output") or not (ids is None or isinstance(ids, list)):
        return None
    return Origin(str(source.get("format")), source["config"], names, None if ids is None else tuple(ids), convention)


def _config(head: Head) -> dict[str, Any]:
    fields = {k: v for k, v in dataclasses.asdict(head.config).items() if k not in ("rope", "aux_layers")}
    rope = dataclasses.asdict(head.config.rope) | {"params": dict(head.config.rope.params)}
    del rope["mrope_section"]
    return {
        "architectures": ["Eagle3"],
        "model_type": MODEL_TYPE,
        "format_version": VERSION,
        **fields,
        "aux_layers": None if head.aux_layers is None else list(head.aux_layers),
        "rope": rope,
        "tie_word_embeddings": head.tied,
        "dtype": head.dtype,
        "num_target_layers": head.num_target_layers,
        "verifier": head.verifier,
        "verifier_architectures": list(head.verifier_architectures),
        "source": _source(head.origin),
    }


def _source(origin: Origin | None) -> dict[str, Any] | None:
    if origin is None:
        return None
    return {
        "format": origin.format,
        "aux_ids": None if origin.aux_ids is None else list(origin.aux_ids),
        "aux_convention": origin.convention,
        "names": dict(origin.names),
        "config": dict(origin.config),
    }


FORMAT = Format(
    "native", "this library's format", "boundary", _recognise, _sections, _config, lambda head: [],
    first_layer="layers.0.", tables="kept",
)  # fmt: skip
