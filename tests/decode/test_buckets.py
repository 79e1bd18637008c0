"""buckets: built in any order over one memory, they leave no trace of their warm-ups."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphengine.capture.steps import Chain
from graphengine.decode import buckets
from tests.decode.test_engine import BACKENDS, BLOCK, PROMPTS, Pair, ids_only, loop_of


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bucket_moves_nothing(pair: Pair, backend: str) -> None:
    """Bug: a bucket built late has memory of its own, or more of it: what a graph reads is not what
    the host writes."""
    with pair.engine(buckets=(1, 4), attention_backend=backend, lazy_capture=True) as engine:
        builder = loop_of(engine).first.builder
        before = builder.arena.num_bytes
        large, small = (builder.build(size) for size in (4, 1))
        assert builder.arena.num_bytes == before
        assert (large.buffers.block, small.buffers.block) == (BLOCK, BLOCK)
        assert small.buffers.block_ids_BG.data_ptr() == large.buffers.block_ids_BG.data_ptr()
        assert small.buffers.start_B.shape == (1,)
        assert not large.buffers.start_B.any(), "a row of a warm-up would run"


def test_a_warm_up_s_words_are_cleared(pair: Pair) -> None:
    """Bug: what a warm-up has written of its steps 0 and 1 passes for the results of a real step 1;
    or drafts of a step that was interrupted, for those of the next one, which has its number."""
    with pair.engine(buckets=(2,), structured_outputs=True) as engine:
        builder = loop_of(engine).first.builder
        config = replace(builder.pair.config, compile=True)  # so that a CPU warms up too
        builder.pair = replace(builder.pair, config=config)
        own = builder.build(2).buffers
        assert own.grammar is not None
        words = own.results_BX, own.grammar.words_BG
        assert not any(bool(kept.any()) for kept in (*words, own.step_B, own.positions_T))
        for kept in words:
            kept.fill_(7)
        builder.clear_results_()
        assert not any(bool(kept.any()) for kept in words)


def test_draws_are_not_used_up(pair: Pair) -> None:
    """Bug: a bucket's warm-up walks the table of draws, so simulated acceptance depends on when it
    was built."""
    with pair.engine(buckets=(2,), simulate_acceptance=2.5) as engine:
        builder = loop_of(engine).first.builder
        builder.pair.simulation.step_1.fill_(7)
        builder.build(2)
        assert builder.pair.simulation.step_1.item() == 7


def test_seconds_add_up(pair: Pair) -> None:
    """Bug: what was compiled before buckets are built anew is not in a start's seconds."""
    with pair.engine(buckets=(1,)) as engine, torch.no_grad():
        builder = loop_of(engine).first.builder
        builder.compile_s = 100.0
        builder.build_ahead([1])
        assert 100 < builder.compile_s < 160


def test_runners_follow_what_they_continue(pair: Pair) -> None:
    """Bug: a tool that runs the stages in the order of a step runs the drafter's first attention on
    nothing: what it continues is the last stage of the step before."""
    with pair.engine(buckets=(2,), attention_backend="torch") as engine:
        bucket = loop_of(engine).first.buckets[2]
        assert bucket.ahead is bucket.runners[0] and len(bucket.runners) == 3
    with pair.engine(buckets=(2,), attention_backend="triton") as engine:
        bucket = loop_of(engine).first.buckets[2]
        assert bucket.ahead is None and len(bucket.runners) == 1


