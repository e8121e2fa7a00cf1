"""From files to padded batches: read, mask, fit to length, (pack,) shuffle, batch.

Every row that is not used is counted under its reason. Batches are a pure function of (rows, seed, step), so a
checkpoint that holds the step holds the data position.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_jax.errors import UserError
from train.data.conversations import BadRow, Overlong, Row, parse_record
from train.data.mask import ChatRenderer
from train.data.sources import read_records

SMALLEST_BUCKET = 128


class DataError(UserError, ValueError):
    """Training data that cannot be used."""


@dataclasses.dataclass
class DataReport:
    """What became of the rows."""

    num_read: int = 0
    num_rows: int = 0
    num_tokens: int = 0
    num_supervised_tokens: int = 0
    num_truncated: int = 0
    num_changed_turns: int = 0
    num_misfit_turns: int = 0
    dropped: Counter[str] = dataclasses.field(default_factory=Counter)

    def __str__(self) -> str:
        lines = [
            f"{self.num_read} rows read, {self.num_rows} training sequences, {self.num_tokens} tokens, "
            f"{self.num_supervised_tokens} of them supervised"
        ]
        lines += [f"  dropped: {count} x {reason}" for reason, count in self.dropped.most_common()]
        notes = (
            (self.num_truncated, "sequences truncated"),
            (self.num_changed_turns, "answers whose text a later turn changes (see data.changed_turns)"),
            (self.num_misfit_turns, "answers that do not continue their generation prompt, not supervised"),
        )
        return "\n".join(lines + [f"  {count} {text}" for count, text in notes if count])

    def as_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "dropped": dict(self.dropped)}


def load_rows(
    files: Sequence[str | Path],
    renderer: ChatRenderer | None,
    *,
    max_length: int,
    overlong: Overlong = "truncate",
    vocab_size: int,
    wrap: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> tuple[list[Row], DataReport]:
    """Reads and masks every row of `files`. `wrap` may show progress; `renderer` is None if all rows are tokenised.

    Raises:
      DataError: no row is left; the message is the report.
    """
    report, rows = DataReport(), list[Row]()
    for record in wrap(record for path in files for record in read_records(Path(path))):
        rows += fitted_rows(record, renderer, max_length, overlong, vocab_size, report)
    if not rows:
        raise DataError(f"no row can be trained on. {report}")
    return rows, report


def fitted_rows(
    record: Any, renderer: ChatRenderer | None, max_length: int, overlong: Overlong, vocab_size: int, report: DataReport
) -> list[Row]:
    """The training sequences of one record, none if it cannot be used; all is counted in `report`."""
    report.num_read += 1
    try:
        found = [_fit(row, max_length, overlong, vocab_size, report) for row in _to_rows(record, renderer)]
    except BadRow as reason:
        report.dropped[str(reason)] += 1
        found = []
    rows = [row for row in found if row is not None]
    report.num_rows += len(rows)
    report.num_tokens += sum(len(row.tokens) for row in rows)
    report.num_supervised_tokens += int(sum(row.mask.sum() for row in rows))
    if renderer is not None:
        report.num_changed_turns, report.num_misfit_turns = renderer.num_changed, renderer.num_misfits
    return rows


def _to_rows(record: Any, renderer: ChatRenderer | None) -> list[Row]:
    parsed = parse_record(record)
    if isinstance(parsed, Row):
        return [parsed]
    if renderer is None:
        raise BadRow("a conversation, but there is no tokenizer with a chat template")
    return renderer.rows(parsed)


def _fit(row: Row, max_length: int, overlong: Overlong, vocab_size: int, report: DataReport) -> Row | None:
    """The row within max_length, or None (counted)."""
    if len(row.tokens) and row.tokens.max() >= vocab_size:
        raise BadRow(f"token ids beyond the target's vocabulary of {vocab_size}")
    if len(row.tokens) > max_length and overlong == "drop":
        report.dropped[f"longer than {max_length} tokens"] += 1
        return None
    if len(row.tokens) > max_length:
        report.num_truncated += 1
        row = Row(row.tokens[:max_length], row.mask[:max_length])
    if not has_supervision(row.mask):
        where = f" in the first {max_length}" if len(row.tokens) == max_length else ""
        report.dropped["no supervised token" + where] += 1
        return None
    return row


def has_supervision(mask: np.ndarray) -> bool:
    """Whether tokens p+1 and p+2 are both the assistant's for a p >= 0: a position that the first step trains on."""
    return bool(np.any(mask[1:-1] & mask[2:])) if len(mask) > 2 else False


