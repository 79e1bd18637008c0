"""Compiled code kept between starts, as the command line uses it."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from graphengine.api import Engine
from graphengine.cli import answers, cache
from graphengine.cli import main as cli
from graphengine.cli.compile import _notes
from graphengine.cli.main import _compiler_failed
from graphengine.startup import artifact, compilers
from tests.support.artifacts import filled
from tests.support.checkpoints import make_drafter, make_target
from tests.support.command_line import ROOT


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, str | None]]:
    """What the three variables are inside a command."""
    for name in cache._CACHE_VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def inside(**env: str) -> dict[str, str | None]:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        before = dict(os.environ)
        with cli.compiled_code("cpu", None):
            found = {name: os.environ.get(name) for name in cache._CACHE_VARIABLES}
        assert dict(os.environ) == before
        return found

    return inside


def test_compilers_are_pointed_at_the_folder(tmp_path: Path, variables: Any) -> None:
    """Bug: a compiler writes to /tmp, is forgotten after a reboot, and every start is cold; or a
    command that fails leaves its folder to the next one of the process."""
    found = variables(GRAPHENGINE_CACHE=str(tmp_path / "c"))
    folder = artifact.store(tmp_path / "c", artifact.platform_parts("cpu")).folder
    assert found == {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "FLASHINFER_WORKSPACE_BASE": str(folder / "flashinfer"),
    }
    assert not (tmp_path / "c").exists(), "a run that compiles nothing leaves nothing"
    before = dict(os.environ)
    with pytest.raises(KeyboardInterrupt), cli.compiled_code("cpu", None):
        raise KeyboardInterrupt
    assert dict(os.environ) == before


def test_what_the_user_set_stays(tmp_path: Path, variables: Any) -> None:
    """Bug: a cache that the user keeps elsewhere is ignored."""
    found = variables(GRAPHENGINE_CACHE=str(tmp_path / "c"), TRITON_CACHE_DIR="/mine")
    assert found["TRITON_CACHE_DIR"] == "/mine"
    assert str(found["TORCHINDUCTOR_CACHE_DIR"]).startswith(str(tmp_path / "c"))


def test_the_place_where_nobody_names_one(
    tmp_path: Path, variables: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: XDG_CACHE_HOME is not heeded, and a small home fills with compiled code; or an empty
    one, which is none, makes it a folder of the root directory."""
    monkeypatch.delenv("GRAPHENGINE_CACHE", raising=False)
    found = variables(XDG_CACHE_HOME=str(tmp_path))["TRITON_CACHE_DIR"]
    assert Path(found).is_relative_to(tmp_path / "graphengine")
    found = variables(XDG_CACHE_HOME="", HOME=str(tmp_path))["TRITON_CACHE_DIR"]
    assert Path(found).is_relative_to(tmp_path / ".cache" / "graphengine")


def test_triton_has_the_same_compilers_in_every_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: who compiles first decides under which ptxas and libdevice kernels are looked up; or the
    user's own choice is overruled; or a name stays behind and rules the next command."""
    pytest.importorskip("triton")
    names = ("TRITON_PTXAS_PATH", "TRITON_LIBDEVICE_PATH")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GRAPHENGINE_CACHE", str(tmp_path / "c"))
    from triton import knobs
    from triton.backends.nvidia.compiler import CUDAOptions

    defaults = [knobs.nvidia.ptxas.path, dict(CUDAOptions(arch="sm90").extern_libs)["libdevice"]]
    with cli.compiled_code("cpu", None):
        inside = [os.environ[name] for name in names]
        assert [os.path.realpath(path) for path in inside] == [*map(os.path.realpath, defaults)]
        assert knobs.nvidia.ptxas.path == inside[0]
    assert not set(names) & set(os.environ)
    monkeypatch.setenv(names[0], "/mine")
    with cli.compiled_code("cpu", None):
        assert os.environ[names[0]] == "/mine" and os.environ[names[1]] == inside[1]
    assert os.environ[names[0]] == "/mine"


def test_a_triton_without_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a path that does not exist is named, and nothing compiles; or no Triton, no command."""
    made = tmp_path / "backends" / "nvidia" / "bin" / "ptxas"
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(compilers.importlib.util, "find_spec", lambda name: spec)
    assert compilers.compiler_files() == {}
    made.parent.mkdir(parents=True)
    made.touch()
    assert compilers.compiler_files() == {"TRITON_PTXAS_PATH": str(made)}
    monkeypatch.setattr(compilers.importlib.util, "find_spec", lambda name: None)
    assert compilers.compiler_files() == {}


def test_no_folder(variables: Any) -> None:
    """Bug: a read-only home directory ends a run that would work with the compilers' defaults."""
    assert set(variables(GRAPHENGINE_CACHE="").values()) == {None}
    for command in (["compile"], ["run", "--prompt", "x", "--artifact", "x.tar.gz"]):
        done = CliRunner().invoke(cli.main, command, env={"GRAPHENGINE_CACHE": ""})
        assert done.exit_code == 2
        assert "GRAPHENGINE_CACHE" in done.stderr


