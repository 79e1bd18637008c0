"""profiles/{trace,launch_gaps,nsys,torch_trace,pictures}.py: the launch-gap report.

The traces of nsys_exports.py have gaps counted by hand; stored exports of real runs, in tests/data,
are held to sums written when they were cut.
"""

import gzip
import importlib.util
import io
import json
import sqlite3
import sys
import xml.etree.ElementTree as ET
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from rich.console import Console

from graphengine import names
from graphengine.checkpoints.hub import TINY_DRAFT, TINY_TARGET
from graphengine.config.draft import DraftConfig
from graphengine.measure import report as measure_report
from graphengine.measure.segment_bytes import segment_bytes
from graphengine.profiles import nsys, pictures, torch_trace
from graphengine.profiles.launch_gaps import Report, report
from graphengine.profiles.trace import (
    NO_END,
    Activity,
    HostRange,
    Launch,
    Trace,
    host_times,
    place,
)
from graphengine.startup.build import read_configs
from tests.support.chains import chain_names

HERE = Path(__file__).parents[1]
STORED = sorted((HERE / "data").glob("nsys-*.sqlite.gz"))
MAX_STORED_BYTES = 300_000


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


exports = load(HERE / "support" / "nsys_exports.py")
shrink_nsys = load(HERE.parent / "tools" / "shrink_nsys.py")

# Per step of the scenario, microseconds.
BUSY = {"dense": 21.0, "attention": 5.0, "chain": 0.0, "other": 1.0}
IDLE = {"dense": 1.0, "attention": 0.5, "seam": 4.0, "host": 67.5}
BY_NAME = {
    "verify.00": (9.0, 67.0, 2),
    "verify.L0.attn": (5.0, 2.5, 2),
    "verify.01": (12.0, 1.5, 2),
    "host.accept": (1.0, 2.0, 1),
}


def check_scenario(found: Report, num_steps: int) -> None:
    numbers = found.numbers()
    assert numbers["num_steps"] == num_steps - 1
    assert numbers["step_walls_us"] == [100.0] * (num_steps - 1)
    assert numbers["busy_by_class"] == {f"{kind}_us": us for kind, us in BUSY.items()}
    assert numbers["idle_by_class"] == {f"{kind}_us": us for kind, us in IDLE.items()}
    rows = {
        name: (row["busy_us"], row["idle_us"], row["num_activities"])
        for name, row in numbers["by_name"].items()
    }
    assert rows == BY_NAME
    assert numbers["busy_mean_us"] == 27.0 and numbers["idle_mean_us"] == 73.0
    assert numbers["idle_percent"] == pytest.approx(73.0)
    gemm = next(row for name, row in numbers["kernels"].items() if "gemm" in name)
    assert gemm == {"total_us": 14.0, "mean_us": 7.0, "num_calls": 2.0}
    assert "memcpy DtoH" in numbers["kernels"]


def test_node_export_has_the_gaps_counted_by_hand(tmp_path: Path) -> None:
    """Bug: a gap booked to the wrong step, name or class, or overlap counted twice; or another
    library's or thread's range taken for the name of a launch."""
    check_scenario(report(nsys.read_export(exports.write_export(tmp_path / "a.sqlite"))), 4)


def test_graph_export_takes_a_graph_as_one_interval(tmp_path: Path) -> None:
    """Bug: graphs' rows are not read, and the device seems idle while they run."""
    path = exports.write_export(tmp_path / "a.sqlite", preset="graph")
    numbers = report(nsys.read_export(path)).numbers()
    assert numbers["busy_by_class"]["dense_us"] == 22.0  # the gap inside the graph is not seen
    assert numbers["idle_by_class"] == {
        "dense_us": 0.0,
        "attention_us": 0.5,
        "seam_us": 4.0,
        "host_us": 67.5,
    }
    assert numbers["step_walls_us"] == [100.0] * 3


def test_export_without_the_domain_row_falls_back_to_our_names(tmp_path: Path) -> None:
    """Bug: a capture range that begins after the domain was made yields no names at all."""
    path = exports.write_export(tmp_path / "a.sqlite", domain=False)
    check_scenario(report(nsys.read_export(path)), 4)


