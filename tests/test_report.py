"""report: what tables and JSON say of a run."""

from __future__ import annotations

import errno
import io
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from graphengine import report
from graphengine.api import GenerationResult
from graphengine.checkpoints.hub import TINY_TARGET
from graphengine.cli import answers
from graphengine.config.options import Options, SamplingParams
from graphengine.decode.metrics import Acceptance, RequestMetrics, StartupMetrics
from graphengine.startup.build import read_configs
from graphengine.startup.options import resolve_options


def answer(index: int = 0, turn: int = 0, error: str | None = None) -> report.Answer:
    """Two drafted steps, 3 of 6 drafts accepted, and one plain step."""
    metrics = RequestMetrics(
        num_prompt_tokens=10,
        num_output_tokens=7,
        ttft_ms=500.0,
        decode_ms=1500.0,
        acceptance=Acceptance(3, [0, 1, 1, 0]),
        num_plain_steps=1,
        fallback_reason="lost",
    )
    reason = "stop" if error is None else "error"
    result = GenerationResult(
        text="", token_ids=[], finish_reason=reason, metrics=metrics, error=error
    )
    return report.Answer(index, turn, "x", result)


def startup(num_compiled: int = 0, num_cache_hits: int = 0) -> StartupMetrics:
    sizes = {"weight_bytes": 3 << 20, "kv_pool_bytes": 5 << 19, "num_pages": 9, "num_graphs": 1}
    counts = {"num_compiled": num_compiled, "num_cache_hits": num_cache_hits, "buckets": (1, 4)}
    return StartupMetrics(load_s=1.0, compile_s=2.0, capture_s=3.0, **sizes, **counts)  # type: ignore[arg-type]


def shown(answers: list[report.Answer]) -> str:
    screen = io.StringIO()
    outcome = report.Outcome({"import_s": 1.0}, startup(), answers, 3.5, {4: 2.5})
    report.print_tables(Console(width=140, file=screen), outcome)
    return screen.getvalue()


def test_totals() -> None:
    """Bug: a rate that vLLM's benchmark gives in percent is a share, throughput leaves prompts'
    time out, or requests' means are averaged; or a number is missing, or another one's."""
    totals = report._totals([answer(0), answer(1)], 3.5)
    assert [part["num_drafts"] for part in totals.pop("acceptance_by_prompt")] == [4]
    assert totals == {
        "num_answers": 2,
        "num_prompt_tokens": 20,
        "num_output_tokens": 14,
        "duration_s": 3.5,
        "tokens_per_s": 4.0,
        "mean_acceptance_length": 2.5,
        "mean_accepted_draft_tokens": 1.5,
        "per_position_acceptance_rates": [1.0, 0.5, 0.0],
        "spec_decode_acceptance_rate": 50.0,
        "spec_decode_acceptance_length": 2.5,
        "spec_decode_num_drafts": 4,
        "spec_decode_draft_tokens": 12,
        "spec_decode_accepted_tokens": 6,
        "spec_decode_per_position_acceptance_rates": [1.0, 0.5, 0.0],
    }


def test_where_acceptance_is_lost() -> None:
    """Bug: what drafts did behind cached tokens is told of the other prompts, or a long prompt's of
    short ones."""

    def prompt(length: int, num_cached: int, acceptance: Acceptance) -> report.Answer:
        changes: dict[str, Any] = {"num_prompt_tokens": length, "num_cached_tokens": num_cached}
        metrics = replace(answer().result.metrics, acceptance=acceptance, **changes)
        return replace(answer(), result=replace(answer().result, metrics=metrics))

    whole, lost = Acceptance(3, [0, 0, 0, 2]), Acceptance(3, [1, 0, 0, 0])
    answers = [prompt(5000, 4992, lost), prompt(10, 0, whole), prompt(9000, 0, lost)]
    names = "is_cached prompt_tokens_below num_drafts mean_acceptance_length".split()
    found = report._totals(answers, 3.5)["acceptance_by_prompt"]
    assert [tuple(part[name] for name in names) for part in found] == [
        (False, 128, 2, 4.0),
        (False, None, 1, 1.0),
        (True, 8192, 1, 1.0),
    ]


