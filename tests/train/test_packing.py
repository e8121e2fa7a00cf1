"""Packing: rows in sequences, which give what the rows give alone."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from eagle3_jax.config import TargetConfig
from pallas_kernels.attention.branch import branch_attention
from tests.helpers import assert_close
from tests.kernels.test_branch_attention import dense
from tests.train.models import HYBRID, TARGET, make_drafter, make_target, sharpened
from train.data.batches import Batches, pad_rows
from train.data.conversations import Row
from train.data.packing import filled, first_fit, pack_rows
from train.loss import StepSums, supervised_run
from train.step import make_model, put_batch

CAPACITY = 80


def make_rows() -> list[Row]:
    """Answers that reach both ends of their rows, so that a step across a border would be supervised if it could; rows
    of 3 tokens, shorter than the convolution and than the steps; and borders at any offset, 64 among them."""
    draw, rows = np.random.default_rng(0), []
    for i, length in enumerate([3, 61, 16, 5, 30, 3, 44, 7, 25, 12]):
        mask = np.ones(length, bool) if i % 2 else draw.random(length) < 0.8
        rows.append(Row(draw.integers(0, 97, length).astype(np.int32), mask))
    return rows


def test_first_fit_goes_to_the_first_group_with_room() -> None:
    assert first_fit([5, 6, 3, 2, 4, 10, 1], 10) == [[0, 2, 3], [1, 4], [5], [6]]
    assert first_fit([], 10) == []


def test_only_the_newest_groups_stay_open() -> None:
    assert first_fit([6, 7, 4, 3], 10) == [[0, 2], [1, 3]]
    assert first_fit([6, 7, 4, 3], 10, num_open=1) == [[0], [1], [2, 3]]


def test_every_row_is_packed_once_and_always_in_the_same_place() -> None:
    rows = make_rows()
    sequences = pack_rows(rows, CAPACITY, seed=3)
    assert all(len(s.tokens) <= CAPACITY for s in sequences) and len(sequences) < len(rows) / 2
    parts = [s.tokens[s.segment_ids == i] for s in sequences for i in np.unique(s.segment_ids)]
    assert sorted(p.tobytes() for p in parts) == sorted(r.tokens.tobytes() for r in rows)
    assert filled(sequences, CAPACITY) == sum(len(r.tokens) for r in rows) / (len(sequences) * CAPACITY)
    again, other = pack_rows(rows, CAPACITY, seed=3), pack_rows(rows, CAPACITY, seed=4)
    same = lambda a, b: [s.tokens.tobytes() for s in a] == [s.tokens.tobytes() for s in b]
    assert same(sequences, again) and not same(sequences, other)


def test_batches_of_packed_rows_carry_their_segments() -> None:
    sequences = pack_rows(make_rows(), CAPACITY, seed=0)
    batch = Batches(sequences, batch_size=2, seed=0, buckets=(CAPACITY,))[0]
    assert batch.segment_ids is not None and batch.segment_ids.shape == batch.tokens.shape == (2, CAPACITY)
    assert (batch.segment_ids > 0).sum() == batch.num_tokens
    assert pad_rows(make_rows(), (CAPACITY,)).segment_ids is None


def test_runs_end_with_their_segment() -> None:
    mask, ids = jnp.ones((1, 9), bool), jnp.asarray([[1, 1, 1, 2, 3, 3, 3, 3, 0]], jnp.int32)
    assert supervised_run(mask.at[0, 8].set(False), ids).tolist() == [[0, 1, 2, 0, 0, 1, 2, 3, 0]]


@pytest.mark.parametrize("config", [TARGET, HYBRID], ids=["attention", "hybrid"])
def test_packed_equals_separate(config: TargetConfig) -> None:
    """Sums of every step and the gradient of the loss, of models that do not multiply rounding."""
    target, drafter = make_target(config, seed=1), sharpened(make_drafter(), 0.5)
    model, params, frozen = make_model(target, drafter, num_steps=3)
    compute = jax.jit(jax.value_and_grad(model.loss, has_aux=True))

    def run(rows: Sequence[Row]) -> tuple[Array, StepSums, dict[str, Array]]:
        (loss, sums), grads = compute(params, frozen, put_batch(pad_rows(rows, (CAPACITY,)), None))
        return loss, sums, grads

    sequences = pack_rows(make_rows(), CAPACITY, seed=0)
    assert len(sequences) < 4
    (loss, sums, grads), (want_loss, want_sums, want_grads) = run(sequences), run(make_rows())
    assert np.asarray(want_sums.hits).any() and np.asarray(want_sums.counted).all()
    for name in ("counted", "supervised", "hits"):
        assert getattr(sums, name).tolist() == getattr(want_sums, name).tolist(), name
    assert_close(sums.loss, want_sums.loss)
    assert_close(loss, want_loss)
    for name, want in want_grads.items():
        assert_close(grads[name], want, name=name)


def test_attention_within_segments_and_its_gradient() -> None:
    """In blocks that are not the segments', with a last block that is not full."""
    shapes = [(1, 13, 4, 6)] + [(1, 13, 2, 6)] * 4
    q, *rest = (2 * jax.random.normal(jax.random.key(i), s) for i, s in enumerate(shapes))
    keys, values, cotangent = rest[:2], rest[2:], jax.random.normal(jax.random.key(9), q.shape)
    ids, cuts = jnp.asarray([[1] * 4 + [2] + [3] * 8], jnp.int32), [4, 5]

    def apart(q: Array, keys: Sequence[Array], values: Sequence[Array]) -> Array:
        parts = zip(*(jnp.split(x, cuts, axis=1) for x in (q, *keys, *values)), strict=True)
        return jnp.concatenate([dense(p[0], p[1:3], p[3:5]) for p in parts], axis=1)

    together = lambda q, k, v: branch_attention(q, k, v, segment_ids=ids, block=5)
    assert_close(together(q, keys, values), apart(q, keys, values))
    grads = [
        jax.jit(jax.grad(lambda *x, f=f: jnp.sum(f(*x) * cotangent), argnums=(0, 1, 2)))(q, keys, values)
        for f in (together, apart)
    ]
    for got, want in zip(*map(jax.tree.leaves, grads), strict=True):
        assert_close(got, want)
