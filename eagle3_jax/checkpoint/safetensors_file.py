"""The safetensors format: 8 bytes of header length, a JSON header, then the tensors' bytes.

Read by hand, not through the `safetensors` package, for three reasons: every fault of a header is collected instead
of raising at the first, only headers are read until a tensor is asked for, and of a tensor only the part that is asked
for (see `ranges`).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from eagle3_jax.checkpoint.ranges import Stored, bounds_of, count

DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(kind)
    for name, kind in {
        "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
        "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
        "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
    }.items()
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER = 100_000_000  # as the safetensors package: larger is not a header but another kind of file


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: `offset` bytes into `file`; `strides` in elements, None when it is laid out row by row."""

    name: str
    file: Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def read(self) -> np.ndarray[Any, Any]:
        """A read-only memory map of the tensor: bytes are fetched when they are touched, and counted as if all were."""
        if not self.size:
            return np.zeros(self.shape, self.dtype)
        count(self.nbytes)
        return self._map()

    def read_into(self, out: np.ndarray[Any, Any], index: tuple[slice, ...]) -> None:
        """Copies the part `index` into `out`, which has its shape and any dtype and strides, reading only its bytes.

        Raises:
          CheckpointError: the file cannot be read, or ends before the tensor does.
        """
        if self.strides is None:
            stored = Stored(self.name, self.file, self.dtype, self.shape, self.offset)
            stored.read_into(out, bounds_of(index, self.shape))
        elif out.size:
            count(out.size * self.dtype.itemsize)
            out[...] = self._map()[index]

    def _map(self) -> np.ndarray[Any, Any]:
        if self.strides is None:
            return np.memmap(self.file, self.dtype, "r", self.offset, self.shape)
        extent = 1 + sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))
        flat = np.memmap(self.file, self.dtype, "r", self.offset, (extent,))
        steps = [step * self.dtype.itemsize for step in self.strides]
        return np.lib.stride_tricks.as_strided(flat, self.shape, steps, writeable=False)


def read_header(file: Path) -> tuple[dict[str, TensorInfo], list[str]]:
    """The tensors of one file, and what is wrong with it. A tensor that is itself at fault is left out."""
    total = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        if len(start) < 8:
            return {}, [f"{file.name}: not a safetensors file ({total} bytes)"]
        (length,) = struct.unpack("<Q", start)
        if length > MAX_HEADER:
            return {}, [f"{file.name}: not a safetensors file (its header would be {length} bytes long)"]
        if 8 + length > total:
            return {}, [f"{file.name}: truncated inside its header ({total} of at least {8 + length} bytes)"]
        text = stream.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        return {}, [f"{file.name}: not a safetensors file ({error})"]
    if not isinstance(header, dict):
        return {}, [f"{file.name}: not a safetensors file (its header is not a table)"]
    return _read_entries(file, header, 8 + length, total)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it names {sorted({n for n in names if names.count(n) > 1})} twice")
    return table


def _read_entries(
    file: Path, header: Mapping[str, Any], base: int, total: int
) -> tuple[dict[str, TensorInfo], list[str]]:
    tensors: dict[str, TensorInfo] = {}
    problems: list[str] = []
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        parsed = _read_entry(name, entry, file, base)
        if isinstance(parsed, str):
            problems.append(f"{file.name}: tensor {name!r}: {parsed}")
            continue
        tensors[name] = parsed
        spans.append((parsed.offset, parsed.offset + parsed.nbytes, name))
    end = max((stop for _, stop, _ in spans), default=base)
    if end > total:
        beyond = [name for _, stop, name in spans if stop > total]
        shown = ", ".join(beyond[:5]) + (f" and {len(beyond) - 5} more" if len(beyond) > 5 else "")
        problems.append(f"{file.name}: truncated, {total} bytes where its header needs {end}: {shown} incomplete")
    elif end < total:
        problems.append(f"{file.name}: {total - end} bytes after the last tensor that its header does not explain")
    for (_, stop, first), (start, _, second) in itertools.pairwise(sorted(spans)):
        if start < stop:
            problems.append(f"{file.name}: tensors {first!r} and {second!r} overlap")
    return tensors, problems


def _read_entry(name: str, entry: Any, file: Path, base: int) -> TensorInfo | str:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        return "its header entry lacks dtype, shape or data_offsets"
    shape, offsets = entry["shape"], entry["data_offsets"]
    if entry["dtype"] not in DTYPES:
        return f"dtype {entry['dtype']!r} is not supported"
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        return f"its shape {shape!r} or data_offsets {offsets!r} are not natural numbers"
    info = TensorInfo(name, file, DTYPES[entry["dtype"]], tuple(shape), base + offsets[0])
    if offsets[1] - offsets[0] != info.nbytes:
        return (
            f"{entry['dtype']} {list(shape)} needs {info.nbytes} bytes, its header gives it {offsets[1] - offsets[0]}"
        )
    return info


def _naturals(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values)


@dataclasses.dataclass(frozen=True)
class Outgoing:
    """A tensor to be written; `make` is called when its turn comes, so that one at a time is in memory."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray[Any, Any]]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_file(file: Path, tensors: Mapping[str, Outgoing]) -> None:
    """Writes `tensors` in the order given, one at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file without it
    at = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start aligned
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for name, tensor in tensors.items():
            array = np.ascontiguousarray(tensor.make())
            if array.shape != tensor.shape or array.dtype != tensor.dtype:
                raise ValueError(f"{name}: announced {tensor.dtype} {tensor.shape}, got {array.dtype} {array.shape}")
            stream.write(array.reshape(-1).view(np.uint8).data)
