"""Answers that follow a grammar, drafted: every token is what plain decoding under masks says."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import llguidance.torch
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from graphengine import TINY_DRAFT, TINY_TARGET, Engine
from graphengine.config.constraint import Constraint
from graphengine.decode import ends, masks, reference
from graphengine.decode.buffers import Arena, GrammarBuffers
from graphengine.decode.grammar import REMEDY, Grammar, Grammars, Matcher
from graphengine.decode.masks import NOTHING, begin_, take_grammar
from graphengine.decode.request import Request
from graphengine.decode.sampling import Controls, Sampling, sample_rows
from tests.support.dflash_reference import force_drafts, load_target, run_target
from tests.support.examples import examples

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "n": {"type": "integer", "minimum": 0, "maximum": 999},
            "kind": {"enum": ["bee", "duck"]},
        },
        "required": ["name", "n", "kind"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_pattern": " ?"},
    }
)
CONSTRAINTS = (
    None,
    Constraint("json_schema", SCHEMA),
    Constraint("regex", "[0-9]{3}-[a-f]{2,9}"),
    Constraint("choice", json.dumps(["yes", "no", "perhaps not"])),
    Constraint("grammar", 'start: "a" /[xyz]{1,6}/ ("b" | "c")'),
)
PROMPTS = ("Count from 20 to 146 in steps of 6.", "Compare the bee and the duck.", "17 + 4 =")
Asked = tuple[list[int], Constraint | None, Sampling, int]
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["torch", "triton"])  # planned, and all in one chain
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    options: Any = {"attention_backend": request.param, "acceptance_floor": 0.0}
    with Engine.from_pretrained(
        TINY_TARGET, draft=TINY_DRAFT, max_model_len=256, **options
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def plain() -> Iterator[Engine]:
    with Engine.from_pretrained(TINY_TARGET, draft="none", max_model_len=256) as engine:
        yield engine


@pytest.fixture(scope="module")
def prompts(plain: Engine) -> list[list[int]]:
    assert plain.tokenizer is not None
    return [plain.tokenizer.encode_chat([{"role": "user", "content": p}]) for p in PROMPTS]


def grammars_of(engine: Engine) -> Grammars:
    assert engine.built.grammars is not None
    return engine.built.grammars


def submit(engine: Engine, asked: Asked) -> Request:
    ids, constraint, sampling, count = asked
    matcher = grammars_of(engine).matcher(constraint) if constraint is not None else None
    built = engine.built
    return built.loop.submit(list(ids), count, built.stop_ids, sampling, matcher=matcher)


def run(engine: Engine, asked: Sequence[Asked]) -> list[Request]:
    requests = [submit(engine, one) for one in asked]
    for _ in engine.built.loop.run():
        pass
    return requests


def is_valid(constraint: Constraint, engine: Engine, request: Request) -> bool:
    """By a fresh matcher that is led along the whole answer."""
    inner: Any = grammars_of(engine).matcher(constraint).inner
    ids, is_over = request.output_ids, request.finish_reason == "stop"
    said = ids[:-1] if is_over else ids
    return inner.try_consume_tokens(said) == len(said) and (inner.is_accepting() or not is_over)


class Rules:
    """Masks as llguidance's own users take them, a fresh matcher for every row."""

    def __init__(self, engine: Engine, constraint: Constraint) -> None:
        self.grammars, self.constraint = grammars_of(engine), constraint

    def mask(self, said: list[int], vocab_size: int) -> Tensor:
        inner: Any = self.grammars.matcher(self.constraint).inner
        assert inner.consume_tokens(said)
        mask = llguidance.torch.allocate_token_bitmask(1, vocab_size)
        llguidance.torch.fill_next_token_bitmask(inner, mask)
        bits = (mask[0, :, None] >> torch.arange(32, dtype=torch.int32)) & 1
        return bits.flatten()[:vocab_size] != 0


