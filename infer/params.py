"""What a request may ask of the sampler: vLLM's `SamplingParams`, as far as it is supported here.

Whatever is not understood is refused by name (`UserError`, a `ValueError`): a parameter that is silently ignored
changes the text without anybody noticing.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from eagle3_jax.errors import UserError

# vLLM treats a temperature below this as 0 (its `_SAMPLING_EPS`): dividing by less overflows float32 logits.
GREEDY_BELOW = 1e-5

# Names that vLLM's SamplingParams has and ours does not, with what to do instead where there is something.
UNSUPPORTED: dict[str, str] = {
    "presence_penalty": "",
    "frequency_penalty": "",
    "repetition_penalty": "",
    "logprobs": "",
    "prompt_logprobs": "",
    "logprob_token_ids": "",
    "flat_logprobs": "",
    "logit_bias": "",
    "allowed_token_ids": "",
    "bad_words": "",
    "structured_outputs": "",
    "guided_decoding": "",
    "logits_processors": "",
    "extra_args": "",
    "thinking_token_budget": "",
    "truncate_prompt_tokens": "cut the prompt before you pass it",
    "detokenize": "load the model with skip_tokenizer_init=True to get token ids alone",
    "output_kind": "use LLM.stream() for partial outputs",
    "best_of": "use n and choose among the outputs",
    "use_beam_search": "",
    "spaces_between_special_tokens": "",
}


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)`, or nothing when no known name is close to `name`."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one prompt is continued. Fields, defaults and meaning as in vLLM.

    n                 number of independent continuations
    temperature       0 (or less than 1e-5) takes the most likely token; 1 samples from the model's distribution
    top_p             sample from the smallest set of most likely tokens with at least this probability, in (0, 1]
    top_k             sample from the k most likely tokens; 0 or -1 = all
    min_p             leave out tokens less likely than min_p times the most likely one, in [0, 1]
    seed              makes the text depend on weights, prompt and parameters alone; None = the engine's seed
    max_tokens        at most so many new tokens; None = up to the context limit
    min_tokens        no stop token, and no stop string, before so many new tokens
    stop              string(s) that end the text; not part of it unless `include_stop_str_in_output`
    stop_token_ids    token ids that end the text, beside the model's own
    ignore_eos        the model's own stop ids do not end the text (those in `stop_token_ids` still do)
    include_stop_str_in_output   keep the stop string (or stop token's text) in the text
    skip_special_tokens          leave special tokens out of the text

    Raises:
      UserError: (a ValueError) an unknown name, or a value out of range or contradicting another; it says which.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __new__(cls, **kwargs: Any) -> SamplingParams:
        # Before the generated __init__, whose TypeError would neither suggest a name nor tell "unknown" from
        # "known to vLLM, not offered here".
        for name in kwargs:
            _check_name(name, [field.name for field in dataclasses.fields(cls)])
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self._check_numbers()
        for name in ("n", "top_k", "seed", "max_tokens", "min_tokens"):  # 32 bits of numpy do not hold a seed
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, int(value))
        self._check_flags()
        self._set_stops()
        self._check_together()

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whatever the caller gave."""
        return tuple(self.stop or ())

    def _check_numbers(self) -> None:
        _check("n", self.n, _is_int(self.n) and self.n >= 1, "an integer of at least 1")
        temperature_ok = _is_number(self.temperature) and self.temperature >= 0
        _check("temperature", self.temperature, temperature_ok, "a finite number of at least 0 (0 = greedy)")
        _check("top_p", self.top_p, _is_number(self.top_p) and 0 < self.top_p <= 1, "a number in (0, 1]")
        _check("top_k", self.top_k, _is_int(self.top_k) and self.top_k >= -1, "a positive integer, or 0 or -1 for all")
        _check("min_p", self.min_p, _is_number(self.min_p) and 0 <= self.min_p <= 1, "a number in [0, 1]")
        seed_ok = self.seed is None or (_is_int(self.seed) and 0 <= self.seed < 2**64)
        _check("seed", self.seed, seed_ok, "None or an integer in [0, 2**64)")
        max_ok = self.max_tokens is None or (_is_int(self.max_tokens) and self.max_tokens >= 1)
        _check("max_tokens", self.max_tokens, max_ok, "an integer of at least 1, or None for up to the context limit")
        _check("min_tokens", self.min_tokens, _is_int(self.min_tokens) and self.min_tokens >= 0, "an integer >= 0")

    def _check_flags(self) -> None:
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            value = getattr(self, name)
            _check(name, value, isinstance(value, bool), "True or False")

    def _set_stops(self) -> None:
        """Checks `stop` and `stop_token_ids` and stores them as tuples (the dataclass is frozen and hashable)."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        stop_ok = stop is None or (_is_list(stop) and all(isinstance(s, str) and s for s in stop))
        _check("stop", self.stop, stop_ok, "None, a non-empty string or a list of non-empty strings")
        ids = self.stop_token_ids
        ids_ok = ids is None or (_is_list(ids) and all(_is_int(i) and i >= 0 for i in ids))
        _check("stop_token_ids", ids, ids_ok, "None or a list of token ids (integers >= 0)")
        object.__setattr__(self, "stop", tuple(stop or ()))
        object.__setattr__(self, "stop_token_ids", tuple(int(i) for i in ids or ()))

    def _check_together(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise UserError(
                f"SamplingParams: min_tokens={self.min_tokens} contradicts max_tokens={self.max_tokens}: "
                "min_tokens must be at most max_tokens"
            )
        if self.greedy and self.n > 1:
            raise UserError(
                f"SamplingParams: n={self.n} contradicts temperature={self.temperature}: greedy decoding gives "
                "the same text n times; use n=1 or a temperature above 0"
            )


def _check_name(name: str, known: list[str]) -> None:
    if name in known:
        return
    if name in UNSUPPORTED:
        remedy = UNSUPPORTED[name]
        raise UserError(
            f"SamplingParams: {name!r} is a vLLM parameter that is not supported here, not even at its neutral value"
            f": {remedy or 'leave it out'}"
        )
    raise UserError(f"SamplingParams: unknown parameter {name!r}{nearest(name, known)}; known: {', '.join(known)}")


def _check(name: str, value: object, ok: bool, allowed: str) -> None:
    if not ok:
        raise UserError(f"SamplingParams: {name}={value!r} is not allowed: it must be {allowed}")


def _is_int(value: object) -> bool:
    # numpy integers come from arrays of settings and are as good; True is an int in Python and a mistake here.
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    is_real = hasattr(value, "__float__") and not isinstance(value, (bool, str))
    return is_real and math.isfinite(float(value))  # type: ignore[arg-type]


def _is_list(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, dict))
