"""A small target's directory for every file of these tests, and its tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphengine.checkpoints.tokenizer import Tokenizer
from tests.support.checkpoints import make_target


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("tokenizer"), layers=1)


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer(directory)
