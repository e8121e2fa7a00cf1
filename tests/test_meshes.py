"""Meshes by name, and what becomes of those that cannot be."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from eagle3_jax.config import TargetConfig
from eagle3_jax.errors import ConfigError, UserError
from eagle3_jax.meshes import MeshShape, check_mesh, nearest_mesh, parse_mesh, problems, replicated_heads
from infer import LLM
from tests.infer import models
from tests.infer.tiny import drafter, target
from train.recipe import load_recipe

DENSE: TargetConfig = target("qwen3_5", num_heads=8, hidden_size=32).config
MIXTURE: TargetConfig = dataclasses.replace(target("qwen3_5_moe", num_heads=8).config, num_experts=6)


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("tp8", MeshShape(tensor=8)),
        ("fsdp16 tp4", MeshShape(fsdp=16, tensor=4)),
        ("dp2 ep4 tp2", MeshShape(2, 1, 4, 2)),
        ("DATA=2, tensor=4", MeshShape(data=2, tensor=4)),
        ("tp1", MeshShape()),
    ],
)
def test_names(text: str, shape: MeshShape) -> None:
    assert parse_mesh(text) == shape and parse_mesh(str(shape)) == shape
    assert shape.rows == shape.data * shape.fsdp


@pytest.mark.parametrize("text", ["", "tp", "tp0", "8", "xp2", "tp2 tp4", "tp-2", "tp2x"])
def test_what_is_no_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"mesh '.*: write for instance|mesh '.*; write for instance|names no axis"):
        parse_mesh(text)


@pytest.mark.parametrize(
    ("text", "devices", "config", "problem", "near"),
    [
        ("tp16", 8, DENSE, "needs 16 devices, and there are 8; the target's attention heads", "tp8"),
        ("tp3", 8, DENSE, r"attention heads \(8\) cannot be divided by tp3", "tp4"),
        ("fsdp3 tp2", 8, DENSE, r"the target's width \(32\) cannot be divided by fsdp3", "fsdp4 tp2"),
        ("ep2 tp2", 8, DENSE, "a dense target has no experts", "tp2"),
        ("dp2 ep4", 8, MIXTURE, r"experts \(6\) cannot be divided by ep4", "dp2 ep3"),
        ("dp4 tp4", 8, DENSE, "needs 16 devices", "dp2 tp4"),
    ],
)
def test_the_nearest_that_works_is_named(
    text: str, devices: int, config: TargetConfig, problem: str, near: str
) -> None:
    with pytest.raises(ConfigError, match=f"{problem}.*The nearest that works here is '{near}'"):
        check_mesh(parse_mesh(text), devices, config)
    check_mesh(parse_mesh(near), devices, config)


@pytest.mark.parametrize("config", [DENSE, MIXTURE])
def test_what_is_named_always_works(config: TargetConfig) -> None:
    for wish in (MeshShape(7, 3, 5, 11), MeshShape(tensor=64), MeshShape(1, 1000, 1000, 1), MeshShape(data=12)):
        for devices in (1, 4, 6, 96):
            assert not problems(nearest_mesh(wish, devices, config), devices, config)


def test_the_heads_of_the_drafter_count() -> None:
    head = drafter(DENSE, num_heads=6, num_kv_heads=2).config
    with pytest.raises(ConfigError, match=r"the head's attention heads \(6\) cannot be divided by tp4"):
        check_mesh(parse_mesh("tp4"), 8, DENSE, head)


def test_few_key_heads_are_allowed_and_named() -> None:
    check_mesh(parse_mesh("tp8"), 8, DENSE)
    assert replicated_heads(parse_mesh("tp8"), DENSE) == [
        "2 key/value heads", "2 delta-rule key heads", "4 delta-rule value heads",
    ]  # fmt: skip
    assert not replicated_heads(parse_mesh("tp2"), DENSE)


def recipe(tmp_path: Path, mesh: Any, *overrides: str) -> Any:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump({"target": "t", "output": "o", "data": {"files": ["a"]}, "mesh": mesh}))
    return load_recipe(file, overrides).mesh


def test_a_recipe_names_its_mesh(tmp_path: Path) -> None:
    by_axis = recipe(tmp_path, {"fsdp": 4, "tensor": 2})
    assert recipe(tmp_path, "fsdp4 tp2") == by_axis == recipe(tmp_path, {}, "mesh=fsdp4 tp2")
    assert recipe(tmp_path, "tp2", "mesh.fsdp=4") == by_axis
    with pytest.raises(ConfigError, match="mesh 'fsdp four'"):
        recipe(tmp_path, "fsdp four")


def test_an_engine_refuses_what_cannot_be() -> None:
    model = models.make_target()
    with pytest.raises(ConfigError, match=r"attention heads \(4\) cannot be divided by tp8.*'tp4'"):
        LLM.from_models(model, max_model_len=64, tensor_parallel_size=8)
    with pytest.raises(UserError, match="mesh and tensor_parallel_size are both given"):
        LLM(mesh="tp2", tensor_parallel_size=2)
