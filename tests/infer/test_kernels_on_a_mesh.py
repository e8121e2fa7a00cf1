"""Kernels know no mesh: each device calls them for its own slots and heads, and the tokens stay those of one device."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels.attention
import pallas_kernels.gated_delta
from eagle3_jax.config import DELTA, FULL, RopeConfig, TargetConfig
from eagle3_jax.meshes import parse_mesh
from eagle3_jax.planning.account import Job
from eagle3_jax.planning.chips import parse_topology, tpu_devices
from infer import plan
from infer.cycle import Speculation
from pallas_kernels import dispatch
from pallas_kernels.attention import gpu as attention_gpu
from pallas_kernels.gated_delta import triton as delta_triton
from tests.infer import tiny
from tests.infer.test_lossless import PARAMS, PROMPTS, STOPS, same

SIZES: dict[str, Any] = {
    "head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "vocab_size": 64, "intermediate_size": 64,
}  # fmt: skip


def test_gpu_kernels_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted. Slots over two, heads over two: each call has half of each."""
    seen: list[tuple[int, ...]] = []

    def step(state: jax.Array, *rest: Any, parents: None) -> Any:
        seen.append(state.shape)
        return delta_triton.interpreted(state, *rest)

    def attention(q: jax.Array, *rest: jax.Array, contiguous: bool) -> jax.Array:
        seen.append(q.shape)
        return attention_gpu.interpreted(q, *rest, contiguous=contiguous)

    monkeypatch.setattr(pallas_kernels.gated_delta, "_gpu", step)
    monkeypatch.setattr(pallas_kernels.attention, "_gpu", attention)
    mesh = parse_mesh("dp2 tp2").mesh()
    target = tiny.target("qwen3_5", **SIZES)
    engine = tiny.build(tiny.spread(target, mesh), None, Speculation(), mesh=mesh, max_num_seqs=2, page_size=16)
    found = tiny.answers(engine, PROMPTS[:2], PARAMS[:2], stop_ids=STOPS)
    want = tiny.answers(tiny.build(target, None, Speculation()), PROMPTS[:2], PARAMS[:2], stop_ids=STOPS)
    assert same(engine, target, found, want) <= 1
    assert (1, 2, 16, 16) in seen, "the state of one slot and two of four heads"
    assert (1, 1, 2, 16) in seen, "the queries of one slot and two of four heads"


TARGET = TargetConfig(
    model_type="qwen3_5", vocab_size=1536, hidden_size=128, intermediate_size=128, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=128, layer_types=(DELTA, FULL), qk_norm=True, attn_output_gate=True,
    rope=RopeConfig(rotary_dim=32, mrope_section=(6, 5, 5)), linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=128, linear_value_head_dim=128,
)  # fmt: skip


def compiled(mesh: str) -> str:
    """The loop of cycles for a slice of four."""
    devices = tpu_devices(parse_topology("v5e:2x2"))
    job = Job(TARGET, None, 8, 1024, 0, jnp.bfloat16)
    return str(plan.lower(job, parse_mesh(mesh).mesh(devices)).compile().as_text())


def test_tpu_kernels_by_device() -> None:
    """The loop calls each kernel for one device's part, and no cache is gathered."""
    with dispatch.using("tpu"):
        text = compiled("dp2 tp2")
    called = set(re.findall(r"%(gated_delta_step|write_pages|paged_attention)[.\d]* = ", text))
    assert called == {"gated_delta_step", "paged_attention", "write_pages"}
    assert "f32[4,2,128,128]" in text and "f32[8,4,128,128]" not in text, "states of four slots and two heads alone"
    assert not re.search(r"bf16\[2,\d+,64,128\]", text), "the pages of one head alone"


def test_nothing_as_long_as_the_vocabulary_is_passed_on() -> None:
    """With keys and values spread by slots, their heads being too few, XLA would send an argmax's indices around."""
    passed = re.findall(r"\[([\d,]+)\]\S* (?:all-gather|all-to-all|collective-permute)(?:-start)?\(", compiled("tp4"))
    assert passed and not [shape for shape in passed if shape.split(",")[-1] in ("384", "1536")], passed
