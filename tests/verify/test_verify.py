"""The command `verify`: verdicts and their exit codes, the stored result, refusals, limits."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from rich.console import Console
from safetensors.torch import load_file, save_file

from graphengine.api import Engine
from graphengine.checkpoints.hub import TINY_DRAFT, TINY_TARGET
from graphengine.cli import options as cli_options
from graphengine.cli import verify as cli_verify
from graphengine.cli.main import main
from graphengine.profiles.result_schema import validate
from graphengine.startup import options as startup_options
from graphengine.verify import run
from graphengine.verify.report import finish
from tests.support.checkpoints import as_speculators, make_target


def verify(*args: str) -> Result:
    return CliRunner().invoke(main, ["verify", *args])


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "few.jsonl"
    path.write_text('{"prompt": "Add 327 and 722 digit by digit."}\n{"prompt": "Why?"}\n')
    return path


def test_matrix_passes_and_writes_a_result(few: Path, tmp_path: Path) -> None:
    """Bug: the stored result breaks the schema, or a mode of the matrix is left out."""
    path = tmp_path / "verify.json"
    result = verify(
        *("--matrix", "--prompt-file", str(few), "--max-new-tokens", "12", "--bucket", "1,2"),
        *("--output-json", str(path)),
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("PASS: 15 runs")
    stored = json.loads(path.read_text())
    assert validate(stored) == [] and stored["config"]["verdict"] == "PASS"
    assert stored["config"]["prompt_file"] == "few.jsonl"  # wherever it lies
    assert set(stored["numbers"]) == {"plain", "none_torch", "none_triton"}
    cell = stored["numbers"]["none_torch"]["bucket_2_mixed"]
    assert cell["identical_fraction"] == 1.0 and cell["num_same_as_plain"] == 2


@pytest.mark.parametrize(
    ("dtype", "head_dim", "is_missing", "without"),
    [
        ("auto", 64, False, None),
        ("float32", 64, False, "runs bfloat16"),
        ("auto", 32, False, "head_dim"),
        ("auto", 64, True, "is not installed"),
    ],
)
def test_modes_of_a_matrix_on_a_gpu(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    head_dim: int,
    is_missing: bool,
    without: str | None,
) -> None:
    """Bug: a matrix ends at a refusal of FlashInfer, which it asked for itself, in a dtype or of a
    pair that it cannot run; or leaves it out where it can, or without a word."""
    for name, value in (("is_available", True), ("get_device_capability", (9, 0))):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(startup_options, "flashinfer_missing", lambda: is_missing)
    target = make_target(tmp_path, layers=1, head_dim=head_dim)
    asked = {"dtype": dtype, "all_options": False, "temperature": 0.0, "grammars": False}
    mode, console = run.Mode("auto", "auto"), Console(quiet=True)
    whole = cli_verify._Run(str(target), None, mode, None, [], asked, console)
    found, said = run.matrix_modes("auto", whole.refusal)
    backends = ["triton"] if without else ["flashinfer", "triton"]
    assert found == [(mode, b) for b in backends for mode in ("none", "piecewise", "full")]
    assert said is None if without is None else without in str(said)


def test_fail_exits_1_and_says_why(few: Path) -> None:
    """Bug: a failed check still exits 0, or the JSON is not the only thing on stdout."""
    args = ("--prompt-file", str(few), "--max-new-tokens", "8", "--min-acceptance", "15.9")
    result = verify(*args, "--bucket", "2")
    assert result.exit_code == 1
    assert "FAIL none torch bucket 2 together: acceptance:" in result.stdout
    result = verify(*args[:-2], "--bucket", "2", "--output-json", "/dev/full")
    assert result.exit_code == 2 and result.stdout.startswith("PASS: 1 runs"), "no verdict, or FAIL"
    result = verify(*args, "--bucket", "2", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["config"]["verdict"] == "FAIL"


def damaged_target(tmp_path: Path) -> Path:
    """The bundled target with a NaN in its last norm."""
    shutil.copytree(TINY_TARGET, tmp_path / "target")
    (path,) = (tmp_path / "target").glob("*.safetensors")
    tensors = load_file(path)
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, path)
    return tmp_path / "target"


def test_damaged_weights_fail_without_a_traceback(few: Path, tmp_path: Path) -> None:
    """Bug: a target whose logits are NaN ends every request before its first token, and judging
    nothing is an assertion, a division by zero or, worse, PASS."""
    args = (str(damaged_target(tmp_path)), "--draft", str(TINY_DRAFT), "--prompt-file", str(few))
    result = verify(*args, "--bucket", "2", "--max-new-tokens", "8")
    assert result.exit_code == 1, result.output
    assert "finite: 2 requests were stopped; request 0: the target's logits" in result.stdout
    assert "ends: " not in result.stdout, "stopped is not ended wrongly"


def test_damaged_weights_fail_the_sampled_mode_too(few: Path, tmp_path: Path) -> None:
    """Bug: with --temperature a target whose logits are NaN is refused input, exit code 2, as if
    nothing was found to be wrong with it."""
    args = (str(damaged_target(tmp_path)), "--draft", str(TINY_DRAFT), "--prompt-file", str(few))
    path = tmp_path / "verify.json"
    sampled = ("--temperature", "1", "--num-samples", "2", "--output-json", str(path))
    result = verify(*args, "--bucket", "2", *sampled)
    assert result.exit_code == 1, result.output
    assert "FAIL: finite: 4 requests were stopped; request 0: the target's" in result.stdout
    stored = json.loads(path.read_text())
    assert validate(stored) == [] and stored["config"]["verdict"] == "FAIL"
    assert stored["numbers"]["sampled"] == {"num_samples": 2, "num_stopped": 4}


def test_speculators_directory_alone(few: Path, tmp_path: Path) -> None:
    """Bug: a drafter that names its target stands as MODEL: the tokenizer is looked for in its own
    directory, the checks of the drafter are refused for want of one, and `--draft none` drafts."""
    drafter = as_speculators(tmp_path / "s", TINY_DRAFT, TINY_TARGET)
    args = (str(drafter), "--prompt-file", str(few), "--bucket", "1", "--max-new-tokens", "8")
    result = verify(*args, "--min-acceptance", "1.5", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["config"]["model"], found["config"]["draft"]) == ("target", "s")
    assert found["numbers"]["none_torch"]["bucket_1_alone"]["mean_acceptance_length"] > 1.5
    result = verify(*args, "--draft", "none", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["config"]["model"], found["config"]["draft"]) == ("target", None)
    assert "mean_acceptance_length" not in found["numbers"]["none_torch"]["bucket_1_alone"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--bucket", "0"), "integers from 1 up"),
        (("nowhere/at/all",), "nowhere/at/all"),
        (("--matrix", "--graph-mode", "full"), "--matrix runs every graph mode"),
        (("--graph-mode", "full", "--device", "cpu"), "captures CUDA graphs"),
        (("--draft", "none", "--min-acceptance", "2"), "--min-acceptance needs a drafter"),
        (("--min-acceptance", "16.5"), "a step commits at most 16 tokens; pass less"),
        (("--min-acceptance", "9", "--num-speculative-tokens", "5,7"), "at most 8 tokens"),
        (("--draft", "none", "--forced-acceptance"), "replaces a drafter's drafts"),
        (("--max-new-tokens", "1"), "no step would be checked"),
        (("--temperature", "1", "--forced-acceptance"), "leave out --temperature"),
        (("--min-acceptance", "2", "--forced-acceptance"), "and --min-acceptance"),
        (("--prompt-file", "missing.jsonl"), "missing.jsonl"),
        # Past every range check; in the JSON they would be no JSON.
        (("--tolerance", "nan"), "'--tolerance': nan: pass a finite number"),
        (("--tolerance", "inf"), "'--tolerance': inf: pass a finite number"),
        (("--min-identical", "nan"), "'--min-identical': nan: pass a finite number"),
        (("--min-acceptance", "nan"), "'--min-acceptance': nan: pass a finite number"),
        (("--output-json", str(TINY_TARGET)), "is a directory"),
    ],
)
def test_refusals(args: tuple[str, ...], message: str) -> None:
    """Bug: a bad option is a traceback or looks like a failed verification."""
    result = verify(*args)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())


def test_conversations_are_refused(tmp_path: Path) -> None:
    """Bug: of a prompt file's turns all but the first are left out."""
    path = tmp_path / "turns.jsonl"
    path.write_text('{"turns": ["a", "b"]}')
    result = verify("--prompt-file", str(path))
    assert result.exit_code == 2 and "verify takes single prompts" in result.stderr