@pytest.fixture(scope="module")
def page(plain: Engine) -> Callable[[tuple[int, ...], Constraint, Sampling], list[int]]:
    """What the reference step says, kept for every backend."""
    model, stops = load_target(TINY_TARGET), tuple(plain.built.stop_ids)

    @cache
    def said(prompt: tuple[int, ...], constraint: Constraint, asked: Sampling) -> list[int]:
        rules = Rules(plain, constraint)

        def choose(logits_GV: Tensor, positions_G: Tensor, ids: Tensor) -> Tensor:
            rows = []
            for z_V, p in zip(logits_GV, positions_G.tolist(), strict=True):
                free = rules.mask(ids[len(prompt) : p + 1].tolist(), len(z_V))
                rows.append(z_V.masked_fill(~free, -torch.inf))
            controls = Controls.upload([asked] * len(rows), CPU)
            return sample_rows(torch.stack(rows), positions_G, controls)

        found, _ = reference.generate(
            list(prompt),
            lambda ids: run_target(model, ids.tolist()).logits,
            lambda ids: torch.tensor([], dtype=torch.int64),
            30,
            choose,
            stops,
        )
        return found

    return said


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("constraint", CONSTRAINTS[1:], ids=lambda c: c.kind)
def test_equals_the_page(
    engine: Engine, prompts: list[list[int]], page: Any, constraint: Constraint, temperature: float
) -> None:
    """Bug: a row is masked by the state of another, or after the drafts of another step; the first
    token obeys nothing; the end is not forced."""
    asked = Sampling(temperature=temperature, seed=4)
    prompt = prompts[int(temperature)]
    (request,) = run(engine, [(prompt, constraint, asked, 30)])
    assert request.output_ids == page(tuple(prompt), constraint, asked)
    assert is_valid(constraint, engine, request)


SAMPLINGS = st.sampled_from(
    [
        Sampling(),
        Sampling(temperature=1.2, seed=3),
        Sampling(temperature=0.8, top_p=0.9, seed=8),
        Sampling(presence_penalty=1.0, logit_bias={9: 2.0}),
    ]
)


@pytest.mark.slow
@settings(
    max_examples=examples(15),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    mix=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(CONSTRAINTS), SAMPLINGS, st.integers(1, 40)),
        min_size=1,
        max_size=9,
    )
)
def test_any_mix_equals_plain_decoding_alone(
    engine: Engine, plain: Engine, prompts: list[list[int]], mix: Any
) -> None:
    """Bug: a row without a grammar is masked, takes forced tokens of the request that had its row,
    or rows change places between two steps."""
    asked = [(prompts[i], constraint, own, count) for i, constraint, own, count in mix]
    for one, request in zip(asked, run(engine, asked), strict=True):
        (alone,) = run(plain, [one])
        assert request.output_ids == alone.output_ids
        assert request.finish_reason == alone.finish_reason
        if one[1] is not None:
            assert is_valid(one[1], engine, request)


WORDS = Constraint("regex", "([a-z]{3} [0-9]{2}, ){20}")


@pytest.fixture(scope="module")
def words(plain: Engine, prompts: list[list[int]]) -> list[int]:
    """Of the first prompt, past the most drafts of the last step."""
    (truth,) = run(plain, [(prompts[0], WORDS, Sampling(), 70)])
    return truth.output_ids


@pytest.mark.parametrize("lengths", [[0], [1], [7], [15], [15, 0, 3, 1]])
def test_every_acceptance_length(
    words: list[int], prompts: list[list[int]], lengths: list[int]
) -> None:
    """Bug: after a certain number of accepted drafts the matcher is behind or ahead of them."""
    options: Any = {"acceptance_floor": 0.0, "buckets": (1,), "max_model_len": 256}
    count = 50 if max(lengths) > 1 else 20
    with Engine.from_pretrained(TINY_TARGET, draft=TINY_DRAFT, **options) as forced:
        cycle, known = itertools.cycle(lengths), list[int]()

        def accepted(request: Any, step: int) -> int:
            while step >= len(known):
                known.append(next(cycle))
            return known[step]

        force_drafts(forced, {tuple(prompts[0]): words}, accepted)
        (request,) = run(forced, [(prompts[0], WORDS, Sampling(), count)])
    assert request.output_ids == words[:count]


