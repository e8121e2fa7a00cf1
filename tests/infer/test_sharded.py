"""Every kind of mesh says what one device says, keeps parameters and caches in their place, and gathers no matrix."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from eagle3_jax.drafters.eagle3 import Eagle3
from eagle3_jax.meshes import MeshShape, parse_mesh
from eagle3_jax.target import Target
from infer import LLM, SamplingParams
from infer.cycle import Speculation
from infer.engine import Engine
from tests.infer import tiny
from tests.infer.conftest import Folders
from tests.infer.test_lossless import PARAMS, PROMPTS, STOPS, same
from tests.infer.tiny import Answer

# Eight query heads for eight devices, two key/value heads that cannot be spread so far.
SIZES: dict[str, Any] = {"num_heads": 8, "head_dim": 8, "vocab_size": 64, "intermediate_size": 64}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 16}
DENSE = ["tp8", "fsdp8", "dp2 tp4"]
MIXTURE = ["tp8", "dp2 ep2 tp2"]
CASES = [("qwen3_5", name) for name in DENSE] + [("qwen3_5_moe", name) for name in MIXTURE]


@functools.cache
def models(family: str) -> tuple[Target, Eagle3]:
    target = tiny.target(family, **SIZES, **(EXPERTS if family.endswith("moe") else {}))
    return target, tiny.drafter(target.config, num_heads=8, intermediate_size=64)


@functools.cache
def one_device(family: str) -> list[Answer]:
    """The target alone, on one device."""
    return tiny.answers(tiny.build(models(family)[0], None, Speculation()), PROMPTS, PARAMS, stop_ids=STOPS)


@functools.cache
def spread_engine(family: str, name: str) -> tuple[Engine, MeshShape]:
    """An engine that has answered."""
    shape = parse_mesh(name)
    mesh = shape.mesh()
    target, head = (tiny.spread(model, mesh) for model in models(family))
    slots = 8 if shape.tensor == 8 else 4
    return tiny.build(target, head, Speculation(2), mesh=mesh, max_num_seqs=slots), shape


@pytest.mark.parametrize(("family", "name"), CASES)
def test_the_tokens_of_one_device(family: str, name: str) -> None:
    """Greedy and sampled with seeds, slots refilled, prompts of several chunks."""
    engine, shape = spread_engine(family, name)
    found = tiny.answers(engine, PROMPTS, PARAMS, stop_ids=STOPS)
    assert same(engine, models(family)[0], found, one_device(family)) <= 1
    check_layout(engine, shape)
    check_program(engine, shape)


def check_layout(engine: Engine, shape: MeshShape) -> None:
    """After all those steps, caches lie where the table says, and what the host reads is whole everywhere."""
    state = engine._state
    delta, pages = state.target.layers
    tensor, slots = ("tensor" if shape.tensor > 1 else None), ("data" if shape.data > 1 else None)
    few = tensor if shape.tensor <= 2 else None  # two key/value heads, four delta-rule heads
    over = "tensor" if shape.tensor == 8 else slots  # too few heads, enough slots
    assert held(pages.keys) == part(pages.keys, few, over)
    assert held(delta.state) == part(delta.state, slots, tensor if shape.tensor <= 4 else None)
    assert held(delta.keys) == part(delta.keys, slots, None, few)
    assert held(delta.inputs) == part(delta.inputs, slots, None, few)
    assert held(state.drafter.layers[0].values) == part(state.drafter.layers[0].values, few, over)
    assert all(x.sharding.is_fully_replicated for x in (state.tokens, state.lengths, state.active, state.codes))


def held(x: jax.Array) -> tuple[int, ...]:
    return x.addressable_shards[0].data.shape


def part(x: jax.Array, *axes: str | None) -> tuple[int, ...]:
    return jax.sharding.NamedSharding(x.sharding.mesh, P(*axes)).shard_shape(x.shape)


def check_program(engine: Engine, shape: MeshShape) -> None:
    """The cycle as compiled: sums over the axes that cut products, and no matrix gathered whole."""
    limit, idle = np.int32(4), np.int32(9)
    text = engine._decode.lower(engine._leaves, engine._state, limit, idle, None).compile().as_text()
    assert re.search(r" all-reduce(-start)?\(", text)
    gathered = {tuple(map(int, m[1].split(","))) for m in re.finditer(r"\[([\d,]+)\]\S* all-gather(?:-start)?\(", text)}
    matrices = {x.shape for leaves in engine._leaves for x in leaves if x.ndim > 1}
    cut = [x for leaves in engine._leaves for x in leaves if not x.sharding.is_fully_replicated]
    assert len(cut) >= 15, "the mesh cuts hardly anything"
    assert not gathered & matrices, f"gathered whole: {gathered & matrices}"


def test_a_mesh_by_name(folders: Folders) -> None:
    """From folders, slots over two groups of two devices."""
    options = {"max_model_len": 64, "max_num_seqs": 2, "skip_tokenizer_init": True}
    spread = LLM(folders.target, mesh="dp2 tp2", **options)
    assert spread.mesh is not None and dict(spread.mesh.shape) == {"data": 2, "fsdp": 1, "expert": 1, "tensor": 2}
    plain = LLM(folders.target, **options)
    prompts, wish = [[1, 2, 3], [4, 5], [6]], SamplingParams(temperature=0.9, max_tokens=12, seed=4)
    texts = [[o.outputs[0].token_ids for o in llm.generate(prompts, wish)] for llm in (spread, plain)]
    assert texts[0] == texts[1]
