"""AngelSlim's format: SpecForge's tensors and ids under another architecture's name, without EAGLE-3.1's flags."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from eagle3_jax.checkpoint.formats import flat, specforge
from eagle3_jax.checkpoint.formats.head import Format, Head, Sections
from eagle3_jax.checkpoint.formats.keys import architectures

ARCHITECTURE = "Eagle3LlamaForCausalLM"


def _recognise(raw: Mapping[str, Any], names: tuple[str, ...]) -> str:
    return f"architecture {ARCHITECTURE}" if ARCHITECTURE in architectures(raw) else ""


def _sections(raw: Mapping[str, Any]) -> Sections:
    found = flat.sections(raw)
    theta = raw.get("rope_theta")
    if theta in (None, 10000, 10000.0):
        return found
    warning = f"AngelSlim's trainer rotates with theta 10000 whatever config.json says; it says {theta}"
    return dataclasses.replace(found, warnings=(*found.warnings, warning))


def _config(head: Head) -> dict[str, Any]:
    return flat.flat_config(head, ARCHITECTURE, flat.eagle_ids(head))


def _cannot(head: Head) -> list[str]:
    return [*flat.cannot(head), *flat.no_late_norms(head)]


FORMAT = Format("angelslim", "AngelSlim's format", "output", _recognise, _sections, _config, _cannot, specforge.remarks)
