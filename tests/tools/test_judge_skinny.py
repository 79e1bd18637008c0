"""tools/judge_skinny.py: which entries are kept, and what becomes of the table meanwhile."""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from graphengine.kernels.skinny_config import TUNED, SkinnyConfig
from graphengine.profiles import result_schema
from tools import judge_skinny

KEY, OTHER = (4096, 4096, 2, 16), (24, 24, 2, 16)
CONFIG = SkinnyConfig(64, 64, 4, cols=16, consumers=1)


def judged(gains: dict[str, float], gain: float = 0.001) -> tuple[list[str], Any, list[str]]:
    """What is kept of changes that make a step of 10 ms faster by so much each."""
    labels: list[str] = []

    def step_ms(label: str, names: list[str]) -> float | None:
        labels.append(label)
        return None if "broken" in names else 10 - sum(gains[name] for name in names)

    kept, best_ms = judge_skinny.judge([*gains, "broken"], step_ms, gain)
    return kept, best_ms, labels


def test_what_makes_the_step_faster_is_kept() -> None:
    """Bug: changes are judged beside a table without those that were kept before, one that gains
    nothing is kept, or one that does not compile ends the rest."""
    kept, best_ms, labels = judged({"a": 0.1, "b": -0.2, "c": 0.3, "d": 0.0})
    assert kept == ["c", "a"]
    assert best_ms == pytest.approx(9.6)
    alone = ["table", "a", "b", "c", "d", "broken"]
    assert labels == [*alone, "c+a", "c+a+d", "c+a+b", "c+a+broken", "table again"]
    assert judged({"a": 0.1}, gain=0.02)[:2] == ([], 10)


def test_a_table_that_was_not_timed_beats_nothing() -> None:
    """Bug: no time for the table itself, and the first change is called faster."""
    assert judge_skinny.judge(["a"], lambda label, names: 1.0 if names else None, 0.0) == ([], None)


def test_the_table_comes_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: a change stays in the table for the next variant, of changes made together the last
    alone is in it, a bucket keeps its old kernels, or a failure leaves requests in the loop; or a
    line tells another unit, or not why there is no time."""
    table = dict(TUNED)
    seen: list[Any] = []
    lane = SimpleNamespace(num_built=0)
    lane.rebuild = lambda: setattr(lane, "num_built", lane.num_built + 1)
    loop = SimpleNamespace(first=lane, reset=lambda: seen.append("reset"))
    engine: Any = SimpleNamespace(built=SimpleNamespace(loop=loop))

    def run_case(engine: Any, case: Any) -> Any:
        seen.append((TUNED.get(KEY), TUNED.get(OTHER), lane.num_built, case.bucket, case.input_len))
        if TUNED.get(OTHER) is CONFIG:
            raise RuntimeError("out of shared memory\nof 232448 bytes")
        times = {"step_mean_ms": 5.1, "step_p95_ms": 9.0, "step_p50_ms": 5.0, "host_p50_ms": 1.0}
        return SimpleNamespace(numbers=lambda gbps: times)

    monkeypatch.setattr(judge_skinny, "run_case", run_case)
    changes: judge_skinny.Changes = {
        "o": {KEY: CONFIG},
        "none": {KEY: None},
        "new": {OTHER: CONFIG},
    }
    args = argparse.Namespace(
        bucket=16, input_len=768, num_iters=5, seconds=100.0, first_token=False
    )
    steps = judge_skinny.Steps(engine, changes, args)
    assert [steps.ms(name, [name]) for name in changes] == [5.0, 5.0, None]
    assert seen == [
        (CONFIG, None, 1, 16, 768),
        (None, None, 2, 16, 768),
        (table[KEY], CONFIG, 3, 16, 768),
        "reset",
    ]
    assert steps.ms("o+new", ["o", "new"]) is None and seen[-2][:2] == (CONFIG, CONFIG)
    assert table == TUNED
    assert steps.numbers == {
        name: {"step_p50_ms": 5.0, "step_p95_ms": 9.0, "step_mean_ms": 5.1}
        for name in ("o", "none")
    }
    args.seconds = -1.0
    assert judge_skinny.Steps(engine, changes, args).ms("table", []) is None
    assert capsys.readouterr().out.splitlines() == [
        *(f"{name:40} 5.0000 ms step_p50_ms" for name in ("o", "none")),
        *(f"{name}: out of shared memory" for name in ("new", "o+new")),
        "table: no time left",
    ]


def test_first_tokens_are_of_the_chunk_captured_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: the old graph is timed, or that of a chunk which these prompts do not take; a prompt
    that fills its chunk is among them; or of a longer one another length is told."""
    captured: list[Any] = []

    def run_prefill(engine: Any, case: Any, rates: Any) -> Any:
        assert TUNED[OTHER] is CONFIG
        captured.append((case.input_len, case.batch, case.num_iters))
        return dict.fromkeys(("first_p50_ms", "ttft_p50_ms", "host_p50_ms", "prefill_p50_ms"), 7.0)

    monkeypatch.setattr(judge_skinny, "run_prefill", run_prefill)
    chunks = [SimpleNamespace(size=size) for size in (16, 128, 256)]
    builder = SimpleNamespace(capture_chunks=lambda given: captured.extend(c.size for c in given))
    loop = SimpleNamespace(
        first=SimpleNamespace(builder=builder),
        prefill=SimpleNamespace(fixed=chunks),
        reset=lambda: captured.append("reset"),
    )
    engine: Any = SimpleNamespace(built=SimpleNamespace(loop=loop))
    args = argparse.Namespace(input_len=100, num_iters=9, seconds=100.0, first_token=True)
    steps = judge_skinny.Steps(engine, {"new": {OTHER: CONFIG}}, args)
    for length in (100, 128):
        args.input_len = length
        assert steps.ms("new", ["new"]) == 7.0
    assert captured == [128, (100, 1, 9), 128, (128, 1, 9)]
    assert list(steps.numbers["new"]) == ["first_p50_ms", "ttft_p50_ms", "host_p50_ms"]
    args.input_len = 300
    assert steps.ms("new", ["new"]) is None and captured[4:] == ["reset"]
    told = "new: --input-len 300: no chunk of a fixed size holds such a prompt"
    assert capsys.readouterr().out.splitlines()[-1] == told


