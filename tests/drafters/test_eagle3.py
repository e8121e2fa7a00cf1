"""The EAGLE-3 head and all its flags against one written anew in torch, over chained draft steps."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from eagle3_jax.cache import Cache, draft_cache
from eagle3_jax.config import DraftConfig, RopeConfig
from eagle3_jax.drafters.eagle3 import DraftVocab, Eagle3
from eagle3_jax.errors import ConfigError
from pallas_kernels.attention import causal_attention
from tests.drafters.torch_head import TorchHead
from tests.helpers import assert_close

Array = np.ndarray[Any, Any]
BATCH, TOKENS, STEPS, VOCAB = 2, 9, 3, 61
PLAIN: dict[str, Any] = {
    "hidden_size": 24, "target_hidden_size": 24, "intermediate_size": 40, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 6, "vocab_size": VOCAB, "draft_vocab_size": 30, "aux_layers": (2, 4, 5),
    "rope": RopeConfig(theta=10000.0, rotary_dim=6),
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "EAGLE": {},
    "EAGLE, whole vocabulary, another theta": {"draft_vocab_size": VOCAB, "rope": RopeConfig(theta=1e6, rotary_dim=6)},
    "gpt-oss": {"norm_before_residual": True},
    "speculators": {
        "norm_before_residual": True, "norm_before_fc": True, "norm_output": True, "qk_norm": True,
    },
    "EAGLE-3.1": {"fc_norm": True, "norm_output": True},
    "EAGLE-3.1, four aux states, two layers": {
        "fc_norm": True, "norm_output": True, "aux_layers": (0, 2, 4, 8), "num_layers": 2, "qk_norm": True,
    },
    "a narrower target, one aux state": {"target_hidden_size": 16, "aux_layers": (3,), "norm_before_fc": True},
    "a wider target, two aux states, two layers, biases, one key head": {
        "target_hidden_size": 36, "aux_layers": (3, 6), "num_layers": 2, "attention_bias": True, "num_kv_heads": 1,
        "head_dim": 10, "rope": RopeConfig(rotary_dim=10),
    },
}  # fmt: skip


def make(case: str) -> tuple[Eagle3, TorchHead]:
    """One set of random weights in both; the draft vocabulary is a random choice of tokens, ascending."""
    config = DraftConfig(**{**PLAIN, **CASES[case]})
    rng = np.random.default_rng(0)
    head = Eagle3(config, rngs=nnx.Rngs(0))
    weights: dict[str, Array] = {}

    def fill(path: tuple[Any, ...], variable: Any) -> Any:
        name = ".".join(map(str, path))
        noise = rng.normal(size=variable.shape).astype(np.float32)
        if isinstance(variable, DraftVocab):
            ids = np.sort(rng.choice(VOCAB, config.draft_vocab_size, replace=False)).astype(np.int32)
            weights[name] = (ids - np.arange(len(ids))).astype(np.int64)
            return variable.replace(jnp.asarray(ids))
        if name.endswith("kernel"):
            noise = 2 * noise * variable.shape[0] ** -0.5
            weights[name.replace("kernel", "weight")] = noise.T.copy()
        else:
            noise = noise * 0.3 + float(name.endswith("weight"))
            weights[name] = noise
        return variable.replace(jnp.asarray(noise))

    flat = [(path, fill(path, variable)) for path, variable in nnx.to_flat_state(nnx.state(head))]
    nnx.update(head, nnx.from_flat_state(flat))
    flags = ("num_layers", "qk_norm", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    shape = ("num_heads", "num_kv_heads", "head_dim")
    torch_weights = {name: torch.tensor(w) for name, w in weights.items()}
    return head, TorchHead(
        torch_weights, rope_theta=config.rope.theta, **{f: getattr(config, f) for f in (*flags, *shape)}
    )


def inputs(config: DraftConfig) -> tuple[list[Array], Array, Array]:
    """Aux states, the tokens one ahead of them, and an embedding table of the head's width."""
    rng = np.random.default_rng(1)
    aux = [rng.normal(size=(BATCH, TOKENS, config.target_hidden_size)).astype(np.float32) for _ in config.aux_layers]
    return (
        aux,
        rng.integers(0, VOCAB, (BATCH, TOKENS)),
        rng.normal(size=(VOCAB, config.hidden_size)).astype(np.float32),
    )


