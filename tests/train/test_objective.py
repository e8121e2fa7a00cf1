"""Every loss against its definition, position by position, value and gradient."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from tests.helpers import assert_close
from train.loss import StepSums, step_sums, supervised_run, total_loss
from train.objective import Kind, Objective, smooth_l1

STEPS, BATCH, LENGTH, WIDTH, VOCAB, DRAFTED, DECAY = 3, 2, 11, 6, 23, 9, 0.7
D2T = np.sort(np.random.default_rng(1).permutation(VOCAB)[:DRAFTED])
MASK = np.random.default_rng(2).random((BATCH, LENGTH)) < 0.85


def draw(seed: int, *shape: int) -> Array:
    return jax.random.normal(jax.random.key(seed), shape)


OUTPUTS, HIDDEN = draw(0, STEPS, BATCH, LENGTH, WIDTH), draw(1, BATCH, LENGTH, WIDTH)
DRAFT, TEACHER = draw(2, WIDTH, DRAFTED), draw(3, WIDTH, VOCAB)
CHOICE = jnp.argmax(HIDDEN @ TEACHER, axis=-1)


def by_definition(outputs: Array, objective: Objective) -> Array:
    """Steps, rows and positions one by one; p over the whole vocabulary, cut and renormalised as the module says."""
    total, full = jnp.zeros(()), jax.nn.softmax(HIDDEN @ TEACHER)
    run = np.asarray(supervised_run(jnp.asarray(MASK)))
    for i in range(STEPS):
        divergences, chances = [], []
        for b, t in np.ndindex(BATCH, LENGTH):  # token t, guessed from t-2-i; the target chose it at t-1
            if run[b, t] < i + 2 or int(CHOICE[b, t - 1]) not in D2T:
                continue
            p, q = full[b, t - 1, D2T], jax.nn.softmax(outputs[i, b, t - 2 - i] @ DRAFT)
            renormalised = p / p.sum()
            divergences.append(jnp.sum(renormalised * jnp.log(renormalised / q)))
            chances.append(jnp.sum(jnp.minimum(p, q)))
        assert len(chances) > 1
        kl, chance = jnp.mean(jnp.stack(divergences)), jnp.stack(chances)
        weight = jax.lax.stop_gradient(objective.kl_scale * jnp.exp(-objective.kl_decay * chance.mean()))
        total += (
            DECAY**i
            * {
                "kl": kl,
                "lk_alpha": jnp.mean(-jnp.log(chance)),
                "lk_lambda": weight * kl + (1 - weight) * (1 - chance.mean()),
            }[objective.kind]
        )
    return total


def ours(outputs: Array, objective: Objective, normed: Callable[[Array], Array] | None = None) -> Array:
    index = np.full(VOCAB, -1, np.int32)
    index[D2T] = np.arange(DRAFTED)
    sums = step_sums(
        lambda h: h @ DRAFT, outputs, HIDDEN, TEACHER[:, D2T], jnp.asarray(index)[CHOICE], jnp.asarray(MASK), chunk=4,
        objective=objective, teacher_log_sum=jax.nn.logsumexp(HIDDEN @ TEACHER, axis=-1), normed=normed,
    )  # fmt: skip
    return total_loss(sums, DECAY, objective)


@pytest.mark.parametrize("kind", ["kl", "lk_alpha", "lk_lambda"])
def test_losses_equal_their_definitions(kind: Kind) -> None:
    objective = Objective(kind, kl_scale=0.9, kl_decay=3.0)
    got, want = (jax.value_and_grad(lambda x, f=f: f(x, objective))(OUTPUTS) for f in (ours, by_definition))
    assert_close(got[0], want[0])
    assert_close(got[1], want[1])


def test_nothing_counted_is_no_loss() -> None:
    none = jnp.zeros(2)
    for kind in ("kl", "lk_alpha", "lk_lambda"):
        assert total_loss(StepSums(none, none, none, none, none), 0.8, Objective(kind, kl_scale=0.5)) == 0


def test_acceptance_needs_the_whole_vocabularys_sum() -> None:
    arguments = (lambda h: h @ DRAFT, OUTPUTS, HIDDEN, TEACHER[:, D2T], CHOICE, jnp.asarray(MASK))
    with pytest.raises(ValueError, match="lk_alpha needs teacher_log_sum"):
        step_sums(*arguments, objective=Objective("lk_alpha"))


def test_regression_to_hidden_states_by_definition() -> None:
    """Value and gradient, position by position; without its weight nothing of it is left."""
    weighed, run = Objective(hidden_weight=0.3), np.asarray(supervised_run(jnp.asarray(MASK)))
    normed = lambda h: 1.5 * h / jnp.sqrt(jnp.mean(h**2, axis=-1, keepdims=True))

    def distance(outputs: Array) -> Array:
        total = jnp.zeros(())
        for i in range(STEPS):
            row, t = np.nonzero(run >= i + 2)  # the guess of token t, made at t-2-i, stands for the state at t-1
            far = jnp.abs(normed(outputs[i][row, t - 2 - i]) - HIDDEN[row, t - 1])
            total += DECAY**i * jnp.mean(jnp.where(far < 1, far**2 / 2, far - 0.5))
        return total

    got, plain, want = (
        jax.jit(jax.value_and_grad(f))(OUTPUTS)
        for f in (lambda x: ours(x, weighed, normed), lambda x: ours(x, Objective(), normed), distance)
    )
    for index in range(2):
        assert_close(got[index] - plain[index], 0.3 * want[index], rtol=1e-4)
    assert_close(plain[0], by_definition(OUTPUTS, Objective()))


def test_equal_hidden_states_are_no_distance() -> None:
    x = draw(5, 4, WIDTH)
    assert not smooth_l1(x, x).any()
    assert np.allclose(smooth_l1(x, x + 3), 2.5) and np.allclose(smooth_l1(x, x - 0.5), 0.125)
