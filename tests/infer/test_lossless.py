"""The text is a function of weights, prompt, parameters and seed alone: not of the drafter, K, or the neighbours."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from eagle3_jax.target import Target
from infer.cycle import FROM_TARGET, Speculation
from infer.engine import Engine
from infer.params import SamplingParams
from infer.sampling import request_state
from tests.infer import tiny
from tests.infer.tiny import FAMILIES, VOCAB, Answer

TIE = 1e-4
_RNG = np.random.default_rng(0)
# Shorter than the convolution, longer than a page, longer than a prefill chunk.
PROMPTS = [_RNG.integers(0, VOCAB, n).tolist() for n in (1, 2, 3, 9, 17, 40)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24),
    SamplingParams(temperature=2.5, max_tokens=24),
    SamplingParams(temperature=1.0, top_p=0.9, max_tokens=24, seed=5),
    SamplingParams(temperature=4.0, top_k=20, max_tokens=24),
    SamplingParams(temperature=0, max_tokens=24, min_tokens=6),
    SamplingParams(temperature=0.8, top_p=0.95, min_p=0.02, max_tokens=24),
]
STOPS = (7, 11)


@functools.cache
def family_target(family: str) -> Target:
    return tiny.target(family)


@functools.cache
def reference(family: str) -> list[Answer]:
    """The engine without a drafter."""
    return tiny.answers(tiny.build(family_target(family), None, Speculation()), PROMPTS, PARAMS, stop_ids=STOPS)


def same(engine: Engine, model: Target, got: Sequence[Answer], want: Sequence[Answer]) -> int:
    """Checks token for token; returns the number of ties, where programs of different shapes may round apart.

    After a tie the texts would go separate ways, so the engine starts again from the reference's own words: noise
    belongs to positions, so they must go on as the reference does.
    """
    ties = 0
    for i, (ours, plain) in enumerate(zip(got, want, strict=True)):
        prompt, wish = PROMPTS[i], PARAMS[i]
        answer, done = ours, 0
        while answer.tokens != plain.tokens[done:]:
            rest = plain.tokens[done:]
            at = next(j for j, (a, b) in enumerate(zip([*answer.tokens, -1], [*rest, -2], strict=False)) if a != b)
            gap = tiny.margin(model, prompt, plain.tokens, done + at, i, wish)
            assert gap < TIE, f"prompt {i}: token {done + at} differs although the best two are {gap:.2e} apart"
            ties, done = ties + 1, done + at + 1
            if done == len(plain.tokens):
                break
            (answer,) = tiny.answers(
                engine, [prompt + plain.tokens[:done]], [_rest(wish, done)], stop_ids=STOPS, first=i
            )
        assert ties or answer.reason == plain.reason
    return ties


def _rest(wish: SamplingParams, done: int) -> SamplingParams:
    """The wish of a request of which `done` tokens are said."""
    assert wish.max_tokens is not None
    return dataclasses.replace(wish, max_tokens=wish.max_tokens - done, min_tokens=max(wish.min_tokens - done, 0))


def accepted_counts(found: Sequence[Answer]) -> set[int]:
    """How many drafts were accepted in one cycle or another."""
    return {code - FROM_TARGET for answer in found for code in answer.codes if code >= FROM_TARGET}


@pytest.mark.parametrize(
    ("family", "k"), [("qwen3_5", 1), ("qwen3_5", 3), ("qwen3_5", 7), *[(f, 3) for f in FAMILIES if f != "qwen3_5"]]
)
def test_same_tokens_with_and_without_a_drafter(family: str, k: int) -> None:
    model = family_target(family)
    engine = tiny.build(model, tiny.drafter(model.config), Speculation(k))
    found = tiny.answers(engine, PROMPTS, PARAMS, stop_ids=STOPS)
    assert same(engine, model, found, reference(family)) <= 1
    # Loud noise makes a random head agree often, so that there was something to roll back to.
    counts = accepted_counts(found)
    assert 0 in counts and len(counts) >= min(k, 2) + 1


@pytest.mark.parametrize(
    "flags",
    [
        {"fc_norm": True, "norm_output": True, "qk_norm": True, "num_layers": 2},
        {"draft_vocab_size": 20, "own_embedding": True},
    ],
)
def test_any_head_is_lossless(flags: dict) -> None:
    model = family_target("qwen3_5")
    engine = tiny.build(model, tiny.drafter(model.config, **flags), Speculation(3))
    found = tiny.answers(engine, PROMPTS, PARAMS, stop_ids=STOPS)
    assert same(engine, model, found, reference("qwen3_5")) <= 1


def test_alone_or_in_a_batch() -> None:
    """Slots, neighbours and refills do not matter; a seeded request does not even depend on its number."""
    model = family_target("qwen3_5")
    engine = tiny.build(model, tiny.drafter(model.config), Speculation(3), max_num_seqs=1)
    found = tiny.answers(engine, PROMPTS, PARAMS, stop_ids=STOPS)
    assert same(engine, model, found, reference("qwen3_5")) <= 1
    (alone,) = tiny.answers(engine, PROMPTS[2:3], PARAMS[2:3], stop_ids=STOPS)
    assert alone.tokens == reference("qwen3_5")[2].tokens


def test_drafts_do_not_depend_on_chunks_slots_or_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only the tokens but which drafts were accepted: the head's features cross chunks and wait for neighbours."""
    monkeypatch.setattr("infer.engine._FEWEST_ROWS", 2)  # of five slots, prompts are taken in two at a time
    model = family_target("qwen3_5")
    head = tiny.drafter(model.config)
    loud = [SamplingParams(temperature=2.0, max_tokens=24, seed=i) for i in range(len(PROMPTS))]
    sizes: list[dict[str, int]] = [
        {"prefill_chunk": 64, "max_num_seqs": 2},
        {"prefill_chunk": 7, "max_num_seqs": 5, "cycles_per_sync": 1},
    ]
    want, got = (tiny.answers(tiny.build(model, head, Speculation(3), **size), PROMPTS, loud) for size in sizes)
    assert len(accepted_counts(want)) >= 3
    assert [(a.tokens, a.codes) for a in got] == [(a.tokens, a.codes) for a in want]


