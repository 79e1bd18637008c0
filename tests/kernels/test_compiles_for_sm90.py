"""Every kernel compiles for Hopper and fits it, on a host without a GPU.

The interpreter runs what the compiler refuses (a type that changes in a loop, a shape that is no
power of two) and knows neither registers nor shared memory. Here launches of fake CUDA tensors go
through the launchers as on a GPU, up to machine code made by the ptxas of triton's wheel.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from graphengine.capture.precompiled import loaded_code
from graphengine.decode.segments import first_segment
from graphengine.kernels import triton_internals
from graphengine.kernels.compile_worker import AskedError, asking, compile_kernel
from graphengine.kernels.interpreter import INTERPRET
from graphengine.kernels.launch import compile_only
from graphengine.kernels.skinny_config import SkinnyConfig
from graphengine.kernels.triton_internals import bind_kernels, settle_cache_keys
from tests.support.fake_hopper import SHARED_MEMORY_BYTES, fake_hopper
from tests.support.kernel_launches import (
    BF16,
    LAUNCHES,
    advance,
    attend,
    attend_chunk,
    mix,
    multiply,
    normalise,
    project,
)

MAX_STACK_BYTES = 1024  # a thread's; more is spilled registers
TOOLS = (knobs.nvidia.ptxas, knobs.nvidia.cuobjdump)

pytestmark = [
    pytest.mark.skipif(INTERPRET, reason="interpreted kernels are not compiled"),
    pytest.mark.skipif(
        not all(Path(tool.path).is_file() for tool in TOOLS), reason="triton came without ptxas"
    ),
]


def max_stack_bytes(kernel: str, launch: str) -> int:
    """None where spilling would cost what the kernel is for."""
    if kernel == "specialized_linear_kernel":  # after the loop; 128 before triton 3.9
        return 280 if launch == "GEMM, wide, 192 rows, FP8" else 144
    # Triton 3.9 spills two registers of these.
    if (kernel, launch) in (
        ("_add_rms_norm_kernel", "residual and norm, 20480 columns"),
        ("chunk_attention_kernel", "attention of chunks, narrow heads"),
    ):
        return 8
    whole = "chunk_attention_kernel", "chunk_swiglu_kernel", "merge_splits_kernel"
    whole += "delta_prepare_kernel", "large_chunk_linear_kernel"
    if launch.startswith("head") or kernel in whole:
        return 0
    if kernel == "wide_linear_kernel":  # in FP8 it spills when sums are scaled, after the loop
        return 256 if "FP8" in launch else 0
    return 0 if kernel in ("_add_rms_norm_kernel", "_rows_to_fp8_kernel") else MAX_STACK_BYTES


# Many tiles, the same kernel at another width, or what takes more than 3 s to compile.
LONG = {
    *(f"residual and norm, {D} columns" for D in (2560, 9728, 12288, 12800, 20480)),
    "GEMM, 128 rows, of the table",
    *("GEMM, wide, 16 rows", "GEMM, wide, 192 rows", "GEMM, wide, 192 rows, FP8"),
    "GEMM, wide, 256 rows",
    *(f"GEMM, wide, 256 rows, {kind}" for kind in ("FP8, SwiGLU", "SwiGLU", "partials")),
    *(f"GEMM, wide, 128 rows, {kind}" for kind in ("SwiGLU", "FP8", "partials")),
    *(f"head, {T} rows" for T in (16, 64, 128, 192, 256)),
    *(f"head, {T} rows, FP8" for T in (16, 128, 256)),
    *("attention of chunks", "SwiGLU of a chunk", "sampled tail", "heads of the table"),
    "attention, specialised",
    *(f"attention of chunks, {kind}" for kind in ("other tiles", "wide heads", "split")),
    *("attention with a gate", "attention in float32", "attention, two splits"),
    *("attention, two row tiles, window", "attention, window", "attention, pages of 128"),
    "attention, one split, float32",
    *("recurrence", "recurrence of a prompt", "recurrence, one row"),
    *("experts, other numbers of rows", "experts of a prompt", "experts, 35B-A3B"),
    *("experts, gpt-oss", "experts, gpt-oss, other numbers of rows"),
}
assert set(LAUNCHES) >= LONG


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The kernels that launches have compiled; nothing is run."""
    kernels: list[Any] = []
    real = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernels.append(real(self, *args, grid=grid, warmup=True, **options))
        return kernels[-1]

    # "sm90" keys the kernels' own caches, so none of these is ever launched on a real GPU.
    hopper = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: "sm90",
        get_current_stream=lambda device: 0,
        launcher_cls=lambda src, metadata: None,
    )
    monkeypatch.setattr(driver, "_active", hopper)
    monkeypatch.setattr(JITFunction, "run", run)
    with fake_hopper(monkeypatch):
        yield kernels


