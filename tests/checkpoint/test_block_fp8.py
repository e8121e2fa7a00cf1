"""Targets in fp8 by blocks: dequantised as torch would, or kept; and everything that can be wrong with one."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flax import nnx
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from eagle3_jax import check, inspect
from eagle3_jax.checkpoint import CheckpointError, load_target, save_target
from eagle3_jax.checkpoint.source import open_source, read_json
from eagle3_jax.errors import ConfigError, UserError
from eagle3_jax.quantization import MATRICES, QUANTIZATIONS, SCALE, quantize_model
from eagle3_jax.sharding import make_mesh
from eagle3_jax.target import Target
from tests.checkpoint.test_target import Folder, our_logits, problems, tensors_of, variant
from tests.helpers import assert_close

Tensors = dict[str, np.ndarray]
BLOCK = (16, 32)  # of the tiny models' 24, 48 and 80: whole blocks and ends of blocks
# What Qwen's own fp8 checkpoints leave as it was: modules_to_not_convert.
LEFT = re.compile(r".*(embed_tokens|lm_head|norm|conv1d|mlp\.gate|shared_expert_gate|in_proj_(a|b|ba))\.weight")


def config_of(block: tuple[int, int] = BLOCK, **more: Any) -> dict[str, Any]:
    keys = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]}
    return {"quantization_config": {**keys, "weight_block_size": list(block), **more}}


def spread(scale: torch.Tensor, shape: tuple[int, ...], block: tuple[int, int]) -> torch.Tensor:
    rows = scale.repeat_interleave(block[0], -2)[..., : shape[-2], :]
    return rows.repeat_interleave(block[1], -1)[..., : shape[-1]]


def in_fp8(weight: np.ndarray, block: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales of a matrix [..., out, in], by torch."""
    w = torch.tensor(np.asarray(weight, np.float32))
    rows, columns = -w.shape[-2] % block[0], -w.shape[-1] % block[1]
    padded = F.pad(w.abs(), (0, columns, 0, rows)).reshape(-1, w.shape[-2] + rows, w.shape[-1] + columns)
    most = F.max_pool2d(padded, block, block).reshape(*w.shape[:-2], -1, (w.shape[-1] + columns) // block[1])
    scale = (most / 448).to(dtype)
    values = (w / spread(scale.float(), tuple(w.shape), block)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return values, scale


def dequantised(values: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    return (values.float() * spread(scale.float(), tuple(values.shape), block)).to(dtype)


def as_numpy(x: torch.Tensor) -> np.ndarray:
    if x.dtype == torch.float8_e4m3fn:
        return x.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()


def quantised_tensors(
    tensors: Mapping[str, np.ndarray], block: tuple[int, int] = BLOCK, scales: torch.dtype = torch.bfloat16
) -> tuple[Tensors, Tensors]:
    """The tensors of an fp8 checkpoint, and those that torch makes of it in bfloat16."""
    stored, plain = dict(tensors), dict(tensors)
    for name, array in tensors.items():
        if array.ndim > 1 and not LEFT.fullmatch(name):
            values, scale = in_fp8(array, block, scales)
            stored[name], stored[f"{name}_scale_inv"] = as_numpy(values), as_numpy(scale)
            plain[name] = as_numpy(dequantised(values, scale, block, torch.bfloat16))
    return stored, plain


@pytest.fixture
def fp8_of(checkpoint: Folder, tmp_path: Path) -> Callable[..., Path]:
    """The fp8 copy of a kind of `tiny`."""

    def make(kind: str, block: tuple[int, int] = BLOCK, scales: torch.dtype = torch.bfloat16) -> Path:
        stored, _ = quantised_tensors(tensors_of(checkpoint(kind)), block, scales)
        return variant(checkpoint(kind), tmp_path / f"{kind}-fp8", stored, **config_of(block))

    return make


def arrays_of(model: Target) -> dict[str, np.ndarray]:
    return {".".join(map(str, path)): np.asarray(x[...]) for path, x in nnx.to_flat_state(nnx.state(model))}


def assert_same(one: Target, other: Target) -> None:
    ours, theirs = arrays_of(one), arrays_of(other)
    assert ours.keys() == theirs.keys()
    assert [
        name for name, x in ours.items() if x.dtype != theirs[name].dtype or not np.array_equal(x, theirs[name])
    ] == []


@pytest.mark.parametrize("kind", ["qwen3_5_moe", "qwen3_next", "qwen3_moe"])
def test_dequantised_on_import_it_is_what_torch_makes_of_it(kind: str, checkpoint: Folder, tmp_path: Path) -> None:
    stored, plain = quantised_tensors(tensors_of(checkpoint(kind)))
    assert sum(name.endswith("_scale_inv") for name in stored) > 10
    fp8 = load_target(variant(checkpoint(kind), tmp_path / "fp8", stored, **config_of()), dtype="bfloat16")
    assert_same(fp8.model, load_target(variant(checkpoint(kind), tmp_path / "plain", plain), dtype="bfloat16").model)


def test_it_is_what_transformers_makes_of_it() -> None:
    """The test's own idea of blocks and scales, against theirs."""
    values, scale = in_fp8(np.random.default_rng(0).normal(size=(48, 64)), (16, 32), torch.float32)
    theirs = Fp8Dequantize(None)._dequantize_one(values, scale, torch.bfloat16)
    assert torch.equal(theirs, dequantised(values, scale, (16, 32), torch.bfloat16))


@pytest.mark.parametrize("kind", ["qwen3_5_moe", "qwen3_next"])
def test_kept_in_fp8_it_computes_the_same(kind: str, fp8_of: Callable[..., Path]) -> None:
    folder = fp8_of(kind)
    kept, plain = load_target(folder, quantization="fp8").model, load_target(folder).model
    assert_close(our_logits(kept), our_logits(plain), rtol=1e-5)
    held, without = arrays_of(kept), arrays_of(plain)
    matrices = {name for name in without if MATRICES.fullmatch(name)}
    assert {name for name, x in held.items() if x.dtype == ml_dtypes.float8_e4m3fn} == matrices
    assert {name for name in held if name not in without} == {name + SCALE for name in matrices}
    assert all(np.array_equal(held[name], without[name]) for name in without.keys() - matrices)
    name = "layers.2.self_attn.o_proj"
    in_file = open_source(folder).tensors[f"model.{name}.weight"].read()
    assert np.array_equal(held[f"{name}.kernel"].view(np.uint8), in_file.view(np.uint8).T)


def test_experts_stored_together(checkpoint: Folder, tmp_path: Path, fp8_of: Callable[..., Path]) -> None:
    folder = checkpoint("qwen3_5_moe")
    tensors = tensors_of(folder)
    for layer in range(3):
        stem = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            np.stack([tensors.pop(f"{stem}.{e}.{p}_proj.weight") for e in range(4)]) for p in ("gate", "up", "down")
        )
        tensors |= {f"{stem}.gate_up_proj": np.concatenate([gate, up], axis=1), f"{stem}.down_proj": down}
    stored, _ = quantised_tensors(tensors, (8, 32))
    together = variant(folder, tmp_path / "fused", stored, **config_of((8, 32)))
    apart = fp8_of("qwen3_5_moe", (8, 32))
    for quantization in (None, "fp8"):
        assert_same(*(load_target(x, quantization=quantization).model for x in (together, apart)))


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_on_a_mesh(quantization: str | None, fp8_of: Callable[..., Path]) -> None:
    folder = fp8_of("qwen3_next")
    spread = load_target(folder, mesh=make_mesh(fsdp=2, expert=2, tensor=2), quantization=quantization).model
    assert_same(spread, load_target(folder, quantization=quantization).model)
    sharded = [x for x in jax.tree.leaves(nnx.state(spread)) if not x.sharding.is_fully_replicated]
    assert len(sharded) > 20


def test_quantised_on_a_mesh(checkpoint: Folder) -> None:
    """Each device rounds its own part by scales of the whole."""
    folder, mesh = checkpoint("qwen3_5_moe"), make_mesh(fsdp=2, expert=2, tensor=2)
    assert_same(*(load_target(folder, mesh=m, quantization="int8").model for m in (mesh, None)))


def test_every_problem_is_told_at_once(checkpoint: Folder, tmp_path: Path) -> None:
    folder = checkpoint("qwen3_moe")
    stored, _ = quantised_tensors(tensors_of(folder))
    attention, experts = "model.layers.0.self_attn", "model.layers.1.mlp.experts"
    del stored[f"{attention}.q_proj.weight_scale_inv"]
    stored[f"{attention}.k_proj.weight_scale_inv"] = np.ones((2, 1), np.float32)
    stored[f"{attention}.v_proj.weight_scale_inv"] = np.ones((2, 2), np.int32)
    stored[f"{attention}.o_proj.weight"] = stored[f"{attention}.o_proj.weight"].astype(np.float32)
    stored["model.embed_tokens.weight"] = stored["model.embed_tokens.weight"].astype(ml_dtypes.float8_e4m3fn)
    stored["model.embed_tokens.weight_scale_inv"] = np.ones((8, 2), np.float32)
    for expert in (0, 1):
        stored[f"{experts}.{expert}.up_proj.weight"] = np.zeros((24, 48), np.float32)
        del stored[f"{experts}.{expert}.up_proj.weight_scale_inv"]
    found = problems(variant(folder, tmp_path / "bad", stored, **config_of()))
    sizes = "expected [2, 2] for [32, 48] in blocks of [16, 32]"
    expected = [
        f"missing: {attention}.q_proj.weight_scale_inv, expected [4, 2]: {attention}.q_proj.weight is fp8",
        f"wrong shape: {attention}.k_proj.weight_scale_inv in model.safetensors: {sizes}, found [2, 1]",
        f"wrong dtype: {attention}.v_proj.weight_scale_inv in model.safetensors: expected float values, found int32",
        f"unknown: {attention}.o_proj.weight_scale_inv [3, 2] in model.safetensors",
        "wrong dtype: model.embed_tokens.weight in model.safetensors: expected float values, found float8_e4m3fn",
        "layers.1.mlp.experts.up_proj: some of its tensors are fp8, others are not",
    ]
    assert [text for text in expected if text not in found] == [] and len(found.splitlines()) == len(expected)


@pytest.mark.parametrize(
    ("quantised", "message"),
    [
        *[({"quant_method": m}, f"quant_method '{m}' is not supported") for m in ("awq", "gptq", "bitsandbytes")],
        ({}, "quant_method None is not supported"),
        ("fp8", "quantization_config is 'fp8', not a table"),
        ({"quant_method": "fp8"}, "weight_block_size is None, not two sizes such as [128, 128]"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0], "fmt": "e5m2"}, "[128, 0], not two sizes such as"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0], "fmt": "e5m2"}, "fmt 'e5m2' is not supported"),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_other_ways_of_quantising_are_refused_by_name(
    quantised: Any, message: str, nested: bool, checkpoint: Folder, tmp_path: Path
) -> None:
    table = {"quantization_config": quantised or {"bits": 4}}
    folder = variant(checkpoint("llama"), tmp_path / "x", {}, **({"text_config": table} if nested else table))
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_target(folder)


