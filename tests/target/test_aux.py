"""Aux states: what is captured, and that asking for none compiles to a program that never heard of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from eagle3_jax.cache import target_cache
from eagle3_jax.errors import ConfigError
from eagle3_jax.target import Mixer, Target, TargetOutput
from tests.helpers import assert_close
from tests.target import oracle
from tests.target.oracle import Pair, quick_jit

PairOf = Callable[[str], Pair]
TOKENS, SLOTS, WIDTH = 10, 2, 4


class Unaware(Target):
    """The decoder as it would be if drafters did not exist."""

    def _decode(self, x: jax.Array, mixer: Mixer, aux_layers: Sequence[int], norms: str | None) -> TargetOutput:
        for i, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{i}"):
                x = x + mixer(i, layer, layer.input_layernorm(x))
                x = x + layer.mlp(layer.post_attention_layernorm(x))
        return TargetOutput(self.norm(x), ())


def compiled(kind: type[Target], target: Target, call: str, **aux: Any) -> Any:
    """The compiled program of one pass: `whole`, or `window` over a cache."""
    config = target.config
    graph, _ = nnx.split(nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0))))
    state = nnx.state(target)
    tokens = jnp.zeros((SLOTS, WIDTH if call == "window" else TOKENS), jnp.int32)
    cache = target_cache(config, SLOTS, 16, WIDTH, dtype=jnp.float32, page_size=8)

    def whole(state: Any, tokens: jax.Array) -> Any:
        return nnx.merge(graph, state)(tokens, **aux)

    def window(state: Any, tokens: jax.Array, cache: Any) -> Any:
        return nnx.merge(graph, state).window(tokens, cache, **aux)

    if call == "whole":
        return quick_jit(whole).lower(state, tokens).compile()
    return quick_jit(window).lower(state, tokens, cache).compile()


def instructions(program: Any) -> list[str]:
    """The program's instructions without names of source lines."""
    text = program.as_text()
    start = text.index("\n%") if "\n%" in text else text.index("\nENTRY")  # before it: tables of files and frames
    return [re.sub(r",? *(metadata|stack_frame_id)=(\{[^}]*\}|\d+)", "", line) for line in text[start:].splitlines()]


@pytest.mark.parametrize("call", ["whole", "window"])
def test_asking_for_none_costs_nothing(call: str, pair_of: PairOf) -> None:
    target = pair_of("qwen3_5").target
    unaware = compiled(Unaware, target, call)
    assert len(instructions(unaware)) > 100
    assert instructions(compiled(Target, target, call, aux_layers=())) == instructions(unaware)
    asked = compiled(Target, target, call, aux_layers=(1, 2, 4))
    assert instructions(asked) != instructions(unaware)
    assert asked.cost_analysis()["flops"] == unaware.cost_analysis()["flops"]


@pytest.mark.parametrize("ids", [(), (0,), (2,), (4,), (0, 1, 4), (1, 2, 3)])
def test_one_state_for_each_boundary_in_order(ids: tuple[int, ...], pair_of: PairOf) -> None:
    pair = pair_of("qwen3_5")
    tokens = pair.token_ids(1, TOKENS)
    every = oracle.torch_trace(pair.model, tokens).boundaries
    out = jax.eval_shape(lambda t: pair.target(t, aux_layers=ids), tokens)
    assert [x.shape for x in out.aux] == [every[b].shape for b in ids]


def test_captured_states_are_the_boundaries_asked_for(pair_of: PairOf) -> None:
    """The first is the embedding, the last the stream before the final norm."""
    pair = pair_of("llama")
    tokens = pair.token_ids(1, TOKENS)
    ours = oracle.our_trace(pair.target, tokens)
    np.testing.assert_array_equal(ours.boundaries[0], pair.target.embed(jnp.asarray(tokens)))
    assert_close(pair.target.norm(jnp.asarray(ours.boundaries[-1])), ours.hidden, 1e-6)


@pytest.mark.parametrize("call", ["whole", "window"])
@pytest.mark.parametrize(
    ("ids", "message"), [((3, 1), "unique and in ascending order"), ((1, 5), r"\[5\] are outside")]
)
def test_wrong_boundaries_are_refused_in_every_pass(
    call: str, ids: tuple[int, ...], message: str, pair_of: PairOf
) -> None:
    with pytest.raises(ConfigError, match=message):
        compiled(Target, pair_of("qwen3_5").target, call, aux_layers=ids)


def test_a_lost_state_is_an_error_not_a_shorter_list(pair_of: PairOf, monkeypatch: pytest.MonkeyPatch) -> None:
    target = pair_of("llama").target
    monkeypatch.setattr("eagle3_jax.target.check_aux_layers", lambda ids, layers: tuple(ids))
    with pytest.raises(AssertionError, match="captured 1 aux states, 2 were asked for"):
        jax.eval_shape(lambda t: target(t, aux_layers=(1, 7)), jnp.zeros((1, 2), jnp.int32))
