"""The ready recipes: found by name, typed, and in agreement with the published configs of their models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle3_jax.checkpoint.specforge import inexpressible
from eagle3_jax.cli import main
from eagle3_jax.config import TargetConfig
from tests.helpers import published
from train.flops import draft_parameters, target_parameters
from train.head import draft_config
from train.recipe import READY, MeshRecipe, Recipe, RecipeError, load_recipe, ready_recipes

NAMES = {
    "qwen3.5-4b": "Qwen3.5-4B",
    "qwen3.5-9b": "Qwen3.5-9B",
    "qwen3.5-27b": "Qwen3.5-27B",
    "qwen3.5-35b-a3b": "Qwen3.5-35B-A3B",
    "qwen3-235b-a22b": "Qwen3-235B-A22B",
}
SPECFORGE = {
    "qwen3.5-4b": "qwen3.5-4b-eagle3",
    "qwen3.5-35b-a3b": "qwen3.5-35b-a3b-eagle3",
    "qwen3-235b-a22b": "qwen3-235B-A22B-eagle3",
}
SIZES = {
    "hidden_size": "hidden_size", "intermediate_size": "intermediate_size", "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads", "head_dim": "head_dim", "vocab_size": "vocab_size",
    "draft_vocab_size": "draft_vocab_size", "num_hidden_layers": "num_layers",
}  # fmt: skip


def ready(name: str) -> Recipe:
    return load_recipe(name, ["output=run", "data.files=[answers.jsonl]"])


def target_config(name: str) -> TargetConfig:
    return TargetConfig.from_hf(json.loads(published(f"configs/{NAMES[name]}.json").read_text()))


def test_the_table_above_is_complete() -> None:
    assert ready_recipes() == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_recipe_and_model_agree(name: str) -> None:
    recipe, target = ready(name), target_config(name)
    assert recipe.target == f"Qwen/{NAMES[name]}"
    head = draft_config(recipe.draft, target)
    assert (head.hidden_size, head.vocab_size) == (target.hidden_size, target.vocab_size)
    assert head.aux_layers == (2, target.num_layers // 2, target.num_layers - 3)
    assert head.rope.theta == target.rope.theta and not head.rope.mrope_section
    assert head.max_position_embeddings == target.max_position_embeddings
    assert head.draft_vocab_size == 32000 and not inexpressible(head)
    assert recipe.ttt_steps == 7 and recipe.data.max_length < target.max_position_embeddings


@pytest.mark.parametrize("name", SPECFORGE)
def test_sizes_are_those_of_published_heads(name: str) -> None:
    theirs = json.loads(published(f"configs/drafts/{SPECFORGE[name]}.json").read_text())
    head = draft_config(ready(name).draft, target_config(name))
    assert {key: theirs[key] for key in SIZES} == {key: getattr(head, ours) for key, ours in SIZES.items()}
    assert head.rope.theta == theirs["rope_theta"]


@pytest.mark.parametrize("name", NAMES)
def test_weights_and_training_state_fit_the_mesh(name: str) -> None:
    """The target in bfloat16, and of the head master weights, gradients and Adam's moments, leave room on 80 GB."""
    recipe, target = ready(name), target_config(name)
    mesh = recipe.mesh
    head = sum(draft_parameters(draft_config(recipe.draft, target)))
    assert f"about {round(head, -7) // 10**6} M parameters" in (READY / f"{name}.yaml").read_text()
    shards = mesh.fsdp * mesh.tensor * mesh.expert
    assert (2 * sum(target_parameters(target).values()) + 16 * head) / shards < 65e9
    assert mesh.num_devices in (1, 8) and target.hidden_size % mesh.fsdp == 0
    assert recipe.batch_size % (recipe.accumulate * mesh.num_devices) == 0, "no device is without rows"


def test_a_wrong_name_lists_the_known_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=r"no ready recipe; those are qwen3-235b-a22b, .*, qwen3.5-9b"):
        load_recipe("qwen3.5-8b")
    with pytest.raises(RecipeError, match="cannot read the recipe qwen3.5-9b.yaml"):
        load_recipe("qwen3.5-9b.yaml")


def test_the_command_finds_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "qwen3.5-9b"]) == 2 and "output is missing" in capsys.readouterr().err
    assert main(["train", "qwen3.5-10b", "output=o"]) == 2
    assert "no ready recipe; those are qwen3-235b-a22b" in capsys.readouterr().err


def test_a_file_of_that_name_is_taken_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("qwen3.5-9b").write_text("target: mine\noutput: o\ndata: {files: [a]}\n")
    assert load_recipe("qwen3.5-9b").target == "mine"


def test_what_is_missing_from_a_ready_recipe_is_said() -> None:
    with pytest.raises(RecipeError, match="output is missing.*; data.files is missing"):
        load_recipe("qwen3.5-9b")


def test_rows_divide_over_parts_and_devices() -> None:
    assert MeshRecipe(data=2, fsdp=2, expert=2).num_devices == 8
    with pytest.raises(RecipeError, match="batch_size=8 is not a multiple of 16: accumulate=8 parts, .* 2 devices"):
        load_recipe("qwen3.5-9b", ["output=o", "data.files=[a]", "accumulate=8", "mesh.data=2"])
