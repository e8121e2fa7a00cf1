"""EAGLE-3 heads of every published format, and what may be wrong with one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from eagle3_jax.checkpoint import CheckpointError, LoadedDrafter, load_drafter, load_target, save_specforge
from eagle3_jax.checkpoint.formats import examine
from eagle3_jax.checkpoint.safetensors_file import Outgoing, write_file
from eagle3_jax.checkpoint.source import SINGLE, open_source, read_json
from eagle3_jax.checkpoint.vocab_map import as_offsets, read_vocab_map
from eagle3_jax.config import RopeConfig, TargetConfig
from eagle3_jax.drafters.eagle3 import Eagle3
from eagle3_jax.errors import ConfigError
from eagle3_jax.sharding import make_mesh

D, F, N, K, H, V, U, L = 32, 48, 4, 2, 8, 96, 40, 10
TARGET = TargetConfig(
    "qwen3", V, D, 64, L, N, K, H, ("full_attention",) * L, RopeConfig(1e6, H), max_position_embeddings=256
)
TOKENS = np.sort(np.random.default_rng(0).choice(V, U, replace=False))
LAYER: dict[str, Any] = {
    "hidden_size": D, "intermediate_size": F, "num_attention_heads": N, "num_key_value_heads": K, "head_dim": H,
    "num_hidden_layers": 1, "vocab_size": V, "rms_norm_eps": 1e-5, "max_position_embeddings": 256,
    "model_type": "llama", "rope_theta": 1e6,
}  # fmt: skip
SPECFORGE = {
    **LAYER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": U,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 7], "use_aux_hidden_state": True},
}  # fmt: skip
EAGLE = {**LAYER, "architectures": ["LlamaForCausalLM"], "draft_vocab_size": U, "max_position_embeddings": 64}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": U,
    "transformer_layer_config": {**LAYER, "model_type": "qwen3"}, "eagle_aux_hidden_state_layer_ids": [1, 4, 8],
    "norm_before_residual": True, "norm_before_fc": True, "target_hidden_size": None,
}  # fmt: skip


def head_tensors(prefix: str = "midlayer.", aux: int = 3, width: int = D) -> dict[str, np.ndarray]:
    """Random tensors as EAGLE, SpecForge and AngelSlim name them."""
    shapes = {
        "fc.weight": (D, aux * width), "norm.weight": (D,), "lm_head.weight": (U, D),
        **{f"{prefix}{norm}.weight": (D,) for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
        f"{prefix}self_attn.q_proj.weight": (N * H, 2 * D), f"{prefix}self_attn.k_proj.weight": (K * H, 2 * D),
        f"{prefix}self_attn.v_proj.weight": (K * H, 2 * D), f"{prefix}self_attn.o_proj.weight": (D, N * H),
        f"{prefix}mlp.gate_proj.weight": (F, D), f"{prefix}mlp.up_proj.weight": (F, D),
        f"{prefix}mlp.down_proj.weight": (D, F),
    }  # fmt: skip
    rng = np.random.default_rng(1)
    tables = dict(zip(("d2t", "t2d"), as_offsets(TOKENS, V), strict=True))
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()} | tables


def speculators_tensors(embed: np.ndarray) -> dict[str, np.ndarray]:
    more = {
        "embed_tokens.weight": embed, "input_norm.weight": np.ones(3 * D, np.float32),
        "layers.0.self_attn.q_norm.weight": np.ones(H, np.float32),
        "layers.0.self_attn.k_norm.weight": np.ones(H, np.float32),
    }  # fmt: skip
    return head_tensors("layers.0.") | more


def write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    write_file(folder / SINGLE, {n: Outgoing(a.dtype, a.shape, lambda a=a: a) for n, a in tensors.items()})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def problems(folder: Path, target: TargetConfig = TARGET, **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_drafter(folder, target, **options)
    return "\n".join(caught.value.problems)


def noted(loaded: LoadedDrafter, text: str) -> bool:
    return any(text in note for note in loaded.notes)


def test_specforge(tmp_path: Path) -> None:
    tensors = head_tensors()
    loaded = load_drafter(write(tmp_path, SPECFORGE, tensors), TARGET)
    assert loaded.format == "specforge" and noted(loaded, "eagle_config")
    assert loaded.config.aux_layers == (1, 4, 8)  # layer outputs [0, 3, 7] are boundaries one higher
    assert np.array_equal(loaded.model.d2t[...], TOKENS) and loaded.model.d2t[...].dtype == jnp.int32
    assert np.array_equal(
        loaded.model.layers[0].self_attn.q_proj.kernel[...], tensors["midlayer.self_attn.q_proj.weight"].T
    )
    assert np.array_equal(loaded.model.fc.kernel[...], tensors["fc.weight"].T)
    assert loaded.config.rope.theta == 1e6 and not loaded.config.own_embedding


def test_original_eagle_as_a_torch_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(EAGLE))
    tensors = head_tensors()
    half = {n: torch.tensor(a).half() if a.dtype == np.float32 else torch.tensor(a) for n, a in tensors.items()}
    torch.save(half, tmp_path / "pytorch_model.bin")
    loaded = load_drafter(tmp_path, TARGET, dtype="float32")
    assert loaded.format == "eagle" and loaded.config.aux_layers == (2, 5, 7)
    assert noted(loaded, "the default boundaries [2, 5, 7] are used") and noted(loaded, "theta 10000 whatever")
    assert noted(loaded, "raised from 64 to the target's 256") and loaded.config.max_position_embeddings == 256
    assert np.array_equal(loaded.model.fc.kernel[...], tensors["fc.weight"].T.astype(np.float16))
    assert load_drafter(tmp_path, TARGET).model.fc.kernel[...].dtype == jnp.bfloat16  # its half precision here


def test_speculators(tmp_path: Path) -> None:
    embed = np.random.default_rng(2).standard_normal((V, D)).astype(np.float32)
    folder = write(tmp_path, SPECULATORS, speculators_tensors(embed))
    loaded = load_drafter(folder, TARGET, embed=jnp.asarray(embed, jnp.bfloat16))
    c = loaded.config
    assert loaded.format == "speculators" and c.aux_layers == (1, 4, 8)
    assert c.norm_before_residual and c.norm_before_fc and c.qk_norm and not c.fc_norm and not c.norm_output
    assert len(loaded.notes) == 1  # the embedding is the target's, rounded
    assert noted(load_drafter(folder, TARGET, embed=jnp.asarray(embed + 1)), "embed_tokens differs from the target's")
    assert noted(load_drafter(folder, TARGET), "not compared")


def test_a_trained_embedding_or_one_of_another_width_is_the_heads_own(tmp_path: Path) -> None:
    embed = np.random.default_rng(2).standard_normal((V, D)).astype(np.float32)
    config = SPECULATORS | {"embed_requires_grad": True}
    trained = load_drafter(write(tmp_path / "a", config, speculators_tensors(embed)), TARGET)
    assert trained.config.own_embedding and np.array_equal(trained.model.embed_tokens.weight[...], embed)
    wide = dataclasses.replace(TARGET, hidden_size=2 * D)
    tensors = head_tensors(width=2 * D)
    found = problems(write(tmp_path / "b", SPECFORGE, tensors), wide)
    assert found == f"missing: embed_tokens.weight, expected [{V}, {D}]"
    loaded = load_drafter(write(tmp_path / "b", SPECFORGE, tensors | {"embed_tokens.weight": embed}), wide)
    assert loaded.config.own_embedding and loaded.config.target_hidden_size == 2 * D


def test_eagle_3_1_flags_and_later_layers(tmp_path: Path) -> None:
    config = SPECULATORS | {"norm_before_fc": False, "fc_norm": True, "norm_output": True}
    config["transformer_layer_config"] = {**LAYER, "num_hidden_layers": 2}
    tensors = head_tensors("layers.0.") | {f"fc_norm.{i}.weight": np.full(D, i, np.float32) for i in range(3)}
    for name, array in head_tensors("layers.1.").items():
        if name.startswith("layers.1.") and "hidden_norm" not in name:
            tensors[name] = (
                array[:, :D] if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")) else array
            )
    loaded = load_drafter(write(tmp_path, config, tensors), TARGET)
    assert loaded.config.fc_norm and loaded.config.norm_output and loaded.config.num_layers == 2
    assert float(loaded.model.fc_norm[2].weight[...][0]) == 2.0


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"architectures": ["Eagle3LlamaForCausalLM"]}, "angelslim"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "specforge"),
        ({"architectures": ["LlamaForCausalLM"], "eagle_config": {}}, "specforge"),
        ({"architectures": ["LlamaForCausalLM"]}, "eagle"),
        ({"transformer_layer_config": {}}, "speculators"),
    ],
)
def test_recognition_says_why(config: dict[str, Any], expected: str, tmp_path: Path) -> None:
    found = examine(config, open_source(write(tmp_path, config, head_tensors())))
    assert found.format.name == expected and found.why


def test_every_problem_is_told_at_once(tmp_path: Path) -> None:
    tensors = head_tensors(aux=2) | {"surprise": np.zeros(3, np.float32)}
    tensors["lm_head.weight"] = np.zeros((U + 1, D), np.float32)
    tensors["t2d"][:] = False
    del tensors["midlayer.mlp.up_proj.weight"]
    config = SPECFORGE | {"vocab_size": V + 1, "hidden_act": "gelu"}
    found = problems(write(tmp_path, config, tensors))
    expected = [
        "hidden_act 'gelu'", f"vocab_size {V + 1}, the target has {V}",
        "fc.weight takes 2 aux states, the config names 3",
        f"t2d marks 0 tokens, the draft vocabulary has {U}", "wrong shape: lm_head.weight", "wrong shape: fc.weight",
        "missing: midlayer.mlp.up_proj.weight", "unknown: surprise",
    ]  # fmt: skip
    assert [text for text in expected if text not in found] == []


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["DFlashDraftModel"]}, "architecture DFlashDraftModel is not supported"),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {}}, "DFlashDraftModel drafter, not an EAGLE-3 head"),
        ({"speculators_model_type": "peagle"}, "peagle drafter, not an EAGLE-3 head"),
        ({"architectures": ["Qwen3MoeForCausalLMEagle3"]}, "architecture Qwen3MoeForCausalLMEagle3 is not supported"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state = False is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"target_hidden_size": 64}, "target_hidden_size 64, the target has 32"),
        ({"intermediate_size": None}, "'intermediate_size' is missing"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 10]}}, "[11] are outside the boundaries 0..10"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert message in problems(write(tmp_path, SPECFORGE | config, head_tensors()))


@pytest.mark.parametrize("config", [SPECFORGE, SPECULATORS], ids=["specforge", "speculators"])
def test_a_head_does_not_inherit_how_its_target_is_quantised(config: dict[str, Any], tmp_path: Path) -> None:
    """Configs of heads are often made from their targets': the tensors say what is true."""
    leaked = config | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    prefix = "midlayer." if config is SPECFORGE else "layers.0."
    tensors = head_tensors(prefix)
    if config is SPECULATORS:
        norms = {"input_norm": 3 * D, "layers.0.self_attn.q_norm": H, "layers.0.self_attn.k_norm": H}
        tensors |= {f"{name}.weight": np.ones(size, np.float32) for name, size in norms.items()}
    head = load_drafter(write(tmp_path / "head", leaked, tensors), TARGET)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(nnx.state(head.model, nnx.Param)))
    assert not [path for path, _ in nnx.to_flat_state(nnx.state(head.model)) if str(path[-1]).endswith("_scale")]
    assert any("quantization_config in config.json is not the head's" in note for note in head.notes)
    name = f"{prefix}mlp.up_proj.weight"
    tensors[name] = tensors[name].astype(jnp.float8_e4m3fn)
    found = problems(write(tmp_path / "fp8", leaked, tensors))
    assert f"a quantised drafter is not supported: {name} is float8_e4m3fn" in found


