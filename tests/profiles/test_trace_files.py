"""Files of nsys and torch.profiler that lack something, are damaged or hold no trace."""

import gzip
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from graphengine import names
from graphengine.profiles import nsys, torch_trace, trace
from graphengine.profiles.launch_gaps import report
from tests.support import nsys_exports as exports


def test_an_export_lacks_tables_and_columns(tmp_path: Path) -> None:
    """Bug: a version of nsys without copies, node ids or globalPid stops the reader."""
    path = exports.write_export(tmp_path / "a.sqlite")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TABLE CUPTI_ACTIVITY_KIND_MEMCPY")
        for column in ("graphNodeId", "globalPid", "demangledName"):
            connection.execute(f'ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL DROP COLUMN "{column}"')
        connection.commit()
    numbers = report(nsys.read_export(path)).numbers()
    assert numbers["busy_mean_us"] == 26.0
    assert set(numbers["kernels"]) == {"gemm", "norm", "BatchPrefill", "MergeStates"}


def test_an_export_without_the_calls_names(tmp_path: Path) -> None:
    """Bug: where only nodes tell what is a graph's, its kernels, copies or fills count as launched
    one by one, and no gap beside them is a seam."""
    path = exports.write_export(tmp_path / "a.sqlite")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("ALTER TABLE CUPTI_ACTIVITY_KIND_RUNTIME DROP COLUMN nameId")
        connection.execute("ALTER TABLE CUPTI_ACTIVITY_KIND_MEMCPY ADD COLUMN graphNodeId")
        connection.execute("UPDATE CUPTI_ACTIVITY_KIND_MEMCPY SET graphNodeId = 1")
        connection.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET AS SELECT * FROM CUPTI_ACTIVITY_KIND_MEMCPY"
        )
        connection.commit()
    work = nsys.read_export(path).activities
    of_graphs = [a.name for a in work if a.launch and a.launch.is_graph]
    kinds = {name.removeprefix("void ").partition("<")[0] for name in of_graphs}
    assert kinds == {"gemm", "norm", "memcpy DtoH", "memset"}


def test_a_library_s_ranges_are_not_ours(tmp_path: Path) -> None:
    """Bug: another library's range that is called like a phase of ours, or like our domain, splits
    the host's time."""
    path = exports.write_export(tmp_path / "a.sqlite")
    ours = nsys.read_export(path).ranges
    with closing(sqlite3.connect(path)) as connection:
        connection.executemany(
            "INSERT INTO NVTX_EVENTS VALUES (1002000, 1003000, 59, ?, NULL, ?, ?)",
            [(name, exports.THREAD, exports.DOMAIN_ID + 1) for name in ("plan", names.DOMAIN)],
        )
        connection.commit()
    assert nsys.read_export(path).ranges == ours


def test_each_process_has_its_own_calls(tmp_path: Path) -> None:
    """Bug: a second process counts its calls from 1 as well, and its work is another's."""
    path, other = exports.write_export(tmp_path / "a.sqlite"), 1 << 24
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(
            "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME SELECT start, end, correlationId, "
            f"globalTid + {other}, nameId FROM CUPTI_ACTIVITY_KIND_RUNTIME"
        )
        connection.execute(f"UPDATE CUPTI_ACTIVITY_KIND_MEMCPY SET globalPid = globalPid + {other}")
        connection.commit()
    work = nsys.read_export(path).activities
    threads = {(a.name == "memcpy DtoH", a.launch.thread) for a in work if a.launch}
    assert threads == {(False, exports.THREAD), (True, exports.THREAD + other)}


def test_an_obligatory_column_is_missing(tmp_path: Path) -> None:
    """Bug: an unknown layout is read as a trace without launches, and all time is "outside"."""
    path = exports.write_export(tmp_path / "a.sqlite")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute('ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL DROP COLUMN "correlationId"')
        connection.commit()
    with pytest.raises(ValueError, match=r"CUPTI_ACTIVITY_KIND_KERNEL lacks correlationId"):
        nsys.read_export(path)


