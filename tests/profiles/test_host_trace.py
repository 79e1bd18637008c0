"""The host's clock around named ranges: what is recorded, and that it ends."""

from __future__ import annotations

import pytest

from graphengine import names
from graphengine.profiles import host_trace
from graphengine.profiles.trace import place


def test_ranges_end_with_a_recording_that_fails() -> None:
    """Bug: behind a profile that failed all later steps of the process are recorded, for ever."""
    recorder = host_trace.HostRecorder()
    try:
        with pytest.raises(RuntimeError), host_trace.record(recorder), names.range_("step"):
            raise RuntimeError("out of memory")
        assert not names.is_enabled()
        with names.range_("verify.00"):
            pass
        assert [entry.name for entry in recorder.trace().ranges] == ["step"]
    finally:
        names.disable()


def test_each_step_of_a_chain_is_work_of_its_name() -> None:
    """Bug: attention's time on the CPU is taken for the host's, or a step's work is booked to what
    lies around it."""
    recorder = host_trace.HostRecorder()
    with host_trace.record(recorder), names.range_("step"), names.range_("verify"):
        for name in ("verify.00", "verify.L0.attn"):
            with names.range_(name):
                pass
    placed = [(p.name, p.busy_class, p.step) for p in place(recorder.trace())]
    assert placed == [("verify.00", "dense", 0), ("verify.L0.attn", "attention", 0)]
