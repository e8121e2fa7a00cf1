"""Targets from Hugging Face folders: which names mean which parameters, and loading."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from eagle3_jax.checkpoint.block_fp8 import stored_block, with_scales
from eagle3_jax.checkpoint.fill import make_plan
from eagle3_jax.checkpoint.formats.keys import architectures
from eagle3_jax.checkpoint.layout import Parameter, rules_for
from eagle3_jax.checkpoint.placing import Placing, check_mesh_complete, half_quantised, loaded_as, quantised_paths
from eagle3_jax.checkpoint.problems import CheckpointError
from eagle3_jax.checkpoint.ranges import counted
from eagle3_jax.checkpoint.safetensors_file import TensorInfo
from eagle3_jax.checkpoint.source import Source, open_source, read_json, resolve
from eagle3_jax.checkpoint.stop_ids import stop_ids
from eagle3_jax.config import TargetConfig
from eagle3_jax.errors import ConfigError
from eagle3_jax.precision import parse_dtype
from eagle3_jax.quantization import quantize_model
from eagle3_jax.target import Target

PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
SKIPPED = {  # parts of a checkpoint that a text decoder does not have
    "vision": re.compile(r"(model\.)?visual\..+"),
    "multi-token prediction": re.compile(r"(model\.)?mtp\..+"),
    "rotary tables": re.compile(r".+\.rotary_emb\.inv_freq"),
}
TIED_HEAD = "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class LoadedTarget:
    """A target and what its folder says of it. `skipped` is one line on tensors left out; `notes` anything odd.

    `bytes_read` is what this process read of the tensors.
    """

    model: Target
    config: TargetConfig
    folder: Path
    stop_ids: tuple[int, ...]
    generation_config: dict[str, Any]
    skipped: str
    notes: tuple[str, ...] = ()
    bytes_read: int = 0


@dataclasses.dataclass(frozen=True)
class NamedTensors:
    """The text decoder's tensors by name without prefix, the prefix itself, and what was left out, by kind."""

    tensors: dict[str, TensorInfo]
    prefix: str
    left_out: dict[str, list[TensorInfo]]
    problems: tuple[str, ...]

    def full_name(self, name: str) -> str:
        return name if name.startswith("lm_head.") else self.prefix + name

    @property
    def skipped(self) -> str:
        """One line: what was left out, how much of it."""
        parts = [
            f"{len(infos)} {kind} tensors ({_common_name(infos)}, {size(sum(i.nbytes for i in infos))})"
            for kind, infos in self.left_out.items()
        ]
        return "skipped " + " and ".join(parts) if parts else ""


