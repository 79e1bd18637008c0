"""How generations end on random pairs: stop, budget, context, refusal, cancel, error, close."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from graphengine.api import Engine
from tests.decode import test_engine
from tests.decode.test_engine import (
    BLOCK,
    PROMPTS,
    Pair,
    assert_idle,
    force,
    ids_only,
    loop_of,
    run_to_end,
)
from tests.support.chains import insert_

pair, engine = test_engine.pair, test_engine.engine


def test_stop_token_at_every_place(
    engine: Engine, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a stop token inside an accepted run is overlooked, or tokens behind it come out."""
    force(engine, pair, BLOCK - 1)
    prompt = PROMPTS[1]
    plain = pair.plain(prompt)
    built: Any = engine._built
    for place in range(2 * BLOCK + 2):
        stop = plain[place]
        monkeypatch.setattr(engine, "_built", replace(built, stop_ids=frozenset({stop, 511})))
        (result,) = engine.generate(prompt, max_new_tokens=30)
        assert result.token_ids == plain[: plain.index(stop) + 1]
        assert result.finish_reason == "stop"
    assert len(set(plain[: 2 * BLOCK + 2])) > BLOCK, "too few distinct places were tried"


@pytest.mark.parametrize("accepted", [0, BLOCK - 1])
def test_budget_at_every_place(engine: Engine, pair: Pair, accepted: int) -> None:
    """Bug: max_new_tokens inside an accepted run lets tokens through, or loses some."""
    force(engine, pair, accepted)
    for budget in range(1, 2 * BLOCK + 3):
        (result,) = engine.generate(PROMPTS[0], max_new_tokens=budget, ignore_eos=True)
        assert result.token_ids == pair.plain(PROMPTS[0], budget)
        assert result.finish_reason == "length"


@pytest.mark.parametrize(
    ("page_size", "backend"), [(1, "torch"), (1, "triton"), (4, "triton"), (16, "torch")]
)
def test_context_limit(pair: Pair, page_size: int, backend: str) -> None:
    """Bug: blocks that reach past the context write into another request's page, read past the
    rope table, or the limit cuts too early."""
    prompts = PROMPTS[:2]
    with pair.engine(
        max_model_len=30, page_size=page_size, buckets=(2,), attention_backend=backend
    ) as engine:
        for accepted in range(BLOCK):
            force(engine, pair, accepted)
            results = engine.generate(prompts, max_new_tokens=1000, ignore_eos=True)
            for prompt, result in zip(prompts, results, strict=True):
                assert result.token_ids == pair.plain(prompt, 30 - len(prompt))
                assert result.finish_reason == "length"
        assert_idle(engine)


def test_longest_context_of_the_model(tmp_path: Path) -> None:
    """Bug: at the models' last positions the rope table or the page table is one block short."""
    pair = Pair(tmp_path, max_positions=40)
    with pair.engine(max_model_len=None, buckets=(1,), attention_backend="triton") as engine:
        assert engine.config.max_model_len == 40 - BLOCK
        force(engine, pair, BLOCK - 1)
        (result,) = engine.generate(PROMPTS[2], max_new_tokens=99, ignore_eos=True)
        assert result.token_ids == pair.plain(PROMPTS[2], 35)
    with pytest.raises(ValueError, match=r"--max-model-len 37: between 2 and 36"):
        pair.engine(max_model_len=37)


