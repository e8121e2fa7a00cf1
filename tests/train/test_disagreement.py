"""Recipes whose parts do not belong together are refused before the target's weights are read."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from flax import nnx

from eagle3_jax.checkpoint import save_specforge
from eagle3_jax.config import TargetConfig
from eagle3_jax.drafters.eagle3 import Eagle3
from eagle3_jax.errors import UserError
from tests.train.folders import CONFIG, save_small_target, write_rows
from tests.train.tokenizers import CHATML, small_tokenizer
from train.head import draft_config
from train.recipe import DraftRecipe, load_recipe
from train.run import train


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def start(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Begins a run; the target's weights must not be reached."""
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"target: {target}\noutput: {tmp_path / 'run'}\ndata: {{files: [{write_rows(tmp_path / 'rows.jsonl')}]}}\n"
        "draft: {draft_vocab_size: 40, aux_layers: [1, 2, 3]}\ntrain_steps: 1\nlog_every: 1\n"
    )
    monkeypatch.setattr("train.run.load_target", lambda *_, **__: pytest.fail("the target was loaded"))
    return lambda *overrides: train(load_recipe(path, overrides), quiet=True)


def save_head(folder: Path, **changes: Any) -> Path:
    """A head for the small target, but for `changes` of that target."""
    target = TargetConfig.from_hf({**CONFIG, **changes})
    config = draft_config(DraftRecipe(draft_vocab_size=40, aux_layers=(1, 2, 3)), target)
    save_specforge(Eagle3(config, rngs=nnx.Rngs(0)), config, folder)
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 500}, "500.*416|416.*500"),
        ({"hidden_size": 24}, "24.*16|16.*24"),
    ],
    ids=["vocabulary", "width"],
)
def test_a_head_of_another_target(start: Any, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    head = save_head(tmp_path / "head", **changes)
    with pytest.raises(UserError, match=message):
        start(f"draft.init_from={head}")


def test_a_head_with_another_number_of_aux_states(start: Any, tmp_path: Path) -> None:
    head = save_head(tmp_path / "head")
    config = json.loads((head / "config.json").read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [0, 1]
    (head / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="fc.weight takes 3 aux states, the config names 2"):
        start(f"draft.init_from={head}")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["draft.aux_layers=[1, 2, 4]"], r"aux layers \[4\] are outside the boundaries 0..3"),
        (["draft.aux_layers=null"], "too small for the default aux boundaries"),
        (["draft.draft_vocab_size=1000"], "draft vocabulary 1000 of 416 tokens"),
        (["draft.num_heads=3", "draft.num_kv_heads=2"], "3 heads are not a multiple of 2"),
        (["draft.aux_layers=[1, 2, 4]", "export=false"], "are outside the boundaries"),
    ],
)
def test_a_head_that_cannot_be_made_for_the_target(start: Any, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        start(*overrides)


@pytest.mark.parametrize("package", ["tensorboardX", "wandb"])
def test_missing_packages(start: Any, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(UserError, match=f"needs the package {package}"):
        start(f"log=[{'wandb' if package == 'wandb' else 'tensorboard'}]")


def test_a_tokenizer_that_is_not_the_targets(start: Any, tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text(json.dumps({"prompt": "who", "response": "the quick brown fox"}))
    other = copy.deepcopy(small_tokenizer(CHATML))
    other.save_pretrained(tmp_path / "same")
    other.add_tokens(["<new>"])
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match="the vocabulary of the tokenizer .*other is not that of the target's own"):
        start(f"data.files=[{chats}]", f"data.tokenizer={tmp_path / 'other'}")
    with pytest.raises(pytest.fail.Exception, match="the target was loaded"):
        start(f"data.files=[{chats}]", f"data.tokenizer={tmp_path / 'same'}")


def test_a_dataset_without_assistant_turns(start: Any, tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    asked = {"messages": [{"role": "user", "content": "who"}]}
    silent = {"input_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 0, 0]}
    chats.write_text("\n".join(map(json.dumps, [asked, asked, silent])))
    with pytest.raises(UserError, match="no row can be trained on") as caught:
        start(f"data.files=[{chats}]")
    assert "2 x no assistant turn" in str(caught.value) and "1 x no supervised token" in str(caught.value)
    with pytest.raises(UserError, match="evaluate.files: no row can be trained on"):
        start(f"evaluate.files=[{chats}]")
