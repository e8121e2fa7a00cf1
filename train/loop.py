"""The training loop: steps, saving, stopping."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from eagle3_jax.distributed import is_first, to_host
from train.data.batches import Batch, Batches
from train.interrupt import Agreement, interruptible
from train.progress import Progress
from train.step import Frozen, Metrics, Step, TrainState, put_batch


class TrainingError(RuntimeError):
    """Training cannot go on; the message names the step."""


@dataclasses.dataclass(frozen=True)
class Loop:
    """Runs `step` over batches. `save(done, state)` is called every `save_every` steps and at the end,
    `evaluate(done, state)` every `evaluate_every` steps (0: never) but the last.

    Metrics are read one step late, so that the host prepares the next batch while the device computes.
    """

    step: Step
    frozen: Frozen
    batches: Batches
    save: Callable[[int, TrainState], None]
    progress: Progress
    rate: Callable[[int], Any]
    output: Path
    save_every: int
    mesh: Mesh | None = None
    evaluate: Callable[[int, TrainState], Any] | None = None
    evaluate_every: int = 0

    def run(self, state: TrainState, start: int, stop: int) -> tuple[TrainState, int, int | None]:
        """Steps start .. stop-1. Returns (state, steps done, the signal that ended it early or None).

        Raises:
          TrainingError: a batch without supervised tokens, or a loss that is not finite (the batch is saved).
        """
        pending: tuple[int, Batch, Metrics] | None = None
        done = start
        told, agreement = None, Agreement()
        with interruptible() as interrupt:
            while done < stop and told is None:
                batch = self._checked(done)
                state, metrics = self.step(state, self.frozen, put_batch(batch, self.mesh))
                told = agreement.ask(interrupt.signal)
                self._settle(pending)
                pending, done = (done, batch, metrics), done + 1
                if done % self.save_every == 0:
                    self._settle(pending)
                    pending = None
                    self.save(done, state)
                if self.evaluate and self.evaluate_every and done % self.evaluate_every == 0 and done < stop:
                    self._settle(pending)
                    pending = None
                    self.evaluate(done, state)
            self._settle(pending)
            if done > start:
                self.progress.report(done, float(self.rate(done - 1)))
                self.save(done, state)
        return state, done, told

    def _checked(self, step: int) -> Batch:
        batch = self.batches[step]
        if not batch.supervised:
            raise TrainingError(f"step {step}: no position of the batch is supervised")
        return batch

    def _settle(self, pending: tuple[int, Batch, Metrics] | None) -> None:
        """Waits for a step and records it."""
        if pending is None:
            return
        step, batch, metrics = pending
        values: Metrics = to_host(metrics)
        if not (np.isfinite(values.loss) and np.isfinite(values.grad_norm)):
            path = self.output / f"bad_batch_{step}.npz"
            if is_first():
                self._write_batch(path, step)
            raise TrainingError(
                f"step {step}: loss {values.loss}, gradient norm {values.grad_norm}; the batch is in {path}; "
                f"the last checkpoint is good; a lower learning rate may help"
            )
        self.progress.add(
            step, float(values.loss), float(values.grad_norm), values.sums, batch.num_tokens, float(self.rate(step))
        )

    def _write_batch(self, path: Path, step: int) -> None:
        arrays: dict[str, Any] = {k: v for k, v in vars(self.batches.whole(step)).items() if isinstance(v, np.ndarray)}
        np.savez(path, **arrays)
