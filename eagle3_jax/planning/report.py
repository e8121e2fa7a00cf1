"""What `eagle3 plan` prints."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from eagle3_jax.meshes import MeshShape, replicated_heads
from eagle3_jax.planning.account import Account, Job, Times, times
from eagle3_jax.planning.chips import GIB, Topology
from eagle3_jax.planning.collectives import Counts, by_kind, moved


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Of one device, from the compiler: bytes of all that a program is given and keeps, and of what it needs besides.

    too_large: what the compiler says if the program does not fit; then there is nothing else.
    """

    arguments: float = 0.0
    temporaries: float = 0.0
    code: float = 0.0
    collectives: Counts | None = None
    too_large: str = ""

    @property
    def total(self) -> float:
        return self.arguments + self.temporaries + self.code


@dataclasses.dataclass(frozen=True)
class Plan:
    """One step of a job on a mesh of a topology, by accounting and, if `compiled`, by the compiler."""

    job: Job
    topology: Topology
    shape: MeshShape
    unit: str
    account: Account
    compiled: Compiled | None = None

    @property
    def memory(self) -> Mapping[str, float]:
        """Bytes of a device by part. The compiler's arguments are more than their sizes: it pads them to tiles."""
        parts = {name: size for name, size in self.account.parts.items() if size}
        if self.compiled is None or self.compiled.too_large:
            return parts
        stated = {name: size for name, size in parts.items() if name != "temporaries"}
        padding = max(self.compiled.arguments - sum(stated.values()), 0.0)
        more = {"padding": padding, "temporaries": self.compiled.temporaries, "program": self.compiled.code}
        return {**stated, **more}

    @property
    def total(self) -> float:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        if self.compiled is not None:
            return not self.compiled.too_large and self.total <= self.topology.chip.memory
        return self.total <= self.topology.chip.memory

    @property
    def times(self) -> Times:
        counts = self.compiled.collectives if self.compiled is not None else None
        return times(self.account, self.topology.chip, None if counts is None else moved(counts))


def lines(plan: Plan) -> Iterable[str]:
    """The whole report, but for a suggestion."""
    job, chip = plan.job, plan.topology.chip
    what = "sequences" if plan.unit == "step" else "slots"
    yield f"{plan.topology}: {plan.topology.devices} devices of {chip.memory / GIB:.2f} GiB, mesh {plan.shape}"
    yield f"one {plan.unit}: {job.batch} {what} of {job.context} tokens, {_work(job, plan.unit)}"
    if few := replicated_heads(plan.shape, job.target):
        yield f"too few for tp{plan.shape.tensor}, so not divided: {', '.join(few)}"
    yield from ["", *_memory_lines(plan), "", *_collective_lines(plan), "", *_time_lines(plan)]


def _work(job: Job, unit: str) -> str:
    if unit == "step":
        return f"{job.steps} steps of the head"
    how = "" if job.quantization is None else f", the target's matrices in {job.quantization}"
    work = f"the next {job.prefill} of their prompts" if job.prefill else f"K = {job.steps if job.draft else 0}"
    return work + how


def _memory_lines(plan: Plan) -> Iterable[str]:
    yield f"memory of a device, {'by accounting' if plan.compiled is None else 'as compiled'}      GiB"
    for name, size in plan.memory.items():
        estimate = " (an estimate)" if name == "temporaries" and plan.memory.get("program") is None else ""
        yield f"  {name + estimate:36} {size / GIB:7.2f}"
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    yield f"  {'total':36} {plan.total / GIB:7.2f}   of {plan.topology.chip.memory / GIB:.2f}: {verdict}"
    if plan.compiled is not None and plan.compiled.too_large:
        yield f"  the compiler says: {plan.compiled.too_large}"


def _collective_lines(plan: Plan) -> Iterable[str]:
    counts = plan.compiled.collectives if plan.compiled is not None else None
    if counts is None:
        yield f"passed on by a device in a {plan.unit}, by accounting: {_bytes(plan.account.moved)}"
        return
    yield f"collectives of a {plan.unit}, as compiled       how many   passed on by a device"
    for kind, (number, size) in by_kind(counts).items():
        yield f"  {kind:36} {number:9}   {_bytes(size)}"
    if not counts:
        yield "  none"


def _time_lines(plan: Plan) -> Iterable[str]:
    spent, account, chip = plan.times, plan.account, plan.topology.chip
    yield f"time of a {plan.unit} at the chip's own rates       ms"
    work = f"{account.flops / 1e12:.2f} TFLOP at {chip.matrix / 1e12:.0f} a second"
    yield f"  {'computing':36} {1e3 * spent.compute:7.2f}   {work}"
    yield f"  {'memory':36} {1e3 * spent.memory:7.2f}   {_bytes(account.read)} at {chip.read / 1e9:.0f} GB/s"
    yield f"  {'links':36} {1e3 * spent.links:7.2f}   at {chip.ring / 1e9:.0f} GB/s"
    yield f"  {'the longer of the first two + links':36} {1e3 * spent.total:7.2f}"
    if plan.unit == "cycle":
        rate = plan.job.batch / spent.total
        yield f"  at most {rate:.0f} tokens a second for each token of acceptance length"
    else:
        tokens = plan.job.prefill or plan.job.context
        yield f"  at most {plan.job.batch * tokens / spent.total:.0f} tokens a second"


def _bytes(size: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size:.0f} B"
