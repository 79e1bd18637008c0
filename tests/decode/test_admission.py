"""Requests that come and go while others run: prompts in pieces between steps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, cast

import pytest

from graphengine.api import Engine
from graphengine.checkpoints.hub import TINY_DRAFT, TINY_TARGET
from graphengine.decode import prefill
from graphengine.decode.admission import Admission, Budget
from graphengine.decode.fixed_chunk import Piece
from graphengine.decode.loop import Watch
from graphengine.decode.prefill import Prefill
from graphengine.decode.request import Request
from tests.decode.test_engine import Pair, assert_idle, loop_of

BUDGET = 16
LONGEST = 60


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"), likely_tokens=3)


@pytest.fixture(scope="module")
def engine(pair: Pair) -> Iterator[Engine]:
    options: dict[str, Any] = {"max_num_batched_tokens": BUDGET, "enable_prefix_caching": False}
    with pair.engine(**options) as engine:
        yield engine
        assert_idle(engine)


class Tape(Watch):
    """What was queued, in order: rows of prompts, and steps with who ran."""

    def __init__(self, loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop, self.events = loop, []
        real = Prefill.queue

        def queue(prefill: Prefill, work: Any) -> Any:
            self.events.append(
                ("rows", sum(piece.num_rows for _, piece in work), len(loop.running))
            )
            return real(prefill, work)

        monkeypatch.setattr(Prefill, "queue", queue)

    events: list[tuple[str, int, int]]

    def launching(self) -> None:
        self.events.append(("step", 0, len(self.loop.running)))

    def rows_between_steps(self) -> list[int]:
        """Of prompts, that somebody's next step stood behind."""
        gaps, rows = [], 0
        for kind, count, running in self.events:
            if kind == "step":
                gaps.append(rows)
                rows = 0
            elif running:
                rows += count
        return gaps


def prompt(rng: random.Random, longest: int = LONGEST) -> list[int]:
    return [rng.randrange(1, 250) for _ in range(rng.randrange(1, longest))]


def newcomer_beside(first: Request, loop: Any, running: Iterator[Any], rng: Any) -> Request:
    """A long prompt that has its first token; a step of the stream came between its pieces."""
    second = loop.submit([rng.randrange(1, 250) for _ in range(LONGEST)], 5, ())
    before, began = len(first.output_ids), set()
    while not second.output_ids:
        next(running)
        began |= {second.prefill_s} - {0.0}
    assert len(first.output_ids) >= before + LONGEST // BUDGET
    assert len(began) == 1
    return second


