"""Verification keeps the target's distribution (chi-square), and ends a text in token order."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax.errors import UserError
from infer import verify
from infer.params import SamplingParams
from infer.sampling import SamplingState, draft_sample, process_logits
from infer.verify import Reason, synthetic_rates, truncate, verify_standard, verify_synthetic
from pallas_kernels.verification.reference import accepted as verify_coupled
from tests.infer.states import gumbel_noise, many_keys, sample, state_of

V, K, COUNT, LENGTH = 20, 2, 20_000, 3
RNG = np.random.default_rng(1)
TARGET = jnp.asarray(RNG.normal(size=(V, V)).astype(np.float32) * 1.5)  # logits of the next token, by the last one
SMALL_D2T = jnp.array([0, 2, 3, 5, 8, 11, 12, 17])
FULL_D2T = jnp.arange(V)


class Run(NamedTuple):
    """Texts [COUNT, LENGTH + W] of which LENGTH tokens count, and how many drafts each first cycle accepted."""

    texts: np.ndarray
    first_accepted: np.ndarray


standard = jax.jit(verify_standard)
synthetic = jax.jit(verify_synthetic, static_argnums=4)


def drafter_logits(d2t: jax.Array, noise: float = 1.0) -> jax.Array:
    """[V, U]: the target's logits over the draft vocabulary, disturbed."""
    return TARGET[:, d2t] + noise * jnp.asarray(np.random.default_rng(2).normal(size=(V, len(d2t))).astype(np.float32))


