"""A step on a mesh: what one device says, each device with tokens of its own, and little passed on."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.tree_util import Partial

from eagle3_jax.meshes import parse_mesh
from eagle3_jax.planning.collectives import collectives, moved
from eagle3_jax.sharding import laid_out, model_shardings
from eagle3_jax.target import Target
from tests.helpers import assert_close
from tests.train.models import TARGET, make_drafter, make_target, random_tokens, sharpened
from train import features, loss
from train.features import vocabulary_scan
from train.loss import step_sums
from train.step import Inputs, batch_gradient, batch_sharding, make_model

MESH = "dp2 fsdp2 tp2"
ROWS, LENGTH, STEPS = 8, 16, 2
MIXTURE = dataclasses.replace(
    TARGET, model_type="qwen3_moe", vocab_size=96, num_heads=4, num_kv_heads=2, num_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=8, moe_layers=(True,), num_layers=1, layer_types=TARGET.layer_types[:1],
)  # fmt: skip


def spread(target: Target, mesh: Any) -> Target:
    graph, state = nnx.split(target)
    return nnx.merge(graph, jax.device_put(state, model_shardings(state, mesh, target.config)))


def test_a_step_for_a_mixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss, sums and gradients are those of one device. However many the chunks, matrices are passed on once and their
    gradients once, and the states twice."""
    monkeypatch.setattr(loss, "_CHUNK_ELEMENTS", (STEPS + 1) * 48 * 4)
    drafter = make_drafter(vocab_size=96, draft_vocab_size=48, aux_layers=(0, 1))
    mask = jnp.asarray(np.arange(LENGTH)[None] >= np.arange(ROWS)[:, None])
    inputs = Inputs(random_tokens(0, ROWS, LENGTH, 96), mask)

    def gradient(mesh: Any) -> tuple[Any, str]:
        target = sharpened(make_target(MIXTURE))
        target = target if mesh is None else spread(target, mesh)
        model, params, frozen = make_model(target, drafter, num_steps=STEPS, mesh=mesh)
        batch = inputs if mesh is None else jax.device_put(inputs, batch_sharding(mesh))

        def run(params: Any, frozen: Any, batch: Inputs) -> Any:
            with laid_out(mesh, "batch"):
                return batch_gradient(model, params, frozen, batch, 1)

        compiled = jax.jit(run).lower(params, frozen, batch).compile()
        return compiled(params, frozen, batch), compiled.as_text()

    mesh = parse_mesh(MESH).mesh()
    (got, text), (want, _) = gradient(mesh), gradient(None)
    assert float(want[1].counted[0]) > 20
    jax.tree.map(lambda one, other: assert_close(one, other, 5e-5), got, want)
    whole = sum(x.size for x in jax.tree.leaves((want[2], nnx.state(make_target(MIXTURE)))))
    states = ROWS // 4 * LENGTH * TARGET.hidden_size * (2 + 6 * STEPS)
    assert moved(collectives(text)) < 4 * (2 * whole + 2 * states)


def scans(function: Callable[..., Any], *arguments: Any, mesh: Any) -> set[int]:
    """How often the loops of a program go around."""

    def run(*arguments: Any) -> Any:
        with laid_out(mesh, "batch"):
            return function(*arguments)

    return {int(n) for n in re.findall(r"length=(\d+)", str(jax.make_jaxpr(run)(*arguments)))}


def test_chunks_are_of_what_a_device_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 rows of 16 tokens a device has 2 of 8: where one device needs 8 chunks, it needs one."""
    monkeypatch.setattr(loss, "_CHUNK_ELEMENTS", (STEPS + 1) * ROWS * 2 * 48)
    kernel, mask = jnp.ones((16, 48)), jnp.ones((ROWS, LENGTH), bool)
    outputs, choice = jnp.ones((STEPS, ROWS, LENGTH, 16)), jnp.zeros((ROWS, LENGTH), jnp.int32)
    logits = Partial(lambda w, h: h @ w, kernel)
    run = lambda outputs: step_sums(logits, outputs, outputs[0], kernel, choice, mask)
    assert scans(run, outputs, mesh=None) == {8}
    assert scans(run, outputs, mesh=parse_mesh(MESH).mesh()) == {1}
    assert scans(run, outputs, mesh=parse_mesh("tp8").mesh()) == {1}


@pytest.mark.parametrize("tied", [True, False])
def test_the_vocabulary_in_parts_and_blocks(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same choice, also between equals of two devices; blocks of one device's own part for its own rows."""
    monkeypatch.setattr(features, "_BLOCK_ELEMENTS", ROWS * LENGTH * 512)
    mesh = parse_mesh(MESH).mesh()
    target = make_target(dataclasses.replace(TARGET, vocab_size=4096, tie_word_embeddings=tied))
    matrix = target.embed_tokens.weight if tied else target.lm_head.kernel
    half = jnp.split(matrix[...], 2, axis=0 if tied else 1)[0]
    matrix[...] = jnp.concatenate([half, half], axis=0 if tied else 1)
    hidden = jax.random.normal(jax.random.key(0), (ROWS, LENGTH, 16)) * 50

    def scan(target: Target, on: Any) -> Any:
        graph, state = nnx.split(target)

        def run(state: Any, hidden: Any) -> Any:
            with laid_out(on, "batch"):
                return vocabulary_scan(nnx.merge(graph, state), hidden, log_sum=True)

        return jax.jit(run)(state, hidden)

    (got, total), (want, other) = scan(spread(target, mesh), mesh), scan(target, None)
    assert np.array_equal(got, want) and int(want.max()) < 2048
    assert_close(total, other)
    assert scans(lambda h: vocabulary_scan(target, h), hidden, mesh=None) == {8}
    assert scans(lambda h: vocabulary_scan(target, h), hidden, mesh=mesh) == {1}