def test_changes_are_read(tmp_path: Path) -> None:
    """Bug: a null that does not take an entry out, or a typing mistake that is told by a trace,
    or not as it was typed."""
    path = tmp_path / "changes.json"
    path.write_text(json.dumps({"o": {str(KEY): list(CONFIG), str(OTHER): None}}))
    assert judge_skinny.read_changes(path) == {"o": {KEY: CONFIG, OTHER: None}}
    for text in (
        "{",
        "[]",
        '{"o": {"4096": null}}',
        '{"o": {"(1, 2, 3": null}}',
        '{"o": {"(1, 2, 3, 4)": 7}}',
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"changes\.json: no changes of the table"):
            judge_skinny.read_changes(path)
    path.write_text('{"o": {"[1, 2,3,4]": null}}')
    with pytest.raises(
        ValueError, match=r"\('\[1, 2,3,4\]' is not \(E, D, bytes of a weight, T\)\)"
    ):
        judge_skinny.read_changes(path)


def test_what_was_kept_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: the result does not say which of its changes were better, of what engine, or where a
    variant failed."""
    path, stored = tmp_path / "changes.json", list[Any]()
    path.write_text(json.dumps({"o": {str(KEY): list(CONFIG)}, "none": {str(OTHER): None}}))
    times = {"table": 6.0, "o": 5.0, "none": 7.0, "o+none": None, "table again": 6.1}
    steps = SimpleNamespace(ms=lambda label, _: times[label], numbers={"o": {"step_p50_ms": 5.0}})
    monkeypatch.setattr(judge_skinny, "Steps", lambda *_: steps)
    monkeypatch.setattr(judge_skinny.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(judge_skinny.Engine, "from_pretrained", lambda *_, **__: nullcontext())

    def store(*args: Any, config: Any, env: Any) -> None:
        stored.append((args, config))

    monkeypatch.setattr(result_schema, "write_result", store)
    monkeypatch.setattr(result_schema, "environment", lambda commit: {})
    judge_skinny.main([str(path), "--model", "m", "--bucket", "8", "--out", "x.json"])
    ((_, kind, numbers), config) = stored[0]
    assert (kind, numbers) == ("skinny_linear_judged", steps.numbers | {"best_step_ms": 5.0})
    assert (config["kept"], config["model"], config["buckets"]) == (["o"], "m", [8])
    assert config["changes"] == {"o": {str(KEY): CONFIG}, "none": {str(OTHER): None}}
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said == {"kept": ["o"], "best_step_ms": 5.0}


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: minutes of building an engine before a file that is not there is told."""
    for arguments in (["none.json"], ["none.json", "--seconds", "nan"]):
        with pytest.raises(SystemExit) as end:
            judge_skinny.main([str(tmp_path / arguments[0]), *arguments[1:]])
        assert end.value.code == 2
    assert "no changes of the table" in capsys.readouterr().err


@pytest.mark.parametrize("draft", ["none", "a-drafter"])
def test_plain_decoding_is_asked_for_without_drafts(draft: str) -> None:
    """Bug: with --draft none the engine is asked to draw its acceptance, which it refuses; or a
    long prompt has no room for its answer."""
    names = ("simulate_acceptance", "draft_quantization", "num_speculative_tokens")
    args = argparse.Namespace(
        bucket=1, input_len=768, load_format="dummy", draft=draft, **dict.fromkeys(names, 1)
    )
    options = judge_skinny.options(args)
    assert set(options).isdisjoint(names) == (draft == "none")
    assert options["max_model_len"] >= 768 + judge_skinny.OUTPUT_LEN + 16
