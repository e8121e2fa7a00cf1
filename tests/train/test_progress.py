"""What a run says of itself: reports, their files, and what a run that goes on makes of older ones."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from train.flops import Work
from train.loss import StepSums
from train.metrics import cut_metrics, read_metrics, scalars_of
from train.progress import Progress, acceptance, simulated_length

SUMS = StepSums(*(np.array(x, np.float32) for x in ([2.0, 3.0], [8, 6], [10, 8], [5, 2])))
EVALUATION = {
    "num_drafts": 2, "num_prompts": 3, "num_tokens": 30,
    "predicted": {"acceptance_length": 1.9, "acceptance_rates": [0.6, 0.3], "num_cycles": 16},
    "measured": {"acceptance_length": 1.8, "acceptance_rates": [0.5, 0.3], "num_cycles": 17},
}  # fmt: skip


class Collected:
    """Numbers as they are handed on."""

    def __init__(self) -> None:
        self.found: dict[int, dict[str, float]] = {}
        self.closed = False

    def write(self, step: int, values: Any) -> None:
        self.found.setdefault(step, {}).update(values)

    def close(self) -> None:
        self.closed = True


def progress(path: Path, **changes: Any) -> Progress:
    return Progress(path, **{"start": 0, "total": 10, "every": 2, "quiet": True, **changes})


def test_rates_are_of_supervised_positions_and_lengths_of_their_products() -> None:
    assert acceptance(SUMS) == [0.5, 0.25] and simulated_length([0.5, 0.25]) == 1 + 0.5 + 0.125


def test_a_report_holds_means_since_the_last(tmp_path: Path) -> None:
    collected = Collected()
    bar = progress(tmp_path / "m.jsonl", work=Work(3e9, 1e12), scalars=[collected])
    bar.add(0, 1.0, 0.5, SUMS, 100, 1e-3)
    assert not (tmp_path / "m.jsonl").read_text()
    bar.add(1, 2.0, 1.5, SUMS, 300, 2e-3)
    bar.evaluated(2, EVALUATION)
    bar.close()
    (line,), (evaluation,) = read_metrics(tmp_path / "m.jsonl")
    speed = line["tokens_per_second"]
    assert speed > 0 and math.isclose(line.pop("mfu"), 3e9 * speed / 1e12, rel_tol=1e-3, abs_tol=1e-4)
    assert line == {
        "step": 2, "loss": 1.5, "acceptance": [0.5, 0.25], "simulated_acceptance_length": 1.625, "gradient_norm": 1.0,
        "learning_rate": 2e-3, "tokens_per_second": speed,
    }  # fmt: skip
    assert evaluation == {"step": 2, "evaluation": EVALUATION}
    assert collected.closed and collected.found[2]["train/loss"] == 1.5
    assert collected.found[2]["eval/measured_acceptance_length"] == 1.8


def test_mfu_is_left_out_where_the_peak_is_unknown(tmp_path: Path) -> None:
    bar = progress(tmp_path / "m.jsonl", every=1, work=Work(3e9))
    bar.add(0, 1.0, 0.5, SUMS, 100, 1e-3)
    bar.close()
    assert "mfu" not in json.loads((tmp_path / "m.jsonl").read_text())


def test_a_pause_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("train.progress.time.monotonic", lambda: now[0])
    bar = progress(tmp_path / "m.jsonl", every=1)
    with bar.paused():
        now[0] += 100.0
    now[0] += 2.0
    bar.add(0, 1.0, 0.5, SUMS, 100, 1e-3)
    bar.close()
    assert json.loads((tmp_path / "m.jsonl").read_text())["tokens_per_second"] == 50.0


def test_what_was_written_after_the_checkpoint_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    lines = [{"step": 2, "loss": 1.0}, {"step": 2, "evaluation": EVALUATION}, {"step": 4, "loss": 2.0}]
    path.write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 6, "lo')
    bar = progress(path, start=2, every=1)
    bar.add(2, 3.0, 0.5, SUMS, 100, 1e-3)
    bar.close()
    course = read_metrics(path)
    assert [(line["step"], line["loss"]) for line in course.training] == [(2, 1.0), (3, 3.0)]
    assert [line["step"] for line in course.evaluations] == [2]


def test_the_last_line_of_a_step_counts_and_broken_ones_do_not(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 2, "loss": 1}\n[1]\n{"loss": 1}\n{"step": 1, "loss": 5}\n{"step": 2, "loss": 3}\n{"ste')
    assert [line["loss"] for line in read_metrics(path).training] == [5, 3]
    cut_metrics(path, 9)
    assert path.read_text().count("\n") == 3
    assert read_metrics(tmp_path / "absent") == ([], [])


def test_names_of_charts() -> None:
    line = {"step": 3, "loss": 0.5, "acceptance": [0.7, 0.6], "mfu": 0.4, "tokens_per_second": 9.0}
    assert scalars_of(line) == {
        "train/loss": 0.5, "train/acceptance_1": 0.7, "train/acceptance_2": 0.6, "speed/mfu": 0.4,
        "speed/tokens_per_second": 9.0,
    }  # fmt: skip
    found = scalars_of({"step": 3, "evaluation": EVALUATION})
    assert found["eval/predicted_acceptance_rates_2"] == 0.3 and found["eval/num_tokens"] == 30
