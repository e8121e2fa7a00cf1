"""What a run says of itself: a progress bar, and a line of JSON in metrics.jsonl every few steps."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from train.flops import Work
from train.loss import StepSums
from train.metrics import cut_metrics, scalars_of
from train.scalars import Scalars


def acceptance(sums: StepSums) -> list[float]:
    """For each step, the share of supervised positions whose guess is the target's choice."""
    return (np.asarray(sums.hits) / np.maximum(np.asarray(sums.supervised), 1)).tolist()


def simulated_length(rates: list[float]) -> float:
    """Acceptance length if steps failed independently: 1 + a0 + a0 a1 + ..."""
    return float(1 + np.cumprod(rates).sum())


class Progress:
    """Gathers metrics over `every` steps and reports their means, to `path` and to `scalars`.

    start: steps done before; what `path` says of later ones is removed. work: gives MFU, where the peak is known.
    """

    def __init__(
        self, path: Path, *, start: int, total: int, every: int, quiet: bool = False, work: Work | None = None,
        scalars: Sequence[Scalars] = (),
    ) -> None:  # fmt: skip
        cut_metrics(path, start)
        self._file = path.open("a", encoding="utf-8")
        self._bar = tqdm(total=total, initial=start, unit="step", disable=quiet, dynamic_ncols=True)
        self._every, self._work, self._scalars = every, work, scalars
        self._reset()

    def _reset(self) -> None:
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._sums: StepSums | None = None
        self._tokens, self._since = 0, time.monotonic()

    def add(self, step: int, loss: float, grad_norm: float, sums: StepSums, num_tokens: int, rate: float) -> None:
        """One finished step; `step` counts from 0."""
        self._losses.append(loss)
        self._norms.append(grad_norm)
        self._sums = sums if self._sums is None else jax.tree.map(np.add, self._sums, sums)
        self._tokens += num_tokens
        self._bar.update(1)
        if (step + 1) % self._every == 0:
            self.report(step + 1, rate)

    def report(self, step: int, rate: float) -> None:
        """Writes what was gathered since the last report; `step` steps are done."""
        if self._sums is None:
            return
        rates, seconds = acceptance(self._sums), max(time.monotonic() - self._since, 1e-9)
        speed = self._tokens / seconds
        line: dict[str, Any] = {
            "step": step, "loss": float(np.mean(self._losses)), "acceptance": [round(r, 4) for r in rates],
            "simulated_acceptance_length": round(simulated_length(rates), 4),
            "gradient_norm": float(np.mean(self._norms)), "learning_rate": rate, "tokens_per_second": round(speed, 1),
        }  # fmt: skip
        mfu = None if self._work is None else self._work.mfu(speed)
        if mfu is not None:
            line["mfu"] = round(mfu, 4)
        self._write(line)
        self._bar.set_postfix_str(
            f"loss {line['loss']:.3f}, acc {' '.join(f'{r:.2f}' for r in rates)}, "
            f"length {line['simulated_acceptance_length']:.2f}, {speed:.0f} tok/s"
            + ("" if mfu is None else f", MFU {mfu:.0%}")
        )
        self._reset()

    def evaluated(self, step: int, found: Mapping[str, Any]) -> None:
        """Writes an evaluation after `step` steps."""
        self._write({"step": step, "evaluation": dict(found)})

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        for scalars in self._scalars:
            scalars.write(line["step"], scalars_of(line))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent inside is not training: it does not count against tokens per second."""
        began = time.monotonic()
        yield
        self._since += time.monotonic() - began

    def close(self) -> None:
        self._bar.close()
        self._file.close()
        for scalars in self._scalars:
            scalars.close()
