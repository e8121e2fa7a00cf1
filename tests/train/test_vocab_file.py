"""Draft vocabularies in files: what they hold, when they are made anew, and that a run takes them as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle3_jax.cli import main
from eagle3_jax.config import TargetConfig
from eagle3_jax.errors import ConfigError, UserError
from tests.train.folders import CONFIG
from train.data.conversations import Row
from train.data.shards import ROWS, ShardWriter, row_counts, row_tensors
from train.data.vocab_file import cache_key, read_vocab_file
from train.head import draft_config, draft_vocab
from train.recipe import DraftRecipe

TARGET = TargetConfig.from_hf(CONFIG)


def write_rows(folder: Path, tokens: list[int], vocab_size: int = 416) -> Path:
    """One row of which all but the first two tokens are supervised."""
    row = Row(np.asarray([400, 401, *tokens], np.int32), np.arange(len(tokens) + 2) > 1)
    writer = ShardWriter(folder, {"format": ROWS, "vocab_size": vocab_size})
    writer.write(row_tensors([row]), row_counts([row]), {})
    writer.finish({})
    return folder


@pytest.fixture
def vocab(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: str | Path) -> tuple[int, str]:
        status = main(["data", "vocab", *map(str, arguments)])
        said = capsys.readouterr()
        return status, said.out + said.err

    return call


def test_the_most_frequent_supervised_tokens_padded_with_unused_ones(vocab: Any, tmp_path: Path) -> None:
    a, b = write_rows(tmp_path / "a", [9, 9, 7, 5]), write_rows(tmp_path / "b", [7, 7, 3])
    file = tmp_path / "two.json"
    status, said = vocab(a, b, "--size", "2", "--output", file)
    assert status == 0 and "2 of 416 tokens, 71.429% of what the assistant says" in said
    assert read_vocab_file(file, 416).tolist() == [7, 9] and read_vocab_file(file, 416).dtype == np.int32
    status, said = vocab(a, b, "--size", "6", "--output", tmp_path / "six.json")
    assert "100.000%" in said and "2 of them it never says" in said
    assert read_vocab_file(tmp_path / "six.json", 416).tolist() == [0, 1, 3, 5, 7, 9]


def test_made_anew_when_sizes_or_data_are_others(vocab: Any, tmp_path: Path) -> None:
    a, b, file = write_rows(tmp_path / "a", [9, 9, 7]), write_rows(tmp_path / "b", [5]), tmp_path / "v.json"
    vocab(a, "--size", "2", "--output", file)
    assert "up to date" in vocab(a, "--size", "2", "--output", file)[1]
    for words in ((a, "--size", "3"), (a, b, "--size", "3"), (b, "--size", "3")):
        assert "up to date" not in vocab(*words, "--output", file)[1]
    assert "up to date" in vocab(b, "--size", "3", "--output", file)[1]
    assert cache_key(9, 2, ["x"]) != cache_key(8, 2, ["x"])
    assert cache_key(9, 2, ["x", "y"]) == cache_key(9, 2, ["y", "x"])


def test_a_run_takes_it_as_it_is(vocab: Any, tmp_path: Path) -> None:
    file = tmp_path / "v.json"
    vocab(write_rows(tmp_path / "a", [9, 9, 7, 5]), "--size", "3", "--output", file)
    recipe = DraftRecipe(vocab_file=str(file), aux_layers=(1, 2, 3))
    assert draft_config(recipe, TARGET).draft_vocab_size == 3
    assert draft_vocab(recipe, np.ones(416, np.int64), 3).tolist() == [5, 7, 9]
    with pytest.raises(UserError, match="draft_vocab_size=4; .* has 3 tokens"):
        draft_config(DraftRecipe(vocab_file=str(file), draft_vocab_size=4, aux_layers=(1, 2, 3)), TARGET)


def test_files_that_do_not_fit_are_refused(vocab: Any, tmp_path: Path) -> None:
    a, file = write_rows(tmp_path / "a", [9, 9, 7]), tmp_path / "v.json"
    vocab(a, "--size", "2", "--output", file)
    with pytest.raises(ConfigError, match="made for a target of 416 tokens, this one has 500"):
        read_vocab_file(file, 500)
    table = json.loads(file.read_text())
    for broken in ([9, 7], [7, 7], [7], [-1, 7], [7, 416], ["a", "b"], []):
        file.write_text(json.dumps({**table, "target_ids": broken}))
        with pytest.raises(ConfigError, match="target_ids are not 2 different ids"):
            read_vocab_file(file, 416)
    for text in ("{", "{}"):
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"v\.json: no"):
            read_vocab_file(file, 416)
    status, said = vocab(a, "--size", "2", "--output", file)
    assert status == 2 and "not a draft vocabulary" in said and file.read_text() == "{}"
    status, said = vocab(a, write_rows(tmp_path / "b", [1], 500), "--size", "2", "--output", tmp_path / "w.json")
    assert status == 2 and "different targets" in said
    assert "no index.json there" in vocab(tmp_path, "--size", "2", "--output", tmp_path / "w.json")[1]
    assert "does not fit" in vocab(a, "--size", "417", "--output", tmp_path / "w.json")[1]
