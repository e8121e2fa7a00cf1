"""SpecForge's format, which lmsys publishes and SGLang reads: flat, `midlayer.`, ids of layer outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle3_jax.checkpoint.formats import flat
from eagle3_jax.checkpoint.formats.head import Format, Head
from eagle3_jax.checkpoint.formats.keys import architectures


def _recognise(raw: Mapping[str, Any], names: tuple[str, ...]) -> str:
    if "eagle_config" in raw:
        return "config.json has eagle_config"
    eagle3 = [n for n in architectures(raw) if "Eagle3" in n]
    return f"architecture {eagle3[0]}, a flat config without speculators' keys" if eagle3 else ""


def _config(head: Head) -> dict[str, Any]:
    table = flat.flat_config(head, "LlamaForCausalLMEagle3", flat.eagle_ids(head))
    return table | {flag: True for flag in ("fc_norm", "norm_output") if getattr(head.config, flag)}


def remarks(head: Head) -> list[str]:
    """What SGLang and vLLM do with ids in eagle_config."""
    if head.aux_layers is None or head.aux_layers[0] == 2:
        return []
    return [
        f"SGLang takes ids for layer outputs only when the first is 1; here it would capture {_ids(head)} as "
        "boundaries: check what your version does"
    ]


def _ids(head: Head) -> list[int]:
    return [b - 1 for b in head.aux_layers or ()]


FORMAT = Format(
    "specforge", "SpecForge's format", "output", _recognise, flat.sections, _config, flat.cannot, remarks
)  # fmt: skip