@functools.partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
def step(
    graph: Any, state: Any, embeds: Array, hidden: Array, cache: Cache, aux: Any
) -> tuple[Array, Array, Array, Cache]:
    """One pass of the head over its cache; the first takes aux states instead of what was fed back."""
    head = nnx.merge(graph, state)
    hidden = head.combine(aux) if aux is not None else hidden
    positions = cache.lengths[:, None] + jnp.arange(hidden.shape[1])[None]
    out, cache = head.cached_block(embeds, hidden, positions, jnp.ones(positions.shape, bool), cache)
    last = out[:, -1:]
    cache = cache.replace(lengths=cache.lengths + hidden.shape[1])
    return head.logits(last)[:, 0], head.feedback(last), out, cache


@pytest.mark.parametrize("case", CASES)
def test_chained_drafts_as_in_torch(case: str) -> None:
    head, oracle = make(case)
    aux, tokens, embedding = inputs(head.config)
    expected = oracle.draft(
        [torch.tensor(x) for x in aux], torch.tensor(tokens), torch.tensor(embedding), STEPS + 1
    )  # fmt: skip

    graph, state = nnx.split(head)
    cache = draft_cache(head.config, BATCH, TOKENS + STEPS, dtype=jnp.float32, page_size=4)
    logits, fed, whole, cache = step(graph, state, embedding[tokens], None, cache, aux)
    for i, (want_logits, want_fed) in enumerate(expected):
        if i > 0:
            guess = np.asarray(head.d2t[...])[np.asarray(logits).argmax(axis=-1)]
            logits, fed, _, cache = step(graph, state, embedding[guess][:, None], fed, cache, None)
        assert logits.dtype == jnp.float32
        assert_close(logits, want_logits, 1e-5, f"logits of step {i}")
        assert_close(fed, want_fed, 1e-5, f"fed back by step {i}")

    # Attention handed in by the caller, as training does: the first step again, without a cache.
    positions = jnp.broadcast_to(jnp.arange(TOKENS), (BATCH, TOKENS))
    block = jax.jit(lambda e, h: head.block(e, h, positions, lambda _, q, k, v: causal_attention(q, k, v)))
    assert_close(block(embedding[tokens], head.combine([jnp.asarray(x) for x in aux])), whole, 1e-5)


def test_each_flag_makes_a_difference() -> None:
    """Otherwise agreement above would say nothing of the flags."""
    aux, tokens, embedding = inputs(DraftConfig(**PLAIN))
    _, plain = make("EAGLE")
    draft = functools.partial(_last_logits, aux=aux, tokens=tokens, embedding=embedding)
    weights = {**plain.weights, "input_norm.weight": torch.full((72,), 2.0)}
    weights |= {f"fc_norm.{i}.weight": torch.full((24,), 2.0) for i in range(3)}
    weights |= {f"layers.0.self_attn.{n}_norm.weight": torch.ones(6) for n in "qk"}
    for flag in ("qk_norm", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        changed = TorchHead(weights, 4, 2, 6, **{flag: True})
        assert (draft(changed) - draft(plain)).abs().max() > 1e-2, flag


def _last_logits(head: TorchHead, aux: list[Array], tokens: Array, embedding: Array) -> torch.Tensor:
    return head.draft([torch.tensor(x) for x in aux], torch.tensor(tokens), torch.tensor(embedding), 2)[1][0]


def test_a_wrong_number_of_aux_states_is_refused() -> None:
    head, _ = make("EAGLE")
    with pytest.raises(ValueError, match=r"2 aux states given, the head was made for boundaries \(2, 4, 5\)"):
        head.combine([jnp.zeros((1, 1, 24))] * 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 3}, "4 heads are not a multiple of 3"),
        ({"draft_vocab_size": VOCAB + 1}, "draft vocabulary 62 of 61 tokens"),
        ({"draft_vocab_size": 0}, "draft vocabulary 0"),
        ({"norm_before_fc": True, "fc_norm": True}, "exclude each other"),
        ({"aux_layers": ()}, "no aux layers"),
        ({"num_layers": 0}, "0 layers"),
        ({"rope": RopeConfig(mrope_section=(1, 1, 1))}, "one-dimensional"),
    ],
)
def test_contradictory_configs_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DraftConfig(**{**PLAIN, **change})
