"""Reading config.json, which may hold anything: each value is checked for its kind, and every fault is collected."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

LARGEST = 2**31 - 1
MOST = 1e30  # beyond what any float of a config means
MANY = 256  # layers of a head, or aux states: more is a mistake, and would be costly to enumerate

# What the decoder layer is, under Hugging Face's names.
LAYER = frozenset({
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "num_hidden_layers",
    "vocab_size", "rms_norm_eps", "max_position_embeddings", "model_type", "rope_theta", "rope_scaling",
    "rope_parameters", "partial_rotary_factor", "attention_bias", "mlp_bias", "hidden_act", "quantization_config",
})  # fmt: skip
# What changes nothing here but is read by others, so that it goes along into other formats.
CARRIED = frozenset({
    "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "attention_dropout", "sliding_window",
    "use_sliding_window", "max_window_layers", "layer_types", "pretraining_tp", "use_cache",
})  # fmt: skip
# Book-keeping of transformers and of the trainers, and what a dense head inherits from the config of its target.
BOOKKEEPING = frozenset({
    "architectures", "auto_map", "torch_dtype", "dtype", "transformers_version", "tie_word_embeddings",
    "target_model_type", "use_mrope", "decoder_sparse_step", "output_router_logits", "router_aux_loss_coef",
    "norm_topk_prob", "mlp_only_layers", "has_no_defaults_at_init", "return_dict", "output_hidden_states",
    "output_attentions", "is_encoder_decoder", "is_decoder", "chunk_size_feed_forward", "id2label", "label2id",
    "problem_type", "name_or_path", "attn_implementation", "use_bfloat16", "cross_attention_hidden_size",
    "add_cross_attention", "finetuning_task", "tokenizer_class", "prefix", "sep_token_id", "task_specific_params",
    "tie_encoder_decoder", "torchscript", "pruned_heads", "head_type", "full_attention_interval", "rope_interleave",
})  # fmt: skip


class Keys:
    """One table of config.json. A value of the wrong kind is a problem and counts as absent."""

    def __init__(self, table: Any, problems: list[str], where: str = "") -> None:
        self.problems, self.where = problems, where
        if not isinstance(table, Mapping):
            problems.append(f"config.json: {where.rstrip('.') or 'it'} is not a table")
        self.values: Mapping[str, Any] = table if isinstance(table, Mapping) else {}

    def _wrong(self, key: str, wanted: str) -> None:
        shown = repr(self.values[key])
        shown = shown if len(shown) < 60 else shown[:56] + " ..."
        self.problems.append(f"config.json: {self.where}{key} is {shown}, not {wanted}")

    def integer(self, key: str, low: int = 1, high: int = LARGEST) -> int | None:
        """A whole number from `low` to `high`; None when absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self._wrong(key, f"a whole number from {low} to {high}")
            return None
        return value

    def number(self, key: str, default: float) -> float:
        """A finite number above 0."""
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MOST:
            self._wrong(key, "a positive number")
            return default
        return float(value)

    def flag(self, key: str) -> bool:
        """True or false; absent is false."""
        value = self.values.get(key)
        if value is not None and not (isinstance(value, int) and value in (0, 1)):
            self._wrong(key, "true or false")
            return False
        return bool(value)

    def text(self, key: str) -> str | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            self._wrong(key, "a text")
            return None
        return value

    def table(self, key: str) -> Keys:
        """A table within this one; absent or null is an empty one."""
        value = self.values.get(key)
        return Keys({} if value is None else value, self.problems, f"{self.where}{key}.")

    def texts(self, key: str) -> tuple[str, ...]:
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            self._wrong(key, "a list of names")
            return ()
        return tuple(value)

    def integers(self, key: str) -> tuple[int, ...] | None:
        """A list of whole numbers; None when absent or null."""
        value = self.values.get(key)
        if value is None:
            return None
        good = isinstance(value, list) and len(value) <= MANY
        if not good or any(isinstance(v, bool) or not isinstance(v, int) or abs(v) > LARGEST for v in value):
            self._wrong(key, "a list of whole numbers")
            return None
        return tuple(value)

    def unknown(self, known: Iterable[str]) -> list[str]:
        """Keys that are not in `known` and say something."""
        found = set(self.values) - set(known) - BOOKKEEPING
        return [f"{self.where}{k}" for k in sorted(found) if not k.startswith("_") and not _empty(self.values[k])]

    def taken(self, keys: Iterable[str]) -> dict[str, Any]:
        """The keys that are there, in the file's order."""
        wanted = set(keys)
        return {k: v for k, v in self.values.items() if k in wanted}


def architectures(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """The names in `architectures` that are names."""
    found = raw.get("architectures")
    return tuple(n for n in found if isinstance(n, str)) if isinstance(found, list) else ()


def _empty(value: Any) -> bool:
    return value is None or value is False or value == 0 or value in ("", [], {})


def finite(value: Any) -> bool:
    """Whether it is a number, and one that can be computed with."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
