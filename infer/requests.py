"""A prompt on its way: its n continuations, fed by the engine's updates, and what the caller sees of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from infer.engine import SlotUpdate
from infer.outputs import CompletionOutput, RequestOutput, SpecMetrics
from infer.params import SamplingParams
from infer.prompts import PreparedPrompt
from infer.text import Detokenizer, OutputText


class Continuation:
    """One of the n texts of a request. Keeps tokens, codes and text cut at the same place."""

    def __init__(self, index: int, params: SamplingParams, prompt: Sequence[int], tokenizer: Any) -> None:
        skip = params.skip_special_tokens
        detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip) if tokenizer is not None else None
        self._text = OutputText(
            detokenizer,
            stop=params.stop_strings,
            min_tokens=params.min_tokens,
            include_stop=params.include_stop_str_in_output,
        )
        self._params = params
        self._output = CompletionOutput(index, "", [])

    @property
    def finished(self) -> bool:
        return self._output.finished()

    def take(self, update: SlotUpdate) -> bool:
        """Takes in an update; True when a stop string has ended the text though the engine would go on."""
        out = self._output
        kept = self._text.append(update.token_ids, stop_token_last=update.finish_reason == "stop")
        out.token_ids += update.token_ids[:kept]
        out.codes += update.codes[:kept]
        if self._text.stop_string is not None:
            out.finish_reason, out.stop_reason = "stop", self._text.stop_string
        elif update.finish_reason is not None:
            out.finish_reason = update.finish_reason
            out.stop_reason = self._stop_token() if update.finish_reason == "stop" else None
        if out.finished():
            self._text.finish()
        out.text = self._text.shown
        return out.finished() and update.finish_reason is None

    def _stop_token(self) -> int | None:
        """The last token, if the request named it: the model's own end has no reason to give."""
        last = self._output.token_ids[-1]
        return last if last in (self._params.stop_token_ids or ()) else None

    def output(self) -> CompletionOutput:
        """What there is so far; later tokens do not change it."""
        out = self._output
        return CompletionOutput(
            out.index, out.text, list(out.token_ids), out.finish_reason, out.stop_reason, list(out.codes)
        )

    def metrics(self, num_spec_tokens: int) -> SpecMetrics:
        return SpecMetrics.from_codes(self._output.codes, num_spec_tokens)


class Request:
    """A prompt and its continuations. `changed` since it was last looked at."""

    def __init__(self, number: int, prompt: PreparedPrompt, params: SamplingParams, tokenizer: Any) -> None:
        self.number, self.prompt, self.params = number, prompt, params
        self.continuations = [Continuation(i, params, prompt.token_ids, tokenizer) for i in range(params.n)]
        self.changed = False

    @property
    def finished(self) -> bool:
        return all(one.finished for one in self.continuations)

    def output(self) -> RequestOutput:
        outputs = [one.output() for one in self.continuations]
        return RequestOutput(str(self.number), self.prompt.text, list(self.prompt.token_ids), outputs, self.finished)
