"""Loading and saving targets: transformers' checkpoints of every family, and everything that can be wrong with one."""

from __future__ import annotations

import gc
import json
import shutil
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from eagle3_jax.checkpoint import CheckpointError, load_target, save_target
from eagle3_jax.checkpoint.fill import make_plan, read_part
from eagle3_jax.checkpoint.hf import name_tensors, parameters_of, read_config
from eagle3_jax.checkpoint.layout import rules_for
from eagle3_jax.checkpoint.safetensors_file import Outgoing, write_file
from eagle3_jax.checkpoint.source import INDEX, SINGLE, open_source, read_json
from eagle3_jax.config import TargetConfig
from eagle3_jax.errors import ConfigError
from eagle3_jax.sharding import make_mesh
from eagle3_jax.target import Target
from tests.checkpoint.tiny import KINDS
from tests.helpers import assert_close

Folder = Callable[[str], Path]
TOKENS = (np.arange(14).reshape(2, 7) * 11) % 128


def our_logits(model: Target) -> jax.Array:
    return model.logits(model(jnp.asarray(TOKENS)).hidden)


def their_logits(folder: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    return {info.name: np.array(info.read()) for info in open_source(folder)}


def variant(source: Path, folder: Path, tensors: Mapping[str, np.ndarray], **config: Any) -> Path:
    """A copy of `source` with these tensors in one file, and keys of config.json changed."""
    folder.mkdir(exist_ok=True)
    write_file(folder / SINGLE, {n: Outgoing(a.dtype, a.shape, lambda a=a: a) for n, a in tensors.items()})
    (folder / "config.json").write_text(json.dumps(read_json(source, "config.json") | config))
    return folder


def problems(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_target(folder)
    return "\n".join(caught.value.problems)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_transformers_gives_its_logits_and_comes_back_equal(
    kind: str, checkpoint: Folder, tmp_path: Path
) -> None:
    folder = checkpoint(kind)
    assert (folder / INDEX).exists()  # the point is to read shards
    loaded = load_target(folder)
    reference = their_logits(folder)
    assert_close(our_logits(loaded.model), reference)
    config = read_json(folder, "config.json")
    save_target(loaded.model, tmp_path / "saved", config, generation_config=loaded.generation_config)
    assert_close(their_logits(tmp_path / "saved"), reference, rtol=1e-6)
    again = load_target(tmp_path / "saved")
    assert again.config == loaded.config and again.stop_ids == loaded.stop_ids
    same = jax.tree.map(lambda a, b: bool((a == b).all()), nnx.state(again.model), nnx.state(loaded.model))
    assert all(jax.tree.leaves(same))


def test_a_saved_folder_is_transformers_qwen3_5(checkpoint: Folder, tmp_path: Path) -> None:
    folder = checkpoint("qwen3_5")
    save_target(load_target(folder).model, tmp_path / "out", read_json(folder, "config.json"), dtype=jnp.bfloat16)
    model, info = transformers.Qwen3_5ForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert model.dtype == torch.bfloat16 and not info["missing_keys"] and not info["unexpected_keys"]
    decay = open_source(tmp_path / "out").tensors["model.layers.0.linear_attn.A_log"]
    assert decay.dtype == np.float32  # what stays float32 in the model does in the file


def test_saving_splits_files_and_keeps_what_it_did_not_write(checkpoint: Folder, tmp_path: Path) -> None:
    folder = checkpoint("llama")
    model, config = load_target(folder).model, read_json(folder, "config.json")
    save_target(model, tmp_path / "out", config)
    (tmp_path / "out" / "tokenizer.json").write_text("{}")
    save_target(model, tmp_path / "out", config, max_shard_bytes=50_000)
    held = {p.name for p in (tmp_path / "out").iterdir()}
    assert "tokenizer.json" in held and INDEX in held and SINGLE not in held
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    files = (tmp_path / "out").glob("*.safetensors")
    assert max(p.stat().st_size for p in files) < 60_000
    assert tensors_of(tmp_path / "out").keys() == tensors_of(folder).keys()


def test_a_failed_save_leaves_the_old_folder(checkpoint: Folder, tmp_path: Path, monkeypatch: Any) -> None:
    folder = checkpoint("llama")
    model, config = load_target(folder).model, read_json(folder, "config.json")
    save_target(model, tmp_path / "out", config)
    before = tensors_of(tmp_path / "out")

    def fail(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("eagle3_jax.checkpoint.hf_save.write_json", fail)
    with pytest.raises(OSError, match="no space"):
        save_target(model, tmp_path / "out", config)
    assert [p.name for p in tmp_path.iterdir()] == ["out"] and tensors_of(tmp_path / "out").keys() == before.keys()


def test_a_config_of_another_model_is_not_written(checkpoint: Folder, tmp_path: Path) -> None:
    folder = checkpoint("llama")
    with pytest.raises(ConfigError, match="rms_norm_eps is 1e-06, not 0.1"):
        save_target(load_target(folder).model, tmp_path / "x", read_json(folder, "config.json") | {"rms_norm_eps": 0.1})


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_5_moe"])
def test_fused_and_separate_experts_are_the_same(kind: str, checkpoint: Folder, tmp_path: Path) -> None:
    folder = checkpoint(kind)
    tensors = tensors_of(folder)
    for layer in range(load_target(folder).config.num_layers):
        stem = f"model.layers.{layer}.mlp.experts"
        parts = {
            p: np.stack([tensors.pop(f"{stem}.{e}.{p}_proj.weight") for e in range(4)]) for p in ("gate", "up", "down")
        }
        tensors[f"{stem}.gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], axis=1)
        tensors[f"{stem}.down_proj"] = parts["down"]
    fused = load_target(variant(folder, tmp_path / "fused", tensors))
    assert_close(our_logits(fused.model), our_logits(load_target(folder).model), rtol=0)


def test_vision_and_prediction_layers_are_skipped_in_one_line(checkpoint: Folder, tmp_path: Path) -> None:
    folder = checkpoint("qwen3_5_vl")
    tensors = tensors_of(folder) | {"mtp.fc.weight": np.zeros((4, 8), np.float32), "mtp.norm.weight": np.zeros(4)}
    line = load_target(variant(folder, tmp_path / "vl", tensors)).skipped
    assert "21 vision tensors (model.visual.*" in line and "2 multi-token prediction tensors (mtp.*" in line
    assert "\n" not in line


def test_every_problem_is_told_at_once(checkpoint: Folder, tmp_path: Path) -> None:
    folder = checkpoint("qwen3_next")
    tensors = tensors_of(folder)
    del tensors["model.layers.0.linear_attn.in_proj_qkvz.weight"]
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    tensors["model.layers.7.input_layernorm.weight"] = np.zeros(48, np.float32)
    tensors["model.layers.2.self_attn.k_proj.weight"] = np.zeros((16, 48), np.float32)
    tensors["model.norm.weight"] = np.zeros(48, np.int32)
    tensors["model.language_model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    found = problems(variant(folder, tmp_path / "bad", tensors))
    expected = [
        "missing: model.layers.0.linear_attn.in_proj_qkvz.weight, expected [128, 48]",
        "missing: model.layers.1.mlp.experts.2.up_proj.weight, expected [24, 48]",
        f"unknown: model.layers.7.input_layernorm.weight [48] in {SINGLE}",
        f"wrong shape: model.layers.2.self_attn.k_proj.weight in {SINGLE}: expected [32, 48], found [16, 48]",
        f"wrong dtype: model.norm.weight in {SINGLE}: expected float values, found int32",
        "model.language_model.embed_tokens.weight and model.embed_tokens.weight are the same parameter",
    ]
    assert [text for text in expected if text not in found] == [] and len(found.splitlines()) == len(expected)


def test_a_missing_shard_is_named(checkpoint: Folder, tmp_path: Path) -> None:
    shutil.copytree(checkpoint("llama"), tmp_path / "copy")
    first = min((tmp_path / "copy").glob("model-*.safetensors"))
    first.unlink()
    assert f"{first.name} is missing" in problems(tmp_path / "copy")


def test_tied_embeddings(checkpoint: Folder, tmp_path: Path) -> None:
    folder = checkpoint("qwen3_5_tied")
    tensors = tensors_of(folder)
    embedding = tensors["model.embed_tokens.weight"]
    loaded = load_target(variant(folder, tmp_path / "same", tensors | {"lm_head.weight": embedding}))
    assert "1 tied output tensors" in loaded.skipped
    other = variant(folder, tmp_path / "other", tensors | {"lm_head.weight": embedding + 1})
    assert "lm_head.weight differs from model.embed_tokens.weight" in problems(other)
    assert not load_target(other, config_overrides={"tie_word_embeddings": False}).skipped


def test_weights_in_one_byte_need_a_config_that_says_what_they_mean(checkpoint: Folder, tmp_path: Path) -> None:
    folder = checkpoint("llama")
    small = tensors_of(folder)
    weight = small["model.layers.0.mlp.up_proj.weight"]
    small["model.layers.0.mlp.up_proj.weight"] = weight.astype(jnp.float8_e4m3fn)
    assert "expected float values, found float8_e4m3fn" in problems(variant(folder, tmp_path / "f8", small))


def test_unknown_overrides_are_named(checkpoint: Folder) -> None:
    with pytest.raises(ConfigError, match="config_overrides hidden: not fields"):
        load_target(checkpoint("llama"), config_overrides={"hidden": 3})


@pytest.mark.parametrize(
    ("written", "asked", "expected"),
    [("bfloat16", "auto", "bfloat16"), ("float16", "auto", "bfloat16"), ("float32", "auto", "float32"),
     ("bfloat16", "float32", "float32"), (None, "auto", "float32")],
)  # fmt: skip
def test_dtypes(written: str | None, asked: str, expected: str, checkpoint: Folder, tmp_path: Path) -> None:
    folder = checkpoint("qwen3_5")
    model = load_target(variant(folder, tmp_path / "x", tensors_of(folder), dtype=written), dtype=asked).model
    assert model.embed_tokens.weight[...].dtype == expected
    assert model.layers[0].linear_attn.A_log[...].dtype == jnp.float32


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5"])
def test_sharded_parameters_are_the_same(kind: str, checkpoint: Folder) -> None:
    folder = checkpoint(kind)
    plain = nnx.state(load_target(folder).model)
    mesh = make_mesh(fsdp=2, expert=2, tensor=2)
    sharded = nnx.state(load_target(folder, mesh=mesh).model)
    same = jax.tree.map(lambda a, b: np.array_equal(np.asarray(a), np.asarray(b)), plain, sharded)
    assert all(jax.tree.leaves(same))
    spread = [len(x.sharding.device_set) for x in jax.tree.leaves(sharded)]
    split = sum(not x.sharding.is_fully_replicated for x in jax.tree.leaves(sharded))
    assert set(spread) == {8} and split > len(spread) // 3


def test_a_parameter_is_read_a_tensor_at_a_time(tmp_path: Path) -> None:
    """Host memory while reading one part of one parameter: the part, not the file, nor all of the parameter."""
    raw = {
        "model_type": "qwen3_moe", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "head_dim": 16,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "num_experts": 32, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    }  # fmt: skip
    save_target(Target(TargetConfig.from_hf(raw), rngs=nnx.Rngs(0)), tmp_path / "m", raw)
    config = read_config(read_json(tmp_path / "m", "config.json"), tmp_path / "m")
    source = open_source(tmp_path / "m")
    abstract = nnx.split(nnx.eval_shape(lambda: Target(config, rngs=nnx.Rngs(0))))[1]
    plan = make_plan(parameters_of(abstract), name_tensors(source, config).tensors, rules_for(config))
    parameter = next(p for p in plan.pieces if p.path.endswith("experts.up_proj"))
    index = (slice(0, 8), slice(0, 64), slice(0, 64))
    gc.collect()
    tracemalloc.start()
    part = read_part(parameter, plan.pieces[parameter], index)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert part.nbytes * 4 == np.prod(parameter.shape) * 4
    assert peak < 1.5 * part.nbytes


@pytest.mark.parametrize("kind", ["qwen3_5_moe", "qwen3_next"])
def test_any_part_equals_the_part_of_the_whole(kind: str, checkpoint: Folder, tmp_path: Path) -> None:
    folder = checkpoint(kind)
    config = read_config(read_json(folder, "config.json"), folder)
    abstract = nnx.split(nnx.eval_shape(lambda: Target(config, rngs=nnx.Rngs(0))))[1]
    plan = make_plan(parameters_of(abstract), name_tensors(open_source(folder), config).tensors, rules_for(config))
    rng = np.random.default_rng(0)
    for parameter, found in plan.pieces.items():
        whole = read_part(parameter, found, tuple(slice(None) for _ in parameter.shape))
        for _ in range(4):
            cuts = [sorted(rng.choice(n + 1, 2, replace=False)) for n in parameter.shape]
            index = tuple(slice(int(a), int(b)) for a, b in cuts)
            assert np.array_equal(read_part(parameter, found, index), whole[index]), parameter.path


def test_stop_ids_are_the_union(checkpoint: Folder, tmp_path: Path) -> None:
    folder = variant(checkpoint("llama"), tmp_path / "x", tensors_of(checkpoint("llama")), eos_token_id=[7, -1])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7], "temperature": 0.6}))
    assert load_target(folder).stop_ids == (7, 9)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|end|>"}}))
    loaded = load_target(folder)
    assert loaded.stop_ids == (7, 9) and "'<|end|>' has no id" in loaded.notes[0]
    tokenizer = {"added_tokens": [{"id": 3, "content": "<|end|>"}], "model": {"vocab": {"plain": 4}}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    loaded = load_target(folder)
    assert loaded.stop_ids == (3, 7, 9) and not loaded.notes and loaded.generation_config["temperature"] == 0.6
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "plain"}))
    assert load_target(folder).stop_ids == (4, 7, 9)


def test_stop_ids_of_the_nested_config(checkpoint: Folder, tmp_path: Path) -> None:
    source = checkpoint("qwen3_5_vl")
    text = read_json(source, "config.json")["text_config"] | {"eos_token_id": 11}
    folder = variant(source, tmp_path / "x", tensors_of(source), text_config=text, eos_token_id=12)
    decoder = {"added_tokens_decoder": {"13": {"content": "<|im_end|>"}}, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(decoder))
    assert load_target(folder).stop_ids == (11, 12, 13)


def test_a_saved_mixture_of_qwen3_5_is_fused_as_on_the_hub(checkpoint: Folder, tmp_path: Path) -> None:
    folder = checkpoint("qwen3_5_moe")
    save_target(load_target(folder).model, tmp_path / "out", read_json(folder, "config.json"))
    found = open_source(tmp_path / "out").tensors
    assert found["model.layers.0.mlp.experts.gate_up_proj"].shape == (4, 48, 48)
    assert not any(".experts.0." in name for name in found)
