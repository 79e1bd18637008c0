"""`doctor` on machines: another GPU, an old driver, missing packages, slow options."""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from graphengine.checkpoints.hub import TINY_DRAFT, TINY_TARGET
from graphengine.config.options import Options
from graphengine.doctor import host
from graphengine.doctor.doctor import diagnose, examine
from graphengine.doctor.files import read_model_files
from graphengine.doctor.findings import Finding, info, ok, warning
from graphengine.doctor.host import Host, host_findings, speed_findings
from graphengine.doctor.pair import resolve_run
from graphengine.startup.memory import DeviceMemory
from tests.support.doctored import HOST, OPTIONS, errors, named

GIB = 1 << 30
H200 = replace(
    HOST,
    versions={**HOST.versions, "torch": "2.11.0+cu130", "flashinfer-python": "0.6.12"},
    cuda_version="13.0",
    driver_version="580.95.05",
    nsys="/usr/bin/nsys",
    gpu_name="NVIDIA H200",
    capability=(9, 0),
    memory=DeviceMemory(139 * GIB, 140 * GIB, 132),
)


def on(host: Host, **options: Any) -> list[Finding]:
    """The machine's findings for Qwen3-8B shapes in a CUDA run, whatever this machine is."""
    files = [read_model_files(name, with_tokenizer=False) for name in ("qwen3-8b",) * 2]
    run = replace(Options(), **{"device": "cpu", **options})
    found, _ = diagnose(files[0], None, run, host)
    return found


def cuda_config(**values: Any) -> Any:
    from graphengine.startup.build import read_configs

    target, draft = read_configs("qwen3-8b", "qwen3-8b-dflash-b16")
    config, _ = resolve_run(Options(device="cpu"), target, draft)
    assert config is not None
    values = {
        "device": "cuda",
        "dtype": "bfloat16",
        "compile": True,
        "graph_mode": "piecewise",
        "attention_backend": "flashinfer",
        "prefill_attention_backend": "flashinfer",
    } | values
    return replace(config, **values), target, draft


def test_a_good_machine_has_no_warning() -> None:
    """Bug: doctor finds fault with the machine that the engine is made for, or with a run on the
    CPU for what the GPU beside it holds."""
    found = list(host_findings(H200)) + list(speed_findings(H200, *cuda_config()))
    assert [f for f in found if f.level in ("warning", "error")] == []
    assert any("NVIDIA H200, capability 9.0, 139 GiB free" in f.value for f in found)
    assert not any(f.level == "error" for f in on(H200))
    full = replace(H200, memory=DeviceMemory(GIB, 140 * GIB, 132))
    assert not any(f.level == "error" for f in on(full))


@pytest.mark.parametrize(
    ("change", "name", "level"),
    [
        ({"driver_version": "570.1"}, "host.driver", "warning"),
        ({"driver_version": None}, "host.driver", "info"),
        ({"capability": (8, 0)}, "speed.gemm", "warning"),
        ({"capability": (10, 0)}, "speed.gemm", "warning"),
        ({"capability": (7, 5)}, "host.gpu", "error"),
        ({"capability": (8, 0)}, "host.gpu", "ok"),
        ({"nsys": None}, "host.nsys", "info"),
        ({"gpu_name": None, "capability": None, "memory": None}, "host.gpu", "warning"),
    ],
)
def test_lesser_machines(change: dict[str, Any], name: str, level: str) -> None:
    """Bug: an old driver, a missing package or another GPU is not named."""
    host = replace(H200, **change)
    found = list(host_findings(host)) + list(speed_findings(host, *cuda_config()))
    assert [f.level for f in found if f.name == name] == [level]


def test_a_machine_with_python_alone() -> None:
    """Bug: what is missing is told without what to do about it, or as worse than it is there."""
    bare: dict[str, Any] = dict.fromkeys(field.name for field in fields(H200))
    bare["versions"] = {"python": "3.12"}
    assert list(host_findings(Host(**bare))) == [
        ok("host.python", "3.12"),
        warning("host.torch", "missing", "2.11 up to but not 2.16 is tested"),
        info("host.triton", "missing", "install triton; on a GPU kernels and compilation need it"),
        info(
            "host.flashinfer",
            "missing",
            "install the extra graphengine[cuda]; attention falls back to torch",
        ),
        warning("host.transformers", "missing", "install transformers; text needs its tokenizers"),
        info(
            "host.nsys",
            "not on the PATH",
            "graphengine profile falls back to torch.profiler; install Nsight Systems",
        ),
        warning("host.gpu", "none", "runs on the CPU: correct, and slow"),
    ]


