"""Everything that is wrong with a checkpoint, told at once."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from eagle3_jax.errors import UserError

SHOWN = 60


class CheckpointError(UserError):
    """A folder of weights that cannot be used. `problems` holds every reason; the message shows the first `SHOWN`."""

    def __init__(self, where: str | Path, problems: Iterable[str]) -> None:
        self.where = str(where)
        self.problems = tuple(problems)
        super().__init__(_message(self.where, self.problems))


def _message(where: str, problems: tuple[str, ...]) -> str:
    if len(problems) == 1:
        return f"{where}: {problems[0]}"
    lines = [f"{where}: {len(problems)} problems", *(f"  - {text}" for text in problems[:SHOWN])]
    if len(problems) > SHOWN:
        lines.append(f"  - and {len(problems) - SHOWN} more")
    return "\n".join(lines)
