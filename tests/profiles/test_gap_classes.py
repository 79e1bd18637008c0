"""profiles/launch_gaps.py: what a gap is called by what comes after it, and rows without time."""

import pytest

from graphengine.profiles.launch_gaps import report
from graphengine.profiles.trace import Activity, HostRange, Launch, Trace


@pytest.mark.parametrize(
    ("name", "kind"), [("decode.01", "dense"), ("decode.L1.attn", "attention"), ("accept", "host")]
)
def test_a_gap_between_eager_calls(name: str, kind: str) -> None:
    """Bug: what the device waits for the host's own copies is booked to dense steps, which no
    change of theirs would shorten."""
    host = [HostRange("step", 0, 20, 0), HostRange("decode.00", 1, 4, 0), HostRange(name, 5, 9, 0)]
    calls = [Launch(i, start, start + 1, 0, False) for i, start in enumerate((2, 6))]
    work = [Activity("first", 20, 30, calls[0]), Activity("second", 35, 40, calls[1])]
    found = report(Trace(work, host))
    assert {kind: ns for kind, ns in found.idle_ns.items() if ns} == {kind: 5}


def test_bytes_of_a_row_without_time_or_bandwidth() -> None:
    """Bug: a segment that ran beside another, or a device whose bandwidth nobody named, ends the
    report in a division by zero."""
    host = [HostRange("step", 0, 20, 0)]
    host += [HostRange(f"decode.0{i}", 5 * i + 1, 5 * i + 4, 0) for i in range(2)]
    calls = [Launch(i, 5 * i + 2, 5 * i + 3, 0, False) for i in range(2)]
    work = [Activity("long", 20, 1020, calls[0]), Activity("beside", 30, 40, calls[1])]
    found = report(Trace(work, host))
    rows = found.numbers({"decode.00": 2000.0, "decode.01": 5.0})["by_name"]
    assert rows["decode.00"]["achieved_gbps"] == 2.0
    assert "floor_us" not in rows["decode.00"]
    assert "achieved_gbps" not in rows["decode.01"]