def test_a_prompt_past_the_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a prompt that the models have no room for is refused behind the loading and the cells
    before it, with an option as its remedy that `verify` has not."""

    def load(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr("graphengine.api.Engine.from_pretrained", load)
    path = tmp_path / "ids.jsonl"
    path.write_text('{"prompt": [5]}\n' + json.dumps({"prompt": [5] * 4080}))
    result = verify("--prompt-file", str(path), "--bucket", "1")
    assert result.exit_code == 2, result.output
    told = " ".join(result.stderr.split())
    assert "4080 tokens, the context holds 4080" in told and "shorter ones" in told
    assert "--finish-in-plain-decode" not in told


def test_prompts_that_fill_the_context(tmp_path: Path) -> None:
    """Bug: no prompt has room for more than the token that its own rows say, and it is a PASS of
    a drafter that has drafted nothing."""
    path = tmp_path / "ids.jsonl"
    path.write_text('{"prompt": [5, 6, 7]}\n')
    args = ("--prompt-file", str(path), "--bucket", "1", "--max-model-len")
    result = verify(*args, "4")
    assert result.exit_code == 2, result.output
    assert "the context holds 4" in (told := " ".join(result.stderr.split()))
    assert "no step would be checked" in told
    assert verify(*args, "5").exit_code == 0


@pytest.mark.parametrize(
    ("prompt", "outside"),
    [("[5, 2048]", "[2048]"), ("[-1]", "[-1]"), ("[9999, 5, -2]", "[9999, -2]")],
)
def test_ids_outside_the_vocabulary(tmp_path: Path, prompt: str, outside: str) -> None:
    """Bug: a token id past the embedding is an IndexError, and on a GPU the end of the device; or
    of several one is named, and the next run is refused for another."""
    path = tmp_path / "ids.jsonl"
    path.write_text(f'{{"prompt": {prompt}}}\n')
    result = verify("--prompt-file", str(path), "--bucket", "1")
    assert result.exit_code == 2, result.output
    told = f"token ids {outside} lie outside the vocabulary of 2048"
    assert told in " ".join(result.stderr.split())


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("CUDA out of memory. Tried")])
def test_out_of_memory_is_no_verdict(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Bug: a pair that does not fit is a traceback, and by its exit code a failed verification."""

    def engine(*args: Any, **kwargs: Any) -> Any:
        raise error

    monkeypatch.setattr(Engine, "from_pretrained", engine)
    result = verify("--bucket", "1")
    assert result.exit_code == 2 and "FAIL" not in result.output
    message = " ".join(result.stderr.split())
    assert "out of memory (" in message and "lower --max-model-len" in message
    monkeypatch.setattr(cli_options, "out_of_memory", lambda error: None)
    assert verify("--bucket", "1").exception is error


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EPIPE])
def test_a_verdict_that_nobody_reads_is_no_fail(
    monkeypatch: pytest.MonkeyPatch, few: Path, number: int
) -> None:
    """Bug: behind a full disk, or a reader that left, PASS exits as a failed verification does."""

    def echo(text: str) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("graphengine.verify.report.click.echo", echo)
    result = verify("--prompt-file", str(few), "--bucket", "1", "--max-new-tokens", "2")
    assert result.exit_code == 2, result.output
    assert os.strerror(number) in result.stderr