def test_torch_profiler_gives_the_same_report(tmp_path: Path) -> None:
    """Bug: the fallback's numbers mean something else than nsys's."""
    path = exports.write_chrome_trace(tmp_path / "a.json")
    check_scenario(report(torch_trace.read_chrome_trace(path)), 4)
    packed = tmp_path / "a.json.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    check_scenario(report(torch_trace.read_chrome_trace(packed)), 4)


def test_traces_without_work_or_names_are_refused(tmp_path: Path) -> None:
    """Bug: a division by zero, or a report of zeros, for a trace that recorded the wrong thing."""
    with pytest.raises(ValueError, match="no device activity"):
        report(Trace([], [HostRange("step", 0, 1, 0)]))
    launch = Launch(1, 0, 1, 0, False)
    with pytest.raises(ValueError, match="--nvtx"):
        report(Trace([Activity("gemm", 5, 9, launch)], []))


def test_uneven_steps() -> None:
    """Bug: the median is a mean, work outside of all steps is a mean per step, kernels are listed
    from the cheapest, or the picture's step does not begin with its gap."""
    host = [HostRange("step", i * 10, i * 10 + 9, 0) for i in range(4)]
    host += [HostRange("decode.00", i * 10 + 1, i * 10 + 8, 0) for i in range(4)]
    times = [("first", 100, 140), ("big", 150, 200), ("small", 200, 220), ("mid", 400, 440)]
    work = [
        Activity(name, start, end, Launch(i, i * 10 + 2, i * 10 + 3, 0, False))
        for i, (name, start, end) in enumerate(times)
    ]
    found = report(Trace([*work, Activity("alone", 300, 310, None)], host))
    assert found.walls_ns == [60, 20, 130]
    assert found.timeline == [(10, 60, "dense")]
    numbers = found.numbers()
    assert numbers["wall_p50_us"] == 0.06 and numbers["wall_mean_us"] == pytest.approx(0.07)
    assert numbers["outside_us"] == 0.09, "80 ns before it and 10 ns of it"
    assert list(numbers["kernels"]) == ["big", "mid", "small"]