@pytest.mark.parametrize("content", [None, b"not a database, only some text" * 10])
def test_no_database(tmp_path: Path, content: bytes | None) -> None:
    """Bug: sqlite makes an empty file of a mistyped name, or a traceback of a wrong one."""
    path = tmp_path / "a.sqlite"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.sqlite"):
        nsys.read_export(path)
    assert path.exists() == (content is not None)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 'soon'",
        "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET end = NULL",
        "UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET globalTid = 'main'",
        "UPDATE NVTX_EVENTS SET end = 'never' WHERE end IS NOT NULL",
        "UPDATE StringIds SET value = CAST(x'ff41' AS TEXT)",
        "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 7, end = 7",
    ],
)
def test_an_export_with_foreign_values_is_refused(tmp_path: Path, statement: str) -> None:
    """Bug: a file that another program wrote or changed ends in a traceback from deep inside."""
    path = exports.write_export(tmp_path / "a.sqlite")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(statement)
        if "start = 7" in statement:
            connection.execute("DELETE FROM CUPTI_ACTIVITY_KIND_MEMCPY")
        connection.commit()
    with pytest.raises(ValueError, match=r"a\.sqlite: |no time at all"):
        report(nsys.read_export(path))


def test_a_foreign_value_is_shown(tmp_path: Path) -> None:
    """Bug: the refusal shows another column's value than the one that is none of nsys's."""
    path = exports.write_export(tmp_path / "a.sqlite")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET end = 'late'")
        connection.commit()
    told = r"a\.sqlite: table CUPTI_ACTIVITY_KIND_KERNEL has 'late' for end; pass an export"
    with pytest.raises(ValueError, match=told):
        nsys.read_export(path)


@pytest.mark.parametrize("kind", ["empty", "flipped", "cut"])
def test_a_damaged_export_is_refused(tmp_path: Path, kind: str) -> None:
    """Bug: a download that broke off ends in zlib's traceback, or, unpacked to nothing, in "out of
    memory"."""
    content = exports.write_export(tmp_path / "good.sqlite", num_steps=40).read_bytes()
    packed, path = gzip.compress(content), tmp_path / "a.sqlite.gz"
    if kind == "empty":
        path.write_bytes(gzip.compress(b""))
    elif kind == "flipped":
        path.write_bytes(packed[:10] + b"\xff" * 64 + packed[74:])
    else:  # its first page and with it all of the schema is there
        path = tmp_path / "a.sqlite"
        path.write_bytes(content[:8192] + b"\xff" * (len(content) - 8192))
    with pytest.raises(ValueError, match=r"a\.sqlite"):
        nsys.read_export(path)


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2]",
        "[" * 100_000,
        '[{"ph": "X", "cat": "kernel", "ts": 1}]',
        '[{"ph": "X", "cat": "kernel", "name": "k"}]',
        '[{"ph": "X", "cat": "kernel", "name": "k", "ts": NaN}]',
        '[{"ph": "X", "cat": "kernel", "name": "k", "ts": Infinity}]',
        '[{"ph": "X", "cat": "cuda_runtime", "name": "k", "ts": 1, "args": null}]',
    ],
)
def test_json_that_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    """Bug: some other program's JSON ends in a traceback."""
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"a\.json"):
        torch_trace.read_chrome_trace(path)
    damaged = bytearray(gzip.compress(b"[" + b"1, 2, " * 1000 + b"3]"))
    damaged[10:30] = b"\xff" * 20
    packed = tmp_path / "a.json.gz"
    packed.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"a\.json\.gz"):
        torch_trace.read_chrome_trace(packed)


@pytest.mark.parametrize(
    ("process", "thread", "place"),
    [(1, 1, (0, "host.step")), (1, 2, (None, "outside")), (2, 1, (None, "outside"))],
)
def test_threads_are_told_apart(
    tmp_path: Path, process: int, thread: int, place: tuple[int | None, str]
) -> None:
    """Bug: what another thread or process launches while a step runs is told as of that step."""
    path, at = tmp_path / "a.json", {"pid": process, "tid": thread}
    calls = [
        {"cat": "user_annotation", "name": "step", "pid": 1, "tid": 1, "ts": 0, "dur": 100},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 9, "dur": 1} | at,
        {"cat": "kernel", "name": "k", "ts": 20, "dur": 5},
    ]
    path.write_text(json.dumps([{"ph": "X", "args": {"correlation": 7}} | call for call in calls]))
    (found,) = trace.place(torch_trace.read_chrome_trace(path))
    assert (found.step, found.name) == place
