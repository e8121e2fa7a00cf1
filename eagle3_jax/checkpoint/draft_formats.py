"""The ways in which EAGLE-3 heads are published, told apart and brought under one description.

  specforge    SpecForge, SGLang, lmsys, AngelSlim, ModelOpt: flat config, aux ids name layer OUTPUTS (boundary - 1)
  eagle        SafeAILab's own: no aux ids at all, the default boundaries are meant
  speculators  vLLM's project and Red Hat: nested config, aux ids are boundaries, norm flags, may carry an embedding

A format is recognised by what only it writes, and the reason is kept, because a wrong guess here shifts the aux
layers by one and costs most of the acceptance without any error.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from eagle3_jax.checkpoint.safetensors_file import TensorInfo
from eagle3_jax.config import DraftConfig, RopeConfig, TargetConfig, check_aux_layers, default_aux_layers
from eagle3_jax.errors import ConfigError

Format = Literal["specforge", "eagle", "speculators"]
IDS = "eagle_aux_hidden_state_layer_ids"
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
PLAIN = ("LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
OTHER_METHODS = ("dflash_config", "mask_token_id", "markov_rank", "mtp_num_layers")
# Switches of ModelOpt's eagle_config, with the only value that describes the head implemented here.
SWITCHES: dict[str, Any] = {
    "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
    "use_mtp_layernorm": False, "parallel_draft_step": 1,
}  # fmt: skip
IGNORED = re.compile(r"verifier_(norm|lm_head)\..+|.*rotary_emb\.inv_freq")


@dataclasses.dataclass(frozen=True)
class DraftFolder:
    """A published head, described: `layer` is the config of its decoder layer, `aux_ids` as the file has them."""

    format: Format
    why: str
    raw: Mapping[str, Any]
    layer: Mapping[str, Any]
    aux_ids: tuple[int, ...] | None
    tensors: dict[str, TensorInfo]
    problems: tuple[str, ...]
    foreign: bool  # not an EAGLE-3 head at all, so that its tensors need no comment

    def full_name(self, name: str) -> str:
        """What the folder would call one of our names."""
        midlayer = any("midlayer." in info.name for info in self.tensors.values())
        return name.replace("layers.0.", "midlayer.") if midlayer else name

    @property
    def aux_offset(self) -> int:
        """What is added to an id of the file to make it a boundary."""
        return 0 if self.format == "speculators" else 1

    def flag(self, name: str) -> bool:
        """A norm flag, at the top level or in `eagle_config`; absent means off in every format."""
        return bool(self.raw.get(name, (self.raw.get("eagle_config") or {}).get(name, False)))


def describe(raw: Mapping[str, Any], tensors: Iterable[TensorInfo]) -> DraftFolder:
    """Recognises the format. What this library cannot run is listed in `problems`."""
    table, problems = _normalised(tensors)
    kind, why = _recognise(raw, table)
    layer = dict(raw.get("transformer_layer_config") or raw) if kind == "speculators" else raw
    eagle_config = raw.get("eagle_config") or {}
    ids = raw.get(IDS) if kind == "speculators" else eagle_config.get(IDS, raw.get(IDS))
    foreign = _foreign(raw, table)
    problems += foreign + _unsupported(raw, layer)
    ids = None if ids is None else tuple(ids)
    return DraftFolder(kind, why, raw, layer, ids, table, tuple(problems), bool(foreign))


def _normalised(tensors: Iterable[TensorInfo]) -> tuple[dict[str, TensorInfo], list[str]]:
    """Tensors under our names: `midlayer.` is layer 0, a `model.` in front says nothing."""
    table: dict[str, TensorInfo] = {}
    problems = []
    for info in tensors:
        name = info.name.removeprefix("model.")
        name = f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name
        if IGNORED.fullmatch(name):
            continue
        if name in table:
            problems.append(f"{info.name} and {table[name].name} are the same parameter")
        table.setdefault(name, info)
    return table, problems


def _recognise(raw: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> tuple[Format, str]:
    names = raw.get("architectures") or []
    for key in ("speculators_model_type", "speculators_config", "transformer_layer_config"):
        if key in raw:
            return "speculators", f"config.json has {key}"
    if "eagle_config" in raw:
        return "specforge", "config.json has eagle_config"
    if eagle3 := [n for n in names if "Eagle3" in n]:
        return "specforge", f"architecture {eagle3[0]}, a flat config without speculators' keys"
    prefix = "midlayer." if any("midlayer." in info.name for info in tensors.values()) else "layers.0."
    return "eagle", f"architecture {', '.join(names) or 'not named'}, no eagle_config, layer prefix {prefix}"


def _foreign(raw: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> list[str]:
    method = raw.get("speculators_model_type", "eagle3")
    names = raw.get("architectures") or []
    if method != "eagle3" or any(key in raw for key in OTHER_METHODS):
        return [f"this is a {method if method != 'eagle3' else ', '.join(names)} drafter, not an EAGLE-3 head"]
    if other := [n for n in names if n not in PLAIN]:
        return [f"architecture {', '.join(other)} is not supported; supported are {', '.join(PLAIN)}"]
    if "fc.weight" not in tensors:
        return ["no fc.weight: this is not the folder of an EAGLE-3 head"]
    if "layers.0.hidden_norm.weight" not in tensors:
        return ["no hidden_norm: this looks like an EAGLE-1 or EAGLE-2 head, which is not supported"]
    return []


def _unsupported(raw: Mapping[str, Any], layer: Mapping[str, Any]) -> list[str]:
    problems = []
    if raw.get("quantization_config") or layer.get("quantization_config"):
        problems.append("a quantised drafter is not supported")
    if layer.get("hidden_act", "silu") not in ("silu", "swish"):
        problems.append(f"hidden_act {layer['hidden_act']!r} is not supported, only silu")
    switches = raw.get("eagle_config") or {}
    problems += [
        f"eagle_config {key} = {switches[key]} is not supported, only {value}"
        for key, value in SWITCHES.items()
        if key in switches and switches[key] != value
    ]
    return problems


def boundaries(folder: DraftFolder, target: TargetConfig) -> tuple[tuple[int, ...], list[str]]:
    """The aux boundaries in our numbering, and notes where the file leaves room for doubt.

    Raises:
      ConfigError: ids outside the target, or none given for a target too small for the default.
    """
    if folder.aux_ids is None:
        chosen = default_aux_layers(target.num_layers)
        return chosen, [f"no aux layers in config.json: the default boundaries {list(chosen)} are used"]
    ids = check_aux_layers([i + folder.aux_offset for i in folder.aux_ids], target.num_layers)
    length = target.num_layers
    usual = (2, length // 2, length - 3)
    outputs = tuple(b - 1 for b in usual)
    if folder.format == "speculators" and folder.aux_ids == outputs:
        return ids, [
            f"aux layers {list(ids)} are read as boundaries, which this format means; they are also the usual layer "
            f"outputs of SpecForge, so if the folder was converted from there they should be {list(usual)}"
        ]
    if folder.format != "speculators" and folder.aux_ids == usual:
        return ids, [
            f"aux layers {list(usual)} are read as layer outputs, which this format means (boundaries {list(ids)}); "
            "they are also the usual boundaries, so if the head was trained on those, override aux_layers"
        ]
    return ids, []


def draft_config(
    folder: DraftFolder, target: TargetConfig, overrides: Mapping[str, Any] | None = None
) -> tuple[DraftConfig | None, list[str], list[str]]:
    """The head's config for `target`, with problems and notes. None when it cannot be built at all.

    `overrides` are fields of `DraftConfig`, and `rope_theta`.
    """
    layer, overrides = folder.layer, dict(overrides or {})
    problems: list[str] = []
    notes: list[str] = []
    needed = ("hidden_size", "intermediate_size", "num_attention_heads")
    if absent := [key for key in needed if layer.get(key) is None]:
        return None, [f"config.json: the key {key!r} is missing" for key in absent], notes
    problems += _mismatches(folder, target)
    head_dim = layer.get("head_dim") or layer["hidden_size"] // layer["num_attention_heads"]
    try:
        aux, remarks = ((), []) if "aux_layers" in overrides else boundaries(folder, target)
        rope = RopeConfig.from_hf(layer, head_dim)
        rope = dataclasses.replace(rope, theta=float(overrides.pop("rope_theta", rope.theta)))
        config = _built(
            overrides,
            hidden_size=layer["hidden_size"], target_hidden_size=target.hidden_size,
            intermediate_size=layer["intermediate_size"], num_heads=layer["num_attention_heads"],
            num_kv_heads=layer.get("num_key_value_heads") or layer["num_attention_heads"], head_dim=head_dim,
            vocab_size=target.vocab_size, draft_vocab_size=_draft_vocab_size(folder, target), aux_layers=aux,
            rope=dataclasses.replace(rope, mrope_section=()), num_layers=layer.get("num_hidden_layers") or 1,
            rms_norm_eps=layer.get("rms_norm_eps", 1e-6),
            max_position_embeddings=max(layer.get("max_position_embeddings") or 0, target.max_position_embeddings),
            qk_norm=layer.get("model_type") == "qwen3" or "layers.0.self_attn.q_norm.weight" in folder.tensors,
            attention_bias=bool(layer.get("attention_bias")) or "layers.0.self_attn.q_proj.bias" in folder.tensors,
            own_embedding=bool(folder.raw.get("embed_requires_grad")) or layer["hidden_size"] != target.hidden_size,
            **{flag: folder.flag(flag) for flag in FLAGS},
        )  # fmt: skip
    except ConfigError as error:
        return None, [*problems, str(error)], notes
    notes += remarks + _rope_notes(folder, rope) + _length_notes(layer, target)
    return config, problems + _fc_problems(folder, config), notes


def _built(overrides: Mapping[str, Any], **fields: Any) -> DraftConfig:
    if unknown := sorted(set(overrides) - set(fields)):
        raise ConfigError(
            f"config_overrides {', '.join(unknown)}: not fields of DraftConfig: {', '.join(sorted(fields))}"
        )
    return DraftConfig(**{**fields, **overrides})


def _draft_vocab_size(folder: DraftFolder, target: TargetConfig) -> int:
    rows = folder.tensors.get("lm_head.weight")
    return folder.raw.get("draft_vocab_size") or (rows.shape[0] if rows else target.vocab_size)


def _mismatches(folder: DraftFolder, target: TargetConfig) -> list[str]:
    pairs = (
        ("vocab_size", folder.layer.get("vocab_size"), target.vocab_size),
        ("target_hidden_size", folder.raw.get("target_hidden_size"), target.hidden_size),
    )
    return [
        f"config.json: {key} {found}, the target has {wanted}: made for another target"
        for key, found, wanted in pairs
        if found is not None and found != wanted
    ]


def _fc_problems(folder: DraftFolder, config: DraftConfig) -> list[str]:
    """Says it in words when fc and the aux layers disagree in number; the bare shapes say it again."""
    fc, width = folder.tensors.get("fc.weight"), config.target_hidden_size
    if fc is None or len(fc.shape) != 2 or fc.shape[1] % width or fc.shape[1] // width == len(config.aux_layers):
        return []
    return [f"fc.weight takes {fc.shape[1] // width} aux states, the config names {len(config.aux_layers)}"]


def _rope_notes(folder: DraftFolder, rope: RopeConfig) -> list[str]:
    notes = []
    parameters = folder.layer.get("rope_parameters") or {}
    if "rope_theta" not in folder.layer and "rope_theta" not in parameters:
        notes.append("no rope_theta in config.json: 10000 is used")
    angelslim = "Eagle3LlamaForCausalLM" in (folder.raw.get("architectures") or [])
    if (folder.format == "eagle" or angelslim) and rope.theta != 10000.0:
        trainer = "AngelSlim" if angelslim else "EAGLE"
        notes.append(f"{trainer}'s trainer rotates with theta 10000 whatever config.json says; it says {rope.theta:g}")
    if rope.mrope_section:
        notes.append("mrope sections dropped: a drafter's positions are one-dimensional")
    return notes


def _length_notes(layer: Mapping[str, Any], target: TargetConfig) -> list[str]:
    notes = []
    own = layer.get("max_position_embeddings")
    if own is not None and own < target.max_position_embeddings:
        notes.append(f"max_position_embeddings raised from {own} to the target's {target.max_position_embeddings}")
    sliding = layer.get("use_sliding_window") or "sliding_attention" in (layer.get("layer_types") or ())
    if sliding and layer.get("sliding_window"):
        window = layer["sliding_window"]
        notes.append(f"trained with a sliding window of {window}, run with full attention: expect less beyond {window}")
    return notes
