"""Every format and flag: a folder written by hand, loaded here, gives the logits of the head written anew in torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from eagle3_jax.checkpoint import load_drafter
from eagle3_jax.checkpoint.formats import read_head, write_head
from pallas_kernels.attention import causal_attention
from tests.checkpoint.test_drafter import SPECULATORS, TARGET, TOKENS, D, F, H, K, L, N, U, V, write
from tests.drafters.torch_head import TorchHead
from tests.helpers import assert_close

Arrays = dict[str, np.ndarray]
IDS = "eagle_aux_hidden_state_layer_ids"
LAYER = {"hidden_size": D, "intermediate_size": F, "num_attention_heads": N, "num_key_value_heads": K, "head_dim": H,
         "num_hidden_layers": 1, "vocab_size": V, "rms_norm_eps": 1e-5, "max_position_embeddings": 256,
         "model_type": "llama"}  # fmt: skip
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
THETA = 5e5
BOUNDARIES = (1, 4, 8)


def _midlayer(name: str) -> str:
    return name.replace("layers.0.", "midlayer.")


def _sglang(name: str) -> str:
    if name.startswith("layers.1."):
        return name.replace("layers.1.", "additional_layers.0.").replace("input_layernorm", "hidden_norm")
    return _midlayer(name)


def _flat(flags: dict[str, Any], **more: Any) -> dict[str, Any]:
    table = {**LAYER, "rope_theta": THETA, "draft_vocab_size": U, **more}
    return table | {k: v for k, v in flags.items() if k in FLAGS and v}


def _outputs(flags: dict[str, Any]) -> dict[str, Any]:
    return _flat(flags, architectures=["LlamaForCausalLMEagle3"], eagle_config={IDS: [b - 1 for b in BOUNDARIES]})


def _modelopt(flags: dict[str, Any]) -> dict[str, Any]:
    switches = {"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False}
    return _outputs(flags) | {"eagle_config": {IDS: [b - 1 for b in BOUNDARIES], **switches}}


def _speculators(flags: dict[str, Any]) -> dict[str, Any]:
    layer = {**LAYER, "rope_parameters": {"rope_theta": THETA, "rope_type": "default"}}
    layer |= {"model_type": "qwen3" if flags.get("qk_norm") else "llama"}
    layer |= {"num_hidden_layers": flags.get("num_layers", 1), "attention_bias": flags.get("attention_bias", False)}
    own = {k: flags.get(k, False) for k in FLAGS}
    return SPECULATORS | own | {"transformer_layer_config": layer, IDS: list(BOUNDARIES)}


Writer = tuple[Callable[[dict[str, Any]], dict[str, Any]], Callable[[str], str], tuple[str, ...]]
WRITERS: dict[str, Writer] = {  # config.json, names, tensors that are left out
    "eagle": (lambda flags: _flat(flags, architectures=["LlamaForCausalLM"]), _midlayer, ()),
    "specforge": (_outputs, _midlayer, ()),
    "angelslim": (lambda flags: _outputs(flags) | {"architectures": ["Eagle3LlamaForCausalLM"]}, _midlayer, ()),
    "modelopt": (_modelopt, str, ("t2d",)),
    "speculators": (_speculators, str, ()),
}


def combinations() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every format with every flag it has, and speculators with all that go together."""
    for kind in WRITERS:
        if kind != "speculators":
            yield kind, {}
        yield kind, {"attention_bias": True}
    for kind in ("specforge", "modelopt", "angelslim"):  # keys that vLLM reads in any flat config
        yield kind, {"norm_before_residual": True}
    yield "specforge", {"fc_norm": True, "norm_output": True}
    yield "specforge", {"fc_norm": True}
    yield "specforge", {"norm_output": True}
    for bits in range(8):
        residual, output, qk = (bool(bits & 1 << i) for i in range(3))
        flags = {"norm_before_residual": residual, "norm_output": output, "qk_norm": qk}
        for fused in ({}, {"norm_before_fc": True}, {"fc_norm": True}):
            yield "speculators", {**flags, **fused}
    yield "speculators", {"num_layers": 2, "qk_norm": True, "fc_norm": True}
    yield "specforge", {"num_layers": 2}


COMBINATIONS = list(combinations())


