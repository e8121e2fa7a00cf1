"""Recipes: what `eagle3 train` reads. Every key is a field below; an unknown one is an error that names the nearest."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

from eagle3_jax.errors import UserError
from train.data.conversations import Overlong
from train.data.mask import ChangedTurns
from train.objective import Kind


class RecipeError(UserError):
    """A recipe that cannot be followed; the message names the key."""


@dataclasses.dataclass(frozen=True)
class DataRecipe:
    """What to train on.

    files: .jsonl, .json, .parquet or folders, see `train.data.sources`, and `train.data.conversations` for the rows.
    buckets: lengths to which batches are padded, ascending; the step is compiled once for each that occurs. The default
      is powers of two from 128, then max_length.
    overlong: sequences longer than max_length are truncated or dropped.
    packing: rows share sequences of max_length, of which a batch then has batch_size; otherwise a sequence is a row.
    changed_turns: answers that a later turn's rendering changes: rows of their own (split), unsupervised, or an error.
    template_kwargs: given to the chat template, for instance enable_thinking.
    tokenizer: folder or hub id, by default the target's.
    """

    files: tuple[str, ...] = ()
    max_length: int = 2048
    buckets: tuple[int, ...] | None = None
    overlong: Overlong = "truncate"
    packing: bool = True
    changed_turns: ChangedTurns = "split"
    template_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    tokenizer: str | None = None


@dataclasses.dataclass(frozen=True)
class DraftRecipe:
    """The head. Sizes left out are the target's.

    init_from: an existing head to go on from; its config, vocabulary and aux layers are kept, the keys below ignored.
    architecture: llama, or qwen3 (q/k norms).
    draft_vocab_size: by default 32000, or all of a smaller vocabulary.
    vocab_file: the draft vocabulary as `eagle3 data vocab` wrote it, instead of one chosen from data.files.
    aux_layers: boundary ids of the target, by default (2, L//2, L-3).
    init_head: start the output projection and final norm from the target's.
    """

    init_from: str | None = None
    architecture: Literal["llama", "qwen3"] = "llama"
    num_layers: int = 1
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    rope_theta: float | None = None
    draft_vocab_size: int | None = None
    vocab_file: str | None = None
    aux_layers: tuple[int, ...] | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    init_head: bool = True


@dataclasses.dataclass(frozen=True)
class OptimizerRecipe:
    """AdamW: linear warm-up over `warmup_ratio` of the steps, then a cosine down to final_ratio * learning_rate."""

    learning_rate: float = 1e-4
    warmup_ratio: float = 0.03
    final_ratio: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    weight_decay: float = 0.0
    clip_norm: float = 0.5


@dataclasses.dataclass(frozen=True)
class EvalRecipe:
    """Predicted acceptance at the end of training, see `train.evaluate`, written to summary.json.

    files: held-out rows in any format of data.files; of each, the last assistant turn is what is predicted. The figure
    is the engine's own only if the target said those turns greedily. num_drafts: K. max_rows: the first so many.
    """

    files: tuple[str, ...] = ()
    num_drafts: int = 3
    max_rows: int = 256


@dataclasses.dataclass(frozen=True)
class MeshRecipe:
    """Devices along each axis; the batch is spread over `data`."""

    data: int = 1
    fsdp: int = 1
    expert: int = 1
    tensor: int = 1


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A training run.

    features: offline mode: a folder that `eagle3 data features` wrote, instead of data.files.
    target: folder or hub id. output: the run's folder. ttt_steps, decay: of the training-time test, and the weight of
    step i, decay**i. loss, kl_scale, kl_decay: see `train.objective`. train_steps, or else epochs, says how long.
    dtype: of computation; the head's master weights are float32. remat: compute each step of the drafter again in the
    backward pass, for memory. keep: checkpoints kept. export: write the head in SpecForge's format to OUTPUT/head at
    the end.
    """

    target: str = ""
    output: str = ""
    features: str | None = None
    data: DataRecipe = DataRecipe()
    draft: DraftRecipe = DraftRecipe()
    optimizer: OptimizerRecipe = OptimizerRecipe()
    evaluate: EvalRecipe = EvalRecipe()
    mesh: MeshRecipe = MeshRecipe()
    ttt_steps: int = 7
    decay: float = 0.8
    loss: Kind = "kl"
    kl_scale: float = 1.0
    kl_decay: float = 1.0
    batch_size: int = 8
    train_steps: int | None = None
    epochs: float = 1.0
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    remat: bool = False
    seed: int = 0
    save_every: int = 1000
    keep: int = 2
    log_every: int = 20
    export: bool = True

    def __post_init__(self) -> None:
        o = self.optimizer
        problems = [
            (not self.target, "target is missing: the folder or hub id of the model to draft for"),
            (not self.output, "output is missing: the folder of this run"),
            (not self.data.files and not self.features, "data.files is missing: .jsonl, .json, .parquet or prepared"),
            (bool(self.data.files and self.features), "data.files and features are both given: give one"),
            (bool(self.evaluate.files and self.features), "evaluate.files needs the target, which features do without"),
            (self.data.max_length < 3, f"data.max_length={self.data.max_length} is below 3"),
            (
                not _ascending(self.data.buckets, self.data.max_length),
                f"data.buckets={self.data.buckets} is not ascending",
            ),
            (self.ttt_steps < 1, f"ttt_steps={self.ttt_steps} is below 1"),
            (not 0 < self.decay <= 1, f"decay={self.decay} is not in (0, 1]"),
            (not 0 <= self.kl_scale <= 1, f"kl_scale={self.kl_scale} is not in [0, 1]"),
            (self.kl_decay < 0, f"kl_decay={self.kl_decay} is negative"),
            (self.batch_size < 1, f"batch_size={self.batch_size} is below 1"),
            (self.train_steps is not None and self.train_steps < 1, f"train_steps={self.train_steps} is below 1"),
            (self.evaluate.num_drafts < 1, f"evaluate.num_drafts={self.evaluate.num_drafts} is below 1"),
            (self.epochs <= 0, f"epochs={self.epochs} is not positive"),
            (min(self.save_every, self.keep, self.log_every) < 1, "save_every, keep and log_every must be at least 1"),
            (not 0 <= o.warmup_ratio < 1, f"optimizer.warmup_ratio={o.warmup_ratio} is not in [0, 1)"),
            (o.learning_rate <= 0, f"optimizer.learning_rate={o.learning_rate} is not positive"),
            (self.batch_size % self.mesh.data != 0, f"batch_size={self.batch_size} is not a multiple of mesh.data"),
        ]
        if found := [text for bad, text in problems if bad]:
            raise RecipeError("recipe: " + "; ".join(found))

    def num_steps(self, num_rows: int) -> int:
        """Optimizer steps over `num_rows` sequences."""
        return self.train_steps or max(1, round(self.epochs * num_rows / self.batch_size))


def _ascending(buckets: tuple[int, ...] | None, last: int) -> bool:
    return buckets is None or (list(buckets) == sorted(set(buckets)) and all(0 < b <= last for b in buckets))


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Reads a YAML recipe and applies `a.b=value` overrides, values in YAML.

    Raises:
      RecipeError: the file is absent or not a mapping, a key is unknown, a value has the wrong type or makes no sense.
    """
    try:
        table = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise RecipeError(f"cannot read the recipe {path}: {error}") from error
    if not isinstance(table, dict):
        raise RecipeError(f"{path}: a recipe is a mapping of keys to values")
    for override in overrides:
        _override(table, override)
    return _build(Recipe, table, "")


def _override(table: dict[str, Any], override: str) -> None:
    key, found, text = override.partition("=")
    if not found:
        raise RecipeError(f"{override!r}: overrides are written key=value")
    *parents, last = key.strip().split(".")
    for name in parents:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise RecipeError(f"{key}: {name} has no keys of its own")
    table[last] = yaml.safe_load(text)


def _build(cls: type, table: Any, where: str) -> Any:
    """A frozen dataclass of a mapping, field by field."""
    if not isinstance(table, Mapping):
        raise RecipeError(f"{where.rstrip('.')}: expected keys and values, got {table!r}")
    hints = typing.get_type_hints(cls)
    if unknown := [str(key) for key in table if key not in hints]:
        raise RecipeError(_unknown(unknown[0], hints, where))
    return cls(**{key: _convert(value, hints[key], where + key) for key, value in table.items()})


def _unknown(key: str, known: Iterable[str], where: str) -> str:
    known = list(known)
    near = difflib.get_close_matches(key, known, n=1)
    advice = f"did you mean {where}{near[0]}?" if near else f"known here are {', '.join(known)}"
    return f"unknown recipe key {where}{key}: {advice}"


def _convert(value: Any, kind: Any, where: str) -> Any:
    """`value` as `kind`, one of: a dataclass, Literal, X | None, tuple[X, ...], dict, or a plain type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _build(typing.cast(type, kind), value or {}, where + ".")
    if origin in (types.UnionType, typing.Union):
        (inner,) = (a for a in arguments if a is not type(None))
        return None if value is None else _convert(value, inner, where)
    if origin is Literal:
        if value not in arguments:
            raise RecipeError(f"{where}={value!r} is not one of {', '.join(map(str, arguments))}")
        return value
    if origin is tuple:
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(_convert(item, arguments[0], f"{where}[{i}]") for i, item in enumerate(items))
    if origin is dict:
        return _checked(value, dict, where)
    return _number(value, where) if kind is float else _checked(value, kind, where)


def _number(value: Any, where: str) -> float:
    """YAML 1.1 reads 1e-4, without a point, as text."""
    try:
        return float(_checked(value, (int, float, str), where))
    except ValueError:
        raise RecipeError(f"{where}={value!r} is not a number") from None


def _checked(value: Any, kind: Any, where: str) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        name = kind.__name__ if isinstance(kind, type) else "number"
        raise RecipeError(f"{where}={value!r} is not of type {name}")
    return value


def to_yaml(recipe: Recipe) -> str:
    """The recipe with every default spelled out, as `load_recipe` reads it."""
    return yaml.safe_dump(_plain(dataclasses.asdict(recipe)), sort_keys=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


def flatten(recipe: Recipe) -> dict[str, Any]:
    """Dotted key to plain value, as JSON keeps it."""
    return dict(_flat(dataclasses.asdict(recipe), ""))


def _flat(table: Mapping[str, Any], where: str) -> Iterable[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict) and key != "template_kwargs":
            yield from _flat(value, f"{where}{key}.")
        else:
            yield where + key, list(value) if isinstance(value, tuple) else value
