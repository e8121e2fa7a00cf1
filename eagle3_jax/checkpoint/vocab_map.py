"""`d2t` and `t2d`: which target tokens a drafter with a vocabulary of its own can propose.

On disk `d2t` is an offset, target id = i + d2t[i]; some projects store the absolute id instead, and a loader that
reads one as the other gets a drafter that is never right. Here both readings are tried and the evidence decides.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np

Ints = np.ndarray[Any, Any]
Reading = Literal["offset", "absolute"]


@dataclasses.dataclass(frozen=True)
class VocabMap:
    """`targets` [U] int32: absolute target ids. `how` says how they were found; `problems` why they may not be used."""

    targets: np.ndarray[Any, np.dtype[np.int32]]
    how: str
    problems: tuple[str, ...] = ()


def read_vocab_map(
    d2t: Ints | None, t2d: Ints | None, draft: int, target: int, reading: Reading | None = None
) -> VocabMap:
    """Absolute target ids from the tables of a checkpoint.

    Args:
      d2t: [U] integers or None.   t2d: [V] booleans or None.
      draft, target: U and V as the configs have them.
      reading: how to read `d2t` when both readings fit.
    """
    identity = np.arange(draft, dtype=np.int32)
    if d2t is None:
        wrong = (
            ()
            if draft == target
            else (f"missing: d2t, which a draft vocabulary of {draft} out of {target} tokens needs",)
        )
        return VocabMap(identity, "identity: no d2t", wrong)
    problems = _table_problems(d2t, t2d, draft, target)
    if problems:
        return VocabMap(identity, "unreadable", tuple(problems))
    ids: dict[Reading, Ints] = {"offset": d2t.astype(np.int64) + np.arange(draft), "absolute": d2t.astype(np.int64)}
    faults = {name: _mapping_fault(table, t2d, target) for name, table in ids.items()}
    good: list[Reading] = [name for name in ids if not faults[name]]
    if reading is not None:
        good = [name for name in good if name == reading]
    if len(good) == 2:
        text = (
            "d2t can be read as offsets and as absolute ids, and no t2d decides; say vocab_map='offset' or 'absolute'"
        )
        return VocabMap(identity, "ambiguous", (text,))
    if not good:
        text = f"d2t is neither a table of offsets ({faults['offset']}) nor of absolute ids ({faults['absolute']})"
        wanted = (
            f"d2t is not a table of {reading} ids ({faults[reading] or 'but can be read as one'})" if reading else text
        )
        return VocabMap(identity, "unreadable", (wanted,))
    return VocabMap(ids[good[0]].astype(np.int32), good[0])


def _table_problems(d2t: Ints, t2d: Ints | None, draft: int, target: int) -> list[str]:
    problems = []
    if d2t.shape != (draft,):
        problems.append(f"wrong shape: d2t: expected [{draft}], found {list(d2t.shape)}")
    if not np.issubdtype(d2t.dtype, np.integer):
        problems.append(f"wrong dtype: d2t: expected integers, found {d2t.dtype}")
    if t2d is not None and t2d.shape != (target,):
        problems.append(f"wrong shape: t2d: expected [{target}], the target's vocabulary, found {list(t2d.shape)}")
    elif t2d is not None and int(np.count_nonzero(t2d)) != draft:
        problems.append(f"t2d marks {int(np.count_nonzero(t2d))} tokens, the draft vocabulary has {draft}")
    return problems


def _mapping_fault(ids: Ints, t2d: Ints | None, target: int) -> str:
    if ids.size and (ids.min() < 0 or ids.max() >= target):
        return f"ids from {ids.min()} to {ids.max()} with {target} tokens"
    if len(np.unique(ids)) != len(ids):
        return f"{len(ids) - len(np.unique(ids))} ids occur twice"
    if t2d is not None and not t2d[ids].all():
        return f"{int(np.count_nonzero(t2d[ids] == 0))} ids are not in t2d"
    return ""


def as_offsets(targets: Ints, target: int) -> tuple[Ints, Ints]:
    """`d2t` int64 [U] offsets and `t2d` bool [V], as SpecForge and SGLang read them."""
    t2d = np.zeros(target, np.bool_)
    t2d[targets] = True
    return targets.astype(np.int64) - np.arange(len(targets)), t2d
