"""`eagle3 generate` and `eagle3 bench` from folders on disk, through the real command line."""

from __future__ import annotations

import io
import json
import logging
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from eagle3_jax import cli
from eagle3_jax.errors import UserError
from infer import LLM, SamplingParams
from infer.bench import Acceptance, Agreement, loop_end, timed_run
from infer.bench_data import BUILT_IN, read_conversations
from infer.generate_cli import read_prompt
from infer.outputs import CompletionOutput
from tests.infer.conftest import Folders
from tests.infer.models import STOP_ID, TOKENIZER, make_target

SMALL = ["--max-model-len", "128"]


@pytest.fixture
def generate(folders: Folders, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `eagle3 generate`, returns its status, standard output and standard error."""

    def call(*arguments: str, draft: bool = True) -> tuple[int, str, str]:
        head = ["--draft", str(folders.drafter)] if draft else []
        status = cli.main(["generate", "--model", str(folders.target), *head, *SMALL, *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


PARAMS = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=12, seed=1)
ONE_SLOT = {"max_model_len": 128, "max_num_seqs": 1}  # as the commands below: one program is compiled for all


@pytest.fixture(scope="module")
def speculating(folders: Folders) -> LLM:
    config = {"model": str(folders.drafter), "method": "eagle3", "num_speculative_tokens": 3}
    return LLM(model=str(folders.target), speculative_config=config, tensor_parallel_size=1, **ONE_SLOT)


def texts(llm: LLM, prompts: Any = ("the cat", "hello")) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, PARAMS, use_tqdm=False)]


def test_llm_from_folders(folders: Folders, speculating: LLM) -> None:
    assert speculating.stop_ids == (TOKENIZER.eos_token_id,) and speculating.dtype == "float32"
    assert speculating.get_default_sampling_params().greedy
    plain = LLM(model=folders.target, skip_tokenizer_init=True, **ONE_SLOT)
    assert texts(speculating) == texts(plain, [TOKENIZER.encode(text) for text in ("the cat", "hello")])


def test_tensor_parallel_gives_the_same_tokens(folders: Folders, speculating: LLM) -> None:
    """Two key/value heads on four devices: replicated."""
    spread = LLM(folders.target, speculative_config={"model": folders.drafter}, tensor_parallel_size=4, **ONE_SLOT)
    assert texts(spread) == texts(speculating)


def test_a_folder_without_a_tokenizer(folders: Folders, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folders.target / name).read_bytes())
    with pytest.raises(UserError, match="no tokenizer could be read from .*skip_tokenizer_init=True"):
        LLM(tmp_path, max_model_len=128)


def test_mistakes_are_found_before_weights_are_read(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("infer.llm.load_target", never)
    shutil.copytree(folders.drafter, tmp_path / "head")
    config = json.loads((folders.drafter / "config.json").read_text())
    (tmp_path / "head" / "config.json").write_text(json.dumps({**config, "vocab_size": 17}))
    for wrong, message in (
        ({"max_model_len": 257}, "max_model_len=257 is more than the model's 256"),
        ({"speculative_config": {"model": "/no/such/head"}}, "/no/such/head: no such folder"),
        ({"speculative_config": {"model": str(tmp_path / "head")}}, "vocab_size 17, the target has"),
        ({"tokenizer": str(folders.drafter)}, "no tokenizer could be read"),
    ):
        with pytest.raises(UserError, match=message):
            LLM(folders.target, **wrong)


# ------------------------------------------------------------------------------------------------ generate


def test_generate_chats_by_default_and_sums_up(generate: Any) -> None:
    arguments = ["hello", "--max-tokens", "20", "--temperature", "1", "--seed", "1"]
    status, out, err = generate(*arguments)
    assert status == 0 and out.strip()
    assert "[format specforge: " in err, "what was chosen for the head is said"
    assert "mean acceptance length" in err and "cycles of 3 drafts" in err and "tokens/s" in err
    _, plain, said = generate(*arguments, "--chat", draft=False)
    assert generate(*arguments, "--k", "0")[1] == plain == out and "[no drafter]" in said
    assert generate(*arguments, "--raw")[1] != out


def test_generate_from_file_and_standard_input(generate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prompt.txt").write_text("the cat")
    want = generate("the cat", "--raw", "--max-tokens", "8")[1]
    assert generate("--file", str(tmp_path / "prompt.txt"), "--raw", "--max-tokens", "8")[1] == want
    monkeypatch.setattr(sys, "stdin", io.StringIO("the cat"))
    assert generate("--raw", "--max-tokens", "8")[1] == want


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--file", "y"], "a prompt and --file were given"),
        (["  "], "the prompt is empty"),
        (["--file", "/no/such/file"], "--file /no/such/file: "),
        (["x", "--raw", "--system", "s"], "--system and --thinking need a conversation"),
        (["x", "--temperature", "-1"], "temperature=-1.0 is not allowed"),
        (["x", "--k", "-2"], "num_speculative_tokens=-2 is not allowed"),
        (["x" * 200, "--raw"], "prompt 0: has 200 tokens"),
    ],
)
def test_generate_refuses(generate: Any, arguments: list[str], message: str) -> None:
    status, out, err = generate(*arguments)
    assert status == 2 and out == "" and err.splitlines()[-1].startswith("error: ") and message in err


def test_generate_without_a_head_refuses_drafts(generate: Any) -> None:
    assert "3 tokens to draft, and no head" in generate("x", "--k", "3", draft=False)[2]
    assert "there are no drafts" in generate("x", "--draft-sample-method", "greedy", draft=False)[2]


def test_a_terminal_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO("typed")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    with pytest.raises(UserError, match="no prompt: give it as an argument"):
        read_prompt(None, None)


def test_synthetic_acceptance_says_so(generate: Any) -> None:
    synthetic = ["--rejection-sample-method", "synthetic", "--synthetic-acceptance-length", "3"]
    assert "SYNTHETIC ACCEPTANCE" in generate("x", "--ignore-eos", "--max-tokens", "9", *synthetic)[2]


# --------------------------------------------------------------------------------------------------- bench


def bench(folders: Folders, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[list[str], dict[str, Any]]:
    models = ["--model-dir", str(folders.target), "--eagle-dir", str(folders.drafter), "--batch-size", "1"]
    assert cli.main(["bench", *models, *SMALL, *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    return lines, json.loads(lines[-1])


def test_bench_prints_vllms_block_and_a_baseline(
    folders: Folders, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = [{"question_id": i, "turns": [f"hello {i}", "second turn"]} for i in range(5)]
    data, out = tmp_path / "bench.jsonl", tmp_path / "out.json"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = shlex.split(
        "--method eagle3 --num-spec-tokens 3 --tp 1 --dataset-name mt_bench --num-prompts 4 --temp 1 --top-p 0.95 "
        "--top-k -1 --output-len 24 --enable-chunked-prefill --print-output --dtype float32"
    )
    lines, figures = bench(folders, capsys, *flags, "--dataset-path", str(data), "--json", str(out))
    names = ["total_num_output_tokens", "num_drafts", "num_draft_tokens", "num_accepted_tokens"]
    for name in names:
        assert f"{name}: {figures[name]}" in lines
    assert f"mean acceptance length: {figures['mean_acceptance_length']:.2f}" in lines
    assert [line for line in lines if line.startswith("acceptance at token ")] == [
        f"acceptance at token {i}: {rate:.2f}" for i, rate in enumerate(figures["acceptance_per_position"])
    ]
    assert any("counters leave out what lies beyond a stop" in line for line in lines)
    assert any(line.startswith("tokens per second with the drafter: ") for line in lines)
    assert any(line.startswith("tokens per second without: ") for line in lines)
    assert "agreement: 4 of 4 answers are the same; 100.00% of tokens come before a first difference" in lines
    assert sum(line.startswith("generated text: ") for line in lines) == 4
    assert figures["num_prompts"] == 4 and figures["dataset"] == "mt_bench" and figures["agreement"] == 1.0
    written = json.loads(out.read_text())
    assert len(written.pop("answers")) == 4 and written == figures
    assert not any("SYNTHETIC" in line for line in lines)


def test_bench_says_when_acceptance_is_synthetic(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    synthetic = ["--rejection-sample-method", "synthetic", "--synthetic-acceptance-length", "3", "--skip-baseline"]
    flags = ["--num-prompts", "2", "--output-len", "22", "--ignore-eos"]  # 1 + 7 * 3
    lines, figures = bench(folders, capsys, *flags, *synthetic)
    assert lines[0].startswith("SYNTHETIC ACCEPTANCE")
    assert figures["rejection_sample_method"] == "synthetic" and figures["synthetic_acceptance_length"] == 3.0
    assert figures["mean_acceptance_length"] == 3.0
    assert figures["dataset"] == "built-in" and not any("without:" in line for line in lines)


def test_bench_without_a_drafter(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    lines, figures = bench(folders, capsys, "--num-spec-tokens", "0", "--num-prompts", "1", "--output-len", "4")
    assert figures["num_drafts"] == 0 and figures["mean_acceptance_length"] == 1.0
    assert not any("with the drafter" in line or "agreement" in line for line in lines)


def test_nothing_is_compiled_while_the_clock_runs(caplog: pytest.LogCaptureFixture) -> None:
    """In the first run every group has a long prompt; in the timed one short prompts are let in by themselves."""
    llm = LLM.from_models(make_target(), tokenizer=TOKENIZER, stop_ids=[STOP_ID], max_num_seqs=4, max_model_len=128)
    prompts = [{"prompt_token_ids": [5] * (90 if i % 4 == 0 else 9)} for i in range(12)]
    params = [SamplingParams(seed=i, max_tokens=10 + 5 * i, ignore_eos=True) for i in range(12)]
    compiled: list[int] = []

    def generate(*arguments: Any, **keywords: Any) -> Any:
        caplog.clear()
        outputs = LLM.generate(llm, *arguments, **keywords)
        compiled.append(sum("Finished XLA compilation" in record.getMessage() for record in caplog.records))
        return outputs

    llm.generate = generate  # type: ignore[method-assign]
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        timed_run(llm, prompts, params)
    assert compiled[0] > 0 and compiled[-1] == 0


ROWS = [
    ({"turns": ["a", "b"]}, ["a"]),
    ({"prompt": "a"}, ["a"]),
    ({"question": "a", "answer": "b"}, ["a"]),
    ({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]}, ["s", "a"]),
    ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, ["a"]),
]


def test_every_layout_of_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row, _ in ROWS) + "\n\n")
    conversations = read_conversations(file, 100)
    assert [[message["content"] for message in one] for one in conversations] == [want for _, want in ROWS]
    assert all(one[-1]["role"] == "user" for one in conversations)
    assert len(read_conversations(file, 2)) == 2 and len(read_conversations(None, 3)) == 3 <= len(BUILT_IN)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no rows"),
        ('{"a": 1}', "line 1: has none of turns, messages"),
        ('{"prompt": "a"}\n{', "line 2: is not JSON"),
        ("[1]", "line 1: is not an object"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "line 1: no message of a user"),
        ('{"messages": [{"role": "tool", "content": "a"}]}', "line 1: a message without a known role"),
    ],
)
def test_bad_datasets_are_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(text)
    with pytest.raises(UserError, match="dataset") as error:
        read_conversations(file, 10)
    assert message in str(error.value)
    with pytest.raises(UserError, match="no such file; a local JSONL file is needed"):
        read_conversations(tmp_path / "absent.jsonl", 10)


def test_loop_end() -> None:
    assert loop_end([1, 2, 3, 4, 5]) == 5
    assert loop_end([7, 7, 7, 7, 7, 7, 7, 7]) == 6
    assert loop_end([0, *[1, 2, 3, 4] * 5]) == 13
    assert loop_end([]) == 0


def test_acceptance_before_loops_and_agreement() -> None:
    loop = CompletionOutput(0, "", [7] * 9, "length", codes=[-1, 64, 64, 0, 65, 64, 0, 1, 66])
    plain = CompletionOutput(0, "", [1, 2, 3], "stop", codes=[-1, 0, 65])
    acceptance = Acceptance.of([loop, plain], 2)
    assert acceptance.num_looping == 1
    assert acceptance.total.num_drafts == 6 and acceptance.before_loops.num_drafts == 5
    assert acceptance.each_before_loops == [1.25, 2.0]
    other = CompletionOutput(0, "", [1, 2, 4, 5], "stop")
    agreement = Agreement.of([loop, plain], [loop, other])
    assert (agreement.identical, agreement.answers, agreement.agreeing_tokens, agreement.tokens) == (1, 2, 11, 13)
