"""`eagle3 plan`: what a step of generation or training needs on a slice, before one is rented."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from eagle3_jax.checkpoint.formats.read import examine
from eagle3_jax.checkpoint.source import resolve
from eagle3_jax.cli import planner
from eagle3_jax.config import DraftConfig, TargetConfig
from eagle3_jax.errors import ConfigError, UserError
from eagle3_jax.meshes import MeshShape, check_mesh, parse_mesh
from eagle3_jax.planning.account import Job, Mode, best_mesh, slices_for, smallest
from eagle3_jax.planning.chips import CHIPS, Topology, parse_topology
from eagle3_jax.planning.compiling import compile_step
from eagle3_jax.planning.report import Plan, lines
from eagle3_jax.precision import parse_dtype
from eagle3_jax.quantization import QUANTIZATIONS, find_quantization

MODES = ("generate", "train")
DEFAULT_CONTEXT = {"generate": 8192, "train": 4096}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `eagle3 plan`."""
    parser.add_argument("--target", required=True, help="config.json, or the folder or hub id that has one")
    parser.add_argument("--draft", help="likewise, of a head; by default one of the target's sizes, 'none' for no head")
    parser.add_argument("--topology", required=True, help=f"for instance v5p:2x2x4 or h200:8; of {', '.join(CHIPS)}")
    parser.add_argument("--mode", required=True, choices=MODES)
    parser.add_argument("--mesh", help="for instance 'tp8' or 'fsdp16 tp4'; by default the fastest that fits")
    parser.add_argument("--batch", type=int, help="slots (16), or sequences of a step (4096 tokens a device)")
    parser.add_argument("--context", type=int, help="tokens of each (8192, or 4096 in training)")
    parser.add_argument("--k", type=int, help="drafts of a cycle (3), or steps of the training-time test (7)")
    parser.add_argument("--prefill", type=int, help="plan for a pass over so many prompt tokens of each slot")
    parser.add_argument("--quantization", help=f"the target's matrices in one byte: {', '.join(QUANTIZATIONS)}")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--accounting", action="store_true", help="count only, compile nothing: seconds, not minutes")


def run(args: argparse.Namespace) -> int:
    """Prints the plan. Exit status 1 if it does not fit."""
    jax.config.update("jax_platforms", "cpu")  # whatever is here, nothing runs on it
    topology, mode = parse_topology(args.topology), planner(args.mode)
    target = read_target(args.target)
    draft = read_draft(args.draft, target, args.mode)
    job = make_job(args, mode, target, draft, topology)
    shape = choose_mesh(args.mesh, mode, job, topology)
    compiled = None
    if topology.chip.is_tpu and not args.accounting:
        compiled = compile_step(mode, job, topology, shape)
    plan = Plan(job, topology, shape, mode.unit(job), mode.account(job, shape), compiled)
    print("\n".join(lines(plan)), flush=True)
    if plan.fits:
        return 0
    print("\n" + suggestion(plan, mode, fixed=args.batch is not None or args.mode == "generate"))
    return 1


def read_json_config(path_or_id: str) -> tuple[dict[str, Any], str]:
    """A config, and where it was found: a file, a folder, or a hub id of which the weights are not loaded."""
    path = Path(path_or_id)
    if not path.is_file():
        path = resolve(path_or_id, None, weights=False) / "config.json"
    try:
        return json.loads(path.read_text(encoding="utf-8")), str(path)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the config {path}: {error}") from error


def read_target(path_or_id: str) -> TargetConfig:
    """A target's config. Raises UserError where there is none that can be used."""
    raw, where = read_json_config(path_or_id)
    return TargetConfig.from_hf(raw, where=where)


def read_draft(path_or_id: str | None, target: TargetConfig, mode: str) -> DraftConfig | None:
    """A head's config in any published format; without one, a head of the target's sizes, as a recipe would make it."""
    if path_or_id == "none":
        return None
    if path_or_id is None:
        return planner("train").default_head(target)
    raw, where = read_json_config(path_or_id)
    found = examine(raw, None, target)
    if found.fields.config is None:
        raise ConfigError(f"{where}: {'; '.join(found.problems)}")
    return found.fields.config


def make_job(
    args: argparse.Namespace, mode: Mode, target: TargetConfig, draft: DraftConfig | None, topology: Topology
) -> Job:
    """What the flags ask for. Raises UserError for numbers that cannot be."""
    for name in ("batch", "context", "k"):
        value = getattr(args, name)
        if value is not None and value < (0 if name == "k" else 1):
            raise UserError(f"--{name} {value}: it must be positive")
    if args.k == 0 and args.mode == "train":
        raise UserError("--k 0: a head is trained on one step at least")
    _check_generation(args)
    context = args.context or DEFAULT_CONTEXT[args.mode]
    batch = args.batch or mode.default_batch(topology.devices, context)
    steps = mode.DEFAULT_STEPS if args.k is None else args.k
    head = draft if steps else None
    return Job(target, head, batch, context, steps, parse_dtype(args.dtype), args.quantization, args.prefill or 0)


def _check_generation(args: argparse.Namespace) -> None:
    """Flags that only generation has."""
    for name in ("prefill", "quantization"):
        if getattr(args, name) is not None and args.mode == "train":
            raise UserError(f"--{name}: training has none; it is for --mode generate")
    if args.quantization is not None:
        find_quantization(args.quantization)
    most = args.context or DEFAULT_CONTEXT["generate"]
    if args.prefill is not None and not 1 <= args.prefill <= most:
        raise UserError(f"--prefill {args.prefill}: it must be from 1 to the {most} tokens of --context")


def choose_mesh(text: str | None, mode: Mode, job: Job, topology: Topology) -> MeshShape:
    """The mesh asked for, or the best. Raises ConfigError if the topology, the models or the batch cannot have it."""
    if text is None:
        choice = best_mesh(mode, job, topology)
        if choice is None:
            raise ConfigError(f"no mesh of {topology.devices} devices can hold a batch of {job.batch}; give another")
        return choice.shape
    shape = parse_mesh(text)
    if shape.size < topology.devices:
        raise ConfigError(f"mesh {text!r} is of {shape.size} devices, {topology} has {topology.devices}: use all")
    check_mesh(shape, topology.devices, job.target, job.draft)
    if job.batch % mode.rows(shape):
        raise ConfigError(f"a batch of {job.batch} cannot be spread over the {mode.rows(shape)} parts of mesh {text!r}")
    return shape


def suggestion(plan: Plan, mode: Mode, *, fixed: bool) -> str:
    """What to do instead."""
    job, topology = plan.job, plan.topology
    here = best_mesh(mode, job, topology, {plan.shape})
    if here is not None and here.fits:
        return f"suggestion: by accounting mesh {str(here.shape)!r} fits on this slice"
    larger = [(t, j) for t, j in slices_for(mode, job, topology.chip, fixed=fixed) if t.devices > topology.devices]
    found = smallest(mode, larger)
    if found is not None:
        return f"suggestion: by accounting {found.topology} with mesh {str(found.shape)!r} is the smallest that fits"
    return "suggestion: no slice of this chip holds it; try " + " and ".join(_smaller(job))


def _smaller(job: Job) -> Iterable[str]:
    if job.batch > 1:
        yield f"--batch {job.batch // 2}"
    yield f"--context {job.context // 2}"
