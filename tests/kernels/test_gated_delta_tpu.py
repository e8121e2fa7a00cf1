"""The fused delta-rule step on a TPU: interpreted against the reference, compiled at the shapes of real models."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.tpu_kernels import CHIPS, MODELS, compile_for, delta_step
from pallas_kernels.gated_delta import Pending, reference, step, tpu
from tests.helpers import assert_close
from tests.kernels.on_tpu import copies, interpreted

WIDTH = 128


def arguments(batch: int, window: int, before: int, key_heads: int, repeats: int, strength: float = 1.0) -> Any:
    """A window after one of `before` tokens, of which row i has accepted i (modulo `before` + 1)."""
    rng = np.random.default_rng(batch + window)
    heads = key_heads * repeats
    normal = lambda *shape: rng.normal(size=(batch, *shape)).astype(np.float32)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    decay = lambda *shape: -strength * rng.random((batch, *shape)).astype(np.float32)
    count = np.arange(batch, dtype=np.int32) % (before + 1)
    pending = Pending(unit(normal(before, key_heads, WIDTH)), normal(before, heads, WIDTH), decay(before, heads), count)
    q, k = (unit(normal(window, key_heads, WIDTH)) for _ in range(2))
    beta = rng.random((batch, window, heads)).astype(np.float32)
    args = (normal(heads, WIDTH, WIDTH), pending, q * WIDTH**-0.5, k, normal(window, heads, WIDTH))
    return jax.tree.map(jnp.asarray, (*args, decay(window, heads), beta))


@pytest.mark.parametrize(
    ("batch", "window", "before", "key_heads", "repeats"),
    [(4, 3, 2, 1, 3), (2, 1, 1, 16, 1), (2, 5, 16, 2, 2), (1, 16, 4, 1, 1)],
)
def test_as_the_reference(batch: int, window: int, before: int, key_heads: int, repeats: int) -> None:
    """Every accepted count, windows that change their width, grouped heads, one block of heads and two."""
    args = arguments(batch, window, before, key_heads, repeats)
    got, want = interpreted(tpu.step, *args), jax.jit(reference.step)(*args)
    for name, a, b in zip(("out", "updates", "state"), got, want, strict=True):
        assert_close(a, b, 1e-5, name)
    assert jnp.array_equal(got[2][0], args[0][0]), "nothing was accepted in row 0"


def test_strong_decays_and_rejected_garbage() -> None:
    """Decays to e^-60 a token beside none at all; what was rejected is not a number and touches nothing."""
    state, pending, *window = arguments(2, 4, 3, 1, 2, strength=60.0)
    g = jnp.where(jnp.arange(4)[None, :, None] == 1, window[3], 0.01 * window[3] / 60)
    window[3] = g.at[:, 3].set(0.0)
    window[4] = window[4].at[:, 3].set(0.0)  # padding
    want = reference.step(state, pending, *window)
    rejected = jnp.arange(3)[None, :] >= pending.accepted[:, None]
    bad = pending._replace(updates=jnp.where(rejected[..., None, None], jnp.nan, pending.updates))
    got = interpreted(tpu.step, state, bad, *window)
    for name, a, b in zip(("out", "updates", "state"), got, want, strict=True):
        assert_close(a, b, 1e-5, name)


def test_low_precision_inputs() -> None:
    state, pending, *window = arguments(2, 3, 2, 1, 2)
    window = [x.astype(jnp.bfloat16) for x in window]
    for a, b in zip(interpreted(tpu.step, state, pending, *window), reference.step(state, pending, *window)):  # noqa: B905
        assert a.dtype == jnp.float32
        assert_close(a, b, 1e-5)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda s, p, *w: (s.astype(jnp.bfloat16), p, *w), "float32"),
        (lambda s, p, *w: (s[..., :64], p, *w), "128"),
        (lambda s, p, q, *w: (s, p, q, jnp.zeros((2, 17, *q.shape[2:])), *w[1:]), "17 tokens"),
        (lambda s, p, q, k, *w: (jnp.zeros((2, 300, 128, 128)), p, q, k, *w), "bytes of state"),
    ],
    ids=["low precision", "narrow", "long", "heavy"],
)
def test_what_it_cannot_do(change: Any, reason: str) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        step(*change(*arguments(2, 3, 2, 1, 2)), implementation="tpu")


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(("model", "window"), [("Qwen3.5-9B", 4), ("Qwen3.5-27B", 16)])
def test_compiles_with_the_state_in_place(chip: str, model: str, window: int) -> None:
    case = delta_step(MODELS[model], 8, window)
    compiled = compile_for(case, chip)
    assert not copies(compiled, case.args[0])
    memory, state = compiled.memory_analysis(), case.args[0].size * 4
    assert memory.alias_size_in_bytes >= state
    assert memory.temp_size_in_bytes < state // 4, "a copy of the state"
