"""acceptance.png: how a run's acceptance grew, position by position, and the lengths that follow from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from train.metrics import Course, read_metrics


def plot_acceptance(output: Path, say: Callable[[str], Any]) -> None:
    """Draws OUTPUT/acceptance.png from the whole of metrics.jsonl; without matplotlib, says so."""
    course = read_metrics(output / "metrics.jsonl")
    if not course.training:
        return
    try:
        figure = acceptance_figure(course)
    except ImportError as error:
        say(f"no acceptance.png: {error}; pip install 'eagle3-jax[plot]'")
        return
    figure.savefig(output / "acceptance.png", dpi=120)


def acceptance_figure(course: Course) -> Any:
    """A matplotlib figure of two charts over training steps; it belongs to no window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    positions, lengths = figure.subplots(1, 2)
    _draw_positions(positions, course)
    _draw_lengths(lengths, course)
    return figure


def _draw_positions(axes: Any, course: Course) -> None:
    steps, rates = ([line[key] for line in course.training] for key in ("step", "acceptance"))
    for i, course_of_one in enumerate(zip(*rates, strict=True)):
        axes.plot(steps, course_of_one, label=f"draft {i + 1}", marker=_mark(steps))
    axes.set(title="On training text, by position", xlabel="training step", ylabel="acceptance", ylim=(0, 1))
    axes.legend()


def _draw_lengths(axes: Any, course: Course) -> None:
    steps = [line["step"] for line in course.training]
    simulated = [line["simulated_acceptance_length"] for line in course.training]
    axes.plot(steps, simulated, label="simulated (training)", marker=_mark(steps))
    evaluated = [line["step"] for line in course.evaluations]
    for kind, style in (("predicted", "--"), ("measured", "-")) if evaluated else ():
        found = [line["evaluation"][kind]["acceptance_length"] for line in course.evaluations]
        drafts = course.evaluations[-1]["evaluation"]["num_drafts"]
        axes.plot(evaluated, found, style, marker="o", label=f"{kind} (held out, K = {drafts})")
    axes.set(title="Tokens a cycle", xlabel="training step", ylabel="acceptance length")
    axes.legend()


def _mark(steps: list[int]) -> str:
    """A line through one point would not be seen."""
    return "o" if len(steps) == 1 else ""
