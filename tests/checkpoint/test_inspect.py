"""`eagle3 inspect`: what it says of targets and drafters, from headers alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from eagle3_jax.checkpoint.safetensors_file import TensorInfo
from eagle3_jax.cli import main
from eagle3_jax.inspect import layer_pattern
from tests.checkpoint.test_drafter import (
    EAGLE,
    LAYER,
    SPECFORGE,
    SPECULATORS,
    D,
    V,
    head_tensors,
    speculators_tensors,
    write,
)

Folder = Callable[[str], Path]
Capture = pytest.CaptureFixture[str]
DELTA, FULL = "linear_attention", "full_attention"
NINE_B = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen3_5_text", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248320,
        "max_position_embeddings": 262144, "eos_token_id": 248044, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "full_attention_interval": 4,
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]},
    },
}  # fmt: skip


def inspect(capsys: Capture, *arguments: object) -> dict[str, str]:
    """The lines that are printed, by label."""
    status = main(["inspect", *map(str, arguments)])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    return {line.split("  ")[0].strip(): line.split("  ", 1)[1].strip() for line in captured.out.splitlines()}


@pytest.mark.parametrize(
    ("types", "text"),
    [
        ([DELTA, DELTA, DELTA, FULL] * 8, "(3 delta + 1 attention) x 8"),
        ([FULL] * 5, "5 attention"),
        ([DELTA, DELTA, FULL], "2 delta + 1 attention"),
        ([FULL, DELTA, FULL, FULL], "1 attention + 1 delta + 2 attention"),
        ([DELTA, FULL] * 2, "(1 delta + 1 attention) x 2"),
    ],
    ids=["qwen3.5", "plain", "short", "odd", "pairs"],
)
def test_layer_patterns(types: list[str], text: str) -> None:
    assert layer_pattern(tuple(types)) == text


def test_a_config_alone(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "config.json").write_text(json.dumps(NINE_B))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [248046, 248044]}))
    lines = inspect(capsys, tmp_path)
    assert lines["target"] == "qwen3_5 (Qwen3_5ForConditionalGeneration)"
    assert lines["layers"] == "32: (3 delta + 1 attention) x 8"
    assert lines["parameters"] == "8.95 B" and lines["memory"] == "bfloat16 17.91 GB, float32 35.82 GB"
    assert lines["aux layers"].startswith("[2, 16, 29]") and lines["stop ids"] == "248044, 248046"
    assert lines["files"] == "no weights here" and lines["context"].startswith("262144 tokens, rope theta 1e+07")


def test_no_weight_is_read(checkpoint: Folder, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: TensorInfo) -> np.ndarray:
        raise AssertionError(f"{self.name} was read")

    monkeypatch.setattr(TensorInfo, "read", fail)
    lines = inspect(capsys, checkpoint("qwen3_5_vl"))
    assert "skipped 21 vision tensors" in lines["files"] and "63 tensors" in lines["files"]
    assert "too small for the default aux boundaries" in lines["aux layers"]


def test_a_mixture(checkpoint: Folder, capsys: Capture) -> None:
    lines = inspect(capsys, checkpoint("qwen3_next"))
    assert lines["feed-forward"] == "4 experts of 24, 2 a token, and a shared one of 24"
    assert "of them active for a token" in lines["parameters"]


def test_problems_follow_the_description(checkpoint: Folder, tmp_path: Path, capsys: Capture) -> None:
    config = json.loads((checkpoint("llama") / "config.json").read_text())
    write(tmp_path, config, {"model.norm.weight": np.zeros(48, np.float32)})
    assert main(["inspect", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out.startswith("target") and "missing: model.embed_tokens.weight" in captured.err


def test_specforge(tmp_path: Path, capsys: Capture) -> None:
    norms = {f"fc_norm.{i}.weight": np.ones(D, np.float32) for i in range(3)}
    lines = inspect(capsys, write(tmp_path, SPECFORGE | {"fc_norm": True}, head_tensors() | norms))
    assert lines["drafter"] == "specforge format: config.json has eagle_config" and lines["flags"] == "fc_norm"
    assert (
        lines["aux layers"] == "boundaries [1, 4, 8]; config.json has [0, 3, 7], which are layer outputs in this format"
    )
    assert "40 of 96 tokens, d2t holds offset ids" in lines["vocabulary"] and "checked with t2d" in lines["vocabulary"]


def test_eagle_and_speculators(tmp_path: Path, capsys: Capture) -> None:
    lines = inspect(capsys, write(tmp_path / "a", EAGLE, head_tensors()))
    assert lines["aux layers"].startswith("not in config.json") and lines["drafter"].startswith("eagle format")
    lines = inspect(capsys, write(tmp_path / "b", SPECULATORS, speculators_tensors(np.zeros((V, D), np.float32))))
    assert lines["flags"] == "norm_before_residual, norm_before_fc" and "which are boundaries" in lines["aux layers"]
    assert "with an embedding" in lines["files"]


def test_a_drafter_with_its_target(tmp_path: Path, capsys: Capture) -> None:
    target = LAYER | {"model_type": "qwen3", "num_hidden_layers": 10}
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps(target))
    folder = write(tmp_path / "head", EAGLE, head_tensors())
    lines = inspect(capsys, folder, "--target", tmp_path / "target")
    assert lines["aux layers"].startswith("not in config.json: [2, 5, 7] by default") and lines["parameters"]
    (tmp_path / "target" / "config.json").write_text(json.dumps(target | {"vocab_size": 97}))
    assert main(["inspect", str(folder), "--target", str(tmp_path / "target")]) == 2
    assert "vocab_size 96, the target has 97" in capsys.readouterr().err
