"""Work per token against counts by hand, and what is made of it."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from eagle3_jax.config import DraftConfig, RopeConfig, TargetConfig
from tests.helpers import published
from tests.train.models import DRAFT, HYBRID, TARGET, make_drafter, make_target
from train.data.conversations import Row
from train.flops import (
    Work,
    active_parameters,
    draft_attention,
    draft_parameters,
    flops_per_token,
    mean_visible,
    parameter_counts,
    peak_flops,
    target_attention,
    target_parameters,
    total_peak,
)


def published_target(name: str) -> TargetConfig:
    return TargetConfig.from_hf(json.loads(published(f"configs/{name}.json").read_text()))


def test_a_tiny_pair_by_hand() -> None:
    attention, mlp, norms = 16 * 16 + 2 * 16 * 8 + 16 * 16, 3 * 16 * 24, 2 * 16
    assert active_parameters(TARGET) == 3 * (attention + mlp + norms) + 16 + 16 * 97 == 7424
    fc = 48 * 16
    layer = 32 * 24 + 2 * 32 * 12 + 24 * 16 + 3 * 16 * 20 + 3 * 16
    assert draft_parameters(DRAFT) == (fc, layer + 16 + 16 * 41) == (768, 3600)
    assert target_attention(TARGET, 5) == 3 * 4 * 2 * 8 * 5
    assert draft_attention(DRAFT, 5, 2) == 4 * 4 * 6 * (5 + 6)
    by_hand = 2 * 7424 + 960 + 6 * (768 + 2 * 3600) + 3 * 96 * 11
    assert flops_per_token(TARGET, DRAFT, 2, 5) == by_hand == 66784
    assert flops_per_token(TARGET, DRAFT, 2, 5, offline=True) == by_hand - 2 * 7424 - 960 + 2 * 16 * 41


def test_qwen3_5_9b_by_hand() -> None:
    """32 layers of width 4096, every fourth with attention, the others with the delta rule."""
    width, vocab = 4096, 248320
    mlp, norms = 3 * width * 12288, 2 * width
    attention = width * 2 * 4096 + 2 * width * 1024 + 4096 * width + 2 * 256  # queries with their gates, q/k norms
    delta = width * (2 * 2048 + 4096) + width * 4096 + 2 * width * 32 + 8192 * 4 + 2 * 32 + 128 + 4096 * width
    config = published_target("Qwen3.5-9B")
    assert active_parameters(config) == 32 * (mlp + norms) + 8 * attention + 24 * delta + width + width * vocab
    assert active_parameters(config) == 7_936_684_544
    assert sum(target_parameters(config).values()) == 7_936_684_544 + width * vocab

    head = DraftConfig(
        hidden_size=width, target_hidden_size=width, intermediate_size=12288, num_heads=16, num_kv_heads=4,
        head_dim=256, vocab_size=vocab, draft_vocab_size=32000, aux_layers=(2, 16, 29), rope=RopeConfig(1e7, 256),
    )  # fmt: skip
    fc, each = 3 * width * width, 2 * width * (4096 + 2 * 1024) + 4096 * width + mlp + 3 * width + width + width * 32000
    assert draft_parameters(head) == (fc, each)
    visible = 2048.5  # one row of 4096 tokens
    softmax, state = 8 * 4 * 16 * 256 * visible, 24 * 6 * 32 * 128 * 128
    own = 3 * 4 * 16 * 256 * (7 * visible + 21)
    want = 2 * 7_936_684_544 + softmax + state + 6 * (fc + 7 * each) + own
    assert flops_per_token(config, head, 7, visible) == want
    assert 31e9 < want < 33e9


def test_of_a_mixture_the_active_experts_count() -> None:
    """35B-A3B: 8 of 256 experts of width 512 in each of 40 layers, besides the shared one."""
    config = published_target("Qwen3.5-35B-A3B")
    expert, total = 3 * 2048 * 512, sum(target_parameters(config).values())
    assert active_parameters(config) == total - 2048 * 248320 - 40 * (256 - 8) * expert
    assert 2.9e9 < active_parameters(config) < 3e9 and 34e9 < total < 35e9


def test_counting_by_kinds_of_layers_equals_counting_the_model() -> None:
    assert sum(target_parameters(HYBRID).values()) == sum(parameter_counts(make_target(HYBRID)).values())
    tied = active_parameters(HYBRID)
    assert active_parameters(dataclasses.replace(HYBRID, tie_word_embeddings=False)) == tied, "the projection is work"
    assert sum(draft_parameters(DRAFT)) == sum(parameter_counts(make_drafter()).values())
    own = dataclasses.replace(DRAFT, own_embedding=True)
    assert draft_parameters(own) == draft_parameters(DRAFT), "an embedding is no work"


def test_visible_keys_of_rows_and_of_segments() -> None:
    def row(length: int, ids: Any = None) -> Row:
        return Row(np.zeros(length, np.int32), np.ones(length, bool), ids)

    assert mean_visible([row(4)]) == (1 + 2 + 3 + 4) / 4
    assert mean_visible([row(5, np.array([1, 1, 1, 2, 2]))]) == (1 + 2 + 3 + 1 + 2) / 5
    assert mean_visible([row(1), row(3)]) == (1 + 1 + 2 + 3) / 4


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA B200", 2250e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("TPU v5p", 459e12),
        ("TPU v6 lite", 918e12),
        ("cpu", None),
    ],
)
def test_peaks(kind: str, peak: float | None) -> None:
    assert peak_flops(kind) == peak
    devices: Any = [SimpleNamespace(device_kind=kind)] * 4
    assert total_peak(devices) == (None if peak is None else 4 * peak)
    assert total_peak(devices, 1e12) == 4e12


def test_utilization_is_left_out_where_the_peak_is_unknown() -> None:
    assert Work(2e9, total_peak(jax.devices())).mfu(100.0) is None
    assert Work(2e9, 1e12).mfu(100.0) == pytest.approx(0.2)
