"""Budgets: how many launches a step and a chunk may take, and how much the host does beside them.

A GPU's result says in microseconds what these cost; here they are counted, so that what makes a
step or a first token slow again is seen where there is no GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from graphengine import TINY_DRAFT, TINY_TARGET, Engine, SamplingParams
from graphengine.capture.runners import EagerRunner
from graphengine.decode.fixed_chunk import FixedChunk, Piece
from graphengine.decode.loop import DecodeLoop
from graphengine.decode.prefill import FirstTokens
from graphengine.drafters import dflash
from tests.decode.test_fixed_chunk import a_forward_adds
from tests.support.checkpoints import make_drafter, make_target
from tests.support.host_calls import ATTENTION, LAUNCH, SYNC, HostCalls, watched

LAYERS, DRAFT_LAYERS = 8, 3  # of the bundled pair
# Dense segments of draft and verify, `accept` and `draft.context`; the attentions between them.
PIECES = (DRAFT_LAYERS + 1) + (LAYERS + 1) + 2, DRAFT_LAYERS + LAYERS
SIZES, LONG = (16, 64), 256
TAKEN = "taken"
# Torch ops of the host, as counted on 2026-11-23: of a step; to copy a page that an earlier prompt
# has begun, of both models.
STEP_OPS, PAGE_OPS = 8, 6
FRONT_CALLS = 290  # of functions, behind a first request; 270 with Python 3.11


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> HostCalls:
    return watched(monkeypatch)


def engine(backend: Any = "triton", target: Any = TINY_TARGET, draft: Any = TINY_DRAFT) -> Engine:
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "buckets": (4,)}
    options |= {"page_size": 16, "max_model_len": 500, "fallback": False}
    return Engine.from_pretrained(target, draft, attention_backend=backend, **options)


@pytest.fixture(scope="module")
def loaded() -> Iterator[Engine]:
    with engine() as loaded:
        yield loaded


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (length,), generator=generator).tolist()


# --- a decode step ---


def step_logs(loop: DecodeLoop, mode: str, calls: Any) -> list[list[str]]:
    """What the host did for each of some steps in the middle of two requests, in a graph mode."""
    builder = loop.first.builder
    config = replace(builder.pair.config, graph_mode=mode)
    builder.pair, builder.pool = replace(builder.pair, config=config), calls
    loop.first.rebuild()
    for seed in range(2):
        loop.submit(prompt(20, seed), 200, ())
    found: list[list[str]] = []
    with torch.no_grad():
        loop.admit()
        for _ in range(4):
            loop.launch()
            loop.collect()
            before = len(loop.first.in_flight)
            calls.log.clear()
            with calls:
                loop.launch()
                assert len(loop.first.in_flight) == before + 1
                loop.collect()
            found.append(list(calls.log))
    loop.reset()
    return found


@pytest.mark.parametrize(
    ("backend", "mode", "launches", "attentions"),
    [
        ("triton", "full", 1, 0),
        ("triton", "piecewise", *PIECES),
        # Planned on the host, as FlashInfer is: draft, verify, and the two of `ahead`.
        ("torch", "full", 4, 0),
        ("torch", "piecewise", *PIECES),
    ],
)
def test_launches_of_a_step(
    calls: HostCalls, backend: str, mode: str, launches: int, attentions: int
) -> None:
    """Bug: a step is cut into more graphs than it must be, something of it is launched beside them,
    or the host reads results of the last step before it has launched the next."""
    with engine(backend) as loaded:
        logs = step_logs(loaded.built.loop, mode, calls)
    for log in logs:
        assert (log.count(LAUNCH), log.count(ATTENTION)) == (launches, attentions)
        if backend == "triton":
            queued = max(i for i, call in enumerate(log) if call in (LAUNCH, ATTENTION))
            assert SYNC not in log[:queued]
            assert len(log) - launches - attentions <= STEP_OPS, log


# --- a chunk of a prompt ---


def chunk(loaded: Engine, size: int, calls: Any, *, whole: bool) -> FixedChunk:
    found = FixedChunk(loaded.built.loop.prefill.pair, size, is_long=size == LONG)
    found.capture_(calls, whole)
    return found


def host_ops(run: FixedChunk, pieces: list[Piece], calls: HostCalls) -> int:
    """Torch ops of the host for a run of these: the target is launched at once, then what it gave
    is taken, then the drafter's context follows."""
    calls.log.clear()
    with torch.no_grad(), calls:
        run.run(pieces, lambda *_: calls.log.append(TAKEN))
    assert calls.log[-3:] == [LAUNCH, TAKEN, LAUNCH] and calls.log.count(LAUNCH) == 2
    assert SYNC not in calls.log
    return len(calls.log) - 3


