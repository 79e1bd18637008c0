"""What is made ready before the first request: prefills, FlashInfer's kernels beside Inductor's."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from graphengine.api import Engine
from graphengine.checkpoints.hub import TINY_DRAFT, TINY_TARGET
from graphengine.config.draft import CAUSAL, AttentionRule
from graphengine.decode import attention, flashinfer_attention
from graphengine.decode.chunk_sizes import SIZES
from graphengine.decode.fixed_chunk import FixedChunk
from graphengine.decode.prefill import Prefill
from graphengine.decode.sampling import GREEDY
from graphengine.kernels.skinny_config import TUNED, choose_config, num_columns
from graphengine.startup import build, warmup
from graphengine.startup.build import read_configs


@pytest.mark.parametrize("draft", [TINY_DRAFT, None])
def test_it_leaves_nothing_behind(draft: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: pages, statistics or a half-run request of the warm-up meet the first user."""
    prompts = ["Count from 3 to 9.", "x"]
    with Engine.from_pretrained(TINY_TARGET, draft, device="cpu", buckets=(2,)) as engine:
        expected = [r.token_ids for r in engine.generate(prompts, max_new_tokens=20)]
    with Engine.from_pretrained(TINY_TARGET, draft, device="cpu", buckets=(2,)) as engine:
        loop = engine.built.loop
        seen: list[tuple[int, bool]] = []
        submit = loop.submit

        def record(ids: list[int], *arguments: Any, **named: Any) -> Any:
            seen.append((len(ids), named.get("sampling", GREEDY) is GREEDY))
            return submit(ids, *arguments, **named)

        monkeypatch.setattr(loop, "submit", record)
        free, fallback = loop.allocator.num_free, loop.fallback
        warmup.warm_up(loop, engine.built.grammars)
        ends = (True, False, False, True, True)  # greedy, drawn, adjusted, scored, constrained
        lengths = (warmup.EAGER_ROWS, 1)  # then a step of the one bucket
        assert seen == [(n, greedy) for greedy in ends for n in lengths]
        assert loop.fallback is fallback and loop.first.only_bucket is None
        if loop.fallback is not None and loop.fallback.guard is not None:
            assert loop.fallback.guard.mean_acceptance_length == 0
        assert loop.allocator.num_free == free and not loop.has_work
        monkeypatch.undo()
        assert [r.token_ids for r in engine.generate(prompts, max_new_tokens=20)] == expected


def test_what_nobody_waits_for_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: chunks behind a long text are queued last and are still at work when the start is over:
    on an H200 the first prompt's token came after 22 ms instead of 5."""
    with Engine.from_pretrained(TINY_TARGET, device="cpu") as engine:
        loop, seen = engine.built.loop, list[str]()
        submit = loop.submit
        far = SimpleNamespace(size=128, run=lambda _, take: seen.append(f"far {take is None}"))
        monkeypatch.setattr(loop, "prefill", replace(loop.prefill, far=(far,)))
        monkeypatch.setattr(loop, "submit", lambda *a, **b: (seen.append("own"), submit(*a, **b)))
        warmup.warm_up(loop)
    assert seen[:3] == ["far True", "far False", "own"] and seen[-1] == "own"


def test_no_step_of_it_meets_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a step that was launched ahead of its last end is still at work when the start is over:
    on an H200 the first prompt's token came after 7.1 ms instead of 4.7."""
    with Engine.from_pretrained(TINY_TARGET, device="cpu") as engine:
        loop, seen = engine.built.loop, list[str]()
        submit, config = loop.submit, loop.config
        monkeypatch.setattr(loop, "submit", lambda *a, **b: (seen.append("own"), submit(*a, **b)))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append("wait"))
        loop.config = replace(config, device="cuda")
        warmup.warm_up(loop)
        loop.config = config
        monkeypatch.undo()
    assert seen[-1] == "wait"


@pytest.mark.slow
def test_every_chunk_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a prompt of the warm-up begins like the one before and takes over its pages, so that the
    longer chunks and an eager prefill first run for a user."""
    with Engine.from_pretrained(TINY_TARGET, device="cpu") as engine:
        loop, seen = engine.built.loop, list[int]()
        fixed = [FixedChunk(loop.prefill.pair, size) for size in SIZES]
        loop.prefill = replace(loop.prefill, fixed=tuple(fixed))
        queue = Prefill.queue

        def record(prefill: Prefill, work: Any) -> Any:
            seen.append(sum(piece.num_rows for _, piece in work))
            return queue(prefill, work)

        monkeypatch.setattr(Prefill, "queue", record)
        warmup.warm_up(loop)
    assert {*SIZES, warmup.EAGER_ROWS} <= set(seen)


def test_a_short_context_is_not_exceeded() -> None:
    """Bug: a small --max-model-len refuses the warm-up's own prompt, and nothing starts."""
    with Engine.from_pretrained(TINY_TARGET, device="cpu", max_model_len=2) as engine:
        warmup.warm_up(engine.built.loop)
        assert len(engine.generate([[5]], max_new_tokens=4)[0].token_ids) == 1


