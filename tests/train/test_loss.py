"""The training-time test against its definition, written out position by position."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from eagle3_jax.drafters.eagle3 import Eagle3
from tests.helpers import assert_close
from tests.train.models import make_drafter, make_target, random_tokens
from train.data.vocab import draft_index
from train.features import Features, target_features
from train.loss import StepSums, step_sums, supervised_run, total_loss
from train.params import split_drafter
from train.ttt import unroll

STEPS, DECAY = 4, 0.8
FLAGS: list[dict[str, Any]] = [
    {},
    {"qk_norm": True, "norm_before_residual": True},
    {"fc_norm": True, "norm_output": True, "num_layers": 2},
]


def inputs(length: int = 19) -> tuple[Array, Array, Features]:
    """Tokens, mask and features of two rows: two turns in the first, an answer from token 0 on in the second."""
    tokens = random_tokens(3, 2, length)
    mask = np.zeros(tokens.shape, bool)
    mask[0, 4:9], mask[0, 12:15], mask[1, :length] = True, True, True
    target = make_target()
    features = jax.jit(lambda t: target_features(target, t, (1, 2, 3)))(tokens)
    return tokens, jnp.asarray(mask), features


def draft_at(drafter: Eagle3, tokens: Array, aux: list[Array], position: int) -> list[Array]:
    """Logits of every step from one position, as inference computes them: one token at a time, a growing list of keys.

    tokens: [T]. aux: [T, D] each. This is the oracle: it shares nothing with training but the drafter's layers.
    """
    keys: dict[int, list[tuple[Array, Array]]] = {}

    def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
        keys.setdefault(layer, []).append((k[0, 0], v[0, 0]))
        groups = q.shape[2] // k.shape[2]
        all_keys, all_values = (jnp.repeat(jnp.stack(x), groups, axis=1) for x in zip(*keys[layer], strict=True))
        weights = jax.nn.softmax(jnp.einsum("NH,SNH->NS", q[0, 0], all_keys) * q.shape[-1] ** -0.5, axis=-1)
        return jnp.einsum("NS,SNH->NH", weights, all_values)[None, None]

    def run(token: Array, hidden: Array, at: int) -> Array:
        embeds = make_target().embed(token[None, None])
        return drafter.block(embeds, hidden, jnp.full((1, 1), at), attend)

    for p in range(position + 1):
        hidden = run(tokens[p + 1], drafter.combine([a[p][None, None] for a in aux]), p)
    logits = [drafter.logits(hidden)[0, 0]]
    for i in range(1, STEPS):
        if position + 1 + i < len(tokens):
            hidden = run(tokens[position + 1 + i], drafter.feedback(hidden), position + i)
            logits.append(drafter.logits(hidden)[0, 0])
    return logits


@pytest.mark.parametrize("flags", FLAGS, ids=["plain", "residual", "eagle3.1"])
def test_every_step_equals_drafting_at_inference(flags: dict[str, Any]) -> None:
    tokens, _, features = inputs(9)
    drafter = make_drafter(**flags)
    embeds = make_target().embed(tokens)
    unrolled = jax.jit(lambda e, a: drafter.logits(unroll(lambda: drafter, e, a, STEPS)))(embeds, features.aux)
    for row, position in ((0, 1), (1, 4)):
        for i, want in enumerate(draft_at(drafter, tokens[row], [a[row] for a in features.aux], position)):
            assert_close(unrolled[i, row, position], want, name=f"step {i} at {position}")


def positions_by_definition(mask: np.ndarray) -> np.ndarray:
    """[n, B, T] bool: step i at p is trained iff tokens p+1 .. p+2+i exist and are all the assistant's."""
    batch, length = mask.shape
    trained = np.zeros((STEPS, batch, length), bool)
    for i, b, p in np.ndindex(*trained.shape):
        trained[i, b, p] = p + 2 + i < length and mask[b, p + 1 : p + 3 + i].all()
    return trained


