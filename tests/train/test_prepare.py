"""Prepared rows are those that training would have made itself, whatever befell the command that made them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle3_jax.cli import main
from eagle3_jax.errors import UserError
from tests.train.folders import CONFIG, save_small_target
from train.data.batches import load_rows
from train.data.checksums import check_prepared
from train.data.renderer import load_renderer
from train.data.shards import ShardWriter, open_folder, read_rows
from train.data.sources import read_records


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty conversations of 5 to 24 words, one without an answer, one torn, and one of ready tokens."""
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    words = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog"]
    rows: list[Any] = [
        {"conversations": [{"from": "human", "value": "who"}, {"from": "gpt", "value": " ".join((words * 3)[: 5 + i])}]}
        for i in range(20)
    ]
    rows[3:3] = [{"messages": [{"role": "user", "content": "who"}]}, {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n{torn")
    return path


@pytest.fixture
def prepare(target: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def call(output: Path, *more: str, files: Path = data) -> tuple[int, str]:
        words = [str(files), "--target", str(target), "--output", str(output), "--max-length", "30", "--quiet"]
        status = main(["data", "prepare", *words, "--shard-tokens", "100", *more])
        said = capsys.readouterr()
        return status, said.out + said.err

    return call


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_rows_are_those_that_training_makes(prepare: Any, tmp_path: Path, data: Path, target: Path) -> None:
    status, said = prepare(tmp_path / "a")
    want, report = load_rows([data], load_renderer(target), max_length=30, vocab_size=CONFIG["vocab_size"])
    found, again = load_rows([tmp_path / "a"], None, max_length=30, vocab_size=CONFIG["vocab_size"])
    assert status == 0 and str(report) in said and report.num_truncated and len(report.dropped) == 2
    assert len(found) == len(want) == 21 and again.num_supervised_tokens == report.num_supervised_tokens
    for ours, theirs in zip(found, want, strict=True):
        assert np.array_equal(ours.tokens, theirs.tokens) and np.array_equal(ours.mask, theirs.mask)
    folder = open_folder(tmp_path / "a")
    assert len(folder.shards) > 3 and sum(s["rows"] for s in folder.shards) == 21
    assert folder.num_tokens == report.num_tokens and not list((tmp_path / "a").glob("*.part"))
    assert "complete already" in prepare(tmp_path / "a")[1]
    assert prepare(tmp_path / "b", "--workers", "2")[0] == 0 and contents(tmp_path / "b") == contents(tmp_path / "a")
    assert prepare(tmp_path / "c", "--drop")[0] == 0
    assert open_folder(tmp_path / "c").state["report"]["dropped"]["longer than 30 tokens"] == report.num_truncated


@pytest.mark.parametrize("when", ["before the shard", "before the progress", "before the index"])
def test_killed_anywhere_and_given_again_equals_straight(
    prepare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    prepare(tmp_path / "straight")
    with monkeypatch.context() as patched:
        write = Path.replace
        names = {
            "before the shard": "00002.safetensors",
            "before the progress": "progress.json",
            "before the index": "index.json",
        }
        seen = []

        def replace(self: Path, target: Path) -> Path:
            seen.append(target.name)
            if target.name == names[when] and (target.name != "progress.json" or seen.count(target.name) == 3):
                raise KeyboardInterrupt
            return write(self, target)

        patched.setattr(Path, "replace", replace)
        assert prepare(tmp_path / "killed")[0] == 130
    with pytest.raises(UserError, match="not finished; give the command"):
        list(read_records(tmp_path / "killed"))
    status, said = prepare(tmp_path / "killed")
    assert status == 0 and "going on after row" in said
    assert contents(tmp_path / "killed") == contents(tmp_path / "straight")


def test_other_settings_are_refused(prepare: Any, tmp_path: Path) -> None:
    prepare(tmp_path / "a")
    status, said = prepare(tmp_path / "a", "--drop", "--template-kwargs", "enable_thinking=false")
    assert status == 2 and "overlong: 'truncate' then, 'drop' now; template_kwargs: {} then, {'enable_th" in said
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.tex").touch()
    status, said = prepare(tmp_path / "b")
    assert status == 2 and "holds thesis.tex and is none of ours" in said
    assert "expected KEY=VALUE" in prepare(tmp_path / "c", "--template-kwargs", "thinking")[1]


def test_nothing_to_train_on_is_an_error_that_reports(prepare: Any, tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").write_text('{"messages": [{"role": "user", "content": "who"}]}\n{}\n')
    status, said = prepare(tmp_path / "a", files=tmp_path / "none.jsonl")
    assert status == 2 and "no row can be trained on. 2 rows read" in said and "1 x no assistant turn" in said
    status, said = prepare(tmp_path / "a", files=tmp_path / "absent.jsonl")
    assert status == 2 and "absent.jsonl: no such data file" in said


def test_damage_is_found(prepare: Any, tmp_path: Path) -> None:
    prepare(tmp_path / "a")
    shard = tmp_path / "a" / "00001.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(UserError, match="00001.safetensors: damaged"):
        list(read_rows(tmp_path / "a"))
    shard.unlink()
    with pytest.raises(UserError, match="00001.safetensors is missing"):
        list(read_rows(tmp_path / "a"))
    (tmp_path / "a" / "index.json").write_text('{"format": "eagle3-rows", "version": 2}')
    with pytest.raises(UserError, match="version 2, where eagle3-rows version 1 is needed"):
        list(read_rows(tmp_path / "a"))


def test_ids_of_another_tokenizer_are_refused(prepare: Any, tmp_path: Path, target: Path) -> None:
    prepare(tmp_path / "a")
    renderer = load_renderer(target)
    assert renderer is not None
    check_prepared([tmp_path / "a", tmp_path / "absent.jsonl"], renderer)
    check_prepared([tmp_path / "a"], None)
    other = copy.deepcopy(renderer)
    other.tokenizer.add_tokens(["<new>"])
    with pytest.raises(UserError, match="of another tokenizer"):
        check_prepared([tmp_path / "a"], other)


def test_a_place_that_cannot_be_written_is_the_users_to_mend(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write to .*file.*: "):
        ShardWriter(tmp_path / "file" / "below", {"format": "x"})