def test_totals_of_short_blocks() -> None:
    """Bug: a block that a small bucket cut short counts as a whole one of drafts, so that the rate
    of a drafter that is always right is below 100."""
    metrics = replace(answer().result.metrics, acceptance=Acceptance(3, [0, 1, 1, 0], [0, 1, 1, 0]))
    short = replace(answer(), result=replace(answer().result, metrics=metrics))
    totals: dict[str, Any] = report._totals([short], 3.5)
    assert totals["spec_decode_acceptance_rate"] == 100.0
    assert (totals["spec_decode_draft_tokens"], totals["spec_decode_accepted_tokens"]) == (3, 3)


def test_an_answer_of_its_prefill_alone() -> None:
    """Bug: a drafted answer of one token, which took no step, has a mean of 0 tokens a step, in the
    JSON, the table or a chat's line; or its share of no drafts divides by zero."""
    assert [*report._acceptance_means(Acceptance(3)).values()] == [None] * 3
    metrics = RequestMetrics(
        num_prompt_tokens=10,
        num_output_tokens=1,
        ttft_ms=5.0,
        decode_ms=0.0,
        acceptance=Acceptance(3),
    )
    short = replace(answer(1), result=replace(answer().result, metrics=metrics))
    assert shown([answer(0), short]).split("\n2 ")[1].split()[4:7] == ["0.0", "-", "-"]
    screen = io.StringIO()
    report.print_answer_line(Console(width=140, file=screen), short.result)
    assert screen.getvalue() == "[1 tokens, 0.0 tokens/s, stop]\n"
    assert report._totals([short], 1.0)["spec_decode_acceptance_rate"] == 0.0


@pytest.mark.parametrize(
    ("num_compiled", "num_cache_hits", "cache", "line"),
    [
        (0, 0, "/c", "{ahead}, nothing compiled by Inductor"),
        (0, 4, "/c", "warm start: 4 of 4 compiled graphs found in /c; {ahead}"),
        (4, 0, "/c", "cold start: 0 of 4 compiled graphs found in /c; {ahead}"),
        (1, 3, None, "partly warm start: 3 of 4 compiled graphs found in {own}; {ahead}"),
    ],
)
def test_cold_or_warm(num_compiled: int, num_cache_hits: int, cache: str | None, line: str) -> None:
    """Bug: a start that found everything is called partly warm, and one looks for what was lost; or
    the line does not say in which folder, or of which buckets."""
    found = report.cache_line(startup(num_compiled, num_cache_hits), cache)
    own, ahead = "the compilers' own folders", "bucket 1,4 built ahead"
    assert found == line.format(own=own, ahead=ahead)


def test_names_and_notes_of_answers() -> None:
    """Bug: a turn is counted from 0 or named where there is one alone; a request that failed is
    said to have gone on plainly; or a late bucket's size and seconds are mixed up."""
    answers = [answer(0), answer(1, 0), answer(1, 1, error="broken")]
    assert [label for label, _ in report.labelled(answers)] == ["1", "2.1", "2.2"]
    text = shown(answers)
    assert "prompt 2.1: 1 plain steps at the end; lost" in text and "prompt 2.2:" not in text
    assert "bucket 4 was built at its first use, in 2.50 s" in text


def test_what_a_table_has_no_room_for() -> None:
    """Bug: one answer more than there are rows is left out in silence, and the turn before it is
    named as if it were its conversation's only one; or MiB are counted as MB."""
    text = shown([answer(i) for i in range(report.MAX_ROWS + 1)])
    assert "1 more answers are in the total alone" in text
    assert "weights 3.0 MiB, K/V pool 2.5 MiB in 9 pages, 1 graphs" in text
    assert "more answers" not in shown([answer(i) for i in range(report.MAX_ROWS)])
    *others, last = [answer(i) for i in range(report.MAX_ROWS)]
    assert f"\n{report.MAX_ROWS}.1 " in shown([*others, last, replace(last, turn=1)])


def test_numbers_under_their_columns() -> None:
    """Bug: the bonus token is counted in the column without it, or a chat's line is of accepted
    drafts where it says tokens; or a column has another one's number."""
    text = shown([answer(0), answer(1)])
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line}
    assert rows["1"] == ["7", "500.0", "250.00", "500.00", "4.0", "2.50", "1.50", "stop"]
    assert rows["total"] == ["14", "4.0", "2.50", "1.50"]
    screen = io.StringIO()
    report.print_answer_line(Console(width=140, file=screen), answer().result)
    assert screen.getvalue() == "[7 tokens, 4.0 tokens/s, 2.50 tokens per step, stop]\n"


