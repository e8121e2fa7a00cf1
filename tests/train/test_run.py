"""Whole runs on a tiny target: learning, resuming bit for bit, stopping, refusing."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from eagle3_jax.checkpoint import load_drafter, load_target, save_target
from eagle3_jax.cli import main
from eagle3_jax.config import TargetConfig
from eagle3_jax.errors import UserError
from eagle3_jax.target import Target
from tests.helpers import assert_close
from tests.train import folders
from tests.train.models import sharpened
from train.checkpoints import OLD_DEFAULTS, Checkpoints, ResumeError, check_same_run
from train.data.batches import Batches
from train.loop import TrainingError
from train.recipe import Recipe, load_recipe
from train.run import train

CONFIG = {**folders.CONFIG, "vocab_size": 64}


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    save_target(sharpened(Target(TargetConfig.from_hf(CONFIG), rngs=nnx.Rngs(0)), 3.0), folder, CONFIG)
    return folder


@pytest.fixture(scope="module")
def data_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl")


@pytest.fixture
def make_recipe(target_folder: Path, data_file: Path, tmp_path: Path) -> Any:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"target: {target_folder}\noutput: {tmp_path / 'run'}\ndata: {{files: [{data_file}], max_length: 16}}\n"
        "draft: {draft_vocab_size: 40, aux_layers: [1, 2, 3]}\noptimizer: {learning_rate: 1e-2}\n"
        "ttt_steps: 2\nbatch_size: 4\ntrain_steps: 6\ndtype: float32\nlog_every: 1\nsave_every: 2\n"
    )
    return lambda *overrides: load_recipe(path, overrides)


def losses(recipe: Recipe) -> list[float]:
    return folders.losses(recipe.output)


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int, number: signal.Signals) -> None:
    """Sends this process a signal while batch `step` is fetched."""
    fetch = Batches.__getitem__

    def fetch_and_signal(self: Batches, at: int) -> Any:
        if at == step:
            signal.raise_signal(number)
        return fetch(self, at)

    monkeypatch.setattr(Batches, "__getitem__", fetch_and_signal)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_and_resumed_equals_straight(
    make_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    straight, resumed = make_recipe(f"output={tmp_path / 'a'}"), make_recipe(f"output={tmp_path / 'b'}")
    assert train(straight, quiet=True) == 0
    with monkeypatch.context() as patched:
        stop_at(patched, 2, number)
        assert train(resumed, quiet=True) == 128 + number
    assert len(losses(resumed)) == 3 and not (tmp_path / "b" / "head").exists()
    assert train(resumed, quiet=True) == 0
    assert losses(resumed) == losses(straight)
    weights = [(tmp_path / name / "head" / "model.safetensors").read_bytes() for name in ("a", "b")]
    assert weights[0] == weights[1]
    assert train(resumed, quiet=True) == 0 and len(losses(resumed)) == 6, "a finished run is not run again"


def test_learns_and_exports_what_it_learned(make_recipe: Any, target_folder: Path) -> None:
    recipe = make_recipe("train_steps=60", "log_every=20", "save_every=100")
    assert train(recipe, quiet=True) == 0
    course = losses(recipe)
    assert course[-1] < 0.5 * course[0]
    output = Path(recipe.output)
    summary = json.loads((output / "summary.json").read_text())
    assert summary["steps"] == 60 and summary["data"]["num_rows"] == 12
    assert 0.99 < summary["draft_vocab_coverage"] <= 1
    target = load_target(target_folder)
    drafter = load_drafter(output / "head", target.config).model
    assert drafter.config.aux_layers == (1, 2, 3) and drafter.config.draft_vocab_size == 40
    saved = Checkpoints(output, 1, {})
    step = saved.latest()
    assert step == 60 and saved.run_of(step)["draft_config"]["aux_layers"] == [1, 2, 3]
    saved.close()


def test_learns_by_acceptance(make_recipe: Any) -> None:
    recipe = make_recipe("loss=lk_lambda", "kl_decay=3", "train_steps=30", "log_every=15", "save_every=100")
    assert train(recipe, quiet=True) == 0
    course = losses(recipe)
    assert course[-1] < 0.7 * course[0]


def test_keeps_the_newest_checkpoints(make_recipe: Any) -> None:
    recipe = make_recipe("save_every=1", "keep=2", "train_steps=4")
    train(recipe, quiet=True)
    assert {p.name for p in (Path(recipe.output) / "checkpoints").iterdir() if p.name.isdigit()} == {"3", "4"}


def test_another_recipe_or_other_data_are_not_resumed(make_recipe: Any, tmp_path: Path) -> None:
    train(make_recipe("train_steps=2"), quiet=True)
    with pytest.raises(ResumeError, match=r"decay: 0.8 then, 0.5 now; ttt_steps: 2 then, 3 now"):
        train(make_recipe("train_steps=2", "decay=0.5", "ttt_steps=3"), quiet=True)
    rows = Path(make_recipe().data.files[0])
    before = rows.read_text()
    try:
        rows.write_text("\n".join(reversed(before.splitlines())))
        with pytest.raises(ResumeError, match="data files have changed"):
            train(make_recipe("train_steps=2"), quiet=True)
    finally:
        rows.write_text(before)
    assert train(make_recipe("train_steps=2", "save_every=5", "log_every=3"), quiet=True) == 0


def test_a_loss_that_is_not_finite_stops_and_saves_the_batch(make_recipe: Any) -> None:
    recipe = make_recipe("optimizer.learning_rate=1e30", "optimizer.warmup_ratio=0")
    with pytest.raises(TrainingError, match=r"step \d: loss .*bad_batch_\d.npz"):
        train(recipe, quiet=True)
    (path,) = Path(recipe.output).glob("bad_batch_*.npz")
    assert np.load(path)["tokens"].shape == (4, 16)


def test_a_mesh_changes_nothing_and_a_run_moves_between_meshes(make_recipe: Any, tmp_path: Path) -> None:
    alone, spread = (
        make_recipe("train_steps=4"),
        make_recipe(f"output={tmp_path / 'm'}", "train_steps=4", "mesh.data=2", "mesh.tensor=2"),
    )
    train(alone, quiet=True)
    train(spread, quiet=True)
    assert_close(losses(spread), losses(alone), rtol=1e-4)
    assert train(make_recipe(f"output={tmp_path / 'm'}", "train_steps=4"), quiet=True) == 0


def test_a_full_disk_ends_the_run_without_loss(make_recipe: Any) -> None:
    recipe = make_recipe("train_steps=4", "save_every=2")
    output = Path(recipe.output)
    output.mkdir()
    (output / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(UserError, match=f"cannot write to {output}: No space left on device; make room and give"):
        train(recipe, quiet=True)
    (output / "metrics.jsonl").unlink()
    assert train(recipe, quiet=True) == 0 and (output / "head").is_dir()


def test_goes_on_from_an_existing_head(make_recipe: Any, tmp_path: Path, target_folder: Path) -> None:
    train(make_recipe("train_steps=30", "log_every=10"), quiet=True)
    again = make_recipe(
        f"output={tmp_path / 'again'}", f"draft.init_from={tmp_path / 'run' / 'head'}", "train_steps=2",
        "optimizer.learning_rate=1e-6",
    )  # fmt: skip
    train(again, quiet=True)
    assert losses(again)[0] < losses(make_recipe())[0]
    heads = [load_drafter(tmp_path / n / "head", load_target(target_folder).config).model for n in ("run", "again")]
    assert np.array_equal(heads[0].d2t[...], heads[1].d2t[...])


def test_heads_that_cannot_be_exported_are_refused_before_training(make_recipe: Any) -> None:
    with pytest.raises(UserError, match="q/k norms.*export=false"):
        train(make_recipe("draft.architecture=qwen3"), quiet=True)
    assert train(make_recipe("draft.architecture=qwen3", "export=false", "train_steps=1"), quiet=True) == 0


def test_the_command_line(make_recipe: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_recipe()
    assert main(["train", str(tmp_path / "recipe.yaml"), "train_steps=1", "--quiet"]) == 0
    assert (tmp_path / "run" / "head" / "config.json").is_file()
    assert main(["train", str(tmp_path / "recipe.yaml"), "train_step=1"]) == 2
    assert "did you mean train_steps?" in capsys.readouterr().err


def test_master_weights_stay_float32_when_computing_in_bfloat16(make_recipe: Any) -> None:
    recipe = make_recipe("dtype=bfloat16", "train_steps=2")
    train(recipe, quiet=True)
    saved = Checkpoints(Path(recipe.output), 1, {})
    tree = saved._manager.restore(2, args=saved._ocp.args.Composite(state=saved._ocp.args.StandardRestore()))["state"]
    saved.close()
    assert {x.dtype for x in jax.tree.leaves(tree["params"])} == {jnp.dtype("float32")}


def test_packing_fills_sequences_and_says_how_far(make_recipe: Any, tmp_path: Path) -> None:
    summaries = []
    for packing in ("true", "false"):
        folder = tmp_path / packing
        recipe = make_recipe("train_steps=1", "data.max_length=32", f"data.packing={packing}", f"output={folder}")
        train(recipe, quiet=True)
        summaries.append(json.loads((folder / "summary.json").read_text()))
    packed, plain = (s["sequences"] for s in summaries)
    assert packed["count"] < plain["count"] == 12 and plain["filled"] is None
    assert packed["filled"] == summaries[0]["data"]["num_tokens"] / (32 * packed["count"]) > 0.7


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.files=[absent.jsonl]", "data.files: absent.jsonl: no such file"),
        ("evaluate.files=[absent.jsonl]", "evaluate.files: absent.jsonl: no such file"),
        ("evaluate.files=[{config}]", "evaluate.files: .*config.json"),
        ("draft.init_from=./absent", "absent: no such folder"),
        ("draft.init_from={folder}", "config.json is missing"),
        ("output={config}", "output=.*config.json cannot be written"),
    ],
)
def test_inputs_are_looked_at_before_training(
    make_recipe: Any, target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, message: str
) -> None:
    monkeypatch.setattr("train.run.load_target", lambda *_, **__: pytest.fail("the target was loaded"))
    override = override.format(config=target_folder / "config.json", folder=tmp_path)
    with pytest.raises(UserError, match=message):
        train(make_recipe(override), quiet=True)


def test_a_checkpoint_older_than_a_key_goes_on_as_it_began() -> None:
    recipe = {"decay": 0.8, **OLD_DEFAULTS}
    same = {"data": "x", "num_steps": 1}
    check_same_run({"recipe": {"decay": 0.8}, **same}, {"recipe": recipe, **same}, Path("run"))
    with pytest.raises(ResumeError, match="data.packing: False then, True now"):
        check_same_run({"recipe": {"decay": 0.8}, **same}, {"recipe": {**recipe, "data.packing": True}, **same}, Path())