def test_from_fp8_to_int8(fp8_of: Callable[..., Path]) -> None:
    """As if it had been dequantised first."""
    folder = fp8_of("llama")
    found = load_target(folder, quantization="int8").model
    assert_same(found, quantize_model(load_target(folder).model, QUANTIZATIONS["int8"]))


def test_a_way_that_is_not_offered(checkpoint: Folder) -> None:
    with pytest.raises(ConfigError, match="quantization='awq' is not offered; choose one of int8, fp8, fp8_per_block"):
        load_target(checkpoint("llama"), quantization="awq")


def test_what_is_written_is_not_quantised(fp8_of: Callable[..., Path], tmp_path: Path) -> None:
    folder = fp8_of("llama")
    config, model = read_json(folder, "config.json"), load_target(folder).model
    save_target(model, tmp_path / "out", config)
    assert "quantization_config" not in read_json(tmp_path / "out", "config.json")
    assert_same(load_target(tmp_path / "out").model, model)
    with pytest.raises(ConfigError, match="a quantised target cannot be written"):
        save_target(load_target(folder, quantization="fp8").model, tmp_path / "out", config)


def test_check_needs_something_to_compare_with(fp8_of: Callable[..., Path]) -> None:
    arguments = argparse.ArgumentParser()
    check.add_arguments(arguments)
    with pytest.raises(UserError, match="the checkpoint is fp8: name its original with --reference"):
        check.run(arguments.parse_args([str(fp8_of("llama"))]))


def test_inspect_reads_it(fp8_of: Callable[..., Path], tmp_path: Path) -> None:
    folder = fp8_of("qwen3_moe")
    lines, found = inspect.inspect_target(folder, read_json(folder, "config.json"), open_source(folder))
    assert not found and "float8_e4m3fn" in dict(lines)["files"]
    stored = tensors_of(folder)
    del stored["model.layers.0.self_attn.q_proj.weight_scale_inv"]
    with pytest.raises(CheckpointError, match="q_proj.weight_scale_inv"):
        load_target(variant(folder, tmp_path / "bad", stored))


def test_auto_is_bfloat16_where_the_config_names_fp8_or_nothing(fp8_of: Callable[..., Path]) -> None:
    folder = fp8_of("llama")
    for name in ("float8_e4m3fn", None):
        model = load_target(variant(folder, folder, tensors_of(folder), dtype=name), quantization="fp8").model
        assert model.embed_tokens.weight[...].dtype == (jnp.bfloat16 if name else jnp.float32)