def test_host_ops_of_a_chunk(loaded: Engine, calls: HostCalls, tmp_path: Path) -> None:
    """Bug: what a chunk is told is sent by more than one copy, or made by torch's ops, a third of a
    millisecond of a first token; or something is done for each layer, block or prompt."""
    target = make_target(tmp_path / "target", layers=2)
    draft = make_drafter(tmp_path / "draft", target, taps=(0, 1), block_size=4)
    with torch.no_grad(), engine(target=target, draft=draft) as shallow:
        counts = set[int]()
        for found in (loaded, shallow):
            for size in (*SIZES, LONG):
                run = chunk(found, size, calls, whole=True)
                for rows in (size - 6, size // 2 + 3):
                    pages = list(range(1, 2 + rows // 16))
                    counts.add(host_ops(run, [Piece(prompt(rows), 0, rows, pages)], calls))
            run = chunk(found, 64, calls, whole=True)
            pair = [Piece(prompt(n), 0, n, [n]) for n in (7, 9)]
            counts.add(host_ops(run, pair, calls))
    assert counts == {1}, "one copy sends what a chunk is told"


def test_calls_in_front_of_a_first_chunk(loaded: Engine) -> None:
    """Bug: a request checks options that nobody has set, or asks the model's layers again, while
    the device waits: that was half a millisecond of a first token."""
    loop, num_calls, found = loaded.built.loop, 0, list[int]()

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")
        if event == "call" and frame.f_code is EagerRunner.run.__code__:
            found.append(num_calls)

    eager = loop.prefill
    loop.prefill = replace(eager, fixed=(FixedChunk(eager.pair, 64),))
    try:
        loaded.generate(prompt(50), max_new_tokens=1)  # fills what is kept of classes and models
        for length in (40, 64):
            ids, num_calls = prompt(length, seed=length), 0
            sys.setprofile(count)
            loaded.generate(ids, max_new_tokens=1)
    finally:
        sys.setprofile(None)
        loop.prefill = eager
    assert len(found) == 2 and max(found) <= FRONT_CALLS, found


@pytest.mark.parametrize("fixed", [(), (64,)], ids=["eager", "chunk"])
@pytest.mark.parametrize("wishes", [{}, {"temperature": 1.0, "logprobs": 2}])
def test_a_first_token_waits_for_no_drafter(
    loaded: Engine, monkeypatch: pytest.MonkeyPatch, fixed: tuple[int, ...], wishes: Any
) -> None:
    """Bug: a first token is fetched behind the drafter's context of its prompt, 0.4 ms at 1,024
    rows of 8B by arithmetic, since a chunk is queued as a whole."""
    loop, log = loaded.built.loop, list[str]()
    fetch, write = FirstTokens.fetch, dflash.context_kv_write_

    def noted(name: str, call: Any) -> Any:
        return lambda *args: (log.append(name), call(*args))[1]

    monkeypatch.setattr(FirstTokens, "fetch", noted("fetch", fetch))
    monkeypatch.setattr(dflash, "context_kv_write_", noted("context", write))
    chunks = tuple(FixedChunk(loop.prefill.pair, size) for size in fixed)
    monkeypatch.setattr(loop, "prefill", replace(loop.prefill, fixed=chunks))
    loaded.generate(prompt(50, seed=9), SamplingParams(max_new_tokens=1, **wishes))
    assert log == ["fetch", "context"]


@pytest.mark.parametrize("size", [64, LONG])
def test_launches_of_a_chunk_in_pieces(loaded: Engine, calls: HostCalls, size: int) -> None:
    """Bug: a segment of a chunk is two graphs, or its attention two calls."""
    with torch.no_grad():
        run = chunk(loaded, size, calls, whole=False)
    calls.log.clear()
    with torch.no_grad(), calls:
        run.run([Piece(prompt(40), 0, 40, [1, 2, 3])], lambda *_: None)
    launches, attentions = LAYERS + 1 + 1, LAYERS  # `prefill.context` behind the segments
    assert (calls.log.count(LAUNCH), calls.log.count(ATTENTION)) == (launches, attentions)


@pytest.mark.parametrize(
    ("lengths", "num_chunks", "num_launches", "num_reads"),  # a launch more behind a first token,
    [  # and where a chunk has no end for a prompt that goes on: the second of the third
        *(((10,), 1, 2, 1), ((64, 64), 2, 4, 2), ((330,), 3, 5, 1), ((450,), 2, 3, 1)),
        ((5, 6, 7), 1, 2, 1),
    ],
)
def test_nothing_waits_between_two_chunks(
    loaded: Engine,
    calls: HostCalls,
    lengths: list[int],
    num_chunks: int,
    num_launches: int,
    num_reads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bug: the host reads a tensor's values before all chunks are queued, so that the device waits
    for it; or sends a chunk's numbers one by one."""
    a_forward_adds(30, monkeypatch)
    loop = loaded.built.loop
    eager = loop.prefill
    with torch.no_grad():
        fixed = [chunk(loaded, size, calls, whole=True) for size in (*SIZES, LONG)]
    loop.prefill = replace(eager, fixed=tuple(fixed))
    try:
        for seed, length in enumerate(lengths):
            loop.submit(prompt(length, seed), 9, ())
        calls.log.clear()
        calls.copies.clear()
        with torch.no_grad(), calls:
            outputs = loop.admit()
    finally:
        loop.prefill = eager
        loop.reset()
    assert len(outputs) == len(lengths)
    log = calls.log
    assert log.count(LAUNCH) == num_launches and log.count(SYNC) == num_reads
    assert log.index(SYNC) > max(i for i, call in enumerate(log) if call == LAUNCH)
    on_device = [run._flat_X.untyped_storage().data_ptr() for run in fixed]
    assert sum(copied in on_device for copied in calls.copies) == num_chunks
    assert len(log) <= num_chunks + num_launches + num_reads + PAGE_OPS
