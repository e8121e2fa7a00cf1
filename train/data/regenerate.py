"""`eagle3 data regenerate`: the target answers prompts itself, so that a head learns its own manner of writing.

Prompt number i is answered in pass p at temperature number i + p of the list, around again from its start, with a seed
of its own. So an answer is a function of weights, prompt, settings, i and p: it does not matter in what order, in what
company or after how many interruptions it is written (but for near ties in bfloat16, see docs/lossless.md).
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from eagle3_jax.checkpoint.source import resolve
from eagle3_jax.distributed import from_first
from eagle3_jax.errors import UserError
from train.data.answers import Answers, open_answers
from train.data.checksums import model_checksum
from train.data.conversations import BadRow, Conversation, parse_prompt
from train.data.mask import ChatRenderer
from train.data.renderer import add_template_arguments, load_renderer, parse_template_kwargs
from train.data.sources import read_records

if TYPE_CHECKING:
    from infer import LLM, RequestOutput, SamplingParams

ROUNDS = 64  # prompts handed over at a time, as a multiple of the slots: these idle only at the end of so many


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", type=Path, help="rows in any form of data.files, {turns}, {question}, or .npz")
    parser.add_argument("--target", required=True, help="folder or hub id of the model that answers")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.jsonl", help="rows that data.files reads")
    parser.add_argument("--temperatures", "--temperature", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=256, help="of an answer (default: 256)")
    parser.add_argument("--passes", type=int, default=1, help="answers to each prompt (default: 1)")
    parser.add_argument("--limit", type=int, help="only the first so many prompts; may be raised later")
    parser.add_argument("--part", default="0/1", metavar="I/N", help="only every N-th prompt from I, for N processes")
    parser.add_argument("--seed", type=int, default=0)
    add_template_arguments(parser)
    engine = parser.add_argument_group("engine")
    engine.add_argument("--max-model-len", type=int, help="of prompt and answer together (default: at most 4096)")
    engine.add_argument("--batch", type=int, default=64, help="answers written at the same time (default: 64)")
    engine.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    engine.add_argument("--tensor-parallel-size", type=int, default=1)
    engine.add_argument("--draft", help="folder or hub id of a head: the same answers, in less time")
    engine.add_argument("--k", type=int, default=3, help="drafts a cycle, with --draft (default: 3)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


@dataclasses.dataclass(frozen=True)
class Job:
    """One answer to be written. tokens: [T] int32, the prompt with its generation prompt."""

    index: int
    turn: int
    tokens: np.ndarray

    @property
    def place(self) -> str:
        return f"{self.turn}:{self.index}"

    @property
    def key(self) -> str:
        """Says of which prompt, too: a row is not taken for the answer to a prompt that has been changed since."""
        return f"{self.place}:{hashlib.sha256(self.tokens.astype(np.int32).tobytes()).hexdigest()[:12]}"


def run(args: argparse.Namespace) -> int:
    folder = resolve(args.target)
    renderer = load_renderer(
        folder, tokenizer=args.tokenizer, template_kwargs=parse_template_kwargs(args.template_kwargs)
    )
    prompts = read_prompts(args.prompts, renderer, args.limit)
    with open_answers(args.output, _settings(args, folder)) as file:
        llm = _engine(args, folder)
        fitting = [(i, p) for i, p in prompts if len(p) + args.max_tokens <= llm.max_model_len]
        jobs = plan(fitting, args.passes, _part(args.part))
        if left_out := len(prompts) - len(fitting):
            print(f"{left_out} prompts left out: with --max-tokens {args.max_tokens} longer than {llm.max_model_len}")
        missing = agreed(jobs, remaining(jobs, file))
        print(f"{len(jobs)} answers to {len(fitting)} prompts; {len(jobs) - len(missing)} are there already")
        print(answer_all(llm, missing, file, args))
    return 0


def _settings(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What an answer depends on, beside its prompt."""
    names = ("temperatures", "top_p", "top_k", "max_tokens", "seed", "dtype")
    return {"target": model_checksum(folder), **{name: getattr(args, name) for name in names}}


def _engine(args: argparse.Namespace, folder: Path) -> LLM:
    from infer import LLM

    speculative = {"model": args.draft, "num_speculative_tokens": args.k} if args.draft else None
    # Only ids are wanted: without a tokenizer nothing is spent on text. Rare looks by the host keep the device busy.
    return LLM(
        model=folder, speculative_config=speculative, max_model_len=args.max_model_len, max_num_seqs=args.batch,
        dtype=args.dtype, tensor_parallel_size=args.tensor_parallel_size, cycles_per_sync=32, skip_tokenizer_init=True,
    )  # fmt: skip


# ----------------------------------------------------------------------------------------------------- prompts


def read_prompts(path: Path, renderer: ChatRenderer | None, limit: int | None) -> list[tuple[int, np.ndarray]]:
    """The first `limit` prompts that can be used, each with its number among the rows of the file.

    Raises:
      UserError: there are none.
    """
    dropped = Counter[str]()
    found = list[tuple[int, np.ndarray]]()
    for index, record in enumerate(_records(path)):
        if limit is not None and len(found) >= limit:
            break
        try:
            found.append((index, _tokens(parse_prompt(record), renderer)))
        except BadRow as reason:
            dropped[str(reason)] += 1
    reasons = "".join(f"\n  dropped: {count} x {reason}" for reason, count in dropped.most_common())
    if not found:
        raise UserError(f"{path}: no prompt can be used{reasons}")
    print(f"{len(found)} prompts read{reasons}")
    return found


