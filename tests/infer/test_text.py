"""Streaming text: never half a character, and stop strings cut text and tokens at the same place."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from infer.text import Detokenizer, OutputText
from tests.infer.tokenizers import END, byte_fallback, byte_level

TOKENIZERS = {"byte_level": byte_level(), "byte_fallback": byte_fallback()}
TEXTS = [
    "the cat sat.",
    "naïve café",
    "日本語のテキスト",
    "👩‍👩‍👧 family 🇫🇷",
    "a\u0301 b",
    "",
    " lead and trail ",
    "\ufffd real",
]


def decode(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def pieces_of(tokenizer: PreTrainedTokenizerFast, prompt: list[int], ids: list[int], chunk: int = 1) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt)
    pieces = [detokenizer.push(ids[i : i + chunk]) for i in range(0, len(ids), chunk)]
    return [*pieces, detokenizer.flush()]


@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_pieces_join_to_the_text(kind: str, text: str, chunk: int) -> None:
    tokenizer = TOKENIZERS[kind]
    prompt, ids = tokenizer.encode("hello"), tokenizer.encode(text)
    pieces = pieces_of(tokenizer, prompt, ids, chunk)
    # What follows the prompt: the decoding of both, less that of the prompt (a first space survives).
    assert "".join(pieces) == decode(tokenizer, prompt + ids)[len(decode(tokenizer, prompt)) :]
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces), "half a character was given out"


def test_a_character_waits_for_its_last_byte() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("é")
    assert len(ids) == 2
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([i]) for i in ids] == ["", "é"]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_text_that_ends_inside_a_character_is_flushed(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode("ab€")[:-1]
    assert "".join(pieces_of(tokenizer, [], ids)) == decode(tokenizer, ids)
    assert decode(tokenizer, ids).endswith("\ufffd")


def test_bytes_that_are_no_text_do_not_wait_for_ever() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    byte = tokenizer.encode("\u00ff")[1]  # a continuation byte
    good = tokenizer.encode("€ the cat")
    for count in range(40):
        ids = [byte] * count + good
        detokenizer = Detokenizer(tokenizer)
        pieces = [detokenizer.push([i]) for i in ids]
        assert "".join([*pieces, detokenizer.flush()]) == decode(tokenizer, ids), count
        waits = "".join(" " if piece else "w" for piece in pieces).split()
        assert max(map(len, waits), default=0) < 12, "text was held back without end"


def test_random_bytes_join_to_the_text() -> None:
    tokenizer, rng = TOKENIZERS["byte_level"], np.random.default_rng(0)
    for _ in range(30):
        ids = rng.integers(0, 256, 60).tolist()
        assert "".join(pieces_of(tokenizer, [], ids)) == decode(tokenizer, ids)


def test_special_tokens_are_skipped_or_kept() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("the cat") + [tokenizer.convert_tokens_to_ids(END)]
    assert "".join(pieces_of(tokenizer, [], ids)) == "the cat"
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    assert detokenizer.push(ids) == f"the cat{END}"


# -------------------------------------------------------------------------------------------- stop strings


class Letters:
    """Token i is the text WORDS[i]: stop strings in the middle of tokens and across them."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def decode(self, token_ids: list[int], **_: bool) -> str:
        return "".join(self.words[i] for i in token_ids)


def run(words: list[str], chunk: int = 1, stop_token_last: bool = False, **options: object) -> tuple[OutputText, int]:
    """Feeds the words as tokens 0..n-1, `chunk` at a time; returns the text and the number of tokens kept."""
    output, kept = OutputText(Detokenizer(Letters(*words)), **options), 0  # type: ignore[arg-type]
    for i in range(0, len(words), chunk):
        ids = list(range(len(words)))[i : i + chunk]
        kept += output.append(ids, stop_token_last=stop_token_last and i + chunk >= len(words))
        if output.stop_string is not None:
            break
    output.finish()
    return output, kept


