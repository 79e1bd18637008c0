"""`graphengine profile`: real runs on the CPU, refusals, and nsys as a stand-in program that
records how it is called. With a GPU also torch.profiler.
"""

import json
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from graphengine import TINY_DRAFT, TINY_TARGET, Engine, names
from graphengine.cli import profile as cli_profile
from graphengine.config.declaration import declarations
from graphengine.config.options import Options
from graphengine.measure import profile_run
from graphengine.measure.profiled_steps import Workload, cuda_profiler_range, run_steps
from graphengine.profiles import nsys, torch_trace
from graphengine.profiles.result_schema import validate
from tests.support import checkpoints
from tests.support import nsys_exports as exports
from tests.support.chains import chain_names
from tests.support.command_line import document, invoke


def test_facts_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: where the disk of --keep is full, the report of all steps is lost with the last file."""
    monkeypatch.setattr(profile_run, "_record", lambda *_: {"read_gbps": 1.0})
    monkeypatch.setattr(profile_run, "report", lambda *_: None)
    options = {"device": "cpu", "tool": "auto", "read_gbps": None}
    notes: list[str] = []
    run = profile_run.run(None, None, options, tmp_path / "gone", notes.append)
    assert run == ({"cpu": None}, {"read_gbps": 1.0})
    assert "facts.json cannot be written" in notes[0]


@pytest.mark.parametrize("module", ["profile", "graphs"])
def test_help_does_not_import_torch(module: str) -> None:
    """Bug: an import at module level makes every command's help take seconds."""
    code = f"import sys, graphengine.cli.{module}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_profile_on_the_cpu(tmp_path: Path) -> None:
    """Bug: without a GPU the command fails, loses a step of a chain, leaves the ranges on, or
    prints milliseconds as microseconds; or --keep has no trace, and nobody is told why."""
    svg, stored, kept = tmp_path / "a.svg", tmp_path / "a.json", tmp_path / "kept"
    result = invoke(
        *("profile", "--device", "cpu", "--num-steps", 4, "--warmup", 2, "--json", "--plot", svg),
        *("--output-json", stored, "--keep", kept, "--read-gbps", 10),
    )
    numbers = document(result)["numbers"]
    found = numbers["cpu"]
    assert not names.is_enabled()
    expected = [*chain_names("verify", 8), *chain_names("draft", 3)]
    assert set(found["by_name"]) == {*expected, "accept", "draft.context"}
    assert found["num_steps"] == 4
    assert found["busy_mean_us"] + found["idle_mean_us"] == pytest.approx(found["wall_mean_us"])
    assert found["idle_by_class"]["host_us"] == pytest.approx(found["idle_mean_us"])
    assert found["by_name"]["verify.01"]["num_activities"] == 1
    assert found["by_name"]["verify.01"]["floor_us"] > 0
    assert 0 < numbers["unprofiled"]["host_p50_ms"] <= numbers["unprofiled"]["step_p50_ms"] * 1.5
    ET.fromstring(svg.read_text())
    assert validate(json.loads(stored.read_text())) == []
    assert json.loads((kept / "facts.json").read_text())["workload"]["num_steps"] == 4
    assert "--keep gets facts.json alone" in result.stderr
    assert "the host's clock" in result.stderr and "verify.01-07" in result.stderr
    step_us, host_us = (numbers["unprofiled"][f"{of}_p50_ms"] * 1e3 for of in ("step", "host"))
    told = f"without a profiler: {step_us:.1f} us each (host busy {host_us:.1f} us)"
    assert told in result.stderr


def test_profile_without_a_drafter(tmp_path: Path) -> None:
    """Bug: the drafter's steps are expected where there is none, or tokens a step are those of all
    requests."""
    target = checkpoints.make_target(tmp_path / "target")
    result = invoke(
        *("profile", target, "--draft", "none", "--device", "cpu", "--bucket", 2),
        *("--num-steps", 3, "--warmup", 1, "--input-len", 5, "--json"),
    )
    numbers = document(result)["numbers"]
    assert set(numbers["cpu"]["by_name"]) == {*chain_names("decode", 2), "accept"}
    assert numbers["unprofiled"]["mean_acceptance_length"] == 1.0


