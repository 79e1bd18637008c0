"""Nsight Systems: how it is run on ourselves, and its SQLite export read as a `Trace`.

Presets: `graph` traces a CUDA graph as one interval, at almost no cost: use it for wall, busy and
idle. `node` traces every kernel inside the graphs: use it for composition, not for times; small
kernels read 30-60 % slower (H200, nsys 2025).

The export has lazily created tables and columns that differ between versions, so a missing table
or an optional column is no error; a missing obligatory column is. Schema: NVIDIA's "SQLite Schema
Reference" of Nsight Systems. Times are integer nanoseconds of one clock for host and device.
"""

import gzip
import os
import shutil
import signal
import sqlite3
import subprocess
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Literal

from graphengine import names
from graphengine.profiles.trace import NO_END, Activity, HostRange, Launch, Trace

Preset = Literal["graph", "node"]
PRESETS: tuple[Preset, ...] = ("graph", "node")

PUSH_POP_RANGE, DOMAIN_CREATE = 59, 75  # NVTX_EVENTS.eventType

# table -> (obligatory columns, optional ones); what is read, and what a shrunk export keeps.
TABLES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "StringIds": (("id", "value"), ()),
    "NVTX_EVENTS": (("start", "eventType", "globalTid"), ("end", "text", "textId", "domainId")),
    "CUPTI_ACTIVITY_KIND_RUNTIME": (
        ("start", "end", "correlationId", "globalTid"),
        ("nameId",),
    ),
    "CUPTI_ACTIVITY_KIND_KERNEL": (
        ("start", "end", "correlationId"),
        ("globalPid", "demangledName", "shortName", "graphNodeId"),
    ),
    "CUPTI_ACTIVITY_KIND_MEMCPY": (
        ("start", "end", "correlationId"),
        ("globalPid", "copyKind", "graphNodeId"),
    ),
    "CUPTI_ACTIVITY_KIND_MEMSET": (
        ("start", "end", "correlationId"),
        ("globalPid", "graphNodeId"),
    ),
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": (("start", "end", "correlationId"), ("globalPid",)),
}
# Columns whose values are compared or computed with; those that may be NULL in spite of TABLES.
_INTEGERS = {"id", "start", "end", "eventType", "correlationId", "globalTid", "globalPid"}
_MAY_BE_NULL = {"correlationId", "globalTid"}
_COPY_KINDS = {1: "HtoD", 2: "DtoH", 8: "DtoD"}


def find_nsys() -> str | None:
    """The nsys on the PATH, if any."""
    return shutil.which("nsys")


def profile_command(nsys: str, preset: Preset, report: Path, command: Sequence[str]) -> list[str]:
    """nsys around a command that marks its own range with cudaProfilerStart / Stop.

    Args:
        report: the .nsys-rep to write.

    No CPU sampling and no context switches: they make a report of one second 2 GB large.
    """
    return [
        *(nsys, "profile", "--sample=none", "--cpuctxsw=none", "--trace=cuda,nvtx"),
        *(f"--cuda-graph-trace={preset}", "--capture-range=cudaProfilerApi"),
        *(
            "--capture-range-end=stop",
            "--force-overwrite=true",
            f"--output={report.with_suffix('')}",
        ),
        *command,
    ]


def export_command(nsys: str, report: Path, sqlite: Path) -> list[str]:
    """Turns a .nsys-rep into a .sqlite."""
    options = ["--type=sqlite", "--force-overwrite=true", f"--output={sqlite}"]
    return [nsys, "export", *options, str(report)]


def run(command: Sequence[str], timeout_s: float = 1800) -> None:
    """Runs one of the commands above. Where it is given up, so is all that it has started.

    Raises:
        RuntimeError: it failed, with the last lines of its output; or took too long.
    """
    name = f"{os.path.basename(command[0])} {command[1]}"
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except BaseException as error:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise RuntimeError(
                f"{name} took longer than {timeout_s:g} s; lower --num-steps, or run nsys by hand "
                "and pass its .sqlite to --read"
            ) from error
    if process.returncode:
        tail = "\n".join(output.splitlines()[-20:])
        raise RuntimeError(f"{name} exited with {process.returncode}:\n{tail}")


