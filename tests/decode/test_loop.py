"""loop: who is admitted, in which order a step is watched, and what a reset leaves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from graphengine.api import Engine
from graphengine.decode.admission import Admission
from graphengine.decode.guards import FallbackWarning
from graphengine.decode.loop import Watch
from tests.decode.test_engine import BLOCK, PROMPTS, Pair, assert_idle, loop_of


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def engine(pair: Pair) -> Iterator[Engine]:
    with pair.engine(buckets=(2,)) as engine:
        yield engine
        assert_idle(engine)


class Notes(Watch):
    """The order of what it was told; a letter each."""

    def __init__(self) -> None:
        self.text = ""

    def launching(self) -> None:
        self.text += "l"

    def launched(self) -> None:
        self.text += "L"

    def waited(self) -> None:
        self.text += "w"

    def collected(self, outputs: list[Any]) -> None:
        self.text += "c"


def test_a_step_is_watched_in_order(engine: Engine, pair: Pair) -> None:
    """Bug: a tool times the commit as the device's work, since it is told of a step's parts late or
    not at all; or tokens come out twice."""
    loop, notes = loop_of(engine), Notes()
    request = loop.submit(list(PROMPTS[0]), 9, ())
    outputs = [output for step in loop.run(notes) for output in step]
    assert notes.text == "lLwc" * (len(notes.text) // 4)
    assert [t for output in outputs for t in output.token_ids] == request.output_ids
    assert request.output_ids == pair.plain(PROMPTS[0], 9)


def test_ends_of_the_model_and_of_the_user(engine: Engine, pair: Pair) -> None:
    """Bug: a stop token that a user names does not end the answer where the model has ends of its
    own, or these no longer do where a user names one."""
    loop, told = loop_of(engine), pair.plain(PROMPTS[0], 20)
    _, first, second, *_ = dict.fromkeys(told)
    for own, asked, reason in (((second,), (first,), first), ((first,), (second,), None)):
        request = loop.submit(list(PROMPTS[0]), 20, own, asked_stop_ids=asked)
        for _ in loop.run():
            pass
        assert request.output_ids == told[: told.index(first) + 1]
        assert (request.finish_reason, request.stop_reason) == ("stop", reason)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@torch.no_grad()
def test_steps_behind_rows_of_a_prompt_are_not_alone(
    pair: Pair, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: of the steps that may have waited for a prompt's rows one counts as timed alone, and
    speculation seems to lose."""
    with pair.engine(buckets=(2,), attention_backend=backend) as engine:
        loop, told = loop_of(engine), list[bool]()
        real = loop.fallback.judge

        def judge(verified: Any, num_rows: int, is_alone: bool) -> None:
            told.append(is_alone)
            real(verified, num_rows, is_alone)

        monkeypatch.setattr(loop.fallback, "judge", judge)
        loop.submit(list(PROMPTS[0]), 30, ())
        for _ in loop.run():
            pass
    assert told[:3] == {"torch": [False, True, True], "triton": [False, False, True]}[backend]


@torch.no_grad()
def test_nobody_overtakes(engine: Engine) -> None:
    """Bug: a short prompt takes the pages that a long one in front of it waits for, for ever; or
    this one, as often as it is asked, holds once more those that an earlier text has left."""
    loop = loop_of(engine)
    loop.submit(list(PROMPTS[1]), 2, ())
    for _ in loop.run():
        pass
    held = loop.allocator.allocate(loop.allocator.num_free - 4)  # 16 tokens are left
    long, short = loop.submit(list(PROMPTS[1]), 20, ()), loop.submit([5], 2, ())
    assert loop.admit() == [] and list(loop.waiting) == [long, short]
    assert loop.allocator.num_free == 4
    loop.allocator.free(held)
    assert [output.request for output in loop.admit()] == [long, short]
    loop.reset()
    assert [r.finish_reason for r in (long, short)] == ["abort"] * 2
    assert long.pages == short.pages == []


@torch.no_grad()
def test_pages_for_a_block_behind_the_last_token(engine: Engine) -> None:
    """Bug: the last block of a request is written into another one's page; or one that ends with
    its first token runs a step."""
    loop = loop_of(engine)
    for count in range(1, 9):
        request = loop.submit([5], count, ())
        loop.admit()
        if request.finish_reason is not None:
            assert request.pages == [] and not loop.has_work
        else:
            assert len(request.pages) * engine.config.page_size >= 1 + count + BLOCK
        loop.reset()


