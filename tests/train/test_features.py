"""The teacher in pieces: the same argmax, and no array of [B, T, V] or [B, T, U] in the compiled step."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax.config import TargetConfig
from tests.helpers import assert_close
from tests.train.models import HYBRID, TARGET, make_drafter, make_target, random_tokens
from train.features import target_features, vocabulary_scan
from train.loss import step_sums, total_loss
from train.objective import Kind, Objective
from train.params import split_drafter
from train.ttt import unroll


@pytest.mark.parametrize("config", [TARGET, HYBRID], ids=["untied", "tied"])
@pytest.mark.parametrize("block", [7, 96, 97, 500])
def test_argmax_and_log_sum_in_blocks(config: TargetConfig, block: int) -> None:
    target, hidden = make_target(config), jax.random.normal(jax.random.key(2), (2, 5, 16))
    got, total = jax.jit(lambda h: vocabulary_scan(target, h, block, log_sum=True))(100 * hidden)
    assert np.array_equal(got, jnp.argmax(target.logits(100 * hidden), axis=-1))
    assert_close(total, jax.nn.logsumexp(target.logits(100 * hidden), axis=-1))


def test_a_tie_goes_to_the_lowest_id() -> None:
    target = make_target(HYBRID)
    target.embed_tokens.weight[...] = jnp.tile(target.embed_tokens.weight[...][:1], (97, 1))
    got, total = vocabulary_scan(target, jnp.ones((1, 3, 16)), 10)
    assert got.tolist() == [[0, 0, 0]] and total is None


def test_features_are_the_targets_and_carry_no_gradient() -> None:
    tokens, target = random_tokens(0, 2, 6), make_target(HYBRID)
    features = jax.jit(lambda t: target_features(target, t, (0, 2, 3)))(tokens)
    out = jax.jit(lambda t: target(t, aux_layers=(0, 2, 3)))(tokens)
    assert len(features.aux) == 3
    for got, want in zip(jax.tree.leaves(features)[:4], [*out.aux, out.hidden], strict=True):
        assert_close(got, want)
    assert not jax.jit(jax.grad(_hidden_sum))(jnp.ones(16), tokens).any()


def _hidden_sum(norm: jax.Array, tokens: jax.Array) -> jax.Array:
    """A sum of features as a function of a weight of the target."""
    target = make_target()
    target.norm.weight[...] = norm
    return jnp.sum(target_features(target, tokens, (2,)).hidden)


def largest_array(hlo: str) -> int:
    """Elements of the largest array in a compiled program."""
    shapes = re.findall(r"\b(?:f32|bf16|s32|pred|f64|s64|u32)\[([\d,]+)\]", hlo)
    return max(int(np.prod([int(d) for d in s.split(",")])) for s in shapes)


@pytest.mark.parametrize("kind", ["kl", "lk_lambda"])
def test_the_step_never_holds_logits_of_all_tokens(kind: Kind) -> None:
    batch, length, vocab, drafted = 2, 64, 4001, 1009
    config = dataclasses.replace(TARGET, vocab_size=vocab)
    drafter = make_drafter(vocab_size=vocab, draft_vocab_size=drafted)
    objective = Objective(kind)
    target, (graph, params, fixed) = make_target(config), split_drafter(drafter)

    def loss(params: dict[str, jax.Array], tokens: jax.Array, mask: jax.Array, kernel: jax.Array) -> jax.Array:
        log_sum = objective.needs_acceptance
        features = target_features(target, tokens, (1, 2, 3), vocab_block=256, log_sum=log_sum)
        merge = lambda: graph.merge(params, fixed, jnp.float32)
        outputs = unroll(merge, target.embed(tokens), features.aux, 3)
        sums = step_sums(
            merge().logits, outputs, features.hidden, kernel, features.top1, mask, chunk=8,
            objective=objective, teacher_log_sum=features.log_sum,
        )  # fmt: skip
        return total_loss(sums, 0.8, objective)

    shapes = (params, random_tokens(0, batch, length), jnp.ones((batch, length), bool), jnp.ones((16, drafted)))
    hlo = jax.jit(jax.value_and_grad(loss)).lower(*shapes).compile().as_text()
    weights = max(vocab, drafted) * 16
    assert largest_array(hlo) <= max(weights, batch * length * 256) < batch * length * drafted
