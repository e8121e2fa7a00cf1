"""The sampler against a sort-based oracle in float64, and the laws that make speculation testable token for token."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from eagle3_jax.errors import UserError
from infer import sampling
from infer.params import SamplingParams
from infer.sampling import (
    Purpose,
    draft_sample,
    idle_state,
    process_logits,
    request_key,
    request_state,
    resolve_stop_ids,
    uniform_open,
)
from pallas_kernels.verification import threefry, thresholds
from tests.infer.states import gumbel_noise, many_keys, sample, state_of, take_rows

VOCAB = 37
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(1, 4, VOCAB)).astype(np.float32) * 3

process = jax.jit(process_logits)


def oracle(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """[V] -> [V] by sorting, in float64: temperature, min_p, top_k, top_p; ties with the last one kept stay."""
    if params.greedy:
        return logits
    x = logits.astype(np.float64) / np.float64(np.float32(params.temperature))
    keep = np.exp(x - x.max()) >= params.min_p
    x = np.where(keep, x, -np.inf)
    if 0 < params.top_k < len(x):
        x = np.where(x >= np.sort(x)[-params.top_k], x, -np.inf)
    if params.top_p < 1:
        probs = np.exp(x - x.max())
        probs /= probs.sum()
        order = np.argsort(-probs, kind="stable")
        mass_before = np.cumsum(probs[order]) - probs[order]
        last = probs[order][mass_before < params.top_p][-1]
        x = np.where(probs >= last, x, -np.inf)
    return x


def positions(batch: int = 1, window: int = 4, start: int = 10) -> jnp.ndarray:
    return jnp.broadcast_to(start + jnp.arange(window), (batch, window))


FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0, "top_k": 3, "top_p": 0.1, "min_p": 0.5},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": VOCAB},
    {"top_k": 1000},
    {"top_p": 1e-6},
    {"top_p": 0.5},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"temperature": 0.7, "top_k": 10, "top_p": 0.8},
    {"temperature": 2.0, "min_p": 0.02, "top_k": 12, "top_p": 0.95},
]


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_thresholds_equal_the_sort_based_oracle(params: dict[str, Any]) -> None:
    request = SamplingParams(**params)
    got = np.asarray(process(LOGITS, state_of(request), positions()))
    want = np.stack([oracle(row, request) for row in LOGITS[0]])[None]
    assert np.array_equal(np.isfinite(got), np.isfinite(want))
    kept = np.isfinite(want)
    np.testing.assert_allclose(got[kept], want[kept], rtol=1e-6)


@pytest.mark.parametrize(
    "params", [{"top_k": 2}, {"top_k": 4}, {"top_p": 0.3}, {"top_p": 0.75}, {"min_p": 1.0}], ids=str
)
def test_ties_at_the_threshold_are_all_kept(params: dict[str, Any]) -> None:
    # 0 and -0 are the same logit; so are the three ones and the two threes.
    row = np.float32([3, 1, -0.0, 1, 3, 0.0, -5, 1])
    logits = row[None, None]
    request = SamplingParams(**params)
    got = np.asarray(process(logits, state_of(request), positions(window=1)))[0, 0]
    assert np.array_equal(np.isfinite(got), np.isfinite(oracle(row, request)))
    for value in np.unique(row):
        assert len(set(np.isfinite(got[row == value]))) == 1, "a tie was split"


def test_negative_zero_ties_with_zero() -> None:
    logits = np.float32([[[0.0, -0.0, -1.0]]])
    got = process(logits, state_of(SamplingParams(top_k=1)), positions(window=1))
    assert np.isfinite(np.asarray(got))[0, 0].tolist() == [True, True, False]


def test_ordered_bits_are_ordered() -> None:
    values = np.float32([-np.inf, -3e38, -1.5, -1e-40, 0.0, 1e-40, 1e-30, 1.0, 3e38, np.inf])
    bits = np.asarray(thresholds.ordered_bits(jnp.asarray(values)))
    assert np.all(np.diff(bits[[0, 1, 2, 4, 6, 7, 8, 9]].astype(np.int64)) > 0)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    rows = [SamplingParams(**params) for params in FILTERS]
    logits = RNG.normal(size=(len(rows), 4, VOCAB)).astype(np.float32) * 8  # some tokens beyond float32's sums
    together = np.asarray(process(logits, state_of(*rows), positions(len(rows))))
    for i, row in enumerate(rows):
        alone = np.asarray(process(logits[i : i + 1], state_of(row), positions()))
        assert np.array_equal(together[i], alone[0]), FILTERS[i]


def test_greedy_batches_pay_nothing() -> None:
    """All bisection and all random bits stand behind conditions: none at the top level of the program."""
    state = state_of(SamplingParams(temperature=0.0))
    for function in (
        lambda s: process_logits(jnp.asarray(LOGITS), s, positions()),
        lambda s: gumbel_noise(s, positions(), VOCAB),
    ):
        names = {str(equation.primitive) for equation in jax.make_jaxpr(function)(state).jaxpr.eqns}
        assert "cond" in names
        assert not names & {"while", "scan", "exp", "random_bits", "threefry2x32", "sort", "top_k", "div"}, names


@pytest.mark.parametrize(
    ("params", "asked"),
    [
        ({"temperature": 0.0, "top_p": 0.6}, set()),
        ({"temperature": 0.7}, {"temperature"}),
        ({"top_p": 0.6}, {"temperature", "top_p"}),
        ({"min_tokens": 12}, {"temperature", "min_tokens"}),
    ],
)
def test_what_is_asked_can_be_told_beforehand(params: dict[str, Any], asked: set[str]) -> None:
    """Then nothing is left for the device to decide, and the tokens are the same."""
    state = state_of(SamplingParams(**params), stop_ids=(2, 3))
    asks = sampling.features(jax.tree.map(np.asarray, state), prompt_length=0)
    assert asks == asked

    def tokens(state: Any) -> jax.Array:
        processed = process_logits(jnp.asarray(LOGITS), state, positions())
        return sample(processed, gumbel_noise(state, positions(), VOCAB))

    told = dataclasses.replace(state, asks=asks)
    assert np.array_equal(tokens(told), tokens(state))
    assert "cond" in str(jax.make_jaxpr(tokens)(state)) and "cond" not in str(jax.make_jaxpr(tokens)(told))


def test_no_sort_anywhere() -> None:
    state = state_of(SamplingParams(top_k=3, top_p=0.5, min_p=0.1))
    text = str(jax.make_jaxpr(process_logits)(jnp.asarray(LOGITS), state, positions()))
    assert " sort[" not in text and "top_k[" not in text and "cumsum" not in text


def test_stop_ids_are_masked_before_min_tokens_in_every_row() -> None:
    request = SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=[5])
    state = state_of(request, prompt_length=10, stop_ids=(7, 9))
    got = np.asarray(process(LOGITS, state, positions(start=11)))  # positions 11, 12 | 13, 14
    masked = np.isneginf(got[0])
    assert [sorted(np.flatnonzero(row)) for row in masked] == [[5, 7, 9], [5, 7, 9], [], []]
    assert np.array_equal(got[0][~masked], LOGITS[0][~masked])


def test_ignore_eos_leaves_only_the_requests_own_stop_ids() -> None:
    request = SamplingParams(ignore_eos=True, stop_token_ids=[5])
    assert resolve_stop_ids(request, [7, 9]) == [5]
    assert resolve_stop_ids(SamplingParams(stop_token_ids=[7, 5]), [7, 9]) == [5, 7, 9]


def test_too_many_stop_ids_are_refused() -> None:
    with pytest.raises(UserError, match="stop_token_ids: 18 with the model's own stop ids; at most 16"):
        resolve_stop_ids(SamplingParams(stop_token_ids=list(range(17))), [99])


# ---------------------------------------------------------------------------------------------- randomness


def test_noise_belongs_to_the_position() -> None:
    state = many_keys(3)
    noise = jax.jit(gumbel_noise, static_argnums=2)(state, positions(3, 4), VOCAB)
    one = gumbel_noise(take_rows(state, [2]), jnp.array([[12]]), VOCAB)
    assert np.array_equal(noise[2, 2], one[0, 0])
    wider = gumbel_noise(take_rows(state, [2, 0]), positions(2, 2, start=12), VOCAB + 11)
    assert np.array_equal(wider[0, 0, :VOCAB], one[0, 0])
    assert len({float(row[0]) for row in noise.reshape(-1, VOCAB)}) == 12


def test_greedy_rows_get_no_noise() -> None:
    state = state_of(SamplingParams(temperature=0.0), SamplingParams())
    noise = np.asarray(gumbel_noise(state, positions(2), VOCAB))
    assert not noise[0].any() and noise[1].all()
    assert not np.asarray(gumbel_noise(take_rows(state, [0]), positions(), VOCAB)).any()


def test_noise_does_not_depend_on_sharding() -> None:
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    state = many_keys(4)
    sharding = NamedSharding(mesh, PartitionSpec("data", None, "tensor"))
    function = lambda s, p: gumbel_noise(s, p, 64)
    sharded = jax.jit(function, out_shardings=sharding)(state, positions(4, 2))
    # Bits are equal; the logarithm of a vectorised loop and of its remainder may differ in the last place.
    np.testing.assert_allclose(sharded, jax.jit(function)(state, positions(4, 2)), rtol=1e-6)


def test_noise_is_gumbel() -> None:
    noise = np.asarray(gumbel_noise(many_keys(4), positions(4, 8), 4096)).ravel().astype(np.float64)
    assert np.isfinite(noise).all()
    assert abs(noise.mean() - np.euler_gamma) < 0.02
    assert abs(noise.var() - np.pi**2 / 6) < 0.03
    # The largest of so many is about log(n), and all large ones are different: no steps in the tail.
    large = np.sort(noise)[-200:]
    assert abs(large[-1] - np.log(noise.size)) < 6 and len(np.unique(large)) == 200


def test_uniform_is_never_zero_or_one(monkeypatch: pytest.MonkeyPatch) -> None:
    state = many_keys(64)
    u = np.asarray(uniform_open(state, positions(64, 64)))
    assert (u > 0).all() and (u < 1).all() and abs(u.mean() - 0.5) < 0.02
    for word, expected in ((0, 2.0**-24), (2**32 - 1, 1 - 2.0**-24)):
        monkeypatch.setattr(jax.random, "bits", lambda *_args, _word=word: jnp.uint32(_word))
        assert np.unique(uniform_open(state, positions(64))).tolist() == [expected]


@pytest.mark.parametrize("word", [0, 2**32 - 1])
def test_gumbel_is_finite_for_every_word(word: int) -> None:
    assert np.isfinite(threefry.gumbel(jnp.full(3, word, jnp.uint32))).all()


def test_keys_of_purposes_and_requests_differ() -> None:
    state = many_keys(1)
    noises = [np.asarray(gumbel_noise(state, positions(), VOCAB, purpose)) for purpose in Purpose]
    assert len({noise.tobytes() for noise in noises}) == len(Purpose)
    unseeded = [request_key(engine_seed=s, request_index=i) for s in (0, 1, 2**40) for i in (0, 1)]
    seeded = [
        request_key(engine_seed=0, request_index=0, seed=s, sample_index=n) for s in (0, 1, 2**63) for n in (0, 1)
    ]
    assert len({key.tobytes() for key in unseeded + seeded}) == 12


def test_a_seeded_request_ignores_engine_and_index() -> None:
    one = request_key(engine_seed=0, request_index=0, seed=5)
    assert np.array_equal(one, request_key(engine_seed=9, request_index=7, seed=5))


def test_the_same_text_whatever_the_default_generator() -> None:
    with jax.default_prng_impl("rbg"):
        other = request_key(engine_seed=3, request_index=2)
    assert np.array_equal(other, request_key(engine_seed=3, request_index=2))


# -------------------------------------------------------------------------------------------------- tokens


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    """Pearson's statistic less its degrees of freedom, in standard deviations: about N(0, 1) if counts ~ probs."""
    assert not counts[probs == 0].any(), "a token of probability 0 was sampled"
    probs, counts = probs[probs > 0], counts[probs > 0]
    expected = probs * counts.sum()
    freedom = len(probs) - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * max(freedom, 1)))


