"""Meshes by name: "tp8", "fsdp16 tp4", "dp2 ep4 tp2", or axis by axis as in "data=2 tensor=4".

A shape that a model or a machine cannot have is refused, and the nearest that works is named.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from jax.sharding import Mesh

from eagle3_jax.config import DELTA, DraftConfig, TargetConfig
from eagle3_jax.errors import ConfigError
from eagle3_jax.sharding import make_mesh

_NAMES = {"dp": "data", "fsdp": "fsdp", "ep": "expert", "tp": "tensor"}
_SHORT = {axis: name for name, axis in _NAMES.items()}
_PART = re.compile(rf"({'|'.join([*_NAMES, *_SHORT])})=?(\d+)")


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """Devices along each axis."""

    data: int = 1
    fsdp: int = 1
    expert: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        return math.prod(dataclasses.astuple(self))

    @property
    def rows(self) -> int:
        """Over how many parts the rows of a training batch are spread."""
        return self.data * self.fsdp

    def __str__(self) -> str:
        parts = [f"{_SHORT[axis]}{count}" for axis, count in dataclasses.asdict(self).items() if count > 1]
        return " ".join(parts) or "tp1"

    def mesh(self, devices: Sequence[Any] | None = None) -> Mesh:
        """The mesh over the first devices. Raises ConfigError where they are too few."""
        return make_mesh(**dataclasses.asdict(self), devices=devices)


def parse_mesh(text: str) -> MeshShape:
    """Reads a name.

    Raises:
      ConfigError: it is none.
    """
    axes: dict[str, int] = {}
    for part in text.replace(",", " ").split():
        match = _PART.fullmatch(part.lower())
        axis = _NAMES.get(match[1], match[1]) if match else ""
        if match is None or axis in axes or int(match[2]) < 1:
            known = ", ".join(f"{name} ({axis})" for name, axis in _NAMES.items())
            problem = "is given twice" if match and axis in axes else "is no axis and its size"
            raise ConfigError(f"mesh {text!r}: {part!r} {problem}; write for instance 'dp2 tp4', of {known}")
        axes[axis] = int(match[2])
    if not axes:
        raise ConfigError(f"mesh {text!r} names no axis; write for instance 'tp8' or 'dp2 tp4'")
    return MeshShape(**axes)


def check_mesh(shape: MeshShape, devices: int, target: TargetConfig, draft: DraftConfig | None = None) -> None:
    """Refuses a shape that the machine or the models cannot have.

    Heads of keys and values and of the delta rule may be fewer than the tensor axis: then they are on every device.

    Raises:
      ConfigError: it says why, and names the nearest shape that works.
    """
    found = problems(shape, devices, target, draft)
    if not found:
        return
    near = nearest_mesh(shape, devices, target, draft)
    raise ConfigError(f"mesh {str(shape)!r}: {'; '.join(found)}. The nearest that works here is {str(near)!r}")


def problems(shape: MeshShape, devices: int, target: TargetConfig, draft: DraftConfig | None = None) -> list[str]:
    """What is wrong with a shape, [] if nothing is."""
    found = [] if shape.size <= devices else [f"it needs {shape.size} devices, and there are {devices}"]
    for axis in ("fsdp", "expert", "tensor"):
        found += _axis_problems(axis, getattr(shape, axis), target, draft)
    return found


def _axis_problems(axis: str, count: int, target: TargetConfig, draft: DraftConfig | None) -> list[str]:
    if count == 1:
        return []
    if axis == "expert" and not target.num_experts:
        return ["a dense target has no experts to spread"]
    wrong = [(what, size) for what, size in _divided(axis, target, draft) if size % count]
    return [f"{what} ({size}) cannot be divided by {_SHORT[axis]}{count}" for what, size in wrong]


def _divided(axis: str, target: TargetConfig, draft: DraftConfig | None) -> Iterable[tuple[str, int]]:
    """What an axis cuts into equal parts."""
    if axis == "expert":
        yield "the target's experts", target.num_experts
    elif axis == "fsdp":
        yield "the target's width", target.hidden_size
        if draft is not None:
            yield "the head's width", draft.hidden_size
    else:
        yield "the target's attention heads", target.num_heads
        if draft is not None:
            yield "the head's attention heads", draft.num_heads


def replicated_heads(shape: MeshShape, target: TargetConfig) -> list[str]:
    """Which heads are whole on every device of the tensor axis, because they do not divide: room and time lost."""
    kinds = [("key/value heads", target.num_kv_heads)]
    if DELTA in target.layer_types:
        kinds += [("delta-rule key heads", target.linear_num_key_heads)]
        kinds += [("delta-rule value heads", target.linear_num_value_heads)]
    return [f"{count} {what}" for what, count in kinds if count % shape.tensor]


def nearest_mesh(shape: MeshShape, devices: int, target: TargetConfig, draft: DraftConfig | None = None) -> MeshShape:
    """The shape that works and differs least, by the sum of the axes' ratios; of several, the largest."""

    def sizes(axis: str) -> list[int]:
        tried = {n for n in range(1, min(devices, 64) + 1)} | {2**i for i in range(devices.bit_length())}
        tried |= {min(getattr(shape, axis), devices)}
        return sorted(n for n in tried if n <= devices and not _axis_problems(axis, n, target, draft))

    def distance(other: MeshShape) -> tuple[float, int, int]:
        pairs = zip(dataclasses.astuple(shape), dataclasses.astuple(other), strict=True)
        return sum(abs(math.log(a / b)) for a, b in pairs), -other.size, other.data

    wide = [sizes(axis) for axis in ("fsdp", "expert", "tensor")]
    found = [
        MeshShape(data, *rest)
        for rest in itertools.product(*wide)
        if (room := devices // math.prod(rest)) >= 1
        for data in {1, min(shape.data, room), room}
    ]
    return min(found, key=distance)