def test_a_result_that_cannot_be_written(few: Path, tmp_path: Path) -> None:
    """Bug: a place that cannot be written is found after minutes of judging, or is a traceback that
    exits as a failed verification does."""
    (tmp_path / "file").write_text("")
    args = ("--prompt-file", str(few), "--bucket", "1", "--max-new-tokens", "4")
    result = verify(*args, "--output-json", str(tmp_path / "file" / "verify.json"))
    assert result.exit_code == 2, result.output
    assert "--output-json" in result.stderr and "every token" not in result.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_matrix_on_a_gpu(dtype: str, tmp_path: Path) -> None:
    """Bug: a captured step says something else than the plain model, in some mode, bucket or mix;
    or the pages and plans of the teacher disturb those of a captured loop."""
    path = tmp_path / "verify.json"
    result = verify(
        *("--matrix", "--device", "cuda", "--dtype", dtype, "--bucket", "1,8"),
        *("--no-compile", "--output-json", str(path)),
    )
    assert result.exit_code == 0, " | ".join(result.output.splitlines()[-3:])  # a reason is a line
    modes = {name.split("_")[0] for name in json.loads(path.read_text())["numbers"]}
    assert modes == {"plain", "none", "piecewise", "full"}


def test_limits_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the bundled pair's floor is held against other blocks, texts or engines than it was
    measured with, not against the pair's own where it is named, or wins over --min-acceptance;
    float32 has bfloat16's tolerance or share, or 0 the default's; a seed is refused though cases
    draw."""
    runs: list[cli_verify._Run] = []
    monkeypatch.setattr(cli_verify._Run, "compare_tokens", lambda run, _: not runs.append(run))
    for typed, dtype, floor, tolerance in (
        ("", "float32", 13.5, 0.2),
        ("tiny", "float32", 13.5, 0.2),
        ("--draft tiny", "float32", 13.5, 0.2),
        ("--draft ngram", "float32", None, 0.2),
        ("tiny-hybrid", "float32", None, 0.2),
        ("--min-acceptance 5 --tolerance 0.1", "float32", 5, 0.1),
        ("--num-speculative-tokens 7", "float32", None, 0.2),
        ("--max-new-tokens 63 --tolerance 0 --min-identical 0", "float32", None, 0.0),
        ("--all-options", "float32", None, 0.2),
        ("", "bfloat16", 13.5, 0.3),
        ("--all-options", "bfloat16", None, 0.3),
        ("--all-options --seed 3", "float32", None, 0.2),
        ("--all-options --tolerance 0.1", "bfloat16", None, 0.1),
    ):
        assert verify(*typed.split()).exit_code == 0
        limits = runs[-1].limits(dtype, runs[-1].draft)
        assert (limits.min_acceptance, limits.tolerance_nats) == (floor, tolerance), typed
        least = 0.0 if "--min-identical 0" in typed else 0.999 if dtype == "float32" else 0.95
        assert limits.min_identical == least, typed
        assert limits.max_logprob_error_nats == (1e-3 if dtype == "float32" else 0.5), typed
        assert runs[-1].limits(dtype, None).min_acceptance is None


def test_probes_do_not_count_for_the_floor() -> None:
    """Bug: prompts on which the bundled target is unsure count for the floor that was measured
    without them; or of other prompts not all count."""
    options: dict[str, Any] = {"temperature": 0.0, "prompt_file": None, "min_acceptance": None}
    options |= {"max_new_tokens": 128, "num_speculative_tokens": None}
    options |= dict.fromkeys(("raw", "forced_acceptance", "all_options"), False)
    prompts, num_counted = cli_verify._prompts(dict(options), bundled=True)
    lines = len(cli_verify.PROMPTS.read_text().splitlines())
    assert num_counted == lines < len(prompts)
    assert cli_verify._prompts(dict(options), bundled=False) == (prompts, None)


def test_what_is_judged_is_speculation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a slow or bad drafter is left behind in the middle of an answer, and what plain decoding
    says behind that passes as the drafter's; or the plain engine drafts."""
    runs: list[cli_verify._Run] = []
    monkeypatch.setattr(cli_verify._Run, "compare_tokens", lambda run, _: not runs.append(run))
    assert verify("--num-speculative-tokens", "7", "--page-size", "8").exit_code == 0
    (run,) = runs
    for drafter, lengths in ((run.draft, (7, 7)), (None, ())):
        with run.engine(run.mode, drafter) as engine:
            config = engine.config
        assert (config.fallback, config.acceptance_floor) == (False, 0.0)
        assert (config.num_speculative_tokens, config.page_size) == (lengths, 8)


