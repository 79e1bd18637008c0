"""What a run reports: the tables on stderr and the JSON object on stdout.

Why one file: both show the same numbers, and a number must not differ between them. Throughput of
the totals is all tokens over the wall-clock time of all answers; a request's is over its decoding.
Speculative counts have vLLM's benchmark names where they mean the same thing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from graphengine import __version__
from graphengine.api import GenerationResult
from graphengine.config.engine import EngineConfig
from graphengine.decode.metrics import (
    Acceptance,
    RequestMetrics,
    StartupMetrics,
    acceptance_by_prompt,
)
from graphengine.prompts import Turn
from graphengine.startup.memory import MemoryPlan

SCHEMA_VERSION = 1
MAX_ROWS = 16
PIPE_WIDTH = 140  # columns when nobody looks
MAX_TABLE_WIDTH = 10_000
# Column of an answer -> (its metric, format); headers of two lines, so that 80 columns hold them.
_COLUMNS = {
    "tokens": ("num_output_tokens", "d"),
    "TTFT\nms": ("ttft_ms", ".1f"),
    "ms per\ntoken": ("ms_per_token", ".2f"),
    "ms per\nstep": ("ms_per_step", ".2f"),
    "tokens\nper s": ("tokens_per_s", ".1f"),
}


@dataclass(frozen=True, slots=True)
class Answer:
    """One answered turn. `index` is the prompt's place in the run, `turn` the turn's; from 0."""

    index: int
    turn: int
    prompt: Turn
    result: GenerationResult


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run. `startup_s`: see `startup_seconds`; `generate_s`: of all answers; `built_late_s`:
    bucket -> seconds, of buckets that were built at their first use."""

    startup_s: dict[str, float]
    startup: StartupMetrics
    answers: Sequence[Answer]
    generate_s: float
    built_late_s: Mapping[int, float] = field(default_factory=dict)


def named(model: str, draft: str | None) -> dict[str, str | None]:
    """A pair as results name it: not by where its files lie on one machine."""
    return {"model": Path(model).name, "draft": Path(draft).name if draft else None}


def refused(index: int, turn: int, prompt: Turn, reason: str) -> Answer:
    """A turn that could not be asked."""
    nothing = RequestMetrics(
        num_prompt_tokens=0,
        num_output_tokens=0,
        ttft_ms=0.0,
        decode_ms=0.0,
        acceptance=Acceptance(0),
    )
    result = GenerationResult(
        text="",
        token_ids=[],
        finish_reason="error",
        metrics=nothing,
        error=f"{reason}; neither this turn nor those behind it were asked",
    )
    return Answer(index, turn, prompt, result)


def labelled(answers: Sequence[Answer]) -> list[tuple[str, Answer]]:
    """Answers under names for people, from 1: "2", or "2.3" for the third turn of several."""
    several = {answer.index for answer in answers if answer.turn}
    turns = [f".{a.turn + 1}" if a.index in several else "" for a in answers]
    return [(f"{a.index + 1}{turn}", a) for a, turn in zip(answers, turns, strict=True)]


