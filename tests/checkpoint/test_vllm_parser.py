"""What vLLM's own config parser makes of our speculators folders, where vLLM is installed (it is no requirement)."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

import pytest

from eagle3_jax.checkpoint.formats import read_head, write_head
from eagle3_jax.checkpoint.source import read_json
from infer.options import DEFAULT_DRAFTER, DEFAULT_MODEL
from tests.checkpoint.test_drafter import write
from tests.checkpoint.test_oracle import BOUNDARIES, WRITERS, weights_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what the package's own imports have to say
    parser = pytest.importorskip("vllm.transformers_utils.configs.speculators.base")

pytestmark = pytest.mark.filterwarnings("ignore")
FLAGS = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True, "qk_norm": True}


def test_the_head_of_this_repository(tmp_path: Path) -> None:
    head = dataclasses.replace(read_head(Path(DEFAULT_DRAFTER)), verifier=str(DEFAULT_MODEL))
    write_head(head, tmp_path / "b", "speculators")
    config = parser.SpeculatorsConfig.from_pretrained(str(tmp_path / "b"))
    assert config.architectures == ["Eagle3LlamaForCausalLM"]
    assert config.eagle_aux_hidden_state_layer_ids == [2, 4, 5]
    assert (config.draft_vocab_size, config.vocab_size, config.hidden_size) == (2560, 4096, 192)
    assert config.norm_before_residual is False  # absent, vLLM would take it for true
    asked = parser.SpeculatorsConfig.extract_vllm_speculative_config(read_json(tmp_path / "b", "config.json"))
    assert asked == {"method": "eagle3", "num_speculative_tokens": 3}


def test_every_flag_arrives(tmp_path: Path) -> None:
    config, name, missing = WRITERS["speculators"]
    tensors = {name(n): w for n, w in weights_of(FLAGS).items() if n not in missing}
    head = read_head(write(tmp_path / "a", config(FLAGS), tensors))
    write_head(head, tmp_path / "b", "speculators")
    read = parser.SpeculatorsConfig.from_pretrained(str(tmp_path / "b"))
    assert read.architectures == ["Eagle3Qwen3ForCausalLM"]
    assert read.eagle_aux_hidden_state_layer_ids == list(BOUNDARIES)
    assert (read.norm_before_residual, read.norm_before_fc, read.fc_norm, read.norm_output) == (True, True, False, True)