def size(number: int) -> str:
    """A number of bytes, in powers of 1000."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= scale:
            return f"{number / scale:.2f} {unit}"
    return f"{number} bytes"


def _common_name(infos: list[TensorInfo]) -> str:
    head = infos[0].name.split(".")
    return ".".join(head[:2] if head[0] == "model" else head[:1]) + ".*"


def name_tensors(source: Source, config: TargetConfig, *, first_layers: bool = False) -> NamedTensors:
    """Takes prefixes off and sorts out what is not part of the text decoder.

    With `first_layers`, layers beyond those of `config` are left out; otherwise they are unknown tensors.
    """
    tensors: dict[str, TensorInfo] = {}
    left_out: dict[str, list[TensorInfo]] = collections.defaultdict(list)
    prefixes: collections.Counter[str] = collections.Counter()
    problems: list[str] = []
    for info in source:
        kind = next((kind for kind, pattern in SKIPPED.items() if pattern.fullmatch(info.name)), None)
        prefix = next((p for p in PREFIXES if info.name.startswith(p)), "")
        name = info.name.removeprefix(prefix)
        if config.tie_word_embeddings and name == TIED_HEAD:
            problems += _untied(info, _embedding(source))
            kind = "tied output"
        if first_layers and (layer := re.match(r"layers\.(\d+)\.", name)) and int(layer[1]) >= config.num_layers:
            kind = "later layers'"
        if kind is not None:
            left_out[kind].append(info)
            continue
        prefixes[prefix] += 1
        if name in tensors:
            problems.append(f"{info.name} and {tensors[name].name} are the same parameter")
        tensors.setdefault(name, info)
    prefix = max((p for p in prefixes if p), key=lambda p: prefixes[p], default="")
    return NamedTensors(tensors, prefix, dict(left_out), tuple(problems))


def _embedding(source: Source) -> TensorInfo | None:
    return next((info for info in source if info.name.endswith("embed_tokens.weight")), None)


def _untied(head: TensorInfo, embedding: TensorInfo | None, rows: int = 4096) -> list[str]:
    """A stored output layer is left out only when it is the embedding, as the config claims."""
    if embedding is None or head.shape == embedding.shape and _equal(head, embedding, rows):
        return []
    remedy = "set tie_word_embeddings to false in config.json, or config_overrides={'tie_word_embeddings': False}"
    return [f"{head.name} differs from {embedding.name} though config.json ties them; {remedy}"]


def _equal(a: TensorInfo, b: TensorInfo, rows: int) -> bool:
    one, other = a.read(), b.read()
    return all(np.array_equal(one[i : i + rows], other[i : i + rows]) for i in range(0, a.shape[0], rows))


def load_target(
    path_or_id: str | Path,
    *,
    dtype: Any = "auto",
    revision: str | None = None,
    mesh: Mesh | None = None,
    config_overrides: Mapping[str, Any] | None = None,
    num_layers: int | None = None,
    quantization: str | None = None,
) -> LoadedTarget:
    """Loads a target's text decoder, tensor by tensor, onto the device or onto the devices of `mesh`.

    On a mesh each process reads what its own devices hold, once, a parameter's part at a time; most that is ever in its
    memory is the largest such part and `ranges.BLOCK`. More is read of three things: rows whose pieces are shorter than
    `ranges.SHORT`, whole and for each device; scales of fp8 blocks that two devices share, by both; and an output layer
    that is stored though the config ties it to the embedding, to be compared with it, whole.

    Args:
      path_or_id: a folder as Hugging Face writes it, or a hub id.
      dtype: "auto" takes the checkpoint's (float16 becomes bfloat16), else float32 or bfloat16. Parameters that the
        model keeps in float32 stay so.
      mesh: of `sharding.make_mesh`, with devices of every process; heads that do not divide are on every device.
      config_overrides: fields of `TargetConfig` to be replaced.
      num_layers: load only so many layers, to look at part of a model that is too large as a whole.
      quantization: "int8", "fp8" or "fp8_per_block": matrices are held in one byte, see `eagle3_jax.quantization`. With
        an fp8 checkpoint either "fp8" keeps what is in the files; None dequantises it.

    Raises:
      CheckpointError: with every problem of the folder; or a file was cut or lost while it was read.
      ConfigError: the config is not one of a supported family, or the mesh has other axes.
      UserError: a process has no device in the mesh.
    """
    check_mesh_complete(mesh)
    with counted() as read:
        loaded = _load(path_or_id, dtype, revision, mesh, config_overrides, num_layers, quantization)
    return dataclasses.replace(loaded, bytes_read=read.bytes)


def _load(
    path_or_id: str | Path, dtype: Any, revision: str | None, mesh: Mesh | None,
    config_overrides: Mapping[str, Any] | None, num_layers: int | None, quantization: str | None,
) -> LoadedTarget:  # fmt: skip
    folder = resolve(path_or_id, revision)
    raw = read_json(folder, "config.json", required=True)
    config = cut(read_config(raw, folder, config_overrides), num_layers)
    block = stored_block(raw, folder)
    how = loaded_as(quantization, block)
    source = open_source(folder)
    kind = resolve_dtype(dtype, raw, source)
    graph, abstract = nnx.split(nnx.eval_shape(lambda: Target(config, dtype=kind, rngs=nnx.Rngs(0))))
    named = name_tensors(source, config, first_layers=num_layers is not None)
    tensors, faults = with_scales(named.tensors, block)
    plan = make_plan(parameters_of(abstract), tensors, rules_for(config), named.full_name)
    if problems := (*named.problems, *faults, *plan.problems, *half_quantised(plan)):
        raise CheckpointError(folder, problems)
    paths = quantised_paths(plan, how, block)
    if how is not None:
        make = lambda: quantize_model(Target(config, dtype=kind, rngs=nnx.Rngs(0)), how, paths)
        graph, abstract = nnx.split(nnx.eval_shape(make))
    arrays = Placing(config, mesh, how, paths).arrays(plan)
    stops, notes = stop_ids(folder)
    return LoadedTarget(
        nnx.merge(graph, with_arrays(abstract, arrays)), config, folder, stops,
        read_json(folder, "generation_config.json"), named.skipped, tuple(notes),
    )  # fmt: skip


def read_config(raw: Mapping[str, Any], folder: Path, overrides: Mapping[str, Any] | None = None) -> TargetConfig:
    """The target's config with `overrides`; refuses checkpoints quantised in ways that are not known here."""
    where = str(folder / "config.json")
    stored_block(raw, folder)
    if is_drafter(raw):
        raise ConfigError(f"{where}: this is a drafter, not a target; give it as the drafter of a target")
    config = TargetConfig.from_hf(raw, where=where)
    fields = {field.name for field in dataclasses.fields(config)}
    if unknown := sorted(set(overrides or ()) - fields):
        raise ConfigError(
            f"config_overrides {', '.join(unknown)}: not fields of TargetConfig: {', '.join(sorted(fields))}"
        )
    return dataclasses.replace(config, **(overrides or {}))


