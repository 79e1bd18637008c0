"""Keys of compiled code, which name what differs, and the manifest of who compiled it."""

import errno
import json
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graphengine.capture import precompiled
from graphengine.checkpoints.hub import TINY_DRAFT, TINY_TARGET
from graphengine.config.options import Options
from graphengine.decode import segments
from graphengine.kernels import accept
from graphengine.models import layers
from graphengine.startup import artifact
from graphengine.startup.build import read_configs
from graphengine.startup.options import resolve_options
from tests.support.artifacts import ENTRY, PARTS, filled

ROOT = Path(__file__).resolve().parents[2]


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
    monkeypatch.setattr(precompiled, "loaded_code", lambda function: function.__name__)
    target, draft = read_configs(TINY_TARGET, TINY_DRAFT)
    assert draft is not None
    config = resolve_options(Options(device="cpu", compile=True), target, draft)
    base = artifact.engine_parts(config, target, draft)

    def changed(key: str, **changes: Any) -> None:
        found = artifact.engine_parts(replace(config, **changes), target, draft)
        assert [text.split(":")[0] for text in artifact.differences(base, found)] == [key]

    changed("buckets", buckets=(1,))
    changed("dtype", dtype="bfloat16")
    changed("graph_mode", graph_mode="full")
    changed("attention_backend", attention_backend="triton")
    changed("draft_quantization", draft_quantization="fp8")
    changed("num_speculative_tokens", num_speculative_tokens=(15, 15, 11))
    changed("num_speculative_tokens", num_speculative_tokens=(15, 11, 11))
    changed("compile", compile=False)
    changed("page_size", page_size=1)
    # Logits to draw from, adjust, score or mask are of a segment of their own.
    for name in ("sampling", "adjustments", "structured_outputs"):
        changed("ends", **{name: False})
    changed("ends", max_logprobs=0)
    wider = replace(target, hidden_size=256)
    assert artifact.engine_parts(config, wider, draft)["target"] != base["target"]
    longer = replace(draft, block_size=8)
    assert artifact.engine_parts(config, target, longer)["draft"] != base["draft"]
    assert artifact.engine_parts(config, target, None)["draft"] == "none"
    # What no shape shows, but a compiled segment holds as a number.
    other = replace(target, rms_norm_eps=target.rms_norm_eps * 2)
    assert artifact.engine_parts(config, other, draft)["target"] != base["target"]


def test_what_a_key_says_of_models() -> None:
    """Bug: where a model's code is not found, heads or experts are told in another order than
    anywhere else, or a dense model's width is another's: nobody sees what differs."""

    def said(*pair: str) -> list[str]:
        target, draft = read_configs(*pair)
        config = resolve_options(Options(device="cpu"), target, draft)
        found = artifact.engine_parts(config, target, draft)
        return [re.sub(r" \[\w+\]", "", found[key]) for key in ("target", "draft")]

    assert said("qwen3-30b-a3b", "ngram") == [
        "48 layers 2048x768 (8/128), vocabulary 151936, heads 32/4x128",
        "n-gram, block 16",
    ]
    assert said(str(TINY_TARGET), str(TINY_DRAFT)) == [
        "8 layers 192x512, vocabulary 2048, heads 4/2x64",
        "3 layers 192x512, vocabulary 2048, heads 4/2x64, block 16",
    ]


@pytest.mark.slow
def test_what_is_replaced_is_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: code that a tool or a test has replaced, in memory alone, is said to be the same."""
    target, draft = read_configs(TINY_TARGET, TINY_DRAFT)
    config = resolve_options(Options(device="cpu", compile=True), target, draft)
    base = artifact.engine_parts(config, target, draft)
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


def test_another_bucket_is_one_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: who adds a bucket is told that the drafts a step differ as well: 7 there, 7,7 here."""
    monkeypatch.setattr(precompiled, "loaded_code", lambda function: function.__name__)
    target, draft = read_configs(TINY_TARGET, TINY_DRAFT)
    parts = [
        artifact.engine_parts(
            resolve_options(
                Options(device="cpu", buckets=buckets, num_speculative_tokens=numbers),
                target,
                draft,
            ),
            target,
            draft,
        )
        for buckets, numbers in (((1,), 3), ((1, 4), 3), ((1, 4), (3, 2)))
    ]
    assert artifact.differences(parts[0], parts[1]) == ["buckets: 1 there, 1,4 here"]
    assert artifact.differences(parts[1], parts[2]) == ["num_speculative_tokens: 3 there, 3,2 here"]


