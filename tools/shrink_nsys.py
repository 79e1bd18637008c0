"""Cuts an nsys SQLite export down to a few decode steps, small enough to be stored as a test.

    nsys export --type sqlite --output step.sqlite step.nsys-rep
    python tools/shrink_nsys.py step.sqlite tests/data/nsys-8b-piecewise-graph.sqlite.gz --steps 5

Only the tables and columns that `graphengine profile` reads are kept, only graphengine's ranges,
and only what steps of the middle of the trace launched: nothing about the machine or its files.
Next to the output lies a .json with the report's sums, which profiles/test_launch_gaps.py among the
tests holds the reader to. The last line of stdout is that object.
"""

import gzip
import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from result_file import parser_of

from graphengine import names
from graphengine.profiles.launch_gaps import report
from graphengine.profiles.nsys import DOMAIN_CREATE, TABLES, open_export, read_export

_STRING_COLUMNS = ("textId", "nameId", "demangledName", "shortName")
Rows = list[dict[str, Any]]


def read_table(connection: sqlite3.Connection, table: str) -> tuple[list[str], Rows]:
    """Those columns of TABLES that the export has, and its rows."""
    present = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
    columns = [name for group in TABLES[table] for name in group if name in present]
    if not columns:
        return [], []
    quoted = ", ".join(f'"{name}"' for name in columns)
    rows = connection.execute(f"SELECT {quoted} FROM {table}")
    return columns, [dict(zip(columns, row, strict=True)) for row in rows]


def shrink(source: Path, target: Path, num_steps: int) -> dict[str, float]:
    """Writes the cut export and its sums; returns the sums.

    Raises:
        ValueError: the export has fewer than num_steps + 1 steps.
    """
    trace = read_export(source)
    steps = sorted((r.start_ns, r.end_ns) for r in trace.ranges if r.name == names.STEP)
    if len(steps) <= num_steps:
        raise ValueError(f"{source}: {len(steps)} steps; ask for fewer than that")
    first = (len(steps) - num_steps) // 2
    begin_ns, end_ns = steps[first][0], steps[first + num_steps][0]
    ours = {(r.start_ns, r.name) for r in trace.ranges}
    with closing(open_export(source)) as connection:
        tables = {table: read_table(connection, table) for table in TABLES}
    strings = {row["id"]: row["value"] for row in tables["StringIds"][1]}
    launched = {
        row["correlationId"]
        for row in tables["CUPTI_ACTIVITY_KIND_RUNTIME"][1]
        if begin_ns <= row["start"] < end_ns
    }
    # The device's work that those calls launched; calls that launched none are left out.
    worked = launched & {
        row["correlationId"]
        for table, (_, rows) in tables.items()
        if table.startswith("CUPTI") and not table.endswith("RUNTIME")
        for row in rows
    }

    def is_kept(table: str, row: dict[str, Any]) -> bool:
        if table == "NVTX_EVENTS":
            text = row.get("text")
            name = text if text is not None else strings.get(row.get("textId"), "")
            if row["eventType"] == DOMAIN_CREATE:
                return name == names.DOMAIN
            return (row["start"], name) in ours and begin_ns <= row["start"] < end_ns
        if table.endswith("RUNTIME") and not begin_ns <= row["start"] < end_ns:
            return False
        return row["correlationId"] in worked

    kept = {
        table: (columns, [row for row in rows if is_kept(table, row)])
        for table, (columns, rows) in tables.items()
        if table != "StringIds"
    }
    used = {row.get(c) for _, rows in kept.values() for row in rows for c in _STRING_COLUMNS}
    columns, rows = tables["StringIds"]
    kept["StringIds"] = (columns, [row for row in rows if row["id"] in used])
    write(target, kept)
    numbers = report(read_export(target)).numbers()
    told = ("num_steps", "wall_mean_us", "busy_mean_us", "idle_mean_us")
    sums = {name: round(numbers[name], 4) for name in told}
    target.with_name(target.name.removesuffix(".sqlite.gz") + ".json").write_text(
        json.dumps(sums) + "\n"
    )
    return sums


def write(target: Path, tables: dict[str, tuple[list[str], Rows]]) -> None:
    """Writes tables as a gzipped SQLite file, the same bytes for the same rows."""
    with closing(sqlite3.connect(":memory:")) as connection:
        for table, (columns, rows) in tables.items():
            if columns:
                quoted = ", ".join(f'"{name}"' for name in columns)
                connection.execute(f"CREATE TABLE {table} ({quoted})")
                connection.executemany(
                    f"INSERT INTO {table} VALUES ({', '.join('?' * len(columns))})",
                    [tuple(row[name] for name in columns) for row in rows],
                )
        connection.commit()
        target.write_bytes(gzip.compress(connection.serialize(), mtime=0))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("source", type=Path, help=".sqlite of nsys export")
    parser.add_argument("target", type=Path, help=".sqlite.gz to write")
    parser.add_argument("--steps", type=int, default=5, help="steps to keep (default: 5)")
    options = parser.parse_args(arguments)
    if not options.target.name.endswith(".sqlite.gz"):
        parser.error(f"{options.target}: name the output *.sqlite.gz")
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: keep at least 1")
    try:
        sums = shrink(options.source, options.target, options.steps)
    except ValueError as error:
        parser.error(str(error))
    print(f"{options.target}: {options.target.stat().st_size} bytes")
    print(json.dumps(sums))


if __name__ == "__main__":
    main()
