"""What a head is worth: acceptance that the engine measures beside what training predicts, over files of questions.

    python -m benchmarks.acceptance TARGET HEAD FILE.jsonl [FILE.jsonl ...] [--drafts 3 7] [--temperatures 0 1]

For each K one engine answers the first turns of every file, at each temperature. Of greedy answers, `train.evaluate`
then predicts the acceptance by teacher forcing, in the dtype of the engine. Lengths count the bonus token.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from eagle3_jax.checkpoint import load_drafter, load_target
from eagle3_jax.precision import parse_dtype
from infer import LLM, SamplingParams
from infer.bench_data import read_conversations
from train.data.renderer import load_renderer
from train.evaluate import Acceptance, Answer, count_acceptance, make_matches
from train.step import make_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("head", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--drafts", type=int, nargs="+", default=[3, 7])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--num-prompts", type=int, default=80, help="of each file")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = measure(args)
    report = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "rows": rows}
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))
    print(json.dumps(report))


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    dtype = parse_dtype(args.dtype)
    loaded = load_target(args.target, dtype=dtype)
    head = load_drafter(args.head, loaded.model.config, dtype=dtype).model
    prompts = {path.stem: _prompts(path, args) for path in args.files}
    room = max(len(p) for each in prompts.values() for p in each) + args.output_len + 1
    print(f"{'questions':12} {'K':>2} {'temp':>5} {'measured':>9} {'predicted':>10}  acceptance by draft", flush=True)
    rows = []
    for count in args.drafts:
        llm = LLM.from_models(
            loaded.model, head, stop_ids=loaded.stop_ids, max_num_seqs=args.batch, max_model_len=room,
            speculative_config={"num_speculative_tokens": count},
        )  # fmt: skip
        model, params, frozen = make_model(loaded.model, head, num_steps=count, dtype=dtype)
        matches = make_matches(model, head.d2t[...])
        for temperature in args.temperatures:
            for name, each in prompts.items():
                row, answers = _answer(llm, each, temperature, args.output_len)
                row = {"questions": name, "num_drafts": count, "temperature": temperature, **row}
                if temperature == 0:
                    predicted = count_acceptance(matches, params, frozen, answers, count, args.batch)
                    row["predicted"] = predicted.as_dict()
                rows.append(row)
                print(_line(row), flush=True)
    return rows


def _prompts(path: Path, args: argparse.Namespace) -> list[list[int]]:
    renderer = load_renderer(args.target)
    assert renderer is not None, "the target's folder has no chat template"
    texts = [renderer.render(talk, prompt=True) for talk in read_conversations(path, args.num_prompts)]
    return [renderer.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def _answer(llm: LLM, prompts: list[list[int]], temperature: float, length: int) -> tuple[dict[str, Any], list[Answer]]:
    """Measured acceptance and tokens a second (the first run of a temperature compiles), and the answers."""
    before, started = Acceptance.counted(llm.get_metrics()), time.perf_counter()
    params = SamplingParams(temperature=temperature, max_tokens=length, seed=0)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    spent, measured = time.perf_counter() - started, Acceptance.counted(llm.get_metrics()) - before
    said = [list(o.outputs[0].token_ids) for o in outputs]
    answers = [Answer(np.asarray([*p, *s], np.int32), len(p)) for p, s in zip(prompts, said, strict=True)]
    return {**measured.as_dict(), "num_tokens": sum(map(len, said)), "seconds": spent}, answers


def _line(row: dict[str, Any]) -> str:
    predicted = f"{row['predicted']['acceptance_length']:10.3f}" if "predicted" in row else " " * 10
    rates = ", ".join(f"{rate:.2f}" for rate in row["acceptance_rates"])
    return (
        f"{row['questions']:12} {row['num_drafts']:2} {row['temperature']:5} {row['acceptance_length']:9.3f} "
        f"{predicted}  {rates}"
    )


if __name__ == "__main__":
    main()