def test_prefills_on_the_cpu(tmp_path: Path) -> None:
    """Bug: a chunk or a segment of a prefill has no row, the calls that warm are in the report, or
    a kept file is read as decode steps."""
    result = invoke(
        *("profile", "--prefill", "--device", "cpu", "--num-steps", 3, "--warmup", 2, "--json"),
        *("--input-len", 20, "--bucket", 2, "--keep", tmp_path, "--read-gbps", 10),
    )
    found = document(result)
    numbers = found["numbers"]["cpu"]
    assert not names.is_enabled()
    segments = {*chain_names("prefill", 8), names.PREFILL_CONTEXT}
    assert set(numbers["by_name"]) == segments
    assert numbers["num_steps"] == 3
    assert numbers["by_name"]["prefill.01"]["num_activities"] == 1
    assert numbers["busy_mean_us"] + numbers["idle_mean_us"] == pytest.approx(
        numbers["wall_mean_us"]
    )
    host = numbers["host_by_name"]
    assert set(host) >= {*segments, "prefill", "prefill.T40"}
    for name in segments:
        assert host[name]["host_us"] == pytest.approx(numbers["by_name"][name]["busy_us"])
    assert host["prefill.T40"]["num_ranges"] == 1 and host["prefill.T40"]["host_us"] > 0
    unprofiled = found["numbers"]["unprofiled"]
    assert 0 < unprofiled["host_p50_ms"] < unprofiled["step_p50_ms"]
    assert "mean_acceptance_length" not in unprofiled
    assert found["config"]["prefill"] is True and found["config"]["num_chunks"] == 1
    assert "each step is a prefill" in result.stderr and "prefill.01-07" in result.stderr
    assert json.loads((tmp_path / "facts.json").read_text())["prefill"] is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--read", "missing.sqlite"], "no such file"),
        (["--read", "missing.json"], "not a readable Chrome trace"),
        (["--read", "empty.nsys-rep"], "nsys export --type sqlite"),
        (["--read", "text.sqlite"], "no SQLite database"),
        (["--read", "empty.json"], "no device activity"),
        (["--read", "text.sqlite", "--num-steps", "30"], "--num-steps is of a run"),
        (["--read", "text.sqlite", "--bucket", "8"], "--bucket beside --read is for the bytes"),
        (["--prefill", "--device", "cpu", "--input-len", "9999"], "of 4080; pass less"),
        (["--read", "text.sqlite", "--plot", "missing/a.svg"], "--plot missing/a.svg: cannot be"),
        (["--read", "text.sqlite", "--plot", "."], "is a directory"),
        (["--read", "text.sqlite", "--output-json", "./text.sqlite"], "would replace what --read"),
        (["--read", "a.svg", "--plot", "a.svg"], "--plot a.svg: would replace what --read"),
        (["--keep", "text.sqlite/x"], "--keep text.sqlite/x: cannot be made"),
        (["--read-gbps", "nan"], "nan: pass a finite number"),
        (["--read-gbps", "inf"], "inf: pass a finite number"),
        (["--tool", "nsys", "--device", "cpu"], "--tool nsys records a GPU and torch sees none"),
        (["--num-steps", "100000", "--device", "cpu"], "lower --num-steps"),
        (["no-such-model"], "no such model directory"),
        (["--inside", "facts.json", "--device", "cpu"], "--inside is for the child that nsys"),
    ],
)
def test_refusals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    """Bug: a traceback, or a refusal that does not say what to do, or of which option."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    Path("empty.nsys-rep").touch()
    Path("text.sqlite").write_text("no database" * 100)
    Path("empty.json").write_text('{"traceEvents": []}')
    result = invoke("profile", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


# A stand-in for nsys: keeps its arguments, and "exports" the scenario of nsys_exports.py.
FAKE_NSYS = """\
#!{python}
import json, pathlib, shutil, sys
here = pathlib.Path(__file__).parent
with open(here / "calls.jsonl", "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
options = dict(a.split("=", 1) for a in sys.argv[2:] if a.startswith("--") and "=" in a)
if (here / "fail").exists():
    print("progress\\n" * 20 + "the capture range never began")
    sys.exit(3)
if sys.argv[1] == "profile":
    pathlib.Path(options["--output"]).touch()
    inside = sys.argv[sys.argv.index("--inside") + 1]
    preset = options["--cuda-graph-trace"]
    facts = {facts} | dict(preset=preset, profiled_step_ms=0.1 * len(preset))
    pathlib.Path(inside).write_text(json.dumps(facts))
else:
    preset = pathlib.Path(sys.argv[-1]).stem
    shutil.copy(here / f"{{preset}}-scenario.sqlite", options["--output"])
"""


@pytest.fixture
def fake_nsys(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    for preset in ("graph", "node"):
        exports.write_export(folder / f"{preset}-scenario.sqlite", preset=preset)
    facts = {"read_gbps": 5.0, "segment_bytes": {"verify.00": 9e3}}
    program = folder / "nsys"
    program.write_text(FAKE_NSYS.format(python=sys.executable, facts=facts))
    program.chmod(0o755)
    return program


def options_of(*arguments: str) -> dict[str, Any]:
    return cli_profile.profile.make_context("profile", list(arguments)).params


def test_nsys_runs_this_command_once_per_preset(fake_nsys: Path, tmp_path: Path) -> None:
    """Bug: the child under nsys gets other options than were typed, nsys samples the CPU, or times
    are of the run that recorded every kernel, or one run's stand for the other's."""
    typed = ["--bucket", "4", "--num-steps", "7", "--graph-mode", "full", "--no-compile"]
    typed += ["--attention-backend", "triton", "--simulate-acceptance", "3.5", "--seed", "3"]
    typed += ["--num-speculative-tokens", "7", "--prefill"]
    options = options_of("m", *typed)
    reports, facts = profile_run._under_nsys(
        str(fake_nsys), ("graph", "node"), "m", None, options, tmp_path, lambda text: None
    )
    assert [found.num_steps for found in reports.values()] == [3, 3]
    assert facts["segment_bytes"] == {"verify.00": 9e3} and facts["preset"] == "graph"
    assert (facts["graph_profiled_step_ms"], facts["node_profiled_step_ms"]) == (0.5, 0.4)
    calls = [json.loads(line) for line in (fake_nsys.parent / "calls.jsonl").open()]
    assert [call[0] for call in calls] == ["profile", "export"] * 2
    for preset, call in zip(("graph", "node"), calls[::2], strict=True):
        assert {
            *("--sample=none", "--cpuctxsw=none", "--trace=cuda,nvtx"),
            *("--capture-range=cudaProfilerApi", f"--cuda-graph-trace={preset}"),
        } <= set(call)
        start = call.index(sys.executable)
        assert call[start : start + 4] == [sys.executable, "-m", "graphengine", "profile"]
        child = options_of(*call[start + 4 :])
        assert child["inside"] == tmp_path / f"{preset}-facts.json"
        assert child["draft"] == "none" and child["model"] == "m"
        same = [
            *("prefill", *profile_run.Workload._fields),
            *(name for name in declarations(Options) if name in child),
        ]
        assert {name: child[name] for name in same} == {name: options[name] for name in same}
    # Measured once.
    assert options_of(*calls[2][calls[2].index("m") :])["read_gbps"] == 5.0


def test_each_run_under_nsys_is_told(fake_nsys: Path, tmp_path: Path) -> None:
    """Bug: minutes of two runs pass under the same line, which names no run."""
    told: list[str] = []
    profile_run._under_nsys(
        str(fake_nsys), ("graph", "node"), "m", None, options_of("m"), tmp_path, told.append
    )
    assert told == ["running under nsys, preset graph", "running under nsys, preset node"]


def test_steps_that_the_context_ends() -> None:
    """Bug: medians of no steps are a traceback, where drafts are accepted more often than never; or
    a context that just holds all steps is refused."""
    options: dict[str, Any] = {"max_model_len": 64, "simulate_acceptance": 4.0}
    workload = Workload(bucket=1, input_len=9, num_steps=15, warmup=2, seed=0)  # 36 of 55 tokens
    with (
        Engine.from_pretrained(TINY_TARGET, TINY_DRAFT, buckets=(1,), **options) as engine,
        pytest.raises(ValueError, match="context of 64 tokens is full before"),
    ):
        run_steps(engine, workload, nullcontext())
    just = workload.input_len + workload.output_len(1)
    with Engine.from_pretrained(TINY_TARGET, buckets=(1,), max_model_len=just) as engine:
        assert run_steps(engine, workload, nullcontext())["mean_acceptance_length"] == 1


def test_steps_that_a_profiler_ends_leave_nothing() -> None:
    """Bug: where the profiler cannot start, the requests keep their rows and pages, and the next
    steps of this engine are refused as if its pool were too small."""

    @contextmanager
    def fails() -> Iterator[None]:
        raise RuntimeError("no profiler")
        yield

    workload = Workload(bucket=2, input_len=9, num_steps=2, warmup=1, seed=0)
    with Engine.from_pretrained(TINY_TARGET, buckets=(2,), max_model_len=64) as engine:
        with pytest.raises(RuntimeError, match="no profiler"):
            run_steps(engine, workload, fails())
        assert not engine.built.loop.has_work
        found = run_steps(engine, workload, nullcontext())
    assert found["mean_acceptance_length"] == 1.0


@pytest.mark.parametrize("is_kept", [True, False])
def test_recorded_files_stay_where_they_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_kept: bool
) -> None:
    """Bug: every profile leaves its recorded files, of hundreds of megabytes, in the temporary
    folder; or those of --keep are removed."""
    folders: list[Path] = []

    def run(model: object, draft: object, options: object, folder: Path, note: object) -> Any:
        folders.append(folder)
        (folder / "torch.json").write_text("{}")
        return {}, {}

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(profile_run, "run", run)
    document(invoke("profile", "--json", *["--keep", tmp_path / "kept"] * is_kept))
    kept = [tmp_path / "kept" / "torch.json"] if is_kept else []
    assert folders[0].parent == tmp_path
    assert sorted(tmp_path.rglob("*.json")) == kept


def test_what_only_a_gpu_s_profile_needs(
    fake_nsys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a missing report is quoted as a fault of nsys; where nsys is missing torch records in
    its place; or nsys records steps without names, hours for nothing."""
    monkeypatch.setenv("PATH", str(fake_nsys.parent), prepend=":")
    result = invoke("profile", "--read", str(tmp_path / "missing.nsys-rep"))
    assert result.exit_code == 2 and "missing.nsys-rep: no such file" in result.stderr
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(nsys, "find_nsys", lambda: None)
    monkeypatch.setattr(profile_run, "_record", lambda *_: {})
    monkeypatch.setattr(profile_run, "report", lambda *_: None)
    with pytest.raises(ValueError, match="--tool nsys: nsys is not on the PATH"):
        profile_run.run(None, None, options_of("--tool", "nsys"), tmp_path, lambda text: None)
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with pytest.raises(ValueError, match="nvtx package is missing"), cuda_profiler_range():
        pass


def test_nsys_that_fails_is_quoted(fake_nsys: Path, tmp_path: Path) -> None:
    """Bug: nsys fails and the user sees a missing file, or its progress, and not why."""
    (fake_nsys.parent / "fail").touch()
    with pytest.raises(RuntimeError, match=r"^nsys profile exited with 3:\n(.*\n)+.*never began"):
        profile_run._under_nsys(
            str(fake_nsys), ("graph",), "m", None, options_of("m"), tmp_path, lambda text: None
        )


def test_nsys_that_does_not_end(fake_nsys: Path, tmp_path: Path) -> None:
    """Bug: a session longer than its limit is a traceback of subprocess, or what it profiles runs
    on with the GPU's memory."""
    pid = tmp_path / "pid"
    fake_nsys.write_text(f"#!/bin/sh\nsleep 60 &\necho $! > {pid}\nwait\n")
    with pytest.raises(RuntimeError, match=r"^nsys profile took longer than 0\.5 s; lower --num"):
        nsys.run([str(fake_nsys), "profile"], timeout_s=0.5)
    status = Path(f"/proc/{int(pid.read_text())}/stat")
    for _ in range(100):
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("it is still there")


def test_nsys_that_is_killed(fake_nsys: Path) -> None:
    """Bug: where the machine's memory ends nsys is killed, and the user sees a missing file."""
    fake_nsys.write_text("#!/bin/sh\nkill -9 $$\n")
    with pytest.raises(RuntimeError, match=r"^nsys profile exited with -9:"):
        nsys.run([str(fake_nsys), "profile"])


def test_names_reach_torch_profiler(tmp_path: Path) -> None:
    """Bug: under torch.profiler the ranges are missing or not nested, so nothing has a name."""
    path = tmp_path / "torch.json"
    with torch_trace.record(path), names.range_("step"), names.range_("verify.00"):
        pass
    assert not names.is_enabled()
    found = {entry.name: entry for entry in torch_trace.read_chrome_trace(path).ranges}
    assert set(found) == {"step", "verify.00"}
    outer, inner = found["step"], found["verify.00"]
    assert outer.start_ns <= inner.start_ns <= inner.end_ns <= outer.end_ns
    assert outer.thread == inner.thread


def test_ranges_end_with_a_torch_profile_that_fails(tmp_path: Path) -> None:
    """Bug: behind a profile that failed every later step of the process is annotated, for ever."""
    try:
        with (
            pytest.raises(RuntimeError, match="of memory"),
            torch_trace.record(tmp_path / "t.json"),
        ):
            raise RuntimeError("out of memory")
        assert not names.is_enabled()
    finally:
        names.disable()


@pytest.mark.gpu
def test_torch_profiler_on_a_gpu(tmp_path: Path) -> None:
    """Bug: kernels inside graphs lose their launch, and with it their step and name."""
    found = document(
        invoke("profile", "--tool", "torch", "--num-steps", 4, "--keep", tmp_path, "--json")
    )["numbers"]["torch"]
    assert found["num_steps"] == 4
    names = {name for name in found["by_name"] if not name.startswith("host.")}
    expected = [*chain_names("verify", 8), *chain_names("draft", 3)]
    assert names == {*expected, "accept", "draft.context"}
    # On this small pair the profiled host is behind at every border, else it is a seam.
    assert found["idle_by_class"]["seam_us"] + found["idle_by_class"]["host_us"] > 0
    assert found["outside_us"] < found["wall_mean_us"]
