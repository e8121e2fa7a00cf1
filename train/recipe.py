"""Recipes: what `eagle3 train` reads. Every key is a field below; an unknown one is an error that names the nearest."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

from eagle3_jax.meshes import parse_mesh
from eagle3_jax.sharding import MESH_AXES
from train.data.conversations import Overlong
from train.data.mask import ChangedTurns
from train.objective import Kind
from train.schema import RecipeError, build

READY = Path(__file__).parent / "recipes"
Log = Literal["tensorboard", "wandb"]


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
    """Acceptance on held-out prompts, predicted and as the engine measures it, see `train.held_out`.

    files: held-out rows in any format of data.files; of each, what comes before its last answer is the prompt.
    every: steps between two evaluations; 0: only at the end. num_drafts: K. max_rows: the first so many.
    max_tokens: of the answer that the engine writes to each prompt.
    """

    files: tuple[str, ...] = ()
    every: int = 0
    num_drafts: int = 3
    max_rows: int = 256
    max_tokens: int = 128


@dataclasses.dataclass(frozen=True)
class MeshRecipe:
    """Devices along each axis, see `eagle3_jax.sharding`; in a recipe also by name, as in `mesh: fsdp4 tp2`."""

    data: int = 1
    fsdp: int = 1
    expert: int = 1
    tensor: int = 1

    @property
    def num_devices(self) -> int:
        return self.data * self.fsdp * self.expert * self.tensor

    @property
    def batch_shards(self) -> int:
        """Over how many devices the rows of a batch are spread."""
        axes = MESH_AXES["batch"] or ()
        return math.prod(getattr(self, axis) for axis in ((axes,) if isinstance(axes, str) else axes))


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A training run.

    features: offline mode: a folder that `eagle3 data features` wrote, instead of data.files.
    target: folder or hub id. output: the run's folder. ttt_steps, decay: of the training-time test, and the weight of
    step i, decay**i. loss, kl_scale, kl_decay, hidden_weight: see `train.objective`. batch_size: sequences of one step
    of the optimizer. accumulate: in how many parts they are computed, one after another; the gradient is the whole
    batch's. train_steps, or else epochs, says how long. dtype: of computation; the head's master weights are float32.
    remat: compute each step of the drafter again in the backward pass, for memory. checkpoints: a folder that all hosts
    see, or a bucket, as gs://bucket/run; by default OUTPUT/checkpoints. keep: how many stay. log: where the numbers of
    metrics.jsonl go too. peak_flops: of one device, for MFU, where `train.flops` does not know it. export: write the
    head in SpecForge's format to OUTPUT/head at the end.
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
    hidden_weight: float = 0.0
    batch_size: int = 8
    accumulate: int = 1
    train_steps: int | None = None
    epochs: float = 1.0
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    remat: bool = False
    seed: int = 0
    save_every: int = 1000
    checkpoints: str | None = None
    keep: int = 2
    log_every: int = 20
    log: tuple[Log, ...] = ()
    peak_flops: float | None = None
    export: bool = True

    def __post_init__(self) -> None:
        o = self.optimizer
        problems = [
            (not self.target, "target is missing: the folder or hub id of the model to draft for"),
            (not self.output, "output is missing: the folder of this run"),
            ("://" in self.output, f"output={self.output} is no folder; of a bucket only checkpoints= can be"),
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
            (self.hidden_weight < 0, f"hidden_weight={self.hidden_weight} is negative"),
            (self.batch_size < 1, f"batch_size={self.batch_size} is below 1"),
            (self.accumulate < 1, f"accumulate={self.accumulate} is below 1"),
            (self.train_steps is not None and self.train_steps < 1, f"train_steps={self.train_steps} is below 1"),
            (self.evaluate.num_drafts < 1, f"evaluate.num_drafts={self.evaluate.num_drafts} is below 1"),
            (self.evaluate.every < 0, f"evaluate.every={self.evaluate.every} is negative"),
            (self.evaluate.max_tokens < 1, f"evaluate.max_tokens={self.evaluate.max_tokens} is below 1"),
            (min(dataclasses.astuple(self.mesh)) < 1, f"{self.mesh} has an axis below 1"),
            (self.peak_flops is not None and self.peak_flops <= 0, f"peak_flops={self.peak_flops} is not positive"),
            (self.epochs <= 0, f"epochs={self.epochs} is not positive"),
            (min(self.save_every, self.keep, self.log_every) < 1, "save_every, keep and log_every must be at least 1"),
            (not 0 <= o.warmup_ratio < 1, f"optimizer.warmup_ratio={o.warmup_ratio} is not in [0, 1)"),
            (o.learning_rate <= 0, f"optimizer.learning_rate={o.learning_rate} is not positive"),
            (self.batch_size % self._parts != 0, f"batch_size={self.batch_size} is not a multiple of {self._parts}: "
             f"accumulate={self.accumulate} parts, their rows over {self.mesh.batch_shards} devices"),
        ]  # fmt: skip
        if found := [text for bad, text in problems if bad]:
            raise RecipeError("recipe: " + "; ".join(found))

    @property
    def _parts(self) -> int:
        return max(1, self.accumulate * self.mesh.batch_shards)

    def num_steps(self, num_rows: int) -> int:
        """Optimizer steps over `num_rows` sequences."""
        return self.train_steps or max(1, round(self.epochs * num_rows / self.batch_size))


def _ascending(buckets: tuple[int, ...] | None, last: int) -> bool:
    return buckets is None or (list(buckets) == sorted(set(buckets)) and all(0 < b <= last for b in buckets))


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Reads a YAML recipe, a file or a ready one by its name, and applies `a.b=value` overrides, values in YAML.

    Raises:
      RecipeError: the file is absent or not a mapping, a key is unknown, a value has the wrong type or makes no sense.
    """
    path = _find(Path(path))
    try:
        table = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise RecipeError(f"cannot read the recipe {path}: {error}") from error
    if not isinstance(table, dict):
        raise RecipeError(f"{path}: a recipe is a mapping of keys to values")
    for override in overrides:
        _name_mesh(table)
        _override(table, override)
    _name_mesh(table)
    return build(Recipe, table, "")


def _name_mesh(table: dict[str, Any]) -> None:
    """Spells out a mesh given by name, as "fsdp4 tp2"."""
    if isinstance(table.get("mesh"), str):
        table["mesh"] = dataclasses.asdict(parse_mesh(table["mesh"]))


def ready_recipes() -> list[str]:
    """Names of the recipes that come with this package."""
    return sorted(path.stem for path in READY.glob("*.yaml"))


def _find(path: Path) -> Path:
    """The file itself, or the ready recipe of that name."""
    if path.exists() or len(path.parts) != 1 or path.suffix in (".yaml", ".yml"):
        return path
    ready = READY / f"{path}.yaml"
    if not ready.is_file():
        raise RecipeError(f"no recipe file {path}, and no ready recipe; those are {', '.join(ready_recipes())}")
    return ready


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
