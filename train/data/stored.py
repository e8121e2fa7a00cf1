"""Offline mode: rows with what the target said to them, as `eagle3 data features` stored it.

Only the target's embeddings, final norm and output projection are then needed. Files are mapped, not read: a batch
touches the pages of its own rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from jax.sharding import Mesh

from eagle3_jax.checkpoint import load_target
from eagle3_jax.config import DraftConfig, TargetConfig
from eagle3_jax.target import Target
from train.data.checksums import model_checksum
from train.data.conversations import Row
from train.data.shards import FEATURES, ShardFolder, open_folder, read_shard, rows_of
from train.features import Features
from train.recipe import Recipe, RecipeError


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where a row's states are: places start .. end - 1 of a shard's tensors."""

    tensors: Mapping[str, np.ndarray]
    start: int
    end: int


def open_stored(recipe: Recipe, folder: Path) -> ShardFolder:
    """The recipe's features.

    Raises:
      RecipeError: they are of another target, or of rows longer than data.max_length.
    """
    found = open_folder(Path(str(recipe.features)), FEATURES)
    if found.settings["target"] != model_checksum(folder):
        raise RecipeError(f"features: {recipe.features} holds what another target than {recipe.target} said")
    if found.settings["max_length"] > recipe.data.max_length:
        longest = found.settings["max_length"]
        raise RecipeError(f"features: rows of up to {longest} tokens are stored; set data.max_length={longest}")
    return found


def stored_rows(folder: ShardFolder) -> Iterator[Row]:
    """Rows that know where their states are. Sizes are checked, checksums are not: that would read every byte."""
    for entry in folder.shards:
        tensors = {name: np.asarray(x) for name, x in read_shard(folder.folder, entry, verify=False).items()}
        bounds = tensors["offsets"].tolist()
        for row, start, end in zip(rows_of(tensors), bounds, bounds[1:], strict=False):
            yield dataclasses.replace(row, stored=(Stored(tensors, start, end),))


def padded_features(rows: Sequence[Row], length: int) -> Features:
    """Of a batch, on the host, zero where the rows are padded."""
    names = rows[0].stored[0].tensors
    layers = sorted(int(name[4:]) for name in names if name.startswith("aux."))
    aux = tuple(_gather(rows, f"aux.{layer}", length) for layer in layers)
    return Features(aux, *(_gather(rows, name, length) for name in ("hidden", "top1", "log_sum")))  # type: ignore[arg-type]


def _gather(rows: Sequence[Row], name: str, length: int) -> Any:
    """[B, length, ...]: a packed row's parts one after another."""
    like = rows[0].stored[0].tensors[name]
    out = np.zeros((len(rows), length, *like.shape[1:]), like.dtype)
    for i, row in enumerate(rows):
        at = 0
        for part in row.stored:
            out[i, at : at + part.end - part.start] = part.tensors[name][part.start : part.end]
            at += part.end - part.start
    return out


def load_ends(folder: Path, config: TargetConfig, dtype: Any, mesh: Mesh | None) -> Target:
    """A target without its layers: what is before and after them. It cannot be run."""
    target = load_target(folder, dtype=dtype, mesh=mesh, num_layers=1).model
    target.layers = nnx.List([])
    target.config = config
    return target


def check_head(recipe: Recipe, folder: ShardFolder, head: DraftConfig) -> None:
    """Raises RecipeError if the head reads other boundaries than those stored."""
    if tuple(folder.settings["aux_layers"]) != tuple(head.aux_layers):
        stored, wanted = folder.settings["aux_layers"], list(head.aux_layers)
        raise RecipeError(f"features: {recipe.features} holds the boundaries {stored}, draft.aux_layers is {wanted}")
