"""Verification: the reference is the engine's sampler, the kernel chooses the reference's tokens, and it compiles."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.tpu_kernels import CHIPS, MODELS, compile_for, verification
from infer import sampling as engine
from pallas_kernels.verification import Sampling, position_keys, reference, threefry, token_noise, tpu, verify
from pallas_kernels.verification.reference import accepted as verify_coupled
from tests.helpers import assert_close
from tests.infer.states import gumbel_noise
from tests.kernels.on_tpu import copies, interpreted

STOP = 7


class Rows(NamedTuple):
    """Arguments of `verify`, and the same for the engine's sampler."""

    logits: jax.Array
    keys: jax.Array
    sampling: Sampling
    state: engine.SamplingState
    positions: jax.Array

    def tokens(self) -> jax.Array:
        return engine.sample(self.logits, self.state, self.positions)

    def drafts(self) -> jax.Array:
        """The engine's own tokens, of which row b has b (modulo K + 1) right."""
        tokens = self.tokens()[:, :-1]
        right = jnp.arange(tokens.shape[0])[:, None] % (tokens.shape[1] + 1)
        return jnp.where(jnp.arange(tokens.shape[1])[None] < right, tokens, tokens - 1)


def rows(
    batch: int, window: int, vocab: int, *, temperature: list[float], min_p: list[float], top_k: list[int],
    top_p: list[float], grain: float = 0.0,
) -> Rows:  # fmt: skip
    """Rows of the listed parameters, each list repeated. The likeliest token is a stop id that two rows in three may
    not sample at first. With a `grain` the logits are its multiples: many ties."""
    rng = np.random.default_rng(batch * window)
    logits = 3 * rng.normal(size=(batch, window, vocab))
    if grain:
        logits = np.round(logits / grain) * grain * np.where(rng.random(logits.shape) < 0.5, 1, -1)  # 0 and -0
    logits[:, :, STOP] = logits.max(-1) + 0.5
    repeat = lambda values, dtype=jnp.float32: jnp.asarray(np.resize(values, batch), dtype)
    stop_ids = jnp.full((batch, 4), -1, jnp.int32).at[:, 0].set(STOP).at[:, 1].set(vocab - 1)
    positions = jnp.asarray(rng.integers(5, 50, (batch, 1)) + np.arange(window)[None], jnp.int32)
    key = jnp.asarray(rng.integers(0, 2**32, (batch, 2), dtype=np.uint32))
    state = engine.SamplingState(
        repeat(temperature), repeat(top_p), repeat(top_k, jnp.int32), repeat(min_p),
        positions[:, 0] + jnp.arange(batch) % 3, stop_ids, key,
    )  # fmt: skip
    no_stop = positions < state.min_length[:, None]
    sampling = Sampling(state.temperature, state.min_p, state.top_k, state.top_p, stop_ids, no_stop)
    return Rows(jnp.asarray(logits, jnp.float32), position_keys(key, positions, 0), sampling, state, positions)


KINDS: dict[str, Any] = {
    "mixed": {"temperature": [0, 0.8, 1, 0.5, 1.3], "min_p": [0.9, 0, 0, 0.05, 0.2], "top_k": [3, 0, 20, 5, 0, 1, 1000],
              "top_p": [0.1, 0.95, 1, 0.5, 0.9, 0.99]},
    "greedy": {"temperature": [0], "min_p": [0], "top_k": [0], "top_p": [1]},
    "no filters": {"temperature": [1], "min_p": [0], "top_k": [0], "top_p": [1]},
    "ties": {"temperature": [1, 0, 2], "min_p": [0, 0, 0.01, 0.1], "top_k": [10, 3, 500, 0], "top_p": [1, 0.7],
             "grain": 1.0},
}  # fmt: skip
SHAPES = {"mixed": (7, 4, 3001), "greedy": (7, 4, 3001), "no filters": (7, 4, 3001), "ties": (4, 9, 300)}


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_the_reference_and_the_kernel_choose_the_same_tokens(kind: str) -> None:
    """Filters on in some rows and off in others, one window of two blocks, vocabularies that fill no tile."""
    x = rows(*SHAPES[kind], **KINDS[kind])
    drafts, tokens = x.drafts(), x.tokens()
    for got in (
        jax.jit(reference.verify)(x.logits, drafts, x.keys, x.sampling),
        interpreted(tpu.verify, x.logits, drafts, x.keys, x.sampling),
    ):
        assert np.array_equal(got[0], tokens)
        assert np.array_equal(got[1], verify_coupled(tokens, drafts))
        assert np.array_equal(got[1], np.arange(drafts.shape[0]) % (drafts.shape[1] + 1))


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_the_engine_bit_for_bit(kind: str) -> None:
    x = rows(*SHAPES[kind], **KINDS[kind])
    assert np.array_equal(
        reference.process(x.logits, x.sampling), engine.process_logits(x.logits, x.state, x.positions)
    )
    vocab = x.logits.shape[-1]
    assert np.array_equal(reference.noise(x.keys, x.sampling, vocab), gumbel_noise(x.state, x.positions, vocab))


def test_bits_are_those_of_jax() -> None:
    for seed in (0, 1, 2**31 + 5):
        key = jax.random.key(jnp.uint32(seed), impl="threefry2x32")
        first, second = jax.random.key_data(key)
        index = jnp.arange(1001, dtype=jnp.uint32)
        assert np.array_equal(threefry.bits((first, second), index), jax.random.bits(key, (1001,), jnp.uint32))


def test_noise_of_the_extreme_words() -> None:
    words = jnp.asarray([0, 1, 2**16, 2**31, 2**32 - 2**8, 2**32 - 1], jnp.uint32)
    noise = np.asarray(threefry.gumbel(words))
    exact = (np.asarray(words).astype(np.float64) + 0.5) / 2**32
    want = -np.log(-np.log1p(-np.minimum(exact, 1 - 2**-24)))
    assert np.isfinite(noise).all()
    np.testing.assert_allclose(noise, want, rtol=1e-5)


def test_noise_of_some_tokens() -> None:
    x = rows(2, 3, 50, **KINDS["no filters"])
    ids = jnp.asarray([3, 0, 49])
    want = gumbel_noise(x.state, x.positions, 50)[:, :, ids]
    assert_close(token_noise(x.keys, ids[None, None]), want, 1e-6)  # the bits are the same; XLA's logarithms may not be


def test_what_it_cannot_do() -> None:
    x = rows(1, 2, 50, **KINDS["greedy"])
    drafts = jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(NotImplementedError, match="float32"):
        verify(x.logits.astype(jnp.bfloat16), drafts, x.keys, x.sampling, implementation="tpu")
    wide = jnp.broadcast_to(x.logits[..., :1], (1, 2, 300_000))
    with pytest.raises(NotImplementedError, match="300000 tokens"):
        verify(wide, drafts, x.keys, x.sampling, implementation="tpu")


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("window", [1, 4, 16])
def test_compiles_without_a_second_array_of_logits(chip: str, window: int) -> None:
    case = verification(MODELS["Qwen3.5-9B"], 4, window)
    compiled = compile_for(case, chip)
    assert not copies(compiled, case.args[0])
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < case.args[0].size * 4 / 20
