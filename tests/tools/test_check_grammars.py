"""tools/check_grammars.py in short, and that it would notice what it is there for."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import check_grammars as tool
import pytest
import torch

from graphengine import TINY_TARGET
from graphengine.decode import masks


def run(monkeypatch: pytest.MonkeyPatch, capsys: Any, *arguments: str) -> tuple[int, Any]:
    monkeypatch.setattr("sys.argv", ["check_grammars.py", *arguments])
    code = tool.main()
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_answers_are_valid(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Bug: an answer under a random schema is no JSON, or other JSON."""
    arguments = ("outputs", "--count", "10", "--num-speculative-tokens", "4", "--device", "cpu")
    code, found = run(monkeypatch, capsys, *arguments)
    assert code == 0 and found["num_valid"] + found["num_cut_off"] == 10 and found["num_valid"]


def test_what_is_counted_of_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: tokens or steps are another's, or an answer is in two counts, or in none; or each batch
    asks for what the first one did."""
    metrics = SimpleNamespace(acceptance=SimpleNamespace(num_steps=3), num_prompt_tokens=50)
    ends = [("7", "stop"), ("x", "stop"), ("7", "length"), ("7", "error"), ("8", "stop")]
    results = iter(
        SimpleNamespace(
            text=text, token_ids=[1] * 9, finish_reason=reason, error=None, metrics=metrics
        )
        for text, reason in ends
    )
    handle = SimpleNamespace(result=lambda: next(results))
    asked: list[tuple[str, int]] = []

    def submit(prompt: str, seed: int, **_: Any) -> Any:
        asked.append((prompt, seed))
        return handle

    engine = nullcontext(SimpleNamespace(submit=submit))
    monkeypatch.setattr(tool, "AT_A_TIME", 2)
    monkeypatch.setattr(tool, "Engine", SimpleNamespace(from_pretrained=lambda *_, **__: engine))
    monkeypatch.setattr(tool, "Schemas", lambda seed: iter([{"type": "integer"}] * 5))
    monkeypatch.setattr(tool, "_may_go_on", lambda *_: True)
    numbers, wrong = tool.check_outputs(5, 40, {}, 9.0)
    assert asked == [(f"Write JSON number {i}.", 40 + i) for i in range(5)]
    assert len(wrong) == 2
    assert numbers == {
        "num_answers": 5,
        "num_valid": 2,
        "num_cut_off": 1,
        "num_steps": 15,
        "num_answer_tokens": 45,
    }


@pytest.mark.parametrize("num_wrong", [0, 7])
def test_what_is_told_and_stored(
    num_wrong: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Bug: the file names another seed or engine than those that were checked, so that nobody gets
    the same answers again; or what is wrong is neither shown nor counted, or passes."""
    wrong = [f"schema {i}" for i in range(num_wrong)]
    asked: list[Any] = []
    counted = {"num_answers": 9}
    monkeypatch.setattr(
        tool, "check_outputs", lambda *given: asked.append(given) or (dict(counted), wrong)
    )
    monkeypatch.setattr(tool, "time", SimpleNamespace(perf_counter=lambda: 2.0))
    line = "check_grammars.py outputs --count 9 --seed 4 --seconds 60 --device cpu --commit abc"
    monkeypatch.setattr("sys.argv", [*line.split(), "--out", str(tmp_path / "g.json")])
    assert tool.main() == (1 if wrong else 0)
    options = {"device": "cpu", "graph_mode": "auto", "num_speculative_tokens": None}
    assert asked == [(9, 4, options, 60.0)]
    *shown, table, last = capsys.readouterr().out.splitlines()
    assert shown == wrong[:5] and table == f"num_answers 9  num_wrong {num_wrong}  duration_s 0"
    stored = json.loads((tmp_path / "g.json").read_text())
    assert stored["numbers"] == json.loads(last)
    assert stored["numbers"] == counted | {"num_wrong": num_wrong, "duration_s": 0.0}
    assert (stored["kind"], stored["environment"]["commit"]) == ("grammars", "abc")
    assert stored["config"] == {"what": "outputs", "seed": 4, "wrong": wrong, "options": options}


