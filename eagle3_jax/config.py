"""What a model is: frozen configurations read from Hugging Face `config.json` files.

Changed only by `dataclasses.replace`. Every family is the same decoder (`target.Target`) under another `TargetConfig`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from eagle3_jax.errors import ConfigError

FULL = "full_attention"
DELTA = "linear_attention"

_QWEN_HYBRID = {"qk_norm": True, "attn_output_gate": True, "zero_centered_norm": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5": _QWEN_HYBRID,
    "qwen3_5_moe": _QWEN_HYBRID,
    "qwen3_next": _QWEN_HYBRID,
    "qwen3": {"qk_norm": True},
    "qwen3_moe": {"qk_norm": True},
    "qwen2": {"attention_bias": True, "attention_out_bias": False},
    "llama": {},
}
_HYBRID = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
_MIXTURE = ("qwen3_5_moe", "qwen3_next", "qwen3_moe")
_ALIASES = {"qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe"}
# What transformers takes where a config leaves these out.
_HEAD_DIMS = {"qwen3": 128, "qwen3_5": 256, "qwen3_5_moe": 256, "qwen3_next": 256}
_MROPE_SECTIONS: dict[str, tuple[int, ...]] = {"qwen3_5": (11, 11, 10), "qwen3_5_moe": (11, 11, 10)}
_ROPE_KINDS = ("default", "linear", "llama3", "yarn")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: `rotary_dim` leading dimensions of each head turn, in two halves (GPT-NeoX layout).

    `scaling` is one of default, linear, llama3, yarn, with their parameters in `params` (sorted key/value pairs).
    `mrope_section` is () for one-dimensional positions, else the interleaved sections (time, height, width) of
    Qwen3.5, in units of rotation frequencies.
    """

    theta: float = 10000.0
    rotary_dim: int = 128
    scaling: str = "default"
    params: tuple[tuple[str, float], ...] = ()
    mrope_section: tuple[int, ...] = ()

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], head_dim: int, *, where: str = "config.json") -> RopeConfig:
        """Reads both spellings: `rope_parameters` and `rope_theta` + `rope_scaling` + `partial_rotary_factor`."""
        rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
        kind = rope.get("rope_type", rope.get("type", "default")) or "default"
        kind = "default" if kind == "mrope" else kind
        if kind not in _ROPE_KINDS:
            raise ConfigError(f"{where}: rope type {kind!r} is not supported; known are {', '.join(_ROPE_KINDS)}")
        theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
        family = str(config.get("model_type")).removesuffix("_text")
        default_partial = 0.25 if family in _HYBRID else 1.0
        partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", default_partial))
        sections: Sequence[int] = rope.get("mrope_section") or _MROPE_SECTIONS.get(family, ())
        numbers = {k: float(v) for k, v in rope.items() if isinstance(v, int | float)}  # yarn's `truncate` is a bool
        if kind in ("llama3", "yarn"):
            numbers.setdefault("original_max_position_embeddings", float(config.get("max_position_embeddings", 0)))
        required = {
            "linear": ("factor",),
            "yarn": ("factor",),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        }
        if absent := [k for k in required.get(kind, ()) if k not in numbers]:
            raise ConfigError(f"{where}: rope type {kind!r} needs {', '.join(absent)} in rope_parameters")
        drop = ("rope_theta", "partial_rotary_factor", "mrope_interleaved")
        params = tuple(sorted((k, v) for k, v in numbers.items() if k not in drop)) if kind != "default" else ()
        return cls(float(theta), int(head_dim * partial), kind, params, tuple(sections))


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """The hybrid decoder. Field names follow Hugging Face; see `from_hf` for how families fill them."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layer_types: tuple[str, ...]
    rope: RopeConfig
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    attn_output_gate: bool = False
    zero_centered_norm: bool = False
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 4
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    norm_topk_prob: bool = True
    moe_layers: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        problems = [
            (
                len(self.layer_types) != self.num_layers,
                f"{len(self.layer_types)} layer_types for {self.num_layers} layers",
            ),
            (
                bool(set(self.layer_types) - {FULL, DELTA}),
                f"layer_types other than {FULL}, {DELTA}: {set(self.layer_types) - {FULL, DELTA}}",
            ),
            (
                self.num_heads % self.num_kv_heads != 0,
                f"{self.num_heads} heads are not a multiple of {self.num_kv_heads} key/value heads",
            ),
            (self.rope.rotary_dim % 2 != 0, f"rotary dimension {self.rope.rotary_dim} is odd"),
            (
                DELTA in self.layer_types and not self.linear_num_key_heads,
                "delta-rule layers without linear_num_key_heads",
            ),
            (
                bool(self.linear_num_key_heads)
                and self.linear_num_value_heads % max(self.linear_num_key_heads, 1) != 0,
                f"{self.linear_num_value_heads} linear value heads, not divisible by {self.linear_num_key_heads}",
            ),
            (
                any(self.moe_layers) and not 0 < self.num_experts_per_tok <= self.num_experts,
                f"num_experts_per_tok {self.num_experts_per_tok} with {self.num_experts} experts",
            ),
        ]
        if found := [text for bad, text in problems if bad]:
            raise ConfigError(f"{self.model_type} config: " + "; ".join(found))

    @property
    def linear_key_dim(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def linear_value_dim(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def linear_conv_dim(self) -> int:
        """Channels that pass the short convolution: queries, keys and values."""
        return 2 * self.linear_key_dim + self.linear_value_dim

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, where: str = "config.json") -> TargetConfig:
        """Reads a Hugging Face config, nested (`text_config`) or flat.

        Raises:
          ConfigError: the family is not known, a needed key is missing, or a feature in use is not supported.
        """
        text = {**config, **(config.get("text_config") or {})}
        family = _ALIASES.get(str(text.get("model_type")), str(text.get("model_type")))
        if family not in FAMILIES:
            raise ConfigError(
                f"{where}: model_type {text.get('model_type')!r} is not supported; known are {', '.join(FAMILIES)}"
            )
        _refuse_unsupported(text, where)
        need = _reader(text, where)
        hidden, layers, heads = need("hidden_size"), need("num_hidden_layers"), need("num_attention_heads")
        head_dim = text.get("head_dim") or _HEAD_DIMS.get(family) or hidden // heads
        flags = {
            "attention_bias": bool(text.get("attention_bias", False)),
            "attention_out_bias": bool(text.get("attention_bias", False)),
            **FAMILIES[family],
        }
        return cls(
            model_type=family,
            vocab_size=need("vocab_size"),
            hidden_size=hidden,
            intermediate_size=text.get("intermediate_size") or 0,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=text.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            layer_types=_layer_types(text, family, layers),
            rope=RopeConfig.from_hf(text, head_dim, where=where),
            rms_norm_eps=text.get("rms_norm_eps", 1e-6),
            max_position_embeddings=need("max_position_embeddings"),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
            mlp_bias=bool(text.get("mlp_bias", False)),
            **flags,
            **_delta_fields(text, family),
            **_mixture_fields(text, family, layers),
        )


def _reader(text: Mapping[str, Any], where: str) -> Any:
    def need(key: str) -> Any:
        if text.get(key) is None:
            raise ConfigError(f"{where}: the key {key!r} is missing")
        return text[key]

    return need


def _refuse_unsupported(text: Mapping[str, Any], where: str) -> None:
    if text.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ConfigError(f"{where}: hidden_act {text['hidden_act']!r} is not supported, only silu")
    if text.get("use_sliding_window"):
        raise ConfigError(
            f"{where}: use_sliding_window is not supported; set it to false if every prompt fits the window"
        )


def _layer_types(text: Mapping[str, Any], family: str, num_layers: int) -> tuple[str, ...]:
    if family not in _HYBRID:
        return (FULL,) * num_layers
    if text.get("layer_types"):
        return tuple(text["layer_types"])
    interval = text.get("full_attention_interval") or 4
    return tuple(FULL if (i + 1) % interval == 0 else DELTA for i in range(num_layers))


def _delta_fields(text: Mapping[str, Any], family: str) -> dict[str, Any]:
    if family not in _HYBRID:
        return {}
    defaults = {
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }
    return {key: int(text.get(key) or value) for key, value in defaults.items()}


def _mixture_fields(text: Mapping[str, Any], family: str, num_layers: int) -> dict[str, Any]:
    # transformers 5 writes Qwen3-MoE's count under the name that its other mixtures use.
    text = {**text, "num_experts": text.get("num_experts", text.get("num_local_experts"))}
    if family not in _MIXTURE or text["num_experts"] == 0:
        return {}
    step, dense = text.get("decoder_sparse_step") or 1, set(text.get("mlp_only_layers") or ())
    keys = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    return {
        **{key: _reader(text, "config.json")(key) for key in keys},
        "shared_expert_intermediate_size": (text.get("shared_expert_intermediate_size") or 0)
        if family != "qwen3_moe"
        else 0,
        "norm_topk_prob": True if family == "qwen3_5_moe" else bool(text.get("norm_topk_prob", family != "qwen3_moe")),
        "moe_layers": tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers)),
    }


@dataclasses.dataclass(frozen=True)
class DraftConfig:
    """An EAGLE-3 head. `aux_layers` are boundary ids: b is the residual stream entering target layer b.

    Flags as the `speculators` project names them:
      norm_before_residual: the residual is the normed fc output (gpt-oss and Red Hat heads), not the raw one.
      norm_before_fc: one RMSNorm over the concatenated aux states, before fc.
      fc_norm: one RMSNorm for each aux state, before fc (EAGLE-3.1).
      norm_output: what is fed back is the output after the final norm (EAGLE-3.1), not before.
    `own_embedding`: the head carries its own token embedding instead of the target's.
    """

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    rope: RopeConfig
    num_layers: int = 1
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768
    qk_norm: bool = False
    attention_bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    own_embedding: bool = False

    def __post_init__(self) -> None:
        problems = [
            (
                self.num_heads % self.num_kv_heads != 0,
                f"{self.num_heads} heads are not a multiple of {self.num_kv_heads} key/value heads",
            ),
            (
                not 0 < self.draft_vocab_size <= self.vocab_size,
                f"draft vocabulary {self.draft_vocab_size} of {self.vocab_size} tokens",
            ),
            (self.norm_before_fc and self.fc_norm, "norm_before_fc and fc_norm exclude each other"),
            (not self.aux_layers, "no aux layers"),
            (self.num_layers < 1, f"{self.num_layers} layers"),
            (bool(self.rope.mrope_section), "a drafter's RoPE is one-dimensional"),
        ]
        if found := [text for bad, text in problems if bad]:
            raise ConfigError("drafter config: " + "; ".join(found))


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """EAGLE-3's boundaries (2, L//2, L-3), as EAGLE, vLLM and SGLang choose them.

    Raises:
      ConfigError: fewer than 7 layers, where these collide.
    """
    if num_layers < 7:
        example = ", ".join(map(str, sorted({0, num_layers // 2, num_layers})))
        raise ConfigError(
            f"a target of {num_layers} layers is too small for the default aux boundaries (2, L//2, L-3), which need 7 "
            f"layers; name them yourself, for example aux_layers=({example})"
        )
    return (2, num_layers // 2, num_layers - 3)


def check_aux_layers(ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Returns `ids` as a tuple after checking that they are unique, sorted boundaries in 0..num_layers."""
    ids = tuple(ids)
    if any(isinstance(b, bool) or not isinstance(b, int) for b in ids):
        raise ConfigError(f"aux layers {ids} must be integers")
    if outside := [b for b in ids if not 0 <= b <= num_layers]:
        raise ConfigError(
            f"aux layers {outside} are outside the boundaries 0..{num_layers} of a {num_layers}-layer target"
        )
    if list(ids) != sorted(set(ids)):
        raise ConfigError(f"aux layers {ids} must be unique and in ascending order")
    return ids