def _records(path: Path) -> Iterator[Any]:
    """Of an .npz: `ids`, and `offsets` between which each prompt lies."""
    if path.suffix != ".npz":
        yield from read_records(path)
        return
    if not path.is_file():
        raise UserError(f"{path}: no such data file")
    with np.load(path) as arrays:
        ids, ends = arrays["ids"], arrays["offsets"]
    for start, end in zip(ends[:-1], ends[1:], strict=True):
        yield {"input_ids": ids[start:end].tolist()}


def _tokens(prompt: Conversation | np.ndarray, renderer: ChatRenderer | None) -> np.ndarray:
    if isinstance(prompt, Conversation):
        if renderer is None:
            raise BadRow("a conversation, but there is no tokenizer with a chat template")
        text = renderer.render(prompt.messages, prompt.tools, prompt=True)
        prompt = np.asarray(renderer.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], np.int32)
    if not len(prompt):
        raise BadRow("an empty prompt")
    return prompt


def plan(prompts: Sequence[tuple[int, np.ndarray]], passes: int, part: tuple[int, int] = (0, 1)) -> list[Job]:
    """Every prompt once in each pass."""
    mine = [(index, tokens) for index, tokens in prompts if index % part[1] == part[0]]
    return [Job(index, turn, tokens) for turn in range(passes) for index, tokens in mine]


def _part(text: str) -> tuple[int, int]:
    first, _, count = text.partition("/")
    if not (first.isdigit() and count.isdigit() and int(first) < int(count)):
        raise UserError(f"--part {text}: expected I/N with 0 <= I < N")
    return int(first), int(count)


def remaining(jobs: Sequence[Job], file: Answers) -> list[Job]:
    """The jobs whose answers are not in `file`.

    Raises:
      UserError: it holds answers to other prompts at the same places.
    """
    places = {key.rpartition(":")[0]: key for key in file.keys}
    if changed := [job for job in jobs if places.get(job.place, job.key) != job.key]:
        raise UserError(
            f"{file.path}: prompt {changed[0].index} is another than when it was answered ({len(changed)} such): the "
            "prompts, the tokenizer or the template have changed; choose another output"
        )
    return [job for job in jobs if job.place not in places]


def agreed(jobs: Sequence[Job], missing: Sequence[Job]) -> list[Job]:
    """What is missing according to the first process, which alone has the file."""
    places = {job.place for job in missing}
    chosen = from_first(np.array([job.place in places for job in jobs], np.int32))
    return [job for job, wanted in zip(jobs, chosen.tolist(), strict=True) if wanted]


# ----------------------------------------------------------------------------------------------------- answers


def answer_all(llm: LLM, jobs: Sequence[Job], file: Answers, args: argparse.Namespace) -> str:
    """Writes each answer as soon as it has ended; returns the figures."""
    started, num_tokens, reasons = time.perf_counter(), 0, Counter[str]()
    with tqdm(total=len(jobs), desc="answers", unit="", disable=args.quiet, dynamic_ncols=True) as bar:
        for job, output in _finished(llm, jobs, args):
            one = output.outputs[0]
            file.append(training_row(job, one.token_ids, one.finish_reason or ""))
            num_tokens += len(one.token_ids)
            reasons[one.finish_reason or ""] += 1
            bar.update()
            bar.set_postfix_str(f"{num_tokens / (time.perf_counter() - started):,.0f} tokens/s", refresh=False)
    seconds = time.perf_counter() - started
    return (
        f"{len(jobs)} answers, {num_tokens:,} tokens in {seconds:.1f} s, compilation included: "
        f"{len(jobs) / seconds:,.2f} answers/s, {num_tokens / seconds:,.0f} tokens/s; "
        f"{reasons['length']} were cut at --max-tokens"
    )


def _finished(llm: LLM, jobs: Sequence[Job], args: argparse.Namespace) -> Iterator[tuple[Job, RequestOutput]]:
    """Jobs with their answers, in the order in which these end."""
    size = ROUNDS * args.batch
    for start in range(0, len(jobs), size):
        part = jobs[start : start + size]
        prompts = [{"prompt_token_ids": job.tokens.tolist()} for job in part]
        for output in llm.stream(prompts, [_params(job, args) for job in part]):
            if output.finished:
                yield jobs[int(output.request_id)], output  # requests are numbered as this LLM was given them


def _params(job: Job, args: argparse.Namespace) -> SamplingParams:
    from infer import SamplingParams

    seed = int.from_bytes(hashlib.sha256(f"{args.seed}/{job.place}".encode()).digest()[:4])
    temperature = args.temperatures[(job.index + job.turn) % len(args.temperatures)]
    return SamplingParams(
        temperature=temperature, top_p=args.top_p, top_k=args.top_k, max_tokens=args.max_tokens, seed=seed
    )


def training_row(job: Job, answer: Sequence[int], finish_reason: str) -> dict[str, Any]:
    """Supervises the answer alone, its end token included."""
    prompt = job.tokens.tolist()
    return {
        "key": job.key,
        "finish_reason": finish_reason,
        "input_ids": [*prompt, *answer],
        "loss_mask": [0] * len(prompt) + [1] * len(answer),
    }