def bucket_lengths(max_length: int, chosen: Sequence[int] | None = None) -> tuple[int, ...]:
    """The `chosen` lengths or powers of two from 128, then max_length: the shapes for which the step is compiled."""
    if chosen is not None:
        return (*(b for b in chosen if b < max_length), max_length)
    lengths, length = [], SMALLEST_BUCKET
    while length < max_length:
        lengths.append(length)
        length *= 2
    return (*lengths, max_length)


@dataclasses.dataclass(frozen=True)
class Batch:
    """tokens [B, T] int32, mask [B, T] bool and, of packed rows, segment_ids [B, T] int32, right-padded with zeros to a
    bucket's length. features: in offline mode, the target's, see `train.features.Features`.

    part: where several hosts share a batch, which of its rows are in these arrays. num_tokens, num_rows and supervised
    (whether any position is trained on) are the whole batch's.
    """

    tokens: np.ndarray
    mask: np.ndarray
    num_tokens: int
    segment_ids: np.ndarray | None = None
    features: Any = None
    num_rows: int = 0
    supervised: bool = True
    part: tuple[int, ...] | None = None


def pad_rows(rows: Sequence[Row], buckets: Sequence[int], part: tuple[int, ...] | None = None) -> Batch:
    """Pads to the smallest bucket that holds the longest row; only the rows of `part`, if that is given, are copied."""
    longest = max(len(row.tokens) for row in rows)
    length = next(b for b in buckets if b >= longest)
    here = rows if part is None else [rows[i] for i in part]
    segments = [row.segment_ids for row in here if row.segment_ids is not None]
    return Batch(
        _padded([row.tokens for row in here], length),
        _padded([row.mask for row in here], length),
        sum(len(row.tokens) for row in rows),
        _padded(segments, length) if segments else None,
        _features(here, length),
        num_rows=len(rows),
        supervised=any(has_supervision(row.mask) for row in rows),
        part=part,
    )


def _features(rows: Sequence[Row], length: int) -> Any:
    if not rows[0].stored:
        return None
    from train.data.stored import padded_features  # which imports jax; processes that only tokenise do without it

    return padded_features(rows, length)


def _padded(rows: Sequence[np.ndarray], length: int) -> np.ndarray:
    """[B, length] in the dtype of the rows [T]."""
    return np.stack([np.pad(row, (0, length - len(row))) for row in rows])


class Batches:
    """Endless shuffled batches, by step: `batches[step]`. Every epoch is shuffled anew.

    part: the rows of each batch that this host copies; all hosts see the same batches.
    """

    def __init__(
        self, rows: Sequence[Row], *, batch_size: int, seed: int, buckets: Sequence[int],
        part: tuple[int, ...] | None = None,
    ) -> None:  # fmt: skip
        import grain

        self._buckets, self._part = buckets, part
        source = grain.MapDataset.source(list(rows)).seed(seed).shuffle().repeat()
        self._dataset = source.batch(batch_size, batch_fn=list)

    def __getitem__(self, step: int) -> Batch:
        return pad_rows(self._dataset[step], self._buckets, self._part)

    def whole(self, step: int) -> Batch:
        """With all rows."""
        return pad_rows(self._dataset[step], self._buckets)


def ordered_batches(rows: Sequence[Row], *, batch_size: int, buckets: Sequence[int]) -> Iterator[Batch]:
    """The rows once, in order, for evaluation; the last batch is filled up with empty rows."""
    empty = Row(np.zeros(0, np.int32), np.zeros(0, bool))
    for start in range(0, len(rows), batch_size):
        group = list(rows[start : start + batch_size])
        yield pad_rows(group + [empty] * (batch_size - len(group)), buckets)
