"""Compiled code kept between starts: files that are packed, travel and are unpacked."""

import errno
import gzip
import io
import json
import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from graphengine.cli import main as cli
from graphengine.startup import artifact
from tests.support.artifacts import ENTRY, PARTS, filled


def test_round_trip(tmp_path: Path) -> None:
    """Bug: a file is lost on the way, or which starts have filled the folder; or Triton's group
    points to where it was packed and every kernel is compiled again."""
    packed = filled(tmp_path / "a")
    (packed.folder / "inductor" / "link").symlink_to("/etc/passwd")
    (tmp_path / "sub").mkdir()
    later = ENTRY | {"buckets": "1"}
    artifact.record_(packed.folder, PARTS, later)
    size = artifact.pack(packed.folder, tmp_path / "sub" / "x.tar.gz")
    assert size == (tmp_path / "sub" / "x.tar.gz").stat().st_size
    assert os.listdir(tmp_path / "sub") == ["x.tar.gz"]
    (packed.folder / "inductor" / "link").unlink()
    num_files = artifact.num_files(packed.folder)
    shutil.move(tmp_path / "a", tmp_path / "gone")
    store = artifact.store(tmp_path / "b", PARTS)
    assert artifact.unpack(tmp_path / "sub" / "x.tar.gz", store) == []
    assert artifact.num_files(store.folder) == num_files == 4
    group = json.loads(next(store.folder.rglob("__grp__*")).read_text())
    kernel = Path(group["child_paths"]["kernel.cubin"])
    assert kernel.read_bytes() == b"kernel.cubin" * 100
    assert [artifact.nearest(store.folder, entry) for entry in (ENTRY, later)] == [[], []]
    assert os.listdir(tmp_path / "b") == [store.folder.name], "a temporary folder was left"


def test_what_is_there_stays(tmp_path: Path) -> None:
    """Bug: unpacking replaces a file that a running engine has open."""
    artifact.pack(filled(tmp_path / "a").folder, tmp_path / "x.tar.gz")
    store = filled(tmp_path / "b")
    mine = store.folder / "inductor/g6/graph.py"
    mine.write_text("mine")
    assert artifact.unpack(tmp_path / "x.tar.gz", store) == []
    assert mine.read_text() == "mine"


def test_code_shrinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: an artifact whose code shrank to a third, as all does, is taken for one that would fill
    the disk where it is large."""
    monkeypatch.setattr(artifact, "MAX_SMALL_BYTES", 0)
    packed = filled(tmp_path / "a")
    code = os.urandom(50_000).hex()
    (packed.folder / "inductor/g6/large.py").write_text(code)
    assert artifact.pack(packed.folder, tmp_path / "x.tar.gz") < len(code)
    store = artifact.store(tmp_path / "b", PARTS)
    assert artifact.unpack(tmp_path / "x.tar.gz", store) == []
    assert (store.folder / "inductor/g6/large.py").read_text() == code


def test_room_for_small_and_for_large_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: of what may be unpacked beside the file's own multiple, and of that multiple, the larger
    counts alone, and an artifact of code that shrinks well is refused."""
    monkeypatch.setattr(artifact, "MAX_SMALL_BYTES", 60_000)
    monkeypatch.setattr(artifact, "MAX_RATIO", 1)
    packed = filled(tmp_path / "a")
    code = os.urandom(45_000).hex()
    (packed.folder / "inductor/g6/large.py").write_text(code)
    size = artifact.pack(packed.folder, tmp_path / "x.tar.gz")
    assert max(60_000, size) < len(code) < 60_000 + size
    assert artifact.unpack(tmp_path / "x.tar.gz", artifact.store(tmp_path / "b", PARTS)) == []


def test_another_platform_is_named_and_not_used(tmp_path: Path) -> None:
    """Bug: code of another GPU is unpacked, or the user is not told what differs."""
    artifact.pack(filled(tmp_path / "a").folder, tmp_path / "x.tar.gz")
    store = artifact.store(tmp_path / "b", PARTS | {"gpu": "NVIDIA B200"})
    found = artifact.unpack(tmp_path / "x.tar.gz", store)
    assert found == ["gpu: NVIDIA H200 there, NVIDIA B200 here"]
    assert not store.folder.exists()
    assert os.listdir(tmp_path / "b") == []


