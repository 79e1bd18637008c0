"""`verify`: the judging on made-up numbers, teacher forcing against transformers, the command."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from graphengine.api import Engine
from graphengine.checkpoints.hub import TINY_DRAFT, TINY_TARGET
from graphengine.cli import options as cli_options
from graphengine.cli import verify as cli_verify
from graphengine.cli.main import main
from graphengine.decode.metrics import Acceptance
from graphengine.profiles.result_schema import validate
from graphengine.verify import teacher
from graphengine.verify.check import (
    MIN_IDENTICAL,
    Limits,
    Place,
    decide,
    decode,
    disagreement,
    judge,
    mixed,
)
from graphengine.verify.report import _table, describe
from graphengine.verify.run import Cell, CellResult, compare_with_plain, numbers, verify_mode
from graphengine.verify.teacher import Scores, teacher_force
from graphengine.verify.told import Transcript, wrong_end
from tests.support.checkpoints import as_speculators, make_drafter, make_target
from tests.support.dflash_reference import load_target, run_target

STOP = 9


def transcript(
    output: list[int], committed: list[int], reason: Any = "length", budget: int | None = None
) -> Transcript:
    acceptance = Acceptance(3)
    for count in committed[1:]:
        acceptance.add(count - 1)
    return Transcript([1], output, committed, budget or len(output), reason, acceptance)


def scores(best: list[int], regret: list[float]) -> Scores:
    return Scores(regret, best, [-0.5] * len(best))


def test_places_name_step_and_row() -> None:
    """Bug: the report points at another step or row than the one that emitted the token."""
    one = transcript([5, 6, 7, 8, 4], [1, 3, 1])
    other = transcript([5, 6], [1, 1])
    report = judge(
        [one, other],
        [scores([5, 6, 7, 2, 3], [0, 0, 0, 0.7, 0.1]), scores([5, 6], [0, 0])],
        0.2,
        [],
    )
    place = report.first_true
    assert place is not None
    assert (place.request, place.index, place.step, place.row, place.num_committed) == (
        *(0, 3, 1, 2, 3),
    )
    assert (place.emitted_id, place.best_id, place.regret_nats) == (8, 2, 0.7)
    assert [(tie.index, tie.step) for tie in report.ties] == [(4, 2)]
    assert (report.num_tokens, report.num_identical, report.num_true) == (7, 5, 1)
    assert report.max_regret_nats == 0.7
    assert report.mean_regret_nats == pytest.approx(0.8 / 7)


def test_a_tie_passes_and_re_anchors() -> None:
    """Bug: a benign tie fails, or everything behind it counts as different."""
    report = judge([transcript([5, 6, 7], [1, 2])], [scores([5, 2, 7], [0, 0.19, 0])], 0.2, [])
    assert report.first_true is None and len(report.ties) == 1
    assert decide(report, Limits(min_identical=0.6)) == {}
    assert set(decide(report, Limits(min_identical=0.7))) == {"identical"}
    assert set(decide(report, Limits(min_identical=0.0, tolerance_nats=0.1))) == set()


def test_nan_fails() -> None:
    """Bug: NaN passes because `nan > tolerance` is false."""
    report = judge([transcript([5, 6], [1, 1])], [scores([5, 6], [0, math.nan])], 0.2, [])
    assert report.num_nonfinite == 1 and report.first_true is not None
    assert {"finite", "regret"} <= set(decide(report, Limits()))


def test_acceptance_counts_the_first_prompts_only() -> None:
    """Bug: the floor is compared with other prompts than it was measured on."""
    good, bad = transcript([5] * 5, [1, 4]), transcript([5] * 3, [1, 1, 1])
    perfect = [scores([5] * 5, [0.0] * 5), scores([5] * 3, [0.0] * 3)]
    limits = Limits(min_acceptance=3.9)
    assert decide(judge([good, bad], perfect, 0.2, [], num_counted=1), limits) == {}
    assert set(decide(judge([good, bad], perfect, 0.2, []), limits)) == {"acceptance"}


@pytest.mark.parametrize(
    ("output", "reason", "budget", "right"),
    [
        ([1, 2, STOP], "stop", 8, True),
        ([1, 2, STOP], "length", 3, False),
        ([1, STOP, 2], "length", 3, False),
        ([1, 2, 3], "length", 3, True),
        ([1, 2, 3], "length", 4, False),
        ([1, 2, 3], "stop", 3, False),
        ([1, 2, 3], "abort", 3, False),
    ],
)
def test_ends(output: list[int], reason: str, budget: int, right: bool) -> None:
    """Bug: lost tokens, or surplus ones behind a stop token, pass since each one is right."""
    one = transcript(output, [1, len(output) - 1], reason, budget)
    report = judge([one], [scores(output, [0.0] * 3)], 0.2, [STOP])
    assert ("ends" in decide(report, Limits())) != right


def test_disagreement() -> None:
    """Bug: another graph mode's tokens are not compared, or a shorter output passes."""
    a, b = transcript([5, 6, 7], [1, 2]), transcript([5, 2, 7], [1, 2])
    assert disagreement([a], [a]) is None
    assert "token 1" in str(disagreement([a], [b]))
    assert "length" in str(disagreement([a], [transcript([5, 6], [1, 1])]))


