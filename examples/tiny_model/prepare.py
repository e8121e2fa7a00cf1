"""Makes what the small model is trained on: a tokenizer, packed tokens and held-out conversations.

    python prepare.py INPUT OUT

INPUT holds conversations (`*.jsonl`: rows with `messages`, GSM8K's `question` and `answer`, or `instruction`, `input`
and `response`) and plain text (`*.txt`, a document each).
OUT receives `tokenizer/`, `train.npy` and `validation.npy` (uint16), `starts.npz` (where a training window may
begin) and `train.jsonl`, `validation.jsonl` (the conversations of each split).
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent
VOCAB_SIZE = 4096
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
THINKING = ["<think>", "</think>"]  # the model is not trained to think; templates of its family name these tokens
# Qwen's split: letters with one leading mark, single digits, runs of marks, line ends, spaces.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
HELD_OUT = {"gsm8k_train": 200, "gpteacher_codegen": 100}  # the last rows of these files are never trained on
TEXT_STRIDE = 256  # plain text has a window start every so many tokens

Messages = list[dict[str, str]]


def messages_of(row: dict[str, Any]) -> Messages:
    """The conversation of a row, whichever of the three forms it has."""
    if "messages" in row:
        return row["messages"]
    if "question" in row:
        asked, answer = row["question"], re.sub(r"<<[^>]*>>", "", row["answer"])  # GSM8K's calculator marks
    else:
        asked = "\n\n".join(part for part in (row["instruction"], row.get("input")) if part)
        answer = row["response"]
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def read_conversations(path: Path) -> list[dict[str, Any]]:
    """The rows of one file, each `{"messages", "source"}`."""
    with path.open(encoding="utf-8") as lines:  # not splitlines(): it would also cut at U+2028 inside a string
        return [{"messages": messages_of(json.loads(line)), "source": path.stem} for line in lines if line.strip()]


def split_rows(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(train, validation); a training row whose first question is held out is dropped."""
    train: list[dict[str, Any]] = []
    validation: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*.jsonl")):
        rows = read_conversations(path)
        cut = len(rows) - HELD_OUT.get(path.stem, 0)
        train += rows[:cut]
        validation += rows[cut:]
    asked = {question(row["messages"]) for row in validation}
    return [row for row in train if question(row["messages"]) not in asked], validation


def question(messages: Messages) -> str:
    """The first user turn with case and spacing removed."""
    return " ".join(next(m["content"] for m in messages if m["role"] == "user").lower().split())


def train_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """A byte-level BPE of exactly `VOCAB_SIZE` tokens, digits apart; `<think>` and `</think>` are its last two."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(THINKING), special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in THINKING])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"the corpus gave {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}: it is too small")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> PreTrainedTokenizerFast:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja; returns it as transformers reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (HERE / "chat_template.jinja").read_text()
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END, "pad_token": END_OF_TEXT, "bos_token": None, "add_bos_token": False,
        "add_prefix_space": False, "clean_up_tokenization_spaces": False, "model_max_length": 2048,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    shutil.copy(HERE / "chat_template.jinja", folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    """One uint16 array a document, closed by end-of-text."""
    end = [tokenizer.token_to_id(END_OF_TEXT)]
    return [np.array(e.ids + end, np.uint16) for e in tokenizer.encode_batch(texts, add_special_tokens=False)]


def window_starts(documents: list[np.ndarray], offset: int, stride: int | None = None) -> np.ndarray:
    """int32 positions of document beginnings, and every `stride` tokens inside them."""
    begins = np.cumsum([offset] + [len(d) for d in documents])[:-1]
    if stride is None:
        return begins.astype(np.int32)
    inside = [np.arange(b, b + len(d), stride) for b, d in zip(begins, documents, strict=True)]
    return np.concatenate(inside).astype(np.int32)


def pack(texts: list[np.ndarray], conversations: list[np.ndarray], out: Path) -> None:
    """Text first, then conversations; `starts.npz` says where a window may begin in each part."""
    size = sum(map(len, texts))
    np.save(out / "train.npy", np.concatenate([*texts, *conversations]))
    starts = {"text": window_starts(texts, 0, TEXT_STRIDE) if texts else np.zeros(0, np.int32),
              "conversations": window_starts(conversations, size)}
    np.savez(out / "starts.npz", **starts)
    print(f"text: {len(texts)} documents, {size:,} tokens; conversations: {len(conversations)}, "
          f"{sum(map(len, conversations)):,} tokens")


def main() -> None:
    """Reads INPUT, writes OUT, prints the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    train, validation = split_rows(args.input)
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(args.input.glob("*.txt"))]
    # Conversations count twice in the merges: answers are what the model writes.
    spoken = [m["content"] for row in train for m in row["messages"]]
    tokenizer = train_tokenizer(iter(texts + spoken + spoken))
    fast = save_tokenizer(tokenizer, args.out / "tokenizer")

    def render(rows: list[dict[str, Any]]) -> list[str]:
        return [fast.apply_chat_template(row["messages"], tokenize=False) for row in rows]

    np.random.default_rng(0).shuffle(train)  # so that neighbours in a window come from different sources
    pack(encode(tokenizer, texts), encode(tokenizer, render(train)), args.out)
    np.save(args.out / "validation.npy", np.concatenate(encode(tokenizer, render(validation))))
    for name, rows in (("train", train), ("validation", validation)):
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        (args.out / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
