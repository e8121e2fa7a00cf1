"""How near decoding comes to the time of reading the weights: steps, cycles and prefill of any config, random weights.

    python -m benchmarks.decode CONFIG.json [--batch 1 8 32 64] [--context 128] [--json OUT]

In one run: (floor) the model's own matrices applied one after another to as many rows, nothing else, and the bytes of
recurrent state and attention cache (and of the experts that so many rows are likely to meet) at the rate that this
reaches; (step) generation without a drafter; (cycle) with one, at a synthetic acceptance length; the same with
sampling. Random weights make all tokens about as likely, and top_p would keep most of the vocabulary, as in no language
model. So logits are spread as `--logits` says, by default so that temperature 0.8 and top_p 0.95 keep some hundreds.
Every figure is the median over repeated calls of the engine's own loop. `--mesh` spreads it over devices.
`--profile` adds where the time goes, for which command buffers must be off
(XLA_FLAGS=--xla_gpu_enable_command_buffer=): they hide their kernels from the profiler.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from benchmarks.models import head_config, random_model, read_target_config
from benchmarks.profiling import by_kind, by_scope, profile
from eagle3_jax.cache import DeltaState, KVPages
from eagle3_jax.config import DraftConfig, TargetConfig
from eagle3_jax.drafters.eagle3 import Eagle3
from eagle3_jax.meshes import parse_mesh
from eagle3_jax.precision import join, split
from eagle3_jax.quantization import QUANTIZATIONS, find_quantization, held, quantize_model
from eagle3_jax.sharding import laid_out
from eagle3_jax.target import Target
from infer.cycle import DecodeState, Speculation, prefill, run_cycles
from infer.engine import EngineConfig, empty_state, state_shardings
from pallas_kernels import dispatch
from pallas_kernels.verification import Feature

CYCLES, REPEATS = 16, 5
SCOPES = ("draft", "delta_rule", "attention", "mlp", "logits", "verify", "target")


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table. `acceptance` is synthetic; K = 0 is a step without a drafter."""

    batch: int
    context: int
    num_drafts: int = 0
    acceptance: float = 1.0
    temperature: float = 0.0

    @property
    def speculation(self) -> Speculation:
        if not self.num_drafts:
            return Speculation()
        return Speculation(
            self.num_drafts, rejection_sample_method="synthetic", synthetic_acceptance_length=self.acceptance
        )

    @property
    def asks(self) -> frozenset[Feature]:
        return frozenset({"temperature", "top_p"}) if self.temperature else frozenset()

    @property
    def engine(self) -> EngineConfig:
        room = self.context + CYCLES * (REPEATS + 3) * (self.num_drafts + 1)
        return EngineConfig(self.batch, room, self.speculation, dtype=jnp.bfloat16)


