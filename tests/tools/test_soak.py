"""tools/soak.py in short, and that it would notice what it is there for."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import soak_checks
import soak_requests
import torch
from torch import Tensor

from graphengine.decode import holdings, masks, rows
from graphengine.decode.holdings import Holdings
from graphengine.decode.metrics import Acceptance
from graphengine.decode.prefix_cache import PrefixCache, StateSlots
from graphengine.decode.recurrence import States
from graphengine.decode.request import Request
from tools import soak as soak_tool

OPTIONS: dict[str, Any] = {"buckets": soak_tool.BUCKETS, "device": "cpu"}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_300_steps(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug T45: over hundreds of steps with forks, cancels, resets, options, grammars, evictions,
    changes of buckets a page leaks or is written, or a token is not the one-page step's."""
    arguments = ["--steps", "300", "--seed", "8", "--device", "cpu", "--attention-backend", backend]
    assert soak_tool.main(arguments) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    numbers = found["numbers"]
    assert found["passed"] and numbers["num_steps"] >= 300 and numbers["num_differing"] == 0
    assert numbers["num_cancelled"] > 2 and numbers["num_hits"] > 5
    assert numbers["num_evicted_pages"] > 20 and numbers["num_ended_by_stop"] > 0
    assert numbers["num_plain_steps"] > 0 and numbers["num_constrained"] > 3
    assert sum(n > 0 for n in numbers["num_blocks_by_accepted"]) >= 3, "too few lengths came up"


def leaks_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = Holdings.give_back, []

    def release(self: Holdings, request: Any) -> None:
        calls.append(1)
        if len(calls) == 9:
            request.pages = request.pages[1:]
        real(self, request)

    monkeypatch.setattr(Holdings, "give_back", release)


def publishes_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    real = PrefixCache.publish

    def publish(self: PrefixCache, token_ids: Any, pages: Any) -> None:
        real(self, [*token_ids, *[0] * (-len(token_ids) % 4)], pages)

    monkeypatch.setattr(PrefixCache, "publish", publish)


def takes_no_state_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdings, "copy_state_", lambda *_: None)


def swaps_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    real = rows.next_block

    def next_block(start: Any, *rest: Any) -> Any:
        ids, positions, slots = real(start, *rest)
        return ids, positions + 9 * (positions > 20), slots

    monkeypatch.setattr(rows, "next_block", next_block)


def masks_a_token_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    real = masks.fill_masks

    def fill_masks(jobs: Any, mask_TW: Tensor) -> None:
        real(jobs, mask_TW)
        mask_TW[:, 0] &= ~1

    monkeypatch.setattr(masks, "fill_masks", fill_masks)


def masks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "fill_masks", lambda jobs, mask_TW: mask_TW.fill_(-1))