@pytest.mark.parametrize("place", ["file", "file/below", "~nobody_of_this_name"])
def test_no_folder_is_possible(
    tmp_path: Path, variables: Any, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: GRAPHENGINE_CACHE=/dev/null, which turns other caches off, ends every command in a
    NotADirectoryError; or what was compiled into a folder that is read-only now is left in
    silence, and every start is cold."""
    (tmp_path / "file").touch()
    root = place if place.startswith("~") else str(tmp_path / place)
    assert set(variables(GRAPHENGINE_CACHE=root).values()) == {None}
    assert f"{root} (GRAPHENGINE_CACHE) cannot be written" in capsys.readouterr().err


def test_no_home(variables: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: in a container whose user has no entry in passwd every command ends in a traceback."""

    def nobody(uid: int) -> None:
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME", "GRAPHENGINE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert set(variables().values()) == {None}


def test_refusals(tmp_path: Path) -> None:
    """Bug: a bad artifact is found after minutes of loading, or with a traceback."""
    env = {"GRAPHENGINE_CACHE": str(tmp_path / "c")}
    missing = str(tmp_path / "no.tar.gz")
    for command in (["run", "--prompt", "x"], ["compile"]):
        done = CliRunner().invoke(cli.main, [*command, "--artifact", missing], env=env)
        assert done.exit_code == 2, done.output
        assert missing in done.stderr.replace("\n", "")
    packed = tmp_path / "x.tar.gz"
    artifact.pack(filled(tmp_path / "a").folder, packed)
    command = ["compile", "--fresh", "--artifact", str(packed)]
    done = CliRunner().invoke(cli.main, command, env={"GRAPHENGINE_CACHE": str(tmp_path / "d")})
    assert done.exit_code == 2
    assert "--fresh would drop" in done.stderr
    assert not (tmp_path / "d").exists()


def test_a_pipe_holds_no_artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: --output that is no regular file is refused behind minutes of compiling."""

    def load(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(Engine, "from_pretrained", load)
    os.mkfifo(tmp_path / "pipe")
    done = CliRunner().invoke(cli.main, ["compile", "--output", str(tmp_path / "pipe")])
    assert done.exit_code == 2 and "is no regular file" in done.stderr


def test_fresh_begins_with_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: --fresh leaves what was compiled, or takes what it has dropped off the new files; or a
    bucket takes no full step, and its first user waits for kernels; or 2 MB are called 2 MiB; or
    a short context does not hold the prompts that are asked; or what was measured of minutes of
    compiling is lost with a file that cannot be packed."""
    real = Engine.from_pretrained
    monkeypatch.setattr(
        Engine, "from_pretrained", lambda *a, **b: real(*a, **b | {"compile": False})
    )
    monkeypatch.setattr(artifact, "engine_parts", lambda *_: {"code": "x"})  # reads all of ours
    asked: list[list[int]] = []
    monkeypatch.setattr(
        Engine, "generate", lambda _, prompts, **how: asked.append([*map(len, prompts)])
    )
    monkeypatch.setattr(artifact, "pack", lambda *_: 2_500_000)
    old = artifact.store(tmp_path, artifact.platform_parts("cpu")).folder / "inductor" / "old"
    old.parent.mkdir(parents=True)
    old.touch()
    target = str(make_target(tmp_path / "target", layers=1))
    args = ["compile", target, "--draft", "none", "--bucket", "1,2", "--device", "cpu", "--fresh"]
    args += ["--output", str(tmp_path / "x.tar.gz"), "--max-model-len", "16"]
    done = CliRunner().invoke(cli.main, [*args, "--json"], env={"GRAPHENGINE_CACHE": str(tmp_path)})
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["num_new_files"] == 0 and not old.exists()
    assert asked == [[15], [15, 15]] and "(2.5 MB)" in done.stderr

    def fail(*_: Any) -> int:
        raise ValueError("x.tar.gz: cannot be written")

    monkeypatch.setattr(artifact, "pack", fail)
    done = CliRunner().invoke(cli.main, [*args, "--json"], env={"GRAPHENGINE_CACHE": str(tmp_path)})
    assert done.exit_code == 2 and "x.tar.gz: cannot be written" in done.stderr
    assert json.loads(done.stdout)["num_new_files"] == 0


def test_a_run_tells_what_does_not_fit(tmp_path: Path) -> None:
    """Bug: an artifact of another platform is dropped silently, and the start is just slow."""
    store = filled(tmp_path / "a")
    artifact.pack(store.folder, tmp_path / "x.tar.gz")
    pair = make_target(tmp_path / "target")
    done = CliRunner().invoke(
        cli.main,
        ["run", str(pair), "--bucket", "1", "--prompt", "x", "--max-new-tokens", "2"]
        + ["--device", "cpu", "--artifact", str(tmp_path / "x.tar.gz")],
        env={"GRAPHENGINE_CACHE": str(tmp_path / "c")},
    )
    assert done.exit_code == 0, done.output
    text = done.stderr.replace("\n", " ")
    assert "x.tar.gz does not fit and is not used; compiling anew" in text
    assert "gpu: NVIDIA H200 there, nothing here" in text
    assert "torch: 2.13.0 there" in text
    assert "--artifact changes nothing: on the CPU" in text, "without --compile it was in silence"


def test_what_compile_says_of_an_artifact(tmp_path: Path) -> None:
    """Bug: of one that was not used it is told as well what it lacks; or nothing of one that was
    made for something else; or that code lies elsewhere, and not where."""
    store, apart = filled(tmp_path)._replace(notes=[]), ["buckets: 1 there, 8 here"]
    (told,) = _notes(store, tmp_path / "x.tar.gz", apart)
    assert "was compiled for something else" in told and told.endswith(apart[0])
    assert _notes(store, None, apart) == _notes(store, tmp_path / "x.tar.gz", []) == []
    unused = store._replace(notes=["x.tar.gz does not fit and is not used"])
    assert _notes(unused, tmp_path / "x.tar.gz", apart) == unused.notes
    (told,) = _notes(store._replace(segments="/mine"), None, apart)
    assert told.startswith("TORCHINDUCTOR_CACHE_DIR is /mine: what is compiled lies there")


def test_an_artifact_that_was_used(tmp_path: Path) -> None:
    """Bug: a start on the CPU that found its code in --artifact is told that it changes nothing,
    since --compile was not looked at."""
    job: Any = SimpleNamespace(store=filled(tmp_path), args={"artifact": tmp_path})
    for compiles in (False, True):
        config = SimpleNamespace(device="cpu", compile=compiles)
        built = SimpleNamespace(startup=SimpleNamespace(num_compiled=0), config=config)
        engine: Any = SimpleNamespace(built=built)
        assert bool(answers._cache_notes(job, engine)) != compiles


def command(root: Path, *args: str) -> Any:
    """The command's JSON and stderr, in a process whose compiled code lies below `root`."""
    env = {k: v for k, v in os.environ.items() if k not in cache._CACHE_VARIABLES}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env |= {"GRAPHENGINE_CACHE": str(root), "PYTHONPATH": path}
    line = [sys.executable, "-m", "graphengine", *args, "--json"]
    done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor's C++ backend needs g++")
def test_a_packed_artifact_starts_warm_elsewhere(tmp_path: Path) -> None:
    """Bug: the artifact lacks something, or holds paths of where it was made, so that a start with
    it compiles again; or a start with it gives other tokens."""
    target = make_target(tmp_path / "target", layers=2)
    draft = make_drafter(tmp_path / "draft", target)
    packed = str(tmp_path / "x.tar.gz")
    pair = [str(target), "--draft", str(draft), "--bucket", "1", "--device", "cpu"]
    cold, text = command(tmp_path / "a", "compile", *pair, "--output", packed)
    num_compiled = cold["startup"]["num_compiled"]
    assert cold["startup"]["num_cache_hits"] == 0
    assert cold["num_new_files"] > 0
    assert "cold start" in text
    shutil.rmtree(tmp_path / "a")
    again = ["run", *pair, "--prompt", "Tom has", "--max-new-tokens", "8", "--ignore-eos"]
    warm, text = command(tmp_path / "b", *again, "--compile", "--artifact", packed)
    assert warm["startup"]["num_compiled"] == 0
    # Plain decoding is compiled ahead too: a request may fall back to it.
    assert 0 < warm["startup"]["num_cache_hits"] < num_compiled
    assert "warm start" in text
    plain, _ = command(tmp_path / "b", *again, "--no-compile")
    assert warm["results"][0]["token_ids"] == plain["results"][0]["token_ids"]
    again += ["--compile", "--draft", "none"]
    alone, _ = command(tmp_path / "b", *again)
    assert alone["startup"]["num_compiled"] == 0
    other, text = command(tmp_path / "b", *again, "--bucket", "2")
    assert other["startup"]["num_compiled"] > 0
    text = text.replace("\n", " ")
    assert "compiled anew, what was compiled ahead differs: " in text and "buckets: 1 " in text


def ends(*args: str, **variables: str) -> str:
    """What a command that fails says on stderr."""
    line = [sys.executable, "-m", "graphengine", *args]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"PYTHONPATH": path} | variables
    done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.replace("\n", " ")


