"""Collectives of a compiled program, read from its text: kind, bytes, devices, and how often a run executes each.

Loops are counted: a body as often as the constant that its condition compares with, if there is one. The outermost
loop of generation has none, since the host says how many cycles it runs: so its body counts once, and figures are those
of a cycle. Of the branches of a conditional the one that moves most counts.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

_OPERATION = re.compile(r"^\s*(?:ROOT )?%\S+ = (.+?) ([a-z][a-z0-9\-]*)\(")
_SHAPE = re.compile(r"\b(pred|[a-z]+\d+[a-z0-9]*)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(?:calls|called_computations)=\{?(%[\w.\-]+)")
_WHILE = re.compile(r"condition=(%[\w.\-]+), body=(%[\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}|(?:true|false)_computation=(%[\w.\-]+)")
_COMPARE = re.compile(r"compare\((%[\w.\-]+), (%[\w.\-]+)\), direction=(LT|LE)")
_KNOWN = re.compile(r'known_trip_count"?:\{"n":"?(\d+)')


@dataclasses.dataclass(frozen=True)
class Collective:
    """bytes: of its result on one device. devices: how many take part."""

    kind: str
    bytes: int
    devices: int

    @property
    def moved(self) -> float:
        """Bytes that a device passes on, done as a ring."""
        n = self.devices
        if self.kind == "collective-permute":
            return float(self.bytes)
        share = {"all-reduce": 2 * (n - 1) / n, "reduce-scatter": n - 1.0}.get(self.kind, (n - 1) / n)
        return self.bytes * share


Counts = Counter[Collective]


def moved(counts: Mapping[Collective, int]) -> float:
    """Bytes that a device passes on in all."""
    return math.fsum(c.moved * times for c, times in counts.items())


def by_kind(counts: Counts) -> dict[str, tuple[int, float]]:
    """Kind to (how many, bytes passed on), in the order of KINDS."""
    kinds = [kind for kind in KINDS if any(c.kind == kind for c in counts)]
    chosen = {kind: Counter({c: n for c, n in counts.items() if c.kind == kind}) for kind in kinds}
    return {kind: (sum(found.values()), moved(found)) for kind, found in chosen.items()}


def collectives(text: str) -> Counts:
    """Of a compiled program's text, how often each is executed; a permutation to oneself is none.

    libtpu writes an asynchronous collective once into its start, into each fusion that runs meanwhile and into its end:
    they have one channel and are one. What runs meanwhile may be a loop, so the place that runs least often counts.
    """
    blocks = re.split(r"\n(?=%|ENTRY)", text)
    computations = {_name(block): block.splitlines() for block in blocks}

    @functools.cache
    def visit(name: str) -> Counter[tuple[Collective, str]]:
        """By collective and channel."""
        total: Counter[tuple[Collective, str]] = Counter()
        for line in computations.get(name, []):
            own = _collective(line)
            found = Counter() if own is None else Counter([(own, _channel(line))])
            for called in _CALLED.findall(line):
                found += visit(called)
            for body, times in _loops(line, computations):
                found += Counter({key: n * times for key, n in visit(body).items()})
            if branches := [(moved(_without_channels(visit(name))), name) for name in _branches(line)]:
                found += visit(max(branches)[1])
            for key, times in found.items():
                total[key] = min(total.get(key, times), times) if key[1] else total[key] + times
        return total

    return _without_channels(visit("ENTRY"))


def _without_channels(counts: Mapping[tuple[Collective, str], int]) -> Counts:
    total: Counts = Counter()
    for (collective, _), times in counts.items():
        total[collective] += times
    return total


def _channel(line: str) -> str:
    found = re.search(r"channel_id=(\d+)", line)
    return found[1] if found else ""


def _name(block: str) -> str:
    return "ENTRY" if block.startswith("ENTRY") else block.split(" ", 1)[0]


def _loops(line: str, computations: dict[str, list[str]]) -> Iterable[tuple[str, int]]:
    """(body, how often it runs) of a line that is a loop."""
    if loop := _WHILE.search(line):
        known = _KNOWN.search(line)
        yield loop[2], int(known[1]) if known else _trips(computations.get(loop[1], []))


def _branches(line: str) -> list[str]:
    found = [group for match in _BRANCHES.findall(line) for group in match if group]
    return [name.strip() for group in found for name in group.split(",")]


def _trips(condition: list[str]) -> int:
    """The constant that a loop's counter is compared with; 1 if its end is decided otherwise."""
    body = "\n".join(condition)
    compare = _COMPARE.search(body)
    if compare is None or " and(" in body:
        return 1
    constant = re.search(rf"{re.escape(compare[2])} = s32\[\]\S* constant\((\d+)\)", body)
    return 1 if constant is None else int(constant[1]) + (compare[3] == "LE")


def _collective(line: str) -> Collective | None:
    found = _OPERATION.match(line)
    kind = found[2].removesuffix("-start") if found else ""
    if found is None or kind not in KINDS:
        return None
    sizes = [_size(*shape) for shape in _SHAPE.findall(found[1])]
    # What has started holds its operand beside its result; several results of one all-reduce count together.
    paired = found[2].endswith("-start") and kind != "all-reduce"
    size, devices = (max(sizes) if paired else sum(sizes)), _devices(line)
    return Collective(kind, size, devices) if devices > 1 else None


def _size(dtype: str, dimensions: str) -> int:
    bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
    return math.prod(int(d) for d in dimensions.split(",") if d) * bits // 8


def _devices(line: str) -> int:
    """In a group: of the three ways to write groups."""
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", line):
        return 2 if any(a != b for a, b in re.findall(r"\{(\d+),(\d+)", "{" + pairs[1] + "}")) else 1
    if named := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", named[2])
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=", line):
        return int(iota[1])
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    return len(listed[1].split(",")) if listed else 2