@pytest.mark.parametrize(
    ("break_", "message"),
    [
        (leaks_a_page, "pages held"),
        (publishes_too_much, "published page was written"),
        (takes_no_state_over, "state is wrong"),
        (swaps_a_row, "was said, not"),
        (masks_a_token_too_many, "was said, not"),
        (masks_nothing, "the grammar cannot be followed"),
    ],
)
def test_it_notices(
    break_: Any,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Bug: a soak that cannot fail, or a failure that names another seed than the one it had."""
    break_(monkeypatch)
    kind = ["--hybrid"] * (break_ is takes_no_state_over)
    assert soak_tool.main(["--steps", "300", "--seed", "3", "--device", "cpu", *kind]) == 1
    printed = capsys.readouterr()
    found = json.loads(printed.out.splitlines()[-1])
    assert found == {"passed": False, "reason": found["reason"], "seed": 3}
    assert message in found["reason"] and f"FAILED: {found['reason']}\n" in printed.err


class Idle:
    """A soak that only counts."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter(steps=0, requests=0)
        self.accepted = Counter({0: 1})
        self.published = SimpleNamespace(num_evicted=0)

    def step(self) -> None:
        self.counts["steps"] += 1

    def check(self) -> None: ...

    def drain(self) -> None: ...


@pytest.mark.parametrize(
    ("read", "message"),
    [("rss_bytes", "the process grew by 128.0 MiB"), ("gpu_bytes", "GPU memory grew by 128.0 MiB")],
)
def test_it_notices_growth(read: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a soak that cannot fail where memory is lost, or that tells how much in another unit."""
    sizes = iter(range(100 << 20, 99 << 30, 64 << 20))
    monkeypatch.setattr(soak_tool, read, lambda: next(sizes))
    idle: Any = Idle()
    with pytest.raises(soak_tool.Leak, match=message):
        soak_tool._run(idle, 300, lambda line: None, is_hybrid=False)


def test_what_allocators_take_at_first_is_no_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: memory that is there from the first fifth on counts as growth, and a run of an hour ends
    as a leak; or a number of memory is another moment's."""
    mib = [100, 200, 300, 310, 350, 340, 330, 320, 315, 311]
    sizes = {"rss_bytes": mib, "gpu_bytes": [0, 8, *[9] * 7, 7]}
    for name, found in sizes.items():
        left = iter(found)
        monkeypatch.setattr(soak_tool, name, lambda left=left: next(left) << 20)
    idle: Any = Idle()
    lines: list[str] = []
    numbers = soak_tool._run(idle, 1000, lines.append, is_hybrid=False)
    assert len(lines) == 10 and lines[0] == "   100 steps, 0 requests, 100.0 MiB"
    told = {name: n >> 20 for name, n in numbers.items() if name.endswith("_bytes")}
    assert told == {
        "rss_settled_bytes": 300,
        "rss_end_bytes": 311,
        "rss_max_bytes": 350,
        "rss_growth_bytes": 11,
        "gpu_settled_bytes": 9,
        "gpu_end_bytes": 7,
    }


def test_of_what_a_soak_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: the result does not say by which seed, or with which layers, it is got again."""
    ran: list[Any] = []
    monkeypatch.setattr(soak_tool, "soak", lambda *args: ran.append(args) or {"num_steps": 100})
    line = ["--steps", "100", "--seed", "7", "--hybrid", "--device", "cpu", "--dtype", "float32"]
    assert soak_tool.main(line) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    asked = {"device": "cpu", "dtype": "float32", "graph_mode": "auto", "attention_backend": "auto"}
    ((steps, seed, options, _, is_hybrid),) = ran
    assert (steps, seed, is_hybrid) == (100, 7, True)
    assert options == asked | {"buckets": soak_tool.BUCKETS}
    pair = {"block_length": 8, "likely_tokens": 2, "buckets": list(soak_tool.BUCKETS)}
    assert found["config"] == {"seed": 7, "is_hybrid": True} | asked | pair
    assert found["numbers"] == {"num_steps": 100} and found["passed"] is True


def test_requests_are_the_seed_s() -> None:
    """Bug: what a soak has found is not found again with its seed."""
    grammars: Any = SimpleNamespace(matcher=lambda constraint: constraint)

    def drawn() -> list[Any]:
        rng = random.Random(3)
        texts: list[list[int]] = []
        requests = []
        for _ in range(40):
            texts.append(soak_requests.a_prompt(rng, texts, 99))
            requests.append(soak_requests.a_request(rng, 99, 2, grammars, [5]))
        return [*texts, *requests]

    assert drawn() == drawn()


@pytest.mark.slow
def test_recurrent_layers() -> None:
    """Bug: a state is lost, kept of another text, or advanced by who has left: the text changes."""
    options = OPTIONS | {"attention_backend": "triton"}  # two steps in flight
    assert soak_tool.soak(150, 5, options, is_hybrid=True)["num_steps"] >= 150


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["piecewise", "full"])
def test_500_steps_on_the_gpu(mode: str) -> None:
    """Bug T45: replays under changing buckets, cancels and page shortage: an illegal access."""
    options = OPTIONS | {"device": "cuda", "graph_mode": mode, "compile": False}
    assert soak_tool.soak(500, 3, options)["num_steps"] >= 500


@pytest.mark.gpu
@pytest.mark.parametrize("is_hybrid", [False, True])
def test_float32_on_the_gpu(is_hybrid: bool) -> None:
    """Bug: a kernel's threads write over what others have not read, or a library's attention has a
    wrong row: in bfloat16 it passes for rounding, and on the CPU there is neither."""
    options = OPTIONS | {"device": "cuda", "dtype": "float32", "graph_mode": "full"}
    numbers = soak_tool.soak(400, 0, options | {"compile": False}, is_hybrid=is_hybrid)
    assert numbers["num_differing"] == 0


def page_of(text: list[int]) -> soak_checks.Page:
    """One whose target says this text, whatever it is asked."""
    page = soak_checks.Page.__new__(soak_checks.Page)
    following = torch.tensor([*text[1:], 0])
    page.logits = lambda ids: 9.0 * torch.eye(8)[following[: len(ids)]]  # pyright: ignore
    return page


def ended(reason: Any) -> Request:
    """One that said 3 and the end token 5 behind 1 and 2."""
    return Request(
        request_id=0,
        prompt_ids=[1, 2],
        max_total_tokens=9,
        stop_ids={5},
        acceptance=Acceptance(0),
        output_ids=[3, 5],
        finish_reason=reason,
    )


@pytest.mark.parametrize(("reason", "is_right"), [("stop", True), ("length", False)])
def test_an_end_token_ends_for_what_it_is(reason: Any, is_right: bool) -> None:
    """Bug: an answer that ended at an end token, but for its budget, is taken for right."""
    request = ended(reason)
    assert (page_of([1, 2, 3, 5]).check(request, None) is None) == is_right


@pytest.mark.parametrize(("limit", "is_right"), [(4, True), (5, False)])
def test_an_answer_ends_where_its_budget_does(limit: int, is_right: bool) -> None:
    """Bug: an answer is a token shorter than what was asked for, and passes as told in full."""
    request = replace(ended("length"), max_total_tokens=limit, stop_ids=set())
    page = page_of([1, 2, 3, 5])
    run: Any = SimpleNamespace(counts=Counter(), accepted=Counter(), matchers={}, texts=[])
    run.page, run.must_match = page, True
    if is_right:
        soak_tool.Soak._check(run, request)
        assert run.texts == [[1, 2, 3, 5]] and run.counts["ended_by_length"] == 1
        return
    with pytest.raises(soak_tool.Leak, match="ended 1 tokens before its budget"):
        soak_tool.Soak._check(run, request)


def test_what_is_counted_of_a_request() -> None:
    """Bug: of tokens or steps others are counted, a request that was cold counts as a hit, or the
    mean acceptance length lacks the bonus."""
    drafted = Acceptance(7, [2, 0, 1, 0, 0, 0, 0, 0])
    request = replace(ended("stop"), num_cached_tokens=1, num_plain_steps=4, acceptance=drafted)
    request.prompt_ids.insert(0, 7)
    run: Any = SimpleNamespace(counts=Counter(), matchers={}, texts=[], must_match=True)
    run.page, run.accepted = page_of([7, 1, 2, 3, 5]), Counter()
    soak_tool.Soak._check(run, request)
    nothing = Acceptance(7, [0] * 8)
    cold = replace(request, num_cached_tokens=0, num_plain_steps=0, acceptance=nothing)
    soak_tool.Soak._check(run, cold)
    counts = {"tokens": 4, "prompt_tokens": 6, "cached_tokens": 1, "hits": 1, "plain_steps": 4}
    counts |= {"ended_by_stop": 2, "handed_over": 1}
    assert +run.counts == counts
    idle: Any = Idle()
    idle.accepted = run.accepted
    numbers = soak_tool._run(idle, 100, lambda line: None, is_hybrid=False)
    assert numbers["mean_acceptance_length"] == 5 / 3
    assert numbers["num_blocks_by_accepted"] == drafted.steps_by_accepted


@pytest.mark.parametrize(("asked", "count"), [(1, 2), (None, 0), (1, 1), (None, 2)])
def test_every_token_has_its_log_probabilities(asked: int | None, count: int) -> None:
    """Bug: the last token of an answer has none, or one has some that nobody asked for."""
    told: Any = [{3: 0.0, 4: -9.0}, {5: 0.0, 4: -9.0}]
    request = replace(ended("stop"), logprobs=asked, output_logprobs=told[:count])
    wrong = None if count == 2 * (asked is not None) else f"{count} log-probabilities of 2 tokens"
    assert page_of([1, 2, 3, 5]).check(request, None) == wrong


@pytest.mark.parametrize("told", [[{2: 0.0, 4: -9.0}], [{2: -3.0, 4: -9.0}], []])
def test_a_prompt_has_its_log_probabilities(told: Any) -> None:
    """Bug: those of a prompt are another token's, or there are none, and nobody looks at them."""
    request = replace(ended("stop"), prompt_logprobs=1, prompt_scores=told)
    wrong = page_of([1, 2, 3, 5]).check(request, None)
    if not told:
        assert wrong == "0 log-probabilities of a prompt of 2 tokens"
    elif told[0][2] == 0:
        assert wrong is None
    else:
        assert str(wrong).startswith("token 1 is 2; its log-probabilities")


def test_the_end_of_a_run_is_in_its_last_quarter() -> None:
    """Bug: a state that is wrong at the very last step is not in what is stored of the run."""
    for steps in (100, 103):
        errors = [(0, 1.0), (60, 2.0), (61, 1.0), (steps, 4.0)]
        run: Any = SimpleNamespace(counts={"steps": steps}, state_errors=errors)
        assert soak_tool.Soak.state_errors_by_quarter(run) == [1.0, 0.0, 2.0, 4.0]


def test_each_part_of_a_state_is_compared() -> None:
    """Bug: the convolution's window is right, so the recurrence's state is not looked at."""
    states = States(torch.ones(2, 3, 4), torch.ones(2, 3, 4))
    pair = SimpleNamespace(target=SimpleNamespace(states=states))
    loop: Any = SimpleNamespace(prefill=SimpleNamespace(pair=pair))
    page = page_of([1])
    true = States(*(x[:, 1].clone() for x in states))
    page.state = lambda: true
    assert page.state_error(loop, 1, [1]) == 0
    for part in states:
        part[1, 1, 2] = 3
        assert page.state_error(loop, 1, [1]) == 1
        part[1, 1, 2] = math.nan
        assert math.isnan(page.state_error(loop, 1, [1]))
        part[1, 1, 2] = 1


def test_what_is_no_number_is_a_defect() -> None:
    """Bug: NaN, which no bound is below, passes as a log-probability, a state and K/V."""
    told = [{3: 0.0, 4: -9.0}, {5: 0.0, 4: math.nan}]
    request = replace(ended("stop"), logprobs=1, output_logprobs=told)
    page = page_of([1, 2, 3, 5])
    assert str(page.check(request, None)).startswith("token 3 is 5; its log-probabilities")

    run: Any = SimpleNamespace(counts={"steps": 1}, state_errors=[], must_match=True)
    with pytest.raises(soak_tool.Leak, match="a recurrent state is wrong by nan"):
        soak_tool.Soak._note(run, math.nan)

    def loop_with(value: float) -> Any:
        target = SimpleNamespace(kv_pool=torch.full((1, 2, 3, 2), value))
        pair = SimpleNamespace(target=target, proposer=SimpleNamespace(attends=False))
        config, prefill = SimpleNamespace(page_size=2), SimpleNamespace(pair=pair)
        return SimpleNamespace(prefill=prefill, config=config, state_slots=None)

    page.loop, page.pages = loop_with(1.0), [1]
    for value, is_right in ((1.0, True), (math.nan, False)):
        published: Any = soak_checks.Published(loop_with(value))
        published.text_of = lambda place: [1, 2]
        if is_right:
            assert published.compare((2, 2), page) == 0
            continue
        with pytest.raises(soak_tool.Leak, match="another text's"):
            published.compare((2, 2), page)


def test_a_state_that_outlives_its_page_is_a_leak() -> None:
    """Bug: what is kept behind a token of a page that is free again, and soon another text's,
    passes; or free pages are told as free states."""
    slots = StateSlots(3)
    cache = PrefixCache(4, 4, slots)
    loop: Any = SimpleNamespace(allocator=cache, state_slots=slots, running=[], prefilling=[])
    (page,), (slot,) = cache.allocate(1), slots.allocate(1)
    cache.publish([1, 2, 3, 4], [page])
    slots.keep((page, 4), slot)
    cache.free([page])
    soak_checks.check_balance(loop)
    slots.keep((cache._free[0], 4), slots.allocate(1)[0])
    with pytest.raises(soak_tool.Leak, match="0 states held, 2 kept, 0 free"):
        soak_checks.check_balance(loop)


def test_a_page_in_use_that_nobody_holds_is_a_leak() -> None:
    """Bug: a page that is free again and still counts as used passes, since none is lost; or free
    pages are told as kept."""
    slots = StateSlots(3)
    cache = PrefixCache(4, 4, slots)
    loop: Any = SimpleNamespace(allocator=cache, state_slots=slots, running=[], prefilling=[])
    soak_checks.check_balance(loop)
    cache._used.add(cache._free[0])
    with pytest.raises(soak_tool.Leak, match="the cache uses others: 0 pages held, 0 kept, 3 free"):
        soak_checks.check_balance(loop)
