"""The host's clock around named ranges: what is recorded, and that it ends."""

from __future__ import annotations

import pytest

from graphengine import names
from graphengine.profiles import host_trace


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
