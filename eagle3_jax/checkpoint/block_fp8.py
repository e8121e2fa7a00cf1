"""Checkpoints in fp8: e4m3 matrices with a scale for each block of rows and columns, as Qwen and DeepSeek publish.

`X.weight` [out, in] has beside it `X.weight_scale_inv` [blocks of rows, blocks of columns], and experts stored together
their like; despite its name the scale is multiplied by. The tensors themselves say which are quantised: what
`modules_to_not_convert` names is simply there in another dtype.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from eagle3_jax.checkpoint.layout import Parameter, Piece
from eagle3_jax.checkpoint.safetensors_file import TensorInfo
from eagle3_jax.errors import ConfigError
from eagle3_jax.quantization import SCALE

Block = tuple[int, int]
"""Rows (outputs) and columns (inputs) that share a scale."""
SUFFIX = "_scale_inv"
VALUES = np.dtype(ml_dtypes.float8_e4m3fn)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockTensor(TensorInfo):
    """A matrix [..., out, in] of bytes, and where its scales lie."""

    scale: TensorInfo
    block: Block

    @property
    def values(self) -> TensorInfo:
        """The bytes, without what they mean."""
        return TensorInfo(self.name, self.file, self.dtype, self.shape, self.offset, self.strides)

    @property
    def row_scales(self) -> RowScales:
        """[..., out, blocks of columns]: every row with its scales, so that rows can be picked and put together."""
        shape = (*self.shape[:-1], self.scale.shape[-1])
        scale = self.scale
        return RowScales(scale.name, scale.file, np.dtype(np.float32), shape, scale.offset, stored=self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowScales(TensorInfo):
    """The scales of a matrix, those of a block repeated for each of its rows."""

    stored: BlockTensor

    def read(self) -> np.ndarray[Any, Any]:
        out = np.empty(self.shape, np.float32)
        self.read_into(out, tuple(slice(0, n) for n in self.shape))
        return out

    def read_into(self, out: np.ndarray[Any, Any], index: tuple[slice, ...]) -> None:
        """Reads the scales of those blocks that have a row of the part."""
        if not out.size:
            return
        height, (first, last, _) = self.stored.block[0], index[-2].indices(self.shape[-2])
        skipped, blocks = first % height, slice(first // height, -(-last // height))
        scales = np.empty((*out.shape[:-2], blocks.stop - blocks.start, out.shape[-1]), np.float32)
        self.stored.scale.read_into(scales, (*index[:-2], blocks, index[-1]))
        out[...] = np.repeat(scales, height, axis=-2)[..., skipped : skipped + last - first, :]


def stored_block(raw: Mapping[str, Any], folder: Path) -> Block | None:
    """What a config.json says of quantisation: the block's size, None for a checkpoint that is not quantised.

    Raises:
      ConfigError: it is quantised in any other way.
    """
    found = raw.get("quantization_config") or (raw.get("text_config") or {}).get("quantization_config")
    if not found:
        return None
    problems = _problems(found) if isinstance(found, Mapping) else [f"quantization_config is {found!r}, not a table"]
    if problems:
        raise ConfigError(
            f"{folder / 'config.json'}: a quantised checkpoint that cannot be read: {'; '.join(problems)}. Use one in "
            "bfloat16, or in fp8 by blocks (quant_method fp8, e4m3, weight_block_size)"
        )
    rows, columns = found["weight_block_size"]
    return rows, columns


def _problems(found: Mapping[str, Any]) -> list[str]:
    method, block, kind = found.get("quant_method"), found.get("weight_block_size"), found.get("fmt", "e4m3")
    if method != "fp8":
        return [f"quant_method {method!r} is not supported"]
    problems = []
    if not isinstance(block, Sequence) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        problems.append(f"weight_block_size is {block!r}, not two sizes such as [128, 128]")
    if kind not in ("e4m3", "float8_e4m3fn"):
        problems.append(f"fmt {kind!r} is not supported")
    return problems


def with_scales(
    tensors: Mapping[str, TensorInfo], block: Block | None
) -> tuple[dict[str, TensorInfo], tuple[str, ...]]:
    """Puts scales to their matrices, and says what is wrong with them. Without a block nothing changes.

    A scale that belongs to no fp8 matrix stays a tensor of its own, which no parameter will ask for.
    """
    if block is None:
        return dict(tensors), ()
    found, problems = dict(tensors), []
    for name, info in tensors.items():
        if info.dtype == VALUES and len(info.shape) > 1:
            scale = found.pop(name + SUFFIX, None)
            fault = _fault(info, scale, block)
            problems += [fault] if fault else []
            # At fault, it stands in as its own scale: the folder is refused, and its shape is still looked at.
            found[name] = BlockTensor(**vars(info), scale=scale or info, block=block)
    return found, tuple(problems)


def _fault(info: TensorInfo, scale: TensorInfo | None, block: Block) -> str:
    grid = (*info.shape[:-2], *(-(-n // size) for n, size in zip(info.shape[-2:], block, strict=True)))
    if scale is None:
        return f"missing: {info.name}{SUFFIX}, expected {list(grid)}: {info.name} is fp8"
    where = f"{scale.name} in {scale.file.name}"
    if scale.shape != grid:
        sizes = f"{list(info.shape)} in blocks of {list(block)}"
        return f"wrong shape: {where}: expected {list(grid)} for {sizes}, found {list(scale.shape)}"
    if scale.dtype.itemsize < 2 or np.issubdtype(scale.dtype, np.integer):
        return f"wrong dtype: {where}: expected float values, found {scale.dtype}"
    return ""


Found = Sequence[tuple[Piece, TensorInfo]]
Stored = tuple[Parameter, Found]


def is_fp8(found: Found) -> bool:
    """Whether all pieces of a parameter are fp8 with scales."""
    return all(isinstance(info, BlockTensor) for _, info in found)


def mixed(found: Found) -> bool:
    """Whether some pieces of a parameter are fp8 and others are not."""
    return len({isinstance(info, BlockTensor) for _, info in found}) > 1


def values_and_scale(parameter: Parameter, found: Found) -> tuple[Stored, Stored, int]:
    """For one parameter two: bytes [..., in, out] and scales [..., blocks, out]; and the inputs of a block."""
    pairs = [(piece, info) for piece, info in found if isinstance(info, BlockTensor)]
    block = pairs[0][1].block[1]
    shape = (*parameter.shape[:-2], -(-parameter.shape[-2] // block), parameter.shape[-1])
    values = dataclasses.replace(parameter, dtype=VALUES)
    scale = Parameter(parameter.path + SCALE, shape, np.dtype(np.float32))
    return (values, [(p, t.values) for p, t in pairs]), (scale, [(p, t.row_scales) for p, t in pairs]), block
