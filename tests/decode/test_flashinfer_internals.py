"""FlashInfer's module: what is built ahead is what `plan` loads."""

import contextlib
import sys
import threading
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from graphengine import TINY_DRAFT, TINY_TARGET, Engine
from graphengine.config.draft import AttentionRule, DraftConfig
from graphengine.decode import attention, flashinfer_attention
from graphengine.decode.flashinfer_internals import build, planned_module
from graphengine.startup.build import read_configs

GENERATORS = ("gen_batch_prefill_module", "_gen_batch_prefill_primary_module")


class LoadedError(Exception):
    """Instead of loading a module."""


@pytest.mark.parametrize("window", [None, 9])
def test_what_is_built_ahead_is_what_plan_loads(
    window: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Bug: half a minute is spent on a module that nobody loads, and as much again on the right
    one. If this fails, look at what get_batch_prefill_module in flashinfer/prefill.py builds."""
    if not torch.cuda.is_available():  # as FlashInfer asks at its import
        monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
        monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    core = pytest.importorskip("flashinfer.jit.core")
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k)
    )  # nothing is copied

    def load(self: Any) -> None:
        raise LoadedError(self.name)

    monkeypatch.setattr(core.JitSpec, "build_and_load", load)
    config, _ = read_configs(TINY_TARGET, None)
    workspace = torch.zeros(1 << 20, dtype=torch.uint8)
    rule = AttentionRule(causal=True, window=window)
    made = flashinfer_attention.FlashInferAttention(config, 16, rule, workspace, torch.bfloat16)
    with pytest.raises(LoadedError) as loaded:
        made.plan(attention.Layout.build([3], [3], [[1]], 16))
    module = planned_module(torch.bfloat16, config.head_dim, window is not None)
    assert module.name == str(loaded.value)


def test_a_module_is_built_under_its_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Bug: since 0.7 a build takes no lock unless asked to, so whoever plans compiles the same
    files in the same folder at the same time, and may load what is half written."""
    if not torch.cuda.is_available():
        monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
        monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    core = pytest.importorskip("flashinfer.jit.core")
    module = planned_module(torch.bfloat16, 64, False)

    is_free = list[bool]()

    def run_ninja(*args: Any) -> None:
        other = core.FileLock(module.lock_path, thread_local=False)
        with contextlib.suppress(TimeoutError):
            other.acquire(timeout=0)
        is_free.append(other.is_locked)
        other.release()

    monkeypatch.setattr(core, "run_ninja", run_ninja)
    build(module)
    assert is_free == [False]


@pytest.mark.parametrize("names", [GENERATORS, GENERATORS[:1]])
def test_kernels_of_every_kind_are_built_ahead(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug: the drafter's windows are left to the first plan; 0.7's module for it is not built; or a
    compiler that fails beside the main thread takes the start down before anyone needs the
    kernel, or nobody is told that nothing is built ahead."""
    asked: list[tuple[Any, ...]] = []
    built = threading.Semaphore(0)

    def build(verbose: bool, need_lock: bool) -> None:
        assert need_lock
        built.release()
        raise RuntimeError("no nvcc")

    def generate(name: str, *args: Any) -> SimpleNamespace:
        asked.append((name, *args))
        return SimpleNamespace(is_aot=False, build=build)

    prefill: Any = ModuleType("flashinfer.prefill")
    for name in names:
        setattr(prefill, name, lambda *args, name=name: generate(name, *args))
    package: Any = ModuleType("flashinfer")
    package.prefill = prefill
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    failed: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    target, draft = read_configs(TINY_TARGET, TINY_DRAFT)
    assert isinstance(draft, DraftConfig)
    rules = (AttentionRule(causal=False, window=None), AttentionRule(causal=False, window=9))
    windowed: Any = SimpleNamespace(models=draft.models, attention_rules=rules)
    assert flashinfer_attention.compile_flashinfer_ahead(torch.bfloat16, target, windowed).wait(10)
    assert {(args[0], args[6], args[9]) for args in asked} == {
        (names[-1], draft.model.head_dim, True),
        (names[-1], draft.model.head_dim, False),
        (names[-1], target.head_dim, False),
    }
    for _ in asked:
        assert built.acquire(timeout=1)
    asked.clear()
    target = replace(target, num_hidden_layers=2, windows=(9, None))
    assert flashinfer_attention.compile_flashinfer_ahead(torch.bfloat16, target, None).wait(10)
    assert {args[9] for args in asked} == {True, False}
    for _ in asked:
        assert built.acquire(timeout=1)
    assert not failed
    for name in names:  # of a version that has renamed them
        delattr(prefill, name)
    assert flashinfer_attention.compile_flashinfer_ahead(torch.bfloat16, target, None).wait(10)
    assert not failed
    assert "gen_batch_prefill_module" in caplog.text

    def leave(*args: Any) -> None:
        raise SystemExit("no licence")

    prefill.gen_batch_prefill_module = leave
    assert flashinfer_attention.compile_flashinfer_ahead(torch.bfloat16, target, None).wait(10)


@pytest.mark.gpu
def test_an_engine_loads_what_was_built_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a kind of attention that an engine plans for is not built ahead, or one too many is."""
    core = pytest.importorskip("flashinfer.jit.core")
    prefill = pytest.importorskip("flashinfer.prefill")
    ahead: set[str] = set()
    loaded: set[str] = set()
    spec = getattr(core, "JitSpecNvcc", core.JitSpec)  # of 0.7: JitSpec says what they have alike
    build, load = spec.build, spec.build_and_load

    def record_build(self: Any, *args: Any, **options: Any) -> Any:
        if threading.current_thread().name == "flashinfer-compiler":
            ahead.add(self.name)
        return build(self, *args, **options)

    def record_load(self: Any, *args: Any, **options: Any) -> Any:
        loaded.add(self.name)
        return load(self, *args, **options)

    monkeypatch.setattr(spec, "build", record_build)
    monkeypatch.setattr(spec, "build_and_load", record_load)
    prefill.get_batch_prefill_module.cache_clear()
    with Engine.from_pretrained(
        *(TINY_TARGET, TINY_DRAFT),
        device="cuda",
        buckets=(1,),
        compile=False,
        max_model_len=256,
        kv_cache_memory=32 << 20,
    ) as engine:
        assert engine.startup.warmup_s > 0
    planned = {name for name in loaded if name.startswith("batch_prefill")}
    assert planned and planned == ahead
