"""`graphengine profile` and `graphengine graphs`: real runs on the CPU, files, refusals, and nsys
as a stand-in program that records how it is called. With a GPU also torch.profiler and captures.
"""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from graphengine import names
from graphengine.capture.inventory import Entry
from graphengine.checkpoints.hub import TINY_DRAFT, TINY_TARGET
from graphengine.cli import graphs as cli_graphs
from graphengine.cli import profile as cli_profile
from graphengine.cli.main import main
from graphengine.config.declaration import declarations
from graphengine.config.options import Options
from graphengine.measure import profile_run
from graphengine.profiles import torch_trace
from graphengine.profiles.result_schema import validate
from tests.support import checkpoints
from tests.support import nsys_exports as exports
from tests.support.chains import chain_names


def invoke(*arguments: Any) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def document(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


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


# --- profile ---


def test_profile_on_the_cpu(tmp_path: Path) -> None:
    """Bug: without a GPU the command fails, loses a step of a chain, leaves the ranges on, or
    prints milliseconds as microseconds."""
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


@pytest.mark.parametrize("preset", ["graph", "node"])
def test_profile_reads_an_export(tmp_path: Path, preset: str) -> None:
    """Bug: a user's own nsys file gives other numbers than the reader, or needs a model."""
    path = exports.write_export(tmp_path / "mine.sqlite", preset=preset)
    found = document(invoke("profile", "--read", path, "--json"))["numbers"]["mine"]
    assert found["wall_mean_us"] == 100.0
    assert found["idle_by_class"]["host_us"] == 67.5


def test_bytes_of_a_file_come_from_facts_or_from_a_model(tmp_path: Path) -> None:
    """Bug: GB/s are missing for a kept file, or taken from another model than the one named."""
    path = exports.write_export(tmp_path / "mine.sqlite")
    facts = {"segment_bytes": {"verify.00": 9e3}, "read_gbps": 2.0}
    (tmp_path / "facts.json").write_text(json.dumps(facts))
    row = document(invoke("profile", "--read", path, "--json"))["numbers"]["mine"]["by_name"]
    assert row["verify.00"]["achieved_gbps"] == pytest.approx(1.0)
    assert row["verify.00"]["floor_us"] == pytest.approx(4.5)
    without = document(invoke("profile", "--read", path, "--read-gbps", 0, "--json"))
    assert "floor_us" not in without["numbers"]["mine"]["by_name"]["verify.00"]
    named = invoke("profile", TINY_TARGET, "--draft", TINY_DRAFT, "--read", path, "--json")
    row = document(named)["numbers"]["mine"]["by_name"]["verify.01"]
    assert row["read_bytes"] > 1e5 and "floor_us" not in row


def test_bytes_of_a_rounded_drafter(tmp_path: Path) -> None:
    """Bug: GB/s of a batch whose drafter ran unrounded are counted as if it had been rounded."""
    path = exports.write_export(tmp_path / "mine.sqlite")
    found = {}
    for quantization in ("none", "fp8", "fp8-dynamic"):
        for bucket, number in ((1, None), (8, None), (8, (7,))):
            options = {"draft_quantization": quantization, "bucket": bucket}
            options |= {"file": path, "dtype": "auto", "read_gbps": None, "prefill": False}
            options["num_speculative_tokens"] = number
            _, facts = profile_run.read_file(str(TINY_TARGET), str(TINY_DRAFT), options)
            found[quantization, bucket, number] = facts["segment_bytes"]["draft.context"]
    full = found["none", 1, None]
    rounded = {key for key, count in found.items() if count == full / 2}
    assert {count for key, count in found.items() if key not in rounded} == {full}
    cases = [(1, None), (8, None), (8, (7,))]
    assert rounded == {("fp8-dynamic", *case) for case in cases} | {
        ("fp8", 1, None),
        ("fp8", 8, (7,)),  # 64 rows
    }


def test_bytes_of_experts_by_the_rows_of_a_block(tmp_path: Path) -> None:
    """Bug: of a file beside a mixture of experts the bytes are those of a row a request, whatever
    the block, and its floor is a sixth; or those of bfloat16, whatever --dtype says."""
    path = exports.write_export(tmp_path / "mine.sqlite")
    options = {"draft_quantization": "none", "num_speculative_tokens": None}
    options |= {"file": path, "read_gbps": None, "prefill": False}
    found = [
        profile_run.read_file("qwen3-30b-a3b", draft, options | {"bucket": bucket, "dtype": dtype})
        for draft, bucket, dtype in (
            ("ngram", 2, "auto"),
            (None, 32, "bfloat16"),
            (None, 32, "float32"),
        )
    ]
    drafted, plain, wide = (facts["segment_bytes"] for _, facts in found)
    assert drafted["verify"] == plain["decode"] == wide["decode"] / 2


def test_profile_reads_a_chrome_trace(tmp_path: Path) -> None:
    """Bug: the fallback's kept file cannot be read again."""
    path = exports.write_chrome_trace(tmp_path / "torch.json")
    found = document(invoke("profile", "--read", path, "--json"))["numbers"]["torch"]
    assert found["busy_mean_us"] == 27.0


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
        (["--keep", "text.sqlite/x"], "--keep text.sqlite/x: cannot be made"),
        (["--read-gbps", "nan"], "nan: pass a finite number"),
        (["--read-gbps", "inf"], "inf: pass a finite number"),
        (["--tool", "nsys", "--device", "cpu"], "records a GPU"),
        (["--num-steps", "100000", "--device", "cpu"], "lower --num-steps"),
        (["no-such-model"], "no such model directory"),
        (["--inside", "facts.json", "--device", "cpu"], "records a GPU"),
    ],
)
def test_refusals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    """Bug: a traceback, or a refusal that does not say what to do."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    Path("empty.nsys-rep").touch()
    Path("text.sqlite").write_text("no database" * 100)
    Path("empty.json").write_text('{"traceEvents": []}')
    result = invoke("profile", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"unprofiled_step_ms": 1}', '{"read_gbps": NaN}', '{"segment_bytes": {"a": "b"}}'],
)
def test_facts_that_are_none(tmp_path: Path, text: str) -> None:
    """Bug: a facts.json of some other program beside the trace ends in a traceback that names
    neither it nor what to do, or makes --json print NaN."""
    path = exports.write_export(tmp_path / "a.sqlite")
    (tmp_path / "facts.json").write_text(text)
    result = invoke("profile", "--read", path, "--json")
    assert result.exit_code == 2, result.output
    assert "facts.json: not the facts of a profile" in result.stderr.replace("\n", " ")
    assert result.stdout == ""


def test_simulated_acceptance_is_marked(tmp_path: Path) -> None:
    """Bug: tables and picture of a profile whose acceptance was simulated do not say so."""
    path = exports.write_export(tmp_path / "a.sqlite")
    (tmp_path / "facts.json").write_text('{"config": {"simulate_acceptance": 6.35}}')
    result = invoke("profile", "--read", path, "--plot", tmp_path / "a.svg")
    assert result.exit_code == 0, result.output
    assert "SIMULATED at 6.35" in result.stderr
    assert (tmp_path / "a.svg").read_text().count("SIMULATED at 6.35") == 2


# A stand-in for nsys: keeps its arguments, and "exports" the scenario of nsys_exports.py.
FAKE_NSYS = """\
#!{python}
import json, pathlib, shutil, sys
here = pathlib.Path(__file__).parent
with open(here / "calls.jsonl", "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
options = dict(a.split("=", 1) for a in sys.argv[2:] if a.startswith("--") and "=" in a)
if (here / "fail").exists():
    print("the capture range never began")
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


def test_nsys_that_fails_is_quoted(fake_nsys: Path, tmp_path: Path) -> None:
    """Bug: nsys fails and the user sees a missing file instead of what nsys said."""
    (fake_nsys.parent / "fail").touch()
    with pytest.raises(RuntimeError, match=r"^nsys profile exited with 3:\n.*never began"):
        profile_run._under_nsys(
            str(fake_nsys), ("graph",), "m", None, options_of("m"), tmp_path, lambda text: None
        )


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


# --- graphs ---


def test_graphs_on_the_cpu_lists_the_steps() -> None:
    """Bug: without CUDA graphs the command shows nothing, or wrong shapes."""
    result = invoke("graphs", "--device", "cpu", "--bucket", "1,2", "--json")
    listed = document(result)
    assert "no CUDA graphs on the CPU" in result.stderr
    assert listed["graph_mode"] == "none"
    assert (listed["model"], listed["draft"]) == (TINY_TARGET.name, TINY_DRAFT.name)
    for bucket, rows in ((1, 16), (2, 32)):
        steps = [step for step in listed["steps"] if step["bucket"] == bucket]
        names = [*chain_names("draft", 3), *chain_names("verify", 8)]
        # Attention is planned here, so what needs no plan comes first: it was run one step ahead.
        assert [step["name"] for step in steps] == ["draft.context", *names, "accept"]
        by_name = {step["name"]: step for step in steps}
        assert by_name["verify.08"]["output_shapes"][-1] == f"{rows} int64"
        assert by_name["verify.01"]["input_shapes"][0] == f"{rows}x192 float32"
        assert {step["launch"] for step in steps} == {"eager"}
        assert {step["num_kernels"] for step in steps} == {None}


def test_graphs_of_blocks_of_their_own() -> None:
    """Bug: numbers of drafts follow the sorted buckets instead of the typed ones, or all buckets
    are listed with the longest block."""
    typed = ["--bucket", "2,1", "--num-speculative-tokens", "3,15"]
    listed = document(invoke("graphs", "--device", "cpu", *typed, "--json"))
    found = {
        (step["bucket"], step["name"]): step["output_shapes"][-1]
        for step in listed["steps"]
        if step["name"] in ("draft.03", "verify.08") and step["output_shapes"]
    }
    assert found == {(1, "verify.08"): "16 int64", (2, "verify.08"): "8 int64"}


def test_graphs_needs_no_weights(tmp_path: Path) -> None:
    """Bug: a directory with a config alone is refused though only its structure is listed."""
    target = checkpoints.make_target(tmp_path / "target")
    for path in target.iterdir():
        if path.name != "config.json":
            path.unlink()
    listed = document(invoke("graphs", target, "--device", "cpu", "--json"))
    expected = [*chain_names("decode", 2), "accept"]
    assert [step["name"] for step in listed["steps"]] == expected


def test_dot_without_graphs_is_refused(tmp_path: Path) -> None:
    """Bug: an empty folder and no word."""
    result = invoke("graphs", "--device", "cpu", "--dot", tmp_path / "dots")
    assert result.exit_code == 2 and "--dot" in result.stderr
    assert not (tmp_path / "dots").exists()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["piecewise", "full"])