def test_prompts_are_taken_in_by_groups_of_like_length() -> None:
    model = family_target("qwen2")
    engine = tiny.build(model, None, Speculation(), max_num_seqs=80)
    requests = {i: SimpleNamespace(token_ids=[0] * n) for i, n in enumerate([9, 1, 30] * 8)}
    found = engine._prefill_groups(requests)
    assert [longest for _, longest in found] == [30, 30]
    assert found[0][0].tolist() == [*range(1, 24, 3), *range(0, 24, 3), 2, 5, 8, 11]
    assert found[1][0].tolist() == [14, 17, 20, 23, *[80] * 16]
    assert tiny.build(model, None, Speculation(), max_num_seqs=16)._prefill_groups(requests) == [(None, 30)]


def test_programs_are_for_all_that_requests_at_work_together_ask_for() -> None:
    engine = tiny.build(family_target("qwen2"), None, Speculation())
    for wish, asked in (
        (SamplingParams(temperature=0), set()),
        (SamplingParams(top_p=0.5), {"temperature", "top_p"}),
        (SamplingParams(temperature=0), {"temperature", "top_p"}),
    ):
        row = request_state(wish, prompt_length=1, model_stop_ids=(), key=np.zeros(2, np.uint32))
        engine.submit(0, [1], row, 4)
        assert engine._asks == asked
    engine._waiting.clear()
    engine.submit(0, [1], row, 4)
    assert engine._asks == set()


def test_two_thousand_tokens() -> None:
    """A state that is folded some thousand times and never rewritten says what the plain engine says."""
    model = family_target("qwen3_5")
    wish = [SamplingParams(temperature=2.5, max_tokens=2000, seed=3), SamplingParams(temperature=0, max_tokens=2000)]
    sizes = {"max_num_seqs": 2, "max_model_len": 2032, "page_size": 64, "cycles_per_sync": 64}
    plain, drafted = (
        tiny.answers(tiny.build(model, head, Speculation(k), **sizes), PROMPTS[3:5], wish)
        for head, k in ((None, 0), (tiny.drafter(model.config), 3))
    )
    assert [len(answer.tokens) for answer in plain] == [2000, 2000]
    assert [answer.tokens for answer in drafted] == [answer.tokens for answer in plain]
    assert accepted_counts(drafted) == {0, 1, 2, 3}


def test_ends_inside_a_window() -> None:
    """Stop ids, max_tokens and the context limit cut exactly where the plain engine does."""
    model = family_target("qwen3_5")
    plain, drafted = (
        tiny.build(model, head, Speculation(k), max_model_len=48)
        for head, k in ((None, 0), (tiny.drafter(model.config), 7))
    )
    loud = [SamplingParams(temperature=4.0, max_tokens=n, seed=n) for n in (1, 2, 3, 5, 100, 100)]
    long = tiny.answers(plain, PROMPTS, loud)
    assert [a.reason for a in long] == ["length"] * 6
    assert [len(a.tokens) for a in long] == [1, 2, 3, 5, 48 - 17, 48 - 40]
    assert [(a.tokens, a.reason) for a in tiny.answers(drafted, PROMPTS, loud)] == [(a.tokens, a.reason) for a in long]
    for at in range(3, 9):
        stop = (long[4].tokens[at],)
        want, got = (tiny.answers(e, PROMPTS[4:5], loud[4:5], stop_ids=stop)[0] for e in (plain, drafted))
        assert got.tokens == want.tokens and got.reason == want.reason == "stop"
        assert got.tokens[-1] == stop[0] and stop[0] not in got.tokens[:-1]


def test_codes_account_for_every_token() -> None:
    """A cycle's codes are 0, 1, ..., a-1, 64+a; only the last may be cut short."""
    model = family_target("qwen3_5")
    for answer in tiny.answers(
        tiny.build(model, tiny.drafter(model.config), Speculation(3)), PROMPTS, PARAMS, stop_ids=STOPS
    ):
        assert len(answer.codes) == len(answer.tokens) and answer.codes[0] == -1
        expected = 0
        for code in answer.codes[1:]:
            assert code in (expected, FROM_TARGET + expected)
            expected = 0 if code >= FROM_TARGET else expected + 1
