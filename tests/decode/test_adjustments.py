"""Penalties, biases, bad words and min_tokens under speculation: the tokens of plain decoding and
of the step on one page, the exact distribution, for every mix of requests.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphengine.api import Engine
from graphengine.decode import ends, reference
from graphengine.decode.adjustments import check_words, make_tables
from graphengine.decode.metrics import Acceptance
from graphengine.decode.sampling import GREEDY, Sampling
from graphengine.kernels.adjust_logits import (
    MAX_WORD_TOKENS,
    MAX_WORDS,
    STOP,
    advance_tables_,
)
from tests.decode.test_request import a_request
from tests.support.checkpoints import make_drafter, make_target
from tests.support.dflash_reference import force_drafts, load_target, run_target
from tests.support.examples import examples
from tests.support.sampling import PROMPTS, Pair, assert_drawn, reference_warp

CPU = torch.device("cpu")
EVERYTHING = Sampling(
    temperature=1.1,
    top_p=0.95,
    min_p=0.02,
    seed=5,
    repetition_penalty=1.4,
    presence_penalty=0.6,
    frequency_penalty=0.5,
    logit_bias={3: 2.0, 7: -100.0, 9: 1.5},
    bad_words=((11,), (3, 9)),
    min_tokens=6,
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def engine(pair: Pair) -> Engine:
    return pair.engine()


@pytest.fixture(scope="module")
def plain(pair: Pair) -> Engine:
    return pair.engine(draft=False)


@pytest.fixture(scope="module")
def model(pair: Pair) -> Any:
    return load_target(pair.target)


Asked = tuple[list[int], Sampling, int, tuple[int, ...]]


def run(engine: Engine, asked: Sequence[Asked]) -> list[Any]:
    """Requests of one batch: (prompt, sampling, tokens, stop ids)."""
    loop = engine.built.loop
    requests = [loop.submit(list(ids), count, stops, own) for ids, own, count, stops in asked]
    for _ in loop.run():
        pass
    return requests


@pytest.mark.parametrize("seed", [5, None])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_equals_the_page(pair: Pair, model: Any, backend: Any, seed: int | None) -> None:
    """Bug: a row does not count the drafts in front of it, counts stay behind or run ahead of what
    is accepted, or the first token obeys nothing; greedy (no seed) and drawn."""
    asked = EVERYTHING
    if seed is None:
        asked = Sampling(**{n: getattr(asked, n) for n in _ADJUSTING})
    stops = (2, 4, 6)
    with pair.engine(attention_backend=backend) as engine:
        for prompt in PROMPTS[:3]:
            (truth,) = run(engine, [(prompt, asked, 24, stops)])
            page, _ = reference.generate(
                prompt,
                lambda ids: run_target(model, ids.tolist()).logits,
                lambda ids: torch.tensor([0, 0]),
                24,
                reference.chooser(prompt, asked, stops),
                stops,
            )
            assert truth.output_ids == page
            free = Sampling(temperature=asked.temperature, seed=asked.seed)
            assert run(engine, [(prompt, free, 24, stops)])[0].output_ids != page


_ADJUSTING = (
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"),
    *("bad_words", "min_tokens"),
)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_acceptance_length(pair: Pair, plain: Engine, temperature: float) -> None:
    """Bug: after a certain number of accepted drafts counts or recent tokens are off by some."""
    asked = Sampling(
        **{n: getattr(EVERYTHING, n) for n in _ADJUSTING}, temperature=temperature, seed=5
    )
    prompt = PROMPTS[0]
    words: tuple[tuple[int, ...], ...] = ()
    for place in range(2, 24):  # what would be said next is what may not be
        said = run(plain, [(prompt, replace(asked, bad_words=words), place + 1, ())])[0].output_ids
        words += (tuple(said[place - 1 - place % 2 :]),)
    asked = replace(asked, bad_words=words)
    truth = run(plain, [(prompt, asked, 60, ())])[0].output_ids
    for lengths in ([0], [1], [2], [3], [3, 0, 2, 1]):
        with pair.engine() as forced:
            cycle = itertools.cycle(lengths)
            known: dict[int, int] = {}

            def accepted(request: Any, step: int, known: Any = known, cycle: Any = cycle) -> int:
                while step not in known:
                    known[len(known)] = next(cycle)
                return known[step]

            force_drafts(forced, {tuple(prompt): truth}, accepted)
            (request,) = run(forced, [(prompt, asked, 30, ())])
            assert request.output_ids == truth[:30]
            histogram = request.acceptance.steps_by_accepted
            assert all(histogram[a] for a in set(lengths))


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    seed=st.integers(0, 99),
    repetition_penalty=st.sampled_from([1.0, 0.8, 1.5]),
    presence_penalty=st.sampled_from([0.0, -0.5, 1.0]),
    frequency_penalty=st.sampled_from([0.0, -0.2, 0.8]),
    logit_bias=st.sampled_from([None, {4: 3.0, 8: -100.0}]),
    allowed_token_ids=st.sampled_from([None, tuple(range(2, 200, 3))]),
    bad_words=st.sampled_from([(), ((5,),), ((1, 2), (2, 1), (4, 4, 4))]),
    min_tokens=st.sampled_from([0, 3, 9]),
)


@settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    mix=st.lists(
        st.tuples(st.sampled_from(PROMPTS), SAMPLINGS, st.integers(1, 14)), min_size=1, max_size=7
    )
)
def test_any_mix_equals_plain_decoding_alone(engine: Engine, plain: Engine, mix: Any) -> None:
    """Bug: a request's tables are another's, or what an older request of the row has left; a
    request that asks for nothing is changed by its neighbours; a row that moves to another bucket
    loses its counts."""
    stops = (1, 3, 8)
    asked: list[Asked] = [(prompt, sampling, count, stops) for prompt, sampling, count in mix]
    together = run(engine, asked)
    for request, one in zip(together, asked, strict=True):
        (alone,) = run(plain, [one])
        assert request.output_ids == alone.output_ids
        assert request.finish_reason == alone.finish_reason
        count = one[1].min_tokens
        assert not set(request.output_ids[:count]) & set(stops)


def test_who_asks_for_nothing_in_a_row_of_one_who_did(engine: Engine, plain: Engine) -> None:
    """Bug: a row's tables are written for requests that ask for something alone: beside one of them
    who comes later obeys the penalties of whoever had the row before."""
    counts = 3, 40, 40, 40
    asked: list[Asked] = [(p, EVERYTHING, n, ()) for p, n in zip(PROMPTS, counts, strict=False)]
    asked.append((PROMPTS[0], GREEDY, 12, ()))
    (alone,) = run(plain, asked[-1:])
    assert run(engine, asked)[-1].output_ids == alone.output_ids


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["none", "own", "greedy"])
def test_tokens_follow_the_exact_distribution(pair: Pair, model: Any, draft: str) -> None:
    """Bug: accepted drafts bias what is drawn, or what they add to the counts. Four tokens against
    the enumerated distribution; "greedy" drafts what nobody has adjusted, whatever was drawn."""
    prompt, count, depth = PROMPTS[0], 800, 4
    asked = Sampling(
        temperature=1.2,
        top_k=2,
        min_p=0.05,
        repetition_penalty=1.3,
        presence_penalty=0.8,
        frequency_penalty=0.4,
        logit_bias={prompt[0]: 1.0},
        seed=100,
    )
    exact: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(depth):
        grown: dict[tuple[int, ...], float] = {}
        for prefix, mass in exact.items():
            z_V = run_target(model, [*prompt, *prefix]).logits[-1]
            z_1V = reference.adjusted(z_V, prompt, list(prefix), asked, ())[None]
            scaled = z_1V / asked.temperature
            likely = scaled.softmax(-1) >= asked.min_p * scaled.softmax(-1).amax()
            kept = z_1V.masked_fill(~likely, -torch.inf)
            probs = reference_warp(kept, asked.temperature, 1.0, asked.top_k).softmax(-1)[0]
            for token in probs.nonzero()[:, 0].tolist():
                grown[(*prefix, token)] = mass * float(probs[token])
        exact = grown
    with pair.engine(draft != "none", buckets=(16,)) as engine:
        if draft == "greedy":
            said = run(engine, [(prompt, Sampling(), 40, ())])[0].output_ids
            force_drafts(engine, {tuple(prompt): said}, lambda request, step: 3)
        requests = run(engine, [(prompt, asked.numbered(i), depth, ()) for i in range(count)])
    assert_drawn([tuple(request.output_ids) for request in requests], exact)
    if draft == "greedy":  # often enough right, and wrong
        steps = Acceptance.merge(request.acceptance for request in requests).steps_by_accepted
        assert min(steps[:2]) > 50


def test_batches_that_ask_for_nothing_run_nothing_extra(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: greedy and sampled decoding pay for adjustments; also after a batch that had some."""
    calls: list[str] = []

    def spied(name: str, real: Callable[..., Any]) -> None:
        def call(*args: Any) -> Any:
            calls.append(name)
            return real(*args)

        monkeypatch.setattr(ends, name, call)

    for name in ("adjust_logits", "advance_tables_", "score_rows"):
        spied(name, getattr(ends, name))
    hot = Sampling(temperature=1.0, seed=3)
    before = [run(engine, [(PROMPTS[1], s, 12, ())])[0].output_ids for s in (Sampling(), hot)]
    assert not calls
    run(engine, [(PROMPTS[1], EVERYTHING, 12, ())])
    assert set(calls) == {"adjust_logits", "advance_tables_"}
    calls.clear()
    after = [run(engine, [(PROMPTS[1], s, 12, ())])[0].output_ids for s in (Sampling(), hot)]
    assert after == before and not calls