@pytest.mark.parametrize(
    ("cuda", "driver", "value"),
    [
        ("13.0", "580.1", "driver 580.1, but torch sees no device (built for CUDA 13.0)"),
        (None, "580.1", "driver 580.1, but torch sees no device (built for CUDA none)"),
        ("13.0", None, "none"),
    ],
)
def test_why_there_is_no_gpu(cuda: str | None, driver: str | None, value: str) -> None:
    """Bug: where torch is built for the CPU, or a variable hides the GPU, the machine is said to
    have none; or CUDA's version is told as the driver's."""
    nothing: dict[str, Any] = dict.fromkeys(("gpu_name", "capability", "memory"))
    host = replace(H200, **nothing, cuda_version=cuda, driver_version=driver)
    (found,) = [f for f in host_findings(host) if f.name == "host.gpu"]
    remedy = "runs on the CPU: correct, and slow"
    if driver is not None:
        remedy = "install torch built for CUDA, or check CUDA_VISIBLE_DEVICES and the driver"
    assert found == Finding("host.gpu", value, "warning", remedy)


@pytest.mark.parametrize(("cuda", "driver", "needed"), [("13.0", "570.1", 580), ("12.8", "5", 525)])
def test_which_driver_is_needed(cuda: str, driver: str, needed: int) -> None:
    """Bug: the driver that is there is told as the one that is needed, or another CUDA's."""
    host = replace(H200, cuda_version=cuda, driver_version=driver)
    (found,) = [f for f in host_findings(host) if f.name == "host.driver"]
    remedy = f"torch is built for CUDA {cuda}, which needs driver {needed}"
    assert (found.value, found.remedy) == (driver, remedy)


@pytest.mark.parametrize("package", ["torch", "triton", "flashinfer-python", "transformers"])
def test_missing_packages(package: str) -> None:
    """Bug: a package that is not installed crashes the report, or is not missed; or one for GPUs
    is missed on a machine that has none."""
    host = replace(H200, versions={**H200.versions, package: None})
    name = f"host.{package.removesuffix('-python')}"
    without = "info" if package in ("triton", "flashinfer-python") else "warning"
    for machine, level in ((host, "warning"), (replace(host, gpu_name=None), without)):
        assert [f.level for f in host_findings(machine) if f.name == name] == [level]


def test_what_to_do_about_a_package() -> None:
    """Bug: who lacks a package is told versions and not how to install it; or the bounds of what is
    tested are swapped, or another package's."""

    def remedies(version: str | None) -> dict[str, str]:
        machine = replace(H200, versions=dict.fromkeys(H200.versions, version))
        found = {f.name.removeprefix("host."): f.remedy for f in host_findings(machine)}
        return {name: found[name] for name in found if name not in ("nsys", "gpu", "driver")}

    tested = {}
    for package, bounds in host.TESTED.items():
        low, limit = (".".join(map(str, bound)) for bound in bounds)
        tested[package.removesuffix("-python")] = f"{low} up to but not {limit} is tested"
    assert remedies("0.1") == tested
    assert remedies(None) == tested | {
        "triton": "install triton; on a GPU kernels and compilation need it",
        "flashinfer": "install the extra graphengine[cuda]; attention falls back to torch",
        "transformers": "install transformers; text needs its tokenizers",
    }


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"dtype": "float32"}, "speed.dtype"),
        ({"compile": False}, "speed.compile"),
        ({"graph_mode": "none"}, "speed.graphs"),
        ({"prefill_attention_backend": "torch"}, "speed.attention"),
        ({"device": "cpu"}, "speed.device"),
    ],
)
def test_slow_options(change: dict[str, Any], name: str) -> None:
    """Bug: a slow choice is taken silently."""
    found = list(speed_findings(H200, *cuda_config(**change)))
    assert [f.level for f in found if f.name == name] == ["warning"]


def test_whose_heads_flashinfer_does_not_take() -> None:
    """Bug: torch's attention is explained by the target's heads, which FlashInfer takes, where the
    drafter's are the reason; or those that are there are told as what it takes."""
    config, target, draft = cuda_config(prefill_attention_backend="torch")
    narrow = replace(draft, model=replace(draft.model, head_dim=96))
    for drafter, dims in ((None, [128]), (draft, [128]), (narrow, [96, 128])):
        found = [f for f in speed_findings(H200, config, target, drafter) if "attention" in f.name]
        assert [f.value for f in found] == [f"torch, with head_dim {dims}"]
        assert found[0].remedy.endswith("bfloat16 and head_dim 64, 128, 256")


