"""Compiled code that outlives the process: where it lies, what it was made for, how it travels.

Inductor, Triton and FlashInfer each keep what they compile in a folder of their own. The command
line points the three at one folder per platform, `<root>/<platform>/{inductor,triton,flashinfer}`,
before they are imported, so that every later start finds what was compiled once. That folder is the
artifact; `graphengine compile --output FILE` packs it.

Why not `torch.compiler.save_cache_artifacts()`: it holds graphs, but no C++ objects, nor what
Triton compiles outside of Inductor or FlashInfer builds. First run of the segments (bundled pair,
bucket 1, 2-core CPU, torch 2.13): 24.3 s cold, 3.6 s from the folder, 16.0 s from such artifacts.

Invariant: the three, and our segments in Inductor's folder (capture/precompiled.py), look code up
by a hash of source, shapes, target and versions: what does not fit is missed and compiled anew,
never run. The platform in the folder's name and the manifest tell people which part differs.
Moved folders: absolute paths in Triton's groups are rewritten when unpacked. FlashInfer's ninja
files hold them too: it builds its modules again unless root and packages lie where they did.
Trust: an artifact holds machine code and pickles that torch loads. Use only your own.
"""

from __future__ import annotations

import ctypes
import errno
import gzip
import hashlib
import json
import os
import platform
import re
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from graphengine.config.draft import DraftSpec
from graphengine.config.engine import EngineConfig
from graphengine.config.model import ModelConfig

FOLDERS = ("inductor", "triton", "flashinfer")
MANIFEST = "manifest.json"
LOCK = "manifest.lock"
VERSION = 1
MAX_MANIFEST_BYTES = 16 << 20  # thousands of entries
MAX_SMALL_BYTES, MAX_RATIO = 64 << 20, 40  # unpacked; code shrinks to a third or a tenth
# Of a member that is unpacked. Python 3.11.2, Debian 12's, has no filters yet.
EXTRACTED: dict[str, Any] = (
    {"filter": "data"} if hasattr(tarfile, "data_filter") else {"set_attrs": False}
)
_PACKAGES = ("torch", "triton", "flashinfer-python")

# What reading a damaged or hostile file raises.
_DAMAGED = (
    OSError,
    EOFError,
    ValueError,
    MemoryError,
    RecursionError,
    tarfile.TarError,
    zlib.error,
)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_PLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EXDEV)

Parts = dict[str, str]
"""Name of a part of a key -> its value, as people read it."""


class Store(NamedTuple):
    """Where this platform's compiled code lies, what the platform is, and what to tell the user.

    `segments`: where compiled segments are; the user's own TORCHINDUCTOR_CACHE_DIR, or `folder`.
    """

    folder: Path
    parts: Parts
    notes: list[str]
    segments: str


# --- keys ---


def platform_parts(device: str) -> Parts:
    """What compiled code depends on beside its source: versions and processor.

    Args:
        device: "auto", "cuda" or "cpu", as typed.
    """
    parts = {"python": ".".join(platform.python_version_tuple()[:2]), "machine": platform.machine()}
    for package in _PACKAGES:
        try:
            parts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            parts[package] = "none"
    gpu = None if device == "cpu" else _gpu()
    if gpu is None:
        return parts | {"device": "cpu", "cpu": _cpu()}
    name, capability, driver = gpu
    return parts | {"device": "cuda", "gpu": name, "capability": capability, "driver": driver}


def engine_parts(config: EngineConfig, target: ModelConfig, draft: DraftSpec | None) -> Parts:
    """What one start compiled: shapes of the models, buckets, modes, our own code."""
    from graphengine.capture.precompiled import loaded_code  # here: it imports torch
    from graphengine.decode.ends import end_names
    from graphengine.decode.segments import first_segment
    from graphengine.kernels.accept import accept_and_advance_
    from graphengine.kernels.block_attention import block_attention

    # Their modules reach all of ours that is compiled. Not those of capture, which hold what they
    # have compiled so far; its settings are in a segment's own key.
    reached = [loaded_code(f) for f in (first_segment, accept_and_advance_, block_attention)]

    def shapes(model: ModelConfig) -> str:
        heads = f"{model.num_attention_heads}/{model.num_key_value_heads}x{model.head_dim}"
        width: int | str = model.intermediate_size
        if (moe := model.moe) is not None:
            width = f"{moe.moe_intermediate_size} ({moe.num_experts_per_tok}/{moe.num_experts})"
        sizes = f"{model.hidden_size}x{width}, vocabulary {model.vocab_size}"
        return f"{model.num_hidden_layers} layers {sizes}, heads {heads} [{_hash(asdict(model))}]"

    drafter = "none"
    if draft is not None:
        layers = "; ".join(map(shapes, draft.models)) or "n-gram"
        drafter = f"{layers}, block {draft.block_size} [{_hash(asdict(draft))}]"
    numbers = config.num_speculative_tokens
    if len(set(numbers)) == 1:  # so that more buckets are one difference
        numbers = numbers[:1]
    names = ("dtype", "graph_mode", "attention_backend", "draft_quantization")
    return {
        "target": shapes(target),
        "draft": drafter,
        "buckets": ",".join(map(str, config.buckets)),
        **{name: getattr(config, name) for name in names},
        "num_speculative_tokens": ",".join(map(str, numbers)) or "none",
        "compile": "yes" if config.compile else "no",
        "page_size": str(config.page_size),
        "ends": ",".join(end_names(config)),
        "code": _hash(reached),
    }


