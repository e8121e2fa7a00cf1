"""Training in two processes: the losses of one, one decision to stop, a death without warning, another world size."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from flax import nnx

from eagle3_jax.checkpoint import load_drafter, load_target, save_target
from eagle3_jax.config import TargetConfig
from eagle3_jax.target import Target
from tests.helpers import assert_close
from tests.processes import Processes
from tests.train import folders
from tests.train.models import sharpened
from train.metrics import read_metrics
from train.recipe import load_recipe
from train.run import train

CONFIG = {**folders.CONFIG, "vocab_size": 64}
STEPS = 7


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    save_target(sharpened(Target(TargetConfig.from_hf(CONFIG), rngs=nnx.Rngs(0)), 3.0), folder / "target", CONFIG)
    rows, path = folders.write_rows(folder / "rows.jsonl"), folder / "recipe.yaml"
    path.write_text(
        f"target: {folder / 'target'}\noutput: run\ndata: {{files: [{rows}], max_length: 16}}\n"
        "draft: {draft_vocab_size: 40, aux_layers: [1, 2, 3]}\noptimizer: {learning_rate: 1e-2}\n"
        f"ttt_steps: 1\nbatch_size: 4\ntrain_steps: {STEPS}\ndtype: float32\nlog_every: 1\nsave_every: 2\n"
    )
    return path


@pytest.fixture(scope="module")
def straight(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in one process on one device."""
    output = tmp_path_factory.mktemp("straight")
    assert train(load_recipe(recipe, [f"output={output}"]), quiet=True) == 0
    return output


def both(recipe: Path, output: Path, *more: str, **keywords: Any) -> Processes:
    words = ["train", recipe, f"output={output}", *more]
    return Processes([[words], [words]], output.parent / "logs", **keywords)


def losses(output: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(output / "metrics.jsonl").training]


@pytest.fixture(scope="module")
def killed(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in two processes, until one is killed without warning in the middle of step 6."""
    output = tmp_path_factory.mktemp("killed") / "run"
    with both(recipe, output, "mesh.data=2", stop={1: (6, signal.SIGKILL)}, peer_timeout=10) as run:
        ours, theirs = run.wait()
    assert theirs == -signal.SIGKILL and ours not in (0, 143), run.err(0)
    assert "another task died" in run.err(0) or "another process has ended" in run.err(0)
    assert (output / "checkpoints" / "4").is_dir() and not (output / "head").exists()
    return output


def test_two_processes_are_one_run_also_when_one_of_them_is_told_to_stop(
    recipe: Path, straight: Path, killed: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    with both(recipe, output, "mesh.data=2", stop={1: (0, signal.SIGTERM)}) as first:
        assert first.wait() == [143, 143], first.err(0) + first.err(1)
    done = len(losses(output))
    assert 1 <= done <= 3 and not (output / "head").exists()
    assert (output / "checkpoints" / str(done)).is_dir(), "both stopped after the same step, and it was saved"
    with both(recipe, output, "mesh.data=2") as second:
        assert second.wait() == [0, 0], second.err(0) + second.err(1)
    assert "training sequences" in second.out(0) and not second.out(1) and not second.err(1)
    assert_close(losses(output), losses(straight), rtol=1e-4)
    whole = losses(killed)
    assert len(whole) >= 5 and losses(output)[: len(whole)] == whole, "bit for bit the losses of a run without a stop"
    assert load_drafter(output / "head", load_target(recipe.parent / "target").config).config.aux_layers == (1, 2, 3)


def test_after_a_death_one_process_goes_on_from_the_last_checkpoint(recipe: Path, straight: Path, killed: Path) -> None:
    assert train(load_recipe(recipe, [f"output={killed}", "mesh.fsdp=2"]), quiet=True) == 0
    assert_close(losses(killed), losses(straight), rtol=1e-4)
    assert not list((killed / "checkpoints").glob("*tmp*")), "what was half written is gone"