@pytest.mark.slow
def test_no_compiler(tmp_path: Path) -> None:
    """Bug: an image without g++ answers `--compile` with 140 lines of traceback."""
    run = ["run", "--compile", "--bucket", "1", "--prompt", "x", "--device", "cpu"]
    said = ends(*run, GRAPHENGINE_CACHE=str(tmp_path), CXX="/nowhere/g++")
    assert "compilation failed" in said and "install g++" in said and "--no-compile" in said


DROP = "drop what is kept with `graphengine compile --fresh`, see `graphengine doctor`"
ROOM = "GRAPHENGINE_CACHE to a folder that can be written and has room"


@pytest.mark.parametrize(
    ("error", "reason", "remedy"),
    [
        ("C++ error\nld: No space left on device", "No space left on device", ROOM),
        ("[Errno 13] not allowed: 'x'\nat x", "[Errno 13] not allowed: 'x'", ROOM),
        ("InvalidCxxCompiler: none\nat x", "InvalidCxxCompiler: none", "install g++"),
        ("no lowering\nat x", "no lowering", DROP),
        ("backend='inductor' raised:\nCxxCompiler: x", "CxxCompiler: x", "install g++"),
    ],
)
def test_why_a_compilation_failed(error: str, reason: str, remedy: str) -> None:
    """Bug: on a full disk the message is the compiler's first line, "C++ compile error", and the
    remedy drops what had been compiled; or that of a missing compiler is another one's, or none."""
    told = _compiler_failed(RuntimeError(error))
    where = "set TORCHINDUCTOR_CACHE_DIR or " if remedy == ROOM else ""
    assert told == f"compilation failed: {reason}; {where}{remedy}, or run with --no-compile"