@torch.no_grad()
def test_a_cancelled_request_leaves_at_once(engine: Engine) -> None:
    """Bug: until the next step it keeps its row, for which others wait, and its pages; or one that
    a stop string has ended does."""
    loop = loop_of(engine)
    requests = [loop.submit(list(prompt), 20, ()) for prompt in PROMPTS[:3]]
    loop.admit()
    loop.cancel(requests[0])
    assert requests[0] not in loop.running and requests[0].pages == []
    assert [output.request for output in loop.admit()] == [requests[2]]
    loop.end_at(requests[1], "text", 0)
    assert loop.running == [requests[2]] and requests[1].pages == []
    loop.reset()


@torch.no_grad()
def test_a_prefill_that_fails_leaves_nothing_under_way(
    engine: Engine, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: requests whose pages are free already are run once more with the next ones."""
    loop = loop_of(engine)
    failed = loop.submit(list(PROMPTS[0]), 4, ())

    def fails(admission: Admission) -> None:
        raise MemoryError

    monkeypatch.setattr(Admission, "take", fails)
    with pytest.raises(MemoryError):
        loop.admit()
    monkeypatch.undo()
    assert failed.finish_reason == "abort" and failed.pages == [] and loop.prefilling == []
    request = loop.submit(list(PROMPTS[1]), 4, ())
    for _ in loop.run():
        pass
    assert request.output_ids == pair.plain(PROMPTS[1], 4) and not failed.output_ids


@pytest.mark.parametrize("kind", ["logprobs", "prompt_logprobs"])
def test_without_log_probabilities_none_are_told(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    """Bug: those of the chosen tokens alone, 0 alternatives, are asked of an engine that has no
    memory for them, and it waits for what nobody writes."""
    loop = loop_of(engine)
    monkeypatch.setattr(loop, "config", replace(loop.config, max_logprobs=0))
    with pytest.raises(ValueError, match="this engine has none; load it with max_logprobs=1"):
        loop.submit([1, 2], 4, (), **{kind: 0})


def test_what_is_still_to_be_handed_over_as_the_last_one_ends(engine: Engine) -> None:
    """Bug: the last request ended as it was to leave speculation, and the next one's steps are
    never launched; or the next generation makes everything anew, and nothing is cached."""
    loop = loop_of(engine)
    for _ in range(2):
        request = loop.submit(list(PROMPTS[1]), 4, ())
        for outputs in loop.run():
            is_over = any(output.request.finish_reason is not None for output in outputs)
            loop.first.must_drain = is_over
        assert loop.is_clean and not loop.first.must_drain
    assert request.num_cached_tokens == len(PROMPTS[1]) - 1


@torch.no_grad()
def test_a_reset_forgets_who_could_not_go_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: Ctrl-C comes between a hand-over that has failed a request and the step behind it, and
    the next generation is told of that request, which it does not know: it ends in an error."""

    def build() -> Any:
        raise MemoryError

    loop = loop_of(engine)
    monkeypatch.setattr(loop.fallback, "_build_plain", build)
    request = loop.submit(list(PROMPTS[0]), 9, ())
    loop.admit()
    loop.fallback.leave([request], "a test says so")
    with pytest.warns(FallbackWarning):
        loop.launch()
    assert request.finish_reason == "error" and loop.has_work
    loop.reset()
    assert not loop.has_work


@torch.no_grad()
def test_who_was_cancelled_while_it_waited_holds_up_nobody(pair: Pair) -> None:
    """Bug: a long request that is cancelled while it waits for pages stays in front of a short one,
    which has enough, until those that run have ended."""
    with pair.engine(
        buckets=(4,), page_size=4, max_model_len=48, kv_cache_memory="60KiB"
    ) as loaded:
        loop = loop_of(loaded)
        running = loop.submit(list(PROMPTS[0]), 12, ())
        loop.admit()
        most = 4 * loop.allocator.num_usable - loop.block
        large = loop.submit([1], min(most, loop.config.max_model_len) - 1, ())
        small = loop.submit([2], 1, ())
        loop.admit()
        assert list(loop.waiting) == [large, small], "the pool is too large for this test"
        loop.cancel(large)
        loop.admit()
        assert small.finish_reason == "length" and running.finish_reason is None
        loop.reset()
