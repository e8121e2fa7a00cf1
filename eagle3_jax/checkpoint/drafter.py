"""EAGLE-3 heads from folders of any published format (see `formats`), as modules on a device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from eagle3_jax.checkpoint.fill import fill, make_plan, to_device
from eagle3_jax.checkpoint.formats import Choices, Head, read_head
from eagle3_jax.checkpoint.formats.head import EMBEDDING, OUTPUT, TABLES
from eagle3_jax.checkpoint.formats.tensors import embedding_note, not_finite
from eagle3_jax.checkpoint.hf import parameters_of, resolve_dtype, with_arrays
from eagle3_jax.checkpoint.layout import EVERY_FAMILY, Parameter
from eagle3_jax.checkpoint.placing import check_mesh_complete, sharding_of
from eagle3_jax.checkpoint.problems import CheckpointError
from eagle3_jax.checkpoint.safetensors_file import TensorInfo
from eagle3_jax.checkpoint.vocab_map import Reading
from eagle3_jax.config import DraftConfig, TargetConfig
from eagle3_jax.distributed import to_host
from eagle3_jax.drafters.eagle3 import Eagle3


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

    On a mesh it is laid out as a target is; but every process reads the whole, to find values that are not finite.

    Args:
      path_or_id: a folder in any format of `formats`, or a hub id.
      embed: the target's token embedding [V, D]; an embedding in the folder is compared with it.
      vocab_map: how to read `d2t` should both readings fit ("offset" or "absolute").
      config_overrides: fields of `DraftConfig` to be replaced, for instance aux_layers; also rope_theta.

    Raises:
      CheckpointError: with every problem of the folder.
    """
    check_mesh_complete(mesh)
    choices = Choices(vocab_map=vocab_map, overrides=dict(config_overrides or {}))
    head = read_head(path_or_id, target_config, choices, revision=revision)
    weights = weights_of(head)
    config = head.config
    kind = resolve_dtype(dtype, head.raw, weights.values())
    graph, abstract = nnx.split(nnx.eval_shape(lambda: Eagle3(config, dtype=kind, rngs=nnx.Rngs(0))))
    plan = make_plan(parameters_of(abstract), weights, EVERY_FAMILY)
    if problems := [*plan.problems, *not_finite(weights)]:
        raise CheckpointError(path_or_id, problems)
    arrays = fill(plan, lambda parameter, found: to_device(parameter, found, sharding_of(parameter, mesh, config)))
    targets = head.vocab.targets
    table = Parameter("d2t", targets.shape, targets.dtype)
    arrays["d2t"] = jax.device_put(targets, sharding_of(table, mesh, config))
    notes = (f"format {head.format}: {head.why}", *head.warnings, *head.notes, *_more_notes(head, embed))
    return LoadedDrafter(nnx.merge(graph, with_arrays(abstract, arrays)), config, head.format, notes)


def weights_of(head: Head) -> dict[str, TensorInfo]:
    """The tensors that become parameters; a tied output is the embedding."""
    infos = {n: t for n, t in head.tensors.items() if isinstance(t, TensorInfo) and n not in TABLES}
    if head.tied:
        infos[OUTPUT] = infos[EMBEDDING]
    return {n: t for n, t in infos.items() if n != EMBEDDING or head.config.own_embedding}


def _more_notes(head: Head, embed: jax.Array | None) -> list[str]:
    unknown = f"config.json has keys that are not known here: {', '.join(head.unknown_keys)}"
    notes = [unknown] if head.unknown_keys else []
    info = head.tensors.get(EMBEDDING)
    if head.config.own_embedding or not isinstance(info, TensorInfo):
        return notes
    text, _ = embedding_note(info, None if embed is None else _Rows(embed))
    return [*notes, text] if text else notes


class _Rows:
    """An array on a device whose rows are fetched as they are asked for."""

    def __init__(self, array: jax.Array) -> None:
        self.array, self.shape = array, tuple(array.shape)

    def __getitem__(self, rows: slice) -> np.ndarray[Any, Any]:
        return to_host(self.array[rows])
