"""Generating and storing features with one model spread over two processes: as one process does it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from eagle3_jax.checkpoint import save_specforge
from eagle3_jax.cli import main
from tests.helpers import assert_close
from tests.processes import Processes
from tests.train.folders import CONFIG, save_small_target
from tests.train.models import DRAFT, make_drafter
from train.data.shards import FEATURES, open_folder, read_shard


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, its head, and rows whose features are wanted."""
    folder = tmp_path_factory.mktemp("inputs")
    save_small_target(folder / "target")
    sizes = {"vocab_size": CONFIG["vocab_size"], "draft_vocab_size": 100}
    save_specforge(make_drafter(**sizes), dataclasses.replace(DRAFT, **sizes), folder / "head")
    rows = [{"input_ids": list(range(1, 2 * n)), "loss_mask": [0] + [1] * (2 * n - 2)} for n in (3, 5, 8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare = ["data", "prepare", str(folder / "rows.jsonl"), "--target", str(folder / "target")]
    assert main([*prepare, "--output", str(folder / "rows")]) == 0
    return folder


def commands(inputs: Path, output: Path, devices: int) -> list[list[str]]:
    target, head = ["--target", str(inputs / "target")], ["--draft", str(inputs / "head"), "--k", "1"]
    sampling = ["--temperature", "0.8", "--seed", "3", "--max-tokens", "12", "--max-model-len", "64"]
    text = ["generate", "the cat", "--raw", "--model", str(inputs / "target"), *head, "--tp", str(devices), *sampling]
    spread = ["--tensor-parallel-size", str(devices), "--output", str(output / "features"), "--quiet"]
    features = ["data", "features", str(inputs / "rows"), *target, *spread, "--aux-layers", "1", "2", "3"]
    features += ["--batch-size", "2"]
    return [[*words, "--dtype", "float32"] for words in (text, features)]


def test_two_processes_write_and_print_once_what_one_does(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "first", "second"):
        (tmp_path / name).mkdir()
    written = [commands(inputs, tmp_path / name, 2) for name in ("first", "second")]
    capsys.readouterr()
    text, features = commands(inputs, tmp_path / "one", 1)
    with Processes(written, tmp_path / "logs") as both:
        assert main(text) == 0
        said = capsys.readouterr().out.rstrip("\n")
        assert main(features) == 0
        assert both.wait() == [0, 0], both.err(0) + both.err(1)
    assert said and both.out(0).startswith(said) and not both.out(1) and not both.err(1)
    assert not list((tmp_path / "second").iterdir()), "only the first process writes"
    one, first = (open_folder(tmp_path / name / "features", FEATURES) for name in ("one", "first"))
    for ours, theirs in zip(one.shards, first.shards, strict=True):
        want, got = (read_shard(folder.folder, entry) for folder, entry in ((one, ours), (first, theirs)))
        assert want.keys() == got.keys()
        for name in want:
            assert_close(np.asarray(got[name], np.float64), np.asarray(want[name], np.float64), rtol=1e-5)
