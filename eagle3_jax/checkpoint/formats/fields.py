"""From a config.json taken apart, and the tensors beside it, to a `DraftConfig`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from eagle3_jax.checkpoint.formats.head import TABLES, Convention, Sections, usual_layers
from eagle3_jax.checkpoint.formats.keys import LARGEST, MANY, MOST, Keys
from eagle3_jax.checkpoint.safetensors_file import TensorInfo
from eagle3_jax.checkpoint.vocab_map import Reading
from eagle3_jax.config import DraftConfig, RopeConfig, TargetConfig, check_aux_layers, default_aux_layers
from eagle3_jax.errors import ConfigError

NEEDED = {"hidden_size": "hidden_size", "intermediate_size": "intermediate_size", "num_heads": "num_attention_heads"}
UNNAMED = 3  # aux states of a head that names none


@dataclasses.dataclass(frozen=True)
class Choices:
    """What the user decides where a folder leaves room for doubt, or is wrong.

    aux_layers: instead of the folder's ids; boundaries, unless `aux_convention` says otherwise.
    aux_convention: how ids are meant; None is as the format means them.
    vocab_map: how to read `d2t` should both readings fit.
    overrides: fields of `DraftConfig` to be replaced, and rope_theta.
    """

    aux_layers: Sequence[int] | None = None
    aux_convention: Convention | None = None
    vocab_map: Reading | None = None
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)


AS_READ = Choices()


@dataclasses.dataclass
class Fields:
    """The result: `config` is None when it cannot be built; `aux_layers` is None when they are not known."""

    config: DraftConfig | None = None
    aux_layers: tuple[int, ...] | None = None
    problems: list[str] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)


def read_fields(
    sections: Sections, tensors: Mapping[str, TensorInfo], target: TargetConfig | None, choices: Choices = AS_READ
) -> Fields:
    """The config of a head for `target`, or for whatever target its folder was made for."""
    found = Fields()
    found.aux_layers = _aux_layers(sections, target, choices, found)
    layer = Keys(sections.layer, found.problems)
    sizes = _sizes(layer, sections, tensors, target, found)
    rope = _rope(layer, sections, sizes.get("head_dim") or 0, choices, target, found)
    _unsupported(layer, found)
    _quantisation(layer, tensors, found)
    _compare(layer, sections, target, found)
    if any(value is None for value in sizes.values()) or rope is None or _aux_failed(found):
        return found
    overrides = {k: v for k, v in choices.overrides.items() if k not in ("rope_theta", "aux_layers")}
    if unknown := sorted(set(overrides) - set(DraftConfig.__dataclass_fields__)):
        known = ", ".join(sorted(DraftConfig.__dataclass_fields__))
        found.problems.append(f"config_overrides {', '.join(unknown)}: not fields of DraftConfig: {known}")
        return found
    aux = found.aux_layers or tuple(range(_aux_count(tensors, sizes["target_hidden_size"])))
    flags = {
        "qk_norm": layer.values.get("model_type") == "qwen3" or "layers.0.self_attn.q_norm.weight" in tensors,
        "attention_bias": layer.flag("attention_bias") or "layers.0.self_attn.q_proj.bias" in tensors,
        "own_embedding": sections.own_embedding or sizes["hidden_size"] != sizes["target_hidden_size"],
    }
    fields = {**sizes, **flags, **sections.flags, "aux_layers": aux, "rope": rope, **overrides}
    try:
        found.config = DraftConfig(rms_norm_eps=layer.number("rms_norm_eps", 1e-6), **fields)
    except ConfigError as error:
        found.problems.append(str(error))
        return found
    _check_fc(tensors, found)
    return found


def _sizes(
    layer: Keys, sections: Sections, tensors: Mapping[str, TensorInfo], target: TargetConfig | None, found: Fields
) -> dict[str, Any]:
    """Every whole number of the config, None where it is missing."""
    sizes: dict[str, Any] = {ours: layer.integer(theirs) for ours, theirs in NEEDED.items()}
    vocab = target.vocab_size if target else layer.integer("vocab_size") or _length(tensors, "t2d")
    missing = [theirs for ours, theirs in NEEDED.items() if sizes[ours] is None] + ["vocab_size"] * (vocab is None)
    found.problems += [f"config.json: the key {k!r} is missing" for k in missing if layer.values.get(k) is None]
    hidden, heads = sizes["hidden_size"] or 0, sizes["num_heads"] or 1
    sizes["num_kv_heads"] = layer.integer("num_key_value_heads") or sizes["num_heads"]
    sizes["head_dim"] = layer.integer("head_dim") or hidden // heads or None
    sizes["num_layers"] = layer.integer("num_hidden_layers", high=MANY) or 1
    sizes["vocab_size"] = vocab
    sizes["draft_vocab_size"] = sections.draft_vocab_size or _length(tensors, "lm_head.weight") or vocab
    sizes["target_hidden_size"] = target.hidden_size if target else sections.target_hidden_size or sizes["hidden_size"]
    own = layer.integer("max_position_embeddings")
    longest = target.max_position_embeddings if target else 0
    sizes["max_position_embeddings"] = max(own or 0, longest) or 2048
    if own is not None and own < longest:
        found.notes.append(f"max_position_embeddings raised from {own} to the target's {longest}")
    elif target is None and own is not None and own <= 2048:
        found.notes.append(f"max_position_embeddings {own} is kept, the target is not known: others stop or fail there")
    return sizes


def _length(tensors: Mapping[str, TensorInfo], name: str) -> int | None:
    shape = tensors[name].shape if name in tensors else ()
    return shape[0] if shape and 0 < shape[0] <= LARGEST else None


def _aux_count(tensors: Mapping[str, TensorInfo], width: int) -> int:
    fc = tensors.get("fc.weight")
    if fc is None or len(fc.shape) != 2 or fc.shape[1] % width:
        return UNNAMED
    return min(max(fc.shape[1] // width, 1), MANY)


def _aux_failed(found: Fields) -> bool:
    return any(text.startswith("aux layers") for text in found.problems)


def _aux_layers(
    sections: Sections, target: TargetConfig | None, choices: Choices, found: Fields
) -> tuple[int, ...] | None:
    """Boundaries, from the user's ids or the folder's; None when there are none and the target is not known."""
    given = choices.overrides.get("aux_layers", choices.aux_layers)
    ids = sections.aux_ids if given is None else given
    layers = target.num_layers if target else sections.num_target_layers
    meaning = choices.aux_convention or (sections.convention if given is None else "boundary")
    try:
        if ids is None:
            found.notes.append("no aux layers in config.json: the default boundaries (2, L//2, L-3) of its target")
            if layers is None:
                return None
            chosen = default_aux_layers(layers)
            found.notes[-1] = f"no aux layers in config.json: the default boundaries {list(chosen)} are used"
            return chosen
        boundaries = check_aux_layers([i + (meaning == "output") for i in ids], layers or LARGEST)
        if not boundaries:
            raise ConfigError("aux layers: the list is empty")
    except ConfigError as error:
        found.problems.append(_as_aux(str(error)))
        return None
    if given is None and choices.aux_convention is None:
        found.warnings += look_alike(tuple(ids), sections.convention, layers)
    return boundaries


def _as_aux(text: str) -> str:
    return text if text.startswith("aux layers") else f"aux layers: {text}"


def look_alike(ids: tuple[int, ...], convention: Convention, layers: int | None) -> list[str]:
    """A warning when ids, read as their format means them, are the usual ones of the other convention."""
    one_higher = tuple(i + 1 for i in ids)
    if convention == "boundary" and (found := usual_layers(one_higher)) and layers in (None, found):
        return [
            f"aux layers {list(ids)} are read as boundaries, which this format means, but they look like layer "
            f"outputs, (1, L//2-1, L-4) of L = {found}, copied unchanged from SpecForge's format; if so they should be "
            f"{list(one_higher)}: say --aux-convention output, or --aux-layers"
        ]
    if convention == "output" and (found := usual_layers(ids)) and layers in (None, found):
        return [
            f"aux layers {list(ids)} are read as layer outputs, which this format means (boundaries "
            f"{list(one_higher)}); they are also the usual boundaries, (2, L//2, L-3) of L = {found}: if the head was "
            "trained on those, say --aux-convention boundary, or --aux-layers"
        ]
    return []


def _rope(
    layer: Keys, sections: Sections, head_dim: int, choices: Choices, target: TargetConfig | None, found: Fields
) -> RopeConfig | None:
    """RoPE in one dimension; both spellings are read, and said to disagree when they do."""
    rope = sections.rope
    if rope is None:
        nested = [layer.table(key).values for key in ("rope_scaling", "rope_parameters")]
        table = {**layer.values, "rope_scaling": nested[0], "rope_parameters": nested[1]}
        try:
            rope = RopeConfig.from_hf(table, head_dim)
        except (ConfigError, TypeError, ValueError, OverflowError) as error:
            found.problems.append(f"RoPE: {error}")
            return None
        _note_theta(layer, nested, rope, found)
    if choices.overrides.get("rope_theta") is not None:
        rope = dataclasses.replace(rope, theta=float(choices.overrides["rope_theta"]))
    if not (0 < rope.theta <= MOST and 0 < rope.rotary_dim <= max(head_dim, 1) and rope.rotary_dim % 2 == 0):
        found.problems.append(f"RoPE: theta {rope.theta:g}, a rotation of {rope.rotary_dim} of {head_dim} dimensions")
        return None
    if rope.mrope_section:
        found.notes.append("mrope sections dropped: a drafter's positions are one-dimensional")
    if target is not None and rope.theta != target.rope.theta:
        found.warnings.append(
            f"rope theta is {rope.theta:g}, the target's {target.rope.theta:g}: heads usually have their target's, "
            "unless they were trained with 10000; rope_theta overrides it"
        )
    return dataclasses.replace(rope, mrope_section=())


def _note_theta(layer: Keys, nested: list[Mapping[str, Any]], rope: RopeConfig, found: Fields) -> None:
    spellings = [table["rope_theta"] for table in (layer.values, *nested) if table.get("rope_theta") is not None]
    if not spellings:
        found.notes.append("no rope_theta in config.json: 10000 is used")
    elif any(float(theta) != rope.theta for theta in spellings):
        found.warnings.append(f"rope_theta is spelled {', '.join(map(str, spellings))}; {rope.theta:g} is used")


def _unsupported(layer: Keys, found: Fields) -> None:
    values = layer.values
    if values.get("hidden_act", "silu") not in ("silu", "swish"):
        found.problems.append(f"hidden_act {values['hidden_act']!r} is not supported, only silu")
    if layer.flag("mlp_bias"):
        found.problems.append("mlp_bias is not supported")
    types = values.get("layer_types")
    sliding = bool(values.get("use_sliding_window")) or (isinstance(types, list) and "sliding_attention" in types)
    if sliding and (window := layer.integer("sliding_window")):
        found.notes.append(
            f"trained with a sliding window of {window}, run with full attention: expect less beyond {window}"
        )


def _quantisation(layer: Keys, tensors: Mapping[str, TensorInfo], found: Fields) -> None:
    """The tensors decide: a config often carries its target's quantization_config, and the head is bfloat16."""
    packed = [t for n, t in tensors.items() if n not in TABLES and (t.dtype.itemsize == 1 or t.dtype.kind in "iu")]
    if not layer.values.get("quantization_config"):
        return
    if packed:
        found.problems.append(f"a quantised drafter is not supported: {packed[0].name} is {packed[0].dtype}")
    else:
        found.notes.append("quantization_config in config.json is not the head's, whose weights are not quantised")


def _compare(layer: Keys, sections: Sections, target: TargetConfig | None, found: Fields) -> None:
    if target is None:
        return
    pairs = (
        ("vocab_size", layer.integer("vocab_size"), target.vocab_size),
        ("target_hidden_size", sections.target_hidden_size, target.hidden_size),
        ("num_target_layers", sections.num_target_layers, target.num_layers),
    )
    found.problems += [
        f"config.json: {key} {value}, the target has {wanted}: made for another target"
        for key, value, wanted in pairs
        if value is not None and value != wanted
    ]


def _check_fc(tensors: Mapping[str, TensorInfo], found: Fields) -> None:
    """Says it in words when fc and the aux layers disagree in number; the bare shapes say it again."""
    assert found.config is not None
    fc, width, count = tensors.get("fc.weight"), found.config.target_hidden_size, len(found.config.aux_layers)
    if fc is None or len(fc.shape) != 2 or fc.shape[1] == width * count:
        return
    if fc.shape[1] % width == 0 and found.aux_layers is not None:
        found.problems.append(f"fc.weight takes {fc.shape[1] // width} aux states, the config names {count}")
