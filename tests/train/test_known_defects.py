"""Defects that other trainers of EAGLE heads have had, where no other test would see them here."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from eagle3_jax.checkpoint import load_drafter, load_target, save_target
from eagle3_jax.checkpoint.safetensors_file import read_header
from eagle3_jax.config import TargetConfig
from eagle3_jax.target import Target
from tests.helpers import assert_close
from tests.train.folders import CONFIG, write_rows
from tests.train.models import make_drafter, make_target, random_tokens, sharpened
from train.recipe import load_recipe
from train.run import train
from train.step import Inputs, make_model

TIED = {**CONFIG, "tie_word_embeddings": True, "rope_theta": 5e5, "max_position_embeddings": 96}


@cache
def target() -> Target:
    return sharpened(make_target())


def inputs(length: int = 10, padding: int = 0) -> Inputs:
    tokens = jnp.pad(random_tokens(0, 2, length), ((0, 0), (0, padding)), constant_values=7)
    mask = jnp.pad(jnp.ones((2, length), bool).at[0, :4].set(False), ((0, 0), (0, padding)))
    return Inputs(tokens, mask)


def test_one_step_is_the_first_of_several() -> None:
    """A trainer of one step fed tokens and teacher unshifted, another task than drafting."""
    sums = []
    for steps in (1, 2):
        model, params, frozen = make_model(target(), make_drafter(), num_steps=steps)
        sums.append(jax.jit(model.sums)(params, frozen, inputs()))
    for field in ("loss", "counted", "supervised", "hits"):
        assert_close(getattr(sums[0], field), getattr(sums[1], field)[:1], name=field)


def test_padding_changes_no_figure() -> None:
    """Accuracies that were divided by padded positions depended on the shape of the batch."""
    model, params, frozen = make_model(target(), make_drafter(), num_steps=2)
    compute = jax.jit(jax.value_and_grad(model.loss, has_aux=True))
    (loss, sums), grads = compute(params, frozen, inputs(padding=6))
    (want_loss, want_sums), want = compute(params, frozen, inputs())
    assert_close(loss, want_loss)
    jax.tree.map(assert_close, sums, want_sums)
    jax.tree.map(lambda got, whole: assert_close(got, whole, rtol=5e-5), grads, want)


def test_several_layers_with_recomputation_learn_what_they_learn_without() -> None:
    """Heads of two layers gave NaN, and recomputation appended to their keys twice."""
    drafter = make_drafter(num_layers=2)
    gradients = []
    for remat in (True, False):
        model, params, frozen = make_model(target(), drafter, num_steps=2, remat=remat)
        (loss, _), grads = jax.jit(jax.value_and_grad(model.loss, has_aux=True))(params, frozen, inputs())
        assert np.isfinite(loss)
        gradients.append(grads)
    jax.tree.map(lambda got, whole: assert_close(got, whole, rtol=5e-5), *gradients)
    assert all(np.abs(g).max() > 0 for name, g in gradients[0].items() if name.startswith("layers.1."))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A short run on a target whose output projection is its embedding, in four parts a batch."""
    root = tmp_path_factory.mktemp("run")
    target = sharpened(Target(TargetConfig.from_hf(TIED), rngs=nnx.Rngs(0)), 3.0)
    save_target(target, root / "target", TIED)
    path = root / "recipe.yaml"
    path.write_text(
        f"target: {root / 'target'}\noutput: {root / 'run'}\ndata: {{files: [{write_rows(root / 'rows.jsonl')}]}}\n"
        "draft: {draft_vocab_size: 40, aux_layers: [1, 2, 3], head_dim: 4}\noptimizer: {learning_rate: 1e-2}\n"
        "ttt_steps: 2\nbatch_size: 4\naccumulate: 4\ntrain_steps: 3\nsave_every: 2\nlog_every: 1\n"
        "dtype: float32\nlog: [tensorboard]\n"
    )
    assert train(load_recipe(path), quiet=True) == 0
    return {"root": root, "output": root / "run", "target": target, "recipe": path}


def test_a_head_carries_all_that_others_need_to_serve_it(run: dict[str, Any]) -> None:
    """Served elsewhere, heads lost their map, their aux layers, their theta and their context, and kept noise as
    embeddings; each cost acceptance without a word."""
    head = run["output"] / "head"
    config = json.loads((head / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2], "layer outputs: boundaries less 1"
    assert config["rope_theta"] == 5e5 and config["max_position_embeddings"] == 96
    assert (config["vocab_size"], config["draft_vocab_size"]) == (416, 40)
    tensors = set(read_header(head / "model.safetensors")[0])
    assert {"d2t", "t2d"} <= tensors and not any("embed" in name for name in tensors)


def test_a_tied_output_stays_the_targets_and_the_heads_own(run: dict[str, Any]) -> None:
    """Tying gave a head of the draft vocabulary the target's projection, or trained the target's embedding."""
    before = run["target"].embed_tokens.weight[...]
    target = load_target(run["root"] / "target").model
    assert np.array_equal(target.embed_tokens.weight[...], before)
    head = load_drafter(run["output"] / "head", target.config).model
    assert head.lm_head.kernel[...].shape == (16, 40)
    assert not np.allclose(head.lm_head.kernel[...], target.output_rows(head.d2t[...]), atol=1e-4)


def test_steps_are_the_optimizers_however_many_parts_a_batch_has(run: dict[str, Any]) -> None:
    """Intervals counted parts of batches in one place and steps in another."""
    saved = {path.name for path in (run["output"] / "checkpoints").iterdir() if path.name.isdigit()}
    assert saved == {"2", "3"}
    lines = [json.loads(line) for line in (run["output"] / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3] and "mfu" not in lines[0]
    assert list((run["output"] / "tensorboard").iterdir()) and (run["output"] / "acceptance.png").is_file()


def test_going_on_from_a_head_keeps_its_map_and_layers(run: dict[str, Any], tmp_path: Path) -> None:
    """A map made anew gave a public head an acceptance of zero."""
    first = run["output"] / "head"
    again = [f"output={tmp_path / 'again'}", f"draft.init_from={first}", "optimizer.learning_rate=1e-9"]
    other = ["draft.aux_layers=[1, 2]", "draft.draft_vocab_size=20", "draft.rope_theta=7.0"]
    assert train(load_recipe(run["recipe"], again + other), quiet=True) == 0
    config = load_target(run["root"] / "target").model.config
    heads = [load_drafter(folder, config).model for folder in (first, tmp_path / "again" / "head")]
    assert heads[0].config == heads[1].config and heads[1].config.aux_layers == (1, 2, 3)
    assert np.array_equal(heads[0].d2t[...], heads[1].d2t[...])
    assert_close(heads[1].fc.kernel[...], heads[0].fc.kernel[...], rtol=1e-4)


def test_a_step_leaves_out_what_another_turn_has_said() -> None:
    """A mask that was shifted with the tokens, or not at all, trained the first token of each answer or never did."""
    model, params, frozen = make_model(target(), make_drafter(), num_steps=2)
    mask = jnp.zeros((1, 10), bool).at[0, 4:7].set(True).at[0, 8:10].set(True)
    one = dataclasses.replace(inputs(), tokens=random_tokens(0, 1, 10), mask=mask)
    supervised = jax.jit(model.sums)(params, frozen, one).supervised
    assert supervised.tolist() == [3, 1]  # tokens 5, 6 and 9 at the first step, token 6 at the second