def test_brackets_in_notes_are_no_styles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Bug: what stands in brackets is left out of notes: without FlashInfer `--matrix` names the
    extra graphengine, where it is graphengine[cuda], and a file or drafter has another name; one
    that looks like a style's end is a traceback."""

    def nothing(*args: Any) -> Any:
        raise RuntimeError("no engine")

    missing = "is not installed; install the extra graphengine[cuda]"
    mode = run.Mode("none", "torch")
    monkeypatch.setattr(run, "matrix_modes", lambda *_: ([mode], missing))
    monkeypatch.setattr(cli_verify._Run, "engine", nothing)
    screen = io.StringIO()
    console = Console(file=screen, width=200)
    options: dict[str, Any] = {"buckets": (1,), "matrix": True, "device": "cuda", "seed": 0}
    options |= {"num_samples": 5, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    options |= dict.fromkeys(("forced_acceptance", "all_options", "as_json", "prompt_file"))
    options |= {"output_json": tmp_path / "a[b].json", "commit": "abc"}
    asked = cli_verify._Run("target", "v[b]/x[/b]", mode, None, [[1]], options, console)
    for compare in (lambda: asked.compare_tokens(None), asked.compare_draws):
        with pytest.raises(RuntimeError, match="no engine"):
            compare()
    finish("target", None, [], [], {"num_tokens": 1}, "PASS", options, console)
    told = screen.getvalue().splitlines()
    assert told[0] == f"left out: {missing}"
    assert told[1] == "drawing 5 x 1 with drafter v[b]/x[/b]"
    assert told[2] == f"wrote {tmp_path}/a[b].json"
