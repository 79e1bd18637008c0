"""`graphengine run`: streams, refusals, exit codes, JSON, chat. On small random pairs and the
bundled one; refusals and options in this process, whatever concerns pipes, signals and terminals
in a real one.
"""

import importlib.util
import io
import json
import os
import pty
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from graphengine import __version__
from graphengine.api import Chunk, Engine
from graphengine.cli import main
from graphengine.hub import TINY_DRAFT, TINY_TARGET
from graphengine.profiles import ranges
from graphengine.prompts import read_prompt_file

ROOT = Path(__file__).resolve().parent.parent
_spec = importlib.util.spec_from_file_location(
    "checkpoints", Path(__file__).with_name("checkpoints.py")
)
assert _spec is not None and _spec.loader is not None
checkpoints = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(checkpoints)

COMMAND = [sys.executable, "-m", "graphengine"]
FIRST_TOKEN_LIMIT_S = 15
HELP_LIMIT_S = 0.5
REMOVED = ("GRAPHENGINE_NVTX", "FORCE_COLOR")
ENV = {k: v for k, v in os.environ.items() if k not in REMOVED} | {"PYTHONPATH": str(ROOT)}
Run = Callable[..., Result]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make_target(tmp_path_factory.mktemp("pair") / "target", max_positions=8192)


@pytest.fixture(scope="module")
def draft(target: Path) -> Path:
    return checkpoints.make_drafter(target.with_name("draft"), target)


@pytest.fixture
def cli(target: Path) -> Run:
    """The command on the random target, with one small bucket."""

    def call(*args: str, model: Path | None = target, **kwargs: Any) -> Result:
        where = ["run"] if model is None else ["run", str(model), "--bucket", "2"]
        return CliRunner().invoke(main, [*where, *args], **kwargs)

    return call


def refused(result: Result, *parts: object) -> None:
    """Exit code 2, a message with every part, no text on stdout, and no traceback."""
    assert result.exit_code == 2, result.output
    flat = " ".join(result.stderr.split())
    assert "Error: " in flat
    assert "Traceback" not in flat
    assert [str(part) for part in parts if str(part) not in flat] == [], flat
    assert result.stdout == ""


def shell(*args: str, env: dict[str, str] = ENV, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *args], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, **kwargs
    )


# --- help ---


@pytest.mark.parametrize("args", [["--version"], ["--help"], ["run", "--help"]])
def test_help_is_quick(args: list[str]) -> None:
    """Bug: an import at the top of cli.py makes --help wait for torch."""
    code = "import sys, graphengine.cli as c; assert 'torch' not in sys.modules, 'torch'"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=ENV).returncode == 0
    seconds = []
    for _ in range(3):  # the machine may be busy; the code is not slow by chance three times
        began = time.perf_counter()
        done = shell(*args)
        seconds.append(time.perf_counter() - began)
        assert done.returncode == 0
        assert done.stdout.strip()
    assert min(seconds) < HELP_LIMIT_S
    if args == ["--version"]:
        assert __version__ in done.stdout


# --- refusals ---


@pytest.mark.parametrize("value", ["0", "abc", "", "1,,8", "-1", "1.5"])
def test_bad_bucket(cli: Run, value: str) -> None:
    """Bug: a bucket that cannot exist is found after loading, or raises a traceback."""
    refused(cli("--prompt", "x", "--bucket", value, model=None), "--bucket", repr(value), "1,8,16")


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (None, ["No such file", '{"prompt": "text"}']),
        ("", ["holds no prompt"]),
        ("\n \n", ["holds no prompt"]),
        ('{"prompt": "a"}\nhello\n', ["line 2", "not JSON"]),
        ('{"prompt": "a"}\n\n["b"]\n', ["line 3", "expected"]),
        ('{"text": "a"}\n', ["line 1", "expected"]),
        ('{"turns": []}\n', ["line 1", "expected"]),
        ('{"turns": ["a", 3]}\n', ["line 1", "expected"]),
        ('{"prompt": 3}\n', ["line 1", "expected"]),
        ("[" * 100_000, ["line 1", "not JSON"]),
        (b"\xff\xfe\x00", ["not UTF-8"]),
    ],
)
def test_bad_prompt_file(
    cli: Run, tmp_path: Path, content: str | bytes | None, parts: list[str]
) -> None:
    """Bug: one bad line among a thousand is reported without its number, or after loading."""
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(cli("--prompt-file", str(path), model=None), "--prompt-file", path, *parts)


