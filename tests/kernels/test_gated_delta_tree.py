"""The delta rule and its convolution over trees of drafts: every path from the root as the chain that it is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.causal_conv import causal_conv, causal_conv_tree, tree_tail
from pallas_kernels.gated_delta import Pending, fold, path, reference, step, window
from tests.helpers import assert_close
from tests.kernels.test_gated_delta import KINDS, Array, fast_window, in_float64, make, make_state, quick_jit

TOKENS, BATCH = 7, 3
fast_tree = quick_jit(window)


def tree(seed: int, batch: int = BATCH) -> Array:
    """Parents [B,W]: the first row is a chain, the second has roots only, the others are random."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(-1, np.arange(TOKENS), (batch, TOKENS))
    rows[0], rows[1] = np.arange(TOKENS) - 1, -1
    return rows.astype(np.int32)


def up_to(parents: Array, token: int) -> list[int]:
    """The path from the root to a token."""
    return [] if token < 0 else [*up_to(parents, int(parents[token])), token]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, 1])
def test_every_path_as_the_recurrence(kind: str, seed: int) -> None:
    """Outputs of every token; the state after every path is folded in; no bit of it changes where none is."""
    parents, x, state = tree(seed), make(kind, BATCH, TOKENS, seed=seed), make_state(BATCH)
    padded = np.zeros((BATCH, TOKENS, 1), bool)
    padded[2, -2:] = True  # what is below these sees through them
    x = x._replace(g=np.where(padded, 0, x.g), beta=np.where(padded, 0, x.beta))
    out, updates = fast_tree(*x, state, parents)
    after = quick_jit(jax.vmap(lambda last: fold(state, x.k, updates, x.g, path(parents, last))))
    folded = np.asarray(after(np.tile(np.arange(-1, TOKENS, dtype=np.int32)[:, None], (1, BATCH))))
    assert np.array_equal(folded[0], state)
    for row in range(BATCH):
        for token in range(TOKENS):
            places = (slice(row, row + 1), up_to(parents[row], token))
            want, states = in_float64(x.part(places), state[row : row + 1])
            assert_close(out[row, token], want[0, -1], 1e-5, f"row {row}, token {token}")
            assert_close(folded[token + 1, row], states[0, -1], 1e-5, f"row {row}, token {token}")


def test_a_chain_written_as_a_tree_and_one_tree_for_all_rows() -> None:
    x, state = make("plain", BATCH, TOKENS), make_state(BATCH)
    for got, want in zip(fast_tree(*x, state, np.arange(TOKENS) - 1), fast_window(*x, state), strict=True):
        assert_close(got, want, 1e-6)


def test_a_cycle_of_trees() -> None:
    """`step` folds the path in and verifies the next tree; the kernels give way, or say why they cannot."""
    parents, x, state = tree(2), make("plain", BATCH, TOKENS), make_state(BATCH)
    _, updates = fast_tree(*x, state, parents)
    pending = Pending(x.k, updates, x.g, path(parents, jnp.array([-1, 3, 6])))
    after = make("plain", BATCH, 3, seed=5)
    args, below = (state, pending, *after), jnp.array([-1, 0, 0])
    with dispatch.using("gpu"):
        out, _, committed = quick_jit(lambda *args: step(*args, parents=below))(*args)
    assert "trees of drafts" in dispatch.fallbacks()["gated_delta.step"]
    for name, options in (("gpu", {"parents": below}), ("tpu", {})):
        with pytest.raises(NotImplementedError, match="trees of drafts"):
            step(*args, implementation=name, **options)
    for row, last in enumerate((-1, 3, 6)):
        accepted, start = up_to(parents[row], last), state[row : row + 1]
        if accepted:
            start = in_float64(x.part((slice(row, row + 1), accepted)), start)[1][:, -1]
        assert_close(committed[row], start[0], 1e-5)
        want, _ = in_float64(after.part((slice(row, row + 1), [0, 2])), start)
        assert_close(out[row, 2], want[0, -1], 1e-5)


def test_a_parent_that_comes_later() -> None:
    x, state = make("plain", 1, 3), make_state(1)
    with pytest.raises(ValueError, match=r"\[-1, 2, 0\]: a token's parent must come before it"):
        window(*x, state, jnp.array([-1, 2, 0]))
    chains = jax.make_jaxpr(reference.window)(*x, state)
    assert "matmul" not in str(chains) and len(chains.jaxpr.invars) == 6


@pytest.mark.parametrize("taps", [1, 2, 4])
def test_convolution_over_paths(taps: int) -> None:
    """Each token against a convolution of the last inputs of its path, which are the next tail when it is accepted."""
    rng, parents = np.random.default_rng(taps), tree(taps)
    inputs = rng.normal(size=(BATCH, taps - 1 + TOKENS, 5)).astype(np.float32)
    weight = jnp.asarray(rng.normal(size=(taps, 5)), jnp.float32)
    got = quick_jit(causal_conv_tree)(inputs, weight, parents)
    tails = jax.vmap(lambda last: tree_tail(jnp.asarray(inputs), taps, jnp.asarray(parents), last))
    found = quick_jit(tails)(np.tile(np.arange(-1, TOKENS)[:, None], (1, BATCH)))

    def seen(row: int, token: int) -> Array:
        return inputs[row, [*range(taps - 1), *(taps - 1 + i for i in up_to(parents[row], token))]]

    last = np.stack([seen(row, token)[-taps:] for row in range(BATCH) for token in range(TOKENS)])
    assert_close(got, causal_conv(jnp.asarray(last), weight).reshape(got.shape), 1e-6)
    for row in range(BATCH):
        for token in range(-1, TOKENS):
            want = seen(row, token)
            assert np.array_equal(found[token + 1, row], want[len(want) - taps + 1 :])
    half = quick_jit(causal_conv_tree)(inputs.astype(jnp.bfloat16), weight, parents[2])
    assert half.dtype == jnp.bfloat16 and half.shape == got.shape
