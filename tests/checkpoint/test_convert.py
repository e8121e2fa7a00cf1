"""`eagle3 convert`, from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from eagle3_jax.checkpoint.formats import read_head
from eagle3_jax.checkpoint.safetensors_file import Outgoing, write_file
from eagle3_jax.checkpoint.source import SINGLE, read_json
from eagle3_jax.checkpoint.vocab_map import as_offsets
from eagle3_jax.cli import main
from tests.checkpoint import heads
from tests.checkpoint.test_drafter import LAYER, SPECFORGE, D, V, head_tensors, write

Capture = pytest.CaptureFixture[str]
IDS = heads.IDS
# SpecForge's configuration for Qwen3-235B-A22B, but for the hidden size, which is cut from 4096 to keep the test small.
QWEN3_235B = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "eagle_config": {IDS: [1, 46, 90], "use_aux_hidden_state": True},
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "draft_vocab_size": 32000,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 16, "initializer_range": 0.02,
    "intermediate_size": 24576, "max_position_embeddings": 40960, "model_type": "llama", "num_attention_heads": 64,
    "num_hidden_layers": 1, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
    "use_cache": True, "vocab_size": 151936,
}  # fmt: skip


def convert(capsys: Capture, *arguments: object) -> dict[str, str]:
    """The lines that are printed, by label; warnings are joined."""
    assert main(["convert", *map(str, arguments)]) == 0, capsys.readouterr().err
    lines: dict[str, str] = {}
    for line in capsys.readouterr().out.splitlines():
        label, text = (part.strip() for part in line.split("  ", 1))
        lines[label] = f"{lines[label]} | {text}" if label in lines else text
    return lines


def refused(capsys: Capture, *arguments: object) -> str:
    assert main(["convert", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def target_folder(folder: Path, **changes: Any) -> Path:
    folder.mkdir()
    config = LAYER | {"model_type": "qwen3", "num_hidden_layers": 10, "architectures": ["Qwen3ForCausalLM"]} | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_qwen3_235b(folder: Path) -> Path:
    c = QWEN3_235B
    d, f, q, kv = c["hidden_size"], c["intermediate_size"], 64 * 128, 4 * 128
    tokens = np.sort(np.random.default_rng(0).choice(c["vocab_size"], c["draft_vocab_size"], replace=False))
    shapes = {
        "fc.weight": (d, 3 * d), "norm.weight": (d,), "lm_head.weight": (c["draft_vocab_size"], d),
        **{f"midlayer.{n}.weight": (d,) for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
        "midlayer.self_attn.q_proj.weight": (q, 2 * d), "midlayer.self_attn.k_proj.weight": (kv, 2 * d),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * d), "midlayer.self_attn.o_proj.weight": (d, q),
        "midlayer.mlp.gate_proj.weight": (f, d), "midlayer.mlp.up_proj.weight": (f, d),
        "midlayer.mlp.down_proj.weight": (d, f),
    }  # fmt: skip
    rng = np.random.default_rng(1)
    tensors = {n: rng.standard_normal(s, np.float32).astype(ml_dtypes.bfloat16) for n, s in shapes.items()}
    tensors |= dict(zip(("d2t", "t2d"), as_offsets(tokens, c["vocab_size"]), strict=True))
    return write(folder, c, tensors)


@pytest.mark.parametrize(
    ("choice", "ids"),
    [
        ((), [2, 47, 91]),
        (("--aux-convention", "keep"), [1, 46, 90]),
        (("--aux-convention", "boundary"), [1, 46, 90]),
        (("--aux-layers", "3,47,91"), [3, 47, 91]),
    ],
    ids=["auto", "keep", "boundary", "named"],
)
def test_qwen3_235b(choice: tuple[str, ...], ids: list[int], tmp_path: Path, capsys: Capture) -> None:
    source = write_qwen3_235b(tmp_path / "lmsys")
    destination = tmp_path / "speculators"
    lines = convert(
        capsys, source, destination, "--to", "speculators", "--verifier", "Qwen/Qwen3-235B-A22B", *choice
    )  # fmt: skip
    config = read_json(destination, "config.json")
    assert config["architectures"] == ["Eagle3Speculator"] and config["speculators_model_type"] == "eagle3"
    assert config[IDS] == ids and config["draft_vocab_size"] == 32000 and config["norm_before_residual"] is False
    assert config["speculators_config"]["verifier"]["name_or_path"] == "Qwen/Qwen3-235B-A22B"
    assert config["speculators_config"]["algorithm"] == "eagle3"
    layer = config["transformer_layer_config"]
    same = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    more = ("rms_norm_eps", "rope_theta", "max_position_embeddings", "bos_token_id", "eos_token_id", "model_type")
    assert {k: layer[k] for k in same + more} == {k: QWEN3_235B[k] for k in same + more}
    assert "eagle_config" not in config and "hidden_size" not in config
    before, after = heads.contents(source), heads.contents(destination)
    assert {n.replace("midlayer.", "layers.0."): t for n, t in before.items()} == after
    assert f"{ids} in DST, boundaries in speculators format" in lines["aux layers"]
    assert "SRC has [1, 46, 90], layer outputs in specforge format" in lines["aux layers"]
    assert all(word in lines["aux layers"] for word in choice)
    assert lines["verifier"] == "Qwen/Qwen3-235B-A22B" and lines["weights"] == "unchanged, bfloat16"


def test_a_speculators_folder_with_layer_outputs_is_warned_of(tmp_path: Path, capsys: Capture) -> None:
    source, wrong, right = (tmp_path / name for name in ("lmsys", "wrong", "right"))
    write_qwen3_235b(source)
    convert(capsys, source, wrong, "--to", "speculators", "--verifier", "t", "--aux-convention", "keep")
    lines = convert(capsys, wrong, tmp_path / "a", "--to", "native")
    assert "look like layer outputs, (1, L//2-1, L-4) of L = 94" in lines["warning"]
    assert "should be [2, 47, 91]" in lines["warning"]
    lines = convert(capsys, wrong, right, "--to", "speculators", "--aux-convention", "output")
    assert "warning" not in lines and read_json(right, "config.json")[IDS] == [2, 47, 91]
    lines = convert(capsys, wrong, tmp_path / "b", "--to", "speculators", "--aux-layers", "2,47,91")
    assert "warning" not in lines and read_json(tmp_path / "b", "config.json")[IDS] == [2, 47, 91]
    assert main(["inspect", str(wrong)]) == 0
    assert "should be [2, 47, 91]" in capsys.readouterr().out
    convert(capsys, right, tmp_path / "back", "--to", "specforge")
    assert read_json(tmp_path / "back", "config.json")["eagle_config"][IDS] == [1, 46, 90]
    assert heads.contents(tmp_path / "back") == heads.contents(source)


def test_native_records_the_source(tmp_path: Path, capsys: Capture) -> None:
    source = heads.make("specforge", tmp_path / "a")
    convert(capsys, source, tmp_path / "b", "--to", "native", "--verifier", "owner/target")
    config = read_json(tmp_path / "b", "config.json")
    assert config["aux_layers"] == [1, 4, 8] and config["verifier"] == "owner/target"
    assert config["source"]["aux_ids"] == [0, 3, 7] and config["source"]["aux_convention"] == "output"
    assert main(["inspect", str(tmp_path / "b")]) == 0
    out = capsys.readouterr().out
    assert "native format" in out and "specforge format, aux ids (0, 3, 7)" in out


def test_with_its_target_defaults_are_filled_and_faults_found(tmp_path: Path, capsys: Capture) -> None:
    target = target_folder(tmp_path / "target", max_position_embeddings=4096, rope_theta=5e5)
    source = heads.make("eagle", tmp_path / "a")
    lines = convert(capsys, source, tmp_path / "b", "--to", "speculators", "--target", target, "--verifier", "name")
    config = read_json(tmp_path / "b", "config.json")
    assert config[IDS] == [2, 5, 7] and config["transformer_layer_config"]["max_position_embeddings"] == 4096
    assert "raised from 64 to the target's 4096" in lines["note"] and "the target's 500000" in lines["warning"]
    verifier = config["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": "name", "architectures": ["Qwen3ForCausalLM"]}
    message = refused(capsys, source, tmp_path / "c", "--to", "speculators", "--verifier", "name")
    assert "aux layers that are not known" in message
    other = target_folder(tmp_path / "other", vocab_size=V + 1)
    message = refused(capsys, source, tmp_path / "c", "--to", "native", "--target", other)
    assert f"vocab_size {V}, the target has {V + 1}: made for another target" in message


def test_its_embedding_is_compared_with_the_targets(tmp_path: Path, capsys: Capture) -> None:
    source = heads.make("speculators, llama", tmp_path / "a")
    tensors = head_tensors("layers.0.") | {"embed_tokens.weight": heads.EMBEDDING}
    write(source, read_json(source, "config.json"), tensors)
    target = target_folder(tmp_path / "target")
    same = {"model.embed_tokens.weight": Outgoing(np.dtype(np.float32), (V, D), lambda: heads.EMBEDDING)}
    write_file(target / SINGLE, same)
    assert "warning" not in convert(capsys, source, tmp_path / "b", "--to", "native", "--target", target)
    write_file(target / SINGLE, {n: Outgoing(t.dtype, t.shape, lambda: -heads.EMBEDDING) for n, t in same.items()})
    lines = convert(capsys, source, tmp_path / "c", "--to", "native", "--target", target)
    assert "embed_tokens differs from the target's (relative error 2)" in lines["warning"]
    assert main(["inspect", str(source), "--target", str(target)]) == 0
    assert "embed_tokens differs" in capsys.readouterr().out


def test_unknown_keys_are_dropped_only_when_told(tmp_path: Path, capsys: Capture) -> None:
    source = write(tmp_path / "a", SPECFORGE | {"logit_scale": 2.0, "flavour": "x"}, head_tensors())
    common = ("--to", "speculators", "--verifier", "t")
    message = refused(capsys, source, tmp_path / "b", *common, "--drop-keys", "flavour")
    assert "the key logit_scale of config.json" in message and "flavour" not in message
    convert(capsys, source, tmp_path / "b", *common, "--drop-keys", "flavour,logit_scale")
    convert(capsys, source, tmp_path / "c", "--to", "native")  # keeps the whole config.json


def test_a_destination_is_never_half_written_nor_lost(tmp_path: Path, capsys: Capture) -> None:
    source = heads.make("specforge", tmp_path / "a")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "precious").write_text("x")
    assert "--overwrite" in refused(capsys, source, tmp_path / "taken", "--to", "native")
    assert "DST is SRC" in refused(capsys, source, source, "--to", "native", "--overwrite")
    assert "that SRC is in" in refused(capsys, source, tmp_path, "--to", "native", "--overwrite")
    (tmp_path / "file").write_text("x")
    assert "not a folder" in refused(capsys, source, tmp_path / "file", "--to", "native", "--overwrite")
    convert(capsys, source, tmp_path / "taken", "--to", "native", "--overwrite")
    assert (tmp_path / "taken" / "precious").exists() and read_head(tmp_path / "taken").format == "native"
    (tmp_path / "link").symlink_to(tmp_path / "taken")
    assert "not a folder" in refused(capsys, source, tmp_path / "link", "--to", "native", "--overwrite")
    assert "2 layers" in refused(
        capsys, heads.make("speculators, two layers", tmp_path / "two"), tmp_path / "new", "--to", "eagle"
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "file", "link", "taken", "two"]


@pytest.mark.parametrize("arguments", [(), ("--to", "onnx"), ("--to", "native", "--aux-layers", "1,x")])
def test_wrong_arguments(arguments: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["convert", "src", str(tmp_path / "dst"), *arguments])
    assert caught.value.code == 2