def test_prompt_file_of_windows(tmp_path: Path) -> None:
    """Bug: the byte-order mark that Windows' editors write makes the first line no JSON."""
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    assert read_prompt_file(path) == [["a"], ["b"]]


def test_no_prompt(cli: Run) -> None:
    """Bug: an empty pipe makes the model answer nothing."""
    refused(cli(model=None, input="\n"), "--prompt", "--prompt-file", "stdin")


def test_raw_has_no_turns(cli: Run, tmp_path: Path) -> None:
    """Bug: --raw silently drops the conversation between turns."""
    path = tmp_path / "turns.jsonl"
    path.write_text('{"turns": ["a", "b"]}')
    refused(cli("--raw", "--prompt-file", str(path), model=None), "--raw")


def test_long_prompt(cli: Run) -> None:
    """Bug: a prompt beyond the context is cut, or fails inside the attention."""
    refused(
        cli("--max-model-len", "32", "--prompt", "hi", "--prompt", "many words " * 50),
        *("prompt 2 of 2", "32", "--max-model-len"),
    )


def test_missing_directory(cli: Run, tmp_path: Path) -> None:
    """Bug: a mistyped path is sent to the hub, or named by half."""
    refused(cli("--prompt", "x", model=tmp_path / "none"), tmp_path / "none", "no such model")
    refused(cli("--prompt", "x", model=tmp_path), tmp_path, "config.json")


@pytest.mark.parametrize(
    ("model", "part"),
    [
        ("~nobody_of_this_name/model", "home directory"),
        ("x" * 5000, "too long"),
        ("", "config.json"),
    ],
)
def test_model_that_is_no_name(cli: Run, model: str, part: str) -> None:
    """Bug: a path that the system refuses is its traceback, and an unset shell variable runs the
    bundled model instead of the one that was meant."""
    refused(CliRunner().invoke(main, ["run", model, "--prompt", "x"]), part)
    refused(cli("--prompt", "x", "--draft", model), part)


def test_drafter_of_another_target(cli: Run, target: Path, tmp_path: Path) -> None:
    """Bug: a drafter of another size fails in a matmul, or drafts rubbish."""
    other = checkpoints.make_target(tmp_path / "other", hidden=32, layers=3)
    foreign = checkpoints.make_drafter(tmp_path / "draft", other)
    refused(cli("--prompt", "x", "--draft", str(foreign)), foreign)


def test_drafter_as_the_model(cli: Run, draft: Path) -> None:
    """Bug: a user who swaps the two, or leaves out the target, is told to fetch a tokenizer."""
    refused(cli("--prompt", "x", model=draft), draft, "not a target", f"--draft {draft}")


@pytest.mark.parametrize("which", ["target", "draft"])
def test_truncated_weights(cli: Run, tmp_path: Path, which: str) -> None:
    """Bug: half a download loads as zeros, or shows safetensors' traceback."""
    model = checkpoints.make_target(tmp_path / "target")
    drafter = checkpoints.make_drafter(tmp_path / "draft", model)
    path = tmp_path / which / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    refused(cli("--prompt", "x", "--draft", str(drafter), model=model), path, "fetch")


