"""Folders of one small head as each toolchain writes them, by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from eagle3_jax.checkpoint.source import open_source
from tests.checkpoint.test_drafter import (
    EAGLE,
    LAYER,
    SPECFORGE,
    SPECULATORS,
    D,
    H,
    U,
    V,
    head_tensors,
    write,
)

Arrays = dict[str, np.ndarray]
IDS = "eagle_aux_hidden_state_layer_ids"
EMBEDDING = np.random.default_rng(7).standard_normal((V, D)).astype(np.float32)
VERIFIER = {"name_or_path": "owner/target", "architectures": ["Qwen3ForCausalLM"]}
PROPOSAL = {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
NESTED = {
    **SPECULATORS, "speculators_version": "0.3.0", "embed_requires_grad": False, "torch_dtype": "bfloat16",
    "speculators_config": {
        "algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [PROPOSAL],
        "verifier": VERIFIER,
    },
}  # fmt: skip
MODELOPT = {
    **LAYER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": U, "max_position_embeddings": 512,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "eagle_config": {
        IDS: [1, 4, 6], "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True, "use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1,
    },
}  # fmt: skip


def half(tensors: Arrays, dtype: Any) -> Arrays:
    return {n: a.astype(dtype) if a.dtype == np.float32 else a for n, a in tensors.items()}


def norms(names: str, count: int, width: int = D) -> Arrays:
    rng = np.random.default_rng(9)
    return {f"{names}.{i}.weight": rng.normal(1, 0.1, width).astype(np.float32) for i in range(count)}


def later_layer(prefix: str) -> Arrays:
    """A second layer of ordinary width."""
    found = {}
    for name, array in head_tensors(prefix).items():
        if name.startswith(prefix) and "hidden_norm" not in name:
            narrow = any(part in name for part in ("q_proj", "k_proj", "v_proj"))
            found[name] = np.ascontiguousarray(array[:, :D]) if narrow else array
    return found


def without(tensors: Arrays, *names: str) -> Arrays:
    return {n: a for n, a in tensors.items() if n not in names}


def _qk_norms() -> Arrays:
    rng = np.random.default_rng(3)
    return {f"layers.0.self_attn.{n}_norm.weight": rng.normal(1, 0.1, H).astype(np.float32) for n in "qk"}


def folders() -> Iterator[tuple[str, dict[str, Any], Arrays]]:
    """(name, config.json, tensors); the part of the name before a comma is the format."""
    bf16 = ml_dtypes.bfloat16
    yield "eagle", EAGLE | {"bos_token_id": 1, "pad_token_id": 0}, half(head_tensors(), np.float16)
    yield "eagle, with an embedding", EAGLE, head_tensors() | {"embed_tokens.weight": EMBEDDING}
    yield "specforge", SPECFORGE | {"eos_token_id": 5, "rope_scaling": None}, half(head_tensors(), bf16)
    late = {"fc_norm": True, "norm_output": True}
    yield "specforge, EAGLE-3.1", SPECFORGE | late, head_tensors() | norms("fc_norm", 3)
    no_ids = {k: v for k, v in SPECFORGE.items() if k != "eagle_config"}
    yield "specforge, no ids", no_ids, head_tensors()
    yield "specforge, a key of vLLM's", SPECFORGE | {"norm_before_residual": True, "trained_by": "x"}, head_tensors()
    prefixed = {f"model.{n}" if n not in ("lm_head.weight", "d2t", "t2d") else n: a for n, a in head_tensors().items()}
    yield "specforge, names of a model", SPECFORGE, prefixed
    deep = {n.replace("input_layernorm", "hidden_norm"): a for n, a in later_layer("additional_layers.0.").items()}
    yield "specforge, SGLang's second layer", SPECFORGE | {"num_hidden_layers": 2}, head_tensors() | deep
    biased = head_tensors()
    for name in ("q", "k", "v", "o"):
        rows = biased[f"midlayer.self_attn.{name}_proj.weight"].shape[0]
        biased[f"midlayer.self_attn.{name}_proj.bias"] = np.full(rows, 0.1, np.float32)
    yield "specforge, biases", SPECFORGE | {"attention_bias": True}, biased
    slim = {**LAYER, "architectures": ["Eagle3LlamaForCausalLM"], "draft_vocab_size": U, "target_model_type": "qwen3"}
    yield "angelslim", slim | {"tie_word_embeddings": True, "use_mrope": False}, half(head_tensors(), bf16)
    yield "modelopt", MODELOPT, half(without(head_tensors("layers.0."), "t2d"), bf16)
    nested = head_tensors("layers.0.") | {"embed_tokens.weight": EMBEDDING} | _qk_norms()
    fused = {"input_norm.weight": np.full(3 * D, 1.5, np.float32)}
    yield "speculators", NESTED, half(nested | fused, bf16)
    plain = {**NESTED, "norm_before_fc": False, "norm_before_residual": False}
    plain["transformer_layer_config"] = {**LAYER, "bos_token_id": 3}
    yield "speculators, llama", plain, head_tensors("layers.0.")
    two = {**plain, "transformer_layer_config": {**LAYER, "num_hidden_layers": 2}, "norm_output": True, "fc_norm": True}
    yield "speculators, two layers", two, head_tensors("layers.0.") | later_layer("layers.1.") | norms("fc_norm", 3)
    yield "speculators, trained embedding", {**plain, "embed_requires_grad": True}, nested_with(EMBEDDING)
    whole = without(head_tensors("layers.0."), "d2t", "t2d") | {"lm_head.weight": np.full((V, D), 0.5, np.float32)}
    yield "speculators, whole vocabulary", {**plain, "draft_vocab_size": V}, whole


def nested_with(embedding: np.ndarray) -> Arrays:
    return head_tensors("layers.0.") | {"embed_tokens.weight": embedding}


NAMES = [name for name, _, _ in folders()]


def make(name: str, folder: Path) -> Path:
    """Writes the folder called `name` in `folders`."""
    config, tensors = next((c, t) for n, c, t in folders() if n == name)
    return write(folder, config, tensors)


def contents(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every tensor's dtype, shape and bytes, by its name in the folder."""
    return {t.name: (t.dtype.name, t.shape, np.ascontiguousarray(t.read()).tobytes()) for t in open_source(folder)}
