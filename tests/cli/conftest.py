"""A small pair for every file of these tests, and the command that runs it."""

from pathlib import Path

import pytest

from tests.support.checkpoints import make_drafter, make_target
from tests.support.command_line import Run, runner


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("pair") / "target", max_positions=8192)


@pytest.fixture(scope="module")
def draft(target: Path) -> Path:
    return make_drafter(target.with_name("draft"), target)


@pytest.fixture
def cli(target: Path) -> Run:
    return runner(target)
