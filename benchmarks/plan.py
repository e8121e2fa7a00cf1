"""The smallest slices on which targets generate and heads are trained: picked by accounting, confirmed by compiling.

    python -m benchmarks.plan CONFIGS                     # counts, and writes benchmarks/plan.md
    python -m benchmarks.plan CONFIGS --compile 27B v5p   # first compiles the rows that have all these words

CONFIGS is a folder of published config.json files, named as in MODELS. What was compiled is kept in
benchmarks/plan.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from eagle3_jax.cli import planner
from eagle3_jax.meshes import MeshShape
from eagle3_jax.planning.account import Choice, Job, Mode, slices_for, smallest, times
from eagle3_jax.planning.chips import CHIPS, GIB, Topology
from eagle3_jax.planning.cli import read_draft, read_target
from eagle3_jax.planning.collectives import by_kind, moved
from eagle3_jax.planning.compiling import compile_step

HERE = Path(__file__).parent
MODELS = (
    "Qwen3.5-4B", "Qwen3.5-9B", "Qwen3.5-27B", "Qwen3.5-35B-A3B", "Qwen3.5-122B-A10B", "Qwen3.5-397B-A17B",
    "Qwen3-235B-A22B",
)  # fmt: skip
JOBS = {"batch 1": ("generate", 1, 8192), "batch 64": ("generate", 64, 8192), "training": ("train", None, 4096)}
SLICES = ("v5e", "v5p", "v6e")
MESHES = 3  # of a slice, that the compiler may refuse before the next is tried


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table. choice: None if no slice holds it."""

    model: str
    what: str
    chip: str
    mode: Mode
    job: Job
    choice: Choice | None

    @property
    def words(self) -> str:
        return f"{self.model} {self.what} {self.chip}"

    @property
    def key(self) -> str:
        where = "" if self.choice is None else f"{self.choice.topology} {self.choice.shape}"
        return f"{self.model}, {self.what}, {where}"


def rows(configs: Path, known: dict[str, Any]) -> Iterator[Row]:
    """Every line, chosen by accounting among what the compiler has not refused."""
    for model in MODELS:
        target = read_target(str(configs / f"{model}.json"))
        for what, (kind, batch, context) in JOBS.items():
            mode = planner(kind)
            job = Job(target, read_draft(None, target, kind), batch or 1, context, mode.DEFAULT_STEPS, jnp.bfloat16)
            for chip in SLICES:
                jobs = dict(slices_for(mode, job, CHIPS[chip], fixed=batch is not None))
                row = partial(Row, model, what, chip, mode)
                refused: dict[Topology, set[MeshShape]] = {}
                while choice := smallest(mode, jobs.items(), refused):
                    if not _refused(row(jobs[choice.topology], choice), known):
                        break
                    tried = refused.setdefault(choice.topology, set())
                    tried.add(choice.shape)
                    if len(tried) == MESHES:
                        del jobs[choice.topology]
                yield row(job if choice is None else jobs[choice.topology], choice)


def _refused(row: Row, known: dict[str, Any]) -> bool:
    return row.key in known and bool(known[row.key]["too_large"])


def compiled(row: Row) -> dict[str, Any]:
    """One row, compiled: what a device holds, and what it passes on."""
    assert row.choice is not None
    start = time.monotonic()
    found = compile_step(row.mode, row.job, row.choice.topology, row.choice.shape)
    counts = found.collectives
    return {
        "jax": jax.__version__, "seconds": round(time.monotonic() - start), "too_large": found.too_large,
        "gib": round(found.total / GIB, 2), "temporaries_gib": round(found.temporaries / GIB, 2),
        "moved": None if counts is None else round(moved(counts)),
        "collectives": {} if counts is None else {kind: number for kind, (number, _) in by_kind(counts).items()},
    }  # fmt: skip


def line(row: Row, known: dict[str, Any]) -> str:
    """A row in Markdown."""
    if row.choice is None:
        return f"| {row.model} | {row.what} | {row.chip} | none | | | | no slice holds it |"
    chip = row.choice.topology.chip
    done = known.get(row.key)
    counted = None if done is None else done["moved"]
    spent = times(row.choice.account, chip, counted)
    held = row.choice.account.total / GIB if done is None else done["gib"]
    how = "accounted" if done is None else _confirmed(counted)
    ms = [f"{1e3 * x:.1f}" for x in (spent.total, spent.compute, spent.memory, spent.links)]
    cells = [
        row.model,
        row.what,
        str(row.choice.topology),
        str(row.choice.shape),
        f"{held:.1f}",
        ms[0],
        " / ".join(ms[1:]),
        how,
    ]
    return "| " + " | ".join(cells) + " |"


def _confirmed(moved: float | None) -> str:
    return "compiled" if moved is not None else "compiled, links accounted"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("configs", type=Path)
    parser.add_argument("--compile", nargs="*", metavar="WORD", help="compile the rows with these words")
    parser.add_argument("--out", type=Path, default=HERE)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    store = args.out / "plan.json"
    known = json.loads(store.read_text()) if store.exists() else {}
    while args.compile is not None and (row := next(unknown(rows(args.configs, known), known, args.compile), None)):
        known[row.key] = compiled(row)
        store.write_text(json.dumps(known, indent=1) + "\n")
        print(row.key, known[row.key], flush=True)
    (args.out / "plan.md").write_text(page(list(rows(args.configs, known)), known))


def unknown(table: Iterator[Row], known: dict[str, Any], words: list[str]) -> Iterator[Row]:
    """Rows with all of the words that are yet to be compiled."""
    wanted = (row for row in table if all(word in row.words for word in words))
    return (row for row in wanted if row.choice is not None and row.key not in known)


HEAD = """# What fits where

The smallest slice of each chip on which a target generates (64 slots or 1, of 8,192 tokens, K = 3, with a head) or a
head is trained on it (packed sequences of 4,096 tokens, one for each chip; 7 steps), in bfloat16, and on it the fastest
mesh. Both were picked by accounting. Rows marked *compiled* were then compiled for that slice with libtpu, on a machine
without a TPU: their memory is the compiler's, of HBM of 15.75 (v5e), 95.73 (v5p) and 31.24 GiB (v6e), and so are the
bytes on their links, where this jaxlib can print what libtpu made. Meshes that it refused are passed over, and slices
of which it refused three.

Times are what the chip's own rates allow at best (computing / memory / links; the longer of the first two and the
third), not measurements, and know nothing of latency: [docs/scaling.md](../docs/scaling.md). No TPU has run any of
this. Made by `python -m benchmarks.plan CONFIGS`; `--compile WORDS` confirms more rows.
"""
TABLE = """
| target | what | slice | mesh | GiB a device | ms a step | ms computing / memory / links | |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""


def page(table: list[Row], known: dict[str, Any]) -> str:
    """The whole file."""
    return HEAD + agreement(table, known) + TABLE + "\n".join(line(row, known) for row in table) + "\n"


def agreement(table: list[Row], known: dict[str, Any]) -> str:
    """How far the accounts of memory are from the compiler's."""
    found = [(row.choice.account, known[row.key]) for row in table if row.choice is not None and row.key in known]
    ratios = sorted(done["gib"] * GIB / account.total for account, done in found)
    if not ratios:
        return ""
    middle = statistics.median(ratios)
    return (
        f"\nThe compiler's memory is {ratios[0]:.2f} to {ratios[-1]:.2f} times what was accounted, {middle:.2f} in the "
        f"middle of {len(ratios)} rows.\n"
    )


if __name__ == "__main__":
    main()