def test_our_own_code_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a folder is left out, and what an older version compiled is said to fit."""
    target, _ = read_configs(TINY_TARGET, None)
    config = resolve_options(Options(device="cpu", compile=True), target, None)
    found = [artifact.engine_parts(config, target, None)["code"]]
    read = Path.read_bytes
    for file in ("kernels/argmax.py", "models/layers.py", "decode/segments.py"):
        seen: list[Path] = []

        def changed(path: Path, file: str = file, seen: list[Path] = seen) -> bytes:
            is_it = path.as_posix().endswith(file)
            seen.extend([path] * is_it)
            return read(path) + b"#" * is_it

        monkeypatch.setattr(Path, "read_bytes", changed)
        found.append(artifact.engine_parts(config, target, None)["code"])
        assert len(set(seen)) == 1  # maybe for two of the functions that reach it
    assert len(set(found)) == 4


def test_the_python_decides_by_its_minor_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: extensions that another Python's ABI is built into are taken for this one's; or a
    security release of Python compiles everything anew."""
    found = []
    for version in (("3", "12", "1"), ("3", "13", "1"), ("3", "13", "2")):
        monkeypatch.setattr(artifact.platform, "python_version_tuple", lambda v=version: v)
        found.append(artifact.platform_parts("cpu")["python"])
    assert found == ["3.12", "3.13", "3.13"]


def test_the_gpu_decides_by_all_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: code of another driver is taken for this one's."""
    found = []
    for gpu in (("H200", "9.0", "580"), ("H200", "9.0", "590"), ("H200", "9.1", "580")):
        monkeypatch.setattr(artifact, "_gpu", lambda gpu=gpu: gpu)
        found.append(artifact.store(Path("/x"), artifact.platform_parts("auto")).folder)
    assert len(set(found)) == 3


@pytest.mark.parametrize("failing", ["cuInit", "cuDeviceGetName", "cuDriverGetVersion"])
def test_a_driver_without_a_gpu(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    """Bug: where a driver is installed and no GPU is there or visible, code is kept for a GPU
    without a name."""

    class Driver:
        def __getattr__(self, name: str) -> Any:
            return lambda *_: 100 if name == failing else 0  # CUDA_ERROR_NO_DEVICE

    monkeypatch.setattr(artifact.ctypes, "CDLL", lambda name: Driver())
    parts = artifact.platform_parts("auto")
    assert parts["device"] == "cpu" and "gpu" not in parts


def test_the_cpu_decides_by_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: two CPUs of one name, with other instruction sets but as many, share a folder, and code
    of the one ends the other's process; or two of one kind do not, by the order of the names."""

    def cpu(*flags: str, key: str = "flags") -> str:
        lines = [f"model name\t: Xeon\n{key}\t\t: {each}\npower management:\n" for each in flags]
        monkeypatch.setattr(Path, "read_text", lambda *_, **__: "\n".join(lines))
        return artifact.platform_parts("cpu")["cpu"]

    one = cpu("sse avx2", "sse avx2")
    assert one.startswith("Xeon [") and one == cpu("avx2 sse")
    assert len({one, cpu("sse avx512f"), cpu("sse"), cpu("sse avx2 avx512f")}) == 4
    assert cpu("asimd", key="Features") != cpu("asimd sve", key="Features"), "as ARM's are told"


@pytest.mark.parametrize(
    ("text", "name", "flags"),
    [
        (
            "model name : First\nflags : avx fma\n\nmodel name : Second\nflags : avx\n",
            "First",
            ["avx", "fma"],
        ),
        ("Features : sve asimd\nFeatures : asimd\n", "unknown", ["asimd", "sve"]),
    ],
)
def test_the_first_cpu_is_told(
    monkeypatch: pytest.MonkeyPatch, text: str, name: str, flags: list[str]
) -> None:
    """Bug: of a machine with several kinds of cores the last one's name and instructions are told,
    or of one that names no model nothing at all."""
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: text)
    assert artifact.platform_parts("cpu")["cpu"] == f"{name} [{artifact._hash(flags)}]"
