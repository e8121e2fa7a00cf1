"""Prompts in every form that vLLM takes, checked before any work starts: errors name the prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from eagle3_jax.errors import UserError
from infer.params import SamplingParams

Prompt: TypeAlias = str | Mapping[str, Any] | Sequence[int]
_KEYS = ("prompt", "prompt_token_ids")


@dataclasses.dataclass(frozen=True)
class PreparedPrompt:
    """What the engine needs; `text` is None for a prompt of token ids alone."""

    text: str | None
    token_ids: list[int]


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list. A flat list of integers is one prompt of token ids."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not hasattr(prompts, "__iter__"):
        raise UserError(f"prompts: expected text, token ids or a list of these, found {type(prompts).__name__}")
    many = list(prompts)
    if many and all(_is_int(item) for item in many):
        return [many]  # type: ignore[list-item]
    return many  # type: ignore[return-value]


def as_conversations(messages: Any) -> list[Sequence[Mapping[str, Any]]]:
    """One conversation or a list of them, as a list. Raises UserError for what is no list of messages with a role."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise UserError(f"chat: expected a list of messages, found {_short(messages)}")
    many = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
    for index, one in enumerate(many):
        if isinstance(one, str) or not isinstance(one, Sequence) or not one:
            raise UserError(f"conversation {index}: expected a list of messages, found {_short(one)}")
        for message in one:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise UserError(f"conversation {index}: a message needs a role and content, found {_short(message)}")
    return many


def prepare(
    prompts: Sequence[Prompt], tokenizer: Any, *, vocab_size: int, max_model_len: int, add_special_tokens: bool = True
) -> list[PreparedPrompt]:
    """Tokenizes and checks every prompt.

    Raises:
      UserError: the first prompt that is of no known form, empty, too long or outside the vocabulary, by its index.
    """
    prepared = []
    for index, prompt in enumerate(prompts):
        one = _read(prompt, index, tokenizer, add_special_tokens)
        _check_ids(one.token_ids, f"prompt {index}", vocab_size, max_model_len)
        prepared.append(one)
    return prepared


def params_for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int, default: SamplingParams
) -> list[SamplingParams]:
    """One SamplingParams a prompt, from one for all or a list. Raises UserError when the list has another length."""
    if params is None or isinstance(params, SamplingParams):
        return [params or default] * count
    if isinstance(params, (str, Mapping)) or not isinstance(params, Iterable):
        raise UserError(f"sampling_params: expected SamplingParams or a list of them, found {type(params).__name__}")
    many = list(params)
    if len(many) != count:
        raise UserError(f"sampling_params: {len(many)} given for {count} prompts; give one, or one for each prompt")
    for index, item in enumerate(many):
        if not isinstance(item, SamplingParams):
            raise UserError(f"sampling_params {index}: expected SamplingParams, found {type(item).__name__}")
    return many


def _read(prompt: Prompt, index: int, tokenizer: Any, add_special_tokens: bool) -> PreparedPrompt:
    if isinstance(prompt, Mapping):
        if unknown := sorted(set(prompt) - set(_KEYS)):
            raise UserError(f"prompt {index}: {', '.join(unknown)} not understood; known keys: {', '.join(_KEYS)}")
        if "prompt_token_ids" in prompt:
            return PreparedPrompt(prompt.get("prompt"), _ids(prompt["prompt_token_ids"], index))
        if "prompt" not in prompt:
            raise UserError(f"prompt {index}: needs 'prompt' or 'prompt_token_ids'")
        prompt = prompt["prompt"]
    if not isinstance(prompt, str):
        return PreparedPrompt(None, _ids(prompt, index))
    if tokenizer is None:
        raise UserError(f"prompt {index}: is text, and no tokenizer was loaded (skip_tokenizer_init); give token ids")
    return PreparedPrompt(prompt, list(tokenizer.encode(prompt, add_special_tokens=add_special_tokens)))


def _ids(value: Any, index: int) -> list[int]:
    wrong = isinstance(value, (str, bytes)) or not hasattr(value, "__iter__")
    ids = [] if wrong else list(value)
    if wrong or not all(_is_int(i) for i in ids):
        raise UserError(f"prompt {index}: expected text or a list of token ids, found {_short(value)}")
    return [int(i) for i in ids]


def _is_int(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _check_ids(ids: list[int], where: str, vocab_size: int, max_model_len: int) -> None:
    if not ids:
        raise UserError(f"{where}: is empty")
    if len(ids) >= max_model_len:
        raise UserError(
            f"{where}: has {len(ids)} tokens, which leaves no room for a new one in max_model_len={max_model_len}; "
            "shorten it or make the LLM with a larger max_model_len"
        )
    if outside := [i for i in ids if not 0 <= i < vocab_size]:
        raise UserError(f"{where}: token id {outside[0]} is outside the vocabulary (0..{vocab_size - 1})")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
