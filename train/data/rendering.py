"""Records to rows, by this process or by several. Workers import this module and nothing of jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from train.data.batches import DataReport, fitted_rows
from train.data.conversations import Overlong, Row
from train.data.mask import ChangedTurns, ChatRenderer
from train.data.renderer import load_renderer

RECORDS_A_ROUND = 2048  # handed to each worker at a time, so that a large file is never in memory


@dataclasses.dataclass(frozen=True)
class Rendering:
    """How records become rows; all that a worker process needs."""

    folder: Path
    tokenizer: str | None
    template_kwargs: dict[str, Any]
    changed_turns: ChangedTurns
    max_length: int
    overlong: Overlong
    vocab_size: int

    def renderer(self) -> ChatRenderer | None:
        return load_renderer(
            self.folder, tokenizer=self.tokenizer, template_kwargs=self.template_kwargs,
            changed_turns=self.changed_turns,
        )  # fmt: skip

    def rows(self, record: Any, renderer: ChatRenderer | None) -> tuple[list[Row], DataReport]:
        """The rows of one record, and what there is to report of it."""
        report = DataReport()
        if renderer is not None:
            renderer.num_changed = renderer.num_misfits = 0
        return fitted_rows(record, renderer, self.max_length, self.overlong, self.vocab_size, report), report


def render_all(
    records: Iterable[Any], how: Rendering, renderer: ChatRenderer | None, workers: int
) -> Iterator[tuple[list[Row], DataReport]]:
    """In order, by this process or by several."""
    if workers == 1:
        yield from (how.rows(record, renderer) for record in records)
        return
    # A pool reads its input without end, however slow the work: it is given a piece at a time.
    with get_context("spawn").Pool(workers, _start_worker, (how,)) as pool:
        records = iter(records)
        while piece := list(islice(records, workers * RECORDS_A_ROUND)):
            yield from pool.map(_work, piece, chunksize=64)


def _start_worker(how: Rendering) -> None:
    global _work_on
    _work_on = partial(how.rows, renderer=how.renderer())


_work_on: Any = None  # a worker's own, set when it starts


def _work(record: Any) -> tuple[list[Row], DataReport]:
    return _work_on(record)
