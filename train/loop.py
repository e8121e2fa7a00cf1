"""The training loop: steps, saving, stopping."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from train.data.batches import Batch, Batches, has_supervision
from train.progress import Progress
from train.step import Frozen, Metrics, Step, TrainState, put_batch


class TrainingError(RuntimeError):
    """Training cannot go on; the message names the step."""


@dataclasses.dataclass
class Interrupt:
    """Set by a signal; the loop finishes its step, saves and leaves. A second Ctrl-C does not wait."""

    signal: int | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Catches SIGTERM and SIGINT for the time of the block (in the main thread; elsewhere signals are not ours)."""
    flag, old = Interrupt(), {}
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            old[number] = signal.signal(number, flag)
    except ValueError:
        pass
    try:
        yield flag
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@dataclasses.dataclass(frozen=True)
class Loop:
    """Runs `step` over batches. `save(done, state)` is called every `save_every` steps and at the end.

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

    def run(self, state: TrainState, start: int, stop: int) -> tuple[TrainState, int, int | None]:
        """Steps start .. stop-1. Returns (state, steps done, the signal that ended it early or None).

        Raises:
          TrainingError: a batch without supervised tokens, or a loss that is not finite (the batch is saved).
        """
        pending: tuple[int, Batch, Metrics] | None = None
        done = start
        with interruptible() as interrupt:
            while done < stop and interrupt.signal is None:
                batch = self._checked(done)
                state, metrics = self.step(state, self.frozen, put_batch(batch, self.mesh))
                self._settle(pending)
                pending, done = (done, batch, metrics), done + 1
                if done % self.save_every == 0:
                    self._settle(pending)
                    pending = None
                    self.save(done, state)
            self._settle(pending)
            if done > start:
                self.progress.report(done, float(self.rate(done - 1)))
                self.save(done, state)
        return state, done, interrupt.signal

    def _checked(self, step: int) -> Batch:
        batch = self.batches[step]
        if not any(has_supervision(row) for row in batch.mask):
            raise TrainingError(f"step {step}: no position of the batch is supervised")
        return batch

    def _settle(self, pending: tuple[int, Batch, Metrics] | None) -> None:
        """Waits for a step and records it."""
        if pending is None:
            return
        step, batch, metrics = pending
        values: Metrics = jax.device_get(metrics)
        if not (np.isfinite(values.loss) and np.isfinite(values.grad_norm)):
            path = self.output / f"bad_batch_{step}.npz"
            arrays: dict[str, Any] = {k: v for k, v in vars(batch).items() if isinstance(v, np.ndarray)}
            np.savez(path, **arrays)
            raise TrainingError(
                f"step {step}: loss {values.loss}, gradient norm {values.grad_norm}; the batch is in {path}; "
                f"the last checkpoint is good; a lower learning rate may help"
            )
        self.progress.add(step, float(values.loss), values.sums, batch.num_tokens, float(self.rate(step)))
