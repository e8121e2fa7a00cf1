"""What a quantised target says, beside the one in bfloat16; and how fast its products are.

    python -m benchmarks.quantization [--model DIR --draft DIR --dataset PROMPTS.jsonl]     # quality, on any machine
    python -m benchmarks.quantization --products 4096x12288 12288x4096 [--rows 1 4 32 256]  # times of x @ w, here

Quality: the bfloat16 target answers the prompts greedily; then every way of holding the weights reads these answers
(logits at the same places) and writes its own, with the head that was trained for the bfloat16 target. float32 is there
to show what rounding to bfloat16 does by itself. Prints a table, and a last line of JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from eagle3_jax.precision import join, matmul_precision, split
from eagle3_jax.quantization import QUANTIZATIONS, matmul, quantize
from eagle3_jax.target import Target
from infer import LLM, SamplingParams
from infer.bench import Acceptance, Agreement, encode
from infer.bench_data import read_conversations
from infer.options import DEFAULT_DRAFTER, DEFAULT_MODEL
from infer.outputs import CompletionOutput

DRAFTS, STEPS, REPEATS = 3, 64, 5


@dataclasses.dataclass(frozen=True)
class Reading:
    """Logits [tokens, V] at every place of all answers, by one way of holding the weights; and its own answers."""

    logits: np.ndarray[Any, Any]
    answers: list[CompletionOutput]
    weight_bytes: int


def load(args: argparse.Namespace, *, dtype: str, quantization: str | None) -> LLM:
    return LLM(
        args.model, dtype=dtype, quantization=quantization, max_num_seqs=8, max_model_len=args.max_model_len,
        speculative_config={"model": args.draft, "num_speculative_tokens": DRAFTS},
    )  # fmt: skip


def answer(llm: LLM, prompts: Sequence[dict[str, Any]], tokens: int) -> list[CompletionOutput]:
    params = SamplingParams(temperature=0, max_tokens=tokens)
    return [output.outputs[0] for output in llm.generate(list(prompts), params, use_tqdm=False)]


def logits_at(
    model: Target, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> np.ndarray[Any, Any]:
    """Float32 logits [all answers' tokens, V] of what comes next, each answer read after its prompt."""
    rows = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    ids = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
    graph, leaves, tree = split(model)
    dtype = model.embed_tokens.weight[...].dtype

    @jax.jit
    def read(leaves: Any, ids: jax.Array) -> jax.Array:
        target = join(graph, tree, leaves)
        with matmul_precision(dtype):
            return target.logits(target(ids).hidden)

    found = [np.asarray(read(leaves, ids[i : i + 1])[0]) for i in range(len(rows))]
    return np.concatenate([x[len(p) - 1 : len(r) - 1] for x, p, r in zip(found, prompts, rows, strict=True)])


def read_all(args: argparse.Namespace) -> dict[str, Reading]:
    """By way of holding the weights; the first, bfloat16, is what the others are compared with."""
    ways: dict[str, dict[str, Any]] = {
        "bfloat16": {"dtype": "bfloat16", "quantization": None},
        "float32": {"dtype": "float32", "quantization": None},
        **{name: {"dtype": "bfloat16", "quantization": name} for name in QUANTIZATIONS},
    }
    found: dict[str, Reading] = {}
    prompts: list[dict[str, Any]] = []
    first: list[CompletionOutput] = []
    for name, way in ways.items():
        llm = load(args, **way)
        prompts = prompts or encode(llm, read_conversations(args.dataset, args.num_prompts), raw=args.raw)
        answers = answer(llm, prompts, args.output_len)
        first = first or answers
        ids = [prompt["prompt_token_ids"] for prompt in prompts]
        size = sum(x.nbytes for x in jax.tree.leaves(nnx.state(llm.target)))
        found[name] = Reading(logits_at(llm.target, ids, [a.token_ids for a in first]), answers, size)
    return found


def compare(reading: Reading, reference: Reading) -> dict[str, Any]:
    ours, theirs = (np.asarray(x.logits, np.float64) for x in (reading, reference))
    q, p = (x - np.logaddexp.reduce(x, axis=-1, keepdims=True) for x in (ours, theirs))
    agreement = Agreement.of(reading.answers, reference.answers)
    return {
        "weight_bytes": reading.weight_bytes,
        "logit_error": float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)),
        "kl": float(np.mean(np.sum(np.exp(p) * (p - q), axis=-1))),
        "same_best_token": float(np.mean(ours.argmax(-1) == theirs.argmax(-1))),
        "identical_answers": agreement.identical,
        "before_first_difference": agreement.share,
        "acceptance_length": Acceptance.of(reading.answers, DRAFTS).total.mean_acceptance_length,
    }