@pytest.mark.parametrize("params", [{}, {"temperature": 0.6}, {"top_k": 7}, {"top_p": 0.7, "min_p": 0.01}], ids=str)
def test_samples_follow_the_processed_distribution(params: dict[str, Any]) -> None:
    count = 20_000
    logits = jnp.broadcast_to(LOGITS[0, :2, :20] / 2, (count, 2, 20))

    @jax.jit
    def draw(state: sampling.SamplingState) -> tuple[jax.Array, jax.Array]:
        rows = positions(count, 2)
        processed = process_logits(logits, state, rows)
        return sample(processed, gumbel_noise(state, rows, 20)), processed[0]

    tokens, processed = draw(many_keys(count, **params))
    probs = np.asarray(jax.nn.softmax(processed.astype(jnp.float32), -1), np.float64)
    for row in range(2):
        counts = np.bincount(np.asarray(tokens[:, row]), minlength=20)
        assert chi_square(counts, probs[row] / probs[row].sum()) < 4.5


def test_greedy_sample_is_the_argmax() -> None:
    tokens = sampling.sample(jnp.asarray(LOGITS), idle_state(1), positions())
    assert np.array_equal(tokens, LOGITS.argmax(-1)) and tokens.dtype == jnp.int32


D2T = jnp.array([1, 4, 5, 9, 20, 36])
DRAFT_LOGITS = jnp.asarray(LOGITS[0])[:, D2T]  # a drafter that is the target, over fewer tokens


