"""Offline mode: the same losses as online, without the target's layers; features that do not fit are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle3_jax.cli import main
from eagle3_jax.errors import UserError
from tests.helpers import assert_close
from tests.train.folders import CONFIG, losses, save_small_target, write_rows
from train.data.stored import load_ends
from train.recipe import RecipeError, load_recipe
from train.run import train


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target, twelve prepared rows of 8 to 16 tokens, and their features in float32."""
    root = tmp_path_factory.mktemp("stored")
    write_rows(root / "rows.jsonl")
    target = save_small_target(root / "target")
    shared = ["--target", str(target), "--quiet"]
    prepare = ["prepare", str(root / "rows.jsonl"), "--output", str(root / "rows"), "--max-length", "16"]
    features = ["features", str(root / "rows"), "--output", str(root / "features"), "--aux-layers", "1", "2", "3"]
    assert main(["data", *prepare, *shared]) == 0
    assert main(["data", *features, "--dtype", "float32", "--shard-bytes", "10000", *shared]) == 0
    assert len(list((root / "features").glob("*.safetensors"))) > 2
    return {name: root / name for name in ("target", "rows", "features")}


@pytest.fixture
def make_recipe(places: dict[str, Path], tmp_path: Path) -> Any:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"target: {places['target']}\noutput: {tmp_path / 'run'}\ndata: {{max_length: 16}}\n"
        "draft: {draft_vocab_size: 40, aux_layers: [1, 2, 3]}\noptimizer: {learning_rate: 1e-2}\n"
        "ttt_steps: 2\nbatch_size: 4\ntrain_steps: 4\ndtype: float32\nlog_every: 1\n"
    )
    return lambda *overrides: load_recipe(path, overrides)


@pytest.mark.parametrize("how", [["data.max_length=40"], ["data.packing=false", "loss=lk_alpha"]])
def test_the_same_losses_as_online(make_recipe: Any, places: dict[str, Path], tmp_path: Path, how: list[str]) -> None:
    online = make_recipe(f"data.files=[{places['rows']}]", f"output={tmp_path / 'online'}", *how)
    offline = make_recipe(f"features={places['features']}", f"output={tmp_path / 'offline'}", *how)
    for recipe in (online, offline):
        assert train(recipe, quiet=True) == 0
    assert_close(losses(tmp_path / "offline"), losses(tmp_path / "online"), rtol=1e-5)
    data = [json.loads((tmp_path / name / "summary.json").read_text())["data"] for name in ("online", "offline")]
    assert data[0] == data[1]


def test_only_the_ends_of_the_target_are_loaded(places: dict[str, Path]) -> None:
    from eagle3_jax.checkpoint import load_target

    whole = load_target(places["target"], dtype="float32").model
    ends = load_ends(places["target"], whole.config, "float32", None)
    assert len(ends.layers) == 0 and ends.config == whole.config
    assert np.array_equal(ends.lm_head.kernel[...], whole.lm_head.kernel[...])


def test_features_that_do_not_fit_are_refused(make_recipe: Any, places: dict[str, Path], tmp_path: Path) -> None:
    here = f"features={places['features']}"
    with pytest.raises(RecipeError, match="boundaries .1, 2, 3., draft.aux_layers is .0, 1, 2."):
        train(make_recipe(here, "draft.aux_layers=[0,1,2]", "export=false"), quiet=True)
    with pytest.raises(RecipeError, match="set data.max_length=16"):
        train(make_recipe(here, "data.max_length=8"), quiet=True)
    other = save_small_target(tmp_path / "other")
    (other / "config.json").write_text(json.dumps({**CONFIG, "rope_theta": 5.0}))
    with pytest.raises(RecipeError, match="another target"):
        train(make_recipe(here, f"target={other}"), quiet=True)
    with pytest.raises(UserError, match="holds eagle3-rows version 1, where eagle3-features"):
        train(make_recipe(f"features={places['rows']}"), quiet=True)
    for more, reason in (
        (["data.files=[a.jsonl]"], "both given"),
        (["evaluate.files=[a.jsonl]"], "needs the target"),
        (["features=null"], "data.files is missing"),
    ):
        with pytest.raises(RecipeError, match=reason):
            make_recipe(here, *more)
    with pytest.raises(RecipeError, match="features: nowhere: no such file"):
        train(make_recipe("features=nowhere"), quiet=True)
