"""What generation returns: vLLM's RequestOutput and CompletionOutput, and counters of speculation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from infer.cycle import FROM_PREFILL, FROM_TARGET


@dataclass
class CompletionOutput:
    """One continuation of a prompt.

    index: which of the n. text: without the stop string, see SamplingParams. token_ids: a stop token that ended the
    text is among them. finish_reason: "stop", "length", or None while it is being generated. stop_reason: the stop
    string, or the id out of `stop_token_ids`, that ended the text; None for the model's own end or the length.
    codes: where each token came from, see `cycle.DecodeState`.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    codes: list[int] = field(default_factory=list, repr=False)

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A prompt and its continuations. prompt: None if it was given as token ids and there is no tokenizer."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool


class Metric(NamedTuple):
    """A counter as vLLM's `get_metrics` names it; `values` for the one that has a number for each position."""

    name: str
    value: int
    values: tuple[int, ...] = ()


@dataclass(frozen=True)
class SpecMetrics:
    """Counters of speculation over the tokens that were kept: nothing beyond a stop is counted.

    num_drafts: cycles. num_draft_tokens: drafts put to the target; K a cycle, and of a last cycle that a stop cut
    short those up to the stop. num_accepted_tokens_per_pos[i]: cycles that accepted draft i.
    Iterating gives vLLM's metrics (`metric.name == "vllm:spec_decode_num_drafts"`).
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: tuple[int, ...] = ()

    @classmethod
    def from_codes(cls, codes: Sequence[int], num_spec_tokens: int) -> SpecMetrics:
        """Counters of one continuation. `codes` of the kept tokens alone, `num_spec_tokens` = K."""
        if num_spec_tokens == 0 or not len(codes):
            return cls(num_accepted_tokens_per_pos=(0,) * num_spec_tokens)
        code = np.asarray(codes, np.int64)
        previous = np.concatenate([[FROM_PREFILL], code[:-1]])
        starts = (code >= 0) & ((previous == FROM_PREFILL) | (previous >= FROM_TARGET))
        accepted = code[(code >= 0) & (code < FROM_TARGET)]
        cut_short = int(code[-1]) + 1 if 0 <= code[-1] < FROM_TARGET else 0
        per_position = np.bincount(accepted, minlength=num_spec_tokens)
        return cls(
            num_drafts=int(starts.sum()),
            num_draft_tokens=num_spec_tokens * int((code >= FROM_TARGET).sum()) + cut_short,
            num_accepted_tokens=len(accepted),
            num_accepted_tokens_per_pos=tuple(int(count) for count in per_position),
        )

    @classmethod
    def of(cls, outputs: Iterable[RequestOutput], num_spec_tokens: int) -> SpecMetrics:
        """Counters of every continuation in `outputs`."""
        total = cls(num_accepted_tokens_per_pos=(0,) * num_spec_tokens)
        for output in outputs:
            for completion in output.outputs:
                total += cls.from_codes(completion.codes, num_spec_tokens)
        return total

    def __add__(self, other: SpecMetrics) -> SpecMetrics:
        mine, theirs = self.num_accepted_tokens_per_pos, other.num_accepted_tokens_per_pos
        if len(mine) != len(theirs):
            raise ValueError(f"counters of different numbers of drafts: {len(mine)} and {len(theirs)}")
        return SpecMetrics(
            self.num_drafts + other.num_drafts,
            self.num_draft_tokens + other.num_draft_tokens,
            self.num_accepted_tokens + other.num_accepted_tokens,
            tuple(a + b for a, b in zip(mine, theirs, strict=True)),
        )

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a cycle, the bonus included: 1 without any draft."""
        return 1.0 + (self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0)

    @property
    def acceptance_rate_per_pos(self) -> tuple[float, ...]:
        """The share of cycles that accepted draft i (and so all before it)."""
        return tuple(count / max(self.num_drafts, 1) for count in self.num_accepted_tokens_per_pos)

    def __iter__(self) -> Iterator[Metric]:
        yield Metric("vllm:spec_decode_num_drafts", self.num_drafts)
        yield Metric("vllm:spec_decode_num_draft_tokens", self.num_draft_tokens)
        yield Metric("vllm:spec_decode_num_accepted_tokens", self.num_accepted_tokens)
        per_position = self.num_accepted_tokens_per_pos
        yield Metric("vllm:spec_decode_num_accepted_tokens_per_pos", sum(per_position), per_position)