def test_every_kind_of_length_is_warmed() -> None:
    """Bug: the table grows by a row count, and the first prompt on the far side of it waits for
    kernels that nobody has compiled."""

    def kind(T: int, E: int, D: int, weight_bytes: int) -> Any:
        config = choose_config(T, E, D, weight_bytes)
        return config and (config, num_columns(T))

    for E, D, weight_bytes in {key[:3] for key in TUNED} | {(512, 256, 2)}:
        lengths = {*SIZES, *range(SIZES[-1] + 1, 2049)}
        kinds = {kind(T, E, D, weight_bytes) for T in lengths}
        warmed = {kind(T, E, D, weight_bytes) for T in (*SIZES, warmup.EAGER_ROWS)}
        assert kinds == warmed


class Wrapper:
    """Stands for FlashInfer's; counts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.calls: list[str] = []

    def plan(self, *args: Any, window_left: int, **kwargs: Any) -> None:
        self.calls.append("plan")
        self.window_left = window_left

    def run(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append("run")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An attention over the stand-in, for the bundled target."""
    module: Any = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = Wrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    config, _ = read_configs(TINY_TARGET, None)
    workspace = torch.zeros(8, dtype=torch.uint8)
    return flashinfer_attention.FlashInferAttention(config, 16, CAUSAL, workspace, torch.bfloat16)


def test_an_unplanned_attention_does_nothing(made: Any) -> None:
    """Bug: segments cannot be compiled before FlashInfer's kernels exist, so a cold start is the
    sum of both compilers."""
    config, _ = read_configs(TINY_TARGET, None)
    heads = (config.num_attention_heads, config.head_dim)
    q, out, cache = torch.zeros(3, *heads), torch.full((3, *heads), 7.0), torch.zeros(2, 1)
    made.run(q, cache, out)
    assert made._wrapper.calls == [] and (out == 7).all()
    made.plan(attention.Layout.build([3], [3], [[1]], 16))
    made.run(q, cache, out)
    assert made._wrapper.calls == ["plan", "run"]


def test_a_plan_waits_for_the_copies_of_the_last(made: Any) -> None:
    """Bug: a plan overwrites the pinned memory from which the one before is still to be copied."""
    calls = made._wrapper.calls
    made._copied = SimpleNamespace(
        synchronize=lambda: calls.append("wait"), record=lambda: calls.append("record")
    )
    for _ in range(2):
        made.plan(attention.Layout.build([3], [3], [[1]], 16))
    assert calls == ["wait", "plan", "record"] * 2


@pytest.mark.parametrize(("window", "left"), [(None, -1), (1, 0), (9, 8)])
def test_a_window_has_the_row_itself(made: Any, window: int | None, left: int) -> None:
    """Bug: FlashInfer, which counts the keys in front of a row's own, sees one more than others."""
    made._rule = AttentionRule(causal=True, window=window)
    made.plan(attention.Layout.build([3], [3], [[1]], 16))
    assert made._wrapper.window_left == left


def test_a_sink_takes_its_share(made: Any) -> None:
    """Bug: FlashInfer's sums, whose logarithms are of two, are read as natural ones, or what a sink
    takes is what is left."""
    config, _ = read_configs(TINY_TARGET, None)
    heads = (config.num_attention_heads, config.head_dim)
    sums_TN, sinks_N = torch.rand(3, heads[0]) + 0.5, torch.linspace(-2, 2, heads[0])
    made._wrapper.run = lambda *args, out, return_lse: (out, sums_TN.log2())
    made.plan(attention.Layout.build([3], [3], [[1]], 16))
    out_TNH = torch.ones(3, *heads)
    made.run(out_TNH, torch.zeros(2, 1), out_TNH, sinks_N=sinks_N)
    expected = sums_TN / (sums_TN + sinks_N.exp())
    torch.testing.assert_close(out_TNH, expected[..., None].expand_as(out_TNH))


@pytest.mark.parametrize("compiles", [True, False])
def test_the_compiler_comes_before_threads(monkeypatch: pytest.MonkeyPatch, compiles: bool) -> None:
    """Bug: sizes in FP8 import torch's compiler while a thread is in the middle of importing it,
    and one of the two sees half a module."""
    order: list[str] = []

    def thread(**of: Any) -> None:
        raise RuntimeError("threads")

    monkeypatch.setattr(build, "import_dynamo", lambda: order.append("compiler"))
    monkeypatch.setattr(build, "threading", SimpleNamespace(Thread=thread))
    with pytest.raises(RuntimeError, match="threads"):
        Engine.from_pretrained(TINY_TARGET, device="cpu", compile=compiles)
    assert order == ["compiler"] * compiles


def test_cosines_are_not_the_first_call_of_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: in one process of ten a thread's part of the table of angles is off by 1e-4, and with it
    K/V and now and then a token: MKL's first call chose another kernel there."""
    order: list[str] = []

    def load(*of: Any) -> None:
        raise RuntimeError("weights")

    monkeypatch.setattr(build, "settle_vector_math", lambda: order.append("settled"))
    monkeypatch.setattr(build, "_load_pair", load)
    with pytest.raises(RuntimeError, match="weights"):
        Engine.from_pretrained(TINY_TARGET, device="cpu")
    assert order == ["settled"]
    called: list[str] = []

    class Record(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            called.append(func.__name__)
            return func(*args, **kwargs or {})

    with Record():
        warmup.settle_vector_math()
    assert {"cos", "sin", "exp", "log"} <= set(called)
