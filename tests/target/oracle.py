"""The oracle: transformers' own models, tiny and random, and the same weights imported into ours.

Every tensor is overwritten with seeded noise, since transformers leaves some (norms, biases, routers) at zero or one,
where a wrong name or a missing term would go unseen.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
import transformers
import transformers.utils.logging
from flax import nnx

from eagle3_jax.checkpoint.hf import load_target
from eagle3_jax.config import TargetConfig
from eagle3_jax.target import Target, TargetOutput
from tests.helpers import assert_close

Array = np.ndarray[Any, Any]

transformers.utils.logging.disable_progress_bar()

BASE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
HYBRID: dict[str, Any] = {
    **BASE, "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}  # fmt: skip
MIXTURE: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED: dict[str, Any] = {**MIXTURE, "shared_expert_intermediate_size": 28}
NEXT_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}

QWEN3_5 = {"model_type": "qwen3_5_text", **HYBRID}
QWEN3_5_MOE = {"model_type": "qwen3_5_moe_text", **HYBRID, **SHARED}
QWEN3_NEXT = {"model_type": "qwen3_next", **HYBRID, **SHARED, "rope_parameters": NEXT_ROPE}
QWEN3 = {"model_type": "qwen3", **BASE}
QWEN3_MOE = {"model_type": "qwen3_moe", **BASE, **MIXTURE, "norm_topk_prob": True}
QWEN2 = {"model_type": "qwen2", **{k: v for k, v in BASE.items() if k != "head_dim"}}
LLAMA = {"model_type": "llama", **BASE}

# A program of a test runs a few times: compiling it is what takes the time, and this halves it.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

_ZERO_CENTRED = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")


@dataclasses.dataclass(frozen=True)
class Pair:
    """One set of weights, twice."""

    model: Any
    target: Target

    @property
    def config(self) -> TargetConfig:
        return self.target.config

    def token_ids(self, *shape: int, seed: int = 0) -> Array:
        return np.random.default_rng(seed).integers(0, self.config.vocab_size, shape, dtype=np.int32)


@dataclasses.dataclass(frozen=True)
class Trace:
    """`boundaries` 0..L [B,T,D] (the last one before the final norm), `hidden` after it, `logits` [B,T,V]."""

    boundaries: tuple[Array, ...]
    hidden: Array
    logits: Array


def make_model(config: dict[str, Any], seed: int = 0) -> Any:
    """transformers' text model for a flat `config`, every parameter overwritten."""
    config = copy.deepcopy(config)  # transformers keeps the nested dicts that it is given, and changes them
    kind = transformers.AutoConfig.for_model(config.pop("model_type"), **config, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(kind)
    randomise(model, seed)
    return model.eval().float()


def randomise(model: Any, seed: int) -> None:
    """Overwrites every parameter with noise of a size that keeps all parts of the model in play."""
    noise = torch.Generator().manual_seed(seed)
    zero_centred = model.config.model_type in _ZERO_CENTRED
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            random = torch.randn(parameter.shape, generator=noise)
            parameter.copy_(_scaled(name, random, zero_centred))


def _scaled(name: str, random: torch.Tensor, zero_centred: bool) -> torch.Tensor:
    # Long memories and inputs wide enough for SiLU to bend: otherwise q.k, and with it a token's whole output, comes
    # near zero now and then, and the gated norm multiplies the rounding of either side.
    if name.endswith("A_log"):
        return torch.log(4 * torch.sigmoid(random) + 0.01)
    if name.endswith("dt_bias"):
        return random - 2
    if "norm" in name:
        return 0.3 * random + float(not zero_centred or "linear_attn" in name)
    if random.ndim == 1 or "embed_tokens" in name:
        return random if "embed_tokens" in name else 0.3 * random
    if "conv1d" in name:
        return 2 * random
    return random / math.sqrt(random.shape[-1])


def make_pair(config: dict[str, Any], folder: Path, seed: int = 0) -> Pair:
    """The model, written by transformers into `folder` and read back by our importer."""
    model = make_model(config, seed)
    model.save_pretrained(folder)
    return Pair(model, load_target(folder, dtype="float32").model)


def torch_trace(model: Any, token_ids: Array | None = None, **inputs: Any) -> Trace:
    """Runs transformers; boundaries are caught where they enter each layer and the final norm."""
    caught: list[Array] = []
    decoder = model.model
    hooks = [
        module.register_forward_pre_hook(lambda _, args: caught.append(args[0].numpy().copy()))
        for module in (*decoder.layers, decoder.norm)
    ]
    ids = {} if token_ids is None else {"input_ids": torch.tensor(token_ids, dtype=torch.long)}
    final: list[Array] = []
    hooks.append(decoder.norm.register_forward_hook(lambda _, args, out: final.append(out.numpy().copy())))
    try:
        with torch.no_grad():
            out = model(**ids, **{k: torch.tensor(v) for k, v in inputs.items()}, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return Trace(tuple(caught), final[0], out.logits.numpy())


def our_trace(target: Target, token_ids: Array | None = None, **inputs: Any) -> Trace:
    """Runs ours with every boundary asked for. One compilation for equal configs and shapes."""
    every = tuple(range(target.config.num_layers + 1))
    graph, state = nnx.split(target)
    out, logits = _forward(graph, every, state, token_ids, inputs)
    return Trace(tuple(np.asarray(x) for x in out.aux), np.asarray(out.hidden), np.asarray(logits))


@functools.partial(quick_jit, static_argnums=(0, 1))
def _forward(
    graph: Any, aux: Sequence[int], state: Any, token_ids: Any, inputs: dict[str, Any]
) -> tuple[TargetOutput, jax.Array]:
    target = nnx.merge(graph, state)
    out = target(token_ids, aux_layers=aux, **inputs)
    return out, target.logits(out.hidden)


def assert_same(ours: Trace, theirs: Trace, rtol: float = 1e-5) -> None:
    """Every boundary, the final hidden states and the logits."""
    assert len(ours.boundaries) == len(theirs.boundaries)
    for i, (a, b) in enumerate(zip(ours.boundaries, theirs.boundaries, strict=True)):
        assert_close(a, b, rtol, f"boundary {i}")
    assert_close(ours.hidden, theirs.hidden, rtol, "final hidden states")
    assert_close(ours.logits, theirs.logits, rtol, "logits")


def torch_greedy(model: Any, prompt: Array, count: int) -> list[int]:
    """`count` tokens after `prompt` [T], each by a full pass."""
    ids = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def our_greedy(target: Target, prompt: Array, count: int, length: int) -> list[int]:
    """As `torch_greedy`; every pass has `length` tokens, those not yet known being zeros that nothing can see."""
    row = np.zeros((2, length), np.int32)
    row[:, : len(prompt)] = prompt
    for n in range(len(prompt), len(prompt) + count):
        row[0, n] = our_trace(target, row).logits[0, n - 1].argmax()
    return row[0, len(prompt) : len(prompt) + count].tolist()