def test_target_and_drafter_folders_are_not_mistaken(tmp_path: Path) -> None:
    target = write(tmp_path / "target", {"model_type": "llama"}, {"model.norm.weight": np.zeros(D, np.float32)})
    found = problems(target)
    assert "no fc.weight: this is not the folder of an EAGLE-3 head" in found and "unknown" not in found
    with pytest.raises(ConfigError, match="this is a drafter, not a target"):
        load_target(write(tmp_path / "head", SPECFORGE, head_tensors()))


def test_heads_of_eagle_1_are_refused(tmp_path: Path) -> None:
    tensors = head_tensors()
    del tensors["midlayer.hidden_norm.weight"]
    assert "EAGLE-1 or EAGLE-2" in problems(write(tmp_path, EAGLE, tensors))


def test_a_small_target_needs_its_aux_layers_named(tmp_path: Path) -> None:
    small = dataclasses.replace(TARGET, num_layers=6, layer_types=TARGET.layer_types[:6])
    folder = write(tmp_path, EAGLE, head_tensors())
    assert "too small for the default aux boundaries" in problems(folder, small)
    loaded = load_drafter(folder, small, config_overrides={"aux_layers": (1, 3, 6), "rope_theta": 1e4})
    assert loaded.config.aux_layers == (1, 3, 6) and loaded.config.rope.theta == 1e4
    with pytest.raises(CheckpointError, match="config_overrides aux: not fields"):
        load_drafter(folder, TARGET, config_overrides={"aux": ()})


