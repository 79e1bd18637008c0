"""The machine: versions, GPU, driver, and what of it makes a run slow or impossible.

`Host` is read once (`read_host`); the findings are pure.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile

import torch

from graphengine.config.bytesize import format_bytes
from graphengine.config.draft import DraftConfig, DraftSpec
from graphengine.config.draft_length import draft_at
from graphengine.config.engine import EngineConfig
from graphengine.config.model import ModelConfig
from graphengine.decode.flashinfer_attention import FLASHINFER_HEAD_DIMS
from graphengine.doctor.findings import Finding, error, info, ok, warning
from graphengine.drafters.dflash import MAX_QUANTIZED_ROWS
from graphengine.profiles.result_schema import environment
from graphengine.startup.compilers import cpp_compiler
from graphengine.startup.memory import DeviceMemory, device_memory

# Up to but not the last; pyproject.toml's bounds are the same (tests/house/test_packaging.py). The
# whole suite has run on torch 2.13 and triton 3.7, on a GPU on 2.11 and 3.6, 2.14 and 3.8; tests
# of the kernels on 3.9. tools/check_versions.py runs all of it at both ends.
TESTED: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "python": ((3, 11), (3, 15)),
    "torch": ((2, 11), (2, 16)),
    "triton": ((3, 6), (3, 10)),
    "flashinfer-python": ((0, 6, 12), (0, 7, 3)),
    "transformers": ((5, 2), (6,)),
}
# The oldest driver that runs a CUDA version's programs.
DRIVER_FOR_CUDA = {12: 525, 13: 580}
HOPPER = 9  # compute capability, the first part of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What a run would find. `versions`: package -> version, None where it is missing.
    `cpp_compiler`: Inductor's, for the CPU."""

    versions: Mapping[str, str | None]
    cuda_version: str | None
    driver_version: str | None
    nsys: str | None
    cpp_compiler: str | None
    gpu_name: str | None
    capability: tuple[int, int] | None
    memory: DeviceMemory | None


def read_host() -> Host:
    """The current machine."""
    env, has_gpu = environment(), torch.cuda.is_available()
    return Host(
        **{name: env[name] for name in ("versions", "cuda_version", "driver_version", "gpu_name")},
        nsys=shutil.which("nsys"),
        cpp_compiler=cpp_compiler(),
        capability=torch.cuda.get_device_capability() if has_gpu else None,
        memory=device_memory("cuda") if has_gpu else None,
    )


def host_findings(host: Host) -> Iterator[Finding]:
    """Versions, GPU and driver."""
    remedies = {
        "triton": "install triton; on a GPU kernels and compilation need it",
        "flashinfer-python": "install the extra graphengine[cuda]; attention falls back to torch",
        "transformers": "install transformers; text needs its tokenizers",
    }
    for package, (low, limit) in TESTED.items():
        found, name = host.versions.get(package), f"host.{package.removesuffix('-python')}"
        if found is not None and low <= _numbers(found) < limit:
            yield ok(name, found)
            continue
        remedy = f"{'.'.join(map(str, low))} up to but not {'.'.join(map(str, limit))} is tested"
        if found is None:
            remedy = remedies.get(package, remedy)
        is_needed = host.gpu_name is not None or package not in ("triton", "flashinfer-python")
        yield (warning if is_needed else info)(name, found or "missing", remedy)
    if host.nsys:
        yield ok("host.nsys", host.nsys)
    else:
        remedy = "graphengine profile falls back to torch.profiler; install Nsight Systems"
        yield info("host.nsys", "not on the PATH", remedy)
    yield from _gpu(host)