def cut(config: TargetConfig, num_layers: int | None) -> TargetConfig:
    """The config of a target's first layers."""
    if num_layers is None:
        return config
    if not 1 <= num_layers <= config.num_layers:
        raise ConfigError(f"num_layers {num_layers}: the target has {config.num_layers} layers")
    layers, mixtures = config.layer_types[:num_layers], config.moe_layers[:num_layers]
    return dataclasses.replace(config, num_layers=num_layers, layer_types=layers, moe_layers=mixtures)


def is_drafter(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a drafter of any kind."""
    keys = ("speculators_config", "transformer_layer_config", "eagle_config", "draft_vocab_size", "dflash_config")
    return any(key in raw for key in ("speculators_model_type", *keys)) or any(
        "Eagle" in name for name in architectures(raw)
    )


def resolve_dtype(dtype: Any, raw: Mapping[str, Any], source: Iterable[TensorInfo]) -> Any:
    """The dtype asked for; "auto" is the config's, or that of the largest tensor when the config names none."""
    if dtype != "auto":
        return parse_dtype(dtype)
    text = raw.get("text_config") or {}
    named = next((t[k] for t in (raw, text) for k in ("dtype", "torch_dtype") if isinstance(t.get(k), str)), None)
    if named is None:
        named = max(source, key=lambda info: info.nbytes).dtype.name
    named = named.removeprefix("torch.")
    known = {"float16": "bfloat16", "float64": "float32", "float8_e4m3fn": "bfloat16"}
    return parse_dtype(known.get(named, named))


def parameters_of(abstract: nnx.State, kind: type[nnx.Variable[Any]] = nnx.Param) -> list[Parameter]:
    """Every parameter of an abstract model."""
    return [
        Parameter(".".join(map(str, path)), tuple(variable.shape), np.dtype(variable.dtype))
        for path, variable in nnx.to_flat_state(abstract)
        if isinstance(variable, kind)
    ]


def with_arrays(abstract: nnx.State, arrays: Mapping[str, jax.Array]) -> nnx.State:
    """The state with its variables' arrays in place of shapes, by dotted path."""
    flat: Iterable[tuple[tuple[Any, ...], Any]] = nnx.to_flat_state(abstract)
    return nnx.from_flat_state([(path, variable.replace(arrays[".".join(map(str, path))])) for path, variable in flat])
