"""A pair without a fault for every file of these tests, and copies of it to damage."""

from pathlib import Path

import pytest

from tests.support.doctored import make_copies, make_pair


@pytest.fixture(autouse=True)
def much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Published shapes are examined on machines that could not hold them."""
    monkeypatch.setattr("graphengine.startup.memory.host_memory_bytes", lambda: 1 << 40)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def copies(pair: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    return make_copies(pair, tmp_path)