def _gpu(host: Host) -> Iterator[Finding]:
    version, cuda_version = host.driver_version, host.cuda_version
    if host.gpu_name is None or host.capability is None or host.memory is None:
        value, remedy = "none", "runs on the CPU: correct, and slow"
        if version is not None:
            value = f"driver {version}, but torch sees no device (built for CUDA "
            value += f"{cuda_version or 'none'})"
            remedy = "install torch built for CUDA, or check CUDA_VISIBLE_DEVICES and the driver"
        yield warning("host.gpu", value, remedy)
        return
    value = (
        f"{host.gpu_name}, capability {'.'.join(map(str, host.capability))}, "
        f"{format_bytes(host.memory.free_bytes)} free of {format_bytes(host.memory.total_bytes)}"
    )
    if host.capability < (8, 0):
        yield error("host.gpu", value, "bfloat16 tensor cores need capability 8.0 or newer")
    else:
        yield ok("host.gpu", value)
    driver, cuda = _numbers(version or ""), _numbers(cuda_version or "")
    needed = DRIVER_FOR_CUDA.get(cuda[0]) if cuda else None
    if not driver or needed is None:
        yield info("host.driver", version or "unknown")
    elif driver[0] < needed:
        remedy = f"torch is built for CUDA {cuda_version}, which needs driver {needed}"
        yield warning("host.driver", version or "", remedy)
    else:
        yield ok("host.driver", f"{version} for CUDA {cuda_version}")


def speed_findings(
    host: Host, config: EngineConfig, target: ModelConfig, draft: DraftSpec | None
) -> Iterator[Finding]:
    """What this run would leave on the table."""
    on_gpu = config.device == "cuda"
    if not on_gpu:
        yield warning("speed.device", "CPU", "use a CUDA GPU; the CPU path is for correctness")
    if draft is None:
        yield info("speed.draft", "no drafter: plain decoding", "pass --draft")
    if config.compile and not on_gpu and host.cpp_compiler is None:
        yield error("run.compiler", "no C++ compiler", "install g++, or use --no-compile")
    if not on_gpu:
        return
    is_hopper = host.capability is None or host.capability[0] == HOPPER
    if host.capability is not None and not is_hopper:
        value = f"capability {'.'.join(map(str, host.capability))}"
        remedy = "the skinny GEMM and programmatic launches are for Hopper (9.0); cuBLAS is used"
        yield warning("speed.gemm", value, remedy)
    if config.dtype != "bfloat16":
        yield warning("speed.dtype", config.dtype, "use --dtype bfloat16: half the bytes")
    if config.prefill_attention_backend == "torch":
        dims = sorted({model.head_dim for model in (target, *(draft.models if draft else ()))})
        supported = ", ".join(map(str, FLASHINFER_HEAD_DIMS))
        remedy = f"flashinfer needs the extra cuda, bfloat16 and head_dim {supported}"
        yield warning("speed.attention", f"torch, with head_dim {dims}", remedy)
    if not config.compile:
        yield warning("speed.compile", "off", "use --compile: fused norms and activations")
    if config.graph_mode == "none":
        remedy = "use --graph-mode piecewise or full: launches cost more than the kernels"
        yield warning("speed.graphs", "none", remedy)
    if isinstance(draft, DraftConfig):
        yield from _drafter(config, draft, is_hopper)


def _drafter(config: EngineConfig, draft: DraftConfig, is_hopper: bool) -> Iterator[Finding]:
    """Whether its weights are rounded, and whether that is of use."""
    name, quantization = "speed.drafter", config.draft_quantization
    if not is_hopper or config.dtype != "bfloat16":
        if quantization != "none":
            remedy = "leave out --draft-quantization: FP8 is multiplied in bfloat16 runs on Hopper "
            yield warning(
                name, quantization, remedy + "alone, elsewhere it is widened in every forward"
            )
        return
    rows = [size * draft_at(config, draft, size).block_size for size in config.buckets]
    limit = MAX_QUANTIZED_ROWS["fp8"]
    if quantization == "none":
        kind = "fp8" if max(rows) <= limit else "fp8-dynamic"
        yield info(name, "bfloat16", f"--draft-quantization {kind} halves its bytes")
    elif quantization == "fp8" and min(rows) > limit:
        remedy = f"use fp8-dynamic: fp8 is for forwards of up to {limit} rows"
        yield warning(name, f"fp8, and a draft has {min(rows)} rows or more", remedy)


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: `2.13.0+cpu` -> (2, 13, 0)."""
    return tuple(map(int, takewhile(str.isdecimal, version.partition("+")[0].split("."))))