def test_coupled_draft_uses_the_targets_noise() -> None:
    state = many_keys(4)
    at = jnp.full(4, 10) + jnp.arange(4)
    ids, q = draft_sample(DRAFT_LOGITS, D2T, state, at, method="coupled")
    noise = gumbel_noise(state, at[:, None], VOCAB)[:, 0]
    assert np.array_equal(ids, D2T[(DRAFT_LOGITS + noise[:, D2T]).argmax(-1)])
    np.testing.assert_allclose(q, jax.nn.softmax(DRAFT_LOGITS, -1), rtol=1e-6)


def test_a_perfect_drafter_with_the_full_vocabulary_is_always_right() -> None:
    state = many_keys(64, temperature=1.3, top_k=9)
    logits = jnp.broadcast_to(LOGITS[:, :1], (64, 1, VOCAB))
    rows = positions(64, 1)
    ids, _ = draft_sample(logits[:, 0], jnp.arange(VOCAB), state, rows[:, 0], method="coupled")
    tokens = sample(process_logits(logits, state, rows), gumbel_noise(state, rows, VOCAB))
    assert np.array_equal(ids, tokens[:, 0]) and len(set(np.asarray(ids).tolist())) > 3


@pytest.mark.parametrize("method", ["coupled", "probabilistic"])
def test_drafts_are_filtered_and_greedy_rows_take_the_argmax(method: Any) -> None:
    state = state_of(SamplingParams(temperature=0.0), SamplingParams(top_k=2), SamplingParams(temperature=0.5))
    logits = jnp.broadcast_to(DRAFT_LOGITS[:1], (3, 6))
    ids, q = draft_sample(logits, D2T, state, jnp.full(3, 10), method=method)
    assert ids[0] == D2T[logits[0].argmax()] and ids.dtype == jnp.int32
    assert np.array_equal(q[0], np.eye(6)[logits[0].argmax()])
    assert (np.asarray(q[1]) > 0).sum() == 2
    np.testing.assert_allclose(q[2], jax.nn.softmax(logits[2] / 0.5), rtol=1e-6)


