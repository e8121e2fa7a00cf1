"""What `make demo` shows: the model in this repository writes with and without its EAGLE-3 head.

Both write the same tokens, greedy and sampled; with the head, the target runs fewer times. In float32, where the two
programs' rounding cannot turn an argmax. On a CPU this is a demonstration of correctness, not of speed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from eagle3_jax import LLM, SamplingParams
from infer.outputs import RequestOutput, SpecMetrics

QUESTIONS = (
    "Tom has 12 apples. He gives 5 of them to Anna and buys 8 more. How many apples does Tom have now?",
    "A book costs $15 and a pen costs $2. How much do 3 books and 4 pens cost?",
    "Write a Python function that returns the sum of the numbers in a list.",
    "A train travels 60 miles an hour. How far does it travel in 4 hours?",
)


def conversations() -> list[list[dict[str, str]]]:
    """One question each."""
    return [[{"role": "user", "content": question}] for question in QUESTIONS]


def show(title: str, plain: Sequence[RequestOutput], drafted: Sequence[RequestOutput], num_drafts: int) -> bool:
    """Prints both runs; True if every token is the same."""
    print(f"\n=== {title} ===")
    same = True
    for question, without, using in zip(QUESTIONS, plain, drafted, strict=True):
        a, b = without.outputs[0], using.outputs[0]
        same = same and a.token_ids == b.token_ids
        verdict = "the same" if a.token_ids == b.token_ids else "DIFFERENT"
        metrics = SpecMetrics.from_codes(b.codes, num_drafts)
        print(f"\n[question] {question}\n[answer]   {b.text.strip()}")
        print(
            f"[tokens]   {verdict}: {len(a.token_ids)}; target passes "
            f"{len(a.token_ids)} without the head, {metrics.num_drafts + 1} with it; "
            f"acceptance length {metrics.mean_acceptance_length:.2f}"
        )
    total = SpecMetrics.of(drafted, num_drafts)
    tokens = sum(len(output.outputs[0].token_ids) for output in plain)
    passes = total.num_drafts + len(drafted)
    print(
        f"\nAll answers: {'the same tokens' if same else 'DIFFERENT TOKENS'}; mean acceptance length "
        f"{total.mean_acceptance_length:.2f}; {tokens} target passes without the head, {passes} with it: "
        f"{tokens - passes} saved ({1 - passes / tokens:.0%})."
    )
    return same


def main() -> int:
    """Runs the demonstration; 1 if any token differs."""
    print("Loading the model of this repository and its EAGLE-3 head (float32), compiling two programs ...", flush=True)
    drafted = LLM(dtype="float32", max_model_len=512, max_num_seqs=4)
    plain = LLM.from_models(
        drafted.target, tokenizer=drafted.get_tokenizer(), stop_ids=drafted.stop_ids, max_model_len=512, max_num_seqs=4
    )
    settings = {
        "greedy": SamplingParams(temperature=0, max_tokens=160),
        "sampled, temperature 0.8, top_p 0.95, seed 1": SamplingParams(
            temperature=0.8, top_p=0.95, max_tokens=160, seed=1
        ),
    }
    same = True
    for title, params in settings.items():
        answers = [llm.chat(conversations(), params, use_tqdm=False) for llm in (plain, drafted)]
        same = show(title, answers[0], answers[1], drafted.num_speculative_tokens) and same
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
