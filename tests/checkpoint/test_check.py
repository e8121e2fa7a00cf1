"""`eagle3 check`: agreement with transformers, and that a divergence is named where it begins."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from eagle3_jax.check import relative_error
from eagle3_jax.checkpoint.safetensors_file import Outgoing, write_file
from eagle3_jax.checkpoint.source import SINGLE, open_source, read_json
from eagle3_jax.cli import main

Folder = Callable[[str], Path]
Capture = pytest.CaptureFixture[str]


def corrupted(source: Path, folder: Path, name: str) -> Path:
    """A copy of `source` in which one tensor is not what it was."""
    folder.mkdir()
    tensors = {info.name: np.array(info.read()) for info in open_source(source)}
    tensors[name] = np.roll(tensors[name], 1, axis=0)
    write_file(folder / SINGLE, {n: Outgoing(a.dtype, a.shape, lambda a=a: a) for n, a in tensors.items()})
    (folder / "config.json").write_text(json.dumps(read_json(source, "config.json")))
    return folder


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_moe"])
def test_a_good_checkpoint_agrees(kind: str, checkpoint: Folder, capsys: Capture) -> None:
    assert main(["check", str(checkpoint(kind)), "--tolerance", "1e-5"]) == 0
    out = capsys.readouterr().out
    assert "agrees with transformers" in out and "<--" not in out and "the same at 24 of 24 positions" in out


@pytest.mark.parametrize(
    ("tensor", "named"),
    [
        ("model.layers.1.linear_attn.out_proj.weight", "first in layer 1 (delta rule)"),
        ("model.layers.2.mlp.down_proj.weight", "first in layer 2 (attention)"),
        ("model.embed_tokens.weight", "first in token embedding"),
        ("model.norm.weight", "first in final norm"),
        ("lm_head.weight", "first in output projection"),
    ],
)
def test_a_corrupted_tensor_is_named_by_layer(
    tensor: str, named: str, checkpoint: Folder, tmp_path: Path, capsys: Capture
) -> None:
    good = checkpoint("qwen3_5")
    bad = corrupted(good, tmp_path / "bad", tensor)
    assert main(["check", str(bad), "--reference", str(good), "--token-ids", "1,2,3,4,5,6,7,8"]) == 1
    assert named in capsys.readouterr().out


def test_the_first_layers_alone(checkpoint: Folder, capsys: Capture) -> None:
    arguments = ["check", str(checkpoint("qwen3_5")), "--num-layers", "2", "--token-ids", "5,6,7,8"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "layer 1" in out and "layer 2" not in out


def test_a_text_is_tokenized(checkpoint: Folder, tmp_path: Path, capsys: Capture) -> None:
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "copy")
    tokenizer = Tokenizer(WordLevel({"<unk>": 0, "fox": 1, "dog": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    assert main(["check", str(folder), "--text", "fox dog fox"]) == 0
    assert "of 3 positions" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "fox"], "has no tokenizer"), (["--token-ids", "1,x"], "numbers separated by commas"),
        (["--token-ids", "128"], "between 0 and 127"), (["--num-layers", "9"], "the target has 2 layers"),
    ],
)  # fmt: skip
def test_bad_arguments(arguments: list[str], message: str, checkpoint: Folder, capsys: Capture) -> None:
    assert main(["check", str(checkpoint("llama")), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_models_of_different_depth(checkpoint: Folder, capsys: Capture) -> None:
    folders = [str(checkpoint("llama")), "--reference", str(checkpoint("qwen3_5"))]
    assert main(["check", *folders, "--token-ids", "1,2"]) == 2
    assert "2 layers here, 3 in the reference" in capsys.readouterr().err


def test_without_torch_it_says_what_to_install(
    checkpoint: Folder, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["check", str(checkpoint("llama"))]) == 2
    assert "needs torch: pip install 'eagle3-jax[test]'" in capsys.readouterr().err


def test_nan_and_other_shapes_are_divergences() -> None:
    one = np.ones(3)
    assert relative_error(one, one * np.nan) == relative_error(one * np.nan, one) == float("inf")
    assert relative_error(one, np.ones(4)) == float("inf") and relative_error(one, 2 * one) == 0.5
