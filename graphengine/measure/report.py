"""What `graphengine bench` shows: the table and the picture of its cases.

Both take the numbers that are stored, so that a table, a picture and a JSON of one run agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rich import box
from rich.table import Column, Table

from graphengine.measure.bench import CaseResult
from graphengine.profiles.pictures import Panel, bars_panel, histogram_panel, render


class Row(NamedTuple):
    """One case: the engine's label, the case's key in the JSON, and what it measured."""

    label: str
    key: str
    result: CaseResult
    numbers: dict[str, float]


def speedups_(rows: Sequence[Row]) -> None:
    """Adds `speedup_ratio`, tokens/s over plain decoding's, where the same case ran plainly too.

    Mutates: the rows' numbers.
    """
    plain = {
        (row.label.removesuffix("_plain"), row.key): row.numbers["median_tokens_per_s"]
        for row in rows
        if row.label.endswith("_plain")
    }
    for row in rows:
        if base := plain.get((row.label, row.key)):
            row.numbers["speedup_ratio"] = row.numbers["median_tokens_per_s"] / base


# column -> (key, format); "-" where a case has no such number
_COLUMNS = {
    "context": ("mean_context_tokens", ".0f"),
    "steps": ("num_steps", ".0f"),
    "p50_ms": ("step_p50_ms", ".3f"),
    "p95_ms": ("step_p95_ms", ".3f"),
    "p99_ms": ("step_p99_ms", ".3f"),
    "host_ms": ("host_p50_ms", ".3f"),
    "idle%": ("gpu_idle_percent", ".1f"),
    "accept": ("mean_acceptance_length", ".2f"),
    "ms/tok": ("median_tpot_ms", ".3f"),
    "tok/s": ("median_tokens_per_s", ".0f"),
    "speedup": ("speedup_ratio", ".2f"),
    "GB/s": ("achieved_gbps", ".0f"),
    "%read": ("bandwidth_percent", ".0f"),
    "/floor": ("over_floor_ratio", ".2f"),
}


def table(rows: Sequence[Row], simulated: float | None) -> Any:
    """One line per case; the speedup only where there is a baseline."""
    columns = dict(_COLUMNS)
    if not any("speedup_ratio" in row.numbers for row in rows):
        del columns["speedup"]
    names = ("bucket", "input", *columns)
    numeric = [Column(name, justify="right", no_wrap=True) for name in names]
    table = Table(Column("mode", no_wrap=True), *numeric, title=_title(simulated), box=box.SIMPLE)
    table.padding = (0, 1, 0, 0)
    for row in rows:
        case, found = row.result.case, row.numbers
        cells = [
            format(found[key], form) if key in found else "-" for key, form in columns.values()
        ]
        table.add_row(row.label, str(case.bucket), str(case.input_len), *cells)
    return table


def picture(rows: Sequence[Row], simulated: float | None, suffix: str) -> bytes:
    """Of each case what its median step is made of, and all of its step times."""
    panels: list[Panel] = []
    for row in rows:
        case = row.result.case
        name = f"{row.label}, bucket {case.bucket}, input {case.input_len}"
        panels.append(bars_panel(step_bars(row), f"{_title(simulated)}: {name}: median step", "us"))
        panels.append(histogram_panel(row.result.step_ms, f"{name}: all steps", "ms"))
    return render(panels, suffix)


def step_bars(row: Row) -> dict[str, dict[str, float]]:
    """Microseconds of a case's median step: the host's bar (working, waiting) and the GPU's (busy,
    idle) have one length, the step; the floor has its own. What is not known has none."""
    step = row.numbers["step_p50_ms"] * 1e3
    host = min(row.numbers["host_p50_ms"] * 1e3, step)
    bars = {"host": {"host working": host, "host waiting": step - host}}
    if "gpu_busy_ms" in row.numbers:
        busy = min(row.numbers["gpu_busy_ms"] * 1e3, step)
        bars["GPU"] = {"GPU busy": busy, "GPU idle": step - busy}
    if "floor_ms" in row.numbers:
        bars["floor"] = {"floor": row.numbers["floor_ms"] * 1e3}
    return bars


def _title(simulated: float | None) -> str:
    return "decode steps" + (f" (acceptance SIMULATED at {simulated})" if simulated else "")