def test_mixed_order() -> None:
    """Bug: the mix drops or repeats a prompt, or all end together."""
    order, budgets = mixed([5, 50, 10, 40, 20], 100)
    assert sorted(order) == list(range(5)) and order[:2] == [0, 1]
    assert len(set(budgets)) > 2 and min(budgets) >= 1


@pytest.mark.parametrize("chunk", [1, 3, 7, 256])
def test_teacher_equals_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """Bug: a row's logits judge the wrong token, or a chunk boundary loses or shifts rows."""
    monkeypatch.setattr(teacher, "CHUNK", chunk)
    target = make_target(tmp_path, tie=False)
    model = load_target(target)
    generator = torch.Generator().manual_seed(0)
    with Engine.from_pretrained(target, buckets=(1,), page_size=4, max_model_len=64) as engine:
        loop = engine.built.loop
        for num_prompt, num_output in ((1, 1), (3, 5), (6, 1), (7, 14)):
            ids = torch.randint(0, 500, (num_prompt + num_output,), generator=generator).tolist()
            found = teacher_force(loop, ids[:num_prompt], ids[num_prompt:])
            logprobs = run_target(model, ids).logits.log_softmax(-1)[num_prompt - 1 : -1]
            emitted = torch.tensor(ids[num_prompt:])
            own = logprobs.gather(1, emitted[:, None])[:, 0]
            assert found.best_ids == logprobs.argmax(-1).tolist()
            torch.testing.assert_close(torch.tensor(found.logprob), own, atol=2e-4, rtol=1e-4)
            expected = logprobs.amax(-1) - own
            torch.testing.assert_close(
                torch.tensor(found.regret_nats), expected, atol=2e-4, rtol=1e-4
            )
            assert loop.allocator.num_free == loop.allocator.num_usable


def test_decode_runs_in_the_bucket_asked_for(tmp_path: Path) -> None:
    """Bug: `bucket 4, alone` runs in bucket 1, so padded rows are never tried."""
    target = make_target(tmp_path / "target", tie=False)
    drafter = make_drafter(tmp_path / "drafter", target)
    prompts = [[1, 2], [3, 4, 5], [6], [7, 8, 9, 10], [11]]
    with Engine.from_pretrained(target, drafter, buckets=(1, 2, 4), max_model_len=64) as engine:
        loop: Any = engine.built.loop
        used: list[tuple[int, int]] = []
        queue_step = loop.first._queue_step

        def spy() -> None:
            used.append((loop.first.bucket.size, len(loop.running)))
            queue_step()

        loop.first._queue_step = spy
        outputs = set()
        for bucket, alone in ((4, True), (1, False), (2, False), (None, False)):
            used.clear()
            found = decode(loop, prompts, [9] * 5, (), bucket=bucket, one_by_one=alone)
            outputs.add(str([t.output_ids for t in found]))
            assert all(sum(t.committed) == len(t.output_ids) == 9 for t in found)
            if bucket is not None:
                assert {size for size, _ in used} == {bucket}
                assert max(rows for _, rows in used) == (1 if alone else bucket)
            else:
                assert {size for size, _ in used} >= {4, 1}
        assert len(outputs) == 1 and loop.first.only_bucket is None


# --- the command ---


def test_modes_are_compared_prompt_by_prompt(tmp_path: Path) -> None:
    """Bug: a graph mode that says other tokens than another one passes; or a mixed cell reports in
    the order in which it ran, so that prompts are judged by other prompts' numbers."""
    target = make_target(tmp_path / "target")
    prompts = [[3] * n for n in (9, 2, 5, 7)]
    cells: Any = [(2, "mixed")]
    options: Any = {"max_new_tokens": 8, "limits": Limits()}
    with Engine.from_pretrained(target, buckets=(2,), max_model_len=64) as engine:
        (first,) = verify_mode(engine.built, "none torch", prompts, cells, **options)
        assert [t.prompt_ids for t in first.transcripts] == prompts
        (same,) = verify_mode(engine.built, "full torch", prompts, cells, first=[first], **options)
        assert not same.failed
        one, *rest = first.transcripts
        other = one._replace(output_ids=[*one.output_ids[:-1], one.output_ids[-1] ^ 1])
        changed = replace(first, transcripts=[other, *rest])
        (found,) = verify_mode(
            engine.built, "full torch", prompts, cells, first=[changed], **options
        )
        assert list(found.failed) == ["modes"]
        (compared,) = compare_with_plain([first], [changed])
        told = numbers([compared])["none_torch"]["bucket_2_mixed"]
        assert (told["num_same_as_plain"], told["num_prompts"]) == (3, 4)


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
        *("--matrix", "--prompt-file", str(few), "--max-new-tokens", "24", "--bucket", "1,2"),
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
        (("--draft", "none", "--forced-acceptance"), "replaces a drafter's drafts"),
        (("--temperature", "1", "--forced-acceptance"), "leave out --temperature"),
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