def differences(there: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """`name: x there, y here` of every part that differs."""
    return [
        f"{name}: {there.get(name, 'nothing')} there, {here.get(name, 'nothing')} here"
        for name in {**here, **there}
        if there.get(name) != here.get(name)
    ]


def store(root: Path, parts: Parts) -> Store:
    """This platform's folder below `root`; nothing is created."""
    what = parts["gpu" if parts["device"] == "cuda" else "machine"]
    name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{what}-torch{parts['torch']}").strip("-")
    folder = root / f"{name}-{_hash(parts)}"
    return Store(folder, parts, [], str(folder))


def _hash(parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:10]


def _gpu() -> tuple[str, str, str] | None:
    """(name, compute capability, driver) of the first visible GPU, without importing torch."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    major, minor, version = [ctypes.c_int() for _ in range(3)]
    if (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(device), 0)
        or driver.cuDeviceGetName(name, 256, device)
        or driver.cuDeviceGetAttribute(ctypes.byref(major), 75, device)  # COMPUTE_CAPABILITY_MAJOR
        or driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
        or driver.cuDriverGetVersion(ctypes.byref(version))
    ):
        return None
    try:
        installed = Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        installed = f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    return name.value.decode(), f"{major.value}.{minor.value}", installed


def _cpu() -> str:
    """The CPU's name and a hash of its instruction sets: Inductor's C++ is built for both."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    lines = re.findall(r"^(model name|flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    found = dict(reversed(lines))  # of the first one
    flags = found.get("flags", found.get("Features", "unknown")).split()
    return f"{found.get('model name', 'unknown').strip()} [{_hash(sorted(flags))}]"


# --- the folder ---


def num_files(folder: Path) -> int:
    """Files of compiled code; counted before and after a start they tell what was compiled."""
    return sum(len(names) for part in FOLDERS for _, _, names in os.walk(folder / part))


def record_(folder: Path, parts: Parts, compiled: Parts) -> None:
    """Notes in the folder's manifest that a start with `compiled` has filled it.

    One process at a time, so that none drops what another records meanwhile. Where locking is
    impossible, as if alone: compiled code is found without its entry.
    Mutates: the manifest; one entry per distinct `compiled`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        with suppress(ImportError, OSError):
            import fcntl  # on POSIX alone

            # It stays: two processes could each lock a file that is removed.
            file = stack.enter_context((folder / LOCK).open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        entries = [entry for entry in _entries(folder) if entry != compiled]
        manifest = {"version": VERSION, "platform": parts, "compiled": [*entries, compiled]}
        part = folder / f"{MANIFEST}.{os.getpid()}"
        part.write_text(json.dumps(manifest, indent=2) + "\n")
        part.replace(folder / MANIFEST)


def nearest(folder: Path, wanted: Parts) -> list[str] | None:
    """What separates `wanted` from the entry most like it; None where nothing is recorded."""
    found = [differences(entry, wanted) for entry in _entries(folder)]
    return min(found, key=len) if found else None


def _entries(folder: Path) -> list[Parts]:
    try:
        return _parse((folder / MANIFEST).read_bytes())["compiled"]
    except (OSError, ValueError, RecursionError):
        return []


def _parse(text: bytes) -> dict[str, Any]:
    """A manifest, checked as far as it is used."""
    found = json.loads(text)
    if not isinstance(found, dict) or found.get("version") != VERSION:
        raise ValueError(f"the manifest is not of version {VERSION}")
    entries = found.get("compiled")
    for parts in [found.get("platform"), *(entries if isinstance(entries, list) else [None])]:
        if not isinstance(parts, dict) or not all(isinstance(v, str) for v in parts.values()):
            raise ValueError("the manifest is incomplete")
    return found


# --- one file ---


def pack(folder: Path, file: Path) -> int:
    """Writes the folder as one .tar.gz. Returns its bytes.

    Raises:
        ValueError: nothing was compiled into the folder, or the file cannot be written; then what
            was there before stays.
    """
    if not (folder / MANIFEST).is_file():
        raise ValueError(f"{folder}: nothing was compiled here; run graphengine compile first")

    def keep(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return member if member.isfile() else None  # no links, pipes or devices

    file = file.resolve()
    if file.exists() and not file.is_file():  # a device's node would be replaced by a file
        raise ValueError(f"{file}: is no regular file; choose another path")
    part = file.with_name(f".{os.getpid()}.part")
    try:
        with tarfile.open(part, "w:gz", compresslevel=3) as tar:
            tar.add(folder / MANIFEST, MANIFEST)  # first, so that a reader need not seek
            for place, _, names in (part for name in FOLDERS for part in os.walk(folder / name)):
                for path in (Path(place, name) for name in names):
                    with suppress(FileNotFoundError):  # a compiler's own, renamed meanwhile
                        tar.add(path, path.relative_to(folder), filter=keep)
        part.replace(file)
    except OSError as error:
        raise ValueError(f"{file}: cannot be written ({error}); choose another path") from error
    finally:  # also after Ctrl-C
        with suppress(OSError):
            part.unlink(missing_ok=True)
    return file.stat().st_size


def unpack(file: Path, into: Store) -> list[str]:
    """Adds an artifact's compiled code to this platform's folder, where files that are there stay.
    Mutates: `into.folder`.

    Returns:
        The parts of the platform that differ; then nothing was unpacked.

    Raises:
        ValueError: the file is missing, damaged or no artifact, or there is no room for it.
    """
    remedy = "make one with graphengine compile --output FILE"
    into.folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix="unpacking-", dir=into.folder.parent))
    try:
        if file.exists() and not file.is_file():  # a pipe may never get a writer
            raise ValueError("it is no regular file")
        with gzip.open(file) as stream, tarfile.open(fileobj=stream, mode="r:") as tar:
            room = MAX_SMALL_BYTES + MAX_RATIO * os.path.getsize(file)
            first = tar.next()
            content = None
            if first is not None and first.isfile() and first.name == MANIFEST:
                content = tar.extractfile(first)
            if content is None:
                raise ValueError("it does not begin with a manifest")
            manifest = _parse(content.read(MAX_MANIFEST_BYTES))
            if found := differences(manifest["platform"], into.parts):
                return found
            for member in tar:
                if member is first:
                    continue
                parts = member.name.split("/")
                is_code = parts[0] in FOLDERS and ".." not in parts
                if not is_code or not (member.isdir() or (member.isfile() and len(parts) > 1)):
                    raise ValueError(f"it holds {member.name!r}, which is no compiled code")
                room -= member.size
                if room < 0:
                    raise ValueError("it unpacks to more than compiled code would")
                tar.extract(member, fresh, **EXTRACTED)
            while stream.read(1 << 20):  # to the end: tarfile stops at a damaged header in silence,
                pass  # the checksum behind the last byte does not
        _adopt(fresh, into.folder)
        for entry in manifest["compiled"]:
            record_(into.folder, into.parts, entry)
        return []
    except _DAMAGED as error:
        code = error.errno if isinstance(error, OSError) and error.filename != str(file) else None
        if code in (*_NO_ROOM, *_NO_PLACE):
            what = "make room there" if code in _NO_ROOM else "give us the right to write there"
            raise ValueError(
                f"{file}: cannot be unpacked in {into.folder.parent} ({error}); {what}, or set "
                "GRAPHENGINE_CACHE to another folder"
            ) from error
        why = str(error) or "it declares more than memory holds"
        raise ValueError(f"{file}: not a usable artifact ({why}); {remedy}") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _adopt(fresh: Path, folder: Path) -> None:
    """Moves files into the folder and points Triton's groups at their new place."""
    files = sorted(path for path in fresh.rglob("*") if path.is_file())
    for source in files:  # all of them before one is moved, so that a damaged one changes nothing
        if source.name.startswith("__grp__"):
            group = json.loads(source.read_text())
            children = group.get("child_paths", {}) if isinstance(group, dict) else None
            if not isinstance(children, dict):
                raise ValueError(f"{source.name} is no group of Triton's")
            place = (folder / source.relative_to(fresh)).parent
            for name, path in children.items():
                children[name] = str(place / Path(str(path)).name)
            group["child_paths"] = children
            source.write_text(json.dumps(group))
    for source in files:
        goal = folder / source.relative_to(fresh)
        if not goal.exists():
            goal.parent.mkdir(parents=True, exist_ok=True)
            source.replace(goal)