class Models:
    """A target and its head, taken apart for jit."""

    def __init__(
        self, target: TargetConfig, draft: DraftConfig, dtype: Any, quantization: str | None = None,
        mesh: Mesh | None = None, logits: float = 4.0,
    ) -> None:  # fmt: skip
        """logits: their standard deviation."""
        self.target_config, self.draft_config, self.mesh = target, draft, mesh
        model, head = (random_model(kind, c, dtype, mesh=mesh) for kind, c in ((Target, target), (Eagle3, draft)))
        tied = (target.vocab_size / target.hidden_size) ** 0.5 if target.tie_word_embeddings else 1.0
        for norm, scale in ((model.norm, logits * tied), (head.norm, logits)):
            norm.weight[...] = jnp.full_like(norm.weight[...], scale - norm.zero_centered)
        if quantization is not None:
            quantize_model(model, find_quantization(quantization))
        if mesh is None:
            model.merge_projections()
        self.parts = [split(model), split(head)]

    def leaves(self, case: Case) -> list[list[Array]]:
        return [leaves for _, leaves, _ in self.parts[: 2 if case.num_drafts else 1]]

    def join(self, leaves: list[list[Array]]) -> tuple[Target, Eagle3 | None]:
        models = [join(graph, tree, own) for (graph, _, tree), own in zip(self.parts, leaves, strict=False)]
        return models[0], models[1] if len(models) > 1 else None

    def state(self, case: Case) -> DecodeState:
        """Every slot in the middle of generating, `context` tokens known."""
        return jax.jit(lambda: self._state(case), **self._places(case))()

    def _places(self, case: Case) -> dict[str, Any]:
        if self.mesh is None:
            return {}
        return {"out_shardings": state_shardings(jax.eval_shape(lambda: self._state(case)), self.mesh)}

    def _state(self, case: Case) -> DecodeState:
        draft = self.draft_config if case.num_drafts else None
        state = empty_state(self.target_config, draft, case.engine)
        full = jnp.full((case.batch,), case.context, jnp.int32)
        sampling = state.sampling
        if case.temperature:
            heat = jnp.full((case.batch,), case.temperature, jnp.float32)
            sampling = dataclasses.replace(sampling, temperature=heat, top_p=jnp.full_like(heat, 0.95))
        return dataclasses.replace(
            state, lengths=full + 1, prompt_lengths=full, limits=full + 10**6, active=full > 0, sampling=sampling,
            num_features=jnp.minimum(full, 1), target=state.target.replace(lengths=full),
        )  # fmt: skip

    def compile(self, case: Case, implementation: str | None = None) -> Any:
        def decode(leaves: list[list[Array]], state: DecodeState) -> DecodeState:
            start, limit = self.join(leaves), jnp.int32(CYCLES)
            with laid_out(self.mesh, "slots"):
                return run_cycles(*start, state, case.speculation, limit, jnp.int32(case.batch + 1), case.asks)

        places = self._places(case)
        state = jax.eval_shape(lambda: self._state(case))
        if places:
            state = jax.tree.map(lambda x, at: x.update(sharding=at), state, places["out_shardings"])
        with dispatch.using(implementation) if implementation else contextlib.nullcontext():
            lowered = jax.jit(decode, donate_argnums=1, **places).lower(self.leaves(case), state)
        return lowered.compile()


def matrices(leaves: list[Array]) -> list[Array]:
    """Without scales, which are float32."""
    return [x for x in leaves if x.ndim == 2 and min(x.shape) > 8 and x.dtype != jnp.float32]


def chain(x: Array, weights: list[Array]) -> Array:
    """x [M, any] through every matrix in turn, cut or repeated to the width that each takes."""
    for w in weights:
        w = w if w.shape[0] < 10 * w.shape[1] else w.T  # tied embeddings stand as [V, D]
        x = _fit(x, w.shape[0]) @ (w if w.dtype == x.dtype else held(w, x).astype(x.dtype))
    return x


