"""Lets a model answer prompts itself, so that a draft head learns the model's own manner of writing.

    python examples/answers.py MODEL PROMPTS OUT.jsonl [--temperatures 0 0.8] [--max-tokens 256]

PROMPTS is JSONL with `messages` (cut after the first user turn) or `prompt`, or an `.npz` of ready tokens (`ids`, and
`offsets` between which each prompt lies). Prompt number i is answered at the i-th temperature of the list, around again
from its start; `--passes 2` shifts by one and answers everything a second time. OUT has one row an answer:
`{"input_ids": [...], "loss_mask": [...]}`, which `eagle3 train` reads.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from eagle3_jax import LLM, SamplingParams

Tokens = list[int]


def first_turns(row: dict[str, Any]) -> list[dict[str, str]]:
    """The messages up to the first user turn, or the prompt as one."""
    if "messages" not in row:
        return [{"role": "user", "content": row["prompt"]}]
    asked = next(i for i, message in enumerate(row["messages"]) if message["role"] == "user")
    return row["messages"][: asked + 1]


def read_prompts(path: Path, tokenizer: PreTrainedTokenizerFast) -> list[Tokens]:
    """Prompt tokens, generation prompt included."""
    if path.suffix == ".npz":
        arrays = np.load(path)
        ids, ends = arrays["ids"], arrays["offsets"]
        return [ids[a:b].tolist() for a, b in zip(ends[:-1], ends[1:], strict=True)]
    with path.open(encoding="utf-8") as lines:
        chats = [first_turns(json.loads(line)) for line in lines if line.strip()]
    return [
        tokenizer.apply_chat_template(c, add_generation_prompt=True, tokenize=True, return_dict=False) for c in chats
    ]


def parameters(count: int, temperatures: Sequence[float], shift: int, max_tokens: int) -> list[SamplingParams]:
    """One for each prompt, its temperature by turns."""
    return [
        SamplingParams(temperature=temperatures[(i + shift) % len(temperatures)], max_tokens=max_tokens,
                       seed=shift * count + i)
        for i in range(count)
    ]


def training_row(prompt: Tokens, answer: Tokens) -> dict[str, Tokens]:
    """Supervises the answer alone, its end token included."""
    return {"input_ids": prompt + answer, "loss_mask": [0] * len(prompt) + [1] * len(answer)}


def answer_all(llm: LLM, prompts: list[Tokens], params: list[SamplingParams]) -> list[Tokens]:
    """Answers in the order of the prompts; the end token closes those that stopped by themselves."""
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    return [list(output.outputs[0].token_ids) for output in outputs]


def main() -> None:
    """Answers every prompt once a pass and writes rows as they come."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=256, help="sequences decoded together")
    parser.add_argument("--limit", type=int, help="only the first so many prompts")
    args = parser.parse_args()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.model)
    prompts = read_prompts(args.prompts, tokenizer)[: args.limit]
    fitting = [prompt for prompt in prompts if len(prompt) + args.max_tokens <= args.max_model_len]
    print(f"{len(fitting)} prompts; {len(prompts) - len(fitting)} left out, too long for --max-model-len")
    prompts = fitting
    # Only ids are wanted: without a tokenizer nothing is spent on text. Rare looks by the host keep the device busy.
    llm = LLM(model=args.model, max_model_len=args.max_model_len, max_num_seqs=args.batch, cycles_per_sync=32,
              skip_tokenizer_init=True)
    started, rows, tokens = time.perf_counter(), 0, 0
    with args.out.open("w", encoding="utf-8") as out:
        for shift in range(args.passes):
            params = parameters(len(prompts), args.temperatures, shift, args.max_tokens)
            for at in range(0, len(prompts), 8 * args.batch):
                chunk = prompts[at : at + 8 * args.batch]
                answers = answer_all(llm, chunk, params[at : at + 8 * args.batch])
                for prompt, answer in zip(chunk, answers, strict=True):
                    out.write(json.dumps(training_row(prompt, answer)) + "\n")
                out.flush()
                rows, tokens = rows + len(chunk), tokens + sum(map(len, answers))
                print(f"{rows} answers, {tokens:,} tokens, {tokens / (time.perf_counter() - started):,.0f} tokens/s",
                      flush=True)


if __name__ == "__main__":
    main()
