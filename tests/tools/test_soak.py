"""tools/soak.py in short, and that it would notice what it is there for."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from graphengine.decode import rows
from graphengine.decode.loop import DecodeLoop

_spec = importlib.util.spec_from_file_location(
    "soak_tool", Path(__file__).resolve().parents[2] / "tools" / "soak.py"
)
assert _spec is not None and _spec.loader is not None
soak_tool = importlib.util.module_from_spec(_spec)
sys.modules["soak_tool"] = soak_tool
_spec.loader.exec_module(soak_tool)

OPTIONS: dict[str, Any] = {"buckets": soak_tool.BUCKETS, "device": "cpu"}


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.slow)])
def test_500_steps(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug T45: over hundreds of steps with cancels, resets, page shortage and changes of buckets a
    page leaks, or a token differs from plain decoding."""
    arguments = ["--steps", "500", "--seed", "3", "--device", "cpu", "--attention-backend", backend]
    assert soak_tool.main(arguments) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    numbers = found["numbers"]
    assert found["passed"] and numbers["num_steps"] >= 500 and numbers["num_differing"] == 0
    assert numbers["num_cancelled"] > 5 and numbers["num_finished"] > 20
    assert numbers["num_plain_steps"] > 0
    assert sum(n > 0 for n in numbers["num_blocks_by_accepted"]) >= 4, "too few lengths came up"


def leaks_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = DecodeLoop._release, []

    def release(self: DecodeLoop, request: Any) -> None:
        calls.append(1)
        if len(calls) == soak_tool.NUM_PROMPTS + 9:  # the first are the plain engine's
            request.pages = request.pages[1:]
        real(self, request)

    monkeypatch.setattr(DecodeLoop, "_release", release)


def swaps_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    real = rows.next_block

    def next_block(start: Any, *rest: Any) -> Any:
        ids, positions, slots = real(start, *rest)
        return ids, positions + 9 * (positions > 20), slots

    monkeypatch.setattr(rows, "next_block", next_block)


def grows(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter(range(100 << 20, 99 << 30, 64 << 20))
    monkeypatch.setattr(soak_tool, "rss_bytes", lambda: next(sizes))


@pytest.mark.parametrize(
    ("break_", "message"),
    [(leaks_a_page, "pages held"), (swaps_a_row, " is not "), (grows, "the process grew by")],
)
def test_it_notices(
    break_: Any,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Bug: a soak that cannot fail."""
    break_(monkeypatch)
    assert soak_tool.main(["--steps", "400", "--seed", "3", "--device", "cpu"]) == 1
    printed = capsys.readouterr()
    found = json.loads(printed.out.splitlines()[-1])
    assert not found["passed"] and message in found["reason"] and "FAILED" in printed.err


@pytest.mark.slow
def test_recurrent_layers() -> None:
    """Bug: a state is lost, kept of another text, or advanced by who has left: the text changes."""
    options = OPTIONS | {"device": "cpu"}
    assert soak_tool.soak(300, 5, options, is_hybrid=True)["num_steps"] >= 300


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["piecewise", "full"])
def test_500_steps_on_the_gpu(mode: str) -> None:
    """Bug T45: replays under changing buckets, cancels and page shortage: an illegal access."""
    options = OPTIONS | {"device": "cuda", "graph_mode": mode, "compile": False}
    assert soak_tool.soak(500, 3, options)["num_steps"] >= 500
