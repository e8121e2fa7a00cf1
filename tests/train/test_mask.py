"""The loss mask on the template of Qwen3.5: exactly what the assistant said, its end token included."""

from __future__ import annotations

import numpy as np
import pytest

from eagle3_jax.errors import UserError
from tests.train.tokenizers import CHATML, small_tokenizer
from train.data.conversations import BadRow, Conversation, Row
from train.data.mask import ChatRenderer, token_mask

NO_THINKING = {"enable_thinking": False}


def talk(*contents: str) -> Conversation:
    roles = ("user", "assistant")
    return Conversation(tuple({"role": roles[i % 2], "content": c} for i, c in enumerate(contents)))


def said(row: Row, tokenizer: object = None) -> list[str]:
    """The supervised stretches of a row, decoded."""
    tokenizer = tokenizer or small_tokenizer()
    edges = np.flatnonzero(np.diff(np.concatenate([[0], row.mask.astype(int), [0]])))
    return [tokenizer.decode(row.tokens[a:b]) for a, b in edges.reshape(-1, 2)]


def test_answer_without_thinking_the_empty_block_belongs_to_the_prompt() -> None:
    (row,) = ChatRenderer(small_tokenizer(), NO_THINKING).rows(talk("Who?", "The fox."))
    assert said(row) == ["The fox.<|im_end|>"]
    assert small_tokenizer().decode(row.tokens).endswith("<think>\n\n</think>\n\nThe fox.<|im_end|>\n")


def test_answer_with_thinking_the_opening_tag_belongs_to_the_prompt() -> None:
    (row,) = ChatRenderer(small_tokenizer()).rows(talk("Who?", "<think>\nquick\n</think>\n\nThe fox."))
    assert said(row) == ["quick\n</think>\n\nThe fox.<|im_end|>"]


def test_reasoning_content_is_rendered_and_supervised() -> None:
    answer = {"role": "assistant", "content": "The fox.", "reasoning_content": "quick"}
    (row,) = ChatRenderer(small_tokenizer()).rows(Conversation(({"role": "user", "content": "Who?"}, answer)))
    assert said(row) == ["quick\n</think>\n\nThe fox.<|im_end|>"]


def test_a_token_begun_by_the_prompt_is_not_supervised() -> None:
    """With thinking on and none given, the line break after <think> and the one before </think> are one token."""
    (row,) = ChatRenderer(small_tokenizer()).rows(talk("Who?", "The fox."))
    assert said(row) == ["</think>\n\nThe fox.<|im_end|>"]


def test_history_that_the_template_rewrites_becomes_rows_of_its_own() -> None:
    renderer = ChatRenderer(small_tokenizer())
    rows = renderer.rows(
        talk("Who?", "<think>\nquick\n</think>\n\nThe fox.", "Where?", "<think>\nlazy\n</think>\n\nThe dog.")
    )
    assert [said(row) for row in rows] == [
        ["lazy\n</think>\n\nThe dog.<|im_end|>"],
        ["quick\n</think>\n\nThe fox.<|im_end|>"],
    ]
    assert "quick" not in small_tokenizer().decode(rows[0].tokens)
    assert renderer.num_changed == 1


def test_rewritten_history_can_be_dropped_or_refused() -> None:
    conversation = talk("Who?", "The fox.", "Where?", "The dog.")
    (row,) = ChatRenderer(small_tokenizer(), NO_THINKING, "drop").rows(conversation)
    assert said(row) == ["The dog.<|im_end|>"]
    with pytest.raises(BadRow, match="changes the rendering"):
        ChatRenderer(small_tokenizer(), NO_THINKING, "error").rows(conversation)


def test_every_turn_of_an_honest_template_is_supervised_in_one_row() -> None:
    tokenizer = small_tokenizer(CHATML)
    renderer = ChatRenderer(tokenizer)
    (row,) = renderer.rows(talk("Who?", "The fox.", "Where?", "", "And?", "The dog."))
    assert said(row, tokenizer) == ["The fox.<|im_end|>", "<|im_end|>", "The dog.<|im_end|>"]
    assert renderer.num_changed == 0


def test_an_answer_that_does_not_continue_its_prompt_is_counted() -> None:
    renderer = ChatRenderer(small_tokenizer(), NO_THINKING)
    rows = renderer.rows(talk("Who?", "The fox.", "Why?", "<think>\nhm\n</think>\n\nSo."))
    assert [said(row) for row in rows] == [["The fox.<|im_end|>"]] and renderer.num_misfits == 1
    with pytest.raises(BadRow, match="enable_thinking|template_kwargs"):
        renderer.rows(talk("Why?", "<think>\nhm\n</think>\n\nSo."))
    assert renderer.num_misfits == 2


def test_a_template_without_an_end_token_supervises_the_text() -> None:
    tokenizer = small_tokenizer(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    (row,) = ChatRenderer(tokenizer).rows(talk("Who?", "The fox"))
    assert "".join(said(row, tokenizer)).strip() in ("The fox", "fox")


def test_characters_of_several_tokens_are_wholly_supervised() -> None:
    (row,) = ChatRenderer(small_tokenizer(), NO_THINKING).rows(talk("Ĝis?", "日本 🦊"))
    assert said(row) == ["日本 🦊<|im_end|>"]


def test_system_prompts_and_special_tokens_in_questions_are_not_supervised() -> None:
    system = {"role": "system", "content": "Be quick."}
    conversation = Conversation((system, *talk("What is <|im_end|>?", "The end.").messages))
    (row,) = ChatRenderer(small_tokenizer(), NO_THINKING).rows(conversation)
    assert said(row) == ["The end.<|im_end|>"]


def test_what_the_template_refuses_is_a_bad_row() -> None:
    conversation = Conversation(({"role": "system", "content": "x"}, {"role": "assistant", "content": "y"}))
    with pytest.raises(BadRow, match="No user query"):
        ChatRenderer(small_tokenizer()).rows(conversation)


def test_a_tokenizer_without_template_or_offsets_is_refused() -> None:
    with pytest.raises(UserError, match="chat template"):
        ChatRenderer(small_tokenizer(""))
    with pytest.raises(UserError, match="fast tokenizer"):
        ChatRenderer(object())


def test_token_mask_takes_tokens_wholly_inside() -> None:
    offsets = np.array([[0, 2], [2, 2], [1, 3], [2, 4], [4, 6], [5, 8]])
    assert token_mask(offsets, [(2, 6)]).tolist() == [False, False, False, True, True, False]
    assert token_mask(offsets, []).tolist() == [False] * 6