def test_what_is_written_is_what_steps_leave() -> None:
    """Bug: a row that is written anew, in another bucket or lane, forgets tokens or counts one more
    than the steps have."""
    ids = torch.randint(0, 7, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    request = replace(a_request(), sampling=EVERYTHING, stop_ids={2, 99}, output_ids=ids[:1])
    tables, at = make_tables([request], 12, CPU), 1
    for accepted in (0, 3, 1, 2, 3, 3, 0, 0, 3, 2, 1, 3, 3):
        block = torch.tensor([[request.anchor, *ids[at : at + accepted], *[11] * (3 - accepted)]])
        target = torch.tensor([[*ids[at : at + accepted + 1], *[10] * (3 - accepted)]])
        advance_tables_(block, target, torch.tensor([9], dtype=torch.int32), tables)
        at += accepted + 1
        request.output_ids = ids[:at]
        for name, kept, written in zip(
            tables._fields, tables, make_tables([request], 12, CPU), strict=True
        ):
            assert torch.equal(kept, written), name
    assert at > 2 * tables.recent_BL.shape[1]


def test_leaving_speculation_keeps_the_counts(pair: Pair, plain: Engine) -> None:
    """Bug: a request that goes on plainly begins to count anew."""
    asked = [(PROMPTS[0], EVERYTHING, 40, ())]
    truth = run(plain, asked)[0].output_ids
    with pair.engine() as engine:
        loop = engine.built.loop
        (request,) = [loop.submit(list(PROMPTS[0]), 40, (), EVERYTHING)]
        for _ in loop.run():
            if len(request.output_ids) > 8 and loop.fallback is not None:
                loop.fallback.leave([request], "asked")
        assert request.num_plain_steps > 5 and request.output_ids == truth


def test_as_many_words_as_there_is_room_for() -> None:
    """Bug: the last word that fits is refused, or the first that does not is written past the end
    of the table."""
    longest = tuple(range(MAX_WORD_TOKENS))
    single = [(token,) for token in range(3 * MAX_WORDS)]
    check_words([longest] * MAX_WORDS + single)
    request = a_request()
    request.sampling = replace(EVERYTHING, bad_words=(longest,) * MAX_WORDS)
    assert (make_tables([request], 64, CPU).words_BKL[0] == torch.arange(MAX_WORD_TOKENS)).all()
    for words in ([longest] * (MAX_WORDS + 1), [(*longest, 1), *single]):
        num_long, most = len([word for word in words if len(word) > 1]), len(words[0])
        told = f"bad_words are {num_long} sequences .* of {most} tokens; there is room for "
        with pytest.raises(ValueError, match=f"{told}{MAX_WORDS} of {MAX_WORD_TOKENS} tokens"):
            check_words(words)


def test_bad_words_of_one_token_need_no_room() -> None:
    """Bug: they fill the table of longer ones, and more than it holds are written past its end."""
    short, long = [(token,) for token in range(MAX_WORDS + 1)], (5, 6)
    request = a_request()
    request.sampling = replace(GREEDY, bad_words=(*short, long))
    tables = make_tables([request], 2 * MAX_WORDS, CPU)
    assert (tables.bias_BV[0] == -torch.inf).sum() == len(short)
    assert tables.words_BKL[0, 0, -2:].tolist() == [*long]


def test_a_stop_token_may_be_the_first_of_the_vocabulary() -> None:
    """Bug: token 0, with which some models end their answers, is said before min_tokens; or a stop
    token past the vocabulary, which a model's own files may name, is an error."""
    request = replace(a_request(), sampling=EVERYTHING, stop_ids={-1, 0, 12})
    assert (make_tables([request], 12, CPU).seen_BV[0] & STOP).nonzero().tolist() == [[0]]


def test_a_bad_word_that_has_a_bias_too(plain: Engine) -> None:
    """Bug: a bias takes the place of what bans its token, so a bad word of one token is said."""
    (free,) = run(plain, [(PROMPTS[0], GREEDY, 1, ())])
    (likely,) = free.output_ids
    both = Sampling(logit_bias={likely: 9.0}, bad_words=((likely,),))
    (told,) = run(plain, [(PROMPTS[0], both, 12, ())])
    assert len(told.output_ids) == 12 and likely not in told.output_ids


def test_min_tokens_past_any_integer_of_the_device(plain: Engine) -> None:
    """Bug: it overflows where the request's tables are written, and ends whoever runs beside it."""
    sampling = Sampling(min_tokens=2**63)
    first, second = run(plain, [(PROMPTS[0], sampling, 2**64, ()), (PROMPTS[1], GREEDY, 9, ())])
    assert first.finish_reason == second.finish_reason == "length"
    assert len(second.output_ids) == 9


def test_engines_without_adjustments(pair: Pair) -> None:
    """Bug: a penalty is silently ignored where no chain was built for it."""
    with (
        pair.engine(simulate_acceptance=2.0) as engine,
        pytest.raises(ValueError, match="adjustments=True"),
    ):
        engine.generate(PROMPTS[0], presence_penalty=1.0)
    with pytest.raises(ValueError, match="adjustments needs real acceptance"):
        pair.engine(simulate_acceptance=2.0, adjustments=True)


def test_tables_are_planned(pair: Pair) -> None:
    """Bug: the memory plan forgets the tables."""
    with pair.engine() as engine:
        plan, arena = engine.memory_plan, engine.built.loop.first.builder.arena
        assert plan.step_buffer_bytes == arena.num_bytes
        assert plan.step_buffer_bytes > 4 * engine.built.target.vocab_size * 8


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["flashinfer", "triton"])
def test_graph_modes_adjust_and_score_the_same(tmp_path: Path, backend: Any) -> None:
    """Bug: a table or a score is baked into a graph, or something there cannot be captured."""
    small: Any = {"head_dim": 64, "dtype": "bfloat16"}
    target = make_target(tmp_path / "target", tie=False, likely_tokens=6, **small)
    drafter = make_drafter(tmp_path / "drafter", target, dtype="bfloat16")
    found: dict[str, Any] = {}
    for graph_mode in ("none", "piecewise", "full"):
        options: Any = {"device": "cuda", "graph_mode": graph_mode, "attention_backend": backend}
        options |= {"sampling": True, "adjustments": True, "max_logprobs": 4}
        options["fallback"] = False  # whether it comes depends on measured times
        with Engine.from_pretrained(
            target, drafter, buckets=(1, 4), max_model_len=200, **options
        ) as engine:
            loop, told = engine.built.loop, []
            for logprobs in (None, 4):
                for prompts in (PROMPTS[:1], PROMPTS):
                    samplings = [EVERYTHING, Sampling(), replace(EVERYTHING, temperature=0.5)]
                    requests = [
                        loop.submit(list(ids), 60, (2,), samplings[i % 3], logprobs=logprobs)
                        for i, ids in enumerate(prompts)
                    ]
                    for _ in loop.run():
                        pass
                    told += [(r.output_ids, r.output_logprobs) for r in requests]
                    assert all(
                        len(r.output_logprobs) == (len(r.output_ids) if logprobs else 0)
                        for r in requests
                    )
            assert [ids for ids, _ in told[:5]] == [ids for ids, _ in told[5:]]
            found[graph_mode] = told
    assert found["piecewise"] == found["none"] and found["full"] == found["none"]