def test_greedy_drafts_are_one_hot_and_respect_min_tokens() -> None:
    best = int(D2T[DRAFT_LOGITS[0].argmax()])
    request = SamplingParams(min_tokens=2, stop_token_ids=[best])
    state = state_of(request, request, prompt_length=10)
    logits = jnp.broadcast_to(DRAFT_LOGITS[:1], (2, 6))
    ids, q = draft_sample(logits, D2T, state, jnp.array([11, 12]), method="greedy")
    assert ids[0] != best and ids[1] == best
    assert np.array_equal(q.sum(-1), [1, 1]) and np.array_equal(q.max(-1), [1, 1])


def test_probabilistic_drafts_are_independent_of_the_targets_noise() -> None:
    state = many_keys(400)
    logits = jnp.zeros((400, VOCAB))
    at = jnp.full(400, 10)
    draws = [
        draft_sample(logits, jnp.arange(VOCAB), state, at, method=method)[0] for method in ("coupled", "probabilistic")
    ]
    assert (draws[0] == draws[1]).mean() < 0.08  # chance: 1/37


def test_request_state_rows_fit_a_batch() -> None:
    row = request_state(SamplingParams(top_k=-1), prompt_length=4, model_stop_ids=[2], key=np.zeros(2, np.uint32))
    batch = idle_state(3)
    assert jax.tree.map(lambda a: (a.shape[1:], a.dtype), row) == jax.tree.map(lambda a: (a.shape[1:], a.dtype), batch)
    assert row.top_k[0] == 0 and row.min_length[0] == 4
