"""`graphengine doctor` as a command: exit codes, table, JSON; one real process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from graphengine.checkpoints.hub import TINY_DRAFT, TINY_TARGET
from graphengine.cli.doctor import _print
from graphengine.cli.main import main
from graphengine.config.declaration import declarations
from graphengine.config.options import Options
from graphengine.doctor.doctor import Examination
from graphengine.doctor.findings import error, ok
from graphengine.startup import memory
from tests.support.checkpoints import edit_config
from tests.support.command_line import ROOT

PRESETS = ["qwen3-8b", "--draft", "qwen3-8b-dflash-b16"]


def run(*args: str) -> Result:
    result = CliRunner().invoke(main, ["doctor", *args])
    assert "Traceback" not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def report(*args: str) -> tuple[dict[str, Any], int]:
    result = run(*args, "--json")
    return json.loads(result.stdout), result.exit_code


def test_report_where_the_screen_has_no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: where a shell says COLUMNS=0, doctor prints nothing and ends with 0."""
    monkeypatch.setenv("COLUMNS", "0")
    assert "no errors" in run().stdout


def test_names_that_stdout_cannot_hold(tmp_path: Path) -> None:
    """Bug: a directory's name in another script ends the report with advice on Python's encoding,
    and the pair is not examined."""
    name = "\u4e2d\udcff"  # and a byte that is no text
    done = CliRunner(charset="ascii").invoke(main, ["doctor", str(tmp_path / name)])
    assert done.exit_code == 1, done.output
    assert "\\u4e2d" in done.stdout and "1 error)" in done.stdout


