"""rows.Results: words that come in any order and at any time, or never."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from graphengine.config.model import ModelConfig
from graphengine.decode.buffers import Arena, StepBuffers
from graphengine.decode.recurrence import take_buffers
from graphengine.decode.rows import Results, write_rows_
from graphengine.startup.build import read_configs
from tests.decode.test_request import a_request

BLOCK = 4


class Words:
    """Step buffers as far as results need them."""

    def __init__(self, num_rows: int = 3) -> None:
        self.block = BLOCK
        self.results_BX = torch.zeros(num_rows, 2 * (BLOCK + 3), dtype=torch.int64)


def write_(results: Results, values: list[list[int]], order: list[int]) -> None:
    """Stores a step's words one by one, as a device may. Mutates: results."""
    words = torch.tensor(values) & 0xFFFFFFFF | results.number << 32
    for index in order:
        row, column = divmod(index, BLOCK + 1)
        results.words_BX[row, column] = words[row, column]


def of(buffers: Any, step: int, num_requests: int) -> Results:
    return Results.of(buffers, step, num_requests)


@pytest.mark.parametrize("step", [1, 2, 2**31 - 1, 2**31, 2**32 + 1])
def test_words_in_any_order(step: int) -> None:
    """Bug: results are read before the last word is there, from the step two before, from the one
    between, or from rows that hold no request; or a number past 32 bits never matches."""
    buffers = Words()
    values = [[5, -1, 151_935, 0, 3], [0, 0, 0, 0, 0]]
    others = [of(buffers, step - n, 3) for n in (2, 1)]
    for other in others:
        write_(other, [[1, 2, 3, 4, 0]] * 3, list(range(15)))
    results = of(buffers, step, 2)
    order = torch.randperm(10, generator=torch.Generator().manual_seed(step)).tolist()
    for place, index in enumerate(order):
        assert not results.are_there(), f"after {place} words"
        write_(results, values, [index])
    assert results.are_there()
    assert results.read() == ([[5, -1, 151_935, 0], [0, 0, 0, 0]], [3, 0])
    assert others[1].read() == ([[1, 2, 3, 4]] * 3, [0] * 3) and others[1].are_there()


class Stream:
    """What the device says when it is asked."""

    def __init__(self, answers: list[Any]) -> None:
        self.answers = answers

    def query(self) -> bool:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def on_gpu(monkeypatch: pytest.MonkeyPatch, answers: list[Any]) -> None:
    stream = Stream(answers)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def test_wait_returns_when_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the wait ends too early, or only when the device has done everything that it has."""
    on_gpu(monkeypatch, [False])
    results = of(Words(), 7, 1)

    def device() -> None:
        for index in range(BLOCK + 1):
            time.sleep(0.005)
            write_(results, [[9, 8, 7, 6, 1]], [index])

    thread = threading.Thread(target=device)
    began = time.perf_counter()
    thread.start()
    results.wait()
    assert time.perf_counter() - began > 0.02
    assert results.read() == ([[9, 8, 7, 6]], [1])
    thread.join()


def test_wait_on_a_failed_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: after a CUDA error the host looks for results for ever."""
    on_gpu(monkeypatch, [False, False, RuntimeError("CUDA error: an illegal memory access")])
    with pytest.raises(RuntimeError, match="illegal memory access"):
        of(Words(), 7, 1).wait()


def test_wait_for_what_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a step that wrote its results elsewhere, or under another number, hangs the host."""
    with pytest.raises(RuntimeError, match="step 7 is over and gave no results"):
        of(Words(), 7, 1).wait()
    on_gpu(monkeypatch, [False, True])
    with pytest.raises(RuntimeError, match="step 8 is over"):
        of(Words(), 8, 1).wait()


def test_words_that_come_with_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: results that come between the look and the device's answer are taken for missing."""
    results = of(Words(), 7, 1)
    on_gpu(monkeypatch, [True])
    stream = torch.cuda.current_stream()
    query = stream.query

    def answer() -> bool:
        write_(results, [[1, 2, 3, 4, 0]], list(range(BLOCK + 1)))
        return query()

    monkeypatch.setattr(stream, "query", answer)
    results.wait()


@pytest.fixture(scope="module")
def hybrid() -> ModelConfig:
    return read_configs("qwen3.5-4b", None)[0].shortened(1)


@pytest.mark.parametrize("is_timed", [False, True])
def test_what_a_row_begins_with(hybrid: ModelConfig, is_timed: bool) -> None:
    """Bug: the drafter's context, run in front of the row's first block, writes where its last
    owner's block stood; a row that goes on is begun anew; or a request whose steps are only timed
    keeps states of them."""
    arena = Arena(torch.device("cpu"), torch.float32)
    recurrent = take_buffers(arena, hybrid, 3, BLOCK)
    buffers = StepBuffers.take(arena, hybrid, 3, BLOCK, 6)._replace(recurrent=recurrent)
    assert recurrent is not None
    for held in (*buffers[:11], *recurrent[:2]):
        if isinstance(held, torch.Tensor):
            held.fill_(77)
    request = a_request()
    request.begin(9)
    request.pages, request.answer_slots = [5, 6], [3, 4]
    request.state_slot = 0 if is_timed else 2
    write_rows_(buffers, {0: request, 2: None}, 11, 4, step=8)
    assert buffers.start_B.tolist() == [3, 77, 0] and buffers.step_B.tolist() == [8, 77, 8]
    assert buffers.block_ids_BG.tolist()[:2] == [[9, 11, 11, 11], [77] * BLOCK]
    assert buffers.page_table_BW.tolist() == [[5, 6, 0, 0, 0, 0], [77] * 6, [0] * 6]
    for name, row in (("positions_T", [3, 4, 5, 6]), ("slots_T", [23, 24, 25, 26])):
        assert getattr(buffers, name).tolist() == [*row, *[77] * BLOCK, *[0] * BLOCK]
        context = getattr(buffers, f"context_{name}").tolist()
        assert context == [*[0] * BLOCK, *[77] * BLOCK, *[0] * BLOCK]
    assert recurrent.slots_B.tolist() == [0 if is_timed else 2, 77, 0]
    kept = [0, 0] if is_timed else [3, 4]
    assert recurrent.kept_slots_B2.tolist() == [kept, [77, 77], [0, 0]]


def test_a_row_costs_the_pages_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a row that begins, or is padding from now on, is written by a number of Python's for
    each page that the longest text may have, in front of its first token: 0.5 ms for a context of
    131,072 tokens in pages of 16, and for 16 rows at once 8."""
    numbers, real = list[int](), torch.tensor

    def tensor(values: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        numbers.append(sum(len(v) if isinstance(v, list | tuple) else 1 for v in values))
        return real(values, *args, **kwargs)

    monkeypatch.setattr(torch, "tensor", tensor)
    model, width = read_configs("qwen3-8b", None)[0].shortened(1), 8192
    buffers = StepBuffers.take(Arena(torch.device("cpu"), torch.float32), model, 3, BLOCK, width)
    request = a_request()
    request.begin(9)
    request.pages = [5, 6]
    buffers.page_table_BW.fill_(77)
    write_rows_(buffers, {0: request, 2: None}, 11, 4, step=8)
    wanted = [[5, 6, *[0] * (width - 2)], [77] * width, [0] * width]
    assert buffers.page_table_BW.tolist() == wanted and max(numbers) < 10
