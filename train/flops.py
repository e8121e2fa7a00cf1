"""Floating-point work of training, and its share of what the hardware can do (MFU).

A multiplication and an addition are two operations; nothing that is computed again counts. A token costs

    2 x (the target's parameters without the input embedding, of a mixture only the active ones)
  + 6 x (fc + steps x (the drafter's layers + its output projection))
  + attention: 2 for each product of query and key and of weight and value, three times that in the drafter, which has a
    backward pass; of the delta rule, the three products with the state S that its recurrence needs

A tied embedding counts once, as output projection. Every matrix of the head is trained; one that were frozen would cost
4 and not 6. In offline mode the target's part is its output projection for the draft vocabulary alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Sequence

import jax
import numpy as np
from flax import nnx

from eagle3_jax.config import DELTA, DraftConfig, TargetConfig
from eagle3_jax.drafters.eagle3 import Eagle3
from eagle3_jax.target import Target
from train.data.conversations import Row

# Dense bfloat16 operations a second of one jax device, from the makers' data sheets; the first name contained in
# `device_kind` counts. A TPU v7 chip is two devices.
PEAKS = (
    ("GB200", 2500e12),
    ("B200", 2250e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H200", 989e12),
    ("GH200", 989e12),
    ("A100", 312e12),
    ("TPU7x", 1153.5e12),
    ("TPU v6", 918e12),
    ("TPU v5 lite", 197e12),
    ("TPU v5e", 197e12),
    ("TPU v5", 459e12),
    ("TPU v4", 275e12),
)


def peak_flops(device_kind: str) -> float | None:
    """bfloat16 operations a second of a device; None if it is not known."""
    return next((peak for name, peak in PEAKS if name in device_kind), None)


def parameter_counts(model: Target | Eagle3) -> dict[str, int]:
    """Size of every parameter by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    return {".".join(str(key.key) for key in path): math.prod(x.shape) for path, x in leaves}


def target_parameters(config: TargetConfig) -> dict[str, int]:
    """Size of every parameter, layers of one kind together; none is made, and of each kind one layer is looked at."""
    kinds = Counter(zip(config.layer_types, config.moe_layers or (False,) * config.num_layers, strict=True))
    types, mixtures = zip(*kinds, strict=True)
    short = dataclasses.replace(config, num_layers=len(kinds), layer_types=types, moe_layers=mixtures)
    counts = parameter_counts(nnx.eval_shape(lambda: Target(short, rngs=nnx.Rngs(0))))
    times = {f"layers.{i}": number for i, number in enumerate(kinds.values())}
    return {name: size * times.get(".".join(name.split(".")[:2]), 1) for name, size in counts.items()}


def active_parameters(config: TargetConfig) -> int:
    """Of the target, those that work on a token; embedding a token is no work, projecting onto the vocabulary is."""
    counts = target_parameters(config)
    embedding = counts.pop("embed_tokens.weight")
    experts = sum(size for name, size in counts.items() if ".experts." in name)
    active = experts * config.num_experts_per_tok // max(config.num_experts, 1)
    return sum(counts.values()) - experts + active + (embedding if config.tie_word_embeddings else 0)


def target_attention(config: TargetConfig, visible: float) -> float:
    """Forward operations a token of all token mixers but their projections; `visible`: keys that a query sees."""
    c, delta = config, sum(kind == DELTA for kind in config.layer_types)
    softmax = 4 * c.num_heads * c.head_dim * visible
    state = 6 * c.linear_num_value_heads * c.linear_key_head_dim * c.linear_value_head_dim
    return (c.num_layers - delta) * softmax + delta * state


def draft_parameters(config: DraftConfig) -> tuple[int, int]:
    """(used once a token, used at each step): fc and its norms; layers, final norm and output projection."""
    counts = parameter_counts(nnx.eval_shape(lambda: Eagle3(config, rngs=nnx.Rngs(0))))
    counts.pop("embed_tokens.weight", None)
    once = sum(size for name, size in counts.items() if name.partition(".")[0] in ("fc", "fc_norm", "input_norm"))
    return once, sum(counts.values()) - once


def draft_attention(config: DraftConfig, visible: float, num_steps: int) -> float:
    """Forward operations a token over all steps: step i sees the keys of step 0 and i of its own."""
    keys = sum(visible + i for i in range(num_steps))
    return 4 * config.num_layers * config.num_heads * config.head_dim * keys


def flops_per_token(
    target: TargetConfig, draft: DraftConfig, num_steps: int, visible: float, *, offline: bool = False
) -> float:
    """Operations of training on one token, as the module counts them. visible: see `mean_visible`."""
    once, each = draft_parameters(draft)
    trained = 6 * (once + num_steps * each) + 3 * draft_attention(draft, visible, num_steps)
    if offline:
        return trained + 2 * draft.target_hidden_size * draft.draft_vocab_size
    return trained + 2 * active_parameters(target) + target_attention(target, visible)


def mean_visible(rows: Iterable[Row]) -> float:
    """Keys that a token sees on average, itself included: those before it in its row or segment."""
    lengths = np.concatenate([_lengths(row) for row in rows]).astype(np.float64)
    return float(np.sum(lengths * (lengths + 1) / 2) / max(np.sum(lengths), 1))


def _lengths(row: Row) -> np.ndarray:
    """[segments] of a packed row, [1] of another."""
    if row.segment_ids is None:
        return np.array([len(row.tokens)])
    return np.unique(row.segment_ids, return_counts=True)[1]


@dataclasses.dataclass(frozen=True)
class Work:
    """flops_per_token: see `flops_per_token`. peak: of all devices together, None if it is not known."""

    flops_per_token: float
    peak: float | None = None

    def mfu(self, tokens_per_second: float) -> float | None:
        """The share of the peak that is used (model flops utilization)."""
        return None if self.peak is None else self.flops_per_token * tokens_per_second / self.peak


def total_peak(devices: Sequence[jax.Device], given: float | None = None) -> float | None:
    """Of `devices` together; `given`, of one, takes the place of the table."""
    peaks = [given or peak_flops(device.device_kind) for device in devices]
    return None if None in peaks else math.fsum(peak for peak in peaks if peak is not None)
