"""What the tests of the run-time guards share: early judgement, forced times, the command."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner, Result

from graphengine.cli.main import main
from graphengine.decode import fallback, guards
from graphengine.decode.lane import Lane


def judge_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judges after 8 blocks: the truth known to the tests is short."""
    for module, name, value in (
        (guards, "WINDOW", 8),
        (guards, "FEWEST_TIMES", 3),
        (guards, "JUDGE_EVERY", 4),
        (guards, "FEWEST_TO_WARN", 8),
        (fallback, "WINDOW", 8),
    ):
        monkeypatch.setattr(module, name, value)


def plain_takes(monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[int]:
    """Plain steps run for real, then are said to have taken `seconds`; one entry a measurement."""
    real, calls = Lane.time_step, []

    def time_step(self: Lane, requests: list[Any]) -> float:
        assert real(self, requests) > 0
        calls.append(len(requests))
        return seconds

    monkeypatch.setattr(Lane, "time_step", time_step)
    return calls


def run_cli(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["run", *map(str, arguments)])
