"""The ways in which EAGLE-3 heads are published: one file a format, one reader and one writer for all.

  eagle        SafeAILab's own: no aux ids at all, the default boundaries are meant
  specforge    SpecForge, SGLang, lmsys: flat config, aux ids name layer OUTPUTS (boundary - 1)
  angelslim    Tencent: as SpecForge, under another architecture's name
  modelopt     NVIDIA: as SpecForge, with `layers.0.`, `d2t` alone and switches of its own
  speculators  vLLM's project and Red Hat: nested config, aux ids are boundaries, norm flags, may carry an embedding
  native       this library: the fields of `DraftConfig`, and the config.json that the head came with

A format is recognised by what only it writes, and the reason is kept, because a wrong guess here shifts the aux
layers by one and costs most of the acceptance without any error.
"""

from __future__ import annotations

from eagle3_jax.checkpoint.formats.fields import Choices
from eagle3_jax.checkpoint.formats.head import Format, Head, Origin
from eagle3_jax.checkpoint.formats.read import FORMATS, examine, read_head
from eagle3_jax.checkpoint.formats.write import Written, write_head

__all__ = ["FORMATS", "Choices", "Format", "Head", "Origin", "Written", "examine", "read_head", "write_head"]
