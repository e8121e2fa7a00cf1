"""NVIDIA ModelOpt's format: flat, `layers.0.`, `d2t` without `t2d`, switches in eagle_config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle3_jax.checkpoint.formats import flat, specforge
from eagle3_jax.checkpoint.formats.head import Format, Head

MARKS = ("use_input_layernorm_in_first_layer", "use_last_layernorm", "use_mtp_layernorm", "parallel_draft_step")


def _recognise(raw: Mapping[str, Any], names: tuple[str, ...]) -> str:
    eagle = raw.get("eagle_config")
    if not isinstance(eagle, Mapping):
        return ""
    if marks := [key for key in MARKS if key in eagle]:
        return f"eagle_config has {marks[0]}"
    bare = any(n.startswith("layers.0.") for n in names) and "t2d" not in names
    return "config.json has eagle_config, layer prefix layers.0., no t2d" if bare else ""


def _config(head: Head) -> dict[str, Any]:
    switches = {"use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True}
    more = {"use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1}
    return flat.flat_config(head, "LlamaForCausalLMEagle3", {**flat.eagle_ids(head), **switches, **more})


def _cannot(head: Head) -> list[str]:
    return [*flat.cannot(head), *flat.no_late_norms(head)]


FORMAT = Format(
    "modelopt", "ModelOpt's format", "output", _recognise, flat.sections, _config, _cannot, specforge.remarks,
    first_layer="layers.0.", tables="d2t",
)  # fmt: skip