def test_rows_that_an_export_may_hold(tmp_path: Path) -> None:
    """Bug: of nested calls the inner one names the launch, a graph without a time counts from the
    clock's zero, or work of a range that never ended is outside of all steps."""
    path = exports.write_export(tmp_path / "a.sqlite", preset="graph")
    before = nsys.read_export(path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(
            "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME SELECT start + 1, end - 1, correlationId, "
            "globalTid, nameId FROM CUPTI_ACTIVITY_KIND_RUNTIME"
        )
        connection.execute("INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (0, 0, 1, 0, 1)")
        last_step = "start = (SELECT max(start) FROM NVTX_EVENTS) - 31000"
        changed = connection.execute(f"UPDATE NVTX_EVENTS SET end = NULL WHERE {last_step}")
        assert changed.rowcount == 1
        connection.commit()
    found = nsys.read_export(path)
    assert found.activities == before.activities
    check = [[(p.name, p.step) for p in place(trace)] for trace in (before, found)]
    assert check[0] == check[1]


def test_the_host_s_time_is_counted_once(tmp_path: Path) -> None:
    """Bug: a range counts the ranges within it again, another thread's or another step's ranges
    count, or one that never ended lasts for years."""
    trace = nsys.read_export(exports.write_export(tmp_path / "a.sqlite"))
    found = report(trace)
    us = {"step": 9, "verify": 2, "verify.00": 2, "verify.L0.attn": 2, "verify.01": 23, "accept": 2}
    numbers = found.numbers()["host_by_name"]
    assert {name: row["host_us"] for name, row in numbers.items()} == us
    assert {row["num_ranges"] for row in numbers.values()} == {1}
    last = max(entry.start_ns for entry in trace.ranges if entry.name == "step")
    open_ended = [
        entry._replace(end_ns=NO_END) if entry.name == "step" and entry.start_ns == last else entry
        for entry in trace.ranges
    ]
    times = host_times(trace._replace(ranges=open_ended))
    assert times[3, "step"].ns == 32_000 - 31_000, "31 us in others, 32 to the last call's end"


def test_prefills_are_the_steps(tmp_path: Path) -> None:
    """Bug: prefills are found in a recording of steps alone, or the remedy is left out."""
    trace = nsys.read_export(exports.write_export(tmp_path / "a.sqlite"))
    with pytest.raises(ValueError, match=r'inside a "prefill" range.*--prefill'):
        report(trace, "prefill")
    renamed = [
        entry._replace(name="prefill") if entry.name == "step" else entry for entry in trace.ranges
    ]
    assert report(trace._replace(ranges=renamed), "prefill").walls_ns == report(trace).walls_ns


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 40), st.booleans()), min_size=2))
def test_busy_is_the_union_and_wall_is_the_sum(spans: list[tuple[int, int, bool]]) -> None:
    """Bug: time is lost or counted twice where activities overlap, or a kernel's own is cut."""
    work = [
        Activity("k", start, start + length, Launch(i, 10 * i + 1, 10 * i + 2, 0, graph))
        for i, (start, length, graph) in enumerate(spans)
    ]
    host = [HostRange("step", 0, 10 * len(spans), 0), HostRange("decode.00", 0, 10**6, 0)]
    assume(min(a.start_ns for a in work) < max(a.end_ns for a in work))
    found = report(Trace(work, host))
    covered = {t for a in work for t in range(a.start_ns, a.end_ns)}
    assert sum(found.busy_ns.values()) == len(covered)
    assert sum(found.walls_ns) == max(a.end_ns for a in work) - min(a.start_ns for a in work)
    assert found.kernels["k"].total_ns == sum(length for _, length, _ in spans)
    assert sum(found.busy_ns.values()) + sum(found.idle_ns.values()) == sum(found.walls_ns)
    assert sum(row.idle_ns + row.busy_ns for row in found.rows.values()) == sum(found.walls_ns)


def test_cutting_an_export_keeps_the_report_and_drops_the_machine(tmp_path: Path) -> None:
    """Bug: a stored export names the machine it was made on or other libraries' domains, or its
    steps differ from the run's; sums are those of the whole run, or bytes tell the time."""
    source = exports.write_export(tmp_path / "a.sqlite", num_steps=9)
    target = tmp_path / "nsys-cut.sqlite.gz"
    sums = shrink_nsys.shrink(source, target, 4)
    check_scenario(report(nsys.read_export(target)), 4)
    assert json.loads((tmp_path / "nsys-cut.json").read_text()) == sums
    assert sums["wall_mean_us"] == 100.0 and sums["num_steps"] == 3
    plain = gzip.decompress(target.read_bytes())
    assert b"secret-host" not in plain and b"cublas" not in plain
    assert target.read_bytes()[4:8] == bytes(4)  # gzip's field for the time of the making
    with pytest.raises(ValueError, match="9 steps"):
        shrink_nsys.shrink(source, target, 9)
    before = target.read_bytes()
    for steps in ("0", "-1", "9"):  # was: a traceback, with an empty export in the place of the old
        with pytest.raises(SystemExit) as refused:
            shrink_nsys.main([str(source), str(target), "--steps", steps])
        assert refused.value.code == 2
        assert target.read_bytes() == before


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.name)
def test_stored_exports_of_real_runs(path: Path) -> None:
    """Bug: the reader fits our hand-made exports but not what nsys writes."""
    assert path.stat().st_size < MAX_STORED_BYTES
    trace = nsys.read_export(path)
    found = report(trace)
    numbers = found.numbers()
    stored = json.loads(path.with_name(path.name.replace(".sqlite.gz", ".json")).read_text())
    assert {name: round(numbers[name], 4) for name in stored} == stored
    for wall in found.walls_ns:
        assert 0 < wall < 10**9
    placed = {p.name for p in place(trace)}
    chain = "verify" if any(name.startswith("verify") for name in placed) else "decode"
    assert any(name.split(".")[0] == chain for name in placed)
    assert all(name.startswith("host.") or names.is_name(name) for name in placed - {"outside"})
    # Every piece of work has a launch, and nearly all of the time a name.
    assert all(activity.launch is not None for activity in trace.activities)
    outside = found.rows.get("outside")
    assert outside is None or outside.busy_ns < 0.01 * sum(found.walls_ns)
    covered_ns, end_ns = 0, 0
    for activity in sorted(trace.activities, key=lambda a: a.start_ns):
        covered_ns += max(activity.end_ns - max(activity.start_ns, end_ns), 0)
        end_ns = max(end_ns, activity.end_ns)
    first = sum(p.activity.end_ns - p.activity.start_ns for p in place(trace) if p.step == 0)
    assert covered_ns - first <= sum(found.busy_ns.values()) <= covered_ns


