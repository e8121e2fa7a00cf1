"""The search for thresholds on a GPU, interpreted: the tokens that the reference keeps."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch, proof
from pallas_kernels.verification import nearby_gpu, sums_gpu, thresholds, thresholds_gpu

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(2, 3, 100)).astype(np.float32) * 5
LOGITS[0, 1, 4:9] = LOGITS[1, 2, :40] = -np.inf
LOGITS[1, 0, 10:30] = np.round(LOGITS[1, 0, 10:30])  # ties, zeros among them
LOGITS[0, 2, :60:2] = 0.0  # a third or more of what is kept: the threshold
LOGITS[0, 2, 1:60:3] = -0.0
# Two programs a row; of some whole steps, and at the end of a step whose last logits, or chunks, are not there.
WALK = sums_gpu.Walk(512, 1024, 3, weighed=True)
SIZES = {"bits": 3, "share": 64, "chunk": 8, "unroll": 2}, {"bits": 4, "share": 64, "chunk": 16, "unroll": 2}


@pytest.mark.parametrize("find, size", [(thresholds.least_top_k, SIZES[0]), (thresholds.least_top_p, SIZES[1])])
def test_the_same_tokens_are_kept(find: Any, size: dict[str, int]) -> None:
    """By row: off, one token, some, nearly all."""
    by_count, keep = find is thresholds.least_top_k, lambda x, asked: thresholds.kept(x, find(x, asked))
    asked = jnp.zeros((2, 1), jnp.int32 if by_count else jnp.float32)
    with mock.patch.object(thresholds, "threshold", partial(thresholds_gpu.interpreted, **size)):
        kernel = jax.jit(lambda *args: keep(*args)).lower(LOGITS, asked).compile()
    reference = jax.jit(keep)
    for value in (0, 1, 7, 40, 60, 99) if by_count else (0.0, 1e-6, 0.5, 0.97):
        asked = jnp.full_like(asked, value)
        got, want = kernel(LOGITS, asked), reference(LOGITS, asked)
        assert np.array_equal(got, want), value


def test_a_row_with_too_much_near_its_threshold_is_left_to_the_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second has more there than is gathered, by one share or all; the third is all the same."""
    logits = jnp.asarray(np.stack([9 * RNG.normal(size=3000), RNG.normal(size=3000), np.ones(3000)]), jnp.float32)[
        :, None
    ]
    top = logits.max(-1)
    monkeypatch.setattr(nearby_gpu, "PROGRAMS", 32)
    mass = nearby_gpu.summed(logits[:, 0], top[:, 0], WALK, warps=4, interpret=True)
    near = nearby_gpu.between(top[:, 0], 0.7 * mass[:, -1], mass)
    bits, sure = nearby_gpu.settle(logits[:, 0], near, weighed=True, room=1024, interpret=True)
    assert sure.tolist() == [1, 0, 0]
    want = thresholds.threshold(logits, top, jnp.full(top.shape, 0.7))
    assert bits[0] == jax.lax.bitcast_convert_type(want, jnp.int32)[0, 0]


def test_a_mass_at_a_distance_that_is_just_enough() -> None:
    """Whichever way it is decided, what lies above it is counted once."""
    logits = jnp.asarray(RNG.normal(size=(2, 1500)) * 3, jnp.float32)
    top = logits.max(-1)
    mass = nearby_gpu.summed(logits, top, WALK, warps=4, interpret=True)
    place = np.asarray(logits >= (top - 4.5)[:, None]).sum(1)
    for wanted in (mass[:, 3], jnp.nextafter(mass[:, 3], jnp.float32(np.inf))):
        near = nearby_gpu.between(top, wanted, mass)
        bits, sure = nearby_gpu.settle(logits, near, weighed=True, interpret=True)
        least = jax.vmap(sums_gpu.float_of)(bits)
        kept = np.asarray(logits >= least[:, None]).sum(1)
        assert sure.all() and (np.abs(kept - place) <= 1).all()


def test_a_row_that_asks_for_no_top_k_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[Any] = []
    monkeypatch.setattr(thresholds, "threshold", lambda x, _, w: wanted.append(w) or jnp.zeros(w.shape, jnp.uint32))
    thresholds.least_top_k(jnp.asarray(LOGITS), jnp.asarray([[5], [0]]))
    assert wanted[0].tolist() == [[5] * 3, [0] * 3]


def test_a_float_stands_for_ordered_bits() -> None:
    """Those of numbers, their neighbours, and any: of NaN too, and of what a device takes for 0."""
    tiny, huge = np.finfo(np.float32).tiny, np.finfo(np.float32).max
    edges = np.array([0, 1e-40, tiny, 1, huge, np.inf, *RNG.normal(size=9)], np.float32)
    numbers = np.concatenate([edges, -edges, np.nextafter(edges, np.float32(0)), LOGITS[:, :, ::7].ravel()])
    known = np.asarray(thresholds.ordered_bits(jnp.asarray(numbers)))
    others = RNG.integers(0, 1 << 32, 200, dtype=np.uint32), np.array([0, 2**31 - 1, 2**32 - 1], np.uint32)
    bits = np.concatenate([known, known + np.uint32(1), known - np.uint32(1), *others])
    least = jax.vmap(sums_gpu.float_of)(jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.int32))
    got = jax.vmap(lambda f: numbers >= f)(least)
    assert np.array_equal(got, known >= bits[:, None])


def test_the_case_by_which_it_is_proven() -> None:
    kernel = partial(thresholds_gpu.interpreted, share=5000)  # fewer programs, and so faster
    case = lambda: tuple(x[:24] for x in thresholds_gpu.small_case())
    assert proof._verdict(kernel, thresholds._threshold, case, 0.0) is None


def test_elsewhere_the_reference_is_used() -> None:
    with dispatch.using("gpu"):
        thresholds.threshold(jnp.asarray(LOGITS), None, jnp.full((2, 3), 2.0))
    assert dispatch.fallbacks()["verification.threshold"] == "this kernel is for GPUs"
    with pytest.raises(NotImplementedError, match="float32, not bfloat16"):
        thresholds_gpu.interpreted(jnp.zeros((1, 1, 8), jnp.bfloat16), None, jnp.zeros((1, 1)))
    with pytest.raises(NotImplementedError, match="no logits"):
        thresholds_gpu.interpreted(jnp.zeros((0, 1, 8)), None, jnp.zeros((0, 1)))
    assert jax.default_backend() == "cpu"