def test_graphs_on_a_gpu(tmp_path: Path, mode: str) -> None:
    """Bug: a graph without nodes (captured on the wrong stream), or one that is not listed."""
    arguments = ["--graph-mode", mode, "--attention-backend", "triton", "--bucket", "1,2"]
    listed = document(invoke("graphs", *arguments, "--dot", tmp_path, "--json"))
    graphs = [step for step in listed["steps"] if step["launch"] == "graph"]
    # Piecewise: 4 + 9 segments, accept, context; full: the step.
    assert len(graphs) == 2 * (15 if mode == "piecewise" else 1)
    if mode == "full":
        assert {step["name"] for step in graphs} == {"speculate"}
        names = [*chain_names("draft", 3), *chain_names("verify", 8)]
        assert graphs[0]["steps"] == [*names, "accept", "draft.context"]
    assert all(0 < step["num_kernels"] <= step["num_nodes"] for step in graphs)
    assert all(step["pool_bytes"] >= 0 for step in graphs)
    assert len(list(tmp_path.glob("*.dot"))) == len(graphs)
    assert all("digraph" in path.read_text() for path in tmp_path.glob("*.dot"))


@pytest.mark.parametrize(
    ("show_all", "sizes", "named"),
    [
        (False, ["3.00", "1.50"], ["verify.00 .. verify.01", "verify.02"]),
        (True, ["1.50", "1.50", "1.50"], ["verify.00", "verify.01", "verify.02"]),
    ],
)
def test_equal_graphs_share_a_line_unless_all_are_asked_for(
    show_all: bool, sizes: list[str], named: list[str]
) -> None:
    """Bug: 36 equal layers fill the screen, and --all joins them; a line has one graph's memory, or
    it is not in MB; or it does not say which graphs it is of."""
    made: Any = [(f"verify.{i:02}", "graph", [], [], 5 + (i > 1), 7, 1500000, 1) for i in range(3)]
    table = cli_graphs._table({1: [Entry(*entry) for entry in made]}, show_all)
    cells = {column.header: list(column.cells) for column in table.columns}
    assert (cells["pool MB"], cells["segment"]) == (sizes, named)