@pytest.mark.parametrize("what", ["outputs", "masks"])
def test_nothing_to_check_is_refused(
    what: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Bug: no answer is right by a check of none, or no mask ends in a traceback."""
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, capsys, what, "--count", "0", "--device", "cpu")
    assert "--count 0: pass 1 or more" in capsys.readouterr().err


@pytest.mark.parametrize(("what", "name"), [("outputs", "num_answers"), ("masks", "num_walks")])
def test_time_that_is_over_at_once(
    what: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Bug: --seconds is passed over by masks, which walk on; or where the start took as long
    already nothing is checked, and that passes."""
    monkeypatch.setattr(tool, "AT_A_TIME", 1)
    monkeypatch.setattr(tool, "BUDGET", 2)
    arguments = (what, "--count", "9", "--device", "cpu", "--seconds", "0")
    code, found = run(monkeypatch, capsys, *arguments)
    assert code == 0 and found[name] == 1


def test_a_mask_that_is_not_applied_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Bug: the check passes whatever the answers are."""
    real: Any = masks.fill_masks

    def everything(jobs: Any, mask_TW: torch.Tensor) -> None:
        real(jobs, mask_TW)
        mask_TW.fill_(-1)

    monkeypatch.setattr(masks, "fill_masks", everything)
    code, found = run(monkeypatch, capsys, "outputs", "--count", "3", "--device", "cpu")
    assert code == 1 and found["num_wrong"]


def test_walks_and_what_they_notice(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Bug: rows behind a draft are those in front of it, or nobody looks at the last one."""
    code, found = run(monkeypatch, capsys, "masks", "--count", "8")
    assert code == 0 and found["num_rows"] > 30 and found["num_tokens_tried"] > 300
    real: Any = tool.fill_masks

    def shifted(jobs: Any, mask_TW: torch.Tensor) -> None:
        real(jobs, mask_TW)
        mask_TW[1:] = mask_TW[:-1].clone()

    def wrong_at_last(jobs: Any, mask_TW: torch.Tensor) -> None:
        real(jobs, mask_TW)
        ((_, _, drafts),) = jobs
        mask_TW[len(drafts)] ^= bool(drafts)

    for broken in (shifted, wrong_at_last):
        monkeypatch.setattr(tool, "fill_masks", broken)
        code, found = run(monkeypatch, capsys, "masks", "--count", "8")
        assert code == 1 and found["num_wrong"]


def test_the_times_of_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the slowest masks are told as median ones, p95 as p99, or seconds as microseconds."""
    now_s, taken_us = [0.0], list[float]()

    def fill(jobs: Any, mask_TW: torch.Tensor) -> None:
        taken_us.append(10.0 + 7 * len(taken_us) % 100)
        now_s[0] += taken_us[-1] / 1e6
        mask_TW.zero_()

    monkeypatch.setattr(tool, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    monkeypatch.setattr(tool, "fill_masks", fill)
    grammar = SimpleNamespace(spread=lambda: None, spreading=SimpleNamespace(join=lambda: None))
    matcher = SimpleNamespace(grammar=grammar, advance=lambda said: None)
    grammars = SimpleNamespace(matcher=lambda constraint: matcher, prepare=lambda slices: None)
    monkeypatch.setattr(tool, "Grammars", lambda *_: grammars)
    monkeypatch.setattr(tool, "_drafts", lambda *_: [])
    monkeypatch.setattr(tool, "_compare", lambda *_: 0)  # nothing is said, so a walk is a block
    numbers, wrong = tool.check_masks(TINY_TARGET, 100, 0)
    assert not wrong and len(taken_us) == 100
    found = [numbers[f"masks_of_a_block_{part}_us"] for part in ("p50", "p99")]
    assert found == pytest.approx([60.0, 109.0])


def test_what_every_mask_allows_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a mask that allows what the grammar refuses passes, since the step alone has the same
    one; it is found when the refused token is said, if ever."""
    monkeypatch.setattr(tool, "fill_masks", lambda jobs, mask_TW: mask_TW.fill_(-1))
    _, wrong = tool.check_masks(TINY_TARGET, 4, 0)
    assert len(wrong) == 4 and all("row 0 of" in text and " allows " in text for text in wrong)


def test_what_a_budget_cuts_off_is_looked_at(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Bug: an answer that is cut off passes, whatever it begins with."""
    real, arguments = tool._may_go_on, ("outputs", "--count", "4", "--device", "cpu")
    monkeypatch.setattr(tool, "BUDGET", 2)
    code, found = run(monkeypatch, capsys, *arguments)
    assert code == 0 and found["num_cut_off"]
    other = {"const": 123456789}
    monkeypatch.setattr(tool, "_may_go_on", lambda engine, _, result: real(engine, other, result))
    code, found = run(monkeypatch, capsys, *arguments)
    assert code == 1 and found["num_wrong"]
