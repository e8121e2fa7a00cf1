"""A training step of any target with random weights: tokens per second, and its share of what matrices can do (MFU).

    python -m benchmarks.train CONFIG.json [--batch 8] [--length 4096] [--steps 7] [--json OUT]

Packed sequences, target online in the same program, draft vocabulary 32,000. The work of a token is counted as
`train.flops` says, recomputation left out, against the rate that a large bfloat16 product reaches in the same run.
`--profile` adds where the time goes, for which command buffers must be off
(XLA_FLAGS=--xla_gpu_enable_command_buffer=).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.models import head_config, random_model, read_target_config
from benchmarks.profiling import by_kind, by_scope, profile
from eagle3_jax.drafters.eagle3 import Eagle3
from eagle3_jax.meshes import parse_mesh
from eagle3_jax.target import Target
from pallas_kernels import dispatch
from train.flops import flops_per_token
from train.layout import optimizer_shardings
from train.objective import Objective
from train.step import Inputs, TrainState, batch_sharding, make_model, make_step

SCOPES = (
    "optimizer", "draft_attention", "draft_step", "loss", "vocabulary", "delta_rule", "attention", "mlp", "target",
)  # fmt: skip
SEGMENTS, REPEATS = 4, 5


def matrix_rate(size: int) -> float:
    """bfloat16 operations a second of a product of two size x size matrices, the median of ten calls of ten."""
    x = jnp.full((size, size), 0.01, jnp.bfloat16)
    run = jax.jit(lambda x: jax.lax.fori_loop(0, 10, lambda _, y: (y @ x) * jnp.bfloat16(0.01), x))
    run(x).block_until_ready()
    times = []
    for _ in range(10):
        started = time.perf_counter()
        run(x).block_until_ready()
        times.append(time.perf_counter() - started)
    return 10 * 2 * size**3 / statistics.median(times)


def random_inputs(batch: int, length: int, vocab_size: int) -> Inputs:
    """Rows of SEGMENTS packed samples, the last three quarters of each supervised."""
    rng = np.random.default_rng(0)
    each = length // SEGMENTS
    place = np.arange(length)
    ids = np.minimum(place // each, SEGMENTS - 1) + 1
    mask = (place - (ids - 1) * each) >= each // 4
    tokens = rng.integers(0, vocab_size, (batch, length), dtype=np.int32)
    spread = lambda x: jnp.asarray(np.broadcast_to(x, (batch, length)))
    return Inputs(jnp.asarray(tokens), spread(mask), spread(ids.astype(np.int32)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="a target's config.json")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=7, help="of training-time test")
    parser.add_argument("--loss", default="kl")
    parser.add_argument("--no-remat", action="store_true")
    parser.add_argument("--implementation", help="of operations with kernels, see pallas_kernels.dispatch")
    parser.add_argument("--mesh", help='over devices, as "fsdp2"; batch and tokens are those of all of them')
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report = measure(args)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))
    print(json.dumps({k: v for k, v in report.items() if k != "kernels"}))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    config = read_target_config(args.config)
    mesh = parse_mesh(args.mesh).mesh() if args.mesh else None
    target = random_model(Target, config, jnp.bfloat16, mesh=mesh)
    drafter = random_model(Eagle3, head_config(config), jnp.float32, mesh=mesh)
    model, params, frozen = make_model(
        target, drafter, num_steps=args.steps, dtype=jnp.bfloat16, remat=not args.no_remat,
        objective=Objective(args.loss), mesh=mesh,
    )  # fmt: skip
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-4))
    where = None if mesh is None else optimizer_shardings(optimizer, params, mesh)
    state = TrainState(params, jax.jit(optimizer.init, out_shardings=where)(params))
    inputs = random_inputs(args.batch, args.length, config.vocab_size)
    if mesh is not None:
        inputs = jax.device_put(inputs, batch_sharding(mesh))
    started = time.perf_counter()
    with dispatch.using(args.implementation) if args.implementation else contextlib.nullcontext():
        lowered = make_step(model, optimizer, state=state).lower(state, frozen, inputs)  # type: ignore[attr-defined]
    step = lowered.compile()
    compile_s, memory = time.perf_counter() - started, step.memory_analysis()
    print(f"compiled in {compile_s:.0f} s; temporaries {memory.temp_size_in_bytes / 2**30:.1f} GiB", flush=True)
    times = []
    for _ in range(REPEATS + 2):
        started = time.perf_counter()
        state, metrics = step(state, frozen, inputs)
        jax.block_until_ready(metrics.loss)
        times.append(time.perf_counter() - started)
    step_s, rate = statistics.median(times[2:]), matrix_rate(8192 if jax.default_backend() != "cpu" else 256)
    devices = 1 if mesh is None else mesh.size
    tokens = args.batch * args.length
    each = flops_per_token(config, head_config(config), args.steps, (args.length // SEGMENTS + 1) / 2)
    report: dict[str, Any] = {
        "config": args.config.name, "device": jax.devices()[0].device_kind, "jax": jax.__version__,
        "batch": args.batch, "length": args.length, "ttt_steps": args.steps, "compile_s": round(compile_s, 1),
        "temporaries_gib": memory.temp_size_in_bytes / 2**30, "arguments_gib": memory.argument_size_in_bytes / 2**30,
        "step_ms": step_s * 1e3, "tokens_per_second": tokens / step_s, "flops_per_token": each,
        "matrix_rate": rate, "mfu": each * tokens / step_s / rate / devices, "loss": float(metrics.loss),
        "mesh": args.mesh, "devices": devices,
    }  # fmt: skip
    print(json.dumps(report), flush=True)
    if args.profile:
        report |= _profile(step, state, frozen, inputs)
    return report


def _profile(step: Any, state: TrainState, frozen: Any, inputs: Inputs) -> dict[str, Any]:
    times, text = profile(lambda: step(state, frozen, inputs)[1].loss), step.as_text()
    scopes = {k: round(v / 1e6, 2) for k, v in by_scope(times, text, SCOPES).items()}
    found = [(kind, round(spent / 1e6, 3), count) for kind, spent, count in by_kind(times, text)[:24]]
    for name, spent in scopes.items():
        print(f"    {name:16} {spent:9.2f} ms")
    for kind, spent, count in found:
        print(f"        {spent:8.3f} {count:4} x {kind[-140:]}", flush=True)
    return {"scopes_ms": scopes, "kernels": found}


if __name__ == "__main__":
    main()