def test_ignore_eos(engine: Engine, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: ignore_eos is not passed on, or stop tokens are ignored always."""
    plain = pair.plain(PROMPTS[0], 20)
    built: Any = engine._built
    monkeypatch.setattr(engine, "_built", replace(built, stop_ids=frozenset({plain[4]})))
    cut = engine.generate(PROMPTS[0], max_new_tokens=20)[0]
    assert cut.token_ids == plain[: plain.index(plain[4]) + 1]
    assert ids_only(engine, [PROMPTS[0]], max_new_tokens=20) == [plain]


def test_rows_end_at_different_times(engine: Engine, pair: Pair) -> None:
    """Bug: when a row ends, the others continue with its pages, position or anchor (stale rows)."""
    loop = loop_of(engine)
    rng = random.Random(1)
    force(engine, pair, lambda request, step: rng.randrange(BLOCK))
    budgets = [3, 40, 1, 17, 29]
    requests = [loop.submit(list(p), n, frozenset()) for p, n in zip(PROMPTS, budgets, strict=True)]
    run_to_end(engine)
    for request, prompt, budget in zip(requests, PROMPTS, budgets, strict=True):
        assert request.output_ids == pair.plain(prompt, budget)


def test_refusals_leave_nothing_behind(engine: Engine, pair: Pair) -> None:
    """Bug: a prompt that cannot run fails in the middle of a batch, or blocks the queue."""
    cases: list[tuple[list[list[int]], dict[str, Any], str]] = [
        ([PROMPTS[0], []], {}, "prompt 2 of 2: the prompt has no tokens"),
        ([[1] * 96], {}, "has 96 tokens, the context holds 96"),
        ([PROMPTS[0]], {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ([[1, 512]], {}, r"token ids \[512\] lie outside the vocabulary of 512"),
        ([[-1]], {}, "lie outside"),
    ]
    for prompts, options, message in cases:
        with pytest.raises(ValueError, match=message):
            engine.generate(prompts, **options)
        assert_idle(engine)
    assert ids_only(engine, PROMPTS[:2], max_new_tokens=5) == [
        pair.plain(p, 5) for p in PROMPTS[:2]
    ]


def test_longest_prompt_is_taken(engine: Engine) -> None:
    """Bug: the limit is off by one: a prompt that leaves room for one token is refused."""
    (result,) = engine.generate([[3] * 95], max_new_tokens=10, ignore_eos=True)
    assert len(result.token_ids) == 1 and result.finish_reason == "length"


def test_dropped_stream_returns_its_pages(engine: Engine, pair: Pair) -> None:
    """Bug: a stream closed half-way keeps its pages or leaves the engine busy."""
    for chunks in (0, 1, 2, 5):
        stream: Any = engine.stream(PROMPTS[1], max_new_tokens=40, ignore_eos=True)
        for _ in range(chunks):
            next(stream)
        stream.close()
        if chunks:
            assert_idle(engine)
    assert ids_only(engine, PROMPTS, max_new_tokens=9) == [pair.plain(p, 9) for p in PROMPTS]


def test_cancel_in_every_state(engine: Engine, pair: Pair) -> None:
    """Bug: cancelling a waiting, running, in-flight or ended request leaks, or ends another."""
    loop = loop_of(engine)
    requests = [loop.submit(list(p), 20, frozenset()) for p in PROMPTS]
    waiting, running, flying, ended, kept = requests[4], *requests[:4]
    with torch.no_grad():
        loop.admit()
        assert waiting in loop.waiting
        loop.cancel(waiting)
        loop.cancel(running)
        loop.launch()
        loop.cancel(flying)
        loop.collect()
    run_to_end(engine)
    loop.cancel(ended)
    assert [r.finish_reason for r in requests] == [*["abort"] * 2, *["length"] * 2, "abort"]
    for request, prompt in ((ended, PROMPTS[2]), (kept, PROMPTS[3])):
        assert request.output_ids == pair.plain(prompt, 20)
    assert_idle(engine)


@pytest.mark.parametrize(
    "where", ["prefill", "draft.00", "draft.L1.attn", "verify.02", "accept", "draft.context"]
)
def test_exception_in_a_step(
    engine: Engine, pair: Pair, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: after an error in the middle of a step pages leak, or the next generation continues with
    half a step."""
    loop = loop_of(engine)
    calls: list[int] = []

    def explode(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    if where == "prefill":
        monkeypatch.setattr(type(loop.prefill), "queue", explode)
        calls += [1, 1]
    else:
        for bucket in loop.first.buckets.values():
            insert_(bucket, where, explode, behind=True)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, max_new_tokens=9, ignore_eos=True)
    monkeypatch.undo()
    assert_idle(engine)
    assert ids_only(engine, PROMPTS, max_new_tokens=9) == [pair.plain(p, 9) for p in PROMPTS]


def test_close_twice(pair: Pair) -> None:
    """Bug: closing again, or using a closed engine, fails with an attribute error."""
    engine = pair.engine()
    stream = engine.stream(PROMPTS[0])
    next(stream)
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.generate(PROMPTS[0])
    with pytest.raises(RuntimeError, match="closed"):
        _ = engine.config