def test_a_stream_goes_on_while_a_prompt_comes_in(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: running streams stand still until a newcomer's whole prompt is done; or the newcomer
    waits until they end, or is said to have waited until its last piece."""
    loop, rng = loop_of(engine), random.Random(1)
    tape = Tape(loop, monkeypatch)
    first = loop.submit(prompt(rng, 9), 30, ())
    running = loop.run(tape)
    while not first.output_ids:
        next(running)
    second = newcomer_beside(first, loop, running, rng)
    assert first.finish_reason is None
    assert max(tape.rows_between_steps()) == BUDGET
    for _ in running:
        pass
    monkeypatch.undo()
    for request, count in ((first, 30), (second, 5)):
        (alone,) = engine.generate([request.prompt_ids], max_new_tokens=count, ignore_eos=True)
        assert request.output_ids == alone.token_ids


def test_a_prompt_may_write_what_drafts_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: where attention is planned, what the first drafting segment leaves for the next step is
    a graph's memory; of a bucket that was built late it may be a chunk's as well, whose rows come
    in between, and a step's drafts are garbage."""
    options: dict[str, Any] = {"max_num_batched_tokens": BUDGET, "enable_prefix_caching": False}
    options |= {"attention_backend": "torch", "lazy_capture": True, "buckets": (1, 2, 4)}
    with Engine.from_pretrained(TINY_TARGET, TINY_DRAFT, device="cpu", **options) as engine:
        loop, counts, real = loop_of(engine), [], Prefill.queue

        def overwriting(prefill: Prefill, work: Any) -> Any:
            found = real(prefill, work)
            if loop.first.bucket is not None:
                for tensor in loop.first.bucket.ahead.carry:
                    tensor.zero_()
            return found

        assert engine.built.tokenizer is not None
        said = {"role": "user", "content": "Count from 20 to 146 in steps of 6."}
        counting = engine.built.tokenizer.encode_chat([said])
        for queue in (real, overwriting):
            monkeypatch.setattr(Prefill, "queue", queue)
            streams = [loop.submit(counting, 60, ()) for _ in range(2)]
            running = loop.run()
            while not all(stream.output_ids for stream in streams):
                next(running)
            loop.submit(list(range(10 * BUDGET)), 1, ())
            for _ in running:
                pass
            counts.append([stream.acceptance.num_steps for stream in streams])
        assert 2 in loop.first.built_late_s
        assert counts[0] == counts[1]


def test_a_cancelled_prompt_is_not_run_to_its_end(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: who has gone still costs every stream its whole prompt, or its pages are lost."""
    loop, rng = loop_of(engine), random.Random(2)
    first = loop.submit(prompt(rng, 9), 40, ())
    running = loop.run()
    while not first.output_ids:
        next(running)
    second = loop.submit([rng.randrange(1, 250) for _ in range(LONGEST)], 5, ())
    while second not in loop.prefilling:
        next(running)
    free = loop.allocator.num_free
    tape = Tape(loop, monkeypatch)
    loop.cancel(second)
    next(running)
    assert loop.allocator.num_free > free
    for _ in running:
        pass
    assert not any(kind == "rows" for kind, _, _ in tape.events)
    assert second.output_ids == []
    assert first.finish_reason == "length"


def test_a_cancelled_prompt_whose_scores_are_asked_for(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: it is run to its end though its pages are free, and its first token, which nobody waits
    for, ends everyone with "list.remove(x): x not in list"."""
    monkeypatch.setattr(prefill, "SCORED_ROWS", BUDGET)
    loop, rng = loop_of(engine), random.Random(4)
    first = loop.submit(prompt(rng, 9), 40, ())
    running = loop.run()
    while not first.output_ids:
        next(running)
    long = [rng.randrange(1, 250) for _ in range(LONGEST)]
    second, third = (loop.submit(long, 5, (), prompt_logprobs=1) for _ in range(2))
    while second not in loop.prefilling:
        next(running)
    assert not second.queued_s
    loop.cancel(second)
    for _ in running:
        pass
    assert second.output_ids == []
    assert len(third.output_ids) == 5 and len(third.prompt_scores) == len(long) - 1
    assert first.finish_reason == "length"


@pytest.mark.parametrize("seed", range(3))
def test_random_joins_and_leaves(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Bug: a newcomer's piece writes another's rows, a row is given to two, a request is overtaken
    for ever, or what a request says depends on who runs beside it."""
    loop, rng = loop_of(engine), random.Random(seed)
    tape = Tape(loop, monkeypatch)
    everyone: list[Request] = [loop.submit(prompt(rng), 12, ())]
    running = loop.run(tape)
    while True:
        if len(everyone) < 14 and rng.random() < 0.4:
            everyone.append(loop.submit(prompt(rng), rng.randrange(1, 20), ()))
        if rng.random() < 0.08:
            loop.cancel(rng.choice(everyone))
        if next(running, None) is None:
            if len(everyone) == 14:
                break
            everyone.append(loop.submit(prompt(rng), 5, ()))
            running = loop.run(tape)
    assert max(tape.rows_between_steps()) <= BUDGET
    assert loop.allocator.num_free == loop.allocator.num_usable
    monkeypatch.undo()
    begun = [r.first_token_s for r in everyone if r.first_token_s]
    assert begun == sorted(begun), "in the order of arrival"
    for request in everyone:
        count = max(len(request.output_ids), 1)
        (alone,) = engine.generate([request.prompt_ids], max_new_tokens=count, ignore_eos=True)
        assert request.output_ids == alone.token_ids[: len(request.output_ids)]
        assert request.finish_reason in ("length", "abort")


def test_behind_the_last_stream_the_rest_comes_at_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a newcomer goes on in the small pieces of a stream that has ended, and reads all weights
    for each of them."""
    loop, rng = loop_of(engine), random.Random(5)
    first = loop.submit(prompt(rng, 9), 40, ())
    running = loop.run()
    while not first.output_ids:
        next(running)
    second = loop.submit([rng.randrange(1, 250) for _ in range(LONGEST)], 2, ())
    while second not in loop.prefilling:
        next(running)
    tape = Tape(loop, monkeypatch)
    loop.cancel(first)
    for _ in running:
        pass
    assert [rows for kind, rows, _ in tape.events if kind == "rows"] == [LONGEST - BUDGET]


class Late:
    """First tokens that come when they are waited for, or told to be there."""

    def __init__(self, request: Request) -> None:
        self.request, self.is_there = request, False

    def wait(self) -> list[tuple[Request, int]]:
        return [(self.request, 7)]


class SlowDevice:
    """A prefill whose forwards, one a prompt, are not done when they are queued."""

    keyed_in = 1

    def __init__(self) -> None:
        self.late: list[Late] = []

    def split(self, requests: Any, rows_at: Any) -> Any:
        for request in requests:
            if request.finish_reason is None:
                yield [(request, Piece(request.prompt_ids, 0, len(request.prompt_ids), [1], 1))]

    def queue(self, work: Any) -> Any:
        self.late.append(Late(work[0][0]))
        return self.late[-1]


def three_prompts(engine: Engine) -> list[Request]:
    loop = loop_of(engine)
    requests = [loop.submit([3, 4], 5, ()) for _ in range(3)]
    loop.waiting.clear()
    return requests


def test_first_tokens_are_waited_for_by_those_alone(engine: Engine) -> None:
    """Bug: beside a stream a newcomer's first token is waited for; or, all queued at once, one that
    is not there yet is left for a step that others then take in front of it."""
    device: Any = SlowDevice()
    admission = Admission(device, three_prompts(engine))
    assert len(admission.queue(budget=16)) == 1
    assert admission.take() == []
    device.late[0].is_there = True
    assert [request for request, _ in admission.take()] == [device.late[0].request]
    assert len(admission.queue(None)) == 2
    assert len(admission.take()) == 1
    assert admission.queue(budget=16) == []  # the first of them runs by now
    assert len(admission.take()) == 1
    assert admission.requests == []


def test_cancelled_between_its_last_rows_and_its_first_token(engine: Engine) -> None:
    """Bug: who is cancelled there is given back at once, while its rows are still written, and is
    missing when its first token comes."""
    device: Any = SlowDevice()
    first, second, third = three_prompts(engine)
    admission = Admission(device, [first, second, third])
    admission.queue(budget=16)
    for request in (first, second):
        request.finish_reason = "abort"
    assert admission.drop() == [second]
    device.late[0].is_there = True
    assert admission.take() == [(first, 7)]
    assert admission.queue(budget=16) == admission.requests == [third]


def test_rows_behind_a_long_text() -> None:
    """Bug: a chunk at 32k keys takes three times as long as one at none, and streams wait; or far
    behind it is so small that the newcomer waits for a step for every few rows."""
    found = [Budget(512).rows_at(at) for at in (0, 512, 8192, 8193, 24576, 24577, 57344, 131072)]
    assert found == [512, 512, 512, 511, 256, 255, 128, 128]  # 511: the next smaller chunk
    assert Budget(16).rows_at(131072) == 16
    assert Budget().rows_at(5) is None
    hybrid = [Budget(512, keyed_in=4).rows_at(at) for at in (8193, 32768, 98304)]
    assert hybrid == [512, 512, 256]


def test_a_hybrids_prompt_is_cut_by_its_own_keys(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: who cuts a prompt is told of a dense model's keys, and a hybrid's pieces behind a long
    text are a quarter of what they may be."""
    device, cuts = SlowDevice(), list[Any]()
    monkeypatch.setattr(device, "keyed_in", 4)
    monkeypatch.setattr(device, "split", lambda requests, rows_at: (cuts.append(rows_at), [])[1])
    Admission(cast(Any, device), three_prompts(engine)).queue(512)
    assert [rows_at(32768) for rows_at in cuts] == [512]


def test_a_stream_that_has_left_speculation_goes_on_too(engine: Engine) -> None:
    """Bug: only drafted streams count as running, and one that is decoded plainly stands still
    until a newcomer's whole prompt is done."""
    loop, rng = loop_of(engine), random.Random(3)
    first = loop.submit(prompt(rng, 9), 60, ())
    running = loop.run()
    while not first.output_ids:
        next(running)
    assert loop.fallback is not None
    loop.fallback.leave([first], "asked")
    while not first.num_plain_steps:
        next(running)
    newcomer_beside(first, loop, running, rng)
    for _ in running:
        pass


def test_who_is_cancelled_before_its_first_token_leaves_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: its rows were all queued, its token comes, nobody begins with it, and its pages are
    nobody's for ever."""
    loop, real = loop_of(engine), Admission.take
    free = loop.allocator.num_free
    request = loop.submit([5, 6, 7], 5, ())
    monkeypatch.setattr(Admission, "take", lambda self: (loop.cancel(request), real(self))[1])
    assert loop.admit() == [] and not loop.has_work
    assert request.finish_reason == "abort" and loop.allocator.num_free == free
