"""acceptance.png: a readable image, of every step there was, with its axes named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from tests.train.test_progress import EVALUATION
from train.metrics import Course
from train.plot import acceptance_figure, plot_acceptance

TRAINING: list[dict[str, Any]] = [
    {"step": step, "acceptance": [0.01 * step, 0.005 * step], "simulated_acceptance_length": 1 + 0.01 * step}
    for step in (20, 40, 60)
]
EVALUATIONS: list[dict[str, Any]] = [{"step": step, "evaluation": EVALUATION} for step in (30, 60)]


def test_what_is_drawn() -> None:
    positions, lengths = acceptance_figure(Course(TRAINING, EVALUATIONS)).axes
    assert [axes.get_xlabel() for axes in (positions, lengths)] == ["training step"] * 2
    assert (positions.get_ylabel(), lengths.get_ylabel()) == ("acceptance", "acceptance length")
    assert [line.get_label() for line in positions.lines] == ["draft 1", "draft 2"]
    assert positions.lines[1].get_xydata().tolist() == [[20, 0.1], [40, 0.2], [60, 0.3]]
    assert [line.get_label() for line in lengths.lines] == [
        "simulated (training)", "predicted (held out, K = 2)", "measured (held out, K = 2)",
    ]  # fmt: skip
    assert lengths.lines[2].get_xydata().tolist() == [[30, 1.8], [60, 1.8]]


def test_without_evaluations_there_is_one_length() -> None:
    assert len(acceptance_figure(Course(TRAINING[:1], [])).axes[1].lines) == 1


def test_the_file_is_an_image_of_the_whole_course(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, TRAINING + EVALUATIONS)))
    plot_acceptance(tmp_path, pytest.fail)
    image = imread(tmp_path / "acceptance.png")
    assert image.shape[0] > 300 and image.shape[1] > 600 and np.unique(image[..., :3]).size > 10


def test_without_matplotlib_it_is_said_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps(TRAINING[0]))
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.setitem(sys.modules, name, None)
    said: list[str] = []
    plot_acceptance(tmp_path, said.append)
    assert len(said) == 1 and "no acceptance.png" in said[0] and "eagle3-jax[plot]" in said[0]
    assert not (tmp_path / "acceptance.png").exists()


def test_a_run_without_a_report_has_no_plot(tmp_path: Path) -> None:
    plot_acceptance(tmp_path, pytest.fail)
    assert not list(tmp_path.iterdir())
