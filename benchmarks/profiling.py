"""Where the time of a compiled program goes: kernel times from a profile, summed by the program's named scopes."""

from __future__ import annotations

import collections
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

OTHER, COLLECTIVES = "other", "collectives"
_COLLECTIVE = re.compile(r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|ragged-all-to-all)")
_INSTRUCTION = re.compile(r'^\s*(?:ROOT )?%?([\w.\-]+) = .*?metadata=\{[^}]*?op_name="([^"]*)"', re.MULTILINE)


def profile(run: Callable[[], Any], folder: str | Path | None = None) -> dict[str, int]:
    """Nanoseconds by HLO instruction, spent in kernels while `run` runs; `run` returns what to wait for."""
    with tempfile.TemporaryDirectory() as temporary:
        where = Path(folder or temporary)
        with jax.profiler.trace(str(where)):
            jax.block_until_ready(run())
        return kernel_times(where)


def kernel_times(folder: Path) -> dict[str, int]:
    """Nanoseconds by HLO instruction in the newest profile of `folder`, on average of its devices."""
    times: collections.Counter[str] = collections.Counter()
    planes = list(_planes(folder))
    for event in (event for plane in planes for event in _kernels(plane)):
        times[_instruction(event)] += int(event.duration_ns)
    return {name: spent // len(planes) for name, spent in times.items()}


def call_times(call: Callable[[], Any], count: int) -> list[float]:
    """Nanoseconds spent in kernels by each of `count` calls, which do the same; none where no device was recorded."""
    with tempfile.TemporaryDirectory() as where:
        with jax.profiler.trace(where):
            for _ in range(count):
                jax.block_until_ready(call())
        found = [event for plane in _planes(Path(where)) for event in _kernels(plane)]
        events = sorted(found, key=lambda event: event.start_ns)
    spent, each = [int(event.duration_ns) for event in events], len(events) // count
    if len(spent) % count:  # something else ran in between
        return [sum(spent) / count] * count
    return [float(sum(spent[i * each : (i + 1) * each])) for i in range(count if each else 0)]


def _planes(folder: Path) -> Iterator[Any]:
    newest = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    for plane in ProfileData.from_file(str(newest)).planes:
        if plane.name.startswith("/device:") and any(True for _ in _kernels(plane)):
            yield plane


def _kernels(plane: Any) -> Iterator[Any]:
    for line in plane.lines:
        if line.name.startswith("Stream"):  # the other lines tell the same time again, by module and by scope
            yield from line.events


def _instruction(event: Any) -> str:
    stats = dict(event.stats)
    return str(stats.get("hlo_op") or event.name)


def op_names(hlo_text: str) -> dict[str, str]:
    """Instruction name to the path of scopes that it was traced under, from `compiled.as_text()`."""
    return dict(_INSTRUCTION.findall(hlo_text))


def by_scope(times: Mapping[str, int], hlo_text: str, scopes: Sequence[str]) -> dict[str, int]:
    """Nanoseconds by scope: each kernel counts for the first of `scopes` that its path contains, or else as OTHER.

    What devices do together counts as COLLECTIVES, wherever it stands; on a GPU that is NCCL's time, waiting included.
    """
    paths = op_names(hlo_text)
    total: collections.Counter[str] = collections.Counter()
    for name, spent in times.items():
        path = paths.get(name, "")
        scope = next((scope for scope in scopes if scope in path), OTHER)
        total[COLLECTIVES if _COLLECTIVE.match(name) else scope] += spent
    return dict(total.most_common())


def by_kind(times: Mapping[str, int], hlo_text: str) -> list[tuple[str, int, int]]:
    """(path and kind of kernel, nanoseconds, kernels), costliest first; the same kernel of every layer is one entry."""
    paths = op_names(hlo_text)
    total: collections.Counter[str] = collections.Counter()
    count: collections.Counter[str] = collections.Counter()
    for name, spent in times.items():
        path = re.sub(r"layer_\d+", "layer", paths.get(name, ""))
        kind = f"{path} | {re.sub(r'[.]?[0-9]+$', '', name)}"
        total[kind] += spent
        count[kind] += 1
    return [(kind, spent, count[kind]) for kind, spent in total.most_common()]
