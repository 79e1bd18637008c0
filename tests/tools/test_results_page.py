"""tools/results_page.py: what documents say of speed is what the stored results say."""

from __future__ import annotations

import json
import re
from typing import Any
from unittest.mock import MagicMock

import pytest

from tools import results_page


def test_documents_are_what_the_command_writes() -> None:
    """Bug: a new result, or a number typed by hand, leaves a document that no file backs."""
    assert results_page.PAGE.read_text() == results_page.page(), "run tools/results_page.py"
    found = results_page.BLOCK.findall(results_page.README.read_text())
    assert found == [results_page.readme_block()], "run tools/results_page.py"


def test_the_picture_shows_the_same_numbers() -> None:
    """Bug: README's table is regenerated and the picture above it is not. (Its text is compared:
    another matplotlib draws other bytes.)"""

    def texts(svg: str) -> list[str]:
        return sorted(re.findall(r"<text [^>]*>([^<]+)</text>", svg))

    stored = texts(results_page.PICTURE.read_text())
    assert stored == texts(results_page.picture().decode())
    assert sum("." in text for text in stored) >= 15


def test_first_tokens_of_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Bug: a result of bench --prefill is not found, or hides what only an older file has."""
    monkeypatch.setattr(results_page, "RESULTS", tmp_path)
    by_hand = {"qwen3-8b": {f"first_token_input_{n}": {"ttft_p50_ms": 1.0} for n in (128, 32000)}}
    mode = {"startup": {}, "first_token_input_128": {"ttft_p50_ms": 2.0}}
    files = {
        "2026-01-01-h200-first-token": {"config": {}, "numbers": by_hand},
        "2026-01-02-h200-8b-first-token-1234567": {
            "config": {"model": "qwen3-8b", "modes": {}},
            "numbers": {"matmul_tflops": 700.0, "full_triton": mode},
        },
    }
    for name, content in files.items():
        text = json.dumps(content | {"date_utc": f"{name[:10]}T00:00:00Z"})
        (tmp_path / f"{name}.json").write_text(text)
    assert results_page.first_token_files() == ["first-token", "8b-first-token"]
    found = results_page.first_tokens()["qwen3-8b"]
    shown = [results_page.first_token(found, n) for n in (128, 32000, 8192)]
    assert shown == ["2.00", "1.00", "-"]


def test_first_tokens_of_several_hosts() -> None:
    """Bug: where each host had a time of its own, the range is written from the slowest to the
    fastest."""
    found = {"first_token_input_128": {"ttft_ms": [12.34, 9.5, 41.0]}}
    assert results_page.first_token(found, 128) == "9.50 to 41"


def test_the_newest_file_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Bug: after a new run the tables go on quoting the old one, or that of another measurement."""
    monkeypatch.setattr(results_page, "RESULTS", tmp_path)
    names = (
        "2026-01-01-h200-a-1234567",
        "2026-01-02-h200-a-7654321",
        "2026-01-03-h200-a-b-7654321",
    )
    for name in names:
        (tmp_path / f"{name}.json").write_text(f'{{"date_utc": "{name[:10]}T00:00:00Z"}}')
    assert results_page.newest("a")[0] == f"{names[1]}.json"
    with pytest.raises(ValueError, match="no result called c"):
        results_page.newest("c")


def test_only_a_check_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: writing what was stale counts as a failure, or finding it does not; or a check writes
    the picture, or tells what it has found as written."""
    made = {"README": "a\n", "PAGE": "b\n", "PICTURE": "c"}
    for name, text in made.items():
        path = tmp_path / name
        path.write_text(text)
        monkeypatch.setattr(results_page, name, path)
    monkeypatch.setattr(results_page, "ROOT", tmp_path)
    monkeypatch.setattr(results_page, "page", lambda: "new\n")
    monkeypatch.setattr(results_page, "picture", lambda: b"drawn")
    check = ["--check"]
    for options, code, shown in ((check, 1, "c"), ([], 0, "drawn"), (check, 0, "drawn")):
        monkeypatch.setattr("sys.argv", ["results_page.py", *options])
        with pytest.raises(SystemExit) as end:
            results_page.main()
        assert end.value.code == code and results_page.PICTURE.read_text() == shown
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert told == [{"stale": ["PAGE"]}, {"written": ["PAGE"]}, {"stale": []}]
    assert [(tmp_path / name).read_text() for name in made] == ["a\n", "new\n", "drawn"]


def test_of_one_day_the_later_run_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Bug: of two runs on one day the one whose commit sorts last is quoted."""
    monkeypatch.setattr(results_page, "RESULTS", tmp_path)
    for commit, hour in (("fffffff", "08"), ("0000000", "17")):
        path = tmp_path / f"2026-01-01-h200-a-{commit}.json"
        path.write_text(f'{{"date_utc": "2026-01-01T{hour}:00:00Z"}}')
    assert results_page.newest("a")[0] == path.name


def test_the_picture_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a bar or its floor stands at another batch, has another one's number, or the colour that
    the legend gives to another."""
    keys = [f"bucket_{batch}_input_128" for batch in (1, 8, 16)]
    peer = {key: {"step_mean_ms": 10.0 + i} for i, key in enumerate(keys)}
    ours = {
        name: {key: {"step_p50_ms": ms + i, "floor_ms": ms - 2 + i} for i, key in enumerate(keys)}
        for name, ms in (("8b-uniform", 7.0), ("8b-uniform-fp8-dynamic", 5.0))
    }
    monkeypatch.setattr(results_page, "newest", lambda _: ("", {"numbers": {"qwen3-8b": peer}}))
    monkeypatch.setattr(results_page, "cases", ours.__getitem__)
    axes = MagicMock()
    results_page.draw_steps(axes)
    bars = [(*c.args[:2], c.kwargs["color"], c.kwargs["label"]) for c in axes.bar.call_args_list]
    assert bars == [
        ([-0.27, 0.73, 1.73], [10, 11, 12], "#9a9a9a", "vLLM 0.33, all bf16"),
        ([0.0, 1.0, 2.0], [7, 8, 9], "#2f6f9f", "graphengine, all bf16"),
        ([0.27, 1.27, 2.27], [5, 6, 7], "#3b8132", "graphengine, FP8 drafter"),
    ]
    heights, begins, ends = axes.hlines.call_args.args
    assert heights == (5, 6, 7, 3, 4, 5)
    assert begins == pytest.approx([-0.135, 0.865, 1.865, 0.135, 1.135, 2.135])
    assert ends == pytest.approx([begin + 0.27 for begin in begins])
    numbers = [(c.args[0], c.args[2]) for c in axes.text.call_args_list]
    places = [place for bar in bars for place in bar[0]] + [begin + 0.135 for begin in begins]
    values = [value for bar in bars for value in bar[1]] + list(heights)
    assert [place for place, _ in numbers] == pytest.approx(places)
    assert [text for _, text in numbers] == [f"{value:.2f}" for value in values]
