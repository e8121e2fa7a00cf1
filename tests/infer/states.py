"""SamplingState rows for tests."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from infer.params import SamplingParams
from infer.sampling import Purpose, SamplingState, position_keys, request_key, request_state
from pallas_kernels.verification import likeliest, noise


def state_of(*rows: SamplingParams, prompt_length: int = 0, stop_ids: tuple[int, ...] = ()) -> SamplingState:
    """One row for each of `rows`; row i has request index i."""
    states = [
        request_state(
            params,
            prompt_length=prompt_length,
            model_stop_ids=stop_ids,
            key=request_key(engine_seed=0, request_index=i, seed=params.seed),
        )
        for i, params in enumerate(rows)
    ]
    return jax.tree.map(lambda *leaves: jnp.asarray(np.concatenate(leaves)), *states)


def many_keys(count: int, seed: int = 0, **params: Any) -> SamplingState:
    """`count` rows with the same parameters and different keys."""
    one = state_of(SamplingParams(**params))
    wide = jax.tree.map(lambda leaf: jnp.repeat(leaf, count, axis=0), one)
    keys = jax.random.key_data(jax.random.split(jax.random.key(seed), count))
    return jax.tree.map(lambda leaf: leaf, SamplingState(**{**vars(wide), "key": keys}))


def take_rows(state: SamplingState, rows: list[int]) -> SamplingState:
    return jax.tree.map(lambda leaf: leaf[np.array(rows)], state)


def gumbel_noise(params: SamplingState, positions: Array, vocab_size: int, purpose: Purpose = Purpose.TOKEN) -> Array:
    """[B, W, V] float32 standard Gumbel noise; zeros for greedy rows, and nothing is drawn when all are greedy.

    Element v depends on the request's key, the position and v alone: not on V, the batch, W, or the sharding.
    """
    return noise(position_keys(params, positions, purpose), params.at(positions), vocab_size)


def sample(processed: Array, drawn: Array) -> Array:
    """What `infer.sampling.sample` does, with all of its noise at hand: [B,W] int32, of two [B,W,V]."""
    return likeliest(processed + drawn)