@pytest.mark.parametrize("chunk", [1, 3, 10])
@pytest.mark.parametrize(
    ("words", "stop", "text", "kept", "found"),
    [
        (["a", "b", "END", "c"], ["END"], "ab", 3, "END"),
        (["a", "bE", "N", "Dx", "c"], ["END"], "ab", 4, "END"),  # across tokens, and text after it in its last token
        (["a", "xENDyEND"], ["END"], "ax", 2, "END"),
        (["a", "EN", "ENDz"], ["END"], "aEN", 3, "END"),
        (["a", "b"], ["END"], "ab", 2, None),
        (["abcd", "e"], ["abcd", "bc"], "a", 1, "bc"),  # the one that ends first, whatever the order
        (["abcd", "e"], ["bc", "abcd"], "a", 1, "bc"),
        (["xabc", "e"], ["bc", "abc"], "x", 1, "abc"),  # both end here: the one that begins first
        (["\n", "\n", "a"], ["\n\n"], "", 2, "\n\n"),
        (["END"], ["END"], "", 1, "END"),
    ],
)
def test_stop_strings(words: list[str], stop: list[str], text: str, kept: int, found: str | None, chunk: int) -> None:
    output, tokens = run(words, chunk, stop=stop)
    assert (output.text, tokens, output.stop_string) == (text, kept, found)
    assert output.num_tokens == kept and output.shown == text


def test_include_stop_string() -> None:
    output, kept = run(["a", "bE", "N", "Dx", "c"], stop=["END"], include_stop=True)
    assert (output.text, kept) == ("abEND", 4)


@pytest.mark.parametrize("chunk", [1, 2, 7])
def test_no_stop_string_before_min_tokens(chunk: int) -> None:
    words = ["E", "E", "aE", "E", "b", "E"]
    output, kept = run(words, chunk, stop=["E"], min_tokens=3)
    assert (output.text, kept) == ("EEaE", 4)  # the one inside the third token is not looked at
    output, kept = run(words, chunk, stop=["aEE"], min_tokens=3)
    assert (output.text, kept) == ("EE", 4)  # begins before, ends after


def test_the_stop_tokens_text_is_left_out_unless_included() -> None:
    words = ["a", "b", "<end>"]
    assert run(words, 3, True)[0].text == "ab"
    assert run(words, 1, True, include_stop=True)[0].text == "ab<end>"
    assert run(words, 1, True)[1] == 3, "it counts as a token"


def test_a_stop_string_before_the_stop_token_comes_first() -> None:
    output, kept = run(["a", "END", "b", "<end>"], 4, True, stop=["END"])
    assert (output.text, kept, output.stop_string) == ("a", 2, "END")


def test_what_could_become_a_stop_string_is_held_back() -> None:
    output = OutputText(Detokenizer(Letters("a ", "E", "N", "x", "EN", "D")), stop=["END", "NO"])
    shown = []
    for token in range(6):
        output.append([token])
        shown.append(output.shown)
    assert shown == ["a ", "a ", "a ", "a ENx", "a ENx", "a ENx"]
    assert output.stop_string == "END"


def test_held_text_is_shown_when_the_text_ends() -> None:
    output = OutputText(Detokenizer(Letters("a", "EN")), stop=["END"])
    output.append([0, 1])
    assert output.shown == "a"
    output.finish()
    assert output.shown == "aEN"


def test_shown_only_grows() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        words = ["".join(rng.choice(list("END "), rng.integers(1, 4))) for _ in range(12)]
        output, last = OutputText(Detokenizer(Letters(*words)), stop=["END", "DEN", "N N"]), ""
        for token in range(12):
            output.append([token])
            assert output.shown.startswith(last)
            last = output.shown
            if output.stop_string:
                break
        output.finish()
        assert output.shown.startswith(last)


def test_without_a_tokenizer_tokens_are_counted() -> None:
    output = OutputText(None)
    assert output.append([1, 2, 3]) == 3 and output.append([4], stop_token_last=True) == 1
    output.finish()
    assert (output.text, output.num_tokens) == ("", 4)