@pytest.mark.parametrize("key", ["rope_theta", "target_layer_ids"])
def test_incomplete_config(cli: Run, target: Path, tmp_path: Path, key: str) -> None:
    """Bug: a theta or taps that are guessed cost acceptance and nobody learns why."""
    drafter = checkpoints.make_drafter(tmp_path / "draft", target)

    def drop(config: dict[str, Any]) -> dict[str, Any]:
        (config["dflash_config"] if key in config["dflash_config"] else config).pop(key)
        return config

    checkpoints.edit_config(drafter, drop)
    refused(cli("--prompt", "x", "--draft", str(drafter)), drafter / "config.json", key)


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--graph-mode", "full", "--device", "cpu"], ["--graph-mode full", "none"]),
        (["--attention-backend", "flashinfer", "--device", "cpu"], ["flashinfer", "torch"]),
        (["--max-model-len", "999999"], ["--max-model-len 999999", "8192"]),
        (["--max-new-tokens", "0"], ["--max-new-tokens"]),
        (["--page-size", "0"], ["--page-size"]),
        (["--gpu-memory-utilization", "1.5"], ["--gpu-memory-utilization"]),
        (["--simulate-acceptance", "2"], ["--simulate-acceptance", "--draft"]),
        (["--acceptance-floor", "nan"], ["--acceptance-floor nan", "0 turns"]),  # is no JSON
        (["--bucket", "9" * 24], ["--bucket", "impossible size"]),
        (["--page-size", "99999999"], ["--max-model-len", "--kv-cache-memory", "--page-size"]),
    ],
)
def test_options_that_cannot_work(cli: Run, args: list[str], parts: list[str]) -> None:
    """Bug: a refusal that does not name its option or what to do instead."""
    refused(cli("--prompt", "x", *args), *parts)


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("CUDA out of memory. Tried to allocate"), RuntimeError("broken")],
)
def test_runtime_failures(cli: Run, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Bug: running out of memory looks like bad input, or a real fault is hidden as one."""

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("graphengine.cli_run.run", fail)
    result = cli("--prompt", "x")
    assert result.exit_code == 1
    if str(error) == "broken":
        assert result.exception is error
    else:
        assert "--max-model-len" in result.stderr


# --- answers ---


def test_pipes_get_text_alone(target: Path, draft: Path) -> None:
    """Bug: a table, a note or a colour code lands in the text of a pipe."""
    args = ["run", str(target), "--draft", str(draft), "--max-new-tokens", "12", "--bucket", "1"]
    loud = shell(*args, input="hello there\n")
    assert loud.returncode == 0, loud.stderr
    assert "\x1b" not in loud.stdout + loud.stderr
    for word in ("import", "load", "compile", "capture", "first token", "acceptance per position"):
        assert word in loud.stderr
    quiet = shell(*args, "--quiet", "--prompt", "hello there")
    assert quiet.returncode == 0
    assert quiet.stderr == ""
    assert quiet.stdout == loud.stdout
    assert quiet.stdout.endswith("\n")


def test_text_that_stdout_cannot_hold(target: Path) -> None:
    """Bug: in a Latin-1 locale the first other character ends the run, and every answer is lost."""
    args = ["run", str(target), "--quiet", "--bucket", "2", "--max-new-tokens", "20"]
    args += ["--ignore-eos", "--prompt", "one", "--prompt", "two"]
    whole, escaped = shell(*args), shell(*args, env=ENV | {"PYTHONIOENCODING": "ascii"})
    assert escaped.returncode == 0, escaped.stderr
    assert not whole.stdout.isascii()
    assert escaped.stdout == whole.stdout.encode("ascii", "backslashreplace").decode()


@pytest.mark.parametrize(
    ("redirection", "code", "part"),
    [(">&-", 2, "stdout is closed"), (">/dev/full", 1, "No space left"), ("2>&-", 0, "")],
)
def test_streams_that_are_gone(target: Path, redirection: str, code: int, part: str) -> None:
    """Bug: a stream that a service has closed, or a full disk, is a traceback."""
    args = [*COMMAND, "run", str(target), "--bucket", "1", "--max-new-tokens", "4", "--prompt", "x"]
    done = subprocess.run(
        f"{shlex.join(args)} {redirection}",
        shell=True,
        cwd=ROOT,
        env=ENV,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stderr
    assert part in done.stderr
    assert "Traceback" not in done.stderr
    assert bool(done.stdout) == (code == 0)


def test_json(cli: Run, draft: Path) -> None:
    """Bug: `--json | jq` meets streamed text, or the totals disagree with the results."""
    args = ["--prompt", "one", "--prompt", "two three", "--max-new-tokens", "16", "--ignore-eos"]
    result = cli(*args, "--draft", str(draft), "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["schema_version"] == 1
    assert found["args"]["prompt"] == ["one", "two three"]
    assert found["config"]["buckets"] == [2]
    assert found["draft"] == str(draft)
    assert found["startup"]["total_s"] > found["startup"]["import_s"]
    assert found["startup"]["weight_bytes"] > 0
    results, totals = found["results"], found["totals"]
    assert [(r["index"], r["prompt"]) for r in results] == [(0, "one"), (1, "two three")]
    assert [len(r["token_ids"]) for r in results] == [16, 16]
    assert totals["num_output_tokens"] == 32
    num_drafts = sum(r["metrics"]["num_steps"] for r in results)
    accepted = sum(a * n for r in results for a, n in enumerate(r["metrics"]["steps_by_accepted"]))
    assert totals["spec_decode_num_drafts"] == num_drafts
    assert totals["spec_decode_draft_tokens"] == 3 * num_drafts
    assert totals["spec_decode_accepted_tokens"] == accepted
    assert totals["spec_decode_acceptance_length"] == pytest.approx(1 + accepted / num_drafts)
    assert totals["mean_acceptance_length"] == totals["spec_decode_acceptance_length"]
    assert totals["mean_accepted_draft_tokens"] == pytest.approx(accepted / num_drafts)
    assert len(totals["spec_decode_per_position_acceptance_rates"]) == 3

    plain = json.loads(cli(*args, "--draft", "none", "--json").stdout)
    assert plain["draft"] is None
    assert plain["totals"]["mean_acceptance_length"] is None
    assert not [key for key in plain["totals"] if key.startswith("spec_decode")]
    assert [r["token_ids"] for r in plain["results"]] == [r["token_ids"] for r in results]


def test_tables_fit_a_terminal() -> None:
    """Bug: on 80 columns rich cuts the headers to "ms/to.." and the table cannot be read."""
    from rich.console import Console

    from graphengine import report
    from graphengine.api import GenerationResult
    from graphengine.metrics import Acceptance, RequestMetrics, StartupMetrics

    acceptance = Acceptance(15, [90000, *[9000] * 15])
    metrics = RequestMetrics(
        num_prompt_tokens=10,
        num_output_tokens=100000,
        ttft_ms=12345.6,
        decode_ms=9876543.0,
        acceptance=acceptance,
    )
    result = GenerationResult(text="", token_ids=[], finish_reason="cancelled", metrics=metrics)
    startup = StartupMetrics(
        load_s=1,
        compile_s=1,
        capture_s=1,
        weight_bytes=1,
        kv_pool_bytes=1,
        num_pages=1,
        num_graphs=1,
    )
    answers = [report.Answer(i, turn, "x", result) for i in range(20) for turn in (0, 1)]
    screen = io.StringIO()
    console = Console(width=80, file=screen, force_terminal=True, color_system=None)
    report.print_tables(console, {"import_s": 1.0}, startup, answers, 9876.5)
    text = screen.getvalue()
    for word in ("prompt", "tokens", "TTFT", "ms per", "accept.", "accepted", "cancelled", "5.80"):
        assert word in text
    assert "\u2026" not in text
    assert "24 more answers" in text


@pytest.mark.parametrize(
    ("args", "last"),
    [
        (("run", "--prompt", "a", "--max-new-tokens", "4"), "length"),
        (("bench", "--num-iters", "2", "--warmup", "0", "--output-len", "32"), "/floor"),
        (("verify", "--prompt-file", "one.jsonl", "--max-new-tokens", "4"), "verdict"),
        (("graphs",), "float32 -> "),
        (("profile", "--num-steps", "2", "--warmup", "1"), "/floor"),
    ],
)
def test_no_table_is_cut(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], last: str
) -> None:
    """Bug: on a screen narrower than a table its columns lose digits, then vanish."""
    monkeypatch.chdir(tmp_path)
    Path("one.jsonl").write_text('{"prompt": "a"}\n')
    monkeypatch.setattr("graphengine.report.PIPE_WIDTH", 30)
    command, *rest = args
    where = [str(target), "--draft", "none", "--bucket", "1", "--device", "cpu"]
    result = CliRunner().invoke(main, [command, *where, *rest])
    assert result.exit_code == 0, result.output
    assert "\u2026" not in result.stderr and last in result.stderr


def test_prompt_file_turns(cli: Run, tmp_path: Path) -> None:
    """Bug: a later turn is asked without the answers in between, or answers change places."""
    path = tmp_path / "turns.jsonl"
    path.write_text('{"turns": ["a", "b"]}\n\n{"prompt": "c"}\n{"prompt": [1, 2, 3]}\n')
    args = ["--prompt-file", str(path), "--max-new-tokens", "8"]
    result = cli(*args, "--json")
    assert result.exit_code == 0, result.output
    answers = json.loads(result.stdout)["results"]
    assert [(r["index"], r["turn"]) for r in answers] == [(0, 0), (0, 1), (1, 0), (2, 0)]
    lengths = [r["metrics"]["num_prompt_tokens"] for r in answers]
    alone = json.loads(cli("--prompt", "b", "--max-new-tokens", "1", "--json").stdout)
    assert lengths[1] > lengths[0] + alone["results"][0]["metrics"]["num_prompt_tokens"]
    assert lengths[3] == 3
    text = cli(*args, "--quiet").stdout
    places = [text.index(f"[{label}] ") for label in ("1.1", "1.2", "2", "3")]
    assert places == sorted(places)


def test_turn_beyond_the_context(cli: Run, tmp_path: Path) -> None:
    """Bug: one conversation that outgrows the context in its second turn costs every other one its
    answers, and the message counts the wrong prompts."""
    path = tmp_path / "turns.jsonl"
    path.write_text(
        '{"prompt": "c"}\n{"turns": ["a", "%s", "never asked"]}\n{"turns": ["a", "b"]}\n'
        % ("d" * 99)
    )
    args = ["--prompt-file", str(path), "--max-new-tokens", "4", "--max-model-len", "80"]
    result = cli(*args, "--json")
    assert result.exit_code == 1, result.output
    answers = json.loads(result.stdout)["results"]
    assert [(r["index"], r["turn"]) for r in answers] == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1)]
    failed = answers.pop(2)
    assert failed["finish_reason"] == "error" and "the context holds 80" in failed["error"]
    assert "nor those behind it" in failed["error"]
    assert all(r["error"] is None and r["token_ids"] for r in answers)
    assert "prompt 2.2 failed: " in result.stderr

    path.write_text('{"turns": ["a", "%s", "never asked"]}\n' % ("d" * 99))
    alone = cli(*args)
    assert alone.exit_code == 1
    assert alone.stdout.strip() == answers[1]["text"].strip()
    assert "prompt 1.2 failed: " in alone.stderr


def test_raw(cli: Run) -> None:
    """Bug: --raw still wraps the text in the chat template."""
    lengths = []
    for extra in ([], ["--raw"]):
        result = cli("--prompt", "hello", "--max-new-tokens", "2", "--json", *extra)
        lengths.append(json.loads(result.stdout)["results"][0]["metrics"]["num_prompt_tokens"])
    assert lengths[1] < lengths[0]


def test_sampling(cli: Run, draft: Path) -> None:
    """Bug: --seed does not reach the engine, a drafter changes what a seed says, or sampling is on
    without being asked for."""
    prompts = ("--prompt", "ab", "--prompt", "the quick", "--max-new-tokens", "9", "--json")

    def texts(*args: str) -> list[str]:
        result = cli(*prompts, *args)
        assert result.exit_code == 0, result.output
        return [entry["text"] for entry in json.loads(result.stdout)["results"]]

    drawn = texts("--temperature", "2", "--seed", "4")
    assert drawn == texts("--temperature", "2", "--seed", "4", "--draft", str(draft))
    assert drawn != texts("--temperature", "2", "--seed", "5")
    assert drawn != texts() == texts("--seed", "4")
    assert texts("--temperature", "2", "--top-k", "1", "--top-p", "0.5") == texts()


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--temperature", "-1"], ["temperature is -1.0", "0 (greedy)"]),
        (["--temperature", "nan"], ["temperature is nan"]),
        (["--temperature", "1", "--top-p", "0"], ["top_p is 0.0", "1 keeps all"]),
        (["--temperature", "1", "--top-k", "-3"], ["top_k is -3", "0 keeps all"]),
        (["--temperature", "1", "--seed", "-3"], ["seed is -3"]),
        (["--top-p", "0.9"], ["change nothing at temperature 0"]),
    ],
)
def test_bad_sampling(cli: Run, args: list[str], parts: list[str]) -> None:
    """Bug: a bad value is found after loading, ignored, or draws something odd."""
    refused(cli("--prompt", "x", *args), *parts)


def test_note_on_plain_decoding(cli: Run) -> None:
    """Bug: a user measures plain decoding and believes that it was speculative."""
    args = ["--prompt", "x", "--max-new-tokens", "2"]
    assert "--draft" in cli(*args).stderr
    assert "note" not in cli(*args, "--draft", "none").stderr
    assert cli(*args, "--quiet").stderr == ""


@pytest.mark.parametrize(
    ("env", "args", "expected"), [("1", [], 1), ("0", [], 0), ("", [], 0), ("", ["--nvtx"], 1)]
)
def test_nvtx_switches(
    cli: Run, monkeypatch: pytest.MonkeyPatch, env: str, args: list[str], expected: int
) -> None:
    """Bug: a profile under nsys has no ranges because the variable is not passed down."""
    calls: list[int] = []
    monkeypatch.setattr(ranges, "enable", lambda: not calls.append(1))
    result = cli("--prompt", "x", "--max-new-tokens", "1", *args, env={"GRAPHENGINE_NVTX": env})
    assert result.exit_code == 0, result.output
    assert len(calls) == expected


def test_bundled_pair_by_default() -> None:
    """Bug: the first command that a new user types fails, is slow, or drafts nothing."""
    assert TINY_TARGET.is_dir() and TINY_DRAFT.is_dir()
    began = time.perf_counter()
    with subprocess.Popen(
        [*COMMAND, "run", "--prompt", "Tom has 3 apples and buys 4 more. How many now?"],
        cwd=ROOT,
        env=ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=_heed_interrupts,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1)
        first_s = time.perf_counter() - began
        table = process.stderr.read().decode()
        assert process.wait() == 0
    assert first_s < FIRST_TOKEN_LIMIT_S
    assert "acceptance per position" in table
    assert str(TINY_DRAFT) in table

    runner = CliRunner()
    plain = runner.invoke(main, ["run", "--draft", "none", "--prompt", "hi", "--json"])
    drafted = runner.invoke(main, ["run", "--draft", str(TINY_DRAFT), "--prompt", "hi", "--json"])
    one, two = json.loads(plain.stdout), json.loads(drafted.stdout)
    assert one["draft"] is None
    assert two["draft"] == str(TINY_DRAFT)
    assert one["results"][0]["token_ids"] == two["results"][0]["token_ids"]


# --- signals and terminals ---


def test_interrupt(target: Path) -> None:
    """Bug: Ctrl-C prints a traceback, or exits as if all went well."""
    args = ["run", str(target), "--bucket", "1", "--ignore-eos", "--max-new-tokens", "8000"]
    with subprocess.Popen(
        [*COMMAND, *args, "--prompt", "x"],
        cwd=ROOT,
        env=ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=_heed_interrupts,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        errors = process.stderr.read().decode()
        assert process.wait() == 130
    assert "interrupted" in errors
    assert "Traceback" not in errors


class Terminal:
    """The command on a pseudo-terminal: what is typed, and what has been shown so far."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self.descriptor, text.encode())

    def wait_for(self, text: str, limit_s: float = 60, repeat: str = "") -> str:
        """What was shown up to and with `text` since the last call; types `repeat`, and again
        in every quiet second."""
        end = time.monotonic() + limit_s
        self.type(repeat)
        while text not in self.shown:
            assert time.monotonic() < end, f"no {text!r} after {limit_s} s in {self.shown!r}"
            if not select.select([self.descriptor], [], [], 1)[0]:
                self.type(repeat)
                continue
            try:
                self.shown += os.read(self.descriptor, 4096).decode(errors="replace")
            except OSError as error:  # the other side has closed
                raise AssertionError(f"ended without {text!r}: {self.shown!r}") from error
        found, _, self.shown = self.shown.partition(text)
        return found + text


@contextmanager
def on_a_terminal(*args: str) -> Iterator[tuple[Terminal, subprocess.Popen[bytes]]]:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *args],
        cwd=ROOT,
        env=ENV | {"TERM": "dumb"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=_take_terminal,
    )
    os.close(theirs)
    try:
        yield Terminal(ours), process
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (RuntimeError("the device is gone"), 1)]
)
def test_a_stopped_batch_keeps_its_finished_answers(
    cli: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    """Bug: Ctrl-C, or a device that fails, in the last of a hundred prompts throws away the
    ninety-nine answers before it."""
    stream_many = Engine.stream_many

    def stopped(*args: Any, **kwargs: Any) -> Iterator[Chunk]:
        for chunk in stream_many(*args, **kwargs):
            yield chunk
            if chunk.result is not None:
                raise error

    expected = json.loads(cli("--prompt", "one", "--max-new-tokens", "3", "--json").stdout)
    monkeypatch.setattr(Engine, "stream_many", stopped)
    args = ("--prompt", "one", "--prompt", "two", "--bucket", "1", "--max-new-tokens", "3")
    result = cli(*args)
    assert result.exit_code == code
    assert result.stdout == f"[1] {expected['results'][0]['text'].rstrip()}\n"
    result = cli(*args, "--json")
    assert result.exit_code == code
    document = json.loads(result.stdout)
    assert [r["text"] for r in document["results"]] == [expected["results"][0]["text"]]
    assert not document["is_complete"] and expected["is_complete"]


def _heed_interrupts() -> None:
    """Undoes what a shell does to background jobs, of which these tests may be part."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _take_terminal() -> None:
    """Makes stdin the controlling terminal, so that a typed Ctrl-C becomes a signal."""
    import fcntl
    import termios

    _heed_interrupts()

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_chat(target: Path, draft: Path) -> None:
    """Bug: Ctrl-C ends the chat with the answer, /reset keeps the history, or the engine is
    unusable after a stopped answer."""
    args = ["--bucket", "1", "--ignore-eos", "--draft", str(draft)]
    with on_a_terminal("run", str(target), *args, "--max-new-tokens", "6000") as (screen, process):
        screen.wait_for("/quit")
        screen.wait_for("> ")
        screen.type("hello\n")
        screen.wait_for("hello")
        screen.wait_for("\n")
        time.sleep(0.3)  # some of the answer is out
        screen.type("\x03")
        screen.wait_for("stopped")
        screen.wait_for("> ")
        screen.type("/what\n")
        screen.wait_for("no command")
        screen.type("/reset\n")
        screen.wait_for("forgotten")
        screen.wait_for("> ")
        # CPython's readline sleeps through a signal that comes between its prompt and its wait.
        screen.wait_for("ends the chat", repeat="\x03")
        screen.wait_for("> ")
        time.sleep(1.1)  # a repeated Ctrl-C has been dealt with
        screen.type("\x04")
        screen.wait_for("start-up")
        assert process.wait(timeout=30) == 0


def test_chat_remembers(target: Path) -> None:
    """Bug: the second question is asked without the first, so the chat is none."""
    args = ["--bucket", "1", "--ignore-eos", "--max-new-tokens", "40", "--max-model-len", "80"]
    with on_a_terminal("run", str(target), *args) as (screen, process):
        screen.wait_for("> ")
        screen.type("hello there\n")
        screen.wait_for("40 tokens")
        screen.wait_for("> ")
        screen.type("and now a question\n")  # with the first turn it exceeds the context
        screen.wait_for("the context holds 80")
        screen.wait_for("> ")
        screen.type("/reset\n")
        screen.wait_for("forgotten")
        screen.type("hello there\n")
        screen.wait_for("40 tokens")
        screen.type("/quit\n")
        screen.wait_for("tokens/s")
        assert process.wait(timeout=30) == 0


@pytest.mark.parametrize("command", ["bench", "profile", "graphs", "compile"])
@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(28, "No space left on device"), 1, "No space left on device"),
        (MemoryError(), 1, "out of memory"),
    ],
)
def test_every_command_tells_its_end(
    monkeypatch: pytest.MonkeyPatch, command: str, error: BaseException, code: int, text: str
) -> None:
    """Bug: Ctrl-C in a benchmark counts as a failure (1, "Aborted!"), and a full disk or a machine
    that is too small ends in a traceback: only `run` had told them."""

    def fail(*args: Any) -> None:
        raise error

    monkeypatch.setattr("graphengine.pairs.named_pair", fail)
    monkeypatch.setattr("graphengine.profile_run.named_pair", fail)
    done = CliRunner().invoke(main, [command])
    assert done.exit_code == code, done.output
    assert text in done.stderr and "Aborted" not in done.stderr
    assert isinstance(done.exception, SystemExit)
