"""`eagle3 plan` on small models: counts agree with the compiler, real steps compile for a slice, mistakes are named."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from eagle3_jax.cli import main, planner
from eagle3_jax.config import TargetConfig
from eagle3_jax.meshes import MeshShape, parse_mesh
from eagle3_jax.planning.account import Job, best_mesh, shapes, slices_for, smallest, times
from eagle3_jax.planning.chips import CHIPS, parse_topology
from eagle3_jax.planning.compiling import compile_step
from eagle3_jax.planning.report import Plan, lines
from eagle3_jax.planning.shapes import abstract_mesh, abstract_model, count_weights, held

# Wide enough that nothing is lost to tiles: 128 columns on each of four devices.
CONFIG: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}  # fmt: skip
SHORT: dict[str, Any] = {**CONFIG, "num_hidden_layers": 1}
MIXTURE: dict[str, Any] = {
    **CONFIG, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512,
}  # fmt: skip


def job(kind: str, config: dict[str, Any] = CONFIG, **changes: Any) -> Job:
    target = TargetConfig.from_hf(config)
    head = dataclasses.replace(planner("train").default_head(target), draft_vocab_size=2048)
    base = {"batch": 4, "context": 128, "steps": 1, "dtype": jnp.bfloat16, **changes}
    return Job(target, head, **base)


@pytest.mark.parametrize(
    ("kind", "config", "name", "changes"),
    [
        ("generate", CONFIG, "dp2 tp2", {}),
        ("generate", MIXTURE, "ep2 tp2", {"quantization": "int8"}),
        ("generate", MIXTURE, "tp4", {"quantization": "fp8", "prefill": 64}),
        ("train", SHORT, "fsdp4", {}),
    ],
)
def test_the_real_step_on_a_slice(kind: str, config: dict[str, Any], name: str, changes: dict[str, Any]) -> None:
    mode, asked, topology = planner(kind), job(kind, config, **changes), parse_topology("v5e:2x2")
    shape = parse_mesh(name)
    compiled = compile_step(mode, asked, topology, shape)
    account = mode.account(asked, shape)
    stated = account.total - account.parts["temporaries"]
    assert stated <= compiled.arguments * 1.02 and compiled.arguments <= stated * 1.35, "counts and compiler differ"
    assert compiled.collectives and not compiled.too_large
    assert account.moved / 6 <= sum(c.moved * n for c, n in compiled.collectives.items()) <= 6 * account.moved
    text = "\n".join(lines(Plan(asked, topology, shape, mode.unit(asked), account, compiled)))
    assert "fits" in text and "all-reduce" in text and "as compiled" in text


def test_what_does_not_fit_is_a_result() -> None:
    """The compiler refuses it before it would run: 40 GiB of keys and values."""
    mode, topology = planner("generate"), parse_topology("v5e:1x1")
    huge = job("generate", batch=512, context=20480)
    assert "exceeds available HBM" in compile_step(mode, huge, topology, MeshShape()).too_large


@pytest.mark.parametrize("config", [CONFIG, MIXTURE])
def test_layers_that_are_alike_are_counted_once(config: dict[str, Any]) -> None:
    target = TargetConfig.from_hf({**config, "num_hidden_layers": 5})
    mesh = abstract_mesh(MeshShape(tensor=2))
    assert count_weights(target, jnp.bfloat16, mesh).bytes == pytest.approx(
        held(abstract_model(target, jnp.bfloat16, mesh)[1]), rel=0.02
    )


def test_work_and_bytes_by_hand() -> None:
    """A dense target without a head, one slot: every matrix once, two operations an element, all keys and values."""
    asked = dataclasses.replace(job("generate"), draft=None, batch=1, context=1000)
    found = planner("generate").account(asked, MeshShape())
    matrices = 2 * (512 * (8 + 4 + 4) * 128 + 8 * 128 * 512 + 3 * 512 * 1024) + 512 * 4096
    norms = 2 * (2 * 512 + 2 * 128) + 512
    assert found.flops == pytest.approx(2 * (matrices + norms) + 4 * 2 * 1000 * 8 * 128)
    cache = 2 * 2 * 4 * 128 * 2 * 1024  # layers, keys and values, heads, width, bfloat16, 16 pages of 64
    # Four key heads on one device: caches are copied in and out of the loop, of eight cycles.
    assert found.read == pytest.approx(2 * matrices + cache + 4 / 8 * cache, rel=0.02)
    spent = times(found, CHIPS["v5e"])
    assert spent.total == pytest.approx(found.read / 819e9) and spent.links == 0


def test_quantised_and_prefill_by_hand() -> None:
    """Matrices of layers in one byte, less their scales; a pass over 100 tokens makes logits of one."""
    plain = dataclasses.replace(job("generate"), draft=None, batch=1, context=1000)
    mode, layers = planner("generate"), 2 * (512 * (8 + 4 + 4) * 128 + 8 * 128 * 512 + 3 * 512 * 1024)
    cycle, small = (mode.account(j, MeshShape()) for j in (plain, dataclasses.replace(plain, quantization="fp8")))
    assert cycle.read - small.read == pytest.approx(layers, rel=0.01) and cycle.flops == small.flops
    taken = mode.account(dataclasses.replace(plain, prefill=100), MeshShape())
    assert taken.flops == pytest.approx(100 * cycle.flops - 99 * 2 * 512 * 4096)
    assert taken.read <= cycle.read
    assert [mode.unit(j) for j in (plain, dataclasses.replace(plain, prefill=100))] == ["cycle", "pass"]


def test_the_choice_fits_and_spreads() -> None:
    mode, asked = planner("generate"), job("generate", batch=512, context=8192)
    choice = smallest(mode, slices_for(mode, asked, CHIPS["v5e"], fixed=True))
    assert choice is not None and choice.fits and choice.topology.devices > 1
    before = [t for t, _ in slices_for(mode, asked, CHIPS["v5e"], fixed=True) if t.devices < choice.topology.devices]
    assert before and not any(found.fits for t in before if (found := best_mesh(mode, asked, t)))


def test_what_the_compiler_refused_is_not_chosen_again() -> None:
    mode, asked = planner("generate"), job("generate", batch=512, context=8192)
    jobs = slices_for(mode, asked, CHIPS["v5e"], fixed=True)
    first = smallest(mode, jobs)
    assert first is not None
    second = smallest(mode, jobs, {first.topology: {first.shape}})
    assert second is not None and second.topology == first.topology and second.shape != first.shape
    assert second.seconds >= first.seconds
    every = {first.topology: set(shapes(mode, asked, first.topology.devices))}
    third = smallest(mode, jobs, every)
    assert third is not None and third.topology.devices > first.topology.devices


def plan(tmp_path: Path, *arguments: str) -> int:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return main(["plan", "--target", str(tmp_path), *arguments])


def test_the_command_counts_for_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(tmp_path, "--topology", "h200:8", "--mode", "train", "--mesh", "fsdp8") == 0
    out = capsys.readouterr().out
    assert "8 devices of 138.00 GiB, mesh fsdp8" in out and "by accounting" in out and "optimizer" in out


def test_the_command_suggests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = ["--topology", "v5e:1x1", "--mode", "generate", "--batch", "512", "--context", "8192", "--accounting"]
    assert plan(tmp_path, *large, "--prefill", "256", "--quantization", "fp8") == 1
    out = capsys.readouterr().out
    assert "DOES NOT FIT" in out and "is the smallest that fits" in out
    assert "one pass: 512 slots of 8192 tokens, the next 256 of their prompts, the target's matrices in fp8" in out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--topology", "v5e:3x3"], "v5e slices are 1x1, 2x2"),
        (["--topology", "v9:2x2"], "no chip 'v9' is known; write for instance v5e:2x4"),
        (["--topology", "h200:two"], "say how many, as in h200:8"),
        (["--topology", "v5e:2x2", "--mesh", "tp8"], "needs 8 devices, and there are 4"),
        (["--topology", "v5e:2x2", "--mesh", "tp2"], "is of 2 devices, v5e:2x2 has 4: use all"),
        (["--topology", "v5e:4x4", "--mesh", "tp16"], "The nearest that works here is 'tp8'"),
        (["--topology", "v5e:2x2", "--mesh", "dp4", "--batch", "2"], "cannot be spread over the 4 parts"),
        (["--topology", "v5e:2x2", "--batch", "0"], "--batch 0: it must be positive"),
        (["--topology", "v5e:2x2", "--prefill", "9000"], "--prefill 9000: it must be from 1 to the 8192 tokens"),
        (["--topology", "v5e:2x2", "--quantization", "int4"], "quantization='int4' is not offered"),
        (["--topology", "v5e:2x2", "--mode", "train", "--prefill", "64"], "--prefill: training has none"),
        (["--topology", "v5e:2x2", "--target", "nowhere.json"], "nowhere.json"),
    ],
)
def test_mistakes_are_named(
    arguments: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(tmp_path, "--mode", "generate", *arguments) == 2
    assert problem in capsys.readouterr().err


def test_libtpu_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "libtpu" else find(name, *a))
    assert plan(tmp_path, "--mode", "generate", "--topology", "v5e:2x2") == 2
    assert "pip install libtpu" in capsys.readouterr().err
