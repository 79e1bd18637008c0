"""torch.profiler as a source of the same report, for machines without nsys.

The named ranges arrive through `record_function`, so names equal those under nsys. Events are read
from the exported Chrome trace and not from torch's Python objects: the file's keys have not changed
over many versions, and a stored file can be read again.

It perturbs: every operator and every kernel inside a graph is recorded, so small kernels and the
host read slower than they are. Quote times from a run without a profiler.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from graphengine import names
from graphengine.profiles.trace import Activity, HostRange, Launch, Trace

_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_HOST_CALLS = ("cuda_runtime", "cuda_driver")


class RecordFunctionDomain:
    """Emits the named ranges as torch.profiler annotations; pass it to `names.enable`."""

    def __init__(self) -> None:
        self._open: list[Any] = []

    def get_event_attributes(self, message: str, color: str) -> str:
        """The name is all that torch.profiler takes."""
        return message

    def push_range(self, attributes: str) -> None:
        """Opens an annotation. Mutates: self."""
        from torch.profiler import record_function

        annotation = record_function(attributes)
        annotation.__enter__()
        self._open.append(annotation)

    def pop_range(self) -> None:
        """Closes the innermost annotation. Mutates: self."""
        self._open.pop().__exit__(None, None, None)


@contextmanager
def record(path: Path) -> Iterator[None]:
    """Profiles what runs inside, ranges on, and writes a Chrome trace to `path`."""
    from torch.profiler import ProfilerActivity, profile

    names.enable(RecordFunctionDomain())
    try:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            yield
    finally:
        names.disable()
    profiler.export_chrome_trace(str(path))


def read_chrome_trace(path: Path) -> Trace:
    """Reads a trace that torch.profiler exported, .json or .json.gz.

    Raises:
        ValueError: it is missing or no Chrome trace.
    """
    try:
        raw = path.read_bytes()
        parsed = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        raise ValueError(f"{path}: not a readable Chrome trace ({error})") from error
    events = parsed.get("traceEvents") if isinstance(parsed, dict) else parsed
    if not isinstance(events, list):
        raise ValueError(f"{path}: no traceEvents; pass a trace that torch.profiler exported")
    try:
        return _trace(events)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"{path}: an event is not as torch.profiler writes it ({error!r}); pass a trace that "
            "it exported"
        ) from error


def _trace(events: list[dict[str, Any]]) -> Trace:
    """The events that matter, in one form."""
    threads: dict[tuple[Any, Any], int] = {}
    launches: dict[int, Launch] = {}
    host_ranges: list[HostRange] = []
    device_work: list[dict[str, Any]] = []
    for event in events:
        kind, arguments = event.get("cat"), event.get("args", {})
        if event.get("ph") != "X":
            continue
        if kind in _DEVICE_WORK:
            device_work.append(event)
            continue
        start, end = _interval(event)
        thread = threads.setdefault((event.get("pid"), event.get("tid")), len(threads))
        if kind == "user_annotation" and names.is_name(event["name"]):
            host_ranges.append(HostRange(event["name"], start, end, thread))
        elif kind in _HOST_CALLS and "correlation" in arguments:
            known = launches.get(arguments["correlation"])
            if known is None or start < known.start_ns:
                is_graph = "GraphLaunch" in event["name"]
                launch = Launch(arguments["correlation"], start, end, thread, is_graph)
                launches[launch.correlation] = launch
    activities = [
        Activity(e["name"], *_interval(e), launches.get(e.get("args", {}).get("correlation")))
        for e in device_work
    ]
    return Trace(activities, host_ranges)


def _interval(event: dict[str, Any]) -> tuple[int, int]:
    """(start, end) in nanoseconds; the file counts in microseconds."""
    start = round(event["ts"] * 1000)
    return start, start + round(event.get("dur", 0) * 1000)
