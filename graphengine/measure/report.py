"""What `graphengine bench` and `graphengine profile` show: their tables and pictures.

All take the numbers that are stored, so that a table, a picture and a JSON of one run agree.
Segments that do the same work (all middle layers of a chain) share a line; JSON keeps every name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from graphengine.measure.bench import CaseResult
from graphengine.profiles.launch_gaps import Report
from graphengine.profiles.pictures import Panel, bars_panel, histogram_panel, render, timeline_panel
from graphengine.report import print_table

MAX_KERNEL_NAME = 96

# --- bench ---


class CaseRow(NamedTuple):
    """One case: the engine's label, the case's key in the JSON, and what it measured."""

    label: str
    key: str
    result: CaseResult
    numbers: dict[str, float]


def speedups_(rows: Sequence[CaseRow]) -> None:
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


def tokens_equal(digests: Mapping[str, str]) -> bool:
    """Whether all modes that share an attention kernel said the same in each case; keys are
    `mode_attention_case`."""
    by_case: dict[str, set[str]] = {}
    for key, digest in digests.items():
        by_case.setdefault(key.partition("_")[2], set()).add(digest)
    return all(len(found) == 1 for found in by_case.values())


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


def table(rows: Sequence[CaseRow], simulated: float | None) -> Any:
    """One line per case; the speedup only where there is a baseline."""
    columns = dict(_COLUMNS)
    if not any("speedup_ratio" in row.numbers for row in rows):
        del columns["speedup"]
    cases = [(row.label, row.result.case, _cells(row.numbers, columns)) for row in rows]
    lines = [[label, f"{case.bucket}", f"{case.input_len}", *cells] for label, case, cells in cases]
    return _table(["mode", "bucket", "input", *columns], lines, _title(simulated))


def compare_modes(
    rows: Sequence[CaseRow], simulated: float | None, console: Console
) -> dict[str, Any]:
    """Shows the steps of all modes in one table. Mutates: the rows' numbers.

    Returns: what the result's document says of their tokens.
    """
    speedups_(rows)
    print_table(console, table(rows, simulated))
    digests = {f"{row.label}_{row.key}": row.result.digest for row in rows}
    same = tokens_equal(digests)
    console.print(f"tokens equal in all modes of one attention: {same}")
    return {"token_digests": digests, "tokens_equal_across_modes": same}


def _cells(found: Mapping[str, float], columns: Mapping[str, tuple[str, str]]) -> list[str]:
    return [format(found[key], form) if key in found else "-" for key, form in columns.values()]


# column -> (key, format)
_FIRST_TOKEN_COLUMNS = {
    "p50_ms": ("ttft_p50_ms", ".3f"),
    "first_ms": ("first_p50_ms", ".3f"),
    "/roofline": ("over_roofline_ratio", ".2f"),
    "prefill_ms": ("prefill_p50_ms", ".3f"),
    "tok+queue_ms": ("before_ms", ".3f"),
    "host_ms": ("host_p50_ms", ".3f"),
    "chunks": ("num_chunks", ".0f"),
}
_REQUEST_COLUMNS = {
    "its first_ms": ("request_first_p50_ms", ".3f"),
    "request_ms": ("request_p50_ms", ".1f"),
}


def first_token_table(numbers: Mapping[str, Any], simulated: float | None) -> Any:
    """One line per mode, length and batch; whole requests only where there are some."""
    cases = [
        (label, name, found)
        for label, of_mode in numbers.items()
        if isinstance(of_mode, Mapping)
        for key, found in of_mode.items()
        if (name := re.match(r"first_token_input_(\d+)(?:_batch_(\d+))?$", key))
    ]
    columns = _FIRST_TOKEN_COLUMNS
    if any("request_first_p50_ms" in found for _, _, found in cases):
        columns = columns | _REQUEST_COLUMNS
    lines = []
    for label, name, found in cases:
        before = {"before_ms": found["tokenize_p50_ms"] + found["queue_p50_ms"]}
        lines.append([label, name[2] or "1", name[1], *_cells(found | before, columns)])
    title = "first tokens" + _mark(simulated)
    return _table(["mode", "batch", "input", *columns], lines, title)


def picture(rows: Sequence[CaseRow], simulated: float | None, suffix: str) -> bytes:
    """For each case, what its median step is made of and all of its step times."""
    panels: list[Panel] = []
    for row in rows:
        case = row.result.case
        name = f"{row.label}, bucket {case.bucket}, input {case.input_len}"
        panels.append(bars_panel(step_bars(row), f"{_title(simulated)}: {name}: median step", "us"))
        panels.append(histogram_panel(row.result.step_ms, f"{name}: all steps", "ms"))
    return render(panels, suffix)


def step_bars(row: CaseRow) -> dict[str, dict[str, float]]:
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
    return "decode steps" + _mark(simulated)


def _mark(simulated: float | None) -> str:
    return f" (acceptance SIMULATED at {simulated})" if simulated else ""


# --- profile ---


def grouped(by_name: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Adds up what does the same work: `verify.07` -> `verify.01-35`, `verify.L7.attn` ->
    `verify.L*.attn`; a chain's first and last segments stay alone. Rates are computed anew."""
    last: dict[str, int] = {}
    for chain, number in re.findall(r"^(\w+)\.(\d+)$", "\n".join(by_name), re.MULTILINE):
        last[chain] = max(last.get(chain, 0), int(number))
    groups: dict[str, dict[str, float]] = {}
    for name, numbers in by_name.items():
        line = re.sub(r"^(\w+)\.L\d+\.(attn|delta)$", r"\1.L*.\2", name)
        chain, _, number = name.partition(".")
        if number.isdecimal() and 0 < int(number) < last[chain]:
            line = f"{chain}.01-{last[chain] - 1:02d}"
        group = groups.setdefault(line, {"num_names": 0.0})
        group["num_names"] += 1
        for key, value in numbers.items():
            if not key.endswith("gbps"):
                group[key] = group.get(key, 0.0) + value
    for group in groups.values():
        if group.get("read_bytes"):
            group["achieved_gbps"] = group["read_bytes"] / group["busy_us"] / 1e3
    return groups