def tar_of(path: Path, members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for info, content in members:
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def damaged(kind: str, good: bytes, path: Path) -> None:
    manifest = json.dumps({"version": 1, "platform": PARTS, "compiled": [ENTRY]}).encode()
    first = (tarfile.TarInfo(artifact.MANIFEST), manifest)
    if kind == "truncated":
        path.write_bytes(good[: len(good) // 2])
    elif kind == "flipped":
        middle = len(good) // 2
        path.write_bytes(good[:middle] + bytes(64) + good[middle + 64 :])
    elif kind == "text":
        path.write_text("hello")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "no manifest":
        tar_of(path, [(tarfile.TarInfo("inductor/x"), b"x")])
    elif kind == "bad manifest":
        tar_of(path, [(tarfile.TarInfo(artifact.MANIFEST), b'{"version": 1, "platform": [1]}')])
    elif kind == "other version":
        other = manifest.replace(b'"version": 1', b'"version": 99')
        tar_of(path, [(tarfile.TarInfo(artifact.MANIFEST), other)])
    elif kind == "escape":
        tar_of(path, [first, (tarfile.TarInfo("inductor/../../../evil"), b"x")])
    elif kind == "absolute":
        tar_of(path, [first, (tarfile.TarInfo("/tmp/evil"), b"x")])
    elif kind == "foreign":
        tar_of(path, [first, (tarfile.TarInfo("weights/x"), b"x")])
    elif kind == "manifest link":
        link = tarfile.TarInfo(artifact.MANIFEST)
        link.type, link.linkname = tarfile.SYMTYPE, "elsewhere"
        tar_of(path, [(link, b"")])
    elif kind == "deep manifest":
        tar_of(path, [(tarfile.TarInfo(artifact.MANIFEST), b"[" * 100_000)])
    elif kind == "huge header":
        pax = tarfile.TarInfo("x")
        pax.type, pax.size = tarfile.XHDTYPE, 1 << 62
        path.write_bytes(gzip.compress(pax.tobuf(tarfile.GNU_FORMAT)))
    elif kind == "aside":
        tar_of(path, [first, (tarfile.TarInfo("inductor/../manifest.json"), b"x")])
    elif kind == "group":
        tar_of(path, [first, (tarfile.TarInfo("triton/__grp__x.json"), b"[1]")])
    elif kind == "file for a folder":
        tar_of(path, [first, (tarfile.TarInfo("inductor"), b"x")])
    elif kind == "bomb":
        tar_of(path, [first, (tarfile.TarInfo("inductor/x"), bytes(80 << 20))])
    elif kind == "link":
        link = tarfile.TarInfo("inductor/x")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar_of(path, [first, (link, b"")])


@pytest.mark.parametrize(
    "kind",
    "missing pipe truncated flipped text empty escape absolute foreign link".split()
    + [
        "no manifest",
        "bad manifest",
        "other version",
        "manifest link",
        "deep manifest",
        "huge header",
        "group",
        "aside",
        "file for a folder",
        "bomb",
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, kind: str) -> None:
    """Bug: a traceback, a half-unpacked folder, a file written outside of it, or a wait without
    end."""
    artifact.pack(filled(tmp_path / "a").folder, tmp_path / "x.tar.gz")
    bad = tmp_path / "bad.tar.gz"
    damaged(kind, (tmp_path / "x.tar.gz").read_bytes(), bad)
    store = artifact.store(tmp_path / "b", PARTS)
    with pytest.raises(ValueError, match=r"bad\.tar\.gz: not a usable artifact .*--output"):
        artifact.unpack(bad, store)
    assert os.listdir(tmp_path / "b") == []
    assert not (tmp_path / "evil").exists()


def test_no_room_to_unpack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: where the disk is full, the artifact is said to be damaged, and is made again; or room
    is to be made where the artifact lies."""

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    artifact.pack(filled(tmp_path / "a").folder, tmp_path / "x.tar.gz")
    monkeypatch.setattr(tarfile.TarFile, "extract", full)
    with pytest.raises(ValueError, match=r"cannot be unpacked in \S+/b \(.* make room there"):
        artifact.unpack(tmp_path / "x.tar.gz", artifact.store(tmp_path / "b", PARTS))
    assert os.listdir(tmp_path / "b") == []


def test_a_folder_within_that_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: where root has once compiled in our folder, or a part of it lies on another disk, the
    artifact is said to be damaged; or one that may not be read is said to lack a place."""

    def refuse(path: Path, *_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    file, store = tmp_path / "x.tar.gz", artifact.store(tmp_path / "b", PARTS)
    artifact.pack(filled(tmp_path / "a").folder, file)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", refuse)
        with pytest.raises(ValueError, match=r"cannot be unpacked .* GRAPHENGINE_CACHE"):
            artifact.unpack(file, store)
    monkeypatch.setattr(gzip, "open", refuse)
    with pytest.raises(ValueError, match=r"not a usable artifact .*Permission denied"):
        artifact.unpack(file, store)


def test_nothing_to_pack(tmp_path: Path) -> None:
    """Bug: an empty artifact is written and later seems to be used."""
    with pytest.raises(ValueError, match="graphengine compile"):
        artifact.pack(tmp_path, tmp_path / "x.tar.gz")
    store = filled(tmp_path / "a")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written"):
        artifact.pack(store.folder, tmp_path / "file" / "x.tar.gz")


@pytest.mark.parametrize("error", [OSError("no space"), KeyboardInterrupt()])
def test_a_file_is_packed_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Bug: Ctrl-C while packing leaves gigabytes of half an artifact beside the file."""
    store, file = filled(tmp_path / "a"), tmp_path / "sub" / "x.tar.gz"
    file.parent.mkdir()
    file.write_text("before")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(tarfile.TarFile, "add", fail)
    with pytest.raises((ValueError, KeyboardInterrupt)):
        artifact.pack(store.folder, file)
    assert os.listdir(file.parent) == ["x.tar.gz"]
    assert file.read_text() == "before"


def test_packed_while_another_start_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a file that another process's compiler has renamed since the folder was listed costs the
    artifact, and --output is told to be no place that can be written."""
    packed, file = filled(tmp_path / "a"), tmp_path / "x.tar.gz"
    folder = packed.folder / "triton" / "tmp.pid_7"
    folder.mkdir()
    (folder / "later.cubin").write_text("part")
    describe = tarfile.TarFile.gettarinfo

    def moved(self: tarfile.TarFile, name: Any = None, *rest: Any) -> tarfile.TarInfo:
        if str(name).endswith("later.cubin"):
            shutil.rmtree(folder)
        return describe(self, name, *rest)

    monkeypatch.setattr(tarfile.TarFile, "gettarinfo", moved)
    artifact.pack(packed.folder, file)
    store = artifact.store(tmp_path / "b", PARTS)
    assert artifact.unpack(file, store) == []
    assert artifact.num_files(store.folder) == 4


def test_only_a_file_is_replaced(tmp_path: Path) -> None:
    """Bug: root's --output /dev/null puts an artifact in the place of the device."""
    store, pipe, link = filled(tmp_path / "a"), tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(tmp_path / "x.tar.gz")
    with pytest.raises(ValueError, match="no regular file"):
        artifact.pack(store.folder, pipe)
    assert pipe.is_fifo()
    done = CliRunner().invoke(
        cli.main,
        ["compile", "--output", str(pipe)],
        env={"GRAPHENGINE_CACHE": str(tmp_path / "c")},
    )
    assert done.exit_code == 2 and "no regular file" in done.stderr.replace("\n", " ")
    artifact.pack(store.folder, link)
    assert link.is_symlink() and (tmp_path / "x.tar.gz").is_file()
