"""Which tokens the assistant said, found by render boundaries.

A conversation is rendered up to and without each assistant turn, generation prompt included (what the model is given
when it answers) and with it (what it should have written). The difference in text is the answer, and the tokenizer's
offsets carry it to tokens. Nothing about any template is hard-coded, so headers, empty think blocks and system prompts
take care of themselves.

Some templates rewrite history: Qwen3 and Qwen3.5 strip the thinking of earlier turns once a later question is asked.
An answer whose text a later rendering changes is never supervised there, since the model would never be shown it in
that form; it gets a row of its own that ends with it, as it was when it was written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from eagle3_jax.errors import UserError
from train.data.conversations import BadRow, Conversation, Message, Row

ChangedTurns = Literal["split", "drop", "error"]


@dataclasses.dataclass(frozen=True)
class Turn:
    """text: the rendering that ends with this turn; the answer, end token included, is text[start:end]."""

    text: str
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class Rendered:
    """text: one rendering. spans: the (start, end) characters of the answers supervised in it."""

    text: str
    spans: tuple[tuple[int, int], ...]


class ChatRenderer:
    """Renders conversations by a fast tokenizer's chat template and masks the assistant's tokens.

    changed_turns: what to do with answers that a later rendering changes: `split` gives each a row of its own, `drop`
    leaves them unsupervised, `error` raises. Counts are kept in `num_changed` and `num_misfits` (answers that do not
    continue their own generation prompt, for example with thinking although `enable_thinking` is false).
    """

    def __init__(
        self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None, changed_turns: ChangedTurns = "split"
    ) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise UserError("the loss mask needs a fast tokenizer (tokenizer.json), for its character offsets")
        if not tokenizer.chat_template:
            raise UserError("the tokenizer has no chat template: add chat_template.jinja, or give tokenised rows")
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        self.changed_turns = changed_turns
        self.num_changed = 0
        self.num_misfits = 0
        self._end_marks = tuple(str(t) for t in tokenizer.added_tokens_decoder.values() if t.special)

    def render(self, messages: Sequence[Message], tools: Sequence[Any] = (), *, prompt: bool = False) -> str:
        """The template's text, with the generation prompt if `prompt`.

        Raises:
          BadRow: the template refuses the messages.
        """
        from jinja2.exceptions import TemplateError

        kwargs = {**self.template_kwargs, **({"tools": list(tools)} if tools else {})}
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=prompt, **kwargs
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise BadRow(f"the chat template refuses it: {error}") from error

    def turn(self, conversation: Conversation, index: int) -> Turn | None:
        """The assistant turn at `index`, or None where the answer does not continue its generation prompt."""
        before = self.render(conversation.messages[:index], conversation.tools, prompt=True)
        text = self.render(conversation.messages[: index + 1], conversation.tools)
        if not text.startswith(before):
            return None
        return Turn(text, len(before), self._end_of_turn(text, len(before)))

    def _end_of_turn(self, text: str, start: int) -> int:
        """After the last special token of the answer (its end token); what follows, a line break, is the template's."""
        ends = [i + len(mark) for mark in self._end_marks if (i := text.rfind(mark, start)) >= 0]
        return max(ends, default=max(start, len(text.rstrip())))

    def renderings(self, conversation: Conversation) -> list[Rendered]:
        """The fewest renderings in which every answer stands once as the model would have written it.

        Raises:
          BadRow: no turn fits its prompt, or `changed_turns` is `error` and one changes.
        """
        found = [self.turn(conversation, i) for i, m in enumerate(conversation.messages) if m["role"] == "assistant"]
        pending = [t for t in found if t is not None]
        self.num_misfits += len(found) - len(pending)
        if not pending:
            raise BadRow("no answer continues its generation prompt (thinking switched off in template_kwargs?)")
        renderings = []
        while pending:
            text = pending[-1].text
            kept = [t for t in pending if text.startswith(t.text[: t.end])]
            pending = [t for t in pending if t not in kept]
            renderings.append(Rendered(text, tuple((t.start, t.end) for t in kept)))
            if len(renderings) == 1:
                self._count_changed(len(pending))
        return renderings if self.changed_turns == "split" else renderings[:1]

    def _count_changed(self, count: int) -> None:
        self.num_changed += count
        if count and self.changed_turns == "error":
            raise BadRow("a later turn changes the rendering of an earlier answer")

    def rows(self, conversation: Conversation) -> list[Row]:
        """Tokenised, masked rows: one, or several where the template rewrites history."""
        return [self._tokenise(r) for r in self.renderings(conversation)]

    def _tokenise(self, rendered: Rendered) -> Row:
        encoded = self.tokenizer(rendered.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        offsets = np.asarray(encoded["offset_mapping"], np.int64).reshape(-1, 2)
        return Row(np.asarray(encoded["input_ids"], np.int32), token_mask(offsets, rendered.spans))


def token_mask(offsets: np.ndarray, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """[T] bool from offsets [T, 2]: tokens that lie wholly in a span.

    A token that straddles the start was begun by the prompt: the model could not have produced it.
    """
    starts, ends = offsets[:, 0], offsets[:, 1]
    inside = [(starts >= a) & (ends <= b) & (ends > starts) for a, b in spans]
    return np.any(inside, axis=0) if inside else np.zeros(len(offsets), bool)