def test_results_are_written_through(compiled: list[Any]) -> None:
    """Bug: the compiler makes ordinary stores of the words that the host looks for, which may then
    wait on the device for the end of a graph."""
    advance(3, 16)
    (kernel,) = compiled
    assert kernel.asm["ptx"].count("st.global.wt.b64") == 2


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["verify_kernel", "convolve_kernel"])
def test_all_is_read_before_anything_is_written(kernel: str, compiled: list[Any]) -> None:
    """Bug: a read stands behind a write, in front of which the compiler does not move it: memory is
    waited for once more, in every recurrent layer (profiles/LOG-2026-11-28.md)."""
    LAUNCHES["recurrence"]()
    LAUNCHES["recurrence of a prompt"]()
    found = [k.asm["ptx"] for k in compiled if k.name == kernel]
    assert found
    for ptx in found:
        reads_and_writes = re.findall(r"\b(ld|st)\.global", ptx)
        assert reads_and_writes == sorted(reads_and_writes)


@pytest.mark.parametrize(
    "launch", ["GEMM", pytest.param("GEMM, wide, 16 rows", marks=pytest.mark.slow)]
)
def test_descriptors_are_prefetched(launch: str, compiled: list[Any]) -> None:
    """Bug: the compiler numbers a kernel's parameters otherwise, so what is fetched ahead is no
    descriptor (`prefetch_descriptor`): then find the new name in the PTX, or drop the call."""
    LAUNCHES[launch]()
    assert compiled
    for kernel in compiled:
        ptx = kernel.asm["ptx"]
        (place,) = re.findall(r"mov.b64 at, (\w+);", ptx)
        assert re.search(rf"\.param \.align 64 \.b8 {place}\[128\]", ptx)


@pytest.mark.parametrize(
    "launch",
    [
        "GEMM",
        pytest.param("GEMM, SwiGLU", marks=pytest.mark.slow),
        pytest.param("GEMM, wide, 128 rows, SwiGLU", marks=pytest.mark.slow),
        pytest.param("GEMM, wide, of the table", marks=pytest.mark.slow),
    ],
)
def test_weights_leave_l2_first(launch: str, compiled: list[Any]) -> None:
    """Bug: the compiler writes loads or addresses otherwise (`hinted`), so that weights push out of
    L2 what the kernels behind read; or x, which every program reads, leaves it first too."""
    LAUNCHES[launch]()
    assert compiled
    for kernel in compiled:
        load = r"bulk\.tensor\.(\d)d\.shared::\w+\.global\.\S+?bytes(\.L2::cache_hint)? "
        kinds = set(re.findall(load, kernel.asm["ptx"]))
        weights = max(rank for rank, _ in kinds)  # SwiGLU's are of rank 4
        assert kinds == {(weights, ".L2::cache_hint"), ("2", "")}, kernel.name


@pytest.mark.parametrize(
    "launch",
    [partial(normalise, 256, 4096, 2), LAUNCHES["norm, rope and writes"]],
    ids=["residual and norm", "norm, rope and writes"],
)
def test_all_is_asked_for_before_anything_is_summed(
    launch: Callable[[], object], compiled: list[Any], tmp_path: Path
) -> None:
    """Bug: to spare registers that nobody else wants, the assembler asks for a part of a row only
    when others have come: memory is waited for up to six times, in every layer (`all_registers`).
    """
    launch()
    assert compiled
    for kernel in compiled:
        assert_loads_come_first(kernel, "FADD|FMUL|FFMA", tmp_path)


