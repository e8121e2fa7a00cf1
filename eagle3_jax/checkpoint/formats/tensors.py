"""The tensors of a head: their names in every spelling, the shapes that a config asks for, what is wrong with them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from eagle3_jax.checkpoint.fill import make_plan
from eagle3_jax.checkpoint.formats.head import EMBEDDING, OUTPUT, TABLES, Tensor, array_of
from eagle3_jax.checkpoint.layout import EVERY_FAMILY, Parameter
from eagle3_jax.checkpoint.safetensors_file import TensorInfo
from eagle3_jax.checkpoint.vocab_map import Reading, VocabMap, read_vocab_map
from eagle3_jax.config import DraftConfig, RopeConfig

IGNORED = re.compile(r"verifier_(norm|lm_head)\..+|.*rotary_emb\.inv_freq")
LATER = re.compile(r"additional_layers\.(\d{1,3})\.(.+)")
LAYER_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
ROWS = 4096  # read at a time
_ROPE = RopeConfig(rotary_dim=1)


def named(tensors: Iterable[TensorInfo]) -> tuple[dict[str, TensorInfo], list[str], list[str]]:
    """Tensors under our names, what was left out, and what is there twice."""
    table: dict[str, TensorInfo] = {}
    left_out: list[str] = []
    problems = []
    for info in tensors:
        name = our_name(info.name)
        if IGNORED.fullmatch(name):
            left_out.append(info.name)
        elif name in table:
            problems.append(f"{info.name} and {table[name].name} are the same parameter")
        else:
            table[name] = info
    return table, left_out, problems


def our_name(name: str) -> str:
    """`midlayer.` is layer 0, SGLang's `additional_layers.` follow it, a `model.` in front says nothing."""
    name = name.removeprefix("model.")
    if name.startswith("midlayer."):
        return f"layers.0.{name.removeprefix('midlayer.')}"
    if later := LATER.fullmatch(name):  # SGLang calls the first norm of a later layer hidden_norm
        return f"layers.{int(later[1]) + 1}.{later[2].replace('hidden_norm', 'input_layernorm')}"
    return name


def spelling(table: Mapping[str, TensorInfo]) -> Callable[[str], str]:
    """From our names to what the folder would call such a tensor."""
    midlayer = any("midlayer." in info.name for info in table.values())
    return lambda name: name.replace("layers.0.", "midlayer.") if midlayer else name


