"""Which implementation runs, and what is said when it is not the one asked for."""

from __future__ import annotations

import json
from typing import Any

import jax.numpy as jnp
import pytest

from benchmarks.tpu_kernels import MODELS, Shape
from pallas_kernels import dispatch
from pallas_kernels.gated_delta import Pending, reference, step
from tests.helpers import assert_close, published


def run(implementation: str | None, name: str = "op") -> str:
    def unable() -> str:
        raise NotImplementedError("too wide")

    return dispatch.call(name, implementation, {"reference": lambda: "r", "tpu": lambda: "t", "gpu": unable})


def test_the_reference_unless_asked() -> None:
    assert [run(name) for name in (None, "auto", "reference", "tpu")] == ["r", "r", "r", "t"]
    with dispatch.using("tpu"):
        assert [run(name) for name in (None, "auto", "reference")] == ["t", "t", "r"]
    assert run(None) == "r"


def test_a_preference_gives_way_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with dispatch.using("gpu"):
        assert [run(None, "wide"), run(None, "wide")] == ["r", "r"]
    assert dispatch.fallbacks()["wide"] == "too wide"
    assert caplog.messages == ["wide: the reference is used: too wide"]
    with dispatch.using("abacus"):
        assert run(None, "counting") == "r"
    assert "no implementation 'abacus', only reference, tpu, gpu" in dispatch.fallbacks()["counting"]


def test_a_name_is_an_order() -> None:
    with pytest.raises(NotImplementedError, match="too wide"):
        run("gpu")
    with pytest.raises(NotImplementedError, match="abacus"):
        run("abacus")


def test_an_operation_whose_kernel_cannot() -> None:
    zeros = lambda *shape: jnp.zeros((1, *shape))
    pending = Pending(zeros(1, 1, 8), zeros(1, 1, 8), zeros(1, 1), jnp.ones(1, jnp.int32))
    args: Any = (jnp.ones((1, 1, 8, 8)), pending, zeros(2, 1, 8), zeros(2, 1, 8), zeros(2, 1, 8), *[zeros(2, 1)] * 2)
    with dispatch.using("tpu"):
        got = step(*args)
    assert "head widths 8 and 8" in dispatch.fallbacks()["gated_delta.step"]
    for a, b in zip(got, reference.step(*args), strict=True):
        assert_close(a, b, 1e-7)


@pytest.mark.parametrize("model", MODELS)
def test_shapes_are_those_of_the_published_configs(model: str) -> None:
    config = json.loads(published(f"configs/{model}.json").read_text())["text_config"]
    assert config["linear_key_head_dim"] == config["linear_value_head_dim"] == 128
    names = ("linear_num_key_heads", "linear_num_value_heads", "num_attention_heads", "num_key_value_heads")
    assert MODELS[model] == Shape(*(config[name] for name in (*names, "head_dim", "vocab_size")))


def test_on_a_mesh_kernels_of_one_device_give_way() -> None:
    implementations = {"reference": lambda: "plain", "gpu": lambda: "kernel"}
    assert dispatch.call("op", None, implementations, default="gpu") == "kernel"
    with dispatch.spread():
        assert dispatch.call("op", None, implementations, default="gpu") == "plain"
        with pytest.raises(NotImplementedError, match="for one device"):
            dispatch.call("op", "gpu", implementations)
