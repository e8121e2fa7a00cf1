"""Every refusal of SamplingParams, by name; and what it accepts."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import numpy as np
import pytest

from infer.params import UNSUPPORTED, SamplingParams
from infer.sampling import request_key


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.seed, params.max_tokens, params.min_tokens) == (None, 16, 0)
    assert (params.ignore_eos, params.include_stop_str_in_output, params.skip_special_tokens) == (False, False, True)
    assert params.stop_strings == () and params.stop_token_ids == ()


def test_values_are_normalised_and_hashable() -> None:
    params = SamplingParams(stop="a", stop_token_ids=[np.int32(3), 4], max_tokens=None, top_k=-1)
    assert params.stop_strings == ("a",) and params.stop_token_ids == (3, 4)
    assert hash(params) == hash(SamplingParams(stop=["a"], stop_token_ids=(3, 4), max_tokens=None, top_k=-1))


@pytest.mark.parametrize("kind", [np.int32, np.uint8, np.int64, np.uint64])
def test_a_seed_is_as_good_from_numpy(kind: type[np.integer]) -> None:
    params = SamplingParams(seed=kind(5))  # type: ignore[arg-type]
    keys = [request_key(engine_seed=0, request_index=0, seed=seed) for seed in (params.seed, 5)]
    np.testing.assert_array_equal(*keys)


def test_survives_replace_copy_and_pickle() -> None:
    params = dataclasses.replace(SamplingParams(stop=["a", "b"], seed=7), temperature=0.5)
    assert params.stop_strings == ("a", "b") and params.seed == 7 and params.temperature == 0.5
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 0.0  # type: ignore[misc]


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-6])
def test_tiny_temperature_is_greedy(temperature: float) -> None:
    assert SamplingParams(temperature=temperature).greedy
    assert not SamplingParams(temperature=1e-3).greedy


NAN, INF = float("nan"), float("inf")
REFUSED = [
    *[("n", value) for value in (0, -1, 1.0, True, "2", None)],
    *[("temperature", value) for value in (-0.1, NAN, INF, "1", None, True)],
    *[("top_p", value) for value in (0, 0.0, -0.5, 1.0001, NAN, "x", None)],
    *[("top_k", value) for value in (-2, 1.5, "all", None, True)],
    *[("min_p", value) for value in (-0.1, 1.1, NAN, None)],
    *[("seed", value) for value in (-1, 2**64, 1.5, "s", True)],
    *[("max_tokens", value) for value in (0, -5, 2.0, "16", True)],
    *[("min_tokens", value) for value in (-1, 0.5, None, True)],
    *[("stop", value) for value in ("", [""], ["a", ""], [1], 3, {"a": 1}, b"x")],
    *[("stop_token_ids", value) for value in ([-1], ["a"], 5, [1.5], [True], "12")],
    *[(name, value) for name in ("ignore_eos", "include_stop_str_in_output") for value in (1, None, "no")],
    ("skip_special_tokens", 0),
]


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_bad_value_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError) as error:
        SamplingParams(**{name: value})
    message = str(error.value)
    assert message.startswith(f"SamplingParams: {name}={value!r} is not allowed: it must be ")


@pytest.mark.parametrize(
    ("wrong", "right"), [("temprature", "temperature"), ("max_token", "max_tokens"), ("topp", "top_p")]
)
def test_unknown_name_gets_the_nearest(wrong: str, right: str) -> None:
    with pytest.raises(ValueError, match=f"unknown parameter '{wrong}' \\(did you mean '{right}'\\?\\)"):
        SamplingParams(**{wrong: 1})


def test_unknown_name_without_neighbour_lists_the_known() -> None:
    with pytest.raises(ValueError, match="unknown parameter 'zzz'; known: n, temperature, top_p"):
        SamplingParams(zzz=1)


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_vllm_names_not_offered_say_so(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name!r} is a vLLM parameter that is not supported here"):
        SamplingParams(**{name: None})


def test_positional_arguments_are_refused() -> None:
    with pytest.raises(TypeError):
        SamplingParams(1)  # type: ignore[misc]


def test_contradictions_are_refused() -> None:
    with pytest.raises(ValueError, match="min_tokens=9 contradicts max_tokens=8"):
        SamplingParams(min_tokens=9, max_tokens=8)
    with pytest.raises(ValueError, match="n=2 contradicts temperature=0"):
        SamplingParams(n=2, temperature=0)
    assert SamplingParams(min_tokens=8, max_tokens=8).min_tokens == 8
    assert SamplingParams(min_tokens=100, max_tokens=None).min_tokens == 100