def test_what_is_forced_is_drafted(engine: Engine, prompts: list[list[int]]) -> None:
    """Bug: forced tokens are not put into the block, so a grammar that leaves no choice is said a
    token a step whatever the drafter thinks of it; rows behind token 0, "!", have no mask."""
    text = "zyx! wvu 97!5310 qpo" * 2
    (request,) = run(engine, [(prompts[0], Constraint("regex", text), Sampling(), 60)])
    steps = request.acceptance.num_steps
    assert request.finish_reason == "stop" and is_valid(Constraint("regex", text), engine, request)
    assert steps <= 1 + len(request.output_ids) // 8


def test_what_was_forced_in_another_bucket_is_forgotten() -> None:
    """Bug: a bucket that has forced nothing does not look at memory where another one did, and the
    drafter's tokens give way to those of an earlier step."""

    class Forcing:
        def __init__(self, *ids: int) -> None:
            self.ids = list(ids)

        def forced(self, most: int) -> list[int]:
            return self.ids[:most]

    arena = Arena(CPU, torch.float32)
    large, small = (take_grammar(arena, size, 4, 64) for size in (8, 1))

    def begin(buffers: GrammarBuffers, *ids: int) -> list[int]:
        begin_(buffers, [cast(Request, SimpleNamespace(matcher=Forcing(*ids)))], 1)
        return buffers.forced_BG[0, 1:].tolist()

    assert begin(small) == [NOTHING] * 3
    assert begin(large, 5, 6) == [5, 6, NOTHING]
    assert begin(small) == [NOTHING] * 3
    assert begin(large) == [NOTHING] * 3 and bool((large.forced_BG == NOTHING).all())


