"""Predicted acceptance: what the generation engine will accept, without running it.

On text that the target itself wrote greedily, drafting can be checked at every position at once. At root p the drafter
knows the target up to p and the token p+1; n[p] is how many of its K drafts are the tokens that follow. A chain counts
only while it matches, and as long as it does the drafter's own drafts are the text: so teacher forcing gives the same n
as drafting would. The engine's cycles are then a walk: from the first root, the last position of the prompt, each cycle
emits n[p] drafts and the bonus, and the next root is p + n[p] + 1. In float32 this is the engine's own count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from eagle3_jax.distributed import to_host
from eagle3_jax.drafters.eagle3 import Eagle3
from eagle3_jax.precision import matmul_precision
from eagle3_jax.sharding import laid_out
from eagle3_jax.target import Target
from train.data.batches import bucket_lengths, ordered_batches
from train.data.conversations import Row
from train.loss import chunk_size, chunked
from train.params import Params
from train.spread import over_tokens
from train.step import Frozen, Model, make_model
from train.ttt import shift_left


@dataclasses.dataclass(frozen=True)
class Answer:
    """tokens: [T] int32, a prompt and what the target said greedily after it."""

    tokens: np.ndarray
    prompt_length: int

    def __post_init__(self) -> None:
        if self.prompt_length < 1:
            raise ValueError("an answer needs a prompt of at least one token")


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """Counts over cycles, as the engine counts them. accepted[i]: cycles that accepted draft i, so all before it."""

    num_cycles: int
    accepted: tuple[int, ...]

    @classmethod
    def counted(cls, metrics: Any) -> Acceptance:
        """Of the counters of an `infer.LLM`."""
        return cls(metrics.num_drafts, metrics.num_accepted_tokens_per_pos)

    @property
    def length(self) -> float:
        """Mean acceptance length, the bonus included."""
        return 1 + sum(self.accepted) / max(self.num_cycles, 1)

    @property
    def rates(self) -> tuple[float, ...]:
        return tuple(count / max(self.num_cycles, 1) for count in self.accepted)

    def __add__(self, other: Acceptance) -> Acceptance:
        both = zip(self.accepted, other.accepted, strict=True)
        return Acceptance(self.num_cycles + other.num_cycles, tuple(a + b for a, b in both))

    def __sub__(self, other: Acceptance) -> Acceptance:
        both = zip(self.accepted, other.accepted, strict=True)
        return Acceptance(self.num_cycles - other.num_cycles, tuple(a - b for a, b in both))

    def as_dict(self) -> dict[str, Any]:
        return {
            "acceptance_length": self.length, "acceptance_rates": list(self.rates), "num_cycles": self.num_cycles,
        }  # fmt: skip


def walk(matches: np.ndarray, prompt_length: int, length: int, num_drafts: int) -> Acceptance:
    """The engine's cycles over one answer. matches: [T], n[p] at every position; length: prompt and answer."""
    root, accepted = prompt_length - 1, []
    while root + 2 < length:  # a token after root + 1 is still to come
        accepted.append(int(matches[root]))
        root += accepted[-1] + 1
    counts = np.bincount(accepted, minlength=num_drafts + 1)
    at_least = counts[::-1].cumsum()[::-1]
    return Acceptance(len(accepted), tuple(int(n) for n in at_least[1:]))


def make_matches(model: Model, d2t: Array) -> Callable[[Params, Frozen, Array, Array], Array]:
    """A jitted (params, frozen, tokens [B, T], lengths [B]) -> n [B, T] int32 for K = model.num_steps."""

    def matches(params: Params, frozen: Frozen, tokens: Array, lengths: Array) -> Array:
        with matmul_precision(model.dtype), laid_out(model.mesh, "batch"):
            aux = model.target(frozen)(tokens, aux_layers=model.aux_layers).aux
            outputs = model.outputs(params, frozen, aux, tokens)
            guesses = d2t[_argmax(model.draft_logits(params, frozen), outputs, len(d2t))]
        known = jnp.where(jnp.arange(tokens.shape[1])[None] < lengths[:, None], tokens, -1)
        said = jnp.stack([shift_left(known + 1, i + 2) - 1 for i in range(model.num_steps)])
        return jnp.sum(jnp.cumprod((guesses == said).astype(jnp.int32), axis=0), axis=0)

    return jax.jit(matches)