def weights_of(flags: dict[str, Any]) -> Arrays:
    """Random weights under speculators' names."""
    rng = np.random.default_rng(5)

    def noise(*shape: int) -> np.ndarray:
        scale = 2 * shape[-1] ** -0.5 if len(shape) == 2 else 0.3
        return (rng.standard_normal(shape) * scale + (len(shape) == 1)).astype(np.float32)

    found = {"fc.weight": noise(D, 3 * D), "norm.weight": noise(D), "lm_head.weight": noise(U, D)}
    for i in range(flags.get("num_layers", 1)):
        width, stem = D * (2 if i == 0 else 1), f"layers.{i}."
        names = ("input_layernorm", "post_attention_layernorm") + (("hidden_norm",) if i == 0 else ())
        found |= {f"{stem}{n}.weight": noise(D) for n in names}
        for n, rows, columns in (("q", N * H, width), ("k", K * H, width), ("v", K * H, width), ("o", D, N * H)):
            found[f"{stem}self_attn.{n}_proj.weight"] = noise(rows, columns)
            if flags.get("attention_bias"):
                found[f"{stem}self_attn.{n}_proj.bias"] = noise(rows)
        if flags.get("qk_norm"):
            found |= {f"{stem}self_attn.{n}_norm.weight": noise(H) for n in "qk"}
        found |= {f"{stem}mlp.{n}_proj.weight": noise(F, D) for n in ("gate", "up")}
        found[f"{stem}mlp.down_proj.weight"] = noise(D, F)
    if flags.get("norm_before_fc"):
        found["input_norm.weight"] = noise(3 * D)
    if flags.get("fc_norm"):
        found |= {f"fc_norm.{a}.weight": noise(D) for a in range(3)}
    t2d = np.isin(np.arange(V), TOKENS)
    return found | {"d2t": (TOKENS - np.arange(U)).astype(np.int64), "t2d": t2d}


def drafted(path: Path, aux: list[np.ndarray], tokens: np.ndarray, table: np.ndarray, steps: int) -> list[Any]:
    """Logits of the last position over greedy draft steps, without a cache, as the oracle runs."""
    model = load_drafter(path, TARGET, dtype="float32").model
    hidden, results = model.combine([jnp.asarray(x) for x in aux]), []
    for _ in range(steps):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        out = model.block(jnp.asarray(table[tokens]), hidden, positions, lambda _, q, k, v: causal_attention(q, k, v))
        logits = model.logits(out)[:, -1]
        guess = np.asarray(model.d2t[...])[np.asarray(logits).argmax(axis=-1)]
        tokens = np.concatenate([tokens, guess[:, None]], axis=1)
        hidden = jnp.concatenate([hidden, model.feedback(out)[:, -1:]], axis=1)
        results.append(logits)
    return results


@pytest.mark.parametrize(
    ("kind", "flags"), COMBINATIONS, ids=[f"{k}-{'+'.join(n for n in f if f[n])}" for k, f in COMBINATIONS]
)
def test_logits_as_in_torch(kind: str, flags: dict[str, Any], tmp_path: Path) -> None:
    weights = weights_of(flags)
    config, name, missing = WRITERS[kind]
    raw = config(flags)
    if kind != "speculators":
        raw |= {"num_hidden_layers": flags.get("num_layers", 1), "attention_bias": bool(flags.get("attention_bias"))}
    spell = _sglang if raw.get("num_hidden_layers", 1) > 1 else name
    folder = write(tmp_path / "a", raw, {spell(n): w for n, w in weights.items() if n not in missing})
    head = read_head(folder, TARGET)
    boundaries = (2, L // 2, L - 3) if kind == "eagle" else BOUNDARIES
    assert head.format == kind and head.config.aux_layers == boundaries
    write_head(head, tmp_path / "native", "native")

    rng = np.random.default_rng(6)
    aux = [rng.standard_normal((2, 5, D)).astype(np.float32) for _ in boundaries]
    tokens, table = rng.integers(0, V, (2, 5)), rng.standard_normal((V, D)).astype(np.float32)
    own = {k: v for k, v in flags.items() if k != "attention_bias"}
    oracle = TorchHead({n: torch.tensor(w) for n, w in weights.items()}, N, K, H, rope_theta=THETA, eps=1e-5, **own)
    expected = oracle.draft([torch.tensor(x) for x in aux], torch.tensor(tokens), torch.tensor(table), 2)
    for path in (folder, tmp_path / "native"):
        found = drafted(path, aux, tokens, table, 2)
        for i, (want, got) in enumerate(zip(expected, found, strict=True)):
            assert_close(got, want[0], 1e-5, f"logits of step {i}")
