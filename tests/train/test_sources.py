"""Files and folders of every kind give the same rows; what cannot be read says why."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from eagle3_jax.errors import UserError
from tests.train.tokenizers import small_tokenizer
from train.data.conversations import BadRow, Conversation, Row, parse_prompt, parse_record
from train.data.mask import ChatRenderer
from train.data.sources import read_records

CALL = {"type": "function", "function": {"name": "find", "arguments": {"what": "fox"}}}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "who"}, {"role": "assistant", "content": "the fox"}], "tools": []},
    {
        "messages": [
            {"role": "user", "content": "find it"},
            {"role": "assistant", "reasoning_content": "a tool may", "tool_calls": [CALL]},
            {"role": "tool", "content": "found"},
            {"role": "assistant", "content": "here"},
        ],
        "tools": [TOOL],
    },
]


def save_dataset(folder: Path, rows: list[dict[str, Any]], name: str = "data-00000-of-00001.arrow") -> None:
    """As `Dataset.save_to_disk` of Hugging Face datasets lays it out."""
    import pyarrow

    folder.mkdir(parents=True, exist_ok=True)
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.OSFile(str(folder / name), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}], "_indices_data_files": None}))


def test_every_container_gives_the_same_rows(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    save_dataset(tmp_path / "saved", ROWS)
    found = {name: list(read_records(tmp_path / name)) for name in ("a.jsonl", "a.json", "a.parquet", "saved")}
    conversations = {name: [parse_record(record) for record in records] for name, records in found.items()}
    assert all(c == conversations["a.jsonl"] for c in conversations.values())
    assert conversations["a.jsonl"][0] == Conversation(
        ({"content": "who", "role": "user"}, {"content": "the fox", "role": "assistant"})
    )


def test_what_cannot_be_read_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"")
    for split in ("test", "train"):
        save_dataset(tmp_path / "dict" / split, ROWS)
    (tmp_path / "dict" / "dataset_dict.json").write_text("{}")
    save_dataset(tmp_path / "lost", ROWS)
    (tmp_path / "lost" / "data-00000-of-00001.arrow").unlink()
    save_dataset(tmp_path / "chosen", ROWS)
    (tmp_path / "chosen" / "state.json").write_text(json.dumps({"_indices_data_files": [{"filename": "i"}]}))
    (tmp_path / "empty").mkdir()
    for name, reason in {
        "a.parquet": "not a Parquet file",
        "dict": "splits test, train; give one",
        "lost": "named by state.json, is missing",
        "chosen": "flatten_indices",
        "empty": "written neither by",
    }.items():
        with pytest.raises(UserError, match=reason):
            list(read_records(tmp_path / name))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"needs pyarrow: pip install 'eagle3-jax\[data\]'"):
        list(read_records(tmp_path / "a.parquet"))


def test_tool_calls_and_thinking_go_through_the_template() -> None:
    """Arguments as JSON text (OpenAI) or as a mapping, tools as text, and ShareGPT's function_call: one rendering."""
    as_text = json.loads(json.dumps(ROWS[1]))
    as_text["messages"][1]["tool_calls"][0]["function"]["arguments"] = '{"what": "fox"}'
    as_text["tools"] = json.dumps(as_text["tools"])
    renderer = ChatRenderer(small_tokenizer())
    first, second = (renderer.rows(parse_record(r))[0] for r in (ROWS[1], as_text))  # type: ignore[arg-type]
    text = small_tokenizer().decode(first.tokens)
    said = small_tokenizer().decode(first.tokens[first.mask])
    assert second.tokens.tolist() == first.tokens.tolist() and second.mask.tolist() == first.mask.tolist()
    assert "<parameter=what>\nfox\n</parameter>" in said and "a tool may\n</think>" in said and "# Tools" in text
    assert "found" not in said and "here<|im_end|>" in said
    sharegpt = [("human", "find it"), ("function_call", '{"name": "find", "arguments": {"what": "fox"}}')]
    found = parse_record({"conversations": [{"from": f, "value": v} for f, v in sharegpt]})
    assert "<parameter=what>\nfox" in renderer.renderings(found)[0].text  # type: ignore[arg-type]
    for broken in ("{", "[]{"):
        as_text["messages"][1]["tool_calls"][0]["function"]["arguments"] = broken
        with pytest.raises(BadRow, match="not JSON"):
            parse_record(as_text)


def test_prompts_are_what_comes_before_the_first_answer() -> None:
    asked = ({"content": "who", "role": "user"},)
    for record in (
        {"prompt": "who"},
        {"prompt": "who", "response": "x"},
        {"turns": ["who", "why"], "question_id": 1},
        {"question": "who", "answer": "x"},
        {"conversations": [{"from": "gpt", "value": "x"}, {"from": "human", "value": "who"}]},
        ROWS[0],
        {"messages": [*asked, {"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]},
    ):
        found = parse_prompt(record)
        assert isinstance(found, Conversation) and found.messages == asked
    assert parse_prompt(ROWS[1]).tools == (TOOL,)  # type: ignore[union-attr]
    for tokens in ({"input_ids": [5, 6, 7], "loss_mask": [0, 0, 1]}, {"input_ids": [5, 6]}):
        assert list(parse_prompt(tokens)) == [5, 6]  # type: ignore[arg-type]
    assert isinstance(parse_record({"input_ids": [1], "loss_mask": [0]}), Row)
    for record, reason in (({"text": "x"}, "none of"), ([], "not an object"), ({"prompt": []}, "none of")):
        with pytest.raises(BadRow, match=reason):
            parse_prompt(record)
