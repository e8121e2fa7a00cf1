"""Keywords of LLM and of speculative_config: every refusal by name, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eagle3_jax.errors import UserError
from infer import LLM
from infer.cycle import Speculation
from infer.options import NO_EFFECT, SPECULATIVE_NO_EFFECT, Drafting, Options, check_options, check_speculative_config


def test_defaults() -> None:
    assert check_options({}) == Options()
    assert check_speculative_config(None, default_model=None) == Drafting()
    assert check_speculative_config(None, default_model=Path("head")) == Drafting(Path("head"), None, Speculation(3))


def test_vllms_own_keywords_are_accepted_with_one_warning() -> None:
    with pytest.warns(UserWarning) as warned:
        check_options({name: True for name in NO_EFFECT} | {"seed": 3})
    assert len(warned) == 1
    assert all(name in str(warned[0].message) for name in NO_EFFECT)
    with pytest.warns(UserWarning, match="LLM: gpu_memory_utilization has no effect here"):
        check_options({"gpu_memory_utilization": 0.9})
    with pytest.warns(
        UserWarning, match="speculative_config: draft_tensor_parallel_size, max_model_len have no effect"
    ):
        config = {"model": "h", "draft_tensor_parallel_size": 1, "max_model_len": 5}
        check_speculative_config(config, default_model=None)
    assert not NO_EFFECT & {*Options.__dataclass_fields__} and "model" not in SPECULATIVE_NO_EFFECT


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        (
            {"tensor_paralel_size": 2},
            "LLM: unknown keyword 'tensor_paralel_size' (did you mean 'tensor_parallel_size'?)",
        ),
        ({"load_in_8bit": True}, "LLM: unknown keyword 'load_in_8bit'; known: tokenizer, skip_tokenizer_init"),
        ({"kernels": "triton"}, "LLM: kernels='triton' is not offered; choose one of auto, reference, gpu, tpu"),
        ({"quantization": "awq"}, "LLM: quantization='awq' is not offered; choose one of int8, fp8, fp8_per_block, or"),
        ({"enforce_eagre": True}, "(did you mean 'enforce_eager'?)"),
        (
            {"tensor_parallel_size": 0},
            "LLM: tensor_parallel_size=0 is not allowed: it must be an integer of at least 1",
        ),
        ({"max_num_seqs": 1.5}, "LLM: max_num_seqs=1.5 is not allowed"),
        ({"max_model_len": 1}, "LLM: max_model_len=1 is not allowed: it must be an integer of at least 2"),
        ({"seed": -1}, "LLM: seed=-1 is not allowed"),
        ({"seed": True}, "LLM: seed=True is not allowed"),
        ({"cycles_per_sync": 0}, "LLM: cycles_per_sync=0 is not allowed"),
        ({"prefill_chunk": "8"}, "LLM: prefill_chunk='8' is not allowed"),
    ],
)
def test_bad_keywords_are_refused_by_name(keywords: dict[str, Any], message: str) -> None:
    for call in (check_options, lambda given: LLM("no/such/model", **given)):
        with pytest.raises(UserError) as error:
            call(keywords)
        assert message in str(error.value)


HEAD = {"model": "head"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "'model' is missing"),
        ("head", "speculative_config='head' must be a dict"),
        ({**HEAD, "method": "medusa"}, "method='medusa' is not offered; only 'eagle3' is"),
        ({**HEAD, "num_spec_tokens": 3}, "unknown keyword 'num_spec_tokens' (did you mean 'num_speculative_tokens'?)"),
        ({**HEAD, "num_speculative_tokens": 0}, "num_speculative_tokens=0 is not allowed"),
        ({**HEAD, "num_speculative_tokens": 64}, "num_speculative_tokens=64 is not allowed: at most 63 fit"),
        (
            {**HEAD, "rejection_sample_method": "block"},
            "rejection_sample_method='block' is not allowed: it must be one of",
        ),
        ({**HEAD, "draft_sample_method": "beam"}, "draft_sample_method='beam' is not allowed"),
        (
            {**HEAD, "draft_sample_method": "probabilistic"},
            "draws drafts that the coupled rule has no reason to accept",
        ),
        ({**HEAD, "rejection_sample_method": "synthetic"}, "'synthetic' needs a length"),
        ({**HEAD, "synthetic_acceptance_length": 2.0}, "no other method takes one"),
        (
            {**HEAD, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 9},
            "synthetic_acceptance_length=9 is not allowed: with 3 drafts it must be in [1, 4]",
        ),
    ],
)
def test_bad_speculation_is_refused_by_name(config: Any, message: str) -> None:
    with pytest.raises(UserError) as error:
        check_speculative_config(config, default_model=None)
    assert message in str(error.value)


def test_methods_are_resolved() -> None:
    read = lambda **more: check_speculative_config({**HEAD, **more}, default_model=None).speculation
    assert read() == Speculation(3, "coupled", "coupled")
    assert read(num_speculative_tokens=5, draft_sample_method="greedy") == Speculation(5, "greedy", "coupled")
    assert read(rejection_sample_method="standard").draft_sample_method == "probabilistic"
    assert read(rejection_sample_method="standard", draft_sample_method="greedy").draft_sample_method == "greedy"
    synthetic = read(rejection_sample_method="synthetic", synthetic_acceptance_length=2.5)
    assert synthetic == Speculation(3, "coupled", "synthetic", 2.5)


def test_a_drafter_is_needed_for_a_speculative_config() -> None:
    with pytest.raises(UserError, match="speculative_config: no drafter was given"):
        LLM.from_models(None, speculative_config={"num_speculative_tokens": 2})  # type: ignore[arg-type]
