"""Every kernel against its reference and the best library alternative, over real shapes, on the device at hand.

    XLA_FLAGS=--xla_gpu_enable_command_buffer= python -m benchmarks.kernels [CONFIG.json] [--only WORDS] [--json OUT]

Without a config the shapes are those of Qwen3.5-9B. Times are of all kernels of one call, from a profile: the median
of 5 calls after 2 that warm up (what fits a second-level cache stays there from call to call). Command buffers must be
off, since they hide their kernels from the profiler. Where a profile holds no device (a CPU), it is the wall time of 20
calls in a row, and says little. Each way of doing it is also compared with the reference in float32 at highest
precision: the error is that of the whole result, relative, or the share of tokens that differ. What cannot be done here
is left out, with the reason. `--only gated_delta.step "B 64,"` keeps the rows that contain all of the words. Prints a
table, and a last line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.cases import TINY, Case, Grid, Sizes, Way, all_cases
from benchmarks.cases.attention import HAS_TOKAMAX
from benchmarks.models import read_target_config
from benchmarks.profiling import call_times

FLOOR = "floor"
QUICKLY: dict[str, Any] = {"compiler_options": {"xla_gpu_autotune_level": 0}}  # of what is not timed
WARM, REPEATS, IN_A_ROW = 2, 5, 20
HEADS = "| operation | shape | way | ms | of floor | TB/s | TFLOP/s | error |\n" + "| --- " * 8 + "|"


class Programs:
    """What a case compiles to. Each is a future, whose exception says why a way cannot be taken."""

    def __init__(self, case: Case, pool: ThreadPoolExecutor) -> None:
        self.case, self.key = case, jax.random.key(0, impl="rbg")  # cheap to compile and to draw from
        ways = dict(case.ways) | ({FLOOR: Way(case.floor)} if case.floor else {})
        shared = pool.submit(_compile, case.make, self.key, **QUICKLY)
        self.make = {
            name: pool.submit(_compile, _maker(case, way), self.key, **QUICKLY) if way.prepare else shared
            for name, way in ways.items()
        }
        self.run = {name: pool.submit(self._compile_way, way) for name, way in ways.items()}
        self.judge = pool.submit(self._compile_judge)

    def _compile_way(self, way: Way) -> Any:
        arguments = jax.eval_shape(_maker(self.case, way), self.key)
        return _compile(way.run, *arguments, donate_argnums=(0,) if self.case.in_place else ())

    def _compile_judge(self) -> Any:
        made = jax.eval_shape(self.case.make, self.key)
        result = jax.eval_shape(self.case.ways["reference"].run, *made)
        return _compile(lambda arguments, got: error(got, _exact(self.case, arguments)), made, result, **QUICKLY)

    def futures(self) -> set[Future[Any]]:
        return {*self.make.values(), *self.run.values(), self.judge}


def _maker(case: Case, way: Way) -> Callable[[Array], tuple[Any, ...]]:
    return lambda key: way.prepare(*case.make(key)) if way.prepare else case.make(key)


def _compile(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    return jax.jit(lambda *given: function(*given), **options).lower(*arguments).compile()


def _exact(case: Case, arguments: tuple[Any, ...]) -> Any:
    single = lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
    with jax.default_matmul_precision("highest"):
        return case.exact(*jax.tree.map(single, arguments))


def error(got: Any, want: Any) -> Array:
    """The worst over the arrays of a result; not a number if any is not."""

    def one(a: Array, b: Array) -> Array:
        if not jnp.issubdtype(b.dtype, jnp.floating):
            return jnp.mean((a != b).astype(jnp.float32))
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.sqrt(jnp.sum(jnp.square(a - b)) / jnp.maximum(jnp.sum(jnp.square(b)), 1e-30))

    return jnp.max(jnp.stack(jax.tree.leaves(jax.tree.map(one, got, want))))


def milliseconds(program: Any, arguments: tuple[Any, ...], in_place: bool) -> float:
    """Of one call: in kernels, or by the clock where the profile knows of none."""

    def call() -> Any:
        nonlocal arguments
        result = program(*arguments)
        if in_place:
            arguments = (jax.tree.leaves(result)[-1], *arguments[1:])
        return result

    for _ in range(WARM):
        jax.block_until_ready(call())
    if jax.default_backend() == "gpu" and (times := call_times(call, REPEATS)):
        return statistics.median(times) / 1e6
    started = time.perf_counter()
    for _ in range(IN_A_ROW):
        result = call()
    jax.block_until_ready(result)
    return (time.perf_counter() - started) / IN_A_ROW * 1e3


def measure(programs: Programs, name: str) -> dict[str, Any]:
    """A row of the report: with `ms` and `error`, or the reason why there is none."""
    case = programs.case
    row: dict[str, Any] = {"operation": case.operation, "shape": case.shape, "way": name}
    try:
        key, make, run = programs.key, programs.make[name].result(), programs.run[name].result()
        if name != FLOOR:
            inputs = programs.make["reference"].result()(key)
            row["error"] = float(programs.judge.result()(inputs, run(*make(key))))
            del inputs
        row["ms"] = milliseconds(run, make(key), case.in_place)
    except Exception as reason:  # whatever a compiler or a library may raise
        return row | {"reason": f"{type(reason).__name__}: {reason}".splitlines()[0][:200]}
    row["terabytes_per_second"] = case.bytes / row["ms"] / 1e9 if case.bytes else None
    row["teraflops"] = case.flops / row["ms"] / 1e9 if case.flops else None
    return row | {"bytes": case.bytes, "flops": case.flops}


def measure_all(programs: Programs) -> list[dict[str, Any]]:
    rows = [measure(programs, name) for name in programs.run]
    floor = next((row["ms"] for row in rows if row["way"] == FLOOR and "ms" in row), None)
    for row in rows:
        if floor and "ms" in row:
            row["of_floor"] = row["ms"] / floor
    return rows


def line(row: dict[str, Any]) -> str:
    start = f"| {row['operation']} | {row['shape']} | {row['way']} |"
    if "reason" in row:
        return f"{start} {row['reason']} |"
    number = lambda name, form: format(row[name], form) if row.get(name) is not None else ""
    forms = {"ms": ".4f", "of_floor": ".2f", "terabytes_per_second": ".2f", "teraflops": ".0f", "error": ".1e"}
    return f"{start} " + " | ".join(number(name, form) for name, form in forms.items()) + " |"


def chosen(cases: Sequence[Case], words: Sequence[str]) -> list[Case]:
    found = [case for case in cases if all(word in f"{case.operation} {case.shape}" for word in words)]
    if not found:
        names = sorted({case.operation for case in cases})
        raise SystemExit(f"--only: no row contains {' and '.join(words)}; operations are {', '.join(names)}")
    return found


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, nargs="?", help="a target's config.json")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD")
    parser.add_argument("--tiny", action="store_true", help="few and small shapes, to see that everything runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(given)
    started = time.perf_counter()
    sizes = Sizes.of(read_target_config(args.config)) if args.config else Sizes()
    cases = chosen(list(all_cases(sizes, TINY if args.tiny else Grid())), args.only)
    with ThreadPoolExecutor() as pool:  # XLA compiles outside of Python's lock
        compiled = [Programs(case, pool) for case in cases]
    report: dict[str, Any] = {
        "config": args.config.name if args.config else "Qwen3.5-9B", "device": jax.devices()[0].device_kind,
        "jax": jax.__version__, "ready_s": round(time.perf_counter() - started, 1), "rows": [],
    }  # fmt: skip
    print(_introduction(report, sum(len(programs.futures()) for programs in compiled)), flush=True)
    for programs in compiled:
        rows = measure_all(programs)
        report["rows"] += rows
        print("\n".join(map(line, rows)), flush=True)
    report["measured_s"] = round(time.perf_counter() - started - report["ready_s"], 1)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))
    print(json.dumps(report))


def _introduction(report: dict[str, Any], programs: int) -> str:
    notes = [f"{report['device']}, jax {report['jax']}; {programs} programs compiled in {report['ready_s']} s"]
    if not HAS_TOKAMAX:
        notes.append("tokamax is not installed, hence no rows of it")
    if jax.default_backend() == "gpu" and "--xla_gpu_enable_command_buffer=" not in os.environ.get("XLA_FLAGS", ""):
        notes.append("WARNING: command buffers are on, so that times are wrong; see --help")
    return "\n".join([*notes, "", HEADS])


if __name__ == "__main__":
    main()
