"""Everything needed to go on: weights, optimizer, step (which is the data position), vocabulary map, config, recipe."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from eagle3_jax.errors import UserError
from train.data.conversations import Row
from train.recipe import Recipe, flatten
from train.step import TrainState

# Keys that may differ when a run goes on: they change neither the losses nor where they come from.
FREE_KEYS = (
    *("output", "save_every", "keep", "log_every", "log", "peak_flops", "export", "remat", "accumulate", "mesh."),
    "evaluate.",
)


# What runs did before these keys existed: their checkpoints do not name them.
OLD_DEFAULTS = {"data.packing": False, "loss": "kl", "kl_scale": 1.0, "kl_decay": 1.0, "hidden_weight": 0.0}


class ResumeError(UserError):
    """A run folder that cannot be gone on with."""


def fingerprint(rows: Sequence[Row]) -> str:
    """Of the training sequences, in order: the same step must see the same batch."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(row.tokens.tobytes())
        digest.update(row.mask.tobytes())
        if row.segment_ids is not None:
            digest.update(row.segment_ids.tobytes())
    return digest.hexdigest()


def describe_run(recipe: Recipe, num_steps: int, rows: Sequence[Row], draft_config: Any) -> dict[str, Any]:
    """What a checkpoint says of its run, as JSON."""
    return {
        "recipe": flatten(recipe),
        "num_steps": num_steps,
        "data": fingerprint(rows),
        "draft_config": dataclasses.asdict(draft_config),
    }


def check_same_run(saved: Mapping[str, Any], current: Mapping[str, Any], folder: Path) -> None:
    """Raises ResumeError naming every key of the recipe that differs, or that the data do."""
    old, new = {**OLD_DEFAULTS, **saved["recipe"]}, current["recipe"]
    differ = [k for k in sorted({*old, *new}) if old.get(k) != new.get(k) and not k.startswith(FREE_KEYS)]
    if differ:
        changes = "; ".join(f"{k}: {old.get(k)!r} then, {new.get(k)!r} now" for k in differ)
        raise ResumeError(f"{folder} holds a run of another recipe ({changes}); choose another output folder")
    if saved["data"] != current["data"] or saved["num_steps"] != current["num_steps"]:
        raise ResumeError(f"{folder} holds a run over other training sequences: the data files have changed since")


class Checkpoints:
    """The checkpoints of one run, in OUTPUT/checkpoints; the newest `keep` stay."""

    def __init__(self, folder: Path, keep: int, run: Mapping[str, Any]) -> None:
        import orbax.checkpoint as ocp

        self._ocp, self._run, self._folder = ocp, dict(run), folder
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager((folder / "checkpoints").absolute(), options=options)

    def latest(self) -> int | None:
        """The newest checkpoint's step, the number of steps done; None if there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, d2t: np.ndarray) -> None:
        """Writes the state after `step` steps, unless it is there already."""
        if step in self._manager.all_steps():
            return
        save, ocp = self._manager.save, self._ocp.args
        run = ocp.JsonSave({**self._run, "step": step})
        save(step, args=ocp.Composite(state=ocp.StandardSave(_as_tree(state, d2t)), run=run))

    def run_of(self, step: int) -> dict[str, Any]:
        """What the checkpoint of `step` says of its run."""
        args = self._ocp.args
        return self._manager.restore(step, args=args.Composite(run=args.JsonRestore()))["run"]

    def restore(self, step: int, like: TrainState, d2t: np.ndarray) -> TrainState:
        """The state saved at `step`, laid out as `like`, on whatever mesh that is.

        Raises:
          ResumeError: the checkpoint is of another recipe, other data or another vocabulary map.
        """
        check_same_run(self.run_of(step), self._run, self._folder)
        args = self._ocp.args
        abstract = jax.tree.map(_abstract, _as_tree(like, d2t))
        tree = self._manager.restore(step, args=args.Composite(state=args.StandardRestore(abstract)))["state"]
        if not np.array_equal(tree["d2t"], d2t):
            raise ResumeError(f"{self._folder} holds a run with another draft vocabulary")
        return TrainState(tree["params"], tree["opt_state"])

    def close(self) -> None:
        self._manager.close()


def _as_tree(state: TrainState, d2t: np.ndarray) -> dict[str, Any]:
    return {"params": state.params, "opt_state": state.opt_state, "d2t": np.asarray(d2t)}


def _abstract(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) if isinstance(x, jax.Array) else x