def test_segment_bytes_add_up_to_the_benchmark(tmp_path: Path) -> None:
    """Bug: the floor per segment and the floor per step count different weights."""
    from graphengine.measure.bench import weight_bytes

    target, draft = read_configs(TINY_TARGET, TINY_DRAFT)

    class Config:
        dtype = "bfloat16"
        draft_quantization = "none"
        num_speculative_tokens = ()

    class FakeBuilt:
        config = Config()

        def __init__(self, drafter: Any) -> None:
            self.target, self.draft = target, drafter

    for drafter in (draft, None):
        found = segment_bytes(target, drafter, 2, 2)
        once = sum(count for name, count in found.items() if name not in names.CHAINS)
        assert once == weight_bytes(FakeBuilt(drafter), 1)  # type: ignore[arg-type]
    assert isinstance(draft, DraftConfig)
    assert segment_bytes(target, draft, 2, 2)["speculate"] == weight_bytes(FakeBuilt(draft), 1)  # type: ignore[arg-type]
    halved = segment_bytes(target, draft, 2, 1)
    assert halved["draft.context"] * 2 == segment_bytes(target, draft, 2, 2)["draft.context"]
    assert halved["verify.01"] == segment_bytes(target, draft, 2, 2)["verify.01"]
    named = set(halved) - set(names.CHAINS)
    dense = [*chain_names("verify", target.num_hidden_layers)]
    dense += chain_names("draft", draft.model.num_hidden_layers)
    dense = [name for name in dense if not name.endswith(".attn")]
    assert named == {*dense, names.DRAFT_CONTEXT}


def test_bandwidth_and_floor(tmp_path: Path) -> None:
    """Bug: GB/s off by a thousand, or by the number of steps."""
    found = report(nsys.read_export(exports.write_export(tmp_path / "a.sqlite")))
    row = found.numbers({"verify.00": 36e3}, read_gbps=8.0)["by_name"]["verify.00"]
    assert row["read_bytes"] == 36e3
    assert row["achieved_gbps"] == pytest.approx(4.0)  # 36 kB in 9 us
    assert row["floor_us"] == pytest.approx(4.5)
    groups = measure_report.grouped(
        {f"verify.{i:02d}": {"busy_us": 9.0, "idle_us": 1.0, "read_bytes": 36e3} for i in range(4)}
    )
    assert list(groups) == ["verify.00", "verify.01-02", "verify.03"]
    assert groups["verify.01-02"]["busy_us"] == 18.0
    assert groups["verify.01-02"]["achieved_gbps"] == pytest.approx(4.0)


