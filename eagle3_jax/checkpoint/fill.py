"""From tensors of a checkpoint to arrays of a model: first a plan with every problem, then one array at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from eagle3_jax.checkpoint.block_fp8 import BlockTensor
from eagle3_jax.checkpoint.layout import Index, Parameter, Piece, Rows, Rule, Transpose, alternatives
from eagle3_jax.checkpoint.ranges import bounds_of
from eagle3_jax.checkpoint.safetensors_file import TensorInfo

Found = tuple[Piece, TensorInfo]
Host = np.ndarray[Any, Any]
Bounds = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Where each parameter's pieces lie; `problems` is empty when the checkpoint is good."""

    pieces: dict[Parameter, tuple[Found, ...]]
    problems: tuple[str, ...]


def make_plan(
    parameters: Iterable[Parameter],
    tensors: Mapping[str, TensorInfo],
    rules: Sequence[Rule],
    full_name: Callable[[str], str] = str,
) -> Plan:
    """Matches parameters with tensors, both ways.

    `tensors` is keyed by the names that the rules speak of; `full_name` gives the checkpoint's own name of one that is
    missing.
    """
    pieces: dict[Parameter, tuple[Found, ...]] = {}
    problems: list[str] = []
    used: set[str] = set()
    for parameter in parameters:
        chosen = _choose(alternatives(parameter.path, parameter.shape, rules), tensors)
        present = [p for p in chosen if p.name in tensors]
        used.update(p.name for p in present)
        absent = [p for p in chosen if p.name not in tensors]
        problems += [f"missing: {full_name(p.name)}, expected {list(p.stored_shape(parameter.shape))}" for p in absent]
        problems += [fault for p in present if (fault := _fault(p, tensors[p.name], parameter))]
        pieces[parameter] = tuple((p, tensors[p.name]) for p in present)
    problems += [
        f"unknown: {info.name} {list(info.shape)} in {info.file.name}"
        for name, info in tensors.items()
        if name not in used
    ]
    # A packed tensor is missed by each of its parameters: say it once.
    return Plan(pieces, tuple(dict.fromkeys(problems)))


def _choose(ways: list[list[Piece]], tensors: Mapping[str, TensorInfo]) -> list[Piece]:
    """The way of storing of which most is there; the family's own when nothing is."""
    return max(ways, key=lambda way: sum(p.name in tensors for p in way) / len(way))


def _fault(piece: Piece, info: TensorInfo, parameter: Parameter) -> str:
    where = f"{info.name} in {info.file.name}"
    expected = piece.stored_shape(parameter.shape)
    if info.shape != expected:
        return f"wrong shape: {where}: expected {list(expected)}, found {list(info.shape)}"
    with_scales = isinstance(info, BlockTensor) and isinstance(piece.layout, Transpose | Rows)
    if _kind(info.dtype) != _kind(parameter.dtype) and not with_scales:
        return f"wrong dtype: {where}: expected {_kind(parameter.dtype)} values, found {info.dtype}"
    return ""


def _kind(dtype: np.dtype[Any]) -> str:
    if dtype == np.bool_:
        return "boolean"
    if np.issubdtype(dtype, np.integer):
        return "integer"
    return "quantised float" if dtype.itemsize == 1 else "float"


def read_part(parameter: Parameter, found: Sequence[Found], index: Index) -> Host:
    """The part `index` of a parameter in host memory, of its dtype, owning its memory."""
    bounds = bounds_of(index, parameter.shape)
    out = np.empty([stop - start for start, stop in bounds], parameter.dtype)
    for piece, info in found:
        view, part = (out, index) if piece.expert is None else _of_expert(out, piece.expert, bounds)
        for target, stored in piece.layout.parts(view, part) if view.size else ():
            info.read_into(target, stored)
    return out


def _of_expert(out: Host, expert: int, bounds: Bounds) -> tuple[Host, Index]:
    """Where an expert's matrix goes in `out`, and which part of it; empty when `out` has none of it."""
    (first, last), *part = bounds
    mine = out[expert - first] if first <= expert < last else out[:0]
    return mine, tuple(slice(*pair) for pair in part)


def to_device(parameter: Parameter, found: Sequence[Found], sharding: Sharding | None) -> jax.Array:
    """Reads one parameter onto the device, or the parts of this process's devices when sharded.

    Each part is read once and waited for on its devices before the next is read, so that one is in memory at a time:
    `jax.make_array_from_callback` would read for every device, and hold all of it.
    """
    if sharding is None:
        whole = tuple(slice(0, n) for n in parameter.shape)
        return jax.block_until_ready(jax.device_put(read_part(parameter, found, whole)))
    held: dict[jax.Device, jax.Array] = {}
    for index, devices in _parts(parameter.shape, sharding).items():
        part = read_part(parameter, found, tuple(slice(*pair) for pair in index))
        held |= {device: jax.block_until_ready(jax.device_put(part, device)) for device in devices}
        del part  # before the next one is made
    arrays = [held[device] for device in sharding.addressable_devices_indices_map(parameter.shape)]
    return jax.make_array_from_single_device_arrays(parameter.shape, sharding, arrays, dtype=parameter.dtype)


def _parts(shape: tuple[int, ...], sharding: Sharding) -> dict[Bounds, list[jax.Device]]:
    """What this process's devices hold of an array, and which of them hold the same."""
    parts: dict[Bounds, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        parts.setdefault(bounds_of(index or (), shape), []).append(device)
    return parts


def fill(plan: Plan, place: Callable[[Parameter, tuple[Found, ...]], Any]) -> dict[str, Any]:
    """The arrays of the plan by path, read in the order in which they lie in the files."""
    order = sorted(plan.pieces.items(), key=lambda item: (str(item[1][0][1].file), item[1][0][1].offset))
    return {parameter.path: place(parameter, found) for parameter, found in order}
