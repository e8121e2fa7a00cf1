"""metrics.jsonl: a line of JSON for each report of training, and for each evaluation."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

Line = dict[str, Any]


class Course(NamedTuple):
    """A run so far: reports of training, and evaluations, each a line with its `step`."""

    training: list[Line]
    evaluations: list[Line]


def read_metrics(path: Path) -> Course:
    """Every whole line; the last one of a step counts, since a run that was killed did some steps again."""
    training: dict[int, Line] = {}
    evaluations: dict[int, Line] = {}
    for text in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        if (line := parsed(text)) is not None:
            (evaluations if "evaluation" in line else training)[line["step"]] = line
    return Course(*([found[step] for step in sorted(found)] for found in (training, evaluations)))


def parsed(text: str) -> Line | None:
    """A line, or None for what a kill left of one."""
    try:
        line = json.loads(text)
    except json.JSONDecodeError:
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) else None


def cut_metrics(path: Path, step: int) -> None:
    """Removes what was written after `step`: a run that goes on from there will write it again."""
    if not path.is_file():
        return
    lines = path.read_text(encoding="utf-8").splitlines()
    kept = [text for text in lines if (line := parsed(text)) is not None and line["step"] <= step]
    if kept != lines:
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(text + "\n" for text in kept), encoding="utf-8")
        os.replace(temporary, path)


def scalars_of(line: Line) -> dict[str, float]:
    """A line as the flat names and numbers of a chart: train/loss, train/acceptance_1, eval/measured_length, ..."""
    found: dict[str, float] = {}
    groups = {"evaluation": "eval/", "tokens_per_second": "speed/", "mfu": "speed/"}
    for key, value in line.items():
        if key != "step":
            _flatten(groups.get(key, "train/") + ("" if key == "evaluation" else key), value, found)
    return found


def _flatten(name: str, value: Any, found: dict[str, float]) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _flatten(f"{name}{key}" if name.endswith("/") else f"{name}_{key}", item, found)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            _flatten(f"{name}_{i + 1}", item, found)
    elif isinstance(value, int | float):
        found[name] = float(value)
