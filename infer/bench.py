"""Figures of a benchmark: speed and acceptance with a drafter, speed without, and how far the two texts agree."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from infer.bench_data import Conversation
from infer.llm import LLM
from infer.outputs import CompletionOutput, RequestOutput, SpecMetrics
from infer.params import SamplingParams

LOOP_NGRAM, LOOP_TIMES = 4, 3


@dataclasses.dataclass(frozen=True)
class TimedRun:
    """Outputs of every prompt, and the seconds that all of them took together; before that, those of compilation."""

    outputs: list[RequestOutput]
    seconds: float
    warm_up_seconds: float

    @property
    def answers(self) -> list[CompletionOutput]:
        return [output.outputs[0] for output in self.outputs]

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


def encode(llm: LLM, conversations: Sequence[Conversation], *, raw: bool) -> list[dict[str, Any]]:
    """Prompts as text and ids: through the chat template, or the last message alone if `raw`."""
    tokenizer = llm.get_tokenizer()
    texts = [one[-1]["content"] if raw else llm.render(one) for one in conversations]
    return [{"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=raw)} for text in texts]


def timed_run(llm: LLM, prompts: Sequence[Mapping[str, Any]], params: Sequence[SamplingParams]) -> TimedRun:
    """Continues the prompts twice: two tokens each, which compiles every program, and then in full, timed.

    Prompts are let in by groups, and the longest of a group says which lengths of chunk are needed. Groups fall out
    differently in the timed run, so one prompt of each kind also goes first alone.
    """
    began = time.perf_counter()
    brief = [dataclasses.replace(one, max_tokens=2, ignore_eos=True) for one in params]
    llm.generate(prompts, brief, use_tqdm=False)
    kinds = {frozenset(llm.prefill_chunks(len(one["prompt_token_ids"]))): i for i, one in enumerate(prompts)}
    for i in kinds.values():
        llm.generate([prompts[i]], brief[i], use_tqdm=False)
    started = time.perf_counter()
    outputs = llm.generate(prompts, params)
    return TimedRun(outputs, time.perf_counter() - started, started - began)


def loop_end(token_ids: Sequence[int]) -> int:
    """Tokens up to the end of the first 4-gram that is seen for the third time; all of them when there is none.

    A small model that repeats itself is easy to guess, so what follows flatters a drafter.
    """
    seen: collections.Counter[tuple[int, ...]] = collections.Counter()
    for end in range(LOOP_NGRAM, len(token_ids) + 1):
        ngram = tuple(token_ids[end - LOOP_NGRAM : end])
        seen[ngram] += 1
        if seen[ngram] == LOOP_TIMES:
            return end
    return len(token_ids)


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """Counters over all answers; over their parts before they loop; and of each of those parts by itself."""

    total: SpecMetrics
    before_loops: SpecMetrics
    each_before_loops: list[float]
    num_looping: int

    @classmethod
    def of(cls, answers: Sequence[CompletionOutput], num_spec_tokens: int) -> Acceptance:
        ends = [loop_end(answer.token_ids) for answer in answers]
        whole = [SpecMetrics.from_codes(answer.codes, num_spec_tokens) for answer in answers]
        cut = [
            SpecMetrics.from_codes(answer.codes[:end], num_spec_tokens)
            for answer, end in zip(answers, ends, strict=True)
        ]
        nothing = SpecMetrics.from_codes((), num_spec_tokens)
        return cls(
            total=sum(whole, nothing),
            before_loops=sum(cut, nothing),
            each_before_loops=[one.mean_acceptance_length for one in cut],
            num_looping=sum(end < len(answer.token_ids) for answer, end in zip(answers, ends, strict=True)),
        )


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Answers that are the same in both runs, and the share of tokens that come before the first difference."""

    identical: int
    answers: int
    agreeing_tokens: int
    tokens: int

    @classmethod
    def of(cls, ours: Sequence[CompletionOutput], theirs: Sequence[CompletionOutput]) -> Agreement:
        pairs = [(a.token_ids, b.token_ids) for a, b in zip(ours, theirs, strict=True)]
        return cls(
            identical=sum(a == b for a, b in pairs),
            answers=len(pairs),
            agreeing_tokens=sum(_common_prefix(a, b) for a, b in pairs),
            tokens=sum(max(len(a), len(b)) for a, b in pairs),
        )

    @property
    def share(self) -> float:
        return self.agreeing_tokens / self.tokens if self.tokens else 1.0


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
