"""A target back into a Hugging Face folder, under the names that its family uses there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from eagle3_jax.checkpoint.hf import parameters_of
from eagle3_jax.checkpoint.layout import Parameter, Piece, Rule, alternatives, rules_for
from eagle3_jax.checkpoint.publish import publish, write_json
from eagle3_jax.checkpoint.safetensors_file import Outgoing, write_file
from eagle3_jax.checkpoint.source import INDEX, SINGLE
from eagle3_jax.config import TargetConfig
from eagle3_jax.errors import ConfigError
from eagle3_jax.precision import ALWAYS_FLOAT32
from eagle3_jax.quantization import SCALE
from eagle3_jax.target import Target

Host = np.ndarray[Any, Any]


def save_target(
    model: Target,
    folder: str | Path,
    config: Mapping[str, Any],
    *,
    generation_config: Mapping[str, Any] | None = None,
    dtype: Any = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes `model` so that transformers and `load_target` read it back. Other files in `folder` stay.

    Args:
      config: the config.json to write; it must describe this model. Its dtype is set to what is written, and what it
        says of quantisation is left out.
      dtype: float32 or bfloat16; by default as the model has it.
      max_shard_bytes: weights are split into files of about this size.
    """
    _check_config(model.config, config)
    state = nnx.split(model)[1]
    if any(parameter.path.endswith(SCALE) for parameter in parameters_of(state)):
        raise ConfigError("a quantised target cannot be written; load it without quantization")
    arrays = {".".join(map(str, path)): variable[...] for path, variable in nnx.to_flat_state(state)}
    stem = "model.language_model." if "text_config" in config else "model."
    outgoing = {
        name if name.startswith("lm_head.") else stem + name: tensor
        for name, tensor in outgoing_tensors(parameters_of(state), arrays, rules_for(model.config), dtype).items()
    }
    with publish(folder) as fresh:
        _write_shards(fresh, outgoing, max_shard_bytes)
        write_json(fresh / "config.json", _with_dtype(config, outgoing[f"{stem}embed_tokens.weight"].dtype.name))
        if generation_config is not None:
            write_json(fresh / "generation_config.json", generation_config)


def _check_config(model: TargetConfig, config: Mapping[str, Any]) -> None:
    other = TargetConfig.from_hf(config)
    fields = TargetConfig.__dataclass_fields__
    if differing := [
        f"{f} is {getattr(model, f)}, not {getattr(other, f)}" for f in fields if getattr(model, f) != getattr(other, f)
    ]:
        raise ConfigError(f"the config to be written is not this model's: {'; '.join(differing)}")


def _with_dtype(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    named = {key: name for key in ("dtype", "torch_dtype") if key in config or key == "dtype"}
    nested = {"text_config": _with_dtype(config["text_config"], name)} if "text_config" in config else {}
    return {key: value for key, value in {**config, **named, **nested}.items() if key != "quantization_config"}


def outgoing_tensors(
    parameters: list[Parameter], arrays: Mapping[str, jax.Array], rules: tuple[Rule, ...], dtype: Any = None
) -> dict[str, Outgoing]:
    """The stored tensors by name. One may take several parameters, and a parameter may fill several."""

    @functools.lru_cache(maxsize=4)  # the pieces of one parameter are written one after another
    def host(path: str) -> Host:
        return np.asarray(arrays[path])

    shares: dict[str, list[tuple[Parameter, Piece]]] = {}
    for parameter in parameters:
        for piece in alternatives(parameter.path, parameter.shape, rules)[0]:
            shares.setdefault(piece.name, []).append((parameter, piece))
    return {name: _outgoing(share, host, dtype) for name, share in shares.items()}


def _outgoing(share: list[tuple[Parameter, Piece]], host: Callable[[str], Host], dtype: Any) -> Outgoing:
    first, piece = share[0]
    shape = piece.stored_shape(first.shape)
    keep = dtype is None or first.path.rsplit(".", 1)[-1] in ALWAYS_FLOAT32
    kind = first.dtype if keep else np.dtype(dtype)

    def make() -> Host:
        out = np.empty(shape, kind)
        for parameter, part in share:
            part.layout.put(out, part.own_part(host(parameter.path)))
        return out

    return Outgoing(kind, shape, make)


def _write_shards(folder: Path, tensors: Mapping[str, Outgoing], limit: int) -> None:
    shards: list[dict[str, Outgoing]] = [{}]
    for name, tensor in tensors.items():
        if shards[-1] and sum(t.nbytes for t in shards[-1].values()) + tensor.nbytes > limit:
            shards.append({})
        shards[-1][name] = tensor
    if len(shards) == 1:
        write_file(folder / SINGLE, shards[0])
        return
    files = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    for file, shard in zip(files, shards, strict=True):
        write_file(folder / file, shard)
    total = sum(t.nbytes for t in tensors.values())
    weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