def test_a_folder_of_somebody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: a shared cache can be written but not this platform's part of it, which another user has
    made, and every command that compiles ends in a traceback."""
    monkeypatch.setenv("GRAPHENGINE_CACHE", str(tmp_path))
    with cli.compiled_code("cpu", None) as store:
        assert store is not None
    inductor = store.folder / "inductor"
    inductor.mkdir(parents=True)
    may = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != inductor and may(path, mode))
    with cli.compiled_code("cpu", None) as found:
        assert found is None
    assert f"{store.folder} cannot be written" in capsys.readouterr().err.replace("\n", "")


def test_segments_of_the_user_s_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the start line names a folder in which nothing was looked for."""
    monkeypatch.setenv("GRAPHENGINE_CACHE", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    with cli.compiled_code("cpu", None) as store:
        assert store is not None and store.segments == str(store.folder)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    with cli.compiled_code("cpu", None) as store:
        assert store is not None and store.segments == str(tmp_path / "mine")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["flashinfer", "triton"])
def test_our_kernels_are_in_the_artifact(tmp_path: Path, backend: str) -> None:
    """Bug: Triton does not find what was unpacked (its groups name the old folder), so that every
    kernel launched outside of Inductor is compiled at each start."""
    sizes: Any = {"hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 64, "intermediate": 256}
    target = make_target(tmp_path / "target", layers=2, tie=False, dtype="bfloat16", **sizes)
    draft = make_drafter(tmp_path / "draft", target, dtype="bfloat16")
    packed = str(tmp_path / "x.tar.gz")
    pair = [str(target), "--draft", str(draft), "--bucket", "1", "--attention-backend", backend]

    def kernels(root: str) -> set[str]:
        return {path.name for path in (tmp_path / root).glob("*/triton/*")}

    cold, _ = command(tmp_path / "a", "compile", *pair, "--output", packed)
    compiled = kernels("a")
    assert compiled and cold["startup"]["num_compiled"] > 0
    again = ["run", *pair, "--prompt", "Tom has", "--max-new-tokens", "32", "--ignore-eos"]
    expected, _ = command(tmp_path / "a", *again)
    shutil.move(tmp_path / "a", tmp_path / "gone")
    warm, _ = command(tmp_path / "b", "compile", *pair, "--artifact", packed)
    assert warm["startup"]["num_compiled"] == 0
    assert warm["startup"]["num_cache_hits"] == cold["startup"]["num_compiled"]
    assert kernels("b") <= compiled
    found, _ = command(tmp_path / "b", *again)
    assert found["startup"]["num_compiled"] == 0 < found["startup"]["num_cache_hits"]
    assert found["results"][0]["token_ids"] == expected["results"][0]["token_ids"]
    print(f"cold {cold['startup']}, warm {warm['startup']}")
