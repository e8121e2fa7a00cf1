"""Recipes: typed, closed, overridable."""

from __future__ import annotations

from pathlib import Path

import pytest

from train.recipe import Recipe, RecipeError, flatten, load_recipe, to_yaml

GOOD = "target: t\noutput: o\ndata:\n  files: [a.jsonl]\n  template_kwargs: {enable_thinking: false}\n"


def recipe_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return path


def test_defaults_and_overrides(tmp_path: Path) -> None:
    path = recipe_file(tmp_path, GOOD + "optimizer:\n  learning_rate: 1e-4\n")
    recipe = load_recipe(
        path, ["optimizer.learning_rate=3e-4", "draft.aux_layers=[1, 2]", "train_steps=5", "mesh.data=2"]
    )
    assert recipe.optimizer.learning_rate == 3e-4 and recipe.optimizer.b2 == 0.95
    assert recipe.draft.aux_layers == (1, 2) and recipe.data.files == ("a.jsonl",)
    assert recipe.data.template_kwargs == {"enable_thinking": False} and recipe.mesh.data == 2
    assert recipe.num_steps(1000) == 5
    assert load_recipe(path).num_steps(1000) == 125
    assert load_recipe(path).optimizer.learning_rate == 1e-4


def test_a_written_recipe_reads_back(tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file(tmp_path, GOOD), ["draft.aux_layers=[1, 2]", "epochs=2.5"])
    again = load_recipe(recipe_file(tmp_path, to_yaml(recipe)))
    assert again == recipe
    assert flatten(again)["draft.aux_layers"] == [1, 2]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimiser.learning_rate=1", "unknown recipe key optimiser: did you mean optimizer?"),
        ("optimizer.learning_rat=1", "did you mean optimizer.learning_rate?"),
        ("data.zzz=1", "unknown recipe key data.zzz: known here are files"),
        ("batch_size=many", "batch_size='many' is not of type int"),
        ("batch_size=true", "batch_size=True is not of type int"),
        ("batch_size=2.5", "not of type int"),
        ("remat=1", "remat=1 is not of type bool"),
        ("optimizer.learning_rate=fast", "not a number"),
        ("dtype=float16", "dtype='float16' is not one of float32, bfloat16"),
        ("draft=llama", "draft.*: expected keys and values"),
        ("draft.aux_layers=[a]", r"draft.aux_layers\[0\]='a' is not of type int"),
        ("target.path=x", "target has no keys"),
        ("decay", "written key=value"),
        ("decay=0", "decay=0.0 is not in"),
        ("mesh.data=3", "batch_size=8 is not a multiple"),
        ("data.files=[]", "data.files is missing"),
        ("output=''", "output is missing"),
        ("data.buckets=[512, 256]", "data.buckets=.* is not ascending"),
        ("ttt_steps=0", "ttt_steps=0"),
        ("loss=lk", "loss='lk' is not one of kl, lk_alpha, lk_lambda"),
        ("kl_scale=1.5", r"kl_scale=1.5 is not in \[0, 1\]"),
        ("kl_decay=-1", "kl_decay=-1.0 is negative"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(recipe_file(tmp_path, GOOD), [override])


def test_unreadable_recipes(tmp_path: Path) -> None:
    for text in ("[1, 2]", "a: [", "- x"):
        with pytest.raises(RecipeError):
            load_recipe(recipe_file(tmp_path, text))
    with pytest.raises(RecipeError, match="cannot read"):
        load_recipe(tmp_path / "absent.yaml")


def test_every_problem_is_told_at_once() -> None:
    with pytest.raises(RecipeError, match="target is missing.*; output is missing.*; data.files is missing"):
        Recipe()
