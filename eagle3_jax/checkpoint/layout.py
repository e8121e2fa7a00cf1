"""How stored tensors lie in our parameters: a table of names and layouts, read in both directions.

Each rule says where parameters of ours come from. Loading asks it for the names to look for, saving for the names to
write. Our names follow Hugging Face's, so that most of the table is two lines: `X.kernel` is `X.weight` transposed,
everything else is itself.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from eagle3_jax.config import TargetConfig

Array = np.ndarray[Any, Any]
Index = tuple[slice, ...]


class Layout:
    """The stored tensor has the parameter's own layout. Subclasses differ in how they are turned."""

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The stored shape of a parameter (or of one expert's part of it) of shape `shape`."""
        return shape

    def parts(self, out: Array, index: Index) -> Iterable[tuple[Array, Index]]:
        """What fills `out`, which is to hold the part `index` of the parameter: views of it, each with a part of the
        stored tensor. Together these are all that must be read, and no more.
        """
        yield out, index

    def put(self, out: Array, ours: Array) -> None:
        """The inverse: writes the whole parameter `ours` into the stored tensor `out`, or into its share of it."""
        out[...] = ours


class Transpose(Layout):
    """Linear layers: [out, in] stored, [in, out] ours; and fused experts, [E, out, in] stored, [E, in, out] ours."""

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-2], shape[-1], shape[-2])

    def parts(self, out: Array, index: Index) -> Iterable[tuple[Array, Index]]:
        yield out.swapaxes(-1, -2), (*index[:-2], index[-1], index[-2])

    def put(self, out: Array, ours: Array) -> None:
        out[...] = ours.swapaxes(-1, -2)


@dataclasses.dataclass(frozen=True, eq=False)
class Half(Transpose):
    """One of two projections stored as one: [E, 2 width, in] stored, [E, in, width] ours."""

    width: int
    first: int

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[0], 2 * self.width, shape[1])

    def parts(self, out: Array, index: Index) -> Iterable[tuple[Array, Index]]:
        start, stop, _ = index[2].indices(self.width)
        yield out.swapaxes(-1, -2), (index[0], slice(self.first + start, self.first + stop), index[1])

    def put(self, out: Array, ours: Array) -> None:
        super().put(out[:, self.first : self.first + self.width], ours)


class DepthwiseConv(Layout):
    """Depthwise convolution: [C, 1, taps] stored, [taps, C] ours."""

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[1], 1, shape[0])

    def parts(self, out: Array, index: Index) -> Iterable[tuple[Array, Index]]:
        yield out.T[:, None], (index[1], slice(0, 1), index[0])

    def put(self, out: Array, ours: Array) -> None:
        out[...] = ours.T[:, None]


@dataclasses.dataclass(frozen=True, eq=False)
class Rows(Layout):
    """Some output rows of a packed linear layer: stored [packed, in], ours [in, len(rows)]."""

    rows: np.ndarray[Any, np.dtype[np.int64]]
    packed: int

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (self.packed, shape[0])

    def parts(self, out: Array, index: Index) -> Iterable[tuple[Array, Index]]:
        """Rows that follow one another in both are one part: those of a head."""
        rows, at = self.rows[index[1]], 0
        for run in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1):
            if len(run):
                yield out.T[at : at + len(run)], (slice(int(run[0]), int(run[-1]) + 1), index[0])
                at += len(run)

    def put(self, out: Array, ours: Array) -> None:
        out[self.rows] = ours.T


SAME, TRANSPOSE, CONV = Layout(), Transpose(), DepthwiseConv()


@dataclasses.dataclass(frozen=True)
class Piece:
    """A stored tensor and its place in a parameter: all of it, or one expert's matrix."""

    name: str
    layout: Layout
    expert: int | None = None

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """What the stored tensor's shape must be when the parameter's is `shape`."""
        return self.layout.stored_shape(shape if self.expert is None else shape[1:])

    def own_part(self, parameter: Array) -> Array:
        """The part of the whole parameter that this piece holds."""
        return parameter if self.expert is None else parameter[self.expert]


Maker = Callable[[re.Match[str], tuple[int, ...]], list[Piece]]


@dataclasses.dataclass(frozen=True)
class Rule:
    """For parameters whose dotted path matches `path` whole: the pieces they are made of."""

    path: str
    pieces: Maker


