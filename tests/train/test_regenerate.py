"""Answers of the target: rows that train, nothing lost or written twice whenever the command is killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle3_jax.cli import main
from eagle3_jax.errors import UserError
from tests.train.folders import CONFIG, save_small_target
from train.data.answers import AnswerFile, open_answers
from train.data.batches import load_rows
from train.data.regenerate import Job, agreed, plan, read_prompts, remaining

ENGINE = ["--max-model-len", "64", "--batch", "4", "--dtype", "float32", "--quiet"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows: list[Any] = [{"prompt": text} for text in ("the fox", "lazy dog", "the fox", "way round", "brown")]
    rows += [{"prompt": "the quick brown fox jumps over the lazy dog, and then the other way round " * 3}, {"x": 1}]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def regenerate(target: Path, prompts: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command into a file; returns its status and all that it printed."""

    def call(output: Path, *more: str) -> tuple[int, str]:
        words = [str(prompts), "--target", str(target), "--output", str(output), "--max-tokens", "12"]
        status = main(["data", "regenerate", *words, *ENGINE, *more])
        said = capsys.readouterr()
        return status, said.out + said.err

    return call


def read(path: Path) -> dict[str, Any]:
    """Rows by key; a key that occurs twice is a failure."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    found = {row["key"]: row for row in rows}
    assert len(found) == len(rows)
    return found


def test_killed_again_and_again_gives_the_rows_of_one_straight_run(
    regenerate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight, killed = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    status, said = regenerate(straight, "--passes", "2")
    assert status == 0 and "10 answers to 5 prompts; 0 are there already" in said
    assert "1 prompts left out: with --max-tokens 12 longer than 64" in said and "dropped: 1 x none of" in said
    assert "10 answers, " in said and "answers/s" in said and "tokens/s" in said

    append = AnswerFile.append
    for stop in (3, 6):
        written = []

        def append_or_die(self: AnswerFile, row: Any, written: list[Any] = written, stop: int = stop) -> None:
            if len(written) == stop - 2:
                self._stream.write(json.dumps(row).encode()[:40])
                raise KeyboardInterrupt
            written.append(row)
            append(self, row)

        monkeypatch.setattr(AnswerFile, "append", append_or_die)
        assert regenerate(killed, "--passes", "2")[0] == 130
        assert not killed.read_bytes().endswith(b"\n")
    monkeypatch.setattr(AnswerFile, "append", append)
    assert "5 are there already" in regenerate(killed, "--passes", "2")[1]
    assert read(killed) == read(straight)
    assert "10 are there already" in regenerate(killed, "--passes", "2")[1] and read(killed) == read(straight)

    rows, report = load_rows([straight], None, max_length=64, vocab_size=CONFIG["vocab_size"])
    assert report.num_read == 10 and len(rows) == 10 - sum(report.dropped.values())
    first = next(row for row in read(straight).values() if row["key"].startswith("0:0:"))
    assert first["loss_mask"] == sorted(first["loss_mask"]) and first["finish_reason"] in ("stop", "length")


def test_other_settings_or_prompts_are_not_mixed_in(regenerate: Any, tmp_path: Path, target: Path) -> None:
    output = tmp_path / "a.jsonl"
    assert regenerate(output, "--limit", "1", "--temperature", "0")[0] == 0 and len(read(output)) == 1
    status, said = regenerate(output, "--limit", "1", "--temperature", "0", "--seed", "2")
    assert status == 2 and "begun with other settings (seed: 0 then, 2 now)" in said
    output.write_text(output.read_text().replace('"0:0:', '"0:0:0'))
    status, said = regenerate(output, "--limit", "2", "--temperature", "0")
    assert status == 2 and "prompt 0 is another than when it was answered" in said


def test_other_processes_than_the_first_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = plan([(0, np.arange(3)), (1, np.arange(4))], passes=2)
    assert agreed(jobs, jobs[1:3]) == jobs[1:3]
    monkeypatch.setattr("train.data.answers.is_first", lambda: False)
    with open_answers(tmp_path / "answers.jsonl", {}) as file:
        file.append({"key": jobs[0].key})
        assert remaining(jobs, file) == jobs
    assert not list(tmp_path.iterdir())


def test_files_that_are_not_ours_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("precious\n")
    with pytest.raises(UserError, match="not begun by this command"):
        AnswerFile(path, {})
    assert path.read_text() == "precious\n"
    with pytest.raises(UserError, match=r"ends with \.jsonl"):
        AnswerFile(tmp_path / "a.txt", {})
    with AnswerFile(tmp_path / "b.jsonl", {"a": 1}) as file:
        file.append({"key": "0:0:x"})
        with pytest.raises(UserError, match="another process"):
            AnswerFile(tmp_path / "b.jsonl", {"a": 1})
    (tmp_path / "b.jsonl").write_text('{"key": "0:0:x"}\n{"no": 1}\n')
    with pytest.raises(UserError, match="line 2: not a row with a key"):
        AnswerFile(tmp_path / "b.jsonl", {"a": 1})


def test_prompts_from_ready_tokens_and_parts(tmp_path: Path) -> None:
    np.savez(tmp_path / "p.npz", ids=np.arange(9), offsets=np.array([0, 4, 9]))
    found = read_prompts(tmp_path / "p.npz", None, None)
    assert [(i, p.tolist()) for i, p in found] == [(0, [0, 1, 2, 3]), (1, [4, 5, 6, 7, 8])]
    jobs = plan(found, 2, (1, 2))
    assert [(job.turn, job.index) for job in jobs] == [(0, 1), (1, 1)]
    assert jobs[0].key != jobs[1].key and jobs[0].key == Job(1, 0, np.arange(4, 9)).key
    (tmp_path / "none.jsonl").write_text('{"prompt": "x"}')
    with pytest.raises(UserError, match="no prompt can be used\n  dropped: 1 x a conversation, but there is no token"):
        read_prompts(tmp_path / "none.jsonl", None, None)