@pytest.mark.parametrize("is_late", [False, True])
def test_an_interrupt_while_masks_are_worked_out(
    engine: Engine, prompts: list[list[int]], is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: half a step was launched, and the next request takes its drafts, words or masks for its
    own; or pages stay away."""
    asked, loop = (prompts[0], CONSTRAINTS[1], Sampling(), 20), engine.built.loop
    (truth,), real, calls = run(engine, [asked]), masks.fill_masks, list[None]()

    def interrupted(*args: Any) -> None:
        calls.append(None)
        if len(calls) != 4 or is_late:
            real(*args)
        if len(calls) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(masks, "fill_masks", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(engine, [asked, (prompts[1], CONSTRAINTS[2], Sampling(), 20)])
    loop.reset()
    assert loop.allocator.num_free == loop.allocator.num_usable
    assert run(engine, [asked])[0].output_ids == truth.output_ids


def test_streams_without_a_grammar_go_on_ahead(
    prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: batches without a grammar are masked, or wait as those with one do."""
    calls: list[str] = []
    real = ends.mask_logits_
    monkeypatch.setattr(ends, "mask_logits_", lambda *a: (calls.append("mask"), real(*a)))
    options: Any = {"attention_backend": "triton", "buckets": (2,), "max_model_len": 256}
    with Engine.from_pretrained(TINY_TARGET, draft=TINY_DRAFT, **options) as engine:
        loop, lane = engine.built.loop, engine.built.loop.first
        free = submit(engine, (prompts[0], None, Sampling(), 90))
        bound = submit(engine, (prompts[1], CONSTRAINTS[2], Sampling(), 8))
        ahead: dict[bool, set[int]] = {True: set(), False: set()}
        for _ in loop.run():
            ahead[bound.finish_reason is None].add(len(lane.in_flight))
            assert bool(calls) == any(step.is_constrained for step in lane.in_flight)
            calls.clear()
        assert free.finish_reason is not None and bound.finish_reason is not None
        assert max(ahead[True]) == 1 and max(ahead[False]) == 2


def test_masks_do_not_touch_what_is_told(engine: Engine, plain: Engine) -> None:
    """Bug: log-probabilities are of the masked distribution."""
    asked: Any = {"choice": ["yes", "no"], "logprobs": 3, "max_new_tokens": 4}
    (found,), (truth,) = (e.generate(PROMPTS[0], **asked) for e in (engine, plain))
    assert found.text in ("yes", "no") and found.logprobs is not None
    first = found.logprobs[0]
    assert first[found.token_ids[0]] < max(first.values())  # the model would say something else
    assert truth.logprobs is not None and truth.text == found.text
    for a, b in zip(found.logprobs, truth.logprobs, strict=True):
        assert a.keys() == b.keys() and all(abs(a[t] - b[t]) < 1e-4 for t in a)


def test_leaving_speculation_keeps_the_grammar(
    engine: Engine, plain: Engine, prompts: list[list[int]]
) -> None:
    """Bug: a request that goes on plainly forgets where it stands."""
    asked = (prompts[0], CONSTRAINTS[1], Sampling(), 60)
    (truth,) = run(plain, [asked])
    loop, request = engine.built.loop, submit(engine, asked)
    for _ in loop.run():
        if len(request.output_ids) > 4 and loop.fallback is not None:
            loop.fallback.leave([request], "asked")
    assert request.num_plain_steps > 3 and request.output_ids == truth.output_ids


@pytest.mark.slow
def test_a_hybrid_follows_too() -> None:
    """Bug: a constrained end leaves recurrent states where they were."""
    texts = []
    for draft in (None, "none"):
        with Engine.from_pretrained("tiny-hybrid", draft) as engine:
            found = engine.generate(list(PROMPTS), json_schema=SCHEMA, max_new_tokens=50)
            texts.append([r.text for r in found])
    assert texts[0] == texts[1]
    assert all(json.loads(text)["kind"] in ("bee", "duck") for text in texts[0])


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["flashinfer", "triton"])
def test_graph_modes_constrain_the_same(backend: Any) -> None:
    """Bug: masks of another step are in the graph, or the second half of a step begins early."""
    found: dict[str, Any] = {}
    for graph_mode in ("none", "piecewise", "full"):
        options: Any = {"device": "cuda", "graph_mode": graph_mode, "attention_backend": backend}
        with Engine.from_pretrained(
            TINY_TARGET,
            draft=TINY_DRAFT,
            buckets=(1, 8),
            max_model_len=256,
            structured_outputs=True,
            fallback=False,
            **options,
        ) as engine:
            tokenizer = engine.tokenizer
            assert tokenizer is not None
            prompts = [tokenizer.encode_chat([{"role": "user", "content": p}]) for p in PROMPTS]
            told = []
            for asked in (
                [(prompts[0], CONSTRAINTS[1], Sampling(), 60)],
                [(prompts[i % 3], CONSTRAINTS[i % 5], Sampling(), 60) for i in range(8)],
            ):
                requests = run(engine, asked)
                for (_, constraint, _, _), request in zip(asked, requests, strict=True):
                    assert constraint is None or is_valid(constraint, engine, request)
                told += [request.output_ids for request in requests]
            found[graph_mode] = told
    assert found["piecewise"] == found["none"] and found["full"] == found["none"]


def test_a_vocabulary_that_fills_no_whole_words() -> None:
    """Bug: masks have no bits for the last tokens, which may be those that end an answer."""
    buffers = take_grammar(Arena(CPU, torch.float32), 2, 3, 65)
    assert buffers.mask_TW.shape == buffers.host_mask_TW.shape == (6, 3)


def test_masks_that_took_too_long_twice_are_told() -> None:
    """Bug: it is the step before whose time is told; or one slow step ends an answer."""
    grammar = SimpleNamespace(spread=lambda: None)
    matcher: Any = SimpleNamespace(took_s=0.0, broken=None, grammar=grammar)
    for took_s, told in ((0.5, None), (0.1, None), (0.3, None), (0.4, "masks took 0.40 s a step")):
        Matcher.judge(matcher, [], took_s)
        assert matcher.broken == (told and f"{told}, and 0.25 are allowed; {REMEDY}")


def test_no_thread_for_other_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: where the machine gives no thread, one slow grammar ends the requests of everybody."""
    none = RuntimeError("can't start new thread")
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=none))
    Grammar(None, lambda: None).spread()
