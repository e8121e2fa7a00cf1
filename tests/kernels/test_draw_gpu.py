"""Drawing tokens on a GPU, interpreted: the reference's, and no noise where nothing is kept."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch, proof
from pallas_kernels.verification import Sampling, draw_gpu, drawing, threefry
from pallas_kernels.verification.thresholds import ordered_bits

RNG = np.random.default_rng(0)
BATCH, WINDOW, VOCAB = 6, 2, 1000
SIZES: dict[str, int] = {"share": 256, "chunk": 16, "unroll": 4}  # the last program lacks a step, and some chunks


def sampling(*heat: float) -> Sampling:
    rows = len(heat)
    off, whole = jnp.zeros(rows), jnp.zeros(rows, jnp.int32)
    stops, no_stop = jnp.zeros((rows, 0), jnp.int32), jnp.zeros((rows, WINDOW), jnp.bool_)
    return Sampling(jnp.asarray(heat, jnp.float32), off, whole, off, stops, no_stop)


def rows() -> tuple[Any, ...]:
    """By row, two windows each: all kept; some; one; none; and greedily, all and some of many ties."""
    scaled = RNG.normal(size=(BATCH, WINDOW, VOCAB)).astype(np.float32) * 4
    scaled[4:] = np.round(scaled[4:])
    scaled[4, 1] = np.where(RNG.random(VOCAB) < 0.5, 0.0, -0.0)  # all are the same
    scaled[5, 0, :990] = scaled[1, 1, ::3] = scaled[0, 1] = -np.inf  # of the first, none but the last ten are left
    top = np.sort(scaled, -1)
    least = np.asarray(ordered_bits(jnp.asarray(top[..., -1]))).copy()
    least[0], least[3], least[4] = 0, 2**32 - 1, 0
    least[1], least[5] = np.asarray(ordered_bits(jnp.asarray(top[[1, 5], :, -5])))
    keys = jnp.asarray(RNG.integers(0, 2**32, (BATCH, WINDOW, 2), dtype=np.uint32))
    return jnp.asarray(scaled), jnp.asarray(least), keys, sampling(1, 1, 1, 1, 0, 0)


@pytest.mark.parametrize("ids", [None, jnp.asarray(RNG.permutation(5000)[:VOCAB], jnp.int32)], ids=["all", "some"])
def test_the_same_tokens_as_the_reference(ids: jax.Array | None) -> None:
    case = *rows(), ids
    got, want = draw_gpu.interpreted(*case, **SIZES), jax.jit(drawing.draw)(*case)
    assert np.array_equal(got, want) and got.dtype == jnp.int32
    assert not got[0, 1] and not got[3].any() and not got[4, 1] and got[5, 0] >= 990
    assert np.array_equal(got[4], np.asarray(case[0][4]).argmax(-1))


def test_each_token_of_a_few_is_drawn() -> None:
    """Equal logits at the ends of programs, steps and chunks: which of them it is, is up to the noise."""
    places = [0, 15, 16, 255, 256, 998, 999]
    scaled = jnp.zeros((40, WINDOW, VOCAB)).at[:, :, jnp.asarray(places)].set(2.0)
    least = jnp.full((40, WINDOW), ordered_bits(jnp.float32(2)))
    keys = jnp.asarray(RNG.integers(0, 2**32, (40, WINDOW, 2), dtype=np.uint32))
    case = scaled, least, keys, sampling(*[1.0] * 40)
    got = draw_gpu.interpreted(*case, **SIZES)
    assert np.array_equal(got, drawing.draw(*case))
    assert set(np.asarray(got).ravel().tolist()) == set(places)


def test_noise_is_made_where_a_token_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    scaled, _, keys, how = rows()
    made: list[int] = []

    def counted(words: jax.Array) -> jax.Array:
        jax.debug.callback(lambda word: made.append(int(word)), words[0])
        return jnp.zeros(words.shape, jnp.float32)

    monkeypatch.setattr(threefry, "gumbel", counted)
    scaled = jnp.zeros((2, WINDOW, VOCAB)).at[0, 0, 70].set(1.0)
    least = jnp.full((2, WINDOW), ordered_bits(jnp.float32(1))).at[1].set(0)
    got = draw_gpu.interpreted(scaled, least, keys[:2], sampling(1, 0), **SIZES, warps=2)  # traced anew
    jax.effects_barrier()
    assert got[0, 0] == 70 and len(made) == 1


@pytest.mark.parametrize("some", [False, True])
def test_the_case_by_which_it_is_proven(some: bool) -> None:
    case = partial(draw_gpu.small_case, some)
    assert proof._verdict(draw_gpu.interpreted, drawing._draw, case, 0.0) is None


def test_elsewhere_the_reference_is_used() -> None:
    scaled, least, keys, how = rows()
    with dispatch.using("gpu"):
        drawing.draw(scaled, least, keys, how)
    assert dispatch.fallbacks()["verification.draw"] == "this kernel is for GPUs"
    with pytest.raises(NotImplementedError, match="float32, not bfloat16"):
        draw_gpu.interpreted(scaled.astype(jnp.bfloat16), least, keys, how)
    with pytest.raises(NotImplementedError, match="no logits"):
        draw_gpu.interpreted(scaled[:0], least[:0], keys[:0], sampling())


@pytest.mark.parametrize(
    ("asks", "kernel"), [(None, True), ({"temperature"}, True), (set(), False), ({"min_p"}, False)]
)
def test_the_kernel_is_left_out_where_all_are_known_to_be_greedy(
    asks: set[Any] | None, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawing, "_draw_gpu", lambda scaled, *_: jnp.full(scaled.shape[:2], -7))
    scaled, least, keys, how = rows()
    how = dataclasses.replace(how, asks=None if asks is None else frozenset(asks))
    assert bool((drawing.draw(scaled, least, keys, how) == -7).all()) == kernel