def test_ids_that_fit_the_other_convention_are_noted(tmp_path: Path) -> None:
    converted = SPECULATORS | {"eagle_aux_hidden_state_layer_ids": [1, 4, 6]}
    embed = np.zeros((V, D), np.float32)
    loaded = load_drafter(write(tmp_path / "a", converted, speculators_tensors(embed)), TARGET)
    assert loaded.config.aux_layers == (1, 4, 6) and noted(loaded, "should be [2, 5, 7]")
    boundaries = SPECFORGE | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 5, 7]}}
    loaded = load_drafter(write(tmp_path / "b", boundaries, head_tensors()), TARGET)
    assert loaded.config.aux_layers == (3, 6, 8) and noted(loaded, "also the usual boundaries")


def test_both_spellings_of_rope_are_read(tmp_path: Path) -> None:
    flat = {key: value for key, value in SPECFORGE.items() if key != "rope_theta"}
    assert noted(load_drafter(write(tmp_path / "a", flat, head_tensors()), TARGET), "10000 is used")
    new = flat | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    assert load_drafter(write(tmp_path / "b", new, head_tensors()), TARGET).config.rope.theta == 5e5
    mrope = SPECFORGE | {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    loaded = load_drafter(write(tmp_path / "c", mrope, head_tensors()), TARGET)
    assert loaded.config.rope.mrope_section == () and noted(loaded, "one-dimensional")


# --- vocabulary map ---


def test_offsets_and_absolute_ids_are_told_apart() -> None:
    offsets, t2d = as_offsets(TOKENS, V)
    for d2t, how in ((offsets, "offset"), (TOKENS.astype(np.int64), "absolute")):
        found = read_vocab_map(d2t, t2d, U, V)
        assert found.how == how and np.array_equal(found.targets, TOKENS) and not found.problems
        without = read_vocab_map(d2t, None, U, V)
        assert np.array_equal(without.targets, TOKENS) and not without.problems


def test_identity_maps() -> None:
    for d2t, t2d in ((None, None), (np.zeros(V, np.int64), np.ones(V, bool)), (np.arange(V), np.ones(V, bool))):
        found = read_vocab_map(d2t, t2d, V, V)
        assert np.array_equal(found.targets, np.arange(V)) and not found.problems


def test_an_ambiguous_map_needs_a_word() -> None:
    table = np.arange(0, 2 * U, 2)[: U // 2]
    assert "say vocab_map=" in read_vocab_map(table, None, U // 2, V).problems[0]
    assert np.array_equal(read_vocab_map(table, None, U // 2, V, "absolute").targets, table)
    assert np.array_equal(read_vocab_map(table, None, U // 2, V, "offset").targets, table + np.arange(U // 2))


@pytest.mark.parametrize(
    ("d2t", "t2d", "message"),
    [
        (None, None, "missing: d2t"),
        (np.zeros(U - 1, np.int64), None, f"expected [{U}], found [{U - 1}]"),
        (np.zeros(U), None, "expected integers, found float64"),
        (np.full(U, V), None, "neither a table of offsets"),
        (np.zeros(U, np.int64), np.zeros(V + 1, bool), f"expected [{V}], the target's vocabulary"),
        (np.zeros(U, np.int64), np.arange(V) >= V - U, f"neither a table of offsets ({U} ids are not in t2d)"),
    ],
)
def test_faults_of_a_map(d2t: np.ndarray | None, t2d: np.ndarray | None, message: str) -> None:
    assert message in read_vocab_map(d2t, t2d, U, V).problems[0]


# --- writing ---


def test_a_written_head_reads_back_equal(tmp_path: Path) -> None:
    config = SPECFORGE | {"fc_norm": True, "norm_output": True, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    norms = {f"fc_norm.{i}.weight": np.full(D, i, np.float32) for i in range(3)}
    first = load_drafter(write(tmp_path / "a", config, head_tensors() | norms), TARGET)
    save_specforge(first.model, first.config, tmp_path / "b", extra={"eos_token_id": 5})
    second = load_drafter(tmp_path / "b", TARGET)
    assert second.config == first.config and second.format == "specforge"
    same = jax.tree.map(lambda a, b: bool((a == b).all()), nnx.state(first.model), nnx.state(second.model))
    assert all(jax.tree.leaves(same))
    written, saved = open_source(tmp_path / "b").tensors, head_tensors() | norms
    assert written.keys() == saved.keys()
    assert all(np.array_equal(written[name].read(), array) for name, array in saved.items())
    assert written["d2t"].dtype == np.int64 and written["t2d"].dtype == np.bool_
    table = read_json(tmp_path / "b", "config.json")
    assert table["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [0, 3, 7], "use_aux_hidden_state": True}
    assert table["rope_theta"] == table["rope_parameters"]["rope_theta"] == 1e6 and table["eos_token_id"] == 5
    assert table["architectures"] == ["LlamaForCausalLMEagle3"] and table["fc_norm"] and table["norm_output"]


def test_a_written_head_in_bfloat16(tmp_path: Path) -> None:
    loaded = load_drafter(write(tmp_path / "a", SPECFORGE, head_tensors()), TARGET)
    save_specforge(loaded.model, loaded.config, tmp_path / "b", dtype=jnp.bfloat16)
    assert read_json(tmp_path / "b", "config.json")["dtype"] == "bfloat16"
    assert load_drafter(tmp_path / "b", TARGET).model.fc.kernel[...].dtype == jnp.bfloat16


def test_what_specforge_cannot_say_is_refused_whole(tmp_path: Path) -> None:
    loaded = load_drafter(write(tmp_path / "a", SPECULATORS, speculators_tensors(np.zeros((V, D), np.float32))), TARGET)
    config = dataclasses.replace(loaded.config, aux_layers=(0, 4, 8), num_layers=2)
    with pytest.raises(ConfigError) as caught:
        save_specforge(loaded.model, config, tmp_path / "b")
    words = ("norm_before_residual", "norm_before_fc", "q/k norms", "2 layers", "aux boundary 0")
    assert all(word in str(caught.value) for word in words) and not (tmp_path / "b").exists()


def test_a_sharded_head_is_the_same(tmp_path: Path) -> None:
    folder = write(tmp_path, SPECFORGE, head_tensors())
    plain = load_drafter(folder, TARGET).model
    mesh = load_drafter(folder, TARGET, mesh=make_mesh(tensor=2)).model
    same = jax.tree.map(lambda a, b: np.array_equal(np.asarray(a), np.asarray(b)), nnx.state(plain), nnx.state(mesh))
    assert all(jax.tree.leaves(same))
    assert all(len(x.sharding.device_set) == 2 for x in jax.tree.leaves(nnx.state(mesh)))


def test_a_head_for_the_whole_vocabulary_needs_no_map(tmp_path: Path) -> None:
    tensors = {n: a for n, a in head_tensors().items() if n not in ("d2t", "t2d")}
    tensors["lm_head.weight"] = np.ones((V, D), np.float32)
    loaded = load_drafter(write(tmp_path, SPECFORGE | {"draft_vocab_size": None}, tensors), TARGET)
    assert isinstance(loaded.model, Eagle3) and np.array_equal(loaded.model.d2t[...], np.arange(V))
