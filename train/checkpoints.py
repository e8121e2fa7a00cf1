"""Everything needed to go on: weights, optimizer, step (which is the data position), vocabulary map, config, recipe."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np

from eagle3_jax.errors import UserError
from train.data.conversations import Row
from train.places import checkpoint_place, first_line, prepare_place, storage_errors
from train.recipe import Recipe, flatten
from train.step import TrainState

# Keys that may differ when a run goes on: they change neither the losses nor where they come from.
FREE_KEYS = (
    *("output", "checkpoints", "save_every", "keep", "log_every", "log", "peak_flops", "export", "remat", "accumulate"),
    *("mesh.", "evaluate."),
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


def check_same_run(saved: Mapping[str, Any], current: Mapping[str, Any], folder: str | Path) -> None:
    """Raises ResumeError naming every key of the recipe that differs, or that the data do."""
    old, new = {**OLD_DEFAULTS, **saved["recipe"]}, current["recipe"]
    differ = [k for k in sorted({*old, *new}) if old.get(k) != new.get(k) and not k.startswith(FREE_KEYS)]
    if differ:
        changes = "; ".join(f"{k}: {old.get(k)!r} then, {new.get(k)!r} now" for k in differ)
        raise ResumeError(f"{folder} holds a run of another recipe ({changes}); choose another output folder")
    if saved["data"] != current["data"] or saved["num_steps"] != current["num_steps"]:
        raise ResumeError(f"{folder} holds a run over other training sequences: the data files have changed since")


class Checkpoints:
    """The checkpoints of one run, in OUTPUT/checkpoints or at `place`; the newest `keep` stay.

    A checkpoint is copied to the host, and then written while training goes on. It counts once it is whole: what a kill
    leaves of one has another name, and is removed at the next start. Every process of a run takes part.

    place: a folder that every host sees, or the address of a bucket, as gs://bucket/run.
    Raises UserError where it cannot be used.
    """

    def __init__(self, folder: Path, keep: int, run: Mapping[str, Any], place: str | None = None) -> None:
        import orbax.checkpoint as ocp

        self._ocp, self._run, self.place = ocp, dict(run), checkpoint_place(folder, place)
        logging.getLogger("absl").addFilter(_not_of_orbax)
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
        with storage_errors(self.place, "opened"):
            prepare_place(self.place)
            self._manager = ocp.CheckpointManager(self.place, options=options)

    def latest(self) -> int | None:
        """The newest checkpoint's step, the number of steps done; None if there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, d2t: np.ndarray) -> None:
        """Begins to write the state after `step` steps, unless it is there already; waits for the one before.

        Raises:
          UserError: this checkpoint, or the one before, could not be written.
        """
        if step in self._manager.all_steps():
            return
        save, ocp = self._manager.save, self._ocp.args
        run = ocp.JsonSave({**self._run, "step": step})
        with storage_errors(self.place, "written"):
            save(step, args=ocp.Composite(state=ocp.StandardSave(_as_tree(state, d2t)), run=run))

    def run_of(self, step: int) -> dict[str, Any]:
        """What the checkpoint of `step` says of its run."""
        args = self._ocp.args
        with self._reading(step):
            return self._manager.restore(step, args=args.Composite(run=args.JsonRestore()))["run"]

    def restore(self, step: int, like: TrainState, d2t: np.ndarray) -> TrainState:
        """The state saved at `step`, laid out as `like`, on whatever mesh that is.

        Raises:
          ResumeError: the checkpoint is damaged, or of another recipe, other data or another vocabulary map.
        """
        check_same_run(self.run_of(step), self._run, self.place)
        args = self._ocp.args
        abstract = jax.tree.map(_abstract, _as_tree(like, d2t))
        with self._reading(step):
            tree = self._manager.restore(step, args=args.Composite(state=args.StandardRestore(abstract)))["state"]
        if not np.array_equal(tree["d2t"], d2t):
            raise ResumeError(f"{self.place} holds a run with another draft vocabulary")
        return TrainState(tree["params"], tree["opt_state"])

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever the layers below make of files cut short or missing
            before = [other for other in self._manager.all_steps() if other < step]
            then = f"then training goes on from step {max(before)}" if before else "then training starts anew"
            raise ResumeError(
                f"the checkpoint {self.place}/{step} is damaged ({first_line(error)}); remove that folder, {then}"
            ) from error

    def wait(self) -> None:
        """Returns when the last checkpoint is whole. Raises UserError if it could not be written."""
        with storage_errors(self.place, "written"):
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, as `wait` does."""
        with storage_errors(self.place, "written"):
            self._manager.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """After an error what is being written is waited for, but not other processes, which may be gone."""
        if error is None:
            self.close()
        elif isinstance(error, Exception) and jax.process_count() == 1:
            with contextlib.suppress(UserError):
                self.close()


def _as_tree(state: TrainState, d2t: np.ndarray) -> dict[str, Any]:
    return {"params": state.params, "opt_state": state.opt_state, "d2t": np.asarray(d2t)}


def _abstract(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) if isinstance(x, jax.Array) else x


def _not_of_orbax(record: logging.LogRecord) -> bool:
    """Orbax logs the traceback of an error in its threads several times, and then raises it."""
    return record.levelno < logging.ERROR or "orbax" not in record.pathname