def stored_shapes(config: DraftConfig, *, embedding: bool, tied: bool = False) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight of a head, linear layers as [out, in]."""
    c = config
    fused = len(c.aux_layers) * c.target_hidden_size
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (c.hidden_size, fused), "norm.weight": (c.hidden_size,)}
    if not tied:
        shapes[OUTPUT] = (c.draft_vocab_size, c.hidden_size)
    if embedding:
        shapes[EMBEDDING] = (c.vocab_size, c.hidden_size)
    if c.norm_before_fc:
        shapes["input_norm.weight"] = (fused,)
    if c.fc_norm:
        shapes |= {f"fc_norm.{a}.weight": (c.target_hidden_size,) for a in range(len(c.aux_layers))}
    for i in range(c.num_layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in _layer_shapes(c, first=i == 0)}
    return shapes


def _layer_shapes(c: DraftConfig, *, first: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    d, q, kv, d_in = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.hidden_size * (1 + first)
    for norm in LAYER_NORMS:
        if first or norm != "hidden_norm":
            yield f"{norm}.weight", (d,)
    for name, rows, columns in (("q", q, d_in), ("k", kv, d_in), ("v", kv, d_in), ("o", d, q)):
        yield f"self_attn.{name}_proj.weight", (rows, columns)
        if c.attention_bias:
            yield f"self_attn.{name}_proj.bias", (rows,)
    if c.qk_norm:
        yield from ((f"self_attn.{name}_norm.weight", (c.head_dim,)) for name in "qk")
    yield from ((f"mlp.{name}_proj.weight", (c.intermediate_size, d)) for name in ("gate", "up"))
    yield "mlp.down_proj.weight", (d, c.intermediate_size)


def tensor_problems(table: Mapping[str, TensorInfo], config: DraftConfig, *, tied: bool) -> list[str]:
    """Missing, misshapen and unknown weights, all of them."""
    shapes = stored_shapes(config, embedding=config.own_embedding or EMBEDDING in table, tied=tied)
    weights = {name: info for name, info in table.items() if name not in TABLES}
    wanted = [Parameter(name, shape, np.dtype(np.float32)) for name, shape in shapes.items()]
    return list(make_plan(wanted, weights, EVERY_FAMILY, spelling(table)).problems)


def name_problems(table: Mapping[str, TensorInfo]) -> list[str]:
    """What can be said of the names alone, where the config is too broken to tell shapes."""
    sample = DraftConfig(1, 1, 1, 1, 1, 1, 1, 1, (0,), _ROPE)
    required = stored_shapes(sample, embedding=False)
    problems = [f"missing: {spelling(table)(name)}" for name in required if name not in table]
    optional = re.compile(
        r"embed_tokens\.weight|input_norm\.weight|fc_norm\.\d+\.weight|d2t|t2d|layers\.\d+\.(self_attn|mlp)\..+"
        r"|layers\.[1-9]\d*\.(input_layernorm|post_attention_layernorm)\.weight"
    )
    unknown = [info for name, info in table.items() if name not in required and not optional.fullmatch(name)]
    return problems + [f"unknown: {info.name} {list(info.shape)} in {info.file.name}" for info in unknown]


def vocabulary(table: Mapping[str, TensorInfo], config: DraftConfig, reading: Reading | None = None) -> VocabMap:
    """The draft vocabulary as absolute target ids; reads the two tables and nothing else."""
    wanted = {"d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,)}
    wrong = [
        f"wrong shape: {name}: expected {list(shape)}, found {list(table[name].shape)}"
        for name, shape in wanted.items()
        if name in table and table[name].shape != shape
    ]
    if wrong:  # before anything is read: an absurd shape cannot even be mapped
        return VocabMap(np.zeros(0, np.int32), "unreadable", tuple(wrong))
    d2t, t2d = (table[name].read() if name in table else None for name in TABLES)
    return read_vocab_map(d2t, t2d, config.draft_vocab_size, config.vocab_size, reading)


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Weights that hold a NaN or an infinity. Reads everything, a few rows at a time."""
    found = [name for name, tensor in tensors.items() if not is_finite(array_of(tensor))]
    return [f"{name} holds NaN or infinite values" for name in found]


def is_finite(array: np.ndarray[Any, Any]) -> bool:
    """Whether all values are numbers that can be computed with; integers always are."""
    if array.dtype.kind in "biu":
        return True
    rows = array.reshape(-1, array.shape[-1]) if array.ndim > 1 else array[None]
    return all(bool(np.isfinite(rows[i : i + ROWS]).all()) for i in range(0, len(rows), ROWS))


class Rows(Protocol):
    """A matrix that can be read a few rows at a time: an array, or one still in a file or on a device."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, rows: slice, /) -> np.ndarray[Any, Any]: ...


def difference(ours: TensorInfo, theirs: Rows) -> float:
    """Relative error of one embedding against another of the same shape."""
    error = scale = 0.0
    mine = ours.read()
    for start in range(0, ours.shape[0], ROWS):
        part = np.asarray(theirs[start : start + ROWS]).astype(np.float32)
        error += float(np.sum(np.square(part - mine[start : start + ROWS].astype(np.float32)), dtype=np.float64))
        scale += float(np.sum(np.square(part), dtype=np.float64))
    return (error / scale) ** 0.5 if scale else float("inf")


def embedding_note(info: TensorInfo, target: Rows | None) -> tuple[str, bool]:
    """What is to be said of a folder's embedding beside the target's, and whether it is a warning; "" when equal."""
    if target is None:
        return "the folder's embed_tokens is not used, the target's is; they were not compared", False
    if info.shape != tuple(target.shape):
        shapes = f"{list(info.shape)}, the target's {list(target.shape)}"
        return f"the folder's embed_tokens is {shapes}, which is used", True
    error = difference(info, target)
    if error < 0.01:  # half precision of either kind
        return "", False
    text = f"the folder's embed_tokens differs from the target's (relative error {error:.2g}); the target's is used"
    return text, True
