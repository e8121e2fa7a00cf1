"""Formats, counting of what is not used, padding, and batches that are a function of the step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle3_jax.errors import UserError
from tests.train.tokenizers import small_tokenizer
from train.data.batches import Batches, DataError, bucket_lengths, has_supervision, load_rows, ordered_batches, pad_rows
from train.data.conversations import BadRow, Conversation, Row, parse_record
from train.data.mask import ChatRenderer


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records))
    return path


def row(length: int, first: int = 0) -> Row:
    return Row(np.arange(first, first + length, dtype=np.int32), np.arange(length) > 0)


def test_all_formats_give_the_same_conversation() -> None:
    want = Conversation(({"content": "a", "role": "user"}, {"content": "b", "role": "assistant"}))
    sharegpt = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for record in (
        {"conversations": sharegpt},
        {"messages": messages},
        {"conversations": messages},
        {"prompt": "a", "response": "b"},
        {"prompt": messages[:1], "completion": "b"},
    ):
        assert parse_record(record) == want


def test_answers_to_nothing_and_unanswered_questions_are_trimmed() -> None:
    turns = [("gpt", "x"), ("human", "a"), ("gpt", "b"), ("human", "c")]
    parsed = parse_record({"conversations": [{"from": f, "value": v} for f, v in turns]})
    assert isinstance(parsed, Conversation)
    assert [m["content"] for m in parsed.messages] == ["a", "b"]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ([], "not an object"),
        ({"text": "x"}, "none of messages"),
        ({"messages": "x"}, "not a list"),
        ({"messages": [{"role": "user", "content": "x"}]}, "no assistant turn"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "unknown role 'wizard'"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "unknown role 'alien'"),
        ({"messages": [{"role": "assistant"}]}, "without content"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "one length"),
        ({"input_ids": [1, -2], "loss_mask": [0, 1]}, "integers"),
        ({"input_ids": [1, 2], "loss_mask": [0, 3]}, "zeros and ones"),
    ],
)
def test_bad_rows_say_why(record: Any, reason: str) -> None:
    with pytest.raises(BadRow, match=reason):
        parse_record(record)


def test_rows_not_used_are_counted(tmp_path: Path) -> None:
    ids = list(range(10))
    path = write(
        tmp_path / "a.jsonl",
        [
            {"input_ids": ids, "loss_mask": [0] * 5 + [1] * 5},
            {"input_ids": ids * 2, "loss_mask": [0] * 5 + [1] * 15},
            {"input_ids": ids, "loss_mask": [0] * 10},
            {"input_ids": [99, 1, 2], "loss_mask": [1] * 3},
            {"input_ids": ids * 2, "loss_mask": [0] * 12 + [1] * 8},
            "{broken",
            {"messages": [{"role": "user", "content": "who"}, {"role": "assistant", "content": "fox"}]},
        ],
    )
    rows, report = load_rows([path], None, max_length=12, vocab_size=50)
    assert [len(r.tokens) for r in rows] == [10, 12]
    assert report.num_read == 7 and report.num_truncated == 2
    assert report.dropped == {
        "no supervised token": 1,
        "no supervised token in the first 12": 1,
        "not JSON": 1,
        "token ids beyond the target's vocabulary of 50": 1,
        "a conversation, but there is no tokenizer with a chat template": 1,
    }
    assert "2 training sequences" in str(report) and "1 x not JSON" in str(report)
    rows, report = load_rows([path], None, max_length=12, overlong="drop", vocab_size=50)
    assert len(rows) == 1 and report.dropped["longer than 12 tokens"] == 2


def test_conversations_are_read_from_json_and_jsonl(tmp_path: Path) -> None:
    record = {"messages": [{"role": "user", "content": "who"}, {"role": "assistant", "content": "the fox"}]}
    (tmp_path / "b.json").write_text(json.dumps([record]))
    files = [write(tmp_path / "a.jsonl", [record]), tmp_path / "b.json"]
    renderer = ChatRenderer(small_tokenizer(), {"enable_thinking": False})
    rows, report = load_rows(files, renderer, max_length=64, vocab_size=1000)
    assert len(rows) == 2 and np.array_equal(rows[0].tokens, rows[1].tokens)
    assert report.num_supervised_tokens == 2 * rows[0].mask.sum() > 0


def test_no_usable_row_is_an_error_that_reports(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]}])
    with pytest.raises(DataError, match="1 x no supervised token"):
        load_rows([path], None, max_length=8, vocab_size=50)


def test_unreadable_files_are_user_errors(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": 1}')
    for name in ("a.json", "absent.jsonl", "a.parquet", "a.txt"):
        (tmp_path / "a.parquet").touch(), (tmp_path / "a.txt").touch()
        with pytest.raises(UserError, match=name):
            load_rows([tmp_path / name], None, max_length=8, vocab_size=50)


def test_supervision_needs_two_tokens_after_the_first_position() -> None:
    for mask, want in (
        ([0, 1, 1], True),
        ([1, 1, 0], False),
        ([1, 1, 1], True),
        ([0, 1, 0, 1], False),
        ([1, 1], False),
    ):
        assert has_supervision(np.array(mask, bool)) is want


def test_batches_pad_to_buckets() -> None:
    assert bucket_lengths(300) == (128, 256, 300)
    assert bucket_lengths(64) == (64,)
    assert bucket_lengths(300, (100, 300)) == (100, 300) and bucket_lengths(300, ()) == (300,)
    batch = pad_rows([row(3), row(130)], bucket_lengths(300))
    assert batch.tokens.shape == (2, 256) and batch.num_tokens == 133
    assert not batch.mask[0, 3:].any() and batch.mask[1, 1:130].all() and not batch.mask[1, 130:].any()


def test_batches_are_a_function_of_seed_and_step() -> None:
    rows = [row(4, first=10 * i) for i in range(7)]
    batches = Batches(rows, batch_size=2, seed=3, buckets=(8,))
    again = Batches(rows, batch_size=2, seed=3, buckets=(8,))
    other = Batches(rows, batch_size=2, seed=4, buckets=(8,))
    firsts = [batches[i].tokens[:, 0].tolist() for i in range(7)]
    assert firsts == [again[i].tokens[:, 0].tolist() for i in range(7)]
    assert firsts != [other[i].tokens[:, 0].tolist() for i in range(7)]
    seen = np.concatenate(firsts)
    assert sorted(seen[:7]) == sorted(seen[7:]) == [10 * i for i in range(7)]
    assert seen[:7].tolist() != seen[7:].tolist()


def test_ordered_batches_keep_every_row_once() -> None:
    batches = list(ordered_batches([row(4, first=10 * i) for i in range(3)], batch_size=2, buckets=(8,)))
    assert [b.tokens[:, 1].tolist() for b in batches] == [[1, 11], [21, 0]]
    assert not batches[1].mask[1].any()
