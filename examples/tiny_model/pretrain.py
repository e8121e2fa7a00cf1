"""Trains the small model from nothing: float32 masters, bfloat16 arithmetic, AdamW, one device.

    python pretrain.py DATA OUT [--steps 1400] [--minutes 5]

DATA is what `prepare.py` wrote. The tokens live on the device and a dispatch runs many steps, so that the host never
holds a small model up. The first part of training reads text and conversations, the rest conversations alone. OUT is a
Hugging Face folder, rewritten whenever the validation loss improves.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array
from transformers import PreTrainedTokenizerFast

from eagle3_jax.checkpoint import save_target
from eagle3_jax.config import DELTA, TargetConfig
from eagle3_jax.precision import cast_for_compute
from eagle3_jax.target import Target

HERE = Path(__file__).parent
STEPS_PER_DISPATCH = 20
CONVERSATIONS_FROM = 0.7  # the part of training after which plain text is left out


@dataclasses.dataclass(frozen=True)
class Hyper:
    """What a run can choose."""

    steps: int
    minutes: float
    batch: int
    length: int
    learning_rate: float
    weight_decay: float
    warmup: int = 200
    final_rate: float = 0.02
    seed: int = 0


class Corpus(NamedTuple):
    """Training tokens on the device. `starts` lists text windows first, then `starts[first_conversation:]`."""

    tokens: Array  # [M] uint16
    starts: Array  # [N] int32
    first_conversation: int


class State(NamedTuple):
    """What a step changes."""

    params: Any
    moments: Any
    step: Array


def load_corpus(folder: Path, length: int) -> Corpus:
    """Reads `train.npy` and `starts.npz`, padded so that every window is whole."""
    tokens = np.concatenate([np.load(folder / "train.npy"), np.zeros(length, np.uint16)])
    starts = np.load(folder / "starts.npz")
    both = np.concatenate([starts["text"], starts["conversations"]])
    return Corpus(jnp.asarray(tokens), jnp.asarray(both), len(starts["text"]))


def validation_windows(folder: Path, length: int) -> Array:
    """[N, length + 1] int32, one after the other."""
    tokens = np.load(folder / "validation.npy")
    count = (len(tokens) - 1) // length
    return jnp.asarray(np.stack([tokens[i * length : (i + 1) * length + 1] for i in range(count)]), jnp.int32)


def new_model(config: TargetConfig, seed: int) -> Target:
    """Random weights, float32, fit for training: layers start as no-ops, delta-rule states with long memories.

    `Target` itself starts as transformers does (dt_bias 1), where most heads forget everything at each token. The
    step sizes here are those of Mamba and flash-linear-attention, log-uniform from 0.001 to 0.1.
    """
    model = Target(config, dtype=jnp.float32, rngs=nnx.Rngs(seed))
    keys = jax.random.split(jax.random.key(seed + 1), config.num_layers)
    for layer, kind, key in zip(model.layers, config.layer_types, keys, strict=True):
        writes = layer.linear_attn.out_proj if kind == DELTA else layer.self_attn.o_proj
        for linear in (writes, layer.mlp.down_proj):
            linear.kernel[...] = jnp.zeros_like(linear.kernel[...])
        if kind == DELTA:
            heads = (config.linear_num_value_heads,)
            size = jnp.exp(jax.random.uniform(key, heads, minval=jnp.log(0.001), maxval=jnp.log(0.1)))
            layer.linear_attn.dt_bias[...] = size + jnp.log(-jnp.expm1(-size))  # the inverse of softplus
    return model


def mean_loss(graph: Any, params: Any, windows: Array) -> Array:
    """Cross entropy per token of windows [B, T+1], in float32."""
    model = nnx.merge(graph, cast_for_compute(params, jnp.bfloat16))
    logits = model.logits(model(windows[:, :-1]).hidden)
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()


def optimizer(hyper: Hyper) -> optax.GradientTransformation:
    """AdamW without its learning rate, which `train_steps` applies; only matrices decay."""
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.95),
        optax.add_decayed_weights(hyper.weight_decay, mask=lambda tree: jax.tree.map(lambda x: x.ndim >= 2, tree)),
    )


def learning_rate(hyper: Hyper, step: Array, progress: Array) -> Array:
    """Linear warm-up by steps, then a cosine over `progress` (0 to 1)."""
    warm = jnp.minimum(1.0, (step + 1) / hyper.warmup)
    cosine = 0.5 * (1 + jnp.cos(jnp.pi * progress))
    return hyper.learning_rate * warm * (hyper.final_rate + (1 - hyper.final_rate) * cosine)


def sample_windows(corpus: Corpus, hyper: Hyper, step: Array, progress: Array) -> Array:
    """[B, T+1] int32 windows from random starts; a pure function of the seed and the step."""
    key = jax.random.fold_in(jax.random.key(hyper.seed), step)
    low = jnp.where(progress >= CONVERSATIONS_FROM, corpus.first_conversation, 0)
    chosen = corpus.starts[jax.random.randint(key, (hyper.batch,), low, corpus.starts.shape[0])]
    return corpus.tokens[chosen[:, None] + jnp.arange(hyper.length + 1)[None]].astype(jnp.int32)


def train_steps(
    graph: Any, hyper: Hyper, count: int, state: State, corpus: Corpus, progress: Array
) -> tuple[State, Array]:
    """`count` optimizer steps; returns the state and the mean training loss."""
    transform = optimizer(hyper)

    def step(state: State, _: None) -> tuple[State, Array]:
        windows = sample_windows(corpus, hyper, state.step, progress)
        loss, grads = jax.value_and_grad(functools.partial(mean_loss, graph))(state.params, windows)
        updates, moments = transform.update(grads, state.moments, state.params)
        rate = learning_rate(hyper, state.step, progress)
        params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
        return State(params, moments, state.step + 1), loss

    state, losses = jax.lax.scan(step, state, None, length=count)
    return state, losses.mean()


def validation_loss(graph: Any, params: Any, windows: Array) -> Array:
    """Mean over windows [N, T+1], one batch of them at a time."""
    losses = jax.lax.map(lambda window: mean_loss(graph, params, window[None]), windows, batch_size=32)
    return losses.mean()


def fit(
    graph: Any, params: Any, hyper: Hyper, corpus: Corpus, held_out: Array, save: Callable[[Any], None]
) -> dict[str, Any]:
    """Trains and reports; `save` receives the parameters whenever the validation loss is the best so far."""
    per_call = min(STEPS_PER_DISPATCH, hyper.steps)
    state = State(params, optimizer(hyper).init(params), jnp.zeros((), jnp.int32))
    run = jax.jit(functools.partial(train_steps, graph, hyper, per_call), donate_argnums=0)
    compiled = run.lower(state, corpus, jnp.zeros(())).compile()
    evaluate = jax.jit(functools.partial(validation_loss, graph))
    best, started, calls = float("inf"), time.perf_counter(), hyper.steps // per_call
    step, progress, loss = 0, 0.0, jnp.zeros(())
    for call in range(calls):
        progress = max(call / calls, (time.perf_counter() - started) / (60 * hyper.minutes))
        if progress >= 1:
            break
        state, loss = compiled(state, corpus, jnp.asarray(progress, jnp.float32))
        step += per_call
        if (call + 1) % max(calls // 20, 1) == 0 or call + 1 == calls:
            held = float(evaluate(state.params, held_out))
            seconds = time.perf_counter() - started
            rate = step * hyper.batch * hyper.length / seconds
            print(f"step {step:6d}  {seconds:6.1f} s  {rate:10,.0f} tokens/s  train {float(loss):.4f}  "
                  f"validation {held:.4f}", flush=True)
            if held < best:
                best = held
                save(state.params)
    jax.block_until_ready(state)
    return {"steps": step, "tokens": step * hyper.batch * hyper.length, "train_loss": round(float(loss), 4),
            "validation_loss": round(best, 4), "seconds": round(time.perf_counter() - started, 1)}


def greedy(model: Target, prompts: list[list[int]], num_tokens: int) -> np.ndarray:
    """Continues each prompt by a full pass a token, [B, longest + num_tokens]; the plainest decoder there is."""
    lengths = jnp.asarray([len(p) for p in prompts])
    buffer = np.zeros((len(prompts), int(lengths.max()) + num_tokens), np.int32)
    for row, prompt in zip(buffer, prompts, strict=True):
        row[: len(prompt)] = prompt
    graph, params = nnx.split(model)

    @jax.jit
    def decode(params: Any, tokens: Array) -> Array:
        model, rows = nnx.merge(graph, params), jnp.arange(len(prompts))

        def write(i: Array, tokens: Array) -> Array:
            hidden = model(tokens).hidden[rows, lengths + i - 1]
            return tokens.at[rows, lengths + i].set(model.logits(hidden[:, None])[:, 0].argmax(-1).astype(jnp.int32))

        return jax.lax.fori_loop(0, num_tokens, write, tokens)

    return np.asarray(decode(params, jnp.asarray(buffer)))


def show_answers(model: Target, data: Path, count: int = 4, num_tokens: int = 160) -> None:
    """Prints greedy answers to questions that training never saw."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(data / "tokenizer")
    with (data / "validation.jsonl").open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    asked = [row["messages"][:1] for row in rows[:: max(len(rows) // count, 1)][:count]]
    prompts = [
        tokenizer.apply_chat_template(m, add_generation_prompt=True, tokenize=True, return_dict=False) for m in asked
    ]
    for row, prompt in zip(greedy(model, prompts, num_tokens), prompts, strict=True):
        answer = row[len(prompt) : len(prompt) + num_tokens].tolist()
        end = answer.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in answer else len(answer)
        print(f"--- {tokenizer.decode(prompt)}{tokenizer.decode(answer[:end])}", flush=True)


def write_folder(graph: Any, params: Any, data: Path, out: Path) -> None:
    """Weights in bfloat16, config, stop ids and tokenizer."""
    config = json.loads((HERE / "config.json").read_text())
    tokenizer = PreTrainedTokenizerFast.from_pretrained(data / "tokenizer")
    stops = {"eos_token_id": [tokenizer.eos_token_id, config["eos_token_id"]], "pad_token_id": config["pad_token_id"]}
    model = nnx.merge(graph, cast_for_compute(params, jnp.bfloat16))
    save_target(model, out, config, generation_config=stops)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(data / "tokenizer" / name, out)


def write_card(out: Path, report: dict[str, Any]) -> None:
    """README.md: `model_card.md` with the figures of this run."""
    device = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    values = {**report, "tokens_millions": round(report["tokens"] / 1e6), "megabytes": round(size / 1e6, 2)}
    text = (HERE / "model_card.md").read_text()
    (out / "README.md").write_text(text.format(**values, device=device))


def main() -> None:
    """Trains, saves, and prints sample answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=1400)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="anneal in time to end after so long")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--weight-decay", type=float, default=0.3)
    args = parser.parse_args()
    hyper = Hyper(args.steps, args.minutes, args.batch, args.length, args.learning_rate, args.weight_decay)

    config = TargetConfig.from_hf(json.loads((HERE / "config.json").read_text()))
    graph, params = nnx.split(new_model(config, hyper.seed))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(f"{parameters:,} parameters", flush=True)

    best: Any = None

    def save(params: Any) -> None:
        nonlocal best
        best = jax.device_get(cast_for_compute(params, jnp.bfloat16))  # a copy: training donates its arrays
        write_folder(graph, params, args.data, args.out)

    corpus, held_out = load_corpus(args.data, hyper.length), validation_windows(args.data, hyper.length)
    report = fit(graph, params, hyper, corpus, held_out, save)
    print(json.dumps(report))
    write_card(args.out, {**report, "parameters": parameters})
    show_answers(nnx.merge(graph, best), args.data)


if __name__ == "__main__":
    main()