HEADS = (
    "| weights | bytes | logit error | KL, nats | same best token | identical answers | before the first difference "
    "| acceptance length |\n" + "| --- " * 8 + "|"
)


def line(name: str, found: dict[str, Any], answers: int) -> str:
    return (
        f"| {name} | {found['weight_bytes'] / 1e6:.2f} MB | {found['logit_error']:.4f} | {found['kl']:.5f} "
        f"| {found['same_best_token']:.2%} | {found['identical_answers']} of {answers} "
        f"| {found['before_first_difference']:.1%} | {found['acceptance_length']:.2f} |"
    )


def product_ms(x: jax.Array, w: Any) -> float:
    """Median milliseconds of x @ w, one after another in a loop on the device, as decoding has them."""

    @jax.jit
    def steps(x: jax.Array, w: Any) -> jax.Array:
        again = lambda _, x: x + 0 * jnp.sum(matmul(x, w), dtype=jnp.float32).astype(x.dtype)
        return jax.lax.fori_loop(0, STEPS, again, x)

    times = []
    for i in range(REPEATS + 2):
        started = time.perf_counter()
        jax.block_until_ready(steps(x, w))
        times += [(time.perf_counter() - started) / STEPS * 1e3] if i >= 2 else []
    return statistics.median(times)


def products(shapes: Sequence[str], rows: Sequence[int]) -> list[dict[str, Any]]:
    """Times of every way of holding matrices of these shapes, in x out."""
    found = []
    for shape in shapes:
        d_in, d_out = map(int, shape.split("x"))
        exact = jax.random.normal(jax.random.key(0), (d_in, d_out), jnp.bfloat16) * d_in**-0.5
        ways = {
            "bfloat16": exact,
            **{name: jax.jit(quantize, static_argnums=1)(exact, how) for name, how in QUANTIZATIONS.items()},
        }
        for count in rows:
            x = jnp.ones((count, d_in), jnp.bfloat16)
            for name, w in ways.items():
                size = sum(leaf.nbytes for leaf in jax.tree.leaves(w))
                ms = product_ms(x, w)
                found.append({"shape": shape, "rows": count, "weights": name, "ms": ms, "bytes": size})
                print(f"{shape}, {count} rows, {name}: {ms:.4f} ms, {size / ms / 1e9:.3f} TB/s", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--draft", type=Path, default=DEFAULT_DRAFTER)
    parser.add_argument("--dataset", type=Path, help="a JSONL file of prompts (default: eight built-in ones)")
    parser.add_argument("--num-prompts", type=int, default=40)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--raw", action="store_true", help="prompts as they are, without the chat template")
    parser.add_argument("--products", nargs="+", metavar="INxOUT", help="time products of these shapes instead")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 32, 256])
    args = parser.parse_args()
    report: dict[str, Any] = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    if args.products:
        report["products"] = products(args.products, args.rows)
    else:
        readings = read_all(args)
        reference = readings["bfloat16"]
        report["quality"] = {name: compare(reading, reference) for name, reading in readings.items()}
        print(f"{len(reference.answers)} answers, {len(reference.logits)} tokens\n\n{HEADS}")
        for name, found in report["quality"].items():
            print(line(name, found, len(reference.answers)))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