class _Stderr:
    """stderr; a note that cannot be written (a full disk, a reader that left) costs nobody an
    answer."""

    def write(self, text: str) -> None:
        with suppress(OSError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            sys.stderr.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


def stderr_console(quiet: bool) -> Console:
    """Where notes and tables go; no colour codes unless stderr is a terminal."""
    how: dict[str, Any] = {"quiet": quiet, "highlight": False, "emoji": False}
    if sys.stderr is None or not sys.stderr.isatty():  # None: closed by the shell
        how |= {"force_terminal": False, "color_system": None, "width": PIPE_WIDTH}
    if sys.stderr is None:
        return Console(stderr=True, **how)
    console = Console(file=cast("IO[str]", _Stderr()), **how)
    if not console.width:  # COLUMNS=0, as some shells have it: rich would show nothing
        console.width = PIPE_WIDTH
    return console


def writable(text: str) -> str:
    """The text for stdout; what its encoding cannot hold (a Latin-1 locale) is escaped."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def print_note(console: Console, text: str) -> None:
    """A sentence for the user, in a dim voice."""
    console.print(text, style="dim", markup=False, soft_wrap=True)


def print_warning(console: Console, text: str) -> None:
    """What the user must see: loud, and never wrapped, so that it can be searched for in a log."""
    console.print(f"warning: {text}", style="bold yellow", markup=False, soft_wrap=True)


def print_table(console: Console, table: Table) -> None:
    """A table in its full width; a narrower screen wraps its lines, where rich would cut digits off
    the columns."""
    unlimited = console.options.update(width=MAX_TABLE_WIDTH)
    table.width = Measurement.get(console, unlimited, table).maximum
    console.print(table, crop=False)


def print_heading(console: Console, model: str, draft: str | None, config: EngineConfig) -> None:
    """What runs, in two lines."""
    print_note(console, f"graphengine {__version__}: {model}, drafter {draft or 'none'}")
    print_note(
        console,
        f"{config.device} {config.dtype}, graph mode {config.graph_mode}, "
        f"{'compiled' if config.compile else 'not compiled'}, "
        f"attention {config.attention_backend}, buckets {','.join(map(str, config.buckets))}, "
        f"context {config.max_model_len}",
    )


def print_memory_plan(console: Console, plan: MemoryPlan) -> None:
    """What each part takes and what that leaves for K/V."""
    for line in plan.lines():
        # A terminal would cut in the middle of a word.
        console.print(line, style="dim", markup=False, soft_wrap=not console.is_terminal)


def print_answer_line(console: Console, result: GenerationResult) -> None:
    """A chat's line after an answer."""
    metrics = result.metrics
    text = f"{metrics.num_output_tokens} tokens, {metrics.tokens_per_s:.1f} tokens/s"
    if metrics.acceptance.num_draft_tokens and metrics.num_steps:
        text += f", {metrics.acceptance.mean_acceptance_length:.2f} tokens per step"
    print_note(console, f"[{text}, {result.finish_reason}]")
    if result.error is not None:
        print_warning(console, result.error)


def startup_seconds(
    import_s: float, ready_s: float, startup: StartupMetrics, answers: Sequence[Answer]
) -> dict[str, float]:
    """Seconds until the first token, by phase. `other_s`: of those until the engine was ready, what
    is in no phase; `first_token_s` only if the first answer has a token."""
    names = ("load_s", "compile_s", "capture_s", "warmup_s")
    phases = {"import_s": import_s} | {name: getattr(startup, name) for name in names}
    phases["other_s"] = max(ready_s - sum(phases.values()), 0.0)
    if answers and answers[0].result.metrics.num_output_tokens:
        phases["first_token_s"] = answers[0].result.metrics.ttft_ms / 1e3
    return phases


def answering_seconds(answers: Sequence[Answer]) -> float:
    """Seconds of answers that came one after another, without what lies between them."""
    spent = [answer.result.metrics for answer in answers]
    return sum(metrics.ttft_ms + metrics.decode_ms for metrics in spent) / 1e3


def print_tables(console: Console, outcome: Outcome, cache: str | None = None) -> None:
    """The start-up table, and the result table if anything was answered.

    Args:
        cache: the folder of compiled code.
    """
    startup, answers = outcome.startup, outcome.answers
    console.print()
    print_table(console, _startup_table(console, outcome.startup_s))
    print_note(console, cache_line(startup, cache))
    for size, seconds in outcome.built_late_s.items():
        print_note(console, f"bucket {size} was built at its first use, in {seconds:.2f} s")
    print_note(
        console,
        f"weights {startup.weight_bytes / 2**20:.1f} MiB, K/V pool "
        f"{startup.kv_pool_bytes / 2**20:.1f} MiB in {startup.num_pages} pages, "
        f"{startup.num_graphs} graphs",
    )
    if not answers:
        return
    console.print()
    print_table(console, _result_table(console, answers, outcome.generate_s))
    if len(answers) > MAX_ROWS:
        print_note(console, f"{len(answers) - MAX_ROWS} more answers are in the total alone")
    for label, answer in labelled(answers):
        metrics = answer.result.metrics
        if answer.result.error is None and metrics.fallback_reason is not None:
            print_note(
                console,
                f"prompt {label}: {metrics.num_plain_steps} plain steps at the end; "
                f"{metrics.fallback_reason}",
            )
    rates = _merged(answers).per_position
    if rates:
        row = " ".join(f"{rate:.2f}" for rate in rates)
        console.print(f"acceptance per position  {row}", soft_wrap=True)


def print_failures(answers: Sequence[Answer]) -> None:
    """Which answers failed and why, on stderr, also where it is quiet: the exit code is 1."""
    console = stderr_console(quiet=False)
    for label, answer in labelled(answers):
        if answer.result.error is not None:
            print_warning(console, f"prompt {label} failed: {answer.result.error}")


def cache_line(startup: StartupMetrics, cache: str | None) -> str:
    """Cold or warm: how much of Inductor's code was found, and where."""
    total = startup.num_compiled + startup.num_cache_hits
    where = f" in {cache}" if cache else " in the compilers' own folders"
    ahead = f"bucket {','.join(map(str, startup.buckets))} built ahead"
    if not total:
        return f"{ahead}, nothing compiled by Inductor"
    state = "warm" if not startup.num_compiled else "cold"
    if startup.num_compiled and startup.num_cache_hits:
        state = "partly warm"
    return (
        f"{state} start: {startup.num_cache_hits} of {total} compiled graphs found{where}; {ahead}"
    )


def _table(console: Console) -> Table:
    if console.is_terminal:
        return Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    return Table(box=None, pad_edge=False)


def _startup_table(console: Console, startup_s: dict[str, float]) -> Table:
    table = _table(console)
    table.add_column("start-up")
    table.add_column("s", justify="right")
    for name, seconds in startup_s.items():
        table.add_row(name.removesuffix("_s").replace("_", " "), f"{seconds:.2f}")
    table.add_row("total", f"{sum(startup_s.values()):.2f}")
    return table


def _result_table(console: Console, answers: Sequence[Answer], generate_s: float) -> Table:
    drafts = _merged(answers).num_draft_tokens > 0
    table = _table(console)
    table.add_column("prompt", no_wrap=True)
    for name in (*_COLUMNS, *(["accept.\nlength", "accepted\ndrafts"] if drafts else [])):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("ended\nby", no_wrap=True)

    def add_row(label: str, numbers: dict[str, Any], acceptance: Acceptance, ended: str) -> None:
        cells = [format(numbers[k], form) if k in numbers else "" for k, form in _COLUMNS.values()]
        means = acceptance.mean_acceptance_length, acceptance.mean_accepted_draft_tokens
        if drafts:
            cells += [f"{mean:.2f}" if acceptance.num_steps else "-" for mean in means]
        table.add_row(label, *cells, ended)

    for label, answer in labelled(answers)[:MAX_ROWS]:
        result = answer.result
        numbers = _json_answer(answer)["metrics"]
        add_row(label, numbers, result.metrics.acceptance, result.finish_reason)
    if len(answers) > 1:
        table.add_section()
        add_row("total", _totals(answers, generate_s), _merged(answers), "")
    return table


def json_object(
    outcome: Outcome, config: EngineConfig, plan: MemoryPlan, **said: Any
) -> dict[str, Any]:
    """The run as one JSON object. Times carry their unit in the key; `results` are in order, and
    only those that were finished if the run was stopped (`is_complete` false, one of `said`).

    Without a drafter the acceptance keys are null and the `spec_decode_*` keys absent, so that
    "not drafted" cannot be read as "nothing accepted".
    """
    startup, startup_s = outcome.startup, outcome.startup_s
    counts = {name: value for name, value in asdict(startup).items() if name.startswith("num_")}
    sizes = {
        "weight_bytes": startup.weight_bytes,
        "kv_pool_bytes": startup.kv_pool_bytes,
        "buckets_built_ahead": list(startup.buckets),
        "buckets_built_late_s": dict(outcome.built_late_s),
        **{f"draft_width_bucket_{w.bucket}": w.to_json() for w in startup.draft_widths},
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "graphengine_version": __version__,
        **said,
        "config": asdict(config),
        "startup": startup_s | {"total_s": sum(startup_s.values())} | counts | sizes,
        "memory_plan": plan.to_json(),
        "results": [_json_answer(answer) for answer in outcome.answers],
        "totals": _totals(outcome.answers, outcome.generate_s),
    }


def _json_answer(answer: Answer) -> dict[str, Any]:
    result, metrics = answer.result, answer.result.metrics
    said = "text token_ids finish_reason stop_reason error logprobs prompt_logprobs".split()
    counts = "num_prompt_tokens num_cached_tokens num_output_tokens num_steps".split()
    parts = "tokenize queue prefill launch first_token ttft decode".split()
    names = [*counts, *(f"{part}_ms" for part in parts)]
    names += ["ms_per_token", "ms_per_step", "tokens_per_s", "num_plain_steps", "fallback_reason"]
    return {
        **{name: getattr(answer, name) for name in ("index", "turn", "prompt")},
        **{name: getattr(result, name) for name in said},
        "metrics": {name: getattr(metrics, name) for name in names}
        | _acceptance_means(metrics.acceptance)
        | {"steps_by_accepted": metrics.acceptance.steps_by_accepted},
    }


def _totals(answers: Sequence[Answer], generate_s: float) -> dict[str, Any]:
    acceptance = _merged(answers)
    num_tokens = sum(a.result.metrics.num_output_tokens for a in answers)
    totals: dict[str, Any] = {
        "num_answers": len(answers),
        "num_prompt_tokens": sum(a.result.metrics.num_prompt_tokens for a in answers),
        "num_output_tokens": num_tokens,
        "duration_s": generate_s,
        "tokens_per_s": num_tokens / generate_s if generate_s > 0 else 0.0,
    } | _acceptance_means(acceptance)
    if acceptance.num_draft_tokens:
        proposed, accepted = acceptance.num_drafted, acceptance.num_accepted
        totals |= {
            "spec_decode_acceptance_rate": 100 * accepted / proposed if proposed else 0.0,
            "spec_decode_acceptance_length": acceptance.mean_acceptance_length,
            "spec_decode_num_drafts": acceptance.num_steps,
            "spec_decode_draft_tokens": proposed,
            "spec_decode_accepted_tokens": accepted,
            "spec_decode_per_position_acceptance_rates": acceptance.per_position,
            "acceptance_by_prompt": [
                {"is_cached": is_cached, "prompt_tokens_below": below, "num_drafts": part.num_steps}
                | _acceptance_means(part)
                for (is_cached, below), part in acceptance_by_prompt(
                    answer.result.metrics for answer in answers
                ).items()
            ],
        }
    return totals


def _acceptance_means(acceptance: Acceptance) -> dict[str, Any]:
    known = acceptance.num_draft_tokens > 0 and acceptance.num_steps > 0
    return {
        "mean_acceptance_length": acceptance.mean_acceptance_length if known else None,
        "mean_accepted_draft_tokens": acceptance.mean_accepted_draft_tokens if known else None,
        "per_position_acceptance_rates": acceptance.per_position if known else None,
    }


def _merged(answers: Sequence[Answer]) -> Acceptance:
    return Acceptance.merge(answer.result.metrics.acceptance for answer in answers)