def test_a_check_that_fails_has_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: the row of a part that could not be checked names nothing, or stands in another part."""
    findings = (ok("target.head", "its own"), error("pair", "cannot be checked", "compare them"))
    _print(Examination("t", None, findings, None))
    assert capsys.readouterr().out.splitlines() == [
        "t, drafter none",
        "",
        "target",
        "  ok      head               its own",
        "",
        "pair",
        "  error   pair               cannot be checked",
        f"{'':29}-> compare them",
        "",
        "errors: this pair will not run as it is (1 ok, 0 info, 0 warning, 1 error)",
    ]


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """The bundled drafter with a tap that its target does not have."""
    path = tmp_path / "draft"
    shutil.copytree(TINY_DRAFT, path)

    def edit(values: dict[str, Any]) -> dict[str, Any]:
        nested = values["dflash_config"] | {"target_layer_ids": [1, 3, 5, 8]}
        return values | {"dflash_config": nested, "num_target_layers": None}

    edit_config(path, edit)
    return path


def test_bundled_pair() -> None:
    """Bug: without arguments something else than the bundled pair is examined, or a good pair ends
    with a failing exit code."""
    result = run()
    assert result.exit_code == 0
    for text in ("target", "draft", "pair", "host", "run", "memory plan:", "no errors"):
        assert text in result.stdout
    found, code = report()
    assert code == 0
    assert found["target"] == str(TINY_TARGET)
    assert found["draft"] == str(TINY_DRAFT)
    assert found["num_by_level"]["error"] == 0
    assert found["memory_plan"]["kv_pool_bytes"] > 0
    for finding in found["findings"]:
        assert set(finding) == {"name", "value", "level", "remedy"}
        assert finding["level"] in ("ok", "info", "warning", "error")
        assert all(isinstance(value, str) for value in finding.values())


def test_a_bundled_pairs_name_as_the_drafter() -> None:
    """Bug: `doctor X --draft tiny` finds no such directory, where `run` drafts with it."""
    for model in ("tiny", "tiny-hybrid"):
        found, code = report(model, "--draft", "tiny")
        assert code == 0 and found["draft"] == str(TINY_DRAFT)


def test_the_options_of_a_run() -> None:
    """Bug: doctor says that it takes the options of `run`, and a line copied from there fails on
    one that it does not know."""
    run_line = {
        spelling
        for param in main.commands["run"].params
        if param.name in declarations(Options) and param.name != "load_format"
        for spelling in (*param.opts, *param.secondary_opts)
    }
    taken = main.commands["doctor"].params
    assert run_line <= {text for p in taken for text in (*p.opts, *p.secondary_opts)}
    args = ["--no-lazy-capture", "--no-fallback", "--no-enable-prefix-caching", "--device", "cpu"]
    args += ["--max-num-batched-tokens", "64", "--simulate-acceptance", "3"]
    found, code = report(*args, "--acceptance-floor", "99")
    assert code == 1
    assert [f["name"] for f in found["findings"] if f["level"] == "error"] == ["run.options"]


def test_errors_set_the_exit_code(broken: Path) -> None:
    """Bug: a pipeline that asks doctor first goes on with a pair that cannot run."""
    result = run(str(TINY_TARGET), "--draft", str(broken))
    assert result.exit_code == 1
    assert "error   taps" in result.stdout
    assert "-> pass the drafter of this target" in result.stdout
    assert "errors: this pair" in result.stdout
    found, code = report("--draft", str(broken))
    assert code == 1
    assert [f["name"] for f in found["findings"] if f["level"] == "error"] == ["pair.taps"]


def test_what_can_be_done_about_an_info() -> None:
    """Bug: what would help where nothing is wrong, a drafter or a smaller one, is in the JSON
    alone."""
    result = run("qwen3-8b", "--draft", "none", "--device", "cpu")
    lines = result.stdout.splitlines()
    (place,) = (i for i, line in enumerate(lines) if "no drafter: plain decoding" in line)
    assert lines[place].strip().startswith("info")
    assert lines[place + 1].strip() == "-> pass --draft"


@pytest.mark.parametrize("args", [["/no/such/model"], ["nobody/no-such-model-x"], ["x" * 5000]])
def test_a_model_that_is_not_there(args: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a missing directory, or a hub id that is not in the cache, is fetched or crashes."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found, code = report(*args)
    assert code == 1
    assert found["findings"][0]["name"] == "target.directory"
    assert found["memory_plan"] is None


@pytest.mark.parametrize(
    "args",
    [
        ["--bucket", "0"],
        ["--kv-cache-memory", "many"],
        ["--dtype", "float16"],
        ["--max-model-len", "1"],
        ["a", "b"],
        ["--gpu-memory-utilization", "2"],
    ],
)
def test_usage(args: list[str]) -> None:
    """Bug: wrong usage looks like a bad model (1) or like success (0)."""
    assert run(*args).exit_code == 2


def test_presets_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: options do not reach the memory plan, or a preset is refused for having no weights."""
    monkeypatch.setattr(memory, "host_memory_bytes", lambda: 64 << 30)
    args = ["--device", "cpu", "--bucket", "1,4", "--max-model-len", "1000"]
    found, code = report(*PRESETS, *args, "--kv-cache-memory", "1GiB", "--dtype", "bfloat16")
    assert code == 0
    plan = found["memory_plan"]
    assert plan["max_model_len"] == 1000
    assert plan["kv_pool_bytes"] <= 1 << 30
    assert plan["num_pages"] == 1 + 4 * plan["max_request_pages"]
    assert plan["target_weight_bytes"] == pytest.approx(16.38e9, rel=0.01)
    half, _ = report(*PRESETS, *args, "--draft-quantization", "fp8", "--dtype", "bfloat16")
    assert half["memory_plan"]["quantized_weight_bytes"] > 1 << 30
    none, code = report("qwen3-8b", "--draft", "none", *args)
    assert (code, none["draft"]) == (0, None)
    _, code = report(*PRESETS, "--kv-cache-memory", "1MiB")
    assert code == 1


def test_nothing_is_written(tmp_path: Path) -> None:
    """Bug: looking at a model changes it."""
    shutil.copytree(TINY_TARGET, tmp_path / "t")
    shutil.copytree(TINY_DRAFT, tmp_path / "d")

    def state() -> dict[str, tuple[int, bytes]]:
        files = [path for path in sorted(tmp_path.rglob("*")) if path.is_file()]
        return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}

    before = state()
    assert run(str(tmp_path / "t"), "--draft", str(tmp_path / "d")).exit_code == 0
    assert state() == before


@pytest.mark.slow
def test_hub_id_in_the_local_cache(tmp_path: Path) -> None:
    """Bug: a model that is in the cache is looked for on the network, or one that is only half
    there passes; stdout is not one JSON object, or the exit code is lost on the way out of main."""
    cache = tmp_path / "hub"
    for name, source in (("models--me--target", TINY_TARGET), ("models--me--draft", TINY_DRAFT)):
        shutil.copytree(source, cache / name / "snapshots" / "0123")
        (cache / name / "refs").mkdir()
        (cache / name / "refs" / "main").write_text("0123")
    (cache / "models--me--draft" / "snapshots" / "0123" / "model.safetensors").unlink()
    command = [sys.executable, "-m", "graphengine", "doctor", "me/target", "--draft", "me/draft"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, "--json"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    found = json.loads(done.stdout)
    assert (found["target"], found["draft"]) == ("me/target", "me/draft")
    assert [f["name"] for f in found["findings"] if f["level"] == "error"] == ["draft.weights"]
