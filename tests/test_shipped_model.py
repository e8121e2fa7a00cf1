"""The pair of models in the repository, through the public interface: what users see first must stay true."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from eagle3_jax import LLM, SamplingParams
from infer.options import DEFAULT_DRAFTER, DEFAULT_MODEL
from infer.outputs import RequestOutput, SpecMetrics

PROMPTS = Path(__file__).parent / "data" / "questions.jsonl"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "RESULTS.md"
LENGTH = 128
SIZES: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 20}


def conversations() -> list[list[dict[str, str]]]:
    return [json.loads(line)["messages"] for line in PROMPTS.read_text().splitlines()]


@functools.cache
def drafted() -> LLM:
    return LLM(**SIZES)


def beside(config: dict[str, Any] | None) -> LLM:
    """Another engine over the same weights."""
    llm = drafted()
    head = llm.drafter if config is not None else None
    return LLM.from_models(
        llm.target,
        head,
        tokenizer=llm.get_tokenizer(),
        stop_ids=llm.stop_ids,
        speculative_config=config,
        max_model_len=512,
        max_num_seqs=20,
    )


def params(temperature: float) -> list[SamplingParams]:
    """A seed each: prompts that share a seed share their noise."""
    return [SamplingParams(temperature=temperature, max_tokens=LENGTH, seed=i) for i in range(len(conversations()))]


@functools.cache
def drafted_answers(temperature: float) -> list[RequestOutput]:
    return drafted().chat(conversations(), params(temperature), use_tqdm=False)


def length_of(outputs: list[RequestOutput], num_drafts: int = 3) -> float:
    return SpecMetrics.of(outputs, num_drafts).mean_acceptance_length


def test_size() -> None:
    files = [path for folder in (DEFAULT_MODEL, DEFAULT_DRAFTER) for path in Path(folder).glob("*.safetensors")]
    assert len(files) == 2 and sum(path.stat().st_size for path in files) <= 12e6


@pytest.mark.parametrize(("temperature", "row"), [(0.0, "greedy | 0"), (1.0, "coupled (the default) | 1")])
def test_acceptance_length_is_the_recorded_one(temperature: float, row: str) -> None:
    (recorded,) = re.findall(rf"^\| {re.escape(row)} \| (\d\.\d\d) \|", RESULTS.read_text(), re.MULTILINE)
    assert length_of(drafted_answers(temperature)) == pytest.approx(float(recorded), abs=0.05)


def test_same_text_without_the_head() -> None:
    plain = beside(None)
    for temperature in (0.0, 1.0):
        outputs = plain.chat(conversations()[:20], params(temperature)[:20], use_tqdm=False)
        for ours, theirs in zip(drafted_answers(temperature), outputs, strict=False):
            assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
            assert ours.outputs[0].text == theirs.outputs[0].text


def test_coupled_drafts_beat_greedy_ones_and_come_near_rejection_sampling() -> None:
    """At temperature 1. Coupling loses at most (1-TV)/(1+TV) against 1-TV; its drafts share the target's noise."""
    coupled = length_of(drafted_answers(1.0)[:20])
    greedy, standard = (
        length_of(beside(config).chat(conversations()[:20], params(1.0)[:20], use_tqdm=False))
        for config in ({"draft_sample_method": "greedy"}, {"rejection_sample_method": "standard"})
    )
    assert coupled > greedy
    assert coupled - 1 >= 0.85 * (standard - 1)


def test_the_script_of_a_vllm_user() -> None:
    """Only the import line differs from vLLM's."""
    llm = LLM(
        model=str(DEFAULT_MODEL),
        tensor_parallel_size=1,
        speculative_config={"model": str(DEFAULT_DRAFTER), "method": "eagle3", "num_speculative_tokens": 3},
        max_model_len=512,
        max_num_seqs=2,
    )
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=20)
    outputs = llm.generate(["Tom has 3 apples.", "def add(a, b):"], sampling_params)
    for output in outputs:
        assert isinstance(output.prompt, str) and isinstance(output.outputs[0].text, str)
        assert 0 < len(output.outputs[0].token_ids) <= 20
        assert output.outputs[0].finish_reason in ("stop", "length")
    assert {metric.name for metric in llm.get_metrics()} >= {"vllm:spec_decode_num_drafts"}
