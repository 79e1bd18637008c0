"""Tests mirror the rooms: a module of a step, a drafter or a capture has a file of tests."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WITHOUT = {"capture/steps.py"}  # types alone, in its neighbour's tests


@pytest.mark.parametrize("room", ["graphengine/decode", "graphengine/drafters", "capture"])
def test_every_module_has_its_tests(room: str) -> None:
    """Bug: who changes a module has to guess which of fifty files looks at it."""
    modules = [path for path in (ROOT / room).glob("*.py") if path.name != "__init__.py"]
    assert modules
    tests = ROOT / "tests" / Path(room).name
    missing = [
        path.name
        for path in modules
        if not (tests / f"test_{path.name}").is_file()
        and str(path.relative_to(ROOT)) not in WITHOUT
    ]
    assert missing == []
