"""Folders as a user has them: a target with its tokenizer, and its head in SpecForge's format."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from eagle3_jax.checkpoint import save_specforge, save_target
from tests.infer.models import DRAFT, HF_CONFIG, TOKENIZER, make_drafter, make_target


class Folders(NamedTuple):
    target: Path
    drafter: Path


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("models")
    save_target(make_target(), root / "target", HF_CONFIG, generation_config={"temperature": 0.0})
    TOKENIZER.save_pretrained(root / "target")
    save_specforge(make_drafter(), DRAFT, root / "head")
    return Folders(root / "target", root / "head")
