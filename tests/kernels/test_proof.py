"""A default kernel is used only after it gave what the reference gives, here."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import proof
from pallas_kernels.attention import gpu as attention
from pallas_kernels.attention import reference as attention_reference
from pallas_kernels.gated_delta import reference as gated_delta_reference
from pallas_kernels.gated_delta import triton as gated_delta


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "_verdicts", {})


def test_the_gpu_kernels_pass_their_cases_interpreted() -> None:
    for tiles in (gated_delta.HOLD, gated_delta.WALK):
        kernel = partial(gated_delta.interpreted, tiles=tiles)
        proof.require(f"delta {tiles}", kernel, gated_delta_reference.step, gated_delta.small_case, 1e-4)
    plain = attention_reference.paged_attention
    proof.require("pages", attention.interpreted, plain, attention.small_case, 2e-2)


def test_within_a_trace_and_once() -> None:
    calls = []

    def kernel(x: jax.Array) -> jax.Array:
        calls.append(x)
        return x + 1

    @jax.jit
    def traced(x: jax.Array) -> jax.Array:
        proof.require("inside", kernel, lambda x: x + 1, lambda: (jnp.ones(3),), 1e-6)
        proof.require("inside", kernel, lambda x: x + 1, lambda: (jnp.ones(3),), 1e-6)
        return kernel(x)

    assert (traced(jnp.zeros(3)) == 1).all()
    assert len(calls) == 2, "the comparison, and the use"


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (lambda x: x * 1.01, "differs from the reference on this device by 1.0e-02"),
        (lambda x: x * jnp.nan, "by inf"),
        (lambda x: jnp.concatenate([x, x[None]]), "Error: "),
    ],
)
def test_a_kernel_that_fails_gives_way(kernel, reason: str) -> None:  # noqa: ANN001
    for _ in range(2):  # and stays refused
        with pytest.raises(NotImplementedError, match=reason):
            proof.require("wrong", kernel, lambda x: x, lambda: (jnp.ones(3),), 1e-3)
