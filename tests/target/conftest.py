"""Models that several tests share: built, saved and imported once a session."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from tests.target import oracle
from tests.target.oracle import Pair

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_5": oracle.QWEN3_5,
    "qwen3_5_moe": oracle.QWEN3_5_MOE,
    "qwen3_next": oracle.QWEN3_NEXT,
    "qwen3": oracle.QWEN3,
    "qwen3_moe": oracle.QWEN3_MOE,
    "llama": oracle.LLAMA,
}


@pytest.fixture(scope="session")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """A family's tiny model in transformers and here, by name."""

    @functools.cache
    def make(name: str) -> Pair:
        return oracle.make_pair(CONFIGS[name], tmp_path_factory.mktemp(name))

    return make
