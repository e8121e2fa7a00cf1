"""What may be said when an LLM is made: the keywords of vLLM's `LLM`, checked by name before anything is loaded."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import eagle3_jax
from eagle3_jax.errors import UserError
from eagle3_jax.meshes import MeshShape, parse_mesh
from eagle3_jax.quantization import find_quantization
from infer.cycle import MAX_DRAFTS, Speculation
from infer.params import nearest
from infer.sampling import DraftSampleMethod
from infer.verify import synthetic_rates

ASSETS = Path(eagle3_jax.__file__).parent / "assets"
DEFAULT_MODEL = ASSETS / "tiny-qwen3.5"
DEFAULT_DRAFTER = ASSETS / "tiny-qwen3.5-eagle3"
DEFAULT_DRAFTS = 3

# A context longer than this is only set aside when it is asked for: caches are allocated when the engine is made.
DEFAULT_MAX_MODEL_LEN = 4096

# vLLM keywords that are accepted, so that its scripts run unchanged, and change nothing: one table, one warning.
NO_EFFECT = frozenset(
    {
        "async_scheduling",
        "block_size",
        "compilation_config",
        "cpu_offload_gb",
        "disable_custom_all_reduce",
        "disable_log_stats",
        "distributed_executor_backend",
        "enable_chunked_prefill",
        "enable_prefix_caching",
        "enforce_eager",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "limit_mm_per_prompt",
        "load_format",
        "max_num_batched_tokens",
        "max_seq_len_to_capture",
        "swap_space",
        "tokenizer_mode",
        "trust_remote_code",
    }
)
SPECULATIVE_NO_EFFECT = frozenset(
    {
        "attention_backend",
        "disable_by_batch_size",
        "disable_padded_drafter_batch",
        "draft_tensor_parallel_size",
        "enforce_eager",
        "max_model_len",
        "moe_backend",
        "use_local_argmax_reduction",
    }
)
REJECTION_METHODS = ("coupled", "standard", "synthetic")


@dataclasses.dataclass(frozen=True)
class Drafting:
    """`speculative_config`, checked: which head (a folder or hub id; None without one), and how it is used."""

    model: str | Path | None = None
    revision: str | None = None
    speculation: Speculation = Speculation()


KERNELS = ("auto", "reference", "gpu", "tpu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Keywords of `LLM`; see there for what they mean. `check_options` makes one."""

    tokenizer: str | Path | None = None
    skip_tokenizer_init: bool = False
    tensor_parallel_size: int = 1
    mesh: str | None = None
    speculative_config: Mapping[str, Any] | None = None
    dtype: str = "auto"
    quantization: str | None = None
    seed: int = 0
    revision: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 16
    cycles_per_sync: int = 8
    prefill_chunk: int = 256
    kernels: str = "auto"


def check_options(given: Mapping[str, Any]) -> Options:
    """Raises UserError for a keyword nobody knows or a value that cannot be; warns once of those without effect."""
    known = [field.name for field in dataclasses.fields(Options)]
    _refuse_unknown("LLM", given, known, NO_EFFECT)
    _warn_no_effect("LLM", set(given) & NO_EFFECT)
    options = Options(**{name: value for name, value in given.items() if name in known})
    for name in ("tensor_parallel_size", "max_num_seqs", "cycles_per_sync", "prefill_chunk"):
        _check_count("LLM", name, getattr(options, name), 1)
    if options.max_model_len is not None:
        _check_count("LLM", "max_model_len", options.max_model_len, 2)
    _check_count("LLM", "seed", options.seed, 0)
    if options.quantization is not None:
        _check_quantization(options.quantization)
    if options.kernels not in KERNELS:
        raise UserError(f"LLM: kernels={options.kernels!r} is not offered; choose one of {', '.join(KERNELS)}")
    if options.mesh is not None and options.tensor_parallel_size > 1:
        raise UserError("LLM: mesh and tensor_parallel_size are both given: give one")
    return options


