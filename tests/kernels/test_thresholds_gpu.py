"""The search for thresholds on a GPU, interpreted: the tokens that the reference keeps."""

from __future__ import annotations

from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch, proof
from pallas_kernels.verification import thresholds, thresholds_gpu

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(2, 3, 100)).astype(np.float32) * 5
LOGITS[0, 1, 4:9] = LOGITS[1, 2, :40] = -np.inf
LOGITS[1, 0, 10:30] = np.round(LOGITS[1, 0, 10:30])  # ties, zeros among them


@pytest.mark.parametrize("keep", [thresholds.keep_top_k, thresholds.keep_top_p])
def test_the_same_tokens_are_kept(keep: object) -> None:
    """By row: off, one token, some, nearly all; shares of 32 logits, the last of which are not there."""
    small = partial(thresholds_gpu.interpreted, share=32)
    by_count = keep is thresholds.keep_top_k
    for value in (0, 1, 7, 99) if by_count else (0.0, 1e-6, 0.5, 0.97):
        asked = jnp.full((2, 1), value, jnp.int32 if by_count else jnp.float32)
        want = keep(jnp.asarray(LOGITS), asked)  # type: ignore[operator]
        with mock.patch.object(thresholds, "_threshold_gpu", small), dispatch.using("gpu"):
            got = keep(jnp.asarray(LOGITS), asked)  # type: ignore[operator]
        assert np.array_equal(got, want), value


def test_the_case_by_which_it_is_proven() -> None:
    assert proof._verdict(thresholds_gpu.interpreted, thresholds._threshold, thresholds_gpu.small_case, 0.0) is None


def test_elsewhere_the_reference_is_used() -> None:
    with dispatch.using("gpu"):
        thresholds.threshold(jnp.asarray(LOGITS), None, jnp.full((2, 3), 2.0))
    assert dispatch.fallbacks()["verification.threshold"] == "this kernel is for GPUs"
    with pytest.raises(NotImplementedError, match="float32, not bfloat16"):
        thresholds_gpu.interpreted(jnp.zeros((1, 1, 8), jnp.bfloat16), None, jnp.zeros((1, 1)))
    assert jax.default_backend() == "cpu"
