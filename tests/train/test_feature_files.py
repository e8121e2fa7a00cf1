"""Stored features are the target's own for each row alone; a killed command goes on; a full disk is seen before."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax.checkpoint import load_target
from eagle3_jax.cli import main
from tests.helpers import assert_close
from tests.train.folders import save_small_target
from train.data.conversations import Row
from train.data.feature_files import bytes_a_token
from train.data.shards import FEATURES, ROWS, ShardWriter, open_folder, read_shard, row_counts, row_tensors, rows_of

LENGTHS = (5, 16, 9, 12, 3, 16, 7)
A_TOKEN = 4 * 16 * 4 + 13


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven rows in two shards."""
    folder, draw = tmp_path_factory.mktemp("rows") / "rows", np.random.default_rng(0)
    made = [Row(draw.integers(0, 400, n).astype(np.int32), np.arange(n) > 1) for n in LENGTHS]
    writer = ShardWriter(folder, {"format": ROWS, "vocab_size": 416, "max_length": 16})
    for part in (made[:3], made[3:]):
        writer.write(row_tensors(part), row_counts(part), {})
    writer.finish({})
    return folder


@pytest.fixture
def features(target: Path, rows: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def call(output: Path, *more: str) -> tuple[int, str]:
        words = [str(rows), "--target", str(target), "--output", str(output), "--aux-layers", "1", "2", "3"]
        sizes = ["--dtype", "float32", "--batch-size", "2", "--shard-bytes", str(20 * A_TOKEN), "--quiet"]
        status = main(["data", "features", *words, *sizes, *more])
        said = capsys.readouterr()
        return status, said.out + said.err

    return call


def test_they_are_the_targets_own_and_a_killed_command_goes_on(
    features: Any, tmp_path: Path, target: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, said = features(tmp_path / "a")
    assert status == 0 and f"68 tokens x {A_TOKEN} bytes = 18.3 kB; " in said
    folder, model = open_folder(tmp_path / "a", FEATURES), load_target(target).model
    assert bytes_a_token(model.config, 3, "float32") == A_TOKEN
    assert [shard["rows"] for shard in folder.shards] == [2, 2, 3]
    seen = 0

    @jax.jit
    def alone(tokens: Any) -> Any:
        out = model(tokens, aux_layers=(1, 2, 3))
        logits = model.logits(out.hidden)
        return out.hidden, out.aux, jnp.argmax(logits, -1), jax.nn.logsumexp(logits, -1)

    for entry in folder.shards:
        tensors = read_shard(folder.folder, entry)
        assert sorted(tensors) == ["aux.1", "aux.2", "aux.3", "hidden", "log_sum", "mask", "offsets", "tokens", "top1"]
        for row, start in zip(rows_of(tensors), tensors["offsets"], strict=False):
            length = len(row.tokens)
            hidden, aux, top1, log_sum = alone(jnp.asarray(np.pad(row.tokens, (0, 16 - length)))[None])
            here = slice(start, start + length)
            assert length == LENGTHS[seen]
            assert_close(tensors["hidden"][here], hidden[0, :length])
            for layer, values in zip((1, 2, 3), aux, strict=True):
                assert_close(tensors[f"aux.{layer}"][here], values[0, :length])
            assert_close(tensors["log_sum"][here], log_sum[0, :length])
            assert tensors["top1"][here].tolist() == top1[0, :length].tolist()
            seen += 1
    assert seen == len(LENGTHS)

    write = ShardWriter.write
    with monkeypatch.context() as patched:

        def write_or_die(self: ShardWriter, *arguments: Any) -> None:
            if len(self.shards) == 1:
                raise KeyboardInterrupt
            write(self, *arguments)

        patched.setattr(ShardWriter, "write", write_or_die)
        assert features(tmp_path / "b")[0] == 130
    assert features(tmp_path / "b")[0] == 0
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
    status, said = features(tmp_path / "b", "--aux-layers", "0", "1", "2")
    assert status == 2 and "aux_layers: [1, 2, 3] then, [0, 1, 2] now" in said


def test_room_is_looked_for_before_anything_is_computed(
    features: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert features(tmp_path / "a", "--estimate")[0] == 0 and not (tmp_path / "a").exists()
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("train.data.feature_files.load_target", None)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=68 * A_TOKEN - 1))
    status, said = features(tmp_path / "a")
    assert status == 2 and "18.3 kB are still to be written and only 18.3 kB are free; make room" in said


def test_rows_for_another_target_are_refused(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = ShardWriter(tmp_path / "rows", {"format": ROWS, "vocab_size": 500, "max_length": 16})
    row = Row(np.arange(5, dtype=np.int32), np.ones(5, bool))
    writer.write(row_tensors([row]), row_counts([row]), {})
    writer.finish({})
    words = ["--target", str(target), "--output", str(tmp_path / "a")]
    assert main(["data", "features", str(tmp_path / "rows"), *words]) == 2
    assert "prepared for a target of 500 tokens" in capsys.readouterr().err