def mesh_shape(options: Options) -> MeshShape:
    """Devices along each axis. Raises ConfigError if `mesh` names none."""
    return MeshShape(tensor=options.tensor_parallel_size) if options.mesh is None else parse_mesh(options.mesh)


def check_speculative_config(config: Mapping[str, Any] | None, *, default_model: Path | None) -> Drafting:
    """Reads vLLM's `speculative_config`. `default_model` is the head that belongs to the default target.

    Raises:
      UserError: an unknown key, a method that is not offered, values out of range or in contradiction.
    """
    if config is None:
        if default_model is None:
            return Drafting()
        config = {}
    if not isinstance(config, Mapping):
        raise UserError(f"speculative_config={config!r} must be a dict such as {{'model': 'owner/head'}}")
    known = [
        *("model", "revision", "method", "num_speculative_tokens", "draft_sample_method"),
        *("rejection_sample_method", "synthetic_acceptance_length"),
    ]
    _refuse_unknown("speculative_config", config, known, SPECULATIVE_NO_EFFECT)
    _warn_no_effect("speculative_config", set(config) & SPECULATIVE_NO_EFFECT)
    if config.get("method", "eagle3") != "eagle3":
        raise UserError(f"speculative_config: method={config['method']!r} is not offered; only 'eagle3' is")
    model = config.get("model") or default_model
    if model is None:
        raise UserError("speculative_config: 'model' is missing: the folder or hub id of the EAGLE-3 head")
    drafts = config.get("num_speculative_tokens", DEFAULT_DRAFTS)
    _check_count("speculative_config", "num_speculative_tokens", drafts, 1)
    if drafts > MAX_DRAFTS:
        raise UserError(f"speculative_config: num_speculative_tokens={drafts} is not allowed: at most {MAX_DRAFTS} fit")
    return Drafting(model, config.get("revision"), _speculation(config, drafts))


def _speculation(config: Mapping[str, Any], drafts: int) -> Speculation:
    rejection = config.get("rejection_sample_method") or "coupled"
    _check_choice("rejection_sample_method", rejection, REJECTION_METHODS)
    drafting = config.get("draft_sample_method") or ("probabilistic" if rejection == "standard" else "coupled")
    _check_choice("draft_sample_method", drafting, get_args(DraftSampleMethod))
    if drafting == "probabilistic" and rejection == "coupled":
        raise UserError(
            "speculative_config: draft_sample_method='probabilistic' draws drafts that the coupled rule has no reason "
            "to accept; use 'coupled' (the default), or rejection_sample_method='standard'"
        )
    length = config.get("synthetic_acceptance_length")
    if (rejection == "synthetic") != (length is not None):
        raise UserError(
            f"speculative_config: synthetic_acceptance_length={length!r} with rejection_sample_method={rejection!r}: "
            "'synthetic' needs a length, and no other method takes one"
        )
    if length is not None:
        synthetic_rates(length, drafts)  # raises for lengths that K drafts cannot give
    return Speculation(drafts, drafting, rejection, length)


def _refuse_unknown(where: str, given: Iterable[str], known: list[str], no_effect: frozenset[str]) -> None:
    for name in given:
        if name not in known and name not in no_effect:
            hint = nearest(name, [*known, *no_effect])
            raise UserError(f"{where}: unknown keyword {name!r}{hint}; known: {', '.join(known)}")


def _warn_no_effect(where: str, names: set[str]) -> None:
    if names:
        warnings.warn(f"{where}: {', '.join(sorted(names))} {'has' if len(names) == 1 else 'have'} no effect here")


def _check_count(where: str, name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"{where}: {name}={value!r} is not allowed: it must be an integer of at least {least}")


def _check_quantization(name: object) -> None:
    try:
        find_quantization(name)
    except UserError as error:
        raise UserError(f"LLM: {error}") from None


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UserError(f"speculative_config: {name}={value!r} is not allowed: it must be one of {', '.join(choices)}")
