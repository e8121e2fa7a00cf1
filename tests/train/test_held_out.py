"""Evaluation by the engine, on the devices and with the weights of training."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle3_jax import LLM
from eagle3_jax.errors import ConfigError
from tests.train.folders import save_small_target, write_rows
from tests.train.models import TARGET, make_drafter, make_target
from train.evaluate import Answer
from train.held_out import HeldOut
from train.recipe import EvalRecipe, RecipeError, load_recipe
from train.run import train
from train.step import make_model


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("held-out")
    rows, target = write_rows(root / "rows.jsonl"), save_small_target(root / "target")
    path = root / "recipe.yaml"
    path.write_text(
        f"target: {target}\noutput: {root / 'run'}\ndata: {{files: [{rows}], max_length: 16}}\n"
        "draft: {draft_vocab_size: 400, aux_layers: [1, 2, 3]}\noptimizer: {learning_rate: 1e-2}\n"
        "ttt_steps: 2\nbatch_size: 8\ntrain_steps: 2\ndtype: float32\nlog_every: 1\nsave_every: 1\n"
        f"evaluate: {{files: [{rows}], every: 1, max_tokens: 20, num_drafts: 2}}\n"
    )
    return path


def evaluations(output: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "evaluation" in line]


def test_a_mesh_gives_the_figures_of_one_device_and_stops_where_the_target_does(recipe: Path, tmp_path: Path) -> None:
    found = []
    for name, mesh in (("one", []), ("four", ["mesh.data=2", "mesh.tensor=2", "accumulate=2"])):
        assert train(load_recipe(recipe, [f"output={tmp_path / name}", *mesh]), quiet=True) == 0
        found.append(evaluations(tmp_path / name))
    assert found[0] == found[1] and [line["step"] for line in found[0]] == [1, 2]
    last = found[0][-1]["evaluation"]
    assert last["predicted"] == last["measured"] and last["measured"]["num_cycles"] > 20
    assert last["num_prompts"] == 12 and 0 < last["num_tokens"] < 12 * 20, "some stop by themselves"


def test_prompts_that_leave_no_room() -> None:
    short = dataclasses.replace(TARGET, max_position_embeddings=8)
    model, _, frozen = make_model(make_target(short), make_drafter(), num_steps=1)
    long = Answer(np.arange(12, dtype=np.int32), 9)
    with pytest.raises(RecipeError, match="no prompt is shorter than the target's context of 8 tokens"):
        HeldOut(EvalRecipe(), [long], model, frozen, np.arange(41), stop_ids=())


def test_another_head_cannot_take_the_place_of_a_head() -> None:
    llm = LLM.from_models(make_target(), make_drafter(), max_num_seqs=1, max_model_len=16)
    llm.replace_drafter(make_drafter(seed=2))
    for other in (make_drafter(norm_output=True), make_drafter(draft_vocab_size=40)):
        with pytest.raises(ConfigError, match="cannot take the place"):
            llm.replace_drafter(other)
