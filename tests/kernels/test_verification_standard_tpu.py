"""Rejection sampling: as the engine's, token for token, from the reference's summary and from the kernel's."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.tpu_kernels import CHIPS, MODELS, compile_for, verification_summary
from infer import sampling as engine
from infer import verify as engine_verify
from pallas_kernels.verification import position_keys, tpu, verify_standard
from pallas_kernels.verification.standard import Summary, summarise
from tests.helpers import assert_close
from tests.kernels.on_tpu import copies, interpreted
from tests.kernels.test_verification_tpu import KINDS, SHAPES, Rows, rows

DRAFT_VOCAB = 40


def drafted(x: Rows, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Drafts [B,K], q [B,K,U] and d2t [U]: half of the drafts are the target's own token, and so likely to stand."""
    rng = np.random.default_rng(seed)
    tokens = x.tokens()[:, :-1]
    own = np.unique(tokens)
    others = np.setdiff1d(np.arange(x.logits.shape[-1]), own)
    d2t = np.sort(np.concatenate([own, rng.choice(others, max(DRAFT_VOCAB - own.size, 4), replace=False)]))
    drafts = np.where(rng.random(tokens.shape) < 0.6, tokens, rng.choice(d2t, tokens.shape))
    q = rng.dirichlet(np.ones(d2t.size), size=tokens.shape)
    drafts[0, -1] = -1
    return jnp.asarray(drafts, jnp.int32), jnp.asarray(q, jnp.float32), jnp.asarray(d2t, jnp.int32)


@jax.jit
def both(x: Rows, drafts: jax.Array, q: jax.Array, d2t: jax.Array) -> Any:
    """From processed logits, as the engine calls it, and from raw ones."""
    uniform = engine.uniform_open(x.state, x.positions[:, :-1])
    keys = position_keys(x.state.key, x.positions, int(engine.Purpose.RESIDUAL))
    processed = engine.process_logits(x.logits, x.state, x.positions)
    want = engine_verify.verify_standard(processed, drafts, q, d2t, x.state, x.positions)
    return want, verify_standard(x.logits, drafts, q, d2t, uniform, keys, x.sampling)


@pytest.mark.parametrize("kind", ["mixed", "ties"])
def test_the_same_from_raw_logits_as_from_processed_ones(kind: str) -> None:
    x = rows(*SHAPES[kind], **KINDS[kind])
    for seed in range(3):
        drafts, q, d2t = drafted(x, seed)
        (want, count), (got, accepted) = both(x, drafts, q, d2t)
        assert np.array_equal(accepted, count)
        means = np.arange(want.shape[1])[None] <= np.asarray(count)[:, None]
        assert np.array_equal(np.where(means, got, 0), np.where(means, want, 0))


def test_the_kernel_finds_the_same_summary() -> None:
    x = rows(*SHAPES["ties"], **KINDS["ties"])
    got, want = Summary(*interpreted(tpu.summary, x.logits, x.sampling)), jax.jit(summarise)(x.logits, x.sampling)
    assert np.array_equal(got.likeliest, want.likeliest)
    assert np.array_equal(got.lowest, want.lowest)
    assert_close(got.total, want.total, 1e-6)


def test_the_kernel_is_called_by_name() -> None:
    x = rows(2, 2, 300, **KINDS["no filters"])
    drafts, q, d2t = drafted(x)
    args: Any = (x.logits, drafts, q, d2t, jnp.full((2, 1), 0.5), x.keys, x.sampling)
    with mock.patch.object(tpu, "summary", side_effect=summarise) as kernel:
        got = jax.jit(partial(verify_standard, implementation="tpu"))(*args)
    assert kernel.call_count == 1
    for a, b in zip(got, jax.jit(verify_standard)(*args), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("chip", CHIPS)
def test_compiles_without_a_second_array_of_logits(chip: str) -> None:
    case = verification_summary(MODELS["Qwen3.5-9B"], 4, 4)
    compiled = compile_for(case, chip)
    assert not copies(compiled, case.args[0])
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < case.args[0].size * 4 / 20
