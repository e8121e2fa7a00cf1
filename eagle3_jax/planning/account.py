"""What a step takes, by our own counts, and the time that its chip's rates allow at best.

The compiler's own estimates are no use: it counts loops once. Time = max(operations / matrix rate, bytes / memory
rate) + bytes passed on / ring rate: reading and computing overlap, a layer's sums must arrive before the next begins.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Iterable, Mapping
from typing import Any, Protocol

from jax.typing import DTypeLike

from eagle3_jax.config import DraftConfig, TargetConfig
from eagle3_jax.meshes import MeshShape, problems
from eagle3_jax.planning.chips import Chip, Topology, sizes_of

MARGIN = 0.92
"""Of a chip's memory, how much a choice by accounting fills at most: temporaries are an estimate."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What to plan for. batch: slots, or sequences of a training step over all devices. context: tokens of each.
    steps: drafts K, or steps of the training-time test. quantization: of the target's matrices, see
    `eagle3_jax.quantization`. prefill: plan for the pass that takes in so many prompt tokens of every slot, the last of
    `context`, and not for a cycle."""

    target: TargetConfig
    draft: DraftConfig | None
    batch: int
    context: int
    steps: int
    dtype: DTypeLike
    quantization: str | None = None
    prefill: int = 0


@dataclasses.dataclass(frozen=True)
class Account:
    """Of one device and one step. parts: bytes held, by name. flops, read, moved: operations, bytes of memory, and
    bytes passed on to other devices."""

    parts: Mapping[str, float]
    flops: float
    read: float
    moved: float

    @property
    def total(self) -> float:
        return math.fsum(self.parts.values())


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of a step."""

    compute: float
    memory: float
    links: float

    @property
    def total(self) -> float:
        return max(self.compute, self.memory) + self.links


def times(account: Account, chip: Chip, moved: float | None = None) -> Times:
    """At the chip's rates; `moved`, counted in the compiled program, takes the place of the account's."""
    links = account.moved if moved is None else moved
    return Times(account.flops / chip.matrix, account.read / chip.read, links / chip.ring)


class Mode(Protocol):
    """A kind of step: `infer.plan` and `train.plan` are two. They are modules, and offer these names.

    unit: what one step of a job is called. DEFAULT_STEPS: of a job. account: by our own counts. lower: the real step
    on a mesh. rows: over how many parts a batch must be divisible. suits: whether a mesh is worth trying, though others
    can be asked for. default_batch: for so many devices.
    """

    DEFAULT_STEPS: int

    def unit(self, job: Job) -> str: ...
    def account(self, job: Job, shape: MeshShape) -> Account: ...
    def lower(self, job: Job, mesh: Any) -> Any: ...
    def rows(self, shape: MeshShape) -> int: ...
    def suits(self, job: Job, shape: MeshShape) -> bool: ...
    def default_batch(self, devices: int, context: int) -> int: ...


def shapes(mode: Mode, job: Job, devices: int) -> list[MeshShape]:
    """Every mesh of exactly so many devices that suits the mode and that models and batch can have."""
    found = []
    for tensor in _divisors(devices):
        for expert in _divisors(devices // tensor) if job.target.num_experts else [1]:
            left = devices // tensor // expert
            found += [MeshShape(left // fsdp, fsdp, expert, tensor) for fsdp in _divisors(left)]
    possible = [s for s in found if mode.suits(job, s) and job.batch % mode.rows(s) == 0]
    return [s for s in possible if not problems(s, devices, job.target, job.draft)]


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


@dataclasses.dataclass(frozen=True)
class Choice:
    """A mesh on a slice, and what it comes to."""

    topology: Topology
    shape: MeshShape
    account: Account

    @property
    def seconds(self) -> float:
        return times(self.account, self.topology.chip).total

    @property
    def fits(self) -> bool:
        return self.account.total <= MARGIN * self.topology.chip.memory


def best_mesh(mode: Mode, job: Job, topology: Topology, refused: Container[MeshShape] = ()) -> Choice | None:
    """The mesh that is fastest of those that fit; if none does, the one that comes nearest. None: no mesh at all.

    refused: those that the compiler has found not to fit.
    """
    possible = [s for s in shapes(mode, job, topology.devices) if s not in refused]
    choices = [Choice(topology, s, mode.account(job, s)) for s in possible]
    fitting = [choice for choice in choices if choice.fits]
    if fitting:
        return min(fitting, key=lambda c: (c.seconds, c.shape.fsdp, c.account.total))
    return min(choices, key=lambda c: c.account.total, default=None)


def smallest(
    mode: Mode, jobs: Iterable[tuple[Topology, Job]], refused: Mapping[Topology, Container[MeshShape]] | None = None
) -> Choice | None:
    """The first of these slices on which its job fits. refused: as of `best_mesh`."""
    refused = refused or {}
    choices = (best_mesh(mode, job, topology, refused.get(topology, ())) for topology, job in jobs)
    return next((choice for choice in choices if choice is not None and choice.fits), None)


def slices_for(mode: Mode, job: Job, chip: Chip, *, fixed: bool) -> list[tuple[Topology, Job]]:
    """Every slice of a chip with the job it would have: the same batch if `fixed`, else the default of that size."""
    return [
        (topology, job if fixed else dataclasses.replace(job, batch=mode.default_batch(topology.devices, job.context)))
        for topology in sizes_of(chip)
    ]
