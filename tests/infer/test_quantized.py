"""A quantised target through the engine: its own tokens with and without a head, which stays as it was."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from eagle3_jax import cli
from eagle3_jax.drafters.eagle3 import Eagle3
from eagle3_jax.errors import UserError
from eagle3_jax.meshes import parse_mesh
from eagle3_jax.quantization import E4M3, QUANTIZATIONS, Quantization, quantize_model
from eagle3_jax.target import Target
from infer import LLM
from infer.cycle import Speculation
from tests.infer import tiny
from tests.infer.conftest import Folders
from tests.infer.models import make_target
from tests.infer.test_lossless import PARAMS, PROMPTS, STOPS, accepted_counts, same
from tests.infer.test_sharded import EXPERTS, SIZES, check_program
from tests.infer.tiny import Answer

MODELS: dict[str, tuple[str, Quantization, dict[str, Any]]] = {
    "dense, int8": ("qwen3_5", QUANTIZATIONS["int8"], {}),
    "mixture, fp8 by blocks": ("qwen3_5_moe", dataclasses.replace(E4M3, block=16), {**SIZES, **EXPERTS}),
}


@functools.cache
def quantised(name: str) -> tuple[Target, Eagle3, list[Answer]]:
    """A quantised target, a head, and what the target says alone."""
    family, how, sizes = MODELS[name]
    model = quantize_model(tiny.target(family, **sizes), how)
    plain = tiny.answers(tiny.build(model, None, Speculation()), PROMPTS, PARAMS, stop_ids=STOPS)
    return model, tiny.drafter(model.config, num_heads=8, intermediate_size=64), plain


@pytest.mark.parametrize("name", MODELS)
def test_same_tokens_with_and_without_a_drafter(name: str) -> None:
    """Greedy and sampled."""
    model, head, plain = quantised(name)
    engine = tiny.build(model, head, Speculation(3))
    found = tiny.answers(engine, PROMPTS, PARAMS, stop_ids=STOPS)
    assert same(engine, model, found, plain) <= 1
    assert len(accepted_counts(found)) >= 3


def test_the_tokens_of_one_device_on_a_mesh() -> None:
    model, head, plain = quantised("mixture, fp8 by blocks")
    shape = parse_mesh("dp2 ep2 tp2")
    mesh = shape.mesh()
    engine = tiny.build(tiny.spread(model, mesh), tiny.spread(head, mesh), Speculation(2), mesh=mesh, max_num_seqs=4)
    assert same(engine, model, tiny.answers(engine, PROMPTS, PARAMS, stop_ids=STOPS), plain) <= 1
    check_program(engine, shape)


def dtypes(model: nnx.Module) -> set[str]:
    return {str(x.dtype) for x in jax.tree.leaves(nnx.state(model))}


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_the_head_is_not_quantised_with_its_target(quantization: str, folders: Folders) -> None:
    how = {"model": str(folders.drafter), "num_speculative_tokens": 2}
    llm = LLM(folders.target, speculative_config=how, quantization=quantization, max_model_len=64, max_num_seqs=1)
    assert dtypes(llm.target) == {"float32", str(jnp.dtype(QUANTIZATIONS[quantization].dtype))}
    assert llm.drafter is not None and dtypes(llm.drafter) == {"float32", "int32"} and llm.dtype == "float32"


def test_a_target_in_memory_is_quantised_by_its_owner() -> None:
    with pytest.raises(UserError, match="quantization: the target is loaded already"):
        LLM.from_models(make_target(), quantization="int8")


def test_the_flag(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    model, flag = str(folders.target), "--quantization"
    small = ["--num-prompts", "1", "--output-len", "4", "--max-model-len", "200", "--batch-size", "1"]
    assert cli.main(["bench", "--model-dir", model, flag, "int8", *small]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["quantization"] == "int8"
    assert cli.main(["generate", "Hello", "--model", model, flag, "gptq"]) == 2
    assert "LLM: quantization='gptq' is not offered; choose one of int8, fp8" in capsys.readouterr().err
