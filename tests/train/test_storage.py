"""Checkpoints and their disk: what is damaged, half written, full or forbidden ends without loss and is named."""

from __future__ import annotations

import gc
import json
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax.errors import UserError
from train import places
from train.checkpoints import OLD_DEFAULTS, Checkpoints, ResumeError
from train.data.inputs import check_inputs
from train.places import checkpoint_place, storage_errors
from train.recipe import Recipe, RecipeError
from train.step import TrainState

RUN: dict[str, Any] = {"recipe": {**OLD_DEFAULTS, "decay": 0.8}, "num_steps": 9, "data": "x"}
D2T = np.arange(5, dtype=np.int32)


def state(step: int, size: int = 1000) -> TrainState:
    draw = np.random.default_rng(step)
    return TrainState({"fc.kernel": jnp.asarray(draw.normal(size=size), jnp.float32)}, (jnp.int32(step),))


def saved(folder: Path, *steps: int, **keywords: Any) -> None:
    kept = Checkpoints(folder, 3, RUN, **keywords)
    for step in steps:
        kept.save(step, state(step), D2T)
    kept.close()


def newest(folder: Path, **keywords: Any) -> tuple[int | None, TrainState | None]:
    kept = Checkpoints(folder, 3, RUN, **keywords)
    try:
        step = kept.latest()
        return step, kept.restore(step, state(0), D2T) if step is not None else None
    finally:
        kept.close()


def is_state(found: TrainState | None, step: int) -> bool:
    return found is not None and np.array_equal(found.params["fc.kernel"], state(step).params["fc.kernel"])


def test_a_state_may_change_as_soon_as_save_returns(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, 3, RUN)
    value = state(4)
    kept.save(4, value, D2T)
    value.params["fc.kernel"].delete()  # as donation does
    kept.save(4, state(5), D2T)  # it is there, or on its way there
    kept.wait()
    kept.close()
    step, found = newest(tmp_path)
    assert step == 4 and is_state(found, 4)


def test_what_was_not_finished_does_not_count_and_goes(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    folder = tmp_path / "checkpoints"
    shutil.copytree(folder / "2", folder / "4.orbax-checkpoint-tmp")
    step, found = newest(tmp_path)
    assert step == 2 and is_state(found, 2)
    assert [path.name for path in folder.iterdir()] == ["2"]


# After an error in the layers below, coroutines are left that nobody waits for.
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("part", ["run/metadata", "state/_METADATA", "state/manifest.ocdbt", "state/d"])
def test_a_damaged_checkpoint_is_named_with_what_to_do(tmp_path: Path, part: str) -> None:
    saved(tmp_path, 2, 4)
    folder = tmp_path / "checkpoints"
    files = [path for path in (folder / "4" / part, *(folder / "4" / part).glob("*")) if path.is_file()]
    for file in files:
        os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(ResumeError, match=r"checkpoints/4 is damaged .*remove that folder, then .* from step 2"):
        newest(tmp_path)
    gc.collect()
    assert files
    shutil.rmtree(folder / "4")
    step, found = newest(tmp_path)
    assert step == 2 and is_state(found, 2)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The system itself refuses to write more to a file, as it does when a disk is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# What was being written when it failed may end after its event loop has, which asyncio reports as of no test.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_no_room_ends_with_the_last_checkpoint_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, 2)
    kept = Checkpoints(tmp_path, 3, RUN)
    with files_of_at_most(100_000), pytest.raises(UserError, match="cannot be written: File too large; make room") as e:
        kept.save(4, state(4, size=100_000), D2T)
        kept.save(6, state(6), D2T)  # writing goes on in the background: here, at the latest, it is known
    assert str(tmp_path / "checkpoints") in str(e.value) and "same command again" in str(e.value)
    assert not caplog.records
    step, found = newest(tmp_path)
    assert step == 2 and is_state(found, 2)
    saved(tmp_path, 4)
    assert newest(tmp_path)[0] == 4


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(28, "No space left on device"), "No space left on device; make room"),
        (ValueError("RESOURCE_EXHAUSTED: write failed: No space left on device [os_error_code='28']"), "make room"),
        (PermissionError(13, "Permission denied"), "Permission denied; see that the place exists"),
        (ImportError("no gcsfs"), "no gcsfs; install what such addresses need: gcsfs for gs://"),
    ],
)
def test_errors_of_storage_in_words(error: Exception, message: str) -> None:
    with pytest.raises(UserError, match=message), storage_errors("gs://bucket/run", "written"):
        raise error


def test_a_place_is_a_folder_or_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert checkpoint_place(Path("run"), None) == str(tmp_path / "run" / "checkpoints")
    assert checkpoint_place(Path("run"), "elsewhere") == str(tmp_path / "elsewhere")
    assert checkpoint_place(Path("run"), "gs://bucket/run/") == "gs://bucket/run"
    saved(tmp_path / "run", 2, place="elsewhere")
    assert not (tmp_path / "run").exists() and newest(tmp_path / "other", place="elsewhere")[0] == 2


def test_hosts_that_see_different_folders_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places.jax, "process_count", lambda: 2)
    monkeypatch.setattr(places, "from_first", lambda value: np.asarray(value))
    places.prepare_place(str(tmp_path))
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(places, "is_first", lambda: False)
    with pytest.raises(UserError, match="is not the same folder on all hosts"):
        places.prepare_place(str(tmp_path))


@pytest.mark.parametrize("key", ["output", "checkpoints"])
def test_a_folder_that_cannot_be_written_is_found_before_training(tmp_path: Path, key: str) -> None:
    (tmp_path / "file").write_text(json.dumps({}))
    keys = {"output": str(tmp_path / "run"), key: str(tmp_path / "file" / "run")}
    recipe = Recipe(target="t", features=str(tmp_path), **keys)  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match=f"{key}=.*run cannot be written: Not a directory"):
        check_inputs(recipe)
    with pytest.raises(RecipeError, match="output=gs://b/run is no folder"):
        Recipe(target="t", features="f", output="gs://b/run")
