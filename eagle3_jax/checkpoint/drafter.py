"""EAGLE-3 heads from folders of any published format (see `draft_formats`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from eagle3_jax.checkpoint.draft_formats import DraftFolder, describe, draft_config
from eagle3_jax.checkpoint.fill import fill, make_plan, to_device
from eagle3_jax.checkpoint.hf import parameters_of, resolve_dtype, sharding_of, with_arrays
from eagle3_jax.checkpoint.layout import EVERY_FAMILY, Parameter
from eagle3_jax.checkpoint.problems import CheckpointError
from eagle3_jax.checkpoint.safetensors_file import TensorInfo
from eagle3_jax.checkpoint.source import open_source, read_json, resolve
from eagle3_jax.checkpoint.vocab_map import Reading, VocabMap, read_vocab_map
from eagle3_jax.config import DraftConfig, TargetConfig
from eagle3_jax.drafters.eagle3 import Eagle3

TABLES = ("d2t", "t2d")
EMBEDDING = "embed_tokens.weight"


@dataclasses.dataclass(frozen=True)
class LoadedDrafter:
    """A head, its config, the format it was in, and notes on every choice that was not written in the folder."""

    model: Eagle3
    config: DraftConfig
    format: str
    notes: tuple[str, ...]


def load_drafter(
    path_or_id: str | Path,
    target_config: TargetConfig,
    *,
    dtype: Any = "auto",
    revision: str | None = None,
    mesh: Mesh | None = None,
    embed: jax.Array | None = None,
    vocab_map: Reading | None = None,
    config_overrides: Mapping[str, Any] | None = None,
) -> LoadedDrafter:
    """Loads an EAGLE-3 head for a target.

    Args:
      path_or_id: a folder in SpecForge's, EAGLE's or speculators' format, or a hub id.
      embed: the target's token embedding [V, D]; an embedding in the folder is compared with it.
      vocab_map: how to read `d2t` should both readings fit ("offset" or "absolute").
      config_overrides: fields of `DraftConfig` to be replaced, for instance aux_layers; also rope_theta.

    Raises:
      CheckpointError: with every problem of the folder.
    """
    folder = resolve(path_or_id, revision)
    raw = read_json(folder, "config.json", required=True)
    source = open_source(folder)
    described = describe(raw, source)
    config, problems, notes = draft_config(described, target_config, config_overrides)
    problems = [*described.problems, *problems]
    if config is None or described.foreign:
        raise CheckpointError(folder, problems)
    mapping = vocabulary(described, config, vocab_map)
    graph, abstract = nnx.split(
        nnx.eval_shape(lambda: Eagle3(config, dtype=resolve_dtype(dtype, raw, source), rngs=nnx.Rngs(0)))
    )
    tensors = {
        n: t for n, t in described.tensors.items() if n not in TABLES and (n != EMBEDDING or config.own_embedding)
    }
    plan = make_plan(parameters_of(abstract), tensors, EVERY_FAMILY, described.full_name)
    if problems := list(dict.fromkeys([*problems, *mapping.problems, *plan.problems])):
        raise CheckpointError(folder, problems)
    notes = [f"format {described.format}: {described.why}", *notes, *_embedding_notes(described, config, embed)]
    arrays = fill(plan, lambda parameter, found: to_device(parameter, found, sharding_of(parameter, mesh, config)))
    table = Parameter("d2t", mapping.targets.shape, mapping.targets.dtype)
    arrays["d2t"] = jax.device_put(mapping.targets, sharding_of(table, mesh, config))
    return LoadedDrafter(nnx.merge(graph, with_arrays(abstract, arrays)), config, described.format, tuple(notes))


def vocabulary(folder: DraftFolder, config: DraftConfig, reading: Reading | None = None) -> VocabMap:
    """The draft vocabulary as absolute target ids; reads the two tables and nothing else."""
    d2t, t2d = (folder.tensors[name].read() if name in folder.tensors else None for name in TABLES)
    return read_vocab_map(d2t, t2d, config.draft_vocab_size, config.vocab_size, reading)


def _embedding_notes(folder: DraftFolder, config: DraftConfig, embed: jax.Array | None) -> list[str]:
    info = folder.tensors.get(EMBEDDING)
    if config.own_embedding or info is None:
        return []
    if embed is None:
        return ["the folder's embed_tokens is not used, the target's is; they were not compared"]
    if info.shape != tuple(embed.shape):
        shapes = f"{list(info.shape)}, the target's {list(embed.shape)}"
        return [f"the folder's embed_tokens is {shapes}: the target's is used"]
    error = _relative_difference(info, embed)
    if error < 0.01:  # half precision of either kind
        return []
    return [f"the folder's embed_tokens differs from the target's (relative error {error:.2g}); the target's is used"]


def _relative_difference(info: TensorInfo, embed: jax.Array, rows: int = 4096) -> float:
    difference = scale = 0.0
    for start in range(0, info.shape[0], rows):
        ours = np.asarray(embed[start : start + rows]).astype(np.float32)
        theirs = info.read()[start : start + rows].astype(np.float32)
        difference += float(np.sum(np.square(ours - theirs), dtype=np.float64))
        scale += float(np.sum(np.square(ours), dtype=np.float64))
    return (difference / scale) ** 0.5 if scale else float("inf")