@pytest.mark.parametrize("prompt", ["[5, 2048]", "[-1]"])
def test_ids_outside_the_vocabulary(tmp_path: Path, prompt: str) -> None:
    """Bug: a token id past the embedding is an IndexError, and on a GPU the end of the device."""
    path = tmp_path / "ids.jsonl"
    path.write_text(f'{{"prompt": {prompt}}}\n')
    result = verify("--prompt-file", str(path), "--bucket", "1")
    assert result.exit_code == 2, result.output
    assert "2048" in result.stderr or "-1" in result.stderr


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
    assert result.exit_code == 0, result.output
    modes = {name.split("_")[0] for name in json.loads(path.read_text())["numbers"]}
    assert modes == {"plain", "none", "piecewise", "full"}


def test_what_passes_unless_told_otherwise() -> None:
    """Bug: a default is so wide that faults pass: a token 0.3 nats below the best, one of ten in
    bfloat16, one of a hundred in float32."""
    report = judge([transcript([5], [1])], [scores([2], [0.3])], Limits().tolerance_nats, [])
    assert "regret" in decide(report, Limits(min_identical=0.0))
    for dtype, share in (("bfloat16", 10), ("float32", 100)):
        output = [5] * share
        judged = scores([2, *output[1:]], [0.1, *[0.0] * (share - 1)])
        report = judge([transcript(output, [1] * share)], [judged], 0.2, [])
        limits = Limits(min_identical=MIN_IDENTICAL[dtype])
        assert set(decide(report, limits)) == {"identical"}


def test_the_worst_prompt_is_in_the_table() -> None:
    """Bug: "least" is the best prompt's acceptance, behind which a lost one hides."""
    ran = [transcript([5] * 5, [1, 4]), transcript([5] * 3, [1, 1, 1])]
    report = judge(ran, [scores([5] * n, [0.0] * n) for n in (5, 3)], 0.2, [])
    cell = CellResult(cell=Cell("m", 1, "alone"), report=report, failed={}, transcripts=ran)
    cells = {str(column.header): list(column.cells) for column in _table([cell]).columns}
    assert (cells["accept"], cells["least"]) == (["2.00"], ["1.00"])


def test_limits_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the bundled pair's floor is held against other blocks, texts or engines than it was
    measured with, or wins over --min-acceptance; float32 has bfloat16's tolerance."""
    runs: list[cli_verify._Run] = []
    monkeypatch.setattr(cli_verify._Run, "compare_tokens", lambda run, _: not runs.append(run))
    for typed, dtype, floor, tolerance in (
        ("", "float32", 13.5, 0.2),
        ("--min-acceptance 5 --tolerance 0.1", "float32", 5, 0.1),
        ("--num-speculative-tokens 7", "float32", None, 0.2),
        ("--max-new-tokens 63", "float32", None, 0.2),
        ("--all-options", "float32", None, 0.2),
        ("--all-options", "bfloat16", None, 0.3),
        ("--all-options --tolerance 0.1", "bfloat16", None, 0.1),
    ):
        assert verify(*typed.split()).exit_code == 0
        limits = runs[-1].limits(dtype, runs[-1].draft)
        assert (limits.min_acceptance, limits.tolerance_nats) == (floor, tolerance), typed
        assert runs[-1].limits(dtype, None).min_acceptance is None


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


def test_a_difference_is_told_where_it_stands() -> None:
    """Bug: a step's last token, the target's own, is called an accepted draft; or what stands in
    front of one of the first tokens is left out."""
    one = transcript(list(range(20)), [1, 3, 4, 4, 4, 4])
    report = judge([one], [scores(list(range(20)), [0.0] * 20)], 0.2, [])
    result = CellResult(cell=Cell("full", 1, "alone"), report=report, failed={}, transcripts=[one])
    for index, step, row, count, role, after in (
        (0, 0, 0, 1, "the prefill's token", []),
        (2, 1, 1, 3, "row 1 of 3 committed, accepted draft", [0, 1]),
        (3, 1, 2, 3, "row 2 of 3 committed, the target's own token", [0, 1, 2]),
        (18, 5, 2, 4, "accepted draft", list(range(6, 18))),
    ):
        text = describe(result, Place(0, index, step, row, count, index, 99, 0.5, -1.0), None)
        assert f"token {index} (" in text and f"{role})" in text, text
        assert f"after {after}, then {list(range(index + 1, 20))[:12]}" in text


def test_a_context_that_is_full(tmp_path: Path) -> None:
    """Bug: an answer that ends with the context counts as cut off too early; or the bucket that was
    asked for stays for whoever decodes next, the slot of a state with who judged."""
    target = make_target(tmp_path, layers=1)
    with Engine.from_pretrained(target, buckets=(1, 2), max_model_len=16) as engine:
        loop = engine.built.loop
        (found,) = decode(loop, [[3] * 12], [99], (), bucket=2)
        assert loop.first.only_bucket is None
        assert len(teacher_force(loop, [3] * 12, found.output_ids).logprob) == 4
        assert loop.state_slots.num_free == loop.state_slots.num_usable
    assert (found.budget, len(found.output_ids), found.finish_reason) == (4, 4, "length")
    assert wrong_end(found, (), None) is None
