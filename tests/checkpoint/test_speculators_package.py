"""Our speculators folders in the `speculators` package itself, where it is installed (it is no requirement)."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eagle3_jax.checkpoint.formats import read_head, write_head
from tests.checkpoint import heads
from tests.checkpoint.test_drafter import TARGET, D, L, V, write
from tests.checkpoint.test_oracle import BOUNDARIES, LAYER, THETA, WRITERS, drafted, weights_of
from tests.helpers import assert_close

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what the package's own imports have to say
    speculators = pytest.importorskip("speculators")

pytestmark = pytest.mark.filterwarnings("ignore")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "SpecForge": ("specforge", {}),
    "EAGLE-3.1": ("specforge", {"fc_norm": True, "norm_output": True}),
    "gpt-oss": ("modelopt", {"norm_before_residual": True}),
    "Red Hat": (
        "speculators", {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True, "qk_norm": True},
    ),
}  # fmt: skip


def verifier(folder: Path, table: np.ndarray) -> Path:
    """As much of a target as the package reads when it loads a head: its config, embedding, norm and output."""
    raw = {**LAYER, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": L}
    tensors = {"model.embed_tokens.weight": table, "model.norm.weight": table[0], "lm_head.weight": table + 1}
    return write(folder, raw, tensors)


def convert(kind: str, flags: dict[str, Any], root: Path, table: np.ndarray) -> Path:
    """A folder as the toolchain writes it, converted; with an embedding, without which the package's are NaN."""
    config, name, missing = WRITERS[kind]
    weights = weights_of(flags) | {"embed_tokens.weight": table}
    source = write(root / "a", config(flags), {name(n): w for n, w in weights.items() if n not in missing})
    named = {"verifier": str(verifier(root / "target", table)), "verifier_architectures": ("Qwen3ForCausalLM",)}
    head = dataclasses.replace(read_head(source, TARGET), origin=None, **named)  # a speculators folder is written anew
    write_head(head, root / "b", "speculators")
    return root / "b"


@pytest.mark.parametrize("case", CASES)
def test_it_loads_the_same_weights_and_computes_the_same_logits(case: str, tmp_path: Path) -> None:
    kind, flags = CASES[case]
    rng = np.random.default_rng(6)
    table = rng.standard_normal((V, D)).astype(np.float32)
    folder = convert(kind, flags, tmp_path, table)
    config = speculators.SpeculatorModelConfig.from_pretrained(str(folder))
    assert config.eagle_aux_hidden_state_layer_ids == list(BOUNDARIES)
    assert config.speculators_config.verifier.name_or_path == str(tmp_path / "target")
    for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        assert getattr(config, flag) is flags.get(flag, False)
    assert config.transformer_layer_config.rope_parameters["rope_theta"] == THETA
    config.transformer_layer_config._attn_implementation = "eager"
    model = speculators.SpeculatorModel.from_pretrained(str(folder), config=config).float().eval()

    state = model.state_dict()
    for name, (_, _, content) in heads.contents(folder).items():
        assert state[name].numpy().tobytes() == content, name

    aux = [rng.standard_normal((1, 5, D)).astype(np.float32) for _ in BOUNDARIES]
    tokens = rng.integers(0, V, (1, 5))
    seen: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    with torch.no_grad():
        model(
            torch.tensor(np.concatenate(aux, axis=-1)), torch.tensor(tokens),
            document_ids=torch.zeros((1, 5), dtype=torch.long), ttt_steps=1,
        )  # fmt: skip
    assert_close(drafted(folder, aux, tokens, table, 1)[0], seen[0][:, -1], 1e-5, "logits")
