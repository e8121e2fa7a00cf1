"""SafeAILab's own format: a llama's config and a draft vocabulary. No aux ids: the default boundaries are meant."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from eagle3_jax.checkpoint.formats import flat
from eagle3_jax.checkpoint.formats.head import Format, Head, Sections, usual_layers
from eagle3_jax.checkpoint.formats.keys import architectures
from eagle3_jax.config import default_aux_layers


def _recognise(raw: Mapping[str, Any], names: tuple[str, ...]) -> str:
    prefix = "midlayer." if any("midlayer." in name for name in names) else "layers.0."
    return f"architecture {', '.join(architectures(raw)) or 'not named'}, no eagle_config, layer prefix {prefix}"


def _sections(raw: Mapping[str, Any]) -> Sections:
    found = flat.sections(raw)
    theta = raw.get("rope_theta")
    if theta in (None, 10000, 10000.0):
        return found
    warning = f"EAGLE's trainer rotates with theta 10000 whatever config.json says; it says {theta}"
    return dataclasses.replace(found, warnings=(*found.warnings, warning))


def _config(head: Head) -> dict[str, Any]:
    return flat.flat_config(head, "LlamaForCausalLM", None)


def _cannot(head: Head) -> list[str]:
    found = [*flat.cannot(head), *flat.no_late_norms(head)]
    if head.aux_layers is not None and not _default(head):
        found.append(f"aux boundaries {list(head.aux_layers)}: it has no ids, its readers take (2, L//2, L-3)")
    return found


def _default(head: Head) -> bool:
    """Whether the boundaries are those that a reader would choose; of an unknown target, whether they may be."""
    assert head.aux_layers is not None
    if head.num_target_layers is None:
        return usual_layers(head.aux_layers) is not None
    return head.num_target_layers >= 7 and head.aux_layers == default_aux_layers(head.num_target_layers)


def _remarks(head: Head) -> list[str]:
    if head.aux_layers is None or head.num_target_layers is not None:
        return []
    layers = usual_layers(head.aux_layers)
    return [f"written without ids: {list(head.aux_layers)} is the default only of a target of {layers} layers"]


FORMAT = Format("eagle", "EAGLE's format", "output", _recognise, _sections, _config, _cannot, _remarks)