def one(template: str, layout: Layout) -> Maker:
    """The parameter is one stored tensor; `template` may use the groups of the rule's path."""
    return lambda match, shape: [Piece(match.expand(template), layout)]


def half(template: str, which: int) -> Maker:
    """The parameter is the first (0) or the second (1) projection of a stored tensor that has two, of every expert."""
    return lambda match, shape: [Piece(match.expand(template), Half(shape[2], which * shape[2]))]


def per_expert(template: str) -> Maker:
    """[E, in, out] from E tensors, as most checkpoints store mixtures."""

    def pieces(match: re.Match[str], shape: tuple[int, ...]) -> list[Piece]:
        return [Piece(match.expand(template).format(expert=e), TRANSPOSE, e) for e in range(shape[0])]

    return pieces


EVERY_FAMILY = (
    Rule(r"(.+\.conv1d)\.weight", one(r"\1.weight", CONV)),
    Rule(r"(.+)\.kernel", one(r"\1.weight", TRANSPOSE)),
    Rule(r"(.+)", one(r"\1", SAME)),
)
FUSED_EXPERTS = (
    Rule(r"(.+\.experts)\.gate_proj", half(r"\1.gate_up_proj", 0)),
    Rule(r"(.+\.experts)\.up_proj", half(r"\1.gate_up_proj", 1)),
    Rule(r"(.+\.experts)\.down_proj", one(r"\1.down_proj", TRANSPOSE)),
)
SEPARATE_EXPERTS = (Rule(r"(.+\.experts)\.(gate|up|down)_proj", per_expert(r"\1.{expert}.\2_proj.weight")),)


def rules_for(config: TargetConfig) -> tuple[Rule, ...]:
    """The table of a family. A parameter's rules are alternatives when loading; saving takes the first."""
    packed = _packed_projections(config) if config.model_type == "qwen3_next" else ()
    experts = (
        FUSED_EXPERTS + SEPARATE_EXPERTS if config.model_type == "qwen3_5_moe" else SEPARATE_EXPERTS + FUSED_EXPERTS
    )
    return (*packed, *experts, *EVERY_FAMILY)


def _packed_projections(config: TargetConfig) -> tuple[Rule, ...]:
    """Qwen3-Next packs, for each key head, its q, k and its value heads' v, z; and likewise b, a.

    After `fix_query_key_value_ordering` of transformers' modeling_qwen3_next.py.
    """
    heads, dk = config.linear_num_key_heads, config.linear_key_head_dim
    ratio = config.linear_num_value_heads // max(heads, 1)
    wide = ratio * config.linear_value_head_dim
    q, k, v, z = _split_groups(heads, (dk, dk, wide, wide))
    b, a = _split_groups(heads, (ratio, ratio))
    shares = {"qkv": (np.concatenate([q, k, v]), "qkvz"), "z": (z, "qkvz"), "b": (b, "ba"), "a": (a, "ba")}
    packed = {"qkvz": heads * 2 * (dk + wide), "ba": heads * 2 * ratio}
    return tuple(
        Rule(rf"(.+)\.in_proj_{ours}\.kernel", one(rf"\1.in_proj_{stored}.weight", Rows(rows, packed[stored])))
        for ours, (rows, stored) in shares.items()
    )


def _split_groups(groups: int, widths: Sequence[int]) -> list[Array]:
    """Row numbers of each part, over all groups, when every group holds its parts one after another."""
    table = np.arange(groups * sum(widths)).reshape(groups, sum(widths))
    return [part.ravel() for part in np.split(table, np.cumsum(widths)[:-1], axis=1)]


def alternatives(path: str, shape: tuple[int, ...], rules: Sequence[Rule]) -> list[list[Piece]]:
    """The ways in which parameter `path` may be stored, the family's own first.

    A general rule (X.kernel is X.weight) does not apply where a particular one does.
    """
    matching = [(rule, match) for rule in rules if (match := re.fullmatch(rule.path, path))]
    particular = [pair for pair in matching if pair[0] not in EVERY_FAMILY]
    return [rule.pieces(match, shape) for rule, match in particular or matching[:1]]


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter to be filled: `path` dotted, `shape` and `dtype` as the model declares them."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