def test_the_heading() -> None:
    """Bug: an engine without compiled segments is called compiled, or one setting is printed where
    another should stand."""
    options = Options(device="cpu", buckets=(4, 1), max_model_len=64)
    config = resolve_options(options, *read_configs(TINY_TARGET, None))
    screen = io.StringIO()
    console = Console(width=140, file=screen)
    report.print_heading(console, "target", None, config)
    report.print_heading(console, "target", "draft", replace(config, compile=True))
    one, what, other, compiled = screen.getvalue().splitlines()
    assert one.endswith(": target, drafter none") and other.endswith(": target, drafter draft")
    parts = "attention torch, buckets 1,4, context 64"
    assert what == f"cpu float32, graph mode none, not compiled, {parts}"
    assert compiled == f"cpu float32, graph mode none, compiled, {parts}"


def test_positions_of_all_answers() -> None:
    """Bug: how often each position's draft was accepted, or how many were, is told of one answer,
    for all."""
    never = replace(answer().result.metrics, acceptance=Acceptance(3, [6, 0, 0, 0]))
    other = replace(answer(1), result=replace(answer().result, metrics=never))
    text = shown([answer(), other])
    assert "acceptance per position  0.25 0.12 0.00\n" in text
    _, total = [line.split() for line in text.splitlines() if line.startswith("total")]
    assert total == ["total", "14", "4.0", "1.38", "0.38"]


def test_sizes_of_a_start() -> None:
    """Bug: the JSON tells the weights' bytes as the pool's, or buckets that were built late as
    built ahead."""
    config = resolve_options(Options(device="cpu"), *read_configs(TINY_TARGET, None))
    plan: Any = SimpleNamespace(to_json=dict)
    outcome = report.Outcome({"import_s": 1.0}, startup(2, 3), [], 0.0, {8: 2.5})
    found = report.json_object(outcome, config, plan)["startup"]
    sizes = {"weight_bytes": 3 << 20, "kv_pool_bytes": 5 << 19, "num_pages": 9, "num_graphs": 1}
    buckets = {"buckets_built_ahead": [1, 4], "buckets_built_late_s": {8: 2.5}}
    counts = {"num_compiled": 2, "num_cache_hits": 3}
    assert found == {"import_s": 1.0, "total_s": 1.0} | sizes | counts | buckets


def test_the_json_of_an_answer() -> None:
    """Bug: a number of an answer is missing in the JSON, or stands under another one's name."""
    times = "tokenize queue prefill launch first_token ttft decode".split()
    told: dict[str, Any] = {f"{name}_ms": 10.0 + i for i, name in enumerate(times)}
    told |= {"num_prompt_tokens": 90, "num_cached_tokens": 64, "num_output_tokens": 9}
    told |= {"num_plain_steps": 1, "fallback_reason": "lost"}
    metrics = RequestMetrics(**told, acceptance=Acceptance(2, [1, 1, 2]))
    said: dict[str, Any] = {"text": "a b", "token_ids": [5, 6], "finish_reason": "stop"}
    said |= {"stop_reason": 6, "error": None, "logprobs": [{5: -0.5}], "prompt_logprobs": [None]}
    result = GenerationResult(**said, metrics=metrics)
    assert report._json_answer(report.Answer(3, 1, "x", result)) == {
        "index": 3,
        "turn": 1,
        "prompt": "x",
        **said,
        "metrics": {
            **told,
            "num_steps": 5,
            "ms_per_token": 2.0,
            "ms_per_step": 3.2,
            "tokens_per_s": 500.0,
            "mean_acceptance_length": 2.25,
            "mean_accepted_draft_tokens": 1.25,
            "per_position_acceptance_rates": [0.75, 0.5],
            "steps_by_accepted": [1, 1, 2],
        },
    }


