"""`eagle3 bench`: the flags and the figures of vLLM's `examples/offline_inference/spec_decode.py`, and a baseline."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from eagle3_jax.distributed import is_first
from eagle3_jax.errors import UserError
from infer.bench import Acceptance, Agreement, TimedRun, encode, timed_run
from infer.bench_data import read_conversations
from infer.cli_common import (
    SYNTHETIC_NOTICE,
    add_engine_arguments,
    engine_keywords,
    model_or_default,
    show_notes,
    speculative_config,
)
from infer.llm import LLM
from infer.outputs import SpecMetrics
from infer.params import SamplingParams

RULE = "-" * 50
COUNTERS_NOTICE = "(counters leave out what lies beyond a stop or a length limit; vLLM's include it)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model-dir", help="folder or hub id of the target (default: the model in this repository)")
    parser.add_argument("--eagle-dir", help="folder or hub id of its head (default: none, or the repository's own)")
    parser.add_argument("--method", default="eagle3", choices=("eagle3",))
    parser.add_argument("--num-spec-tokens", type=int, help="tokens to draft each cycle; 0 = none (default: 3)")
    parser.add_argument("--dataset-name", help="a name for the report (default: the file's)")
    parser.add_argument("--dataset-path", type=Path, help="a JSONL file of prompts (default: eight built-in ones)")
    parser.add_argument("--num-prompts", type=int, default=80)
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=-1)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0, help="prompt i is sampled with seed + i")
    parser.add_argument("--batch-size", type=int, default=16, help="prompts continued at the same time")
    parser.add_argument("--raw", action="store_true", help="prompts as they are, without the chat template")
    parser.add_argument("--ignore-eos", action="store_true", help="write output-len tokens whatever the model says")
    parser.add_argument("--skip-baseline", action="store_true", help="do not measure generation without the drafter")
    parser.add_argument("--enable-chunked-prefill", action="store_true", help="as vLLM's flag; prefill always is")
    parser.add_argument("--enforce-eager", action="store_true", help="as vLLM's flag; has no effect")
    parser.add_argument("--print-output", action="store_true", help="print every prompt and its answer")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the figures, with every answer, to a file")
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    conversations = read_conversations(args.dataset_path, _positive("--num-prompts", args.num_prompts))
    show_notes()
    llm = _load(args)
    raw = args.raw or not getattr(llm.get_tokenizer(), "chat_template", None)
    prompts = encode(llm, conversations, raw=raw)
    params = [_params(args, i) for i in range(len(prompts))]
    with_drafter = timed_run(llm, prompts, params) if llm.num_speculative_tokens else None
    without = None
    if with_drafter is None or not args.skip_baseline:
        without = timed_run(_baseline(llm, args), prompts, params)
    report = Report(with_drafter, without, llm.num_speculative_tokens)
    if args.print_output:
        _print_outputs(with_drafter or without)
    for line in report.lines(synthetic=llm.speculation.rejection_sample_method == "synthetic"):
        print(line)
    figures = {**_setting(args, llm, raw, len(prompts)), **report.figures()}
    if args.json is not None and is_first():
        args.json.write_text(json.dumps({**figures, "answers": report.answers()}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures))
    return 0


@dataclasses.dataclass(frozen=True)
class Report:
    """What was measured, as lines for people and as figures for programs. One of the runs may be missing."""

    with_drafter: TimedRun | None
    without: TimedRun | None
    num_spec_tokens: int

    @property
    def main(self) -> TimedRun:
        run = self.with_drafter or self.without
        assert run is not None
        return run

    @property
    def acceptance(self) -> Acceptance:
        return Acceptance.of(self.main.answers, self.num_spec_tokens)

    @property
    def agreement(self) -> Agreement | None:
        if self.with_drafter is None or self.without is None:
            return None
        return Agreement.of(self.with_drafter.answers, self.without.answers)

    def lines(self, *, synthetic: bool) -> Iterator[str]:
        if synthetic:
            yield SYNTHETIC_NOTICE
        acceptance = self.acceptance
        yield from self._counter_lines(acceptance.total)
        if self.num_spec_tokens:
            yield from self._loop_lines(acceptance)
        yield from self._speed_lines()

    def _counter_lines(self, metrics: SpecMetrics) -> Iterator[str]:
        yield RULE
        yield f"total_num_output_tokens: {self.main.num_tokens}"
        yield f"num_drafts: {metrics.num_drafts}"
        yield f"num_draft_tokens: {metrics.num_draft_tokens}"
        yield f"num_accepted_tokens: {metrics.num_accepted_tokens}"
        yield f"mean acceptance length: {metrics.mean_acceptance_length:.2f}"
        yield RULE
        for i, rate in enumerate(metrics.acceptance_rate_per_pos):
            yield f"acceptance at token {i}: {rate:.2f}"
        yield COUNTERS_NOTICE

    def _loop_lines(self, acceptance: Acceptance) -> Iterator[str]:
        yield (
            f"mean acceptance length up to the first 4-gram seen three times: "
            f"{acceptance.before_loops.mean_acceptance_length:.2f} ({acceptance.num_looping} of "
            f"{len(self.main.answers)} answers loop, and loops flatter a drafter)"
        )
        yield "of each answer: " + " ".join(f"{length:.2f}" for length in acceptance.each_before_loops)

    def _speed_lines(self) -> Iterator[str]:
        for name, run in (("with the drafter", self.with_drafter), ("without", self.without)):
            if run is not None:
                after = f"{run.seconds:.2f} s, after {run.warm_up_seconds:.1f} s of compilation and warm-up"
                yield f"tokens per second {name}: {run.tokens_per_second:.1f} ({after})"
        if self.with_drafter is None or self.without is None:
            return
        yield f"speed-up: {self.with_drafter.tokens_per_second / self.without.tokens_per_second:.2f}"
        agreement = self.agreement
        assert agreement is not None
        yield (
            f"agreement: {agreement.identical} of {agreement.answers} answers are the same; "
            f"{agreement.share:.2%} of tokens come before a first difference"
        )

    def figures(self) -> dict[str, Any]:
        acceptance, agreement = self.acceptance, self.agreement
        figures: dict[str, Any] = {"total_num_output_tokens": self.main.num_tokens, **_counters(acceptance.total)}
        if self.num_spec_tokens:
            figures["before_loops"] = _counters(acceptance.before_loops)
            figures["looping_answers"] = acceptance.num_looping
        for name, run in (("with_drafter", self.with_drafter), ("without_drafter", self.without)):
            if run is not None:
                figures[f"tokens_per_second_{name}"] = round(run.tokens_per_second, 2)
                figures[f"seconds_{name}"] = round(run.seconds, 4)
                figures[f"warm_up_seconds_{name}"] = round(run.warm_up_seconds, 2)
        if agreement is not None:
            figures["identical_answers"], figures["agreement"] = agreement.identical, round(agreement.share, 6)
        return figures

    def answers(self) -> list[dict[str, Any]]:
        """Every answer of the main run, for a file."""
        lengths = self.acceptance.each_before_loops
        return [
            {
                "prompt": output.prompt,
                "text": output.outputs[0].text,
                "finish_reason": output.outputs[0].finish_reason,
                "num_tokens": len(output.outputs[0].token_ids),
                "acceptance_length_before_loop": round(length, 4),
            }
            for output, length in zip(self.main.outputs, lengths, strict=True)
        ]


def _counters(metrics: SpecMetrics) -> dict[str, Any]:
    return {
        "num_drafts": metrics.num_drafts,
        "num_draft_tokens": metrics.num_draft_tokens,
        "num_accepted_tokens": metrics.num_accepted_tokens,
        "mean_acceptance_length": round(metrics.mean_acceptance_length, 4),
        "acceptance_per_position": [round(rate, 4) for rate in metrics.acceptance_rate_per_pos],
    }


def _load(args: argparse.Namespace) -> LLM:
    config = speculative_config(args, model=args.model_dir, draft=args.eagle_dir, drafts=args.num_spec_tokens)
    return LLM(
        model_or_default(args.model_dir),
        speculative_config=config,
        max_num_seqs=args.batch_size,
        **engine_keywords(args),
    )


def _baseline(llm: LLM, args: argparse.Namespace) -> LLM:
    """The same target, weights shared, without a drafter."""
    if not llm.num_speculative_tokens:
        return llm
    return LLM.from_models(
        llm.target,
        tokenizer=llm.get_tokenizer(),
        stop_ids=llm.stop_ids,
        max_num_seqs=args.batch_size,
        max_model_len=llm.max_model_len,
        mesh=llm.mesh,
    )


def _params(args: argparse.Namespace, index: int) -> SamplingParams:
    return SamplingParams(
        temperature=args.temp,
        top_p=args.top_p,
        top_k=args.top_k,
        max_tokens=args.output_len,
        seed=args.seed + index,
        ignore_eos=args.ignore_eos,
    )


def _setting(args: argparse.Namespace, llm: LLM, raw: bool, num_prompts: int) -> dict[str, Any]:
    """What the figures were measured with."""
    path, device = args.dataset_path, jax.devices()[0]
    return {
        "model": str(model_or_default(args.model_dir)),
        "dataset": args.dataset_name or (path.name if path is not None else "built-in"),
        "num_prompts": num_prompts,
        "chat_template": not raw,
        "num_spec_tokens": llm.num_speculative_tokens,
        "draft_sample_method": llm.speculation.draft_sample_method,
        "rejection_sample_method": llm.speculation.rejection_sample_method,
        "synthetic_acceptance_length": llm.speculation.synthetic_acceptance_length,
        "temperature": args.temp,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "output_len": args.output_len,
        "seed": args.seed,
        "batch_size": args.batch_size,
        "dtype": llm.dtype,
        "quantization": args.quantization,
        "device": device.device_kind,
        "num_devices": args.tp,
    }


def _print_outputs(run: TimedRun | None) -> None:
    for output in run.outputs if run is not None else ():
        print(RULE)
        print(f"prompt: {output.prompt}")
        print(f"generated text: {output.outputs[0].text}")
        print(RULE)


def _positive(flag: str, value: int) -> int:
    if value < 1:
        raise UserError(f"{flag} {value}: must be at least 1")
    return value
