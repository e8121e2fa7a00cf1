"""The gated delta rule: every form against the recurrence, and the recurrence against float64."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_delta import chunked, fold, recurrent, window
from pallas_kernels.gated_delta.reference import unit_lower_inverse
from tests.helpers import assert_close

Array = np.ndarray[Any, Any]
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
fast_chunked, fast_recurrent, fast_window, fast_fold = (quick_jit(f) for f in (chunked, recurrent, window, fold))
KEY_HEADS, RATIO, KEY, VALUE = 2, 3, 8, 12
HEADS = KEY_HEADS * RATIO


class Inputs(NamedTuple):
    """q, k [B,T,K,M], v [B,T,K*R,P], g, beta [B,T,K*R] as the functions take them."""

    q: Array
    k: Array
    v: Array
    g: Array
    beta: Array

    def part(self, where: Any) -> Inputs:
        return Inputs(*(x[where] for x in self))


def unit(x: Array) -> Array:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def make(kind: str, batch: int, tokens: int, seed: int = 0) -> Inputs:
    """`plain`: random. `alike`: keys nearly one another and decays nearly one, where a triangle is worst conditioned.
    `forgetful`: log-decays down to -60 a token, most of the others near zero: in differences of their running sum
    the small ones would drown."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.normal(size=(batch, tokens, *shape))  # noqa: E731
    q, k = unit(normal(KEY_HEADS, KEY)) * KEY**-0.5, normal(KEY_HEADS, KEY)
    if kind == "alike":
        k = 1 + 0.1 * k
    g = -rng.random((batch, tokens, HEADS)) * (1e-3 if kind == "alike" else 1.0)
    if kind == "forgetful":
        g = np.where(rng.random(g.shape) < 0.4, 60 * g, 0.01 * g)
    beta = 1 - 0.01 * rng.random(g.shape) if kind == "alike" else rng.random(g.shape)
    return Inputs(*(x.astype(np.float32) for x in (q, unit(k), normal(HEADS, VALUE), g, beta)))


def make_state(batch: int, seed: int = 9) -> Array:
    return np.random.default_rng(seed).normal(size=(batch, HEADS, KEY, VALUE)).astype(np.float32)


def in_float64(x: Inputs, state: Array) -> tuple[Array, Array]:
    """Outputs [B,T,K*R,P] and the state after every token [B,T+1,K*R,M,P]."""
    q, k, v, g, beta = (np.asarray(a, np.float64) for a in x)
    q, k = (np.repeat(a, RATIO, axis=2) for a in (q, k))
    states, outs = [state.astype(np.float64)], []
    for t in range(q.shape[1]):
        s = states[-1] * np.exp(g[:, t])[..., None, None]
        update = beta[:, t][..., None] * (v[:, t] - np.einsum("bhmp,bhm->bhp", s, k[:, t]))
        states.append(s + k[:, t][..., :, None] * update[..., None, :])
        outs.append(np.einsum("bhmp,bhm->bhp", states[-1], q[:, t]))
    return np.stack(outs, axis=1), np.stack(states, axis=1)


KINDS = ["plain", "alike", "forgetful"]


@pytest.mark.parametrize("kind", KINDS)
def test_recurrent(kind: str) -> None:
    x, state = make(kind, 2, 40), make_state(2)
    want, states = in_float64(x, state)
    out, last = fast_recurrent(*x, state)
    assert_close(out, want, 1e-6)
    assert_close(last, states[:, -1], 1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 3, 64, 150])