def definition(drafter: Eagle3, tokens: Array, mask: Array, features: Features) -> StepSums:
    """The sums with nothing in pieces: drafts [n, B, T, U], the whole teacher [B, T, V], aligned with p."""
    target, d2t = make_target(), drafter.d2t[...]
    drafts = drafter.logits(unroll(lambda: drafter, target.embed(tokens), features.aux, STEPS))
    full = target.logits(features.hidden)
    later = jnp.stack([jnp.roll(full, -1 - i, axis=1) for i in range(STEPS)])
    choice = jnp.argmax(later, axis=-1)
    wanted, guess = jax.nn.log_softmax(later[..., d2t]), jax.nn.log_softmax(drafts)
    divergence = jnp.sum(jnp.exp(wanted) * (wanted - guess), axis=-1)
    supervised = jnp.asarray(positions_by_definition(np.asarray(mask)))
    counted = supervised & jnp.isin(choice, d2t)
    hits = supervised & (d2t[jnp.argmax(drafts, axis=-1)] == choice)
    return StepSums(*(jnp.sum(x, axis=(1, 2)) for x in (divergence * counted, counted, supervised, hits)))


@pytest.mark.parametrize("chunk", [5, None])
def test_loss_and_gradient_equal_the_definition(chunk: int | None) -> None:
    """In chunks with every step computed again in the backward pass, and in one piece."""
    tokens, mask, features = inputs()
    target, drafter = make_target(), make_drafter()
    graph, params, fixed = split_drafter(drafter)
    choice = jnp.asarray(draft_index(np.asarray(drafter.d2t[...]), 97))[features.top1]

    def ours(params: dict[str, Array]) -> tuple[Array, StepSums]:
        merge = lambda: graph.merge(params, fixed, jnp.float32)
        outputs = unroll(merge, target.embed(tokens), features.aux, STEPS, remat=chunk == 5)
        kernel = target.output_rows(drafter.d2t[...])
        logits = lambda h: graph.merge_head(params, fixed, jnp.float32).logits(h)
        sums = step_sums(logits, outputs, features.hidden, kernel, choice, mask, chunk=chunk)
        return total_loss(sums, DECAY), sums

    def by_definition(params: dict[str, Array]) -> tuple[Array, StepSums]:
        sums = definition(graph.merge(params, fixed, jnp.float32), tokens, mask, features)
        weighted = [DECAY**i * sums.loss[i] / sums.counted[i] for i in range(STEPS)]
        return jnp.sum(jnp.stack(weighted)), sums

    (loss, sums), grads = jax.jit(jax.value_and_grad(ours, has_aux=True))(params)
    (want_loss, want_sums), want_grads = jax.jit(jax.value_and_grad(by_definition, has_aux=True))(params)
    assert_close(loss, want_loss)
    for name in ("loss", "counted", "supervised", "hits"):
        assert_close(getattr(sums, name), getattr(want_sums, name), name=name)
    assert (np.asarray(sums.counted) > 0).all() and (np.asarray(sums.counted) < np.asarray(sums.supervised)).all()
    for name, want in want_grads.items():
        assert_close(grads[name], want, name=name)


def test_first_drafted_token_is_the_second_of_the_answer() -> None:
    """The answer is tokens 4 .. 6: position 3 guesses token 5, and token 6 at step 1; nothing else is trained."""
    run = supervised_run(jnp.asarray([[0, 0, 0, 0, 1, 1, 1, 0]], bool))
    assert run.tolist() == [[0, 0, 0, 0, 1, 2, 3, 0]]
    supervised = {(int(t) - 2 - i, i) for i in range(4) for t in np.flatnonzero(np.asarray(run[0]) >= i + 2)}
    assert supervised == {(3, 0), (4, 0), (3, 1)}


def test_runs_stop_at_turns_and_never_use_token_zero() -> None:
    assert supervised_run(jnp.asarray([[1, 1, 1, 0, 1, 1]], bool)).tolist() == [[0, 1, 2, 0, 1, 2]]


def test_an_untrained_copy_of_the_teacher_has_no_divergence() -> None:
    """A drafter whose logits are the teacher's: zero loss, and a hit wherever the choice can be drafted."""
    tokens, mask, features = inputs()
    target, d2t = make_target(), jnp.arange(0, 82, 2)
    kernel = target.output_rows(d2t)
    choice = jnp.asarray(draft_index(np.asarray(d2t), 97))[features.top1]
    outputs = jnp.stack([jnp.roll(features.hidden, -1 - i, axis=1) for i in range(STEPS)])
    sums = step_sums(lambda h: h @ kernel, outputs, features.hidden, kernel, choice, mask)
    assert np.allclose(sums.loss, 0, atol=1e-5)
    assert sums.hits.tolist() == sums.counted.tolist()