@pytest.mark.parametrize(
    ("quantization", "buckets", "capability", "level", "part"),
    [
        ("none", (1, 4), (9, 0), "info", "--draft-quantization fp8 halves"),
        ("none", (1, 8, 16), (9, 0), "info", "--draft-quantization fp8-dynamic halves"),
        ("fp8", (1, 8, 16), (9, 0), None, None),
        ("fp8", (8, 16), (9, 0), "warning", "use fp8-dynamic"),
        ("fp8-dynamic", (8, 16), (9, 0), None, None),
        ("fp8", (1,), (10, 0), "warning", "leave out"),
        ("none", (1,), (10, 0), None, None),
    ],
)
def test_rounded_drafters(
    quantization: str,
    buckets: tuple[int, ...],
    capability: tuple[int, int],
    level: str | None,
    part: str | None,
) -> None:
    """Bug: what is advised does nothing at the rows of this run, or nothing says that it does."""
    host = replace(H200, capability=capability)
    parts = cuda_config(draft_quantization=quantization, buckets=buckets)
    found = [f for f in speed_findings(host, *parts) if f.name == "speed.drafter"]
    assert [f.level for f in found] == ([level] if level else [])
    assert part is None or part in found[0].remedy
    if quantization == "none":
        return
    parts = cuda_config(draft_quantization=quantization, buckets=(1,), dtype="float32")
    assert "speed.drafter" in {f.name for f in speed_findings(host, *parts)}


def test_rounded_drafter_of_a_short_block() -> None:
    """Bug: a rounded drafter is called useless for the rows of its own block, which no bucket has;
    8 x 8 rows are few enough."""
    own = {"draft_quantization": "fp8", "buckets": (8, 16)}
    for numbers, levels in (((7, 15), []), ((8, 8), ["warning"])):
        found = speed_findings(H200, *cuda_config(num_speculative_tokens=numbers, **own))
        assert [f.level for f in found if f.name == "speed.drafter"] == levels


def test_the_fewest_rows_of_a_draft() -> None:
    """Bug: the rows of the largest bucket are told as the fewest of a draft."""
    found = speed_findings(H200, *cuda_config(draft_quantization="fp8", buckets=(8, 16)))
    (value,) = (f.value for f in found if f.name == "speed.drafter")
    assert value == "fp8, and a draft has 128 rows or more"


@pytest.mark.gpu
def test_a_real_gpu() -> None:
    """Bug: the GPU's memory, driver or capability is read wrongly, so the plan is made for none."""
    options: Any = {"device": "cuda"}
    found = examine(TINY_TARGET, TINY_DRAFT, replace(OPTIONS, **options))
    assert not found.has_errors, errors(found)
    assert torch.cuda.get_device_name(0) in named(found, "host.gpu")[0].value
    assert named(found, "host.driver")
    assert found.memory_plan is not None
    assert found.memory_plan.budget_bytes is not None
    assert 0 < found.memory_plan.budget_bytes <= torch.cuda.mem_get_info()[1]


def test_a_compiler_is_needed_where_something_is_compiled() -> None:
    """Bug: no errors are found, and the run dies in Inductor for want of g++."""
    host = replace(HOST, cpp_compiler=None)
    assert [f.level for f in on(host, compile=True) if f.name == "run.compiler"] == ["error"]
    assert "run.compiler" not in {f.name for f in on(host, compile=False)}
    host = replace(HOST, cpp_compiler="/usr/bin/g++")
    assert "run.compiler" not in {f.name for f in on(host, compile=True)}


def test_the_compiler_that_the_user_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: doctor misses g++ where CXX names another, which Inductor takes; or finds a g++ that it
    does not take."""
    for name in (sys.executable, "/nowhere/g++"):
        monkeypatch.setenv("CXX", name)
        assert host.read_host().cpp_compiler == (name if name == sys.executable else None)


@pytest.mark.parametrize("package", ["torch", "python"])
def test_the_first_version_that_nobody_has_run(package: str) -> None:
    """Bug: the bound itself is called tested."""
    low, limit = host.TESTED[package]
    for version, level in ((low, "ok"), (limit, "warning")):
        text = ".".join(map(str, version)) + ".0"
        machine = replace(H200, versions={**H200.versions, package: text})
        found = [f.level for f in host_findings(machine) if f.name == f"host.{package}"]
        assert found == [level]


def test_a_bound_that_is_a_whole_version() -> None:
    """Bug: the version that a bound names to its last number is called tested."""
    _, limit = host.TESTED["flashinfer-python"]
    text = ".".join(map(str, limit))
    machine = replace(H200, versions={**H200.versions, "flashinfer-python": text})
    found = [f.level for f in host_findings(machine) if f.name == "host.flashinfer"]
    assert found == ["warning"]
