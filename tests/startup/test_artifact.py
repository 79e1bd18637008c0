"""Compiled code kept between starts: keys that name what differs, files that travel."""

import errno
import gzip
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import threading
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from graphengine.capture import precompiled
from graphengine.checkpoints.hub import TINY_DRAFT, TINY_TARGET
from graphengine.cli import main as cli
from graphengine.config.options import Options
from graphengine.decode import segments
from graphengine.kernels import accept
from graphengine.models import layers
from graphengine.startup import artifact
from graphengine.startup.build import read_configs
from graphengine.startup.options import resolve_options

ROOT = Path(__file__).resolve().parents[2]
PARTS = {"torch": "2.13.0", "device": "cuda", "gpu": "NVIDIA H200", "machine": "x86_64"}
ENTRY = {"target": "8B", "buckets": "1,8"}


def filled(root: Path, parts: dict[str, str] = PARTS) -> artifact.Store:
    """A store with one file of each compiler; Triton's group names its files by absolute path."""
    store = artifact.store(root, parts)
    triton = store.folder / "triton" / "ABC"
    ops = "flashinfer/.cache/flashinfer/op.so"
    for path in (
        store.folder / "inductor/g6/graph.py",
        triton / "kernel.cubin",
        store.folder / ops,
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(path.name.encode() * 100)
    group = {"child_paths": {"kernel.cubin": str(triton / "kernel.cubin")}}
    (triton / "__grp__kernel.json").write_text(json.dumps(group))
    artifact.record_(store.folder, parts, ENTRY)
    return store


# --- keys ---


def test_every_difference_is_named() -> None:
    """Bug: a part that only one side has, or a second difference, is left out of the message."""
    there = {"torch": "2.11.0", "gpu": "NVIDIA H200", "old": "x"}
    here = {"torch": "2.13.0", "gpu": "NVIDIA H200", "new": "y"}
    assert artifact.differences(there, here) == [
        "torch: 2.11.0 there, 2.13.0 here",
        "new: nothing there, y here",
        "old: x there, nothing here",
    ]
    assert artifact.differences(here, here) == []


def test_platform_without_torch() -> None:
    """Bug: asking what the platform is imports torch, and the variables come too late for it."""
    code = (
        "import sys, graphengine.startup.artifact as a; p = a.platform_parts('cpu');"
        "assert not {'torch', 'triton'} & set(sys.modules); assert p == a.platform_parts('cpu');"
        "assert {'torch', 'triton', 'flashinfer-python', 'python', 'cpu'} <= set(p), p;"
        "assert p['device'] == 'cpu' and 'gpu' not in p"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_the_gpu_is_in_the_key() -> None:
    """Bug: two GPUs share a folder, or the driver is asked with a wrong attribute."""
    import torch

    parts = artifact.platform_parts("auto")
    major, minor = torch.cuda.get_device_capability(0)
    assert parts["gpu"] == torch.cuda.get_device_name(0)
    assert parts["capability"] == f"{major}.{minor}"
    assert parts["driver"]


def test_every_part_has_its_folder(tmp_path: Path) -> None:
    """Bug: code of another torch or GPU lies in the same folder."""
    folders = {artifact.store(tmp_path, PARTS).folder}
    for name in PARTS:
        folders.add(artifact.store(tmp_path, PARTS | {name: "cuda-2"}).folder)
    assert len(folders) == len(PARTS) + 1
    assert not any(tmp_path.iterdir()), "asking for the folder must not make it"


def test_what_one_start_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: an option that changes the compiled code is missing from the manifest."""
    target, draft = read_configs(TINY_TARGET, TINY_DRAFT)
    assert draft is not None
    config = resolve_options(Options(device="cpu", compile=True), target, draft)
    base = artifact.engine_parts(config, target, draft)

    def changed(key: str, **changes: Any) -> None:
        found = artifact.engine_parts(replace(config, **changes), target, draft)
        assert [text.split(":")[0] for text in artifact.differences(base, found)] == [key]

    # Of the same code, which is hashed once.
    monkeypatch.setattr(precompiled, "loaded_code", cache(hashed := precompiled.loaded_code))
    changed("buckets", buckets=(1,))
    changed("dtype", dtype="bfloat16")
    changed("graph_mode", graph_mode="full")
    changed("attention_backend", attention_backend="triton")
    changed("draft_quantization", draft_quantization="fp8")
    changed("num_speculative_tokens", num_speculative_tokens=(15, 15, 11))
    changed("num_speculative_tokens", num_speculative_tokens=(15, 11, 11))
    changed("compile", compile=False)
    changed("page_size", page_size=1)
    wider = replace(target, hidden_size=256)
    assert artifact.engine_parts(config, wider, draft)["target"] != base["target"]
    longer = replace(draft, block_size=8)
    assert artifact.engine_parts(config, target, longer)["draft"] != base["draft"]
    assert artifact.engine_parts(config, target, None)["draft"] == "none"
    monkeypatch.setattr(precompiled, "loaded_code", hashed)
    named = ((layers, "rms_norm"), (accept, "NUM_RESULTS"), (segments, "force_acceptance_"))
    for owner, name in named:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, None)
            assert artifact.engine_parts(config, target, draft)["code"] != base["code"]
    assert artifact.engine_parts(config, target, draft) == base


def test_the_manifest_keeps_one_entry_each(tmp_path: Path) -> None:
    """Bug: every start adds a line, or the second model replaces the first."""
    store = filled(tmp_path)
    other = {"target": "4B", "buckets": "1"}
    for entry in (other, ENTRY, other):
        artifact.record_(store.folder, PARTS, entry)
    assert artifact.nearest(store.folder, other) == []
    assert artifact.nearest(store.folder, ENTRY) == []
    wanted = {"target": "8B", "buckets": "1"}
    assert artifact.nearest(store.folder, wanted) == ["buckets: 1,8 there, 1 here"]
    found = json.loads((store.folder / artifact.MANIFEST).read_text())
    assert len(found["compiled"]) == 2
    assert artifact.nearest(tmp_path / "nowhere", wanted) is None


def test_starts_at_the_same_time_are_all_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: two starts read the manifest, each adds its entry, and the later one to write drops the
    other's."""
    entries, has_read, is_written = artifact._entries, threading.Event(), threading.Event()

    def slow(folder: Path) -> list[dict[str, str]]:
        found = entries(folder)
        if threading.current_thread() is first:
            has_read.set()
            is_written.wait(0.5)  # in vain where the other has to wait for this one
        return found

    monkeypatch.setattr(artifact, "_entries", slow)
    other = {"target": "4B", "buckets": "1"}
    first = threading.Thread(target=artifact.record_, args=(tmp_path, PARTS, ENTRY))
    first.start()
    assert has_read.wait(10)
    artifact.record_(tmp_path, PARTS, other)
    is_written.set()
    first.join()
    assert entries(tmp_path) == [ENTRY, other]


@pytest.mark.parametrize("lacking", ["module", "locks", "permission"])
def test_recorded_where_nothing_can_be_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    """Bug: a start ends in a traceback on a file system without locks, or in a folder whose lock
    file belongs to somebody else."""

    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    if lacking == "module":
        monkeypatch.setitem(sys.modules, "fcntl", None)
    elif lacking == "locks":
        monkeypatch.setattr("fcntl.flock", refuse)
    else:
        (tmp_path / artifact.LOCK).mkdir()  # cannot be opened, not even by root
    artifact.record_(tmp_path, PARTS, ENTRY)
    assert artifact.nearest(tmp_path, ENTRY) == []


# --- files ---


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
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "no manifest":
        tar_of(path, [(tarfile.TarInfo("inductor/x"), b"x")])
    elif kind == "bad manifest":
        tar_of(path, [(tarfile.TarInfo(artifact.MANIFEST), b'{"version": 1, "platform": [1]}')])
    elif kind == "other version":
        tar_of(path, [(tarfile.TarInfo(artifact.MANIFEST), b'{"version": 99}')])
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
    "missing truncated flipped text empty escape absolute foreign link".split()
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
    """Bug: a traceback, a half-unpacked folder, or a file written outside of it."""
    artifact.pack(filled(tmp_path / "a").folder, tmp_path / "x.tar.gz")
    bad = tmp_path / "bad.tar.gz"
    damaged(kind, (tmp_path / "x.tar.gz").read_bytes(), bad)
    store = artifact.store(tmp_path / "b", PARTS)
    with pytest.raises(ValueError, match=r"bad\.tar\.gz: not a usable artifact .*--output"):
        artifact.unpack(bad, store)
    assert os.listdir(tmp_path / "b") == []
    assert not (tmp_path / "evil").exists()


def test_no_room_to_unpack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: where the disk is full, the artifact is said to be damaged, and is made again."""

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    artifact.pack(filled(tmp_path / "a").folder, tmp_path / "x.tar.gz")
    monkeypatch.setattr(tarfile.TarFile, "extract", full)
    with pytest.raises(ValueError, match=r"cannot be unpacked .* make room there"):
        artifact.unpack(tmp_path / "x.tar.gz", artifact.store(tmp_path / "b", PARTS))
    assert os.listdir(tmp_path / "b") == []


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


@pytest.mark.parametrize("file", ["kernels/argmax.py", "models/layers.py", "decode/segments.py"])
def test_our_own_code_is_in_the_key(monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    """Bug: a folder is left out, and what an older version compiled is said to fit."""
    target, _ = read_configs(TINY_TARGET, None)
    config = resolve_options(Options(device="cpu", compile=True), target, None)
    before = artifact.engine_parts(config, target, None)["code"]
    read, seen = Path.read_bytes, []

    def changed(path: Path) -> bytes:
        is_it = path.as_posix().endswith(file)
        seen.extend([path] * is_it)
        return read(path) + b"#" * is_it

    monkeypatch.setattr(Path, "read_bytes", changed)
    assert artifact.engine_parts(config, target, None)["code"] != before
    assert len(seen) == 1


def test_the_gpu_decides_by_all_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: code of another driver is taken for this one's."""
    found = []
    for gpu in (("H200", "9.0", "580"), ("H200", "9.0", "590"), ("H200", "9.1", "580")):
        monkeypatch.setattr(artifact, "_gpu", lambda gpu=gpu: gpu)
        found.append(artifact.store(Path("/x"), artifact.platform_parts("auto")).folder)
    assert len(set(found)) == 3