@pytest.mark.slow
def test_a_recurrence_waits_for_memory_once(compiled: list[Any], tmp_path: Path) -> None:
    """Bug: the compiler moves each load of a block through shared memory before it asks for the
    next one: memory is waited for up to seven times, in every recurrent layer (`arrived`)."""
    LAUNCHES["recurrence"]()
    kernels = [kernel for kernel in compiled if kernel.name == "verify_kernel"]
    assert kernels
    for kernel in kernels:
        assert_loads_come_first(kernel, "BAR", tmp_path)


def assert_loads_come_first(kernel: Any, others: str, tmp_path: Path) -> None:
    """Behind the wait for the kernel in front no load stands behind one of the other kinds."""
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    behind_wait = disassembled(cubin).split("ACQBULK")[-1]
    kinds = re.findall(rf"\b(LDG|{others})\b", behind_wait)
    assert kinds[: kinds.count("LDG")] == ["LDG"] * kinds.count("LDG")


def disassembled(cubin: Path) -> str:
    line = [str(Path(knobs.nvidia.cuobjdump.path).with_name("nvdisasm")), "-c", str(cubin)]
    return subprocess.run(line, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
@pytest.mark.parametrize("splits", [0, 4])
def test_a_softmax_runs_beside_products(compiled: list[Any], tmp_path: Path, splits: int) -> None:
    """Bug: ptxas serialises wgmma, or waits for P V before it computes the softmax: right results
    at half the rate."""
    attend_chunk(128, splits=splits)
    said, code = assembled(compiled[0], tmp_path)
    assert "serialized" not in said
    waits = re.split(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[01])", code)
    beside = [
        part.count("MUFU.EX2")
        for first, part, second in zip(waits[1::2], waits[2::2], waits[3::2], strict=False)
        if (first, second) == ("0x1", "0x0")
    ]
    print(beside)
    assert len(beside) == 4  # two consumers, each with tiles that are masked and that are not
    assert min(beside) >= 64


@pytest.mark.slow
def test_scores_are_computed_beside_products(compiled: list[Any], tmp_path: Path) -> None:
    """Bug: ptxas serialises wgmma, so that the next tile's scores wait for P V."""
    LAUNCHES["attention, specialised"]()
    for kernel in compiled:
        said, code = assembled(kernel, tmp_path)
        assert "serialized" not in said
        assert re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x1", code)


def assembled(kernel: Any, tmp_path: Path) -> tuple[str, str]:
    """(what ptxas says, machine code) of a kernel's PTX."""
    ptx, cubin = tmp_path / "kernel.ptx", tmp_path / "kernel.cubin"
    ptx.write_text(kernel.asm["ptx"])
    # From triton 3.9 on the newer assembler is this architecture's too.
    tools = knobs.nvidia.ptxas, getattr(knobs.nvidia, "ptxas_blackwell", knobs.nvidia.ptxas)
    arguments = ["-v", "--gpu-name=sm_90a", str(ptx), "-o", str(cubin)]
    done = [
        subprocess.run([tool.path, *arguments], capture_output=True, text=True, check=False)
        for tool in tools
    ]
    said = next(run.stderr for run in done if run.returncode == 0)
    return said, disassembled(cubin)


@pytest.mark.slow
def test_what_is_compiled_ahead_is_what_is_launched(
    compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: ahead, a kernel is compiled under another key than its launch looks for, and again; or
    its first launch waits for the C compiler."""
    launchers: list[str] = []
    monkeypatch.setattr(
        driver.active, "launcher_cls", lambda src, metadata: launchers.append(src.fn.__name__)
    )

    def launch() -> None:
        project(16, 32, 8, 128)
        multiply(16, SkinnyConfig(64, 256, 5, 4, 1, 4, 2, 1))
        attend(BF16, 128, 16, True, None, page_size=128)
        mix(16, 128, 768)

    with compile_only():
        launch()
        ahead = list(compiled)
        launch()
    assert launchers == [kernel.metadata.name for kernel in ahead]
    compiled.clear()
    launch()
    assert len(ahead) == len(compiled) == 8
    assert all(kernel is one for kernel, one in zip(compiled, ahead, strict=True))


def test_kernels_leave_nothing_in_keys(compiled: list[Any]) -> None:
    """Bug: a segment's key has what compiling kernels leaves in our modules, so that no start finds
    what an earlier one compiled behind its first kernels: plain decoding's segments."""
    before = loaded_code(first_segment)
    with compile_only():
        LAUNCHES["GEMM"]()
        LAUNCHES["attention"]()
    assert compiled
    assert loaded_code(first_segment) == before


@pytest.mark.slow
def test_threads_share_kernels_of_gluon(
    compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a start ends in "Could not determine the number of warps per CTA", since Triton makes a
    kernel of Gluon's ready as one of its own first, and another thread compiles it then."""
    monkeypatch.setattr(driver.active, "get_current_device", lambda: "another sm90")
    bind_kernels(compile_kernel)

    def bind(kernel: Any) -> Any:
        raise AssertionError(f"{kernel.__name__} is made ready a second time")

    monkeypatch.setattr(JITFunction, "create_binder", bind)
    LAUNCHES["GEMM, wide, 16 rows"]()
    assert compiled


@pytest.mark.slow
def test_another_process_compiles_for_this_one(
    compiled: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Bug: what a process has compiled for a start is found under another key or in another folder,
    and every kernel is compiled twice; a start that finds all asks for processes; or one that goes
    on without waiting has a launch end, or a kernel taken for compiled."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    hits: list[tuple[str, bool]] = []

    def listen(src: Any, cache_hit: bool, **event: object) -> None:
        hits.append((src.name, cache_hit))

    monkeypatch.setattr(knobs.compilation, "listener", listen)
    jobs: list[bytes] = []
    code = "import sys; from graphengine.kernels.compile_worker import compile_job as do"
    code += "; do(sys.stdin.buffer.read())"

    def ask(job: bytes) -> None:
        jobs.append(job)
        environment = os.environ | {"TRITON_CACHE_DIR": "elsewhere", "TRITON_PTXAS_PATH": "none"}
        line = [sys.executable, "-c", code]
        subprocess.run(line, input=job, check=True, env=environment)

    def launch(device: str) -> None:
        monkeypatch.setattr(driver.active, "get_current_device", lambda: device)
        bind_kernels(compile_kernel)
        project(16, 32, 8, 128)
        multiply(16, SkinnyConfig(64, 256, 5, 4, 1, 4, 2, 1))

    for kernel in triton_internals._kernels():  # asked for in another order by other tests
        monkeypatch.setattr(kernel, "hash", None)
    settle_cache_keys()
    noted: list[bytes] = []

    def note(job: bytes) -> None:
        noted.append(job)
        raise AskedError

    with compile_only(), asking(note):
        launch("sm90 that goes on at once")
    assert not hits
    with asking(ask):
        launch("sm90 that asks")
        assert jobs == noted and len(jobs) == len(hits) == 4
        launch("sm90 that finds all")
    assert len(jobs) == 4 and len(hits) == 8
    assert all(hit for _, hit in hits), hits


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in LAUNCHES],
)
def test_compiles_for_sm90(name: str, compiled: list[Any], tmp_path: Path) -> None:
    """Bug: a kernel that only the interpreter accepts, asks for more shared memory than there is,
    or spills so many registers that its tiles live in memory."""
    LAUNCHES[name]()
    assert compiled
    for kernel in compiled:
        cubin = tmp_path / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        line = [knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin)]
        usage = subprocess.run(line, capture_output=True, text=True, check=True).stdout
        found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
        assert found, usage
        print(f"{kernel.metadata.name}: {found[0]} SHARED:{kernel.metadata.shared}")
        assert int(found[2]) <= max_stack_bytes(kernel.metadata.name, name)
        assert kernel.metadata.shared <= SHARED_MEMORY_BYTES