def print_report(
    console: Console, title: str, numbers: Mapping[str, Any], num_kernels: int
) -> None:
    """Three tables: classes, chain steps, kernels. `numbers` is `Report.numbers()`."""
    idle_percent = numbers["idle_percent"]
    console.print(
        f"{title}: mean of {numbers['num_steps']} steps\n"
        f"wall {numbers['wall_mean_us']:.1f} us (p50 {numbers['wall_p50_us']:.1f})   "
        f"busy {numbers['busy_mean_us']:.1f} us ({100 - idle_percent:.1f} %)   "
        f"idle {numbers['idle_mean_us']:.1f} us ({idle_percent:.1f} %)",
        markup=False,
    )
    busy, idle = numbers["busy_by_class"], numbers["idle_by_class"]
    shown = [kind for kind in dict.fromkeys([*busy, *idle]) if busy.get(kind) or idle.get(kind)]
    classes = [
        [k.removesuffix("_us"), *(f"{part[k]:.1f}" if k in part else "-" for part in (busy, idle))]
        for k in shown
    ]
    print_table(console, _table(["class", "busy us", "idle us"], classes))
    steps = "step|count|busy us|idle us|host us|MB|GB/s|floor us|/floor".split("|")
    by_step = _step_rows(grouped(numbers["by_name"]), grouped(numbers["host_by_name"]))
    print_table(console, _table(steps, by_step))
    if numbers["kernels"].keys() != numbers["by_name"].keys():  # on the CPU a step is a kernel
        rows = _kernel_rows(numbers["kernels"], num_kernels)
        print_table(console, _table(["us/step", "calls/step", "mean us", "kernel"], rows))


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> Table:
    """Names to the left, numbers to the right."""
    table = Table(box=box.SIMPLE, title=title, padding=(0, 1, 0, 0))
    for name in header:
        is_name = name in ("class", "step", "kernel", "mode")
        table.add_column(name, justify="left" if is_name else "right", no_wrap=name != "kernel")
    for row in rows:
        table.add_row(*row)
    return table


def _step_rows(
    device: Mapping[str, Mapping[str, float]], host: Mapping[str, Mapping[str, float]]
) -> Iterator[list[str]]:
    """What ran on the device, in its order, then what the host alone did."""
    for name in dict.fromkeys([*device, *host]):
        group = device.get(name, {})
        times, rate, floor = ["-", "-"], ["-", "-"], ["-", "-"]
        if group:
            times = [f"{group['busy_us']:.1f}", f"{group['idle_us']:.1f}"]
        times.append(f"{host[name]['host_us']:.1f}" if name in host else "-")
        if "read_bytes" in group:
            rate = [f"{group['read_bytes'] / 1e6:.1f}", f"{group['achieved_gbps']:.0f}"]
        if us := group.get("floor_us"):
            floor = [f"{us:.1f}", f"{group['busy_us'] / us:.2f}"]
        yield [name, f"{(group or host[name])['num_names']:.0f}", *times, *rate, *floor]


def _kernel_rows(kernels: Mapping[str, Mapping[str, float]], count: int) -> Iterator[list[str]]:
    for name, kernel in list(kernels.items())[:count]:
        cells = [f"{kernel['total_us']:.1f}", f"{kernel['num_calls']:.1f}"]
        yield [*cells, f"{kernel['mean_us']:.2f}", escape(shorten(name))]
    if rest := list(kernels.values())[count:]:
        total, calls = (sum(kernel[key] for kernel in rest) for key in ("total_us", "num_calls"))
        yield [f"{total:.1f}", f"{calls:.1f}", "", f"{len(rest)} more"]


def shorten(kernel: str) -> str:
    """A demangled name without its return type and parameters, cut to a line."""
    name = re.sub(r"^(void|static void) ", "", kernel)
    name = re.sub(r"\((\w+ )*[\w:]+\)(?=-?\d)", "", name)  # types of numbers in templates (nsys)
    name = re.sub(r"\((?!anonymous).*$", "", name) or name
    return name if len(name) <= MAX_KERNEL_NAME else name[: MAX_KERNEL_NAME - 2] + ".."


def profile_picture(reports: Mapping[str, Report], mark: str, suffix: str) -> bytes:
    """The reports in one picture: a bar of each mean step, and a median step of each on a line.

    Args:
        mark: what a reader of any panel must know, added to every title.
    """
    bars: dict[str, dict[str, float]] = {}
    for name, report in reports.items():
        bars[name] = {kind: report.per_step_us(ns) for kind, ns in report.busy_ns.items() if ns}
        idle = {f"idle {k}": report.per_step_us(ns) for k, ns in report.idle_ns.items() if ns}
        bars[name] |= idle
    panels = [bars_panel(bars, f"mean step: busy and idle by class{mark}", "us")]
    for name, report in reports.items():
        spans = [(start / 1e3, end / 1e3, kind) for start, end, kind in report.timeline]
        panels.append(timeline_panel(spans, f"a median step ({name}){mark}", "us"))
    return render(panels, suffix)
