"""TensorBoard files are read back; W&B is a stand-in with the calls that are made."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tensorboardX.proto import event_pb2

from train.recipe import DataRecipe, Recipe, RecipeError
from train.scalars import TensorBoard, check_scalars, open_scalars


def recipe(output: Path, *log: Any) -> Recipe:
    return Recipe(target="t", output=str(output), data=DataRecipe(("a.jsonl",)), log=log)


def events(file: Path) -> Iterator[Any]:
    """Records as TensorFlow frames them: length, its checksum, an Event, its checksum."""
    data, at = file.read_bytes(), 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        yield event_pb2.Event.FromString(data[at + 12 : at + 12 + length])
        at += 12 + length + 4


def scalars(folder: Path) -> list[tuple[int, str, float]]:
    """What TensorBoard shows: later files first forget what their session begins anew."""
    found: list[tuple[int, str, float]] = []
    for file in sorted(folder.iterdir()):
        for event in events(file):
            if event.session_log.status == event.session_log.START:
                found = [item for item in found if item[0] < event.step]
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    return found


def test_tensorboard_files_hold_what_was_written(tmp_path: Path) -> None:
    (writer,) = open_scalars(recipe(tmp_path, "tensorboard"), 0)
    writer.write(20, {"train/loss": 0.5, "train/acceptance_1": 0.75})
    writer.write(40, {"train/loss": 0.25})
    writer.close()
    found = scalars(tmp_path / "tensorboard")
    assert found == [(20, "train/loss", 0.5), (20, "train/acceptance_1", 0.75), (40, "train/loss", 0.25)]


def test_a_run_that_goes_on_replaces_what_it_does_again(tmp_path: Path) -> None:
    first = TensorBoard(recipe(tmp_path), 0)
    for step in (20, 40):
        first.write(step, {"train/loss": float(step)})
    first.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    file.rename(file.with_name("0" + file.name))  # both are made within a second, which is all their names tell
    second = TensorBoard(recipe(tmp_path), 20)
    second.write(40, {"train/loss": 41.0})
    second.close()
    assert scalars(tmp_path / "tensorboard") == [(20, "train/loss", 20.0), (40, "train/loss", 41.0)]


class FakeRun:
    """Of W&B."""

    def __init__(self, number: str) -> None:
        self.id, self.logged, self.finished = number, list[tuple[int, dict[str, float]]](), False

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A module of that name, and what it was asked."""
    told = SimpleNamespace(inits=[], runs=[])

    def init(**given: Any) -> FakeRun:
        told.inits.append(given)
        told.runs.append(FakeRun(given["id"] or "abc"))
        return told.runs[-1]

    module = ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    told.module = module
    return told


def test_wandb_gets_the_recipe_and_the_numbers_and_goes_on(tmp_path: Path, wandb: SimpleNamespace) -> None:
    check_scalars(["wandb"])
    (writer,) = open_scalars(recipe(tmp_path, "wandb"), 0)
    writer.write(20, {"train/loss": 0.5})
    writer.close()
    first, run = wandb.inits[0], wandb.runs[0]
    assert first["config"]["batch_size"] == 8 and first["config"]["data.files"] == ["a.jsonl"]
    assert first["id"] is None and run.logged == [(20, {"train/loss": 0.5})] and run.finished
    open_scalars(recipe(tmp_path, "wandb"), 20)
    assert wandb.inits[1]["id"] == "abc" and wandb.inits[1]["resume"] == "allow"
    open_scalars(recipe(tmp_path, "wandb"), 0)
    assert wandb.inits[2]["id"] is None, "a run from the start is a new one"


def test_wandb_that_will_not_begin(tmp_path: Path, wandb: SimpleNamespace) -> None:
    def refuse(**_: Any) -> None:
        raise RuntimeError("no API key")

    wandb.module.init = refuse
    with pytest.raises(RecipeError, match="no API key; log in with `wandb login`, set WANDB_MODE=offline"):
        open_scalars(recipe(tmp_path, "wandb"), 0)


@pytest.mark.parametrize(("kind", "module"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_missing_package_is_named(kind: Any, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(RecipeError, match=rf"{kind} needs the package {module} .*eagle3-jax\[{kind}\]"):
        check_scalars([kind])
