"""The folder of compiled code: what an interrupted compiler left is healed, what others may have
written is not read."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from graphengine.capture import compile as compiling
from graphengine.capture import precompiled
from graphengine.capture.cache_folder import drop_damaged, others_can_write
from graphengine.cli.main import compiled_code
from graphengine.startup import compilers

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import torch
from graphengine.capture import compile as compiling
with torch.no_grad():
    x = torch.arange(6.0).view(2, 3)
    assert compiling.compile_segments([lambda x: (x * 2 + 1).sum(-1)])[0](x).tolist() == [9, 27]
print(compiling.cache_counts().num_misses)
"""
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="Inductor's C++ backend needs g++"
)


def start(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": str(folder)} | variables
    line = [sys.executable, "-c", SCRIPT]
    return subprocess.run(line, env=env, capture_output=True, text=True, timeout=300)


@needs_compiler
@pytest.mark.slow
def test_what_an_interrupted_compilation_left_is_compiled_again(tmp_path: Path) -> None:
    """Bug: Ctrl-C in a linker leaves an empty library, and every later start fails to load it; of
    half a precompiled header every compilation fails; of half the libraries that tell which
    instructions there are, the code is another, slower one."""
    headers = {"TMPDIR": str(tmp_path)}
    asked = {"TORCHINDUCTOR_VEC_ISA_OK": ""}  # which instructions there are
    assert start(tmp_path, **headers, **asked).stdout == "1\n"
    (name,) = tmp_path.glob("*/*.main.so")
    shutil.rmtree(tmp_path / precompiled.FOLDER)
    for kind, share in (("*.so", 0.5), ("*.gch", 0.5), ("*.main.so", 0.0)):
        damaged = list(tmp_path.rglob(kind))
        assert damaged
        for path in damaged:
            os.truncate(path, int(path.stat().st_size * share))
    done = start(tmp_path, **headers, **asked)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert list(tmp_path.glob("*/*.main.so")) == [name]


@needs_compiler
def test_only_what_is_damaged_goes(tmp_path: Path) -> None:
    """Bug: every start compiles anew, or takes the file that another one is just writing."""
    folder = tmp_path / "ab"
    folder.mkdir()
    (tmp_path / "x.c").write_text("int one(void) { return 1; }")
    for flags, name in ((["-shared", "-fPIC"], "a.main.so"), (["-c"], "a.main.o")):
        line = ["g++", *flags, str(tmp_path / "x.c"), "-o", str(folder / name)]
        subprocess.run(line, check=True)
    kept = sorted(folder.iterdir())
    (folder / "notes.txt").write_text("")
    assert drop_damaged(tmp_path, tmp_path / "headers") == 0
    bad = folder / "b.main.so"
    bad.write_bytes((folder / "a.main.so").read_bytes()[:-1])
    (tmp_path / "locks").mkdir()
    with (tmp_path / "locks" / "b.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert drop_damaged(tmp_path) == 0
    assert drop_damaged(tmp_path) == 1
    assert sorted(folder.glob("a.*")) == kept and not bad.exists()


def give_away(path: Path) -> None:
    os.chown(path, 12345, -1)


OPENINGS: dict[str, Callable[[Path], None]] = {
    "world": lambda path: path.chmod(path.stat().st_mode | 0o002),
    "another's": give_away,
    "another group": lambda path: (os.chown(path, -1, 12345), path.chmod(0o770))[1],
}
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@needs_root
@pytest.mark.parametrize("opening", OPENINGS)
def test_what_others_can_write(tmp_path: Path, opening: str) -> None:
    """Bug: a pickle of another user's is loaded, and does as us what it likes."""
    assert others_can_write(tmp_path) is None
    assert others_can_write(tmp_path / "not there yet") is None
    tmp_path.chmod(0o775)  # a umask of 002, and our own group
    assert others_can_write(tmp_path) is None
    OPENINGS[opening](tmp_path)
    assert others_can_write(tmp_path)


@needs_root
def test_why_a_folder_is_not_ours(tmp_path: Path) -> None:
    """Bug: the mode that a user is to change is shown with what kind of file it is, or the owner
    is another one."""
    tmp_path.chmod(0o1777)
    assert others_can_write(tmp_path) == "can be written by others (mode 1777)"
    give_away(tmp_path)
    assert others_can_write(tmp_path) == "belongs to user 12345"


def test_a_group_that_we_are_also_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: what a group of ours may write is trusted, though others are in it with us."""
    group = tmp_path.stat().st_gid
    monkeypatch.setattr(os, "getegid", lambda: group + 1)
    monkeypatch.setattr(os, "getgroups", lambda: [group, group + 1])
    tmp_path.chmod(0o770)
    assert others_can_write(tmp_path)


def test_where_files_have_no_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: on a system without users' numbers every start ends in an AttributeError."""
    monkeypatch.delattr(os, "geteuid")
    assert others_can_write(tmp_path) is None


@pytest.mark.slow
@needs_compiler
@needs_root
@pytest.mark.parametrize("place", ["folder", "segments", "file", "pipe"])
def test_a_foreign_segment_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Bug: a segment that another user has put there is executed; a pipe in its place is read for
    ever."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiling, "_MADE", {})
    folder = tmp_path / precompiled.FOLDER

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    keys: list[str] = []
    find = precompiled.find
    monkeypatch.setattr(precompiled, "find", lambda key, _: keys.append(key))
    with torch.no_grad():
        compiling.compile_segments([double])[0](torch.ones(2, 3))
    (key,) = keys
    (file,) = folder.iterdir()
    assert find(key, globals()) is not None
    if place == "pipe":
        file.unlink()
        os.mkfifo(file)
    else:
        give_away({"folder": tmp_path, "segments": folder, "file": file}[place])
    monkeypatch.setattr(
        torch.compiler, "load_compiled_function", lambda *_, **__: pytest.fail("loaded")
    )
    assert find(key, globals()) is None


@needs_root
def test_a_foreign_folder_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: the command line, or the Python API with its default in the temporary folder, compiles
    into and loads from what another user has made ready."""
    tmp_path.chmod(0o777)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    compilers.use_own_folder_()
    own = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert own != tmp_path and own.stat().st_mode & 0o777 == 0o700
    compilers.use_own_folder_()
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) == own
    monkeypatch.setenv("GRAPHENGINE_CACHE", str(tmp_path / "root"))
    with compiled_code("cpu", None) as store:
        assert store is not None
    store.folder.mkdir(parents=True)
    store.folder.chmod(0o777)
    with compiled_code("cpu", None) as store:
        assert store is None
    assert "chmod 700" in capsys.readouterr().err


def test_a_folder_of_its_own_goes_with_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: every start beside a folder that others may write leaves one in the temporary folder."""
    at_exit: list[Callable[[], object]] = []
    monkeypatch.setattr(
        compilers.atexit, "register", lambda *a, **named: at_exit.append(partial(*a, **named))
    )
    tmp_path.chmod(0o777)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    compilers.use_own_folder_()
    own = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    (own / "code.so").write_bytes(b"")
    for end in at_exit:
        end()
    assert own != tmp_path and not own.exists() and tmp_path.exists()


def test_a_lock_of_the_headers_counts_too(tmp_path: Path) -> None:
    """Bug: a header that another process compiles just now is taken away from it."""
    headers = tmp_path / "headers"
    (headers / "locks").mkdir(parents=True)
    (headers / "a.gch").write_bytes(b"")
    with (headers / "locks" / "b.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert drop_damaged(tmp_path / "code", headers) == 0
    assert drop_damaged(tmp_path / "code", headers) == 1


def test_files_that_are_no_library(tmp_path: Path) -> None:
    """Bug: a file of zeros, as a full disk leaves it, or one cut off in its header is loaded; or
    another file is taken away, or is a traceback."""
    (folder := tmp_path / "xy").mkdir()
    (folder / "notes.so").write_text("ours")
    for name, size in (("a.so", 0), ("b.so", 9), ("c.o", 999)):
        (folder / name).write_bytes(bytes(size))
    (folder / "d.so").write_bytes(b"\x7fELF\x02\x01" + bytes(57))
    assert drop_damaged(tmp_path) == 4
    assert os.listdir(folder) == ["notes.so"]
