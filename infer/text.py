"""Tokens to text while they are being generated: pieces that are final, and stop strings with their place in tokens.

Everything here runs on the host, one object a continuation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

# Tokens of the prompt that are decoded along with the first new one: some tokenizers drop the space of a text's
# first token, so no token may be decoded as if it were the first.
_CONTEXT = 5
_REPLACEMENT = "\ufffd"
# Tokens that may wait for the rest of a character. A character has four bytes, so a longer wait is for nothing.
_PATIENCE = 8
_CHARACTER = 4


class TextDecoder(Protocol):
    """The part of a Hugging Face tokenizer that is needed here."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str: ...


class Detokenizer:
    """Text of a growing list of tokens, piece by piece; a piece never ends inside a character.

    The text that new tokens add is the difference of two decodings that start at the same earlier token ("prefix
    difference", as in vLLM and TGI), so nothing depends on how a tokenizer treats the start of a text. A piece that
    ends with U+FFFD may be half a character and waits for the next token.
    """

    def __init__(self, decoder: TextDecoder, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True) -> None:
        self._decoder = decoder
        self._skip_special = skip_special_tokens
        self._ids = list(prompt[-_CONTEXT:])
        self._start = 0  # both decodings start here
        self._read = len(self._ids)  # tokens whose text has been given out

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that has become final with these tokens; often theirs, sometimes less, sometimes of earlier ones."""
        self._ids.extend(token_ids)
        before, now = self._decode(self._read), self._decode(len(self._ids))
        if len(now) <= len(before):
            return ""
        if not now.endswith(_REPLACEMENT):
            return self._give(now[len(before) :], len(self._ids))
        if len(self._ids) - self._read > _PATIENCE:
            return self._give_up(before, now)
        return ""

    def flush(self) -> str:
        """Whatever still waits, with U+FFFD where it is no character. Call once, after the last token."""
        piece = self._decode(len(self._ids))[len(self._decode(self._read)) :]
        return self._give(piece, len(self._ids))

    def _give_up(self, before: str, now: str) -> str:
        """Text that no later token can complete: everything but what the last few tokens may have begun."""
        end = len(self._ids) - _CHARACTER
        final = self._decode(end)
        # If `end` lies inside a good character, the longer decoding shows it and the shorter one does not.
        return self._give(final[len(before) :], end) if now.startswith(final) and len(final) > len(before) else ""

    def _give(self, piece: str, read: int) -> str:
        self._start, self._read = self._read, read
        return piece

    def _decode(self, end: int) -> str:
        return self._decoder.decode(
            self._ids[self._start : end], skip_special_tokens=self._skip_special, clean_up_tokenization_spaces=False
        )


class OutputText:
    """The text of one continuation: grows with its tokens, ends at a stop string.

    text          all final text so far, cut at the stop string
    num_tokens    tokens that belong to it
    stop_string   the one that was found, or None
    """

    def __init__(
        self,
        detokenizer: Detokenizer | None,
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        """Without a detokenizer (no tokenizer was loaded) tokens are counted and there is no text."""
        self._detokenizer = detokenizer
        self._stop, self._min_tokens, self._include_stop = tuple(stop), min_tokens, include_stop
        self._finished = False
        self.text = ""
        self.num_tokens = 0
        self.stop_string: str | None = None

    def append(self, token_ids: Sequence[int], *, stop_token_last: bool = False) -> int:
        """Takes in new tokens and returns how many of them are kept: fewer than given once a stop string is complete.

        stop_token_last: the last one is a stop token; its text is left out unless stops are to be included.
        """
        visible = len(token_ids) - (stop_token_last and not self._include_stop)
        kept = self._append_until_stop(token_ids[:visible])
        if self.stop_string is None:
            kept = len(token_ids)
        self.num_tokens += kept
        return kept

    def finish(self) -> None:
        """No more tokens: what was waiting becomes final."""
        if self._detokenizer is not None and self.stop_string is None:
            self.text += self._detokenizer.flush()
        self._finished = True

    @property
    def shown(self) -> str:
        """The text that can be shown now: all of it, but for an end that may yet turn out to begin a stop string."""
        if self._finished or self._include_stop or self.stop_string is not None:
            return self.text
        return self.text[: len(self.text) - self._held_back()]

    def _append_until_stop(self, token_ids: Sequence[int]) -> int:
        if self._detokenizer is None:
            return len(token_ids)
        if not self._stop:
            self.text += self._detokenizer.push(token_ids)
            return len(token_ids)
        for i, token in enumerate(token_ids):
            already = len(self.text)
            self.text += self._detokenizer.push([token])
            if self.num_tokens + i + 1 > self._min_tokens and self._cut_at_stop(already):
                return i + 1
        return len(token_ids)

    def _cut_at_stop(self, already: int) -> bool:
        """Looks for the stop string that ends first, beyond the first `already` characters, and cuts the text there."""
        matches = []
        for stop in self._stop:
            start = self.text.find(stop, max(already - len(stop) + 1, 0))
            if start >= 0:
                matches.append((start + len(stop), start, stop))
        if not matches:
            return False
        end, start, self.stop_string = min(matches)
        self.text = self.text[: end if self._include_stop else start]
        return True

    def _held_back(self) -> int:
        """Length of the longest end of the text that is a beginning, not the whole, of a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(self.text)), 0, -1):
            end = self.text[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stop):
                return length
        return 0
