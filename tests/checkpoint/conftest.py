"""Checkpoints written by transformers, made once a test process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoint import tiny


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a kind of `tiny`; not to be changed by a test."""
    root = tmp_path_factory.mktemp("checkpoints")
    return lambda kind: tiny.save(kind, root / kind)
