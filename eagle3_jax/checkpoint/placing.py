"""How a target's parameters reach its devices: as they are stored, dequantised, quantised, or in fp8 as they are."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, Sharding

from eagle3_jax.checkpoint.block_fp8 import Block, Found, is_fp8, mixed, values_and_scale
from eagle3_jax.checkpoint.fill import Plan, fill, to_device
from eagle3_jax.checkpoint.layout import Parameter
from eagle3_jax.config import DraftConfig, TargetConfig
from eagle3_jax.distributed import check_all_take_part
from eagle3_jax.errors import ConfigError
from eagle3_jax.quantization import E4M3, MATRICES, SCALE, Quantization, Quantized, find_quantization, quantize
from eagle3_jax.sharding import AXES, param_sharding


def sharding_of(parameter: Parameter, mesh: Mesh | None, config: TargetConfig | DraftConfig) -> Any:
    """Where a parameter goes on `mesh`; None without one."""
    if mesh is None:
        return None
    return param_sharding(tuple(parameter.path.split(".")), parameter.shape, mesh, config)


def check_mesh_complete(mesh: Mesh | None) -> None:
    """Refuses, before anything is read, a mesh that parameters cannot be laid over.

    Raises:
      ConfigError: its axes are others.
      UserError: some process has no device in it.
    """
    if mesh is None:
        return
    if missing := [axis for axis in AXES if axis not in mesh.axis_names]:
        raise ConfigError(
            f"a mesh of axes {', '.join(map(str, mesh.axis_names))} has no {', '.join(missing)}; make it with "
            "eagle3_jax.sharding.make_mesh"
        )
    check_all_take_part(mesh, "mesh")


def loaded_as(quantization: str | None, block: Block | None) -> Quantization | None:
    """How matrices are to be held; None: in the model's dtype. `block` is that of an fp8 checkpoint, which fp8 keeps.

    Raises:
      ConfigError: a name that is not offered.
    """
    if quantization is None:
        return None
    how = find_quantization(quantization)
    return how if block is None or how.dtype != E4M3.dtype else dataclasses.replace(E4M3, block=block[1])


def quantised_paths(plan: Plan, how: Quantization | None, block: Block | None) -> frozenset[str]:
    """The parameters that are held quantised: of an fp8 checkpoint that is kept, those that are so in the files."""
    if how is None:
        return frozenset()
    matrices = ((p.path, found) for p, found in plan.pieces.items() if MATRICES.fullmatch(p.path))
    as_stored = block is not None and how.dtype == E4M3.dtype
    return frozenset(path for path, found in matrices if not as_stored or is_fp8(found))


def half_quantised(plan: Plan) -> Iterable[str]:
    """Problems of parameters that are put together from tensors of both kinds."""
    paths = (parameter.path for parameter, found in plan.pieces.items() if mixed(found))
    return [f"{path}: some of its tensors are fp8, others are not" for path in paths]


@dataclasses.dataclass(frozen=True)
class Placing:
    """Reads parameters one at a time; those of `paths` end as bytes with scales, as `how` says."""

    config: TargetConfig
    mesh: Mesh | None
    how: Quantization | None
    paths: frozenset[str]

    def arrays(self, plan: Plan) -> dict[str, jax.Array]:
        """All of a plan, by path; a scale's path is its matrix's with `SCALE`."""
        return {path: x for part in fill(plan, self._place).values() for path, x in part.items()}

    def _place(self, parameter: Parameter, found: Found) -> dict[str, jax.Array]:
        wanted = parameter.path in self.paths
        if is_fp8(found):
            (values, pieces), (scale, scales), block = values_and_scale(parameter, found)
            stored = Quantized(self._read(values, pieces), self._read(scale, scales), block)
            if wanted and self.how is not None and self.how.dtype == E4M3.dtype:
                return {values.path: stored.values, scale.path: stored.scale}
            array = jax.block_until_ready(_dequantiser(parameter.dtype, self._where(parameter))(stored))
        else:
            array = self._read(parameter, found)
        return self._quantise(parameter, array) if wanted else {parameter.path: array}

    def _quantise(self, parameter: Parameter, array: jax.Array) -> dict[str, jax.Array]:
        assert self.how is not None
        shape = jax.eval_shape(lambda w: quantize(w, self.how), array).scale.shape  # type: ignore[arg-type]
        scale = Parameter(parameter.path + SCALE, shape, np.dtype(np.float32))
        # Waits, so that the matrix it is made from is gone before the next one is read.
        found = jax.block_until_ready(_quantiser(self.how, self._where(parameter), self._where(scale))(array))
        return dict(zip((parameter.path, scale.path), found, strict=True))

    def _read(self, parameter: Parameter, found: Found) -> jax.Array:
        return to_device(parameter, found, self._where(parameter))

    def _where(self, parameter: Parameter) -> Sharding | None:
        return sharding_of(parameter, self.mesh, self.config)


@functools.lru_cache(maxsize=64)  # a program for each shape, not for each parameter
def _dequantiser(dtype: Any, where: Sharding | None) -> Any:
    return jax.jit(lambda stored: stored.dequantize(dtype), out_shardings=where)


@functools.lru_cache(maxsize=64)
def _quantiser(how: Quantization, values: Sharding | None, scale: Sharding | None) -> Any:
    def both(array: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = quantize(array, how)
        return found.values, found.scale

    return jax.jit(both, out_shardings=(values, scale))