def test_what_is_printed_adds_up(tmp_path: Path) -> None:
    """Bug: busy is told with idle's share, MB are MiB, a kernel is neither listed nor in the rest,
    or brackets in its name are taken for a style."""
    found = report(nsys.read_export(exports.write_export(tmp_path / "a.sqlite")))
    screen = io.StringIO()
    numbers = found.numbers({"verify.00": 36e6}, read_gbps=8000.0)
    kernels = numbers["kernels"]
    numbers["kernels"] = {k.replace("gemm<", "gemm[abi:v2]<"): v for k, v in kernels.items()}
    measure_report.print_report(Console(width=140, file=screen), "mine", numbers, 1)
    lines = [line.split() for line in screen.getvalue().splitlines()]
    head = next(line for line in lines if line[:1] == ["wall"])
    assert " ".join(head[5:]) == "busy 27.0 us (27.0 %) idle 73.0 us (73.0 %)"
    row = next(line for line in lines if line[:1] == ["verify.00"])
    assert row[-4:] == ["36.0", "4000", "4.5", "2.00"]
    name = "gemm[abi:v2]<int>"
    shown = [line for line in lines if line[-1:] == [name] or line[-1:] == ["more"]]
    assert [line[-2:] for line in shown] == [["7.00", name], ["4", "more"]]
    total = sum(kernel["total_us"] for kernel in numbers["kernels"].values())
    assert sum(float(line[0]) for line in shown) == pytest.approx(total)


def test_pictures_are_well_formed_and_repeatable(tmp_path: Path) -> None:
    """Bug: a kernel's `<` or `$` breaks the file; a picture changes though its numbers have not;
    what several bars have stands several times in the legend; or a panel lacks its mark."""
    found = report(nsys.read_export(exports.write_export(tmp_path / "a.sqlite")))
    text = measure_report.profile_picture({"node <&$>": found}, " $x$", ".svg")
    assert text == measure_report.profile_picture({"node <&$>": found}, " $x$", ".svg")
    ET.fromstring(text)
    assert b"67.5" in text and b"100.0 us" in text and text.count(b" $x$<") == 2
    both = measure_report.profile_picture({"graph": found, "node": found}, "", ".svg")
    assert text.count(b">idle host<") == both.count(b">idle host<") == 1
    panels = [
        pictures.histogram_panel(values, "step time <ms>", "ms")
        for values in ([], [3.0], [1.0, 2.0, 2.5, 9.0] * 50)
    ]
    panels.append(pictures.bars_panel({"none": {"busy": 2.0, "idle": 0.0}, "full": {}}, "t", "ms"))
    ET.fromstring(pictures.render(panels, ".svg"))


def test_a_timeline_has_room_for_all_of_its_spans() -> None:
    """Bug: the picture of a step ends where its last activity begins, and says so of the step."""
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    spans = [(0.0, 90.0, "dense"), (20.0, 30.0, "attention"), (40.0, 45.5, "dense")]
    pictures.timeline_panel(spans, "a step", "us").draw(axes)
    assert axes.get_xlim() == (0, 90) and axes.get_xlabel() == "us of 90.0"


@pytest.mark.parametrize(
    ("kernel", "shown"),
    [
        ("void gemm<(int)128, (unsigned int)4, (a::Mode)-1>(int *)", "gemm<128, 4, -1>"),
        (
            "static void at::(anonymous namespace)::cat<int>(int)",
            "at::(anonymous namespace)::cat<int>",
        ),
        ("(unnamed)", "(unnamed)"),
        ("a" * 97, "a" * 94 + ".."),
    ],
)
def test_names_of_kernels(kernel: str, shown: str) -> None:
    """Bug: what stands in a template or in an unnamed namespace is taken for the parameters, so
    that different kernels have one name."""
    assert measure_report.shorten(kernel) == shown


def test_a_missing_matplotlib_is_named_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Bug: minutes of measuring end in an ImportError that names no remedy."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"pip install graphengine\[plot\]"):
        pictures.check_picture("--plot", tmp_path / "a.png")
    pictures.check_picture("--plot", None)


def test_names_of_the_rule_are_recognised() -> None:
    """Bug: a name is added to the rule and traces without a domain lose its work."""
    found = [name for chain in names.CHAINS for name in chain_names(chain, 120)]
    found += [*names.HOST_PHASES, names.DRAFT_CONTEXT, names.PREFILL_CONTEXT, names.ACCEPT]
    found += [names.chunk_name(128), names.chunk_name(4096, is_paired=True)]
    assert all(names.is_name(name) for name in found)
    for other in ("verify.", "verify.1", "verify.L.attn", "aten::mm", "foo.00", ""):
        assert not names.is_name(other)