@partial(jax.jit, static_argnames=("rule", "method"))
def run(
    state: SamplingState, drafter: jax.Array, d2t: jax.Array, rule: str, method: Any
) -> tuple[jax.Array, jax.Array]:
    """LENGTH cycles of speculative decoding with a target and a drafter that are tables, from token 0."""
    batch = state.key.shape[0]

    def cycle(_: int, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        texts, length, last, first = carry
        drafts, qs, previous = [], [], last
        for i in range(K):
            previous, q = draft_sample(drafter[previous], d2t, state, length + i, method=method)
            drafts.append(previous)
            qs.append(q)
        window = jnp.stack([last, *drafts], 1)
        positions = length[:, None] + jnp.arange(K + 1)[None, :]
        processed = process_logits(TARGET[window], state, positions)
        if rule == "coupled":
            tokens = sample(processed, gumbel_noise(state, positions, V))
            accepted = verify_coupled(tokens, window[:, 1:])
        else:
            tokens, accepted = verify_standard(processed, window[:, 1:], jnp.stack(qs, 1), d2t, state, positions)
        texts = jax.vmap(lambda text, new, at: jax.lax.dynamic_update_slice(text, new, (at,)))(texts, tokens, length)
        last = jnp.take_along_axis(tokens, accepted[:, None], 1)[:, 0]
        return texts, length + accepted + 1, last, jnp.where(first < 0, accepted, first)

    zeros = jnp.zeros(batch, jnp.int32)
    carry = (jnp.zeros((batch, LENGTH * (K + 1)), jnp.int32), zeros, zeros, zeros - 1)
    texts, _, _, first = jax.lax.fori_loop(0, LENGTH, cycle, carry)
    return texts, first


def simulate(params: dict[str, Any], d2t: jax.Array, rule: str, method: str, noise: float = 1.0) -> Run:
    texts, first = run(many_keys(COUNT, **params), drafter_logits(d2t, noise), d2t, rule, method)
    return Run(np.asarray(texts)[:, :LENGTH], np.asarray(first))


def next_probs(params: dict[str, Any]) -> np.ndarray:
    """[V, V] float64: the plain sampler's distribution of the next token, by the last one."""
    state = many_keys(V, **params)
    processed = process_logits(TARGET[:, None], state, jnp.zeros((V, 1), jnp.int32))[:, 0]
    probs = np.asarray(jax.nn.softmax(processed, -1), np.float64)
    return probs / probs.sum(-1, keepdims=True)


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    """Pearson's statistic as a number of standard deviations from its mean; rare cells are put together."""
    assert not counts[probs == 0].any(), "something of probability 0 happened"
    expected = probs * counts.sum()
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    freedom = max(len(observed) - 1, 1)
    return float((((observed - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


def assert_texts_follow_the_target(texts: np.ndarray, probs: np.ndarray) -> None:
    """The first token, each pair and the third token: marginals across accepted, corrected and bonus tokens."""
    first, second = probs[0], probs[0][:, None] * probs
    pairs = np.zeros((V, V))
    np.add.at(pairs, (texts[:, 0], texts[:, 1]), 1)
    assert chi_square(np.bincount(texts[:, 0], minlength=V), first) < 4.5
    assert chi_square(pairs.ravel(), second.ravel()) < 4.5
    assert chi_square(np.bincount(texts[:, 2], minlength=V), first @ probs @ probs) < 4.5


METHODS = ["probabilistic", "greedy"]
PARAMS: list[dict[str, Any]] = [{}, {"temperature": 0.5}, {"temperature": 1.7, "top_k": 9, "top_p": 0.9}]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("d2t", [SMALL_D2T, FULL_D2T], ids=["small", "full"])
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_standard_keeps_the_distribution(params: dict[str, Any], d2t: jax.Array, method: str) -> None:
    result = simulate(params, d2t, "standard", method)
    assert_texts_follow_the_target(result.texts, next_probs(params))
    assert len(set(result.first_accepted.tolist())) == K + 1, "every number of accepted drafts occurs"


@pytest.mark.parametrize("method", ["coupled", "greedy"])
@pytest.mark.parametrize("params", PARAMS[:2], ids=str)
def test_coupled_keeps_the_distribution(params: dict[str, Any], method: str) -> None:
    result = simulate(params, SMALL_D2T, "coupled", method)
    assert_texts_follow_the_target(result.texts, next_probs(params))


def test_coupled_text_does_not_depend_on_the_drafter() -> None:
    texts = [simulate({}, d2t, "coupled", m).texts for d2t in (SMALL_D2T, FULL_D2T) for m in ("coupled", "greedy")]
    assert all(np.array_equal(texts[0], other) for other in texts[1:])


def acceptance(params: dict[str, Any], rule: str, method: str, noise: float) -> float:
    return float((simulate(params, FULL_D2T, rule, method, noise).first_accepted >= 1).mean())


@pytest.mark.parametrize("noise", [0.3, 1.0, 2.0])
def test_acceptance_bounds(noise: float) -> None:
    """Coupling: at least (1-TV)/(1+TV). Rejection sampling: exactly 1-TV. Argmax drafts: exactly p(argmax)."""
    p = np.asarray(jax.nn.softmax(TARGET[0]), np.float64)
    q = np.asarray(jax.nn.softmax(drafter_logits(FULL_D2T, noise)[0]), np.float64)
    distance, sigma = 0.5 * np.abs(p - q).sum(), 4 / np.sqrt(4 * COUNT)
    coupled = acceptance({}, "coupled", "coupled", noise)
    assert coupled >= (1 - distance) / (1 + distance) - sigma
    assert abs(acceptance({}, "standard", "probabilistic", noise) - (1 - distance)) < sigma
    for rule in ("coupled", "standard"):
        greedy = acceptance({}, rule, "greedy", noise)
        assert abs(greedy - p[q.argmax()]) < sigma and coupled > greedy
    assert coupled >= 0.85 * (1 - distance), "within 15 % of rejection sampling"


def test_greedy_rows_accept_exactly_the_argmax() -> None:
    state = state_of(SamplingParams(temperature=0.0), SamplingParams(temperature=0.0), SamplingParams())
    processed = jnp.broadcast_to(TARGET[None, : K + 1], (3, K + 1, V))
    best = np.asarray(processed[0].argmax(-1))
    drafts = jnp.array([[best[0], best[1]], [best[0], (best[1] + 1) % V], [0, 0]])
    q = jnp.full((3, K, V), 1 / V)
    positions = jnp.broadcast_to(jnp.arange(K + 1), (3, K + 1))
    tokens, accepted = standard(processed, drafts, q, FULL_D2T, state, positions)
    assert accepted[:2].tolist() == [2, 1]
    assert tokens[0].tolist() == best.tolist() and tokens[1, :2].tolist() == best[:2].tolist()


def test_missing_drafts_are_rejected_and_sample_the_target() -> None:
    """A draft of -1 leaves p whole: no residual, though q holds rubbish."""
    state = many_keys(COUNT)
    processed = jnp.broadcast_to(TARGET[None, : K + 1], (COUNT, K + 1, V))
    positions = jnp.zeros((COUNT, K + 1), jnp.int32) + jnp.arange(K + 1)[None, :]
    drafts = jnp.full((COUNT, K), -1)
    q = jnp.full((COUNT, K, V), 1 / V)
    tokens, accepted = standard(processed, drafts, q, FULL_D2T, state, positions)
    assert not np.asarray(accepted).any()
    probs = np.asarray(jax.nn.softmax(TARGET[0]), np.float64)
    assert chi_square(np.bincount(np.asarray(tokens[:, 0]), minlength=V), probs / probs.sum()) < 4.5
    assert not np.asarray(verify_coupled(sample(processed, processed * 0), drafts)).any()


def test_no_residual_mass_falls_back_to_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """p = q rejected (by a u that rounding allows): the draw is from p, not from nothing."""
    monkeypatch.setattr(verify, "uniform_open", lambda params, positions: jnp.full(positions.shape, 2.0))
    logits = jnp.where(jnp.arange(V) < 3, 0.0, -jnp.inf)
    processed = jnp.broadcast_to(logits, (64, 2, V))
    q = jnp.broadcast_to(jax.nn.softmax(logits), (64, 1, V))
    positions = jnp.zeros((64, 2), jnp.int32) + jnp.arange(2)[None, :]
    tokens, accepted = jax.jit(lambda *arrays: verify_standard(*arrays))(
        processed, jnp.zeros((64, 1), jnp.int32), q, FULL_D2T, many_keys(64), positions
    )
    assert not np.asarray(accepted).any() and set(np.asarray(tokens[:, 0]).tolist()) == {0, 1, 2}


def test_an_impossible_draft_is_never_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """p(x) = 0, with the smallest u there is."""
    monkeypatch.setattr(verify, "uniform_open", lambda params, positions: jnp.full(positions.shape, 2.0**-24))
    processed = jnp.broadcast_to(jnp.where(jnp.arange(V) == 4, -jnp.inf, 0.0), (8, 2, V))
    q = jnp.broadcast_to(jax.nn.one_hot(4, V), (8, 1, V))
    positions = jnp.zeros((8, 2), jnp.int32) + jnp.arange(2)[None, :]
    tokens, accepted = jax.jit(lambda *arrays: verify_standard(*arrays))(
        processed, jnp.full((8, 1), 4), q, FULL_D2T, many_keys(8), positions
    )
    assert not np.asarray(accepted).any() and 4 not in np.asarray(tokens[:, 0])


def test_rows_are_independent() -> None:
    state = many_keys(6)
    processed = jnp.asarray(RNG.normal(size=(6, K + 1, V)).astype(np.float32))
    q = jax.nn.softmax(jnp.asarray(RNG.normal(size=(6, K, V)).astype(np.float32)), -1)
    drafts = jnp.asarray(RNG.integers(0, V, (6, K)))
    positions = jnp.zeros((6, K + 1), jnp.int32) + jnp.arange(K + 1)[None, :]
    tokens, accepted = standard(processed, drafts, q, FULL_D2T, state, positions)
    for i in range(6):
        one = jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], (processed, drafts, q, state, positions))
        alone, alone_accepted = standard(one[0], one[1], one[2], FULL_D2T, one[3], one[4])
        assert accepted[i] == alone_accepted[0]
        assert np.array_equal(tokens[i], alone[0])


# ----------------------------------------------------------------------------------------------- synthetic


@pytest.mark.parametrize("length", [1.0, 1.5, 2.34, 3.0, 3.9, 4.0])
def test_synthetic_yields_the_length_asked_for(length: float) -> None:
    state = many_keys(4000, temperature=0.0)
    samples = jnp.full((4000, 4), 7)
    drafts = jnp.full((4000, 3), 3)
    positions = jnp.zeros((4000, 4), jnp.int32) + jnp.arange(4)[None, :]
    tokens, accepted = synthetic(samples, drafts, state, positions, length)
    assert abs(float(accepted.mean()) + 1 - length) < 0.04
    row = int(accepted[0])
    assert tokens[0, : row + 1].tolist() == [3] * row + [7]


def test_synthetic_rates() -> None:
    assert synthetic_rates(2.5, 4) == (1.0, 0.5, 0.0, 0.0)
    assert synthetic_rates(1.0, 2) == (0.0, 0.0) and synthetic_rates(3, 2) == (1.0, 1.0)
    for length in (0.5, 4.1):
        with pytest.raises(UserError, match="synthetic_acceptance_length=.* with 3 drafts it must be in \\[1, 4\\]"):
            synthetic_rates(length, 3)


# ------------------------------------------------------------------------------------------------ truncate


@pytest.mark.parametrize(
    ("tokens", "accepted", "limit", "want"),
    [
        ([1, 2, 3, 4], 3, 10, (4, Reason.NONE)),
        ([1, 2, 3, 4], 1, 10, (2, Reason.NONE)),
        ([9, 2, 3, 4], 3, 10, (1, Reason.STOP)),
        ([1, 8, 9, 4], 3, 10, (2, Reason.STOP)),
        ([1, 2, 3, 9], 3, 10, (4, Reason.STOP)),
        ([1, 2, 9, 4], 1, 10, (2, Reason.NONE)),  # the stop lies beyond what counts
        ([1, 2, 3, 4], 3, 2, (2, Reason.LENGTH)),
        ([1, 2, 3, 4], 3, 4, (4, Reason.LENGTH)),
        ([1, 9, 3, 4], 3, 2, (2, Reason.STOP)),  # a stop that is the last token allowed is a stop
        ([1, 2, 9, 4], 3, 2, (2, Reason.LENGTH)),  # a stop beyond the limit never happened
        ([1, 2, 3, 4], 3, 0, (0, Reason.LENGTH)),
        ([-1, 2, 3, 4], 3, 9, (4, Reason.NONE)),  # padding of stop_ids is no stop
    ],
)
def test_truncate(tokens: list[int], accepted: int, limit: int, want: tuple[int, Reason]) -> None:
    stop_ids = jnp.array([[9, 8, -1, -1]])
    emitted, reason = truncate(jnp.array([tokens]), jnp.array([accepted]), stop_ids, jnp.array([limit]))
    assert (int(emitted[0]), int(reason[0])) == want
    assert emitted.dtype == reason.dtype == jnp.int32
