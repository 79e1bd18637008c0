"""What commands leave behind, and what they refuse before they begin."""

import json
import signal
import sys
import warnings
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner

from graphengine import report
from graphengine.api import Chunk, Engine
from graphengine.checkpoints import sources
from graphengine.checkpoints.hub import resolve
from graphengine.checkpoints.pairs import read_json
from graphengine.cli import answers
from graphengine.cli.cache import _CACHE_VARIABLES
from graphengine.cli.main import main
from graphengine.cli.options import check_places, deliver
from graphengine.decode.guards import EngineWarning
from graphengine.decode.metrics import StartupMetrics
from graphengine.measure import rates
from graphengine.prompts import read_prompt_file
from graphengine.startup import artifact
from tests.support.command_line import ENV, Run, refused, shell, streaming
from tests.test_report import answer

SMALL = ["--bucket", "1", "--device", "cpu"]
BENCH = [*SMALL, "--num-iters", "2", "--warmup", "0", "--output-len", "16", "--input-len", "4"]


@pytest.mark.parametrize(
    ("command", "args"),
    [
        ("bench", [*BENCH, "--plot", "step.svg"]),
        ("verify", [*SMALL, "--max-new-tokens", "4", "--prompt-file", "one.jsonl"]),
        ("profile", ["--device", "cpu", "--num-steps", "2", "--warmup", "1", "--plot", "step.svg"]),
    ],
)
def test_one_place_that_fails_costs_no_other(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, args: list[str]
) -> None:
    """Bug: minutes of measuring are lost, JSON and picture too, since one file cannot be written:
    the disk was full."""
    monkeypatch.chdir(tmp_path)
    Path("one.jsonl").write_text('{"prompt": "a"}\n')
    where = [command, str(target), "--draft", "none", *args, "--output-json", "/dev/full"]
    done = CliRunner().invoke(main, [*where, "--json"])
    assert done.exit_code == (2 if command == "verify" else 1)  # there 1 is FAIL
    assert "/dev/full" in done.stderr and "No space left" in done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads(done.stdout)["numbers"]
    assert Path("step.svg").exists() == ("step.svg" in args)


def test_one_file_for_the_result_and_its_picture(tmp_path: Path) -> None:
    """Bug: minutes of measuring are written, and replaced by the picture of them."""
    (tmp_path / "b.svg").symlink_to(tmp_path / "a.svg")
    options = {"plot": tmp_path / "a.svg", "output_json": tmp_path / "b.svg"}
    with pytest.raises(ValueError, match=r"both .*a\.svg.*another path"):
        check_places(options)


def test_no_file_that_is_read_is_replaced(tmp_path: Path) -> None:
    """Bug: verify's prompts, or the trace that profile reads, are replaced by the result."""
    (tmp_path / "b").symlink_to(tmp_path / "a")
    for name, option in (("prompt_file", "--prompt-file"), ("file", "--read")):
        with pytest.raises(ValueError, match=rf"would replace what {option} reads; choose"):
            check_places({name: tmp_path / "a", "output_json": tmp_path / "b"})


def test_a_link_that_leads_to_itself(tmp_path: Path) -> None:
    """Bug: a file to write or read that is such a link ends in a traceback, where it lies in one
    behind minutes of measuring."""
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(ValueError, match=r"loop: cannot be written .*leads to itself"):
        check_places({"output": loop})
    with pytest.raises(ValueError, match=r"loop.x: cannot be written .*no such folder"):
        check_places({"output_json": loop / "x"})
    check_places({"output_json": tmp_path / "x", "prompt_file": loop})  # its reader refuses it


def test_a_link_into_a_folder_that_is_not_there(tmp_path: Path) -> None:
    """Bug: the result of minutes is lost behind it, as folders are made beside a link alone."""
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "gone" / "x.json")
    with pytest.raises(ValueError, match=r"link.json: cannot be written \(no such folder"):
        check_places({"output_json": link})


@pytest.mark.parametrize("name", ["output", "plot", "output_json"])
def test_a_dash_is_no_file(name: str) -> None:
    """Bug: `-`, stdout for other programs, makes a file of that name, and the pipe gets nothing."""
    with pytest.raises(ValueError, match=r"--\S+ -: goes to a file, not to stdout"):
        check_places({"output_json": None, name: Path("-")})


