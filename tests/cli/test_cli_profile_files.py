"""`graphengine profile --read`: exports and traces of other runs, and the facts beside them."""

import gzip
import json
from pathlib import Path

import click
import pytest

from graphengine import names
from graphengine.checkpoints.hub import TINY_DRAFT, TINY_TARGET
from graphengine.cli.options import deliver
from graphengine.measure import profile_run
from graphengine.measure.report import shorten
from tests.support import nsys_exports as exports
from tests.support.command_line import document, invoke


@pytest.mark.parametrize("preset", ["graph", "node"])
def test_profile_reads_an_export(tmp_path: Path, preset: str) -> None:
    """Bug: a user's own nsys file gives other numbers than the reader, or needs a model."""
    path = exports.write_export(tmp_path / "mine.sqlite", preset=preset)
    told = document(invoke("profile", "--read", path, "--json"))
    assert told["config"]["sources"] == {"mine": "a recorded file"}
    found = told["numbers"]["mine"]
    assert found["wall_mean_us"] == 100.0
    assert found["idle_by_class"]["host_us"] == 67.5


@pytest.mark.parametrize("name", ["mine.sqlite.gz", "mine.sqlite", "mine.bs1.sqlite.gz"])
def test_a_report_is_called_by_its_file(tmp_path: Path, name: str) -> None:
    """Bug: the report of a file has its endings in its name, so that the packed one's numbers stand
    at another key than the same file's."""
    plain = exports.write_export(tmp_path / "plain")
    packed = gzip.compress(plain.read_bytes()) if name.endswith(".gz") else plain.read_bytes()
    (tmp_path / name).write_bytes(packed)
    done = invoke("profile", "--read", tmp_path / name, "--json")
    assert list(document(done)["numbers"]) == ["mine"]
    assert "mine: mean of" in done.stderr


def test_kernels_are_as_many_as_asked_for(tmp_path: Path) -> None:
    """Bug: --top changes nothing; or kernels below it are lost from the JSON, too."""
    path = exports.write_export(tmp_path / "mine.sqlite", preset="node")
    kernels = document(invoke("profile", "--read", path, "--json"))["numbers"]["mine"]["kernels"]
    for top in (1, 2):
        shown = invoke("profile", "--read", path, "--top", top).stderr
        lines = [line.split() for line in shown.splitlines()]
        (at,) = (i for i, line in enumerate(lines) if line[-1:] == ["kernel"])
        rows = [line for line in lines[at + 2 :] if line]
        named = [shorten(kernel).split()[-1] for kernel in kernels][:top]
        assert [row[-1] for row in rows] == [*named, "more"]
        assert rows[-1][-2] == str(len(kernels) - top)


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


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--draft", "ngram"),
        ("--bucket", "2"),
        ("--dtype", "float32"),
        ("--num-speculative-tokens", "3"),
        ("--draft-quantization", "fp8"),
    ],
)
def test_options_that_say_what_bytes_are_read(tmp_path: Path, option: str, value: str) -> None:
    """Bug: what says how many bytes MODEL reads is refused beside --read, as an option of a run;
    or without MODEL it is taken, and changes nothing."""
    path = exports.write_export(tmp_path / "mine.sqlite")
    done = invoke("profile", "--read", path, option, value)
    assert done.exit_code == 2
    assert f"{option} beside --read is for the bytes of MODEL" in done.stderr
    named = ["profile", TINY_TARGET, "--draft", TINY_DRAFT, "--read", path]
    assert invoke(*named, option, value).exit_code == 0


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


def test_first_tokens_of_a_file(tmp_path: Path) -> None:
    """Bug: a trace of prefills, without facts beside it, is said to hold no steps."""
    path = exports.write_chrome_trace(tmp_path / "torch.json")
    path.write_text(path.read_text().replace(f'"{names.STEP}"', '"prefill"'))
    assert "with --prefill, prefills" in invoke("profile", "--read", path).stderr
    result = invoke("profile", "--read", path, "--prefill", "--json")
    assert document(result)["numbers"]["torch"]["busy_mean_us"] == 27.0
    assert "each step is a prefill" in result.stderr


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"unprofiled_step_ms": 1}',
        '{"read_gbps": NaN}',
        '{"segment_bytes": {"a": "b"}}',
        '{"segment_bytes": {"a": NaN}, "read_gbps": 1}',
    ],
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


def test_which_file_could_not_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: of two files one could not be made, and the message does not say which."""
    picture = tmp_path / "step.svg"
    options = {"as_json": False, "output_json": tmp_path / "x.json", "plot": picture, "commit": "a"}

    def draw(suffix: str) -> bytes:
        raise ValueError(f"no step to draw as {suffix}")

    with pytest.raises(click.ClickException) as told:
        deliver(options, "profile", {"step_ms": 1.0}, {}, draw)
    assert told.value.message == f"{picture}: no step to draw as .svg"
    assert capsys.readouterr() == ("", f"wrote {tmp_path / 'x.json'}\n")