def test_largest_first(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: graphs of the smaller buckets are captured first, and each larger one extends the
    pool."""
    order: list[int] = []
    real: Any = buckets.BucketBuilder.build

    def build(self: Any, size: int, **how: Any) -> Any:
        order.append(size)
        return real(self, size, **how)

    monkeypatch.setattr(buckets.BucketBuilder, "build", build)
    with pair.engine(buckets=(2, 1, 4)) as engine, torch.no_grad():
        assert order == [4, 2, 1]
        assert ids_only(engine, PROMPTS[:1], max_new_tokens=4) == [pair.plain(PROMPTS[0], 4)]


@pytest.mark.parametrize(("compiles", "is_kept"), [(False, False), (True, False), (True, True)])
def test_a_gpu_s_buckets_are_compiled_before_one_is_run(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, compiles: bool, is_kept: bool
) -> None:
    """Bug: a bucket's segments are compiled as its steps are run, behind the kernels that these
    wait for; a capture begins while threads still compile, or of what has not run; or a start that
    finds all in its caches looks for what is to be compiled."""
    order: list[object] = []
    with pair.engine(buckets=(2, 1)) as engine:
        builder = loop_of(engine).first.builder
        config = replace(builder.pair.config, compile=compiles)
        builder.pair, builder.device = replace(builder.pair, config=config), torch.device("cuda")

        class Ahead(nullcontext[Any]):
            def __init__(self, runs: Iterable[Callable[[], object]], workers: object) -> None:
                assert (workers is not None) is compiles
                order.append(len([*runs]))
                super().__init__(SimpleNamespace(wait=lambda: order.append("kernels")))

        monkeypatch.setattr(buckets, "CompileAhead", Ahead)
        monkeypatch.setattr(buckets, "make_segments", lambda runs: order.append("segments"))
        monkeypatch.setattr(buckets, "run_kept", lambda work: work() or is_kept)
        monkeypatch.setattr(builder, "_warm_up", lambda sizes, runs: order.append((sizes, *runs)))
        monkeypatch.setattr(builder, "build", lambda size, is_warm: order.append((size, is_warm)))
        monkeypatch.setattr(builder, "_arena", lambda size: builder.arena)
        builder.build_ahead([1, 2], prefills := [lambda: None] * 40)
    warmed = ([2, 1], *prefills)
    assert order[0] == warmed and order[-2:] == [(2, True), (1, True)]
    num_runs, *compiled = order[1:-2] or [41]
    assert isinstance(num_runs, int) and num_runs > 40
    assert compiled == ([] if is_kept else ["segments"] * compiles + ["kernels", warmed])


def test_runs_of_kernels_can_be_run_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: where no process compiles kernels, those of a verify are compiled as its step is run:
    the run that asked for them hands on what it had made then."""
    ran: list[Chain] = []
    real: Any = buckets.run_chain
    monkeypatch.setattr(buckets, "run_chain", lambda *chain: ran.append(chain[0]) or real(*chain))
    with pair.engine(buckets=(2,), sampling=True) as engine, torch.no_grad():
        runs = [*loop_of(engine).first.builder.kernel_runs([2])]
        counts = []
        for _ in range(2):
            for run in runs:
                run()
            counts.append(len(ran))
        assert counts[0] > 4 and counts[1] == 2 * counts[0]


@pytest.mark.parametrize("backend", ["flashinfer", "torch"])
def test_prefills_attend_with_what_was_chosen(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """Bug: long prompts attend with the slow formula where FlashInfer is there, or the other way
    round."""
    monkeypatch.setattr(buckets, "FlashInferAttention", lambda *_: "flashinfer")
    monkeypatch.setattr(buckets, "TorchAttention", lambda *_: "torch")
    monkeypatch.setattr(buckets, "make_workspace", lambda device: None)
    config: Any = SimpleNamespace(prefill_attention_backend=backend, page_size=16)
    model: Any = SimpleNamespace(windows=(4, None), num_hidden_layers=2)
    where = torch.float32, torch.device("cpu")
    assert buckets.prefill_attention(config, model, *where).layers == (backend, backend)


def test_room_for_the_pages_of_all_requests(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a plan of a full bucket copies its pages behind the end of what FlashInfer has for
    them: that of one request, or of another bucket."""
    made: list[tuple[int, int]] = []

    def attention(model: Any, page_size: int, rule: Any, space: Any, dtype: Any, *room: int) -> Any:
        made.append((room[0], room[1]))
        return buckets.TorchAttention(model, page_size, rule, torch.device("cpu"))

    monkeypatch.setattr(buckets, "FlashInferAttention", attention)
    with pair.engine(buckets=(1, 4), attention_backend="torch") as engine:
        builder = loop_of(engine).first.builder
        builder.workspace = torch.zeros(1, dtype=torch.uint8)
        width = builder.pair.width
        for size in (4, 1):
            made.clear()
            builder.build(size)
            assert width > 1 and {*made} == {(size, size * width)}