def _fit(x: Array, width: int) -> Array:
    return jnp.tile(x, (1, -(-width // x.shape[1])))[:, :width]


def cache_bytes(state: DecodeState, context: int) -> int:
    """Read and written a step: recurrent states twice, keys and values of the context once."""
    total = 0
    for layer in state.target.layers:
        if isinstance(layer, DeltaState):
            total += 2 * _nbytes(layer.state)
        elif isinstance(layer, KVPages):
            slots = state.lengths.shape[0]
            total += 2 * _nbytes(layer.keys) * context // (layer.keys.shape[1] * layer.keys.shape[2] // slots)
    return total


def _nbytes(x: Any) -> int:
    return x.size * x.dtype.itemsize


def milliseconds(run: Any, argument: Any, calls: int) -> tuple[float, Any]:
    """Median over REPEATS of one call's time / calls, after two calls that warm up. `run` maps argument to itself."""
    times = []
    for i in range(REPEATS + 2):
        jax.block_until_ready(argument)
        started = time.perf_counter()
        argument = jax.block_until_ready(run(argument))
        if i >= 2:
            times.append((time.perf_counter() - started) / calls * 1e3)
    return statistics.median(times), argument


def floor(models: Models, batch: int, context: int) -> dict[str, float]:
    """Time of the chain, its rate, and the time with the bytes of state and cache at that rate; of one device of many.

    On a mesh each device multiplies its own parts, and nothing is passed between them.
    """
    weights = matrices(models.parts[0][1])
    if not models.target_config.tie_word_embeddings:  # the table of embeddings is not multiplied by
        weights = [w for w in weights if w.shape != (models.target_config.vocab_size, models.target_config.hidden_size)]
    # The loop's steps depend on one another, so that no product is taken out of it.
    again = lambda x, ws: _fit(chain(x, ws), x.shape[1]) * 0 + x
    many = lambda x, ws: jax.lax.fori_loop(0, CYCLES, lambda _, x: again(x, ws), x)
    if models.mesh is not None:
        specs: Any = PartitionSpec(), [w.sharding.spec for w in weights]  # type: ignore[attr-defined]
        many = jax.shard_map(many, mesh=models.mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
    x = jnp.ones((batch, models.target_config.hidden_size), jnp.bfloat16)
    run = jax.jit(many)
    time_ms, _ = milliseconds(lambda x: run(x, weights), x, CYCLES)
    size = sum(_local_bytes(w) for w in weights)
    extra = cache_bytes(jax.eval_shape(lambda: models._state(Case(batch, context))), context)
    if models.mesh is not None:
        extra //= models.mesh.shape["data"] * models.mesh.shape["tensor"]
    extra += expert_bytes(models, batch)
    return {
        "chain_ms": time_ms, "weight_bytes": size, "cache_bytes": extra, "terabytes_per_second": size / time_ms / 1e9,
        "floor_ms": time_ms * (size + extra) / size,
    }  # fmt: skip


def expert_bytes(models: Models, rows: int) -> int:
    """Of one device, if each row chooses its experts without regard to the others."""
    c = models.target_config
    experts = sum(_local_bytes(w) for w in models.parts[0][1] if w.ndim == 3 and w.shape[0] == c.num_experts)
    return int(experts * (1 - (1 - c.num_experts_per_tok / c.num_experts) ** rows)) if experts else 0


def _local_bytes(x: Array) -> int:
    return x.addressable_shards[0].data.nbytes


def measure(models: Models, case: Case, compiled: Any, with_profile: bool) -> dict[str, Any]:
    leaves = models.leaves(case)
    time_ms, state = milliseconds(lambda s: compiled(leaves, s), models.state(case), CYCLES)
    grown = (state.lengths[0] - case.context - 1) / (CYCLES * (REPEATS + 2))
    found = {**dataclasses.asdict(case), "ms": time_ms, "tokens_per_cycle": float(grown)}
    found["tokens_per_second"] = case.batch * found["tokens_per_cycle"] / time_ms * 1e3
    if with_profile:
        times, text = profile(lambda: compiled(leaves, state)), compiled.as_text()
        found["scopes_ms"] = {k: round(v / CYCLES / 1e6, 4) for k, v in by_scope(times, text, SCOPES).items()}
        kinds = by_kind(times, text)[:60]
        found["kernels"] = [(kind, round(spent / CYCLES / 1e6, 4), count) for kind, spent, count in kinds]
    return found


def prefill_ms(models: Models, tokens: int, chunk: int) -> float:
    """Milliseconds for a prompt of `tokens`, `chunk` at a time, with the drafter."""
    case = Case(1, tokens + 8, 3, 2.0)
    leaves, state = models.leaves(case), models.state(case)
    run = jax.jit(lambda w, s: prefill(*models.join(w), s, chunk), donate_argnums=1)

    def whole(state: DecodeState) -> DecodeState:
        zero, all_of_it = jnp.zeros_like(state.lengths), jnp.full_like(state.lengths, tokens)
        state = dataclasses.replace(
            state, prompt_lengths=all_of_it, lengths=all_of_it + 0, target=state.target.replace(lengths=zero)
        )
        for _ in range(-(-tokens // chunk)):
            state = run(leaves, state)
        return state

    return milliseconds(whole, state, 1)[0]


def growth(report: dict[str, Any]) -> list[dict[str, Any]]:
    """By how much a longer context costs more, beside the time of its keys and values at the floor's rate.

    For each kind of case, from the shortest context to the longest: microseconds for a token of context, those for its
    bytes of all slots, and the ratio of the two. The bytes are the target's; a head adds those of its layer, K times.
    """
    kinds: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for case in report["cases"]:
        kinds.setdefault(tuple(case[k] for k in ("batch", "num_drafts", "acceptance", "temperature")), []).append(case)
    found = []
    for (batch, drafts, acceptance, temperature), same in kinds.items():
        short, long = (pick(same, key=lambda case: case["context"]) for pick in (min, max))
        if (tokens := long["context"] - short["context"]) == 0:
            continue
        low, high = (report["floors"][f"{batch}x{case['context']}"] for case in (short, long))
        measured = (long["ms"] - short["ms"]) / tokens * 1e3
        bytes_each = (high["cache_bytes"] - low["cache_bytes"]) / tokens
        least = bytes_each / low["terabytes_per_second"] / 1e6
        kind = {"batch": batch, "num_drafts": drafts, "acceptance": acceptance, "temperature": temperature}
        found.append({**kind, "us_per_token": measured, "us_by_bytes": least, "ratio": measured / least})
    return found


def cases(args: argparse.Namespace) -> list[Case]:
    found = []
    for context in args.context:
        for batch in args.batch:
            found.append(Case(batch, context))
            for k, acceptance in ((k, a) for k in args.drafts for a in args.acceptance):
                found.append(Case(batch, context, k, acceptance))
            if args.temperature:
                found += [Case(batch, context, k, args.acceptance[0], args.temperature) for k in args.drafts[:1]]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="a target's config.json")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--context", type=int, nargs="+", default=[128])
    parser.add_argument("--drafts", type=int, nargs="*", default=[3])
    parser.add_argument("--acceptance", type=float, nargs="+", default=[2.34, 3.0])
    parser.add_argument("--temperature", type=float, default=0.0, help="also time a sampled cycle, with top_p 0.95")
    parser.add_argument("--logits", type=float, default=4.0, help="their standard deviation; at 1 most are kept")
    parser.add_argument("--prefill", type=int, nargs="*", default=[])
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--implementation", help="of operations with kernels, see pallas_kernels.dispatch")
    parser.add_argument("--mesh", help='over devices, as "tp2" or "ep2 tp2"')
    parser.add_argument("--quantization", choices=tuple(QUANTIZATIONS), help="of the target's matrices")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    started = time.perf_counter()
    target = read_target_config(args.config)
    mesh = parse_mesh(args.mesh).mesh() if args.mesh else None
    models = Models(target, head_config(target), jnp.bfloat16, args.quantization, mesh, args.logits)
    rows = cases(args)
    with ThreadPoolExecutor() as pool:  # XLA compiles outside of Python's lock
        compiled = list(pool.map(lambda case: models.compile(case, args.implementation), rows))
    report: dict[str, Any] = {
        "config": args.config.name, "device": jax.devices()[0].device_kind, "jax": jax.__version__, "mesh": args.mesh,
        "logits": args.logits, "ready_s": time.perf_counter() - started, "floors": {}, "cases": [], "prefill_ms": {},
    }  # fmt: skip
    print(f"{report['device']}, jax {jax.__version__}; made and compiled in {report['ready_s']:.0f} s", flush=True)
    for case, program in zip(rows, compiled, strict=True):
        key = f"{case.batch}x{case.context}"
        if key not in report["floors"]:
            report["floors"][key] = floor(models, case.batch, case.context)
            print(f"batch {case.batch}, context {case.context}: floor", _line(report["floors"][key]), flush=True)
        found = measure(models, case, program, args.profile)
        found["of_floor"] = found["ms"] / report["floors"][key]["floor_ms"]
        report["cases"].append(found)
        print("  ", _line({k: v for k, v in found.items() if k not in ("scopes_ms", "kernels")}), flush=True)
        for name, spent in found.get("scopes_ms", {}).items():
            print(f"        {name:12} {spent:8.3f} ms")
        for kind, spent, count in found.get("kernels", [])[:16]:
            print(f"            {spent:7.3f} {count:4} x {kind[-160:]}", flush=True)
    report["growth"] = growth(report)
    for row in report["growth"]:
        print("context:", _line(row), flush=True)
    for tokens in args.prefill:
        report["prefill_ms"][tokens] = prefill_ms(models, tokens, args.chunk)
        print(f"prefill of {tokens}: {report['prefill_ms'][tokens]:.1f} ms", flush=True)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))
    for operation, reason in dispatch.fallbacks().items():
        print(f"{operation}: the reference, since {reason}")
    print(json.dumps(report | {"cases": [_short(case) for case in report["cases"]]}))


def _short(case: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in case.items() if k not in ("scopes_ms", "kernels")}


def _line(found: dict[str, Any]) -> str:
    return ", ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in found.items())


if __name__ == "__main__":
    main()
