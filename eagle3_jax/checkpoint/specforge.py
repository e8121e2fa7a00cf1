"""Writes a module as SpecForge does, which SGLang and vLLM read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from eagle3_jax.checkpoint import formats
from eagle3_jax.checkpoint.formats.head import Head, Tensor
from eagle3_jax.checkpoint.formats.write import write_head
from eagle3_jax.checkpoint.hf import parameters_of
from eagle3_jax.checkpoint.hf_save import outgoing_tensors
from eagle3_jax.checkpoint.layout import EVERY_FAMILY
from eagle3_jax.checkpoint.safetensors_file import Outgoing
from eagle3_jax.checkpoint.vocab_map import VocabMap, as_offsets
from eagle3_jax.config import DraftConfig
from eagle3_jax.drafters.eagle3 import Eagle3


def save_specforge(
    model: Eagle3,
    config: DraftConfig,
    folder: str | Path,
    *,
    dtype: Any = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Writes config.json and model.safetensors; the folder appears complete or not at all.

    SGLang takes the ids for layer outputs only when the first is 1 (our boundary 2, the usual one), and vLLM reads none
    from this format: serve heads with other aux layers elsewhere only after looking at what their loader does, or
    convert them to speculators' format.

    Args:
      dtype: float32 or bfloat16; by default as the model has it.
      extra: further keys of config.json, such as eos_token_id.

    Raises:
      ConfigError: the head has something that the format cannot say; every such thing is named.
    """
    write_head(head_of_model(model, config, dtype), folder, "specforge", extra=extra)


def head_of_model(model: Eagle3, config: DraftConfig, dtype: Any = None) -> Head:
    """The head in a module, each tensor fetched from the device when it is written."""
    state = nnx.split(model)[1]
    arrays = {".".join(map(str, path)): variable[...] for path, variable in nnx.to_flat_state(state)}
    targets = np.asarray(arrays["d2t"])
    d2t, t2d = as_offsets(targets, config.vocab_size)
    tensors: dict[str, Tensor] = {**outgoing_tensors(parameters_of(state), arrays, EVERY_FAMILY, dtype)}
    tensors["d2t"] = Outgoing(d2t.dtype, d2t.shape, lambda: d2t)
    tensors["t2d"] = Outgoing(t2d.dtype, t2d.shape, lambda: t2d)
    return Head(config, config.aux_layers, tensors, VocabMap(targets, "offset"))


def inexpressible(config: DraftConfig) -> list[str]:
    """What SpecForge's config has no words for."""
    empty = VocabMap(np.zeros(0, np.int32), "offset")
    return formats.FORMATS["specforge"].cannot(Head(config, config.aux_layers, {}, empty))