def _argmax(logits: Callable[[Array], Array], outputs: Array, vocab_size: int) -> Array:
    """[n, B, T] of outputs [n, B, T, D], with the logits of a few tokens at a time."""

    def local(logits: Callable[[Array], Array], outputs: Array) -> Array:
        steps, batch, length, _ = outputs.shape
        size = chunk_size(length, steps * batch, vocab_size)
        chunks = chunked(lambda hidden: jnp.argmax(logits(hidden), axis=-1), [(outputs, 2)], size)
        return jnp.moveaxis(chunks, 0, 2).reshape(steps, batch, -1)[:, :, :length]

    return over_tokens(local, logits, [(outputs, 2)], out=2)


def predicted_acceptance(
    target: Target, drafter: Eagle3, answers: Sequence[Answer], num_drafts: int, *, batch_size: int = 8
) -> Acceptance:
    """Of `num_drafts` greedy drafts a cycle over all answers, computed in float32."""
    model, params, frozen = make_model(target, drafter, num_steps=num_drafts, dtype=jnp.float32)
    return count_acceptance(make_matches(model, drafter.d2t[...]), params, frozen, answers, num_drafts, batch_size)


def count_acceptance(
    matches: Callable[[Params, Frozen, Array, Array], Array],
    params: Params,
    frozen: Frozen,
    answers: Sequence[Answer],
    num_drafts: int,
    batch_size: int,
) -> Acceptance:
    """Walks every answer."""
    total = Acceptance(0, (0,) * num_drafts)
    for group, tokens, lengths in _batches(answers, batch_size):
        found = to_host(matches(params, frozen, tokens, lengths))
        for answer, row in zip(group, found, strict=False):
            total += walk(row, answer.prompt_length, len(answer.tokens), num_drafts)
    return total


def _batches(answers: Sequence[Answer], size: int) -> Iterable[tuple[Sequence[Answer], Array, Array]]:
    """Answers of similar length together, so that little is padded."""
    ordered = sorted(answers, key=lambda a: len(a.tokens))
    rows = [Row(a.tokens, np.zeros(len(a.tokens), bool)) for a in ordered]
    buckets = bucket_lengths(max((len(a.tokens) for a in answers), default=1))
    for i, batch in enumerate(ordered_batches(rows, batch_size=size, buckets=buckets)):
        group = ordered[i * size : (i + 1) * size]
        lengths = np.zeros(size, np.int32)
        lengths[: len(group)] = [len(a.tokens) for a in group]
        yield group, jnp.asarray(batch.tokens), jnp.asarray(lengths)


def answers_of(rows: Iterable[Row]) -> list[Answer]:
    """The last turn of each row, with all before it as prompt; rows without one are left out."""
    found = []
    for row in rows:
        said = np.flatnonzero(row.mask)
        if len(said) and (start := _run_start(row.mask, int(said[-1]))) > 0:
            found.append(Answer(row.tokens[: said[-1] + 1], start))
    return found


def _run_start(mask: np.ndarray, end: int) -> int:
    others = np.flatnonzero(~mask[:end])
    return int(others[-1]) + 1 if len(others) else 0


def greedy_answers(llm: Any, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Answer]:
    """What the target of an `infer.LLM` says after tokenised prompts, until its own end or `max_tokens`."""
    from infer import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    outputs = llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False)
    joined = (np.asarray([*p, *o.outputs[0].token_ids], np.int32) for p, o in zip(prompts, outputs, strict=True))
    return [Answer(tokens, len(prompt)) for tokens, prompt in zip(joined, prompts, strict=True)]