def test_chunked(kind: str, tokens: int) -> None:
    x, state = make(kind, 2, tokens), make_state(2)
    want, states = in_float64(x, state)
    out, last = fast_chunked(*x, state)
    assert_close(out, want, 1e-5)
    assert_close(last, states[:, -1], 1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drafts", [0, 1, 3, 6, 15])
def test_window_and_fold_for_every_accepted_count(kind: str, drafts: int) -> None:
    """One row for each count 0..K+1 of committed window tokens (K drafts and the token before them)."""
    width = drafts + 1
    counts = np.arange(width + 1)
    x, state = make(kind, len(counts), width, seed=drafts), make_state(len(counts))
    want, states = in_float64(x, state)
    out, updates = fast_window(*x, state)
    assert_close(out, want, 1e-5)

    folded = np.asarray(fast_fold(state, x.k, updates, x.g, jnp.asarray(counts)))
    for row, count in enumerate(counts):
        assert_close(folded[row], states[row, count], 1e-5, f"{count} of {width} tokens")
    cut = np.arange(width)[None, :, None] < counts[:, None, None]
    prefixes = x._replace(g=np.where(cut, x.g, 0), beta=np.where(cut, x.beta, 0))
    assert_close(folded, fast_recurrent(*prefixes, state)[1], 1e-5)
    assert np.array_equal(folded[0], state[0])  # nothing accepted: not a bit changes


@pytest.mark.parametrize("kind", KINDS)
def test_folding_over_two_thousand_tokens(kind: str) -> None:
    """Windows of 8 with any number accepted and garbage after them, until each row has seen 2,000 tokens."""
    batch, tokens, width = 2, 2000, 8
    x, garbage = make(kind, batch, tokens), make("plain", batch, tokens + width, seed=1)
    steps = _schedule(batch, tokens, width)
    start, count = (np.stack(a) for a in zip(*steps, strict=True))  # [steps, B]
    place = start[..., None] + np.arange(width)  # [steps, B, width]
    accepted = np.arange(width) < count[..., None]
    rows = np.arange(batch)[None, :, None]

    def pick(a: Array, b: Array) -> Array:
        a, b = a[rows, np.minimum(place, tokens - 1)], b[rows, place]
        return np.where(accepted.reshape(*accepted.shape, *[1] * (a.ndim - 3)), a, b)

    windows = Inputs(*(pick(a, b) for a, b in zip(x, garbage, strict=True)))

    @quick_jit
    def run(state: jax.Array, windows: Inputs, count: jax.Array) -> tuple[jax.Array, jax.Array]:
        def cycle(state: jax.Array, step: tuple[Inputs, jax.Array]) -> tuple[jax.Array, jax.Array]:
            part, accepted = step
            out, updates = window(*part, state)
            return fold(state, part.k, updates, part.g, accepted), out

        return jax.lax.scan(cycle, state, (windows, count))

    state = make_state(batch)
    want, states = in_float64(x, state)
    last, out = run(state, windows, count)
    assert_close(last, states[:, -1], 1e-5)
    got = np.zeros_like(want)
    got[np.broadcast_to(rows, place.shape)[accepted], place[accepted]] = np.asarray(out)[accepted]
    assert_close(got, want, 1e-5)


def _schedule(batch: int, tokens: int, width: int) -> list[tuple[Array, Array]]:
    """(tokens seen, tokens accepted) of every row at every cycle."""
    rng, seen, steps = np.random.default_rng(2), np.zeros(batch, np.int64), []
    while (seen < tokens).any():
        count = np.minimum(rng.integers(0, width + 1, batch), tokens - seen)
        steps.append((seen.copy(), count))
        seen += count
    return steps


def test_a_token_without_gate_and_strength_is_inert() -> None:
    x, state = make("plain", 2, 20), make_state(2)
    real = np.zeros((2, 20), bool)
    real[0, :7], real[1, 4:] = True, True
    padded = x._replace(g=np.where(real[..., None], x.g, 0), beta=np.where(real[..., None], x.beta, 0))
    for form in (fast_chunked, fast_recurrent):
        out, last = form(*padded, state)
        for row in range(2):
            alone = x.part((slice(row, row + 1), real[row]))
            want, states = in_float64(alone, state[row : row + 1])
            assert_close(np.asarray(out)[row, real[row]], want[0], 1e-5)
            assert_close(last[row], states[0, -1], 1e-5)


def test_chunks_may_be_of_any_size() -> None:
    x, state = make("plain", 2, 50), make_state(2)
    want, states = in_float64(x, state)
    for size in (1, 16):
        out, last = quick_jit(functools.partial(chunked, chunk=size))(*x, state)
        assert_close(out, want, 1e-5)
        assert_close(last, states[:, -1], 1e-5)


def test_low_precision_inputs_are_computed_in_float32() -> None:
    rounded = Inputs(*(jnp.asarray(a, jnp.bfloat16) for a in make("plain", 2, 20)))
    state = make_state(2)
    want, states = in_float64(rounded, state)
    for form in (fast_chunked, fast_recurrent):
        out, last = form(*rounded, state)
        assert out.dtype == last.dtype == jnp.float32
        assert_close(out, want, 1e-5)
    out, updates = fast_window(*rounded, state)
    assert updates.dtype == jnp.float32
    assert_close(out, want, 1e-5)
    assert_close(fast_fold(state, rounded.k, updates, rounded.g, jnp.full(2, 20)), states[:, -1], 1e-5)


@quick_jit
def gradients(args: tuple[Any, ...], weights: tuple[Any, ...]) -> tuple[Any, Any]:
    """Of a random linear function of outputs and state, through the chunked form and through the recurrence."""

    def loss(form: Any, args: tuple[Any, ...]) -> jax.Array:
        return sum(jnp.vdot(w, y) for w, y in zip(weights, form(*args), strict=True))

    return tuple(jax.grad(functools.partial(loss, form))(args) for form in (chunked, recurrent))


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_of_chunked(kind: str) -> None:
    x, state = make(kind, 2, 70), make_state(2)
    got, want = gradients((*x, state), (make(kind, 2, 70, seed=1).v, make_state(2, seed=1)))
    for name, a, b in zip((*Inputs._fields, "state"), got, want, strict=True):
        assert_close(a, b, 1e-5, name)


@pytest.mark.parametrize("size", [1, 2, 4, 16, 64])
def test_unit_lower_inverse(size: int) -> None:
    rng = np.random.default_rng(0)
    ones = np.ones((size, size))
    keys = unit(1 + 0.1 * rng.normal(size=(size, 8)))
    triangles = np.tril(np.stack([ones, keys @ keys.T, -ones / 8]), -1)
    want = np.linalg.inv(np.eye(size) + triangles)
    got = quick_jit(unit_lower_inverse)(triangles.astype(np.float32))
    for g, w in zip(np.asarray(got), want, strict=True):
        assert_close(g, w, 1e-5)
    # All ones: the inverse is 1 on the diagonal and -1 below it, exactly.
    assert np.array_equal(np.asarray(got)[0], np.eye(size) - np.eye(size, k=-1))


SEGMENTS = {
    "borders of chunks": [64, 64, 22],
    "beside them": [63, 2, 64, 21],
    "single tokens": [1, 1, 62, 1, 1, 84],
    "one": [150],
    "short": [3, 5, 2, 40, 7, 1, 30, 62],
}


def ids_of(lengths: list[int]) -> Array:
    return np.repeat(np.arange(1, len(lengths) + 1, dtype=np.int32), lengths)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_segments_as_each_alone(kind: str) -> None:
    """A row for each way of cutting 150 tokens; the first segment goes on from the state, the others start at zero."""
    ids = np.stack([ids_of(lengths) for lengths in SEGMENTS.values()])
    x, state = make(kind, len(ids), 150), make_state(len(ids))
    want, last = np.zeros(x.v.shape), np.zeros(state.shape)
    for row, lengths in enumerate(SEGMENTS.values()):
        ends = np.cumsum(lengths)
        for i, (start, end) in enumerate(zip(ends - lengths, ends, strict=True)):
            begun = state[row : row + 1] if i == 0 else np.zeros_like(state[:1])
            out, states = in_float64(x.part((slice(row, row + 1), slice(start, end))), begun)
            want[row, start:end], last[row] = out[0], states[0, -1]
    for form in (fast_chunked, fast_recurrent):
        got, final = form(*x, state, segment_ids=ids)
        for row, name in enumerate(SEGMENTS):
            assert_close(got[row], want[row], 1e-5, name)
            assert_close(final[row], last[row], 1e-5, name)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_across_packed_segments(kind: str) -> None:
    ids = np.stack([ids_of([64, 1, 5]), ids_of([30, 35, 5])])
    args, weights = (*make(kind, 2, 70), make_state(2)), (make(kind, 2, 70, seed=1).v, make_state(2, seed=1))

    def loss(form: Any, args: Any) -> jax.Array:
        return sum(jnp.vdot(w, y) for w, y in zip(weights, form(*args, segment_ids=ids), strict=True))

    got, want = (quick_jit(jax.grad(functools.partial(loss, form)))(args) for form in (chunked, recurrent))
    for name, a, b in zip((*Inputs._fields, "state"), got, want, strict=True):
        assert_close(a, b, 1e-5, name)