def open_export(path: Path) -> sqlite3.Connection:
    """Opens a .sqlite or .sqlite.gz export read-only.

    Raises:
        ValueError: it is missing or no SQLite database.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file; pass a .nsys-rep or .sqlite that exists")
    try:
        if path.suffix == ".gz":
            connection = sqlite3.connect(":memory:")
            content = gzip.decompress(path.read_bytes())
            if not content:
                raise EOFError("it is empty")
            connection.deserialize(content)
        else:
            connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
        connection.execute("SELECT name FROM sqlite_master").fetchall()
    except (sqlite3.DatabaseError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(
            f"{path}: no SQLite database ({error}); make one with nsys export --type sqlite"
        ) from error
    return connection


def read_export(path: Path) -> Trace:
    """Reads an export: graphengine's ranges, and every device activity with its launch.

    Ranges of other NVTX domains (the CUDA libraries have some) are left out.

    Raises:
        ValueError: no SQLite database, or none that nsys wrote.
    """
    with closing(open_export(path)) as connection:
        try:
            texts = _rows(connection, "StringIds", path)
            strings: dict[Any, str] = {key: text for key, text in texts if isinstance(text, str)}
            launches = _launches(connection, strings, path)
            return Trace(
                activities=list(_activities(connection, strings, launches, path)),
                ranges=list(_host_ranges(connection, strings, path)),
            )
        except sqlite3.DatabaseError as error:  # cut off, or overwritten in the middle
            raise ValueError(
                f"{path}: damaged ({error}); export it again with nsys export --type sqlite"
            ) from error


def _rows(connection: sqlite3.Connection, table: str, path: Path) -> Iterator[tuple[Any, ...]]:
    """A table's rows with the columns of TABLES; NULL for a missing optional one."""
    present = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
    if not present:
        return
    needed, optional = TABLES[table]
    missing = [name for name in needed if name not in present]
    if missing:
        raise ValueError(
            f"{path}: table {table} lacks {', '.join(missing)}; export it again with nsys export "
            "--type sqlite"
        )
    columns = [f'"{name}"' for name in needed]
    columns += [f'"{name}"' if name in present else "NULL" for name in optional]
    checked = [
        (index, name, name in optional or name in _MAY_BE_NULL)
        for index, name in enumerate([*needed, *optional])
        if name in _INTEGERS
    ]
    for row in connection.execute(f"SELECT {', '.join(columns)} FROM {table}"):
        for index, name, may_be_null in checked:
            value = row[index]
            if not isinstance(value, int) and not (value is None and may_be_null):
                raise ValueError(
                    f"{path}: table {table} has {value!r} for {name}; pass an export that nsys "
                    "wrote, and no other program has changed"
                )
        yield row


def _process(global_id: int | None) -> int:
    """Process part of a globalTid or globalPid: all but the lowest 24 bits, the thread."""
    return (global_id or 0) >> 24


def _launches(
    connection: sqlite3.Connection, strings: dict[Any, str], path: Path
) -> dict[tuple[int, int], Launch]:
    """(process, correlation) -> the host call. Of nested calls with one id, the outermost."""
    found: dict[tuple[int, int], Launch] = {}
    for start, end, correlation, thread, name in _rows(
        connection, "CUPTI_ACTIVITY_KIND_RUNTIME", path
    ):
        key = (_process(thread), correlation)
        known = found.get(key)
        if known is None or start < known.start_ns:
            is_graph = "GraphLaunch" in strings.get(name, "")
            found[key] = Launch(correlation, start, end, thread, is_graph)
    return found


def _host_ranges(
    connection: sqlite3.Connection, strings: dict[Any, str], path: Path
) -> Iterator[HostRange]:
    events = list(_rows(connection, "NVTX_EVENTS", path))

    def text_of(text: str | None, text_id: int | None) -> str:
        return text if text is not None else strings.get(text_id, "")

    domains = {
        (_process(thread), domain)
        for _, kind, thread, _, text, text_id, domain in events
        if kind == DOMAIN_CREATE and text_of(text, text_id) == names.DOMAIN
    }
    for start, kind, thread, end, text, text_id, domain in events:
        if kind != PUSH_POP_RANGE:
            continue
        name = text_of(text, text_id)
        # A capture range that began late may lack the row that names the domain.
        is_ours = (_process(thread), domain) in domains if domains else names.is_name(name)
        if is_ours:
            yield HostRange(name, start, end if end is not None else NO_END, thread)


def _activities(
    connection: sqlite3.Connection,
    strings: dict[Any, str],
    launches: dict[tuple[int, int], Launch],
    path: Path,
) -> Iterator[Activity]:
    only = next(iter(launches), (0, 0))[0]  # versions without globalPid traced one process

    def launch_of(pid: int | None, correlation: int, node: int | None) -> Launch | None:
        launch = launches.get((_process(pid) if pid is not None else only, correlation))
        return launch._replace(is_graph=True) if launch and node else launch

    for start, end, correlation, pid, name, short, node in _rows(
        connection, "CUPTI_ACTIVITY_KIND_KERNEL", path
    ):
        kernel = strings.get(name) or strings.get(short) or "kernel"
        yield Activity(kernel, start, end, launch_of(pid, correlation, node))
    for start, end, correlation, pid, kind, node in _rows(
        connection, "CUPTI_ACTIVITY_KIND_MEMCPY", path
    ):
        name = f"memcpy {_COPY_KINDS.get(kind, '')}".strip()
        yield Activity(name, start, end, launch_of(pid, correlation, node))
    for start, end, correlation, pid, node in _rows(connection, "CUPTI_ACTIVITY_KIND_MEMSET", path):
        yield Activity("memset", start, end, launch_of(pid, correlation, node))
    for start, end, correlation, pid in _rows(connection, "CUPTI_ACTIVITY_KIND_GRAPH_TRACE", path):
        if end > 0:  # 0: CUPTI could not take the time
            yield Activity("graph", start, end, launch_of(pid, correlation, 1), True)
