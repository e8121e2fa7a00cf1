"""Predicted acceptance: the walk, and that the engine gets the very same counts in float32."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from eagle3_jax import LLM
from eagle3_jax.checkpoint import load_drafter, load_target, save_target
from eagle3_jax.config import TargetConfig
from eagle3_jax.drafters.eagle3 import Eagle3
from eagle3_jax.target import Target
from tests.train.models import sharpened
from train.data.conversations import Row
from train.evaluate import Acceptance, Answer, answers_of, greedy_answers, predicted_acceptance, walk
from train.held_out import HeldOut
from train.metrics import read_metrics
from train.recipe import DataRecipe, DraftRecipe, EvalRecipe, OptimizerRecipe, Recipe
from train.run import train
from train.step import TrainState, make_model

CONFIG = {
    "model_type": "qwen3_5_text", "vocab_size": 60, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "hidden_act": "silu", "linear_num_key_heads": 1,
    "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
                        "mrope_section": [2, 1, 1], "mrope_interleaved": True},
}  # fmt: skip


def test_the_walk_is_the_engines() -> None:
    #            prompt ends at 2; tokens 3 .. 11 are the answer
    matches = np.array([9, 9, 2, 9, 9, 0, 3, 9, 9, 9, 0, 0])
    found = walk(matches, prompt_length=3, length=12, num_drafts=3)
    assert found == Acceptance(3, (2, 2, 1))  # roots 2, 5, 6: the next, 10, has nothing left to guess
    assert found.length == 1 + 5 / 3 and found.rates == (2 / 3, 2 / 3, 1 / 3)


def test_an_answer_of_one_token_needs_no_cycle() -> None:
    assert walk(np.zeros(4, int), prompt_length=3, length=4, num_drafts=2) == Acceptance(0, (0, 0))
    assert Acceptance(0, (0, 0)).length == 1


def test_answers_are_the_last_turns_of_rows() -> None:
    mask = np.array([0, 0, 1, 1, 0, 1, 1, 0], bool)
    (answer,) = answers_of([Row(np.arange(8, dtype=np.int32), mask), Row(np.arange(3), np.ones(3, bool))])
    assert answer.prompt_length == 5 and answer.tokens.tolist() == [0, 1, 2, 3, 4, 5, 6]
    with pytest.raises(ValueError, match="at least one token"):
        Answer(np.arange(3), 0)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Path]:
    folder = tmp_path_factory.mktemp("target")
    model = sharpened(Target(TargetConfig.from_hf(CONFIG), rngs=nnx.Rngs(0)), 3.0)
    model.embed_tokens.weight[...] = model.embed_tokens.weight[...] * 10.0  # else logits are all alike
    save_target(model, folder, CONFIG)
    return model, folder


@pytest.fixture(scope="module")
def answers(target: tuple[Target, Path]) -> list[Answer]:
    """Prompts of 1 to 9 tokens, some shorter than the convolution, and 40 greedy tokens after each."""
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, 60, size=1 + i % 9).tolist() for i in range(10)]
    llm = LLM.from_models(target[0], max_num_seqs=5, max_model_len=64)
    return greedy_answers(llm, prompts, max_tokens=40)


def check_evaluations(output: Path, last: Acceptance) -> None:
    """At step 100 and the end, side by side, prediction and measurement; learning shows in between."""
    summary = json.loads((output / "summary.json").read_text())["evaluation"]
    assert summary == {
        "step": 150, "num_drafts": 2, "num_prompts": 4, "num_tokens": 160, "predicted": last.as_dict(),
        "measured": last.as_dict(),
    }  # fmt: skip
    course = read_metrics(output / "metrics.jsonl")
    early, late = course.evaluations
    assert late == {"step": 150, "evaluation": {k: v for k, v in summary.items() if k != "step"}}
    assert early["step"] == 100 and early["evaluation"]["predicted"] == early["evaluation"]["measured"]
    lengths = [line["evaluation"]["measured"]["acceptance_length"] for line in (early, late)]
    assert lengths[0] != lengths[1], "the second is of newer weights"
    assert [line["step"] for line in course.training] == [20, 40, 60, 80, 100, 120, 140, 150]


def test_prediction_equals_the_engine(target: tuple[Target, Path], answers: list[Answer], tmp_path: Path) -> None:
    rows = [{"input_ids": a.tokens.tolist(), "loss_mask": [int(i >= a.prompt_length) for i in range(len(a.tokens))]}
            for a in answers]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe = Recipe(
        target=str(target[1]), output=str(tmp_path / "run"), data=DataRecipe((str(tmp_path / "rows.jsonl"),), 64),
        draft=DraftRecipe(aux_layers=(1, 2, 4), draft_vocab_size=50, intermediate_size=64),
        evaluate=EvalRecipe((str(tmp_path / "rows.jsonl"),), every=100, num_drafts=2, max_rows=4, max_tokens=40),
        optimizer=OptimizerRecipe(learning_rate=1e-2), ttt_steps=3, batch_size=5, train_steps=150, dtype="float32",
    )  # fmt: skip
    train(recipe, quiet=True)
    drafter = load_drafter(tmp_path / "run" / "head", target[0].config).model
    found = predicted_acceptance(target[0], drafter, answers, num_drafts=3, batch_size=4)
    first_four = predicted_acceptance(target[0], drafter, answers[:4], num_drafts=2)
    check_evaluations(tmp_path / "run", first_four)
    llm = LLM.from_models(
        target[0], drafter, max_num_seqs=5, max_model_len=64, prefill_chunk=4,  # prompts of up to three chunks
        speculative_config={"num_speculative_tokens": 3},
    )  # fmt: skip
    again = greedy_answers(llm, [a.tokens[: a.prompt_length].tolist() for a in answers], max_tokens=40)
    for first, second in zip(answers, again, strict=True):
        assert np.array_equal(first.tokens, second.tokens), "the head changed the text"
    engine = llm.get_metrics()
    assert found == Acceptance(engine.num_drafts, engine.num_accepted_tokens_per_pos)
    assert found.length == pytest.approx(engine.mean_acceptance_length) and found.length > 1.5
    assert dataclasses.asdict(found)["num_cycles"] > 50
    check_bfloat16(target[1], drafter, answers)


def check_bfloat16(folder: Path, drafter: Eagle3, answers: list[Answer]) -> None:
    """Rounded as training in bfloat16 rounds, prediction and measurement are of one mind to 0.05."""
    rough = load_target(folder, dtype="bfloat16").model
    model, params, frozen = make_model(rough, drafter, num_steps=1, dtype=jnp.bfloat16)
    held_out = HeldOut(EvalRecipe(max_tokens=40), answers, model, frozen, np.asarray(drafter.d2t[...]), stop_ids=())
    found = held_out(TrainState(params, None))
    predicted, measured = (found[kind]["acceptance_length"] for kind in ("predicted", "measured"))
    assert found["num_tokens"] == 400 and measured > 1.3 and abs(predicted - measured) <= 0.05