def test_a_full_stdout_costs_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: where stdout is full or closed, the JSON that nobody gets costs the result file too; or
    its loss is not told."""

    def full(text: str, err: bool = False) -> None:
        if not err:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(click, "echo", full)
    options = {"as_json": True, "output_json": tmp_path / "x.json", "plot": None, "commit": "abc"}
    with pytest.raises(OSError, match="No space left"):
        deliver(options, "profile", {"step_ms": 1.0}, {}, lambda suffix: b"")
    assert json.loads((tmp_path / "x.json").read_text())["numbers"] == {"step_ms": 1.0}
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(click.BadParameter, match="stdout is closed"):
        main.main(["graphs", "--json"], standalone_mode=False)


def test_steps_are_as_many_as_asked_for(target: Path) -> None:
    """Bug: `bench --num-iters 5` times the whole first round, 499 steps."""
    args = ["bench", str(target), "--draft", "none", *SMALL, "--input-len", "4", "--json"]
    done = CliRunner().invoke(main, [*args, "--num-iters", "5", "--output-len", "200"])
    assert done.exit_code == 0, done.output
    (mode,) = [v for k, v in json.loads(done.stdout)["numbers"].items() if k.startswith("none")]
    assert mode["bucket_1_input_4"]["num_steps"] == 5


@pytest.mark.parametrize("kind", [[], ["--prefill"]])
def test_no_floor_of_a_gpu_beside_the_cpu(
    target: Path, monkeypatch: pytest.MonkeyPatch, kind: list[str]
) -> None:
    """Bug: on a machine with a GPU `bench --device cpu` says how far the CPU's steps are from the
    GPU's floor, and takes 4 GiB of that to measure it."""
    monkeypatch.setattr(rates, "read_bandwidth_gbps", lambda: 4000.0)
    monkeypatch.setattr(rates, "matmul_tflops", lambda: 700.0)
    args = ["bench", str(target), "--draft", "none", *SMALL, "--input-len", "4", "--json", *kind]
    done = CliRunner().invoke(main, [*args, "--num-iters", "2", "--output-len", "16"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["numbers"]["read_bandwidth_gbps"] == 0
    assert "floor_ms" not in done.stdout and "roofline" not in done.stdout


def test_results_say_every_option(
    target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: what a number was measured with is not in its result: the page size, the fallback, the
    steps that were left out first, the seed of the prompts; or the memory that it took."""
    monkeypatch.setattr("graphengine.measure.bench.gpu_memory", lambda: {"allocated_bytes": 7})
    args = ["bench", str(target), "--draft", str(draft), *BENCH, "--page-size", "8", "--json"]
    found = json.loads(CliRunner().invoke(main, [*args, "--seed", "3"]).stdout)
    config, numbers = found["config"], found["numbers"]
    assert numbers.keys() == {"read_bandwidth_gbps", "none_torch"}
    assert numbers["none_torch"].keys() == {"startup", "bucket_1_input_4", "memory"}
    assert numbers["none_torch"]["memory"] == {"allocated_bytes": 7}
    said = {"model": target.name, "draft": draft.name, "simulated_acceptance": None}
    said |= {"output_len": 16, "num_iters": 2, "warmup": 0, "seed": 3}
    told = {"options", "modes", "token_digests", "tokens_equal_across_modes"}
    assert {name: config[name] for name in config if name not in told} == said
    assert config.keys() >= told and config["tokens_equal_across_modes"] is True
    (mode,) = config["modes"].values()
    assert mode["page_size"] == config["options"]["page_size"] == 8
    assert mode["dtype"] == "float32" and mode["fallback"] is False


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["verify", "--top-k", "5"], ["top_k 5", "temperature above 0"]),
        (["verify", "--top-p", "0.5"], ["top_p 0.5", "temperature above 0"]),
        (["bench", "--draft", "none", "--simulate-acceptance", "3"], ["needs a drafter"]),
        (["profile", "--draft", "none", "--simulate-acceptance", "3"], ["needs a drafter"]),
        (["graphs", "--draft", "none", "--draft-quantization", "fp8"], ["needs a drafter"]),
        (["graphs", "--draft", "ngram", "--draft-quantization", "fp8"], ["leave it out"]),
        (["verify", "--num-samples", "9"], ["--num-samples is of draws", "--temperature"]),
        (["verify", "--seed", "9"], ["--seed is of draws", "--temperature"]),
        (["verify", "--commit", "9"], ["--commit is recorded by --output-json"]),
        (["bench", "--commit", "9"], ["--commit is recorded by --output-json"]),
        (["profile", "--commit", "9"], ["--commit is recorded by --output-json"]),
        (["verify", "--temperature", "1", "--tolerance", "1"], ["--tolerance is of greedy"]),
        (["verify", "--temperature", "1", "--min-identical", "1"], ["--min-identical is of"]),
        (["profile", "--read", "a.sqlite"], ["--device is of a run", "leave it out"]),
    ],
)
def test_what_would_change_nothing(args: list[str], parts: list[str]) -> None:
    """Bug: an option that means nothing here is taken in silence and read as if it did."""
    refused(CliRunner().invoke(main, [*args, "--device", "cpu"]), *parts)


@pytest.mark.parametrize("key", ["max_new_tokens", "system"])
def test_unknown_keys_of_a_prompt_file(tmp_path: Path, key: str) -> None:
    """Bug: a line asks for 5 tokens, and gets 256, since nobody reads that key."""
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "a", key: 5}))
    with pytest.raises(ValueError, match=r"line 1.*no other key"):
        read_prompt_file(path)


@pytest.mark.slow
@pytest.mark.parametrize("off", ["TORCHINDUCTOR_FORCE_DISABLE_CACHES", "TORCH_COMPILE_DISABLE"])
def test_an_artifact_without_code(tmp_path: Path, target: Path, off: str) -> None:
    """Bug: with torch's caches or its compiler off `compile --output` packs an artifact without
    code, and says that it was written."""
    env = ENV | {"GRAPHENGINE_CACHE": str(tmp_path), off: "1"}
    packed = tmp_path / "a.tar.gz"
    done = shell("compile", str(target), "--draft", "none", "--output", str(packed), env=env)
    assert done.returncode == 2, done.stderr
    assert off in done.stderr and not packed.exists()


def test_unreadable_is_not_damaged(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a file of another user is called damaged, and 16 GB are fetched again; or for a folder
    of theirs we say that our cache cannot be written."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(sources, "safe_open", fail)
    monkeypatch.setattr("os.access", lambda *args: False)
    with pytest.raises(ValueError, match="no permission"):
        sources.read_headers(target)
    monkeypatch.setattr(Path, "read_text", fail)
    with pytest.raises(ValueError, match=r"Permission denied.*make it readable"):
        read_json(tmp_path / "config.json")
    monkeypatch.setattr(Path, "stat", fail)
    with pytest.raises(ValueError, match=f"{target}: Permission denied"):
        resolve(target)


def test_a_file_that_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: minutes of measuring end at a file that only its folder would let us write, or in a
    folder that takes no new file for one that is there; or a device in such a one is refused."""
    there, new, link = (tmp_path / name for name in ("there.json", "new.json", "link.json"))
    there.touch()
    (inner := tmp_path / "inner").mkdir()
    link.symlink_to(inner / "x.json")
    null = Path("/dev/null")
    for closed, path, is_refused in (
        (there, there, True),
        (tmp_path, there, True),
        (tmp_path, new, True),
        (there, new, False),
        (inner, link, True),
        (tmp_path, link, False),
        (null, null, True),
        (null.parent, null, False),
    ):
        monkeypatch.setattr("os.access", lambda at, mode, closed=closed: at != closed)
        if not is_refused:
            check_places({"output_json": path})
            continue
        with pytest.raises(ValueError, match=r"--output-json .*\(no permission\)"):
            check_places({"output_json": path})


@pytest.mark.slow
def test_no_place_for_a_cache(cli: Run) -> None:
    """Bug: HOME or a cache at a place that cannot be made ends `run` without a remedy."""
    done = cli("--prompt", "x", "--compile", env={"GRAPHENGINE_CACHE": "/proc/graphengine"})
    assert done.exit_code == 0 or "GRAPHENGINE_CACHE" in done.stderr, done.output
    assert "Traceback" not in done.output


@pytest.mark.slow
def test_terminated(target: Path) -> None:
    """Bug: SIGTERM, which a job's time limit sends, throws away what had been answered; only Ctrl-C
    was heeded."""
    args = ["run", str(target), "--bucket", "1", "--ignore-eos", "--max-new-tokens", "8000"]
    with streaming(*args, "--prompt", "x") as process:
        assert process.stdout is not None and process.stderr is not None
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
        errors = process.stderr.read().decode()
        assert process.wait() == 143
    assert "Traceback" not in errors


def test_the_start_is_explained(cli: Run) -> None:
    """Bug: on a slow host the rows of the start-up table leave seconds out."""
    startup = json.loads(cli("--prompt", "x", "--max-new-tokens", "1", "--json").stdout)["startup"]
    assert startup["other_s"] >= 0
    rows = [v for k, v in startup.items() if k.endswith("_s") and k != "total_s"]
    assert startup["total_s"] == pytest.approx(sum(v for v in rows if isinstance(v, float)))


def test_an_unreadable_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: of an index of another user the command says that GRAPHENGINE_CACHE, HOME and TMPDIR are
    to be folders that can be written."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "model.safetensors.index.json").write_text("{}")
    monkeypatch.setattr(Path, "read_text", fail)
    with pytest.raises(ValueError, match=r"index\.json: .*Permission denied.*make it readable"):
        sources.read_headers(tmp_path)


@pytest.mark.parametrize("texts", [["a\n", ""], ["a", "\n"], ["a", ""], ["a\n"], ["a"]])
def test_an_answer_ends_its_line_once(capsys: pytest.CaptureFixture[str], texts: list[str]) -> None:
    """Bug: behind an answer that has ended its line stands an empty one, where the end comes in a
    chunk without text; or what follows stands in the answer's line."""
    result = replace(answer().result, text="".join(texts))
    for text in texts[:-1]:
        answers._print_chunk(Chunk(index=0, text=text, token_ids=[1]))
    answers._print_chunk(Chunk(index=0, text=texts[-1], token_ids=[2], result=result))
    assert capsys.readouterr().out == "a\n"


def test_where_the_seconds_of_compiling_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the first steps are said to have taken as long as all, a phase has another's seconds, a
    file that was there is called new, or the JSON says less than the line."""
    now_s = [5.0]

    def take(seconds: float) -> None:
        now_s[0] += seconds

    startup = StartupMetrics(
        load_s=1.0,
        compile_s=20.0,
        compiler_wait_s=2.5,
        capture_s=3.0,
        warmup_s=4.0,
        weight_bytes=1,
        kv_pool_bytes=2,
        num_pages=3,
        num_graphs=4,
        num_compiled=6,
        num_cache_hits=2,
        buckets=(1, 8),
    )
    parts = artifact.platform_parts("cpu")
    code = artifact.store(tmp_path, parts).folder / "inductor"
    code.mkdir(parents=True)
    (code / "old").touch()

    def generate(prompts: list[list[int]], **how: Any) -> None:
        (code / str(len(prompts))).touch()
        take(5.5)

    config = SimpleNamespace(buckets=(1, 8), max_model_len=64)
    built = SimpleNamespace(target=None, draft=None)
    engine = SimpleNamespace(config=config, startup=startup, built=built, generate=generate)
    monkeypatch.setattr(Engine, "from_pretrained", lambda *_, **__: take(30) or nullcontext(engine))
    monkeypatch.setattr(artifact, "engine_parts", lambda *_: {"code": "x"})
    monkeypatch.setattr(
        "graphengine.cli.compile.time", SimpleNamespace(perf_counter=lambda: now_s[0])
    )
    env = {"GRAPHENGINE_CACHE": str(tmp_path)} | dict.fromkeys(_CACHE_VARIABLES)
    done = CliRunner().invoke(main, ["compile", "--device", "cpu", "--json"], env=env)
    assert done.exit_code == 0, done.output
    assert (
        "load 1.0 s, compile 20.0 s (2.5 s of it for imports), capture 3.0 s, warm-up 4.0 s, first "
        "steps 11.0 s; 2 new files\n"
    ) in done.stderr
    assert "partly warm start: 2 of 8 compiled graphs found" in done.stderr
    assert json.loads(done.stdout) == {
        "folder": str(code.parent),
        "platform": parts,
        "compiled": {"code": "x"},
        "notes": [],
        "num_new_files": 2,
        "total_s": 41.0,
        "startup": json.loads(json.dumps(asdict(startup))),
    }


def test_warnings_of_others_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: while `run` answers, nobody sees what another library warns of; or it stands among the
    engine's own warnings in the JSON."""
    shown: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", lambda text, *rest: shown.append(str(text)))
    with warnings.catch_warnings(), answers._shown_warnings(report.stderr_console(True)) as texts:
        warnings.simplefilter("always")
        warnings.warn("this call goes away", FutureWarning, stacklevel=1)
        warnings.warn("drafts are rare", EngineWarning, stacklevel=1)
    assert shown == ["this call goes away"] and texts == ["drafts are rare"]


def test_what_was_warned_of_is_in_the_json(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: what a run warned of on stderr, as of drafts that are rarely accepted, is lost to who
    reads its JSON."""
    run = answers._Session.run

    def warns(session: Any) -> None:
        run(session)
        warnings.warn("drafts are rare", EngineWarning, stacklevel=1)

    monkeypatch.setattr(answers._Session, "run", warns)
    args = ["run", str(target), *SMALL, "--prompt", "x", "--max-new-tokens", "2", "--json"]
    done = CliRunner().invoke(main, args)
    assert json.loads(done.stdout)["warnings"] == ["drafts are rare"], done.output
    assert "warning: drafts are rare" in done.stderr
