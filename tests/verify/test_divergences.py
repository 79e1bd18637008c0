"""What `verify` tells of tokens that differ, and where."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from graphengine.cli import verify as cli_verify
from graphengine.report import stderr_console
from graphengine.verify import report as shown
from graphengine.verify import run
from graphengine.verify.check import CheckName, judge
from graphengine.verify.run import Cell, CellResult
from graphengine.verify.teacher import TokenScores
from tests.support.transcripts import transcript


def test_a_divergence_is_told_before_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: where a token is wrong, a benign tie in front of it is described instead; or a tie alone
    is not described, or more than one is; or a number of it is another one's."""
    tie, wrong = ([9, 8, 7], [0.1, 0.0, 0.1]), ([9, 8, 7], [0.1, 0.0, 0.7])
    ran, found = [transcript([5, 8, 6], [1, 2])], list[CellResult]()
    for i, (best, regret) in enumerate((tie, wrong, ([5, 8, 6], [0.0] * 3))):
        report = judge(ran, [TokenScores(regret, best, [-0.5] * 3)], 0.2, [])
        cell = Cell("none torch", i, "alone")
        found.append(CellResult(cell=cell, report=report, failed={}, transcripts=ran))
    told: list[str] = []
    monkeypatch.setattr(run, "verify_mode", lambda *_, **__: found)
    monkeypatch.setattr(
        shown, "report_cells", lambda *given: told.extend(given[3]) or given[2] == found
    )
    config = SimpleNamespace(graph_mode="none", attention_backend="torch", dtype="float32")
    engine: Any = SimpleNamespace(config=config, built=None)
    monkeypatch.setattr(cli_verify._Run, "engine", lambda *_: nullcontext(engine))
    options: dict[str, Any] = {"buckets": (1,), "max_new_tokens": 3}
    options |= dict.fromkeys(("matrix", "forced_acceptance", "all_options"), False)
    options |= dict.fromkeys(("tolerance", "min_identical", "min_acceptance"))
    mode, console = run.Mode("none", "torch"), stderr_console(quiet=True)
    assert cli_verify._Run("m", "d", mode, None, [[1]], options, console).compare_tokens(None)
    assert told == [
        "none torch bucket 0 alone: first benign tie at request 0, token 0 (the prefill's token): "
        "[5] (p 0.6065) instead of [9], regret 0.1 nats; after [], then [8, 6]",
        "none torch bucket 1 alone: first divergence at request 0, token 2 (step 1, row 1 of 2 "
        "committed, the target's own token): [6] (p 0.6065) instead of [7], regret 0.7 nats; after "
        "[5, 8], then []",
    ]


def test_the_verdict_is_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: a script that reads the last line of stdout has one of the failures."""
    ran = [transcript([5, 8, 6], [1, 2])]
    report = judge(ran, [TokenScores([0.1, 0.0, 0.7], [9, 8, 7], [-0.5] * 3)], 0.2, [])
    failed: dict[CheckName, str] = {"regret": "1 of 3", "identical": "few"}
    cell = CellResult(
        cell=Cell("none torch", 1, "alone"), report=report, failed=failed, transcripts=ran
    )
    options = {"all_options": False, "as_json": False, "output_json": None, "prompt_file": None}
    quiet = stderr_console(quiet=True)
    assert not shown.report_cells("m", "d", [cell, cell], ["text"], options, quiet)
    lines = [
        f"FAIL none torch bucket 1 alone: {text}" for text in ("regret: 1 of 3", "identical: few")
    ]
    told = [*lines, *lines, "FAIL: 2 runs, 6 tokens judged"]
    assert capsys.readouterr().out.splitlines() == told
