"""Chips, and the slices in which they can be had: what `--topology` may say.

Figures of a device as jax sees it (a TPU7x chip is two), from the makers' documents: dense bfloat16 operations, bytes
of memory, and links. Memory is what the compiler lets a program use (TPU), or what a program finds free (GPU).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
from typing import Any

from eagle3_jax.errors import UserError

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """memory: bytes. matrix, read: operations and bytes a second. ring: bytes a second that a chip passes on along one
    axis of a mesh, both directions of its two links together. slices: the topologies offered, () where any number is.
    cores: devices in a chip."""

    name: str
    memory: float
    matrix: float
    read: float
    ring: float
    slices: tuple[str, ...] = ()
    cores: int = 1

    @property
    def is_tpu(self) -> bool:
        return bool(self.slices)


_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBE = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16", "16x16x16")
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v5e", 15.75 * GIB, 197e12, 819e9, 100e9, _FLAT),
        Chip("v5p", 95.73 * GIB, 459e12, 2765e9, 200e9, (*_CUBE, "16x16x24")),
        Chip("v6e", 31.24 * GIB, 918e12, 1640e9, 224e9, _FLAT),
        Chip("tpu7x", 94.74 * GIB, 1153.5e12, 3690e9, 200e9, _CUBE, cores=2),
        Chip("h100", 78 * GIB, 989e12, 3350e9, 450e9),
        Chip("h200", 138 * GIB, 989e12, 4800e9, 450e9),
    )
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice: so many devices of one kind."""

    chip: Chip
    shape: str

    @property
    def devices(self) -> int:
        return math.prod(map(int, self.shape.split("x"))) * self.chip.cores

    def __str__(self) -> str:
        return f"{self.chip.name}:{self.shape}"


def parse_topology(text: str) -> Topology:
    """Reads "v5p:2x2x4" or "h200:8".

    Raises:
      UserError: there is none such; it lists those that are known.
    """
    name, _, shape = text.strip().lower().partition(":")
    chip = CHIPS.get(name)
    if chip is None:
        examples = ", ".join(f"{c.name}:{c.slices[2] if c.slices else 8}" for c in CHIPS.values())
        raise UserError(f"topology {text!r}: no chip {name!r} is known; write for instance {examples}")
    if chip.is_tpu and shape not in chip.slices:
        raise UserError(f"topology {text!r}: {chip.name} slices are {', '.join(chip.slices)}")
    if not chip.is_tpu and not (shape.isdigit() and int(shape) > 0):
        raise UserError(f"topology {text!r}: say how many, as in {chip.name}:8")
    return Topology(chip, shape)


def sizes_of(chip: Chip) -> list[Topology]:
    """The slices of a chip, ascending; of a GPU, hosts of 8 up to 64 of them."""
    shapes = chip.slices or tuple(map(str, (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)))
    return [Topology(chip, shape) for shape in shapes]


def tpu_devices(topology: Topology) -> list[Any]:
    """The slice's devices, for which programs can be compiled and not run.

    Raises:
      UserError: libtpu is not installed, or does not know the slice.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            "compiling for a TPU needs libtpu, which needs no TPU: pip install libtpu; or add --accounting, which "
            "compiles nothing"
        )
    # Otherwise libtpu looks for a TPU, its metadata server and its lock.
    quiet = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    for variable, value in {**quiet, "TPU_ACCELERATOR_TYPE": "v5litepod-8"}.items():
        os.environ.setdefault(variable, value)
    from jax.experimental import topologies

    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=str(topology)).devices)
    except Exception as error:
        first = str(error).splitlines()[0]
        raise UserError(f"topology {str(topology)!r}: libtpu does not accept it: {first}") from error
