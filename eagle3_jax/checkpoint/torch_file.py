"""`pytorch_model.bin` without torch and without executing anything.

Since torch 1.6 the file is a zip archive: `data.pkl` describes the tensors, `data/0`, `data/1`, ... hold their bytes,
stored and not compressed. Unpickling may call any function the file names, so the unpickler here knows only
descriptions of tensors and refuses every other name.
"""

from __future__ import annotations

import collections
import dataclasses
import io
import math
import pickle
import pickletools
import struct
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from eagle3_jax.checkpoint.safetensors_file import TensorInfo

STORAGES: dict[str, np.dtype[Any]] = {
    name: np.dtype(kind)
    for name, kind in {
        "DoubleStorage": np.float64, "FloatStorage": np.float32, "HalfStorage": np.float16,
        "BFloat16Storage": ml_dtypes.bfloat16, "LongStorage": np.int64, "IntStorage": np.int32,
        "ShortStorage": np.int16, "CharStorage": np.int8, "ByteStorage": np.uint8, "BoolStorage": np.bool_,
    }.items()
}  # fmt: skip

MAX_PICKLE = 100_000_000  # bytes of data.pkl: descriptions of tensors take some hundred each


@dataclasses.dataclass(frozen=True)
class _Storage:
    dtype: np.dtype[Any]
    key: str
    size: int


@dataclasses.dataclass(frozen=True)
class _Tensor:
    storage: _Storage
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _rebuild_tensor(
    storage: _Storage, start: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any
) -> _Tensor:
    return _Tensor(storage, start, tuple(shape), tuple(strides))


def _rebuild_parameter(data: _Tensor, *_: Any) -> _Tensor:
    return data


class _Unpickler(pickle.Unpickler):
    """Builds descriptions only; any other class or function is refused by name."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "collections" and name == "OrderedDict":
            return collections.OrderedDict
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_parameter"):
            return _rebuild_tensor if name == "_rebuild_tensor_v2" else _rebuild_parameter
        if module in ("torch", "torch.storage") and name in STORAGES:
            return STORAGES[name]
        raise pickle.UnpicklingError(f"it would run {module}.{name}, which is not a tensor")

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _, size = pid
        if kind != "storage" or not isinstance(dtype, np.dtype):
            raise pickle.UnpicklingError(f"it refers to {pid!r}, which is not a storage")
        return _Storage(dtype, str(key), int(size))


def _unpickle(text: bytes) -> Any:
    """The content, after a look at the program: an index beyond its length would make pickle fill the memory."""
    for opcode, argument, _ in pickletools.genops(text):
        if "PUT" in opcode.name and int(argument or 0) > len(text):
            raise pickle.UnpicklingError(f"its memo has an entry {argument}")
    return _Unpickler(io.BytesIO(text)).load()


def read_torch_file(file: Path) -> tuple[dict[str, TensorInfo], list[str]]:
    """The tensors of a `.bin` file, and what is wrong with it."""
    if not zipfile.is_zipfile(file):
        return {}, [f"{file.name}: not the zip archive that torch.save writes: truncated, or older than torch 1.6"]
    try:
        with zipfile.ZipFile(file) as archive:
            return _read_archive(file, archive)
    except Exception as error:  # a damaged or hostile archive makes zipfile and pickle raise whatever they can
        return {}, [f"{file.name}: refused, {error or type(error).__name__}"]


def _read_archive(file: Path, archive: zipfile.ZipFile) -> tuple[dict[str, TensorInfo], list[str]]:
    members = {info.filename: info for info in archive.infolist()}
    pickles = [name for name in members if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        return {}, [f"{file.name}: {len(pickles)} data.pkl members where one belongs"]
    root = pickles[0].removesuffix("data.pkl")
    if archive.read(f"{root}byteorder").strip() != b"little" if f"{root}byteorder" in members else False:
        return {}, [f"{file.name}: written on a big-endian machine"]
    if members[pickles[0]].file_size > MAX_PICKLE:
        return {}, [f"{file.name}: its data.pkl would be {members[pickles[0]].file_size} bytes long"]
    content = _unpickle(archive.read(pickles[0]))
    if not isinstance(content, dict):
        return {}, [f"{file.name}: holds a {type(content).__name__}, not a table of tensors"]
    tensors: dict[str, TensorInfo] = {}
    problems: list[str] = []
    for name, tensor in content.items():
        found = (
            _locate(file, members.get(f"{root}data/{getattr(tensor.storage, 'key', '')}"), name, tensor)
            if isinstance(tensor, _Tensor)
            else "not a tensor"
        )
        if isinstance(found, str):
            problems.append(f"{file.name}: {name!r}: {found}")
        else:
            tensors[name] = found
    return tensors, problems


def _locate(file: Path, member: zipfile.ZipInfo | None, name: str, tensor: _Tensor) -> TensorInfo | str:
    if not isinstance(name, str) or not isinstance(tensor.storage, _Storage):
        return "not a named tensor with a storage"
    if not all(isinstance(n, int) and n >= 0 for n in (*tensor.shape, *tensor.strides, tensor.start)):
        return f"its shape {tensor.shape!r} or strides {tensor.strides!r} are not natural numbers"
    if member is None:
        return "its bytes are not in the archive"
    if member.compress_type != zipfile.ZIP_STORED:
        return "its bytes are compressed, which torch never does"
    extent = tensor.start + 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.strides, strict=True))
    extent = max(extent, math.prod(tensor.shape))  # no element twice: a few bytes could pass for terabytes
    if extent * tensor.storage.dtype.itemsize > member.file_size:
        return f"shape {list(tensor.shape)} does not fit into its {member.file_size} bytes"
    with file.open("rb") as stream:  # the local header repeats the name, with extra bytes of its own for alignment
        stream.seek(member.header_offset + 26)
        name_length, extra_length = struct.unpack("<HH", stream.read(4))
    begin = member.header_offset + 30 + name_length + extra_length
    if begin + member.file_size > file.stat().st_size:
        return "its bytes lie beyond the end of the file"
    strides = None if tensor.strides == _row_by_row(tensor.shape) else tensor.strides
    return TensorInfo(
        name, file, tensor.storage.dtype, tensor.shape, begin + tensor.start * tensor.storage.dtype.itemsize, strides
    )


def _row_by_row(shape: tuple[int, ...]) -> tuple[int, ...]:
    steps, step = [], 1
    for n in reversed(shape):
        steps.append(step)
        step *= n
    return tuple(reversed(steps))
