"""`eagle3 generate`: text from a prompt, as it is being written, and what speculation did for it."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from eagle3_jax.errors import UserError
from infer.cli_common import (
    SYNTHETIC_NOTICE,
    add_engine_arguments,
    engine_keywords,
    model_or_default,
    show_notes,
    speculative_config,
)
from infer.llm import LLM
from infer.outputs import RequestOutput, SpecMetrics
from infer.params import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="the prompt; standard input when neither it nor --file is given")
    parser.add_argument("--file", type=Path, help="a text file that holds the prompt")
    parser.add_argument("--model", help="folder or hub id of the target (default: the model in this repository)")
    parser.add_argument("--draft", help="folder or hub id of its EAGLE-3 head (default: none, or the repository's own)")
    parser.add_argument("--k", type=int, help="tokens to draft each cycle; 0 = generate without the head (default: 3)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--chat", action="store_true", help="the prompt is a user's message (default with a chat template)"
    )
    form.add_argument("--raw", action="store_true", help="the prompt is text to be continued")
    parser.add_argument("--system", help="system message, with --chat")
    parser.add_argument("--thinking", action=argparse.BooleanOptionalAction, help="let the template ask for thinking")
    _add_sampling_arguments(parser)
    add_engine_arguments(parser)


def _add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (default: what the model's generation_config recommends)")
    group.add_argument("--temperature", type=float, help="0 = greedy")
    group.add_argument("--top-p", type=float)
    group.add_argument("--top-k", type=int)
    group.add_argument("--min-p", type=float)
    group.add_argument("--seed", type=int)
    group.add_argument("--max-tokens", type=int, default=256)
    group.add_argument("--min-tokens", type=int)
    group.add_argument("--stop", action="append", metavar="TEXT", help="ends the answer; may be given several times")
    group.add_argument("--ignore-eos", action="store_true", default=None)


def run(args: argparse.Namespace) -> int:
    prompt = read_prompt(args.prompt, args.file)
    show_notes()
    config = speculative_config(args, model=args.model, draft=args.draft, drafts=args.k)
    llm = LLM(model_or_default(args.model), speculative_config=config, max_num_seqs=1, **engine_keywords(args))
    params = sampling_params(args, llm.get_default_sampling_params())
    started = time.perf_counter()
    output, marks = write(answer(llm, prompt, params, args))
    print()
    for line in summary(output, llm, [(seconds - started, count) for seconds, count in marks]):
        print(line, file=sys.stderr)
    return 0


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from its argument, a file or standard input. Raises UserError for none, two, or an empty one."""
    if prompt is not None and file is not None:
        raise UserError("a prompt and --file were given; give one of them")
    if prompt is None:
        prompt = _read_file(file) if file is not None else _read_stdin()
    if not prompt.strip():
        raise UserError("the prompt is empty")
    return prompt


def _read_file(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--file {file}: {error}") from error


def _read_stdin() -> str:
    if sys.stdin.isatty():
        raise UserError("no prompt: give it as an argument, with --file, or on standard input")
    return sys.stdin.read()


def sampling_params(args: argparse.Namespace, default: SamplingParams) -> SamplingParams:
    """What the flags say; for the rest what the model recommends."""
    values: dict[str, Any] = {name: getattr(default, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    names = (*values, "seed", "max_tokens", "min_tokens", "stop", "ignore_eos")
    values.update({name: getattr(args, name) for name in names if getattr(args, name) is not None})
    return SamplingParams(**values)


def answer(llm: LLM, prompt: str, params: SamplingParams, args: argparse.Namespace) -> Iterator[RequestOutput]:
    """The growing output; a conversation if the model has a template and nothing else was asked for."""
    is_chat = args.chat or (not args.raw and bool(getattr(llm.get_tokenizer(), "chat_template", None)))
    if not is_chat:
        if args.system or args.thinking is not None:
            raise UserError("--system and --thinking need a conversation (--chat)")
        return llm.stream(prompt, params)
    system = [{"role": "system", "content": args.system}] if args.system else []
    kwargs = {} if args.thinking is None else {"enable_thinking": args.thinking}
    return llm.stream_chat([*system, {"role": "user", "content": prompt}], params, chat_template_kwargs=kwargs)


Marks = Sequence[tuple[float, int]]
"""When each output came, and how many tokens there were by then."""


def write(outputs: Iterator[RequestOutput]) -> tuple[RequestOutput, Marks]:
    """Prints what is new of each output; returns the last, and when they came."""
    shown, last = "", None
    marks: list[tuple[float, int]] = []
    for last in outputs:
        text = last.outputs[0].text
        print(text[len(shown) :], end="", flush=True)
        shown = text
        marks.append((time.perf_counter(), len(last.outputs[0].token_ids)))
    if last is None:
        raise RuntimeError("the engine gave no output")
    return last, marks


def summary(output: RequestOutput, llm: LLM, marks: Marks) -> Sequence[str]:
    """Lines on how much was written, how fast, and how well the drafter guessed.

    The first output waits for prefill to be compiled, the second for the cycle; only what follows is timed.
    """
    one, drafts = output.outputs[0], llm.num_speculative_tokens
    metrics = SpecMetrics.from_codes(one.codes, drafts)
    lines = [f"[{len(one.token_ids)} tokens, ended by {one.finish_reason}, in {marks[-1][0]:.2f} s with compilation"]
    if len(marks) > 2:
        (start, before), (end, after) = marks[1], marks[-1]
        lines[0] += f"; once compiled, {(after - before) / (end - start):.1f} tokens/s"
    lines[0] += "]"
    if not drafts:
        return [*lines, "[no drafter]"]
    rates = ", ".join(f"{rate:.2f}" for rate in metrics.acceptance_rate_per_pos)
    lines.append(
        f"[speculation: {metrics.num_drafts} cycles of {drafts} drafts, {metrics.num_accepted_tokens} accepted; mean "
        f"acceptance length {metrics.mean_acceptance_length:.2f}; acceptance at each position {rates}]"
    )
    return [*lines, f"[{SYNTHETIC_NOTICE}]"] if llm.speculation.rejection_sample_method == "synthetic" else lines