def test_the_json_of_a_run() -> None:
    """Bug: a part of a run is missing in the JSON: its settings, its memory, what it warned of."""
    config = resolve_options(Options(device="cpu"), *read_configs(TINY_TARGET, None))
    plan: Any = SimpleNamespace(to_json=lambda: {"num_pages": 9})
    outcome = report.Outcome({"import_s": 1.0}, startup(), [answer(), answer(1)], 3.5)
    said: dict[str, Any] = {"model": "m", "warnings": ["slow"], "is_complete": True}
    found = report.json_object(outcome, config, plan, **said)
    assert len(found.pop("results")) == found.pop("totals")["num_answers"] == 2
    assert found.pop("startup")["total_s"] == 1.0
    assert found == {
        "schema_version": 1,
        "graphengine_version": report.__version__,
        **said,
        "config": asdict(config),
        "memory_plan": {"num_pages": 9},
    }


def test_a_pair_is_named_by_its_folders() -> None:
    """Bug: a result says where models lie on one machine."""
    assert report.named("/a/b/target", "/c/draft/") == {"model": "target", "draft": "draft"}
    assert report.named("Qwen/Qwen3-8B", None) == {"model": "Qwen3-8B", "draft": None}


def test_seconds_until_the_first_token() -> None:
    """Bug: a phase is counted twice, so that what is in none of them is less than nothing; or not
    at all, so that it is in none."""
    found = report.startup_seconds(1.0, 9.0, startup(), [answer()])
    assert found["other_s"] == 2.0 and found["first_token_s"] == 0.5
    found = report.startup_seconds(1.0, 12.0, replace(startup(), warmup_s=4.0), [answer()])
    phases = {"import_s": 1.0, "load_s": 1.0, "compile_s": 2.0, "capture_s": 3.0, "warmup_s": 4.0}
    assert found == phases | {"other_s": 1.0, "first_token_s": 0.5}
    assert report.startup_seconds(1.0, 6.5, startup(), [])["other_s"] == 0.0


def test_the_first_token_is_the_first_answer_s() -> None:
    """Bug: a chat's start-up ends with the first token of its last answer."""
    last = report.refused(1, 0, "x", "too long")
    for told in ([answer()], [answer(), last]):
        assert report.startup_seconds(1.0, 9.0, startup(), told)["first_token_s"] == 0.5


def test_no_first_token_of_a_refused_turn() -> None:
    """Bug: a prompt that was refused is said to have had its first token after 0 s."""
    nothing = report.refused(0, 0, answer().prompt, "too long")
    assert "first_token_s" not in report.startup_seconds(1.0, 9.0, startup(), [nothing])


def test_seconds_of_a_chat() -> None:
    """Bug: a chat's throughput leaves the time of its prompts out."""
    assert report.answering_seconds([answer(0), answer(0, 1)]) == 4.0


def test_notes_hold_no_pictures(capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: a file's or a text's ":b:" is told as a picture, also where it is no markup."""
    console = report.stderr_console(quiet=False)
    report.print_note(console, "wrote :b:/x:car:.json")
    console.print("[red]x[/] :b:")
    assert capsys.readouterr().err == "wrote :b:/x:car:.json\nx :b:\n"


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, text)

    def flush(self) -> None:
        self.write("")


def test_notes_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a full disk under stderr ends `run` at its first note, and no answer reaches stdout."""
    monkeypatch.setattr("sys.stderr", FullDisk())
    report.print_note(report.stderr_console(quiet=False), "loading")
    report.print_failures([answer(error="lost")])


def test_notes_that_nobody_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a shell that closed stderr (2>&-) ends `run` at its first note."""
    monkeypatch.setattr("sys.stderr", None)
    report.print_note(report.stderr_console(quiet=False), "loading")


def test_notes_where_the_screen_has_no_width(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: where a shell says COLUMNS=0, notes, warnings and tables vanish from a terminal."""
    monkeypatch.setenv("COLUMNS", "0")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    report.print_warning(report.stderr_console(quiet=False), "not seen")
    assert "not seen" in capsys.readouterr().err


def test_what_loads_is_called_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the bar tells a folder `v[b]` as `v`, whose brackets it takes for a style."""
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, color_system=None, width=80)

    def load(model: str, draft: str | None, progress: Any, **options: Any) -> None:
        progress(f"loading {model}", 0.5)

    monkeypatch.setattr(answers.Engine, "from_pretrained", load)
    job = answers.Job(
        model="v[b]",
        draft=None,
        conversations=[],
        sampling=SamplingParams(),
        as_json=False,
        quiet=False,
        nvtx=False,
        options={},
        args={},
    )
    answers._load(job, console)
    assert "loading v[b]" in shown.getvalue()
