"""`verify --all-options`: batches that mix all options pass, and faults that only such batches can
have fail them. In float32 on the bundled pairs; faults are put in from outside.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from graphengine import names
from graphengine.api import Engine
from graphengine.checkpoints.hub import TINY_DRAFT, TINY_TARGET
from graphengine.checkpoints.stops import StopStrings
from graphengine.cli.verify import PROBES, PROMPTS
from graphengine.config.constraint import constraint_of
from graphengine.config.options import SamplingParams
from graphengine.decode import ends, logprobs
from graphengine.decode.loop import DecodeLoop
from graphengine.decode.sampling import Controls, sample_rows
from graphengine.kernels.gumbel_argmax import gumbel
from graphengine.verify.check import Limits
from graphengine.verify.option_cases import (
    NUM_CASES,
    RULED_OUT_NATS,
    OptionCase,
    cases_for,
    judge_of,
)
from graphengine.verify.run import CellResult, encode, verify_mode
from graphengine.verify.told import wrong_end, wrong_logprobs
from tests.support.chains import insert_
from tests.support.transcripts import transcript

BUCKET, MAX_NEW_TOKENS = 8, 32
Asked = list[tuple[list[int], OptionCase]]
FEW = 12  # first cases, of every kind that a fault in decoding concerns


def load() -> Engine:
    return Engine.from_pretrained(TINY_TARGET, TINY_DRAFT, buckets=(BUCKET,), max_model_len=256)


def ids_of(engine: Engine) -> list[list[int]]:
    lines = [line for path in (PROMPTS, PROBES) for line in path.read_text().splitlines()]
    return encode(engine.tokenizer, [json.loads(line)["prompt"] for line in lines], False)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with load() as engine:
        yield engine


@pytest.fixture(scope="module")
def asked(engine: Engine) -> Asked:
    ids = ids_of(engine)
    cases = cases_for(engine.built, ids, MAX_NEW_TOKENS, 0, grammars=True)
    return list(zip(ids, cases, strict=True))


def mixed(engine: Engine, asked: Asked) -> CellResult:
    ids, cases = zip(*asked, strict=True)
    options: Any = {"max_new_tokens": MAX_NEW_TOKENS, "limits": Limits(), "cases": cases}
    (found,) = verify_mode(engine.built, "none", ids, [(BUCKET, "together")], **options)
    return found


@pytest.fixture(scope="module")
def healthy(engine: Engine, asked: Asked) -> CellResult:
    return mixed(engine, asked)


@pytest.mark.slow
def test_every_case_changes_what_is_said(engine: Engine, asked: Asked, healthy: CellResult) -> None:
    """Bug: the judge counts, masks or draws in another way than decoding; or a case is one that the
    model fulfils anyway, which proves nothing."""
    plain = mixed(engine, [(ids, OptionCase()) for ids, _ in asked])
    assert healthy.failed == {} and healthy.report.max_regret_nats == 0.0
    pairs = zip(healthy.transcripts, plain.transcripts, strict=True)
    changed = {i % NUM_CASES for i, (a, b) in enumerate(pairs) if a.output_ids != b.output_ids}
    nothing = {i % NUM_CASES for i, (_, case) in enumerate(asked) if case == OptionCase()}
    assert changed == set(range(NUM_CASES)) - nothing


def first_wrong(found: CellResult, asked: Asked) -> OptionCase:
    place = found.report.first_true
    assert place is not None
    return asked[place.request][1]


def late(buffers: Any) -> None:
    """Each draft's row has the mask of the one in front of it."""
    own = buffers.grammar.mask_TW.view(BUCKET, buffers.block, -1)
    own[:, 1:] = own[:, :-1].clone()


def test_mask_of_the_row_in_front(asked: Asked) -> None:
    """Bug: a row is masked by what the grammar leaves to the row in front of it."""
    with load() as engine:
        for bucket in engine.built.loop.first.buckets.values():
            insert_(bucket, names.GRAMMAR, partial(late, bucket.buffers), behind=True)
        found = mixed(engine, [one for one in asked if constraint_of(one[1].asked) is not None])
    # A token that its grammar does not take is never given out: the request ends with an error.
    assert "the grammar cannot be followed" in found.failed["finite"]
    assert found.report.max_regret_nats < RULED_OUT_NATS


@pytest.mark.slow
def test_penalties_count_no_drafts(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: penalties of a row count what is committed, not the drafts in front of the row."""
    real = ends.adjust_logits

    def uncounted(logits_TV: Tensor, ids_BG: Tensor, positions_T: Tensor, tables: Any) -> Tensor:
        (B, G), V = ids_BG.shape, logits_TV.shape[1]
        anchors_B1 = ids_BG[:, :1].contiguous()
        rows = zip(logits_TV.view(B, G, V).unbind(1), positions_T.view(B, G).unbind(1), strict=True)
        each = [real(z.contiguous(), anchors_B1, p.contiguous(), tables) for z, p in rows]
        return torch.stack(each, 1).view(-1, V)

    monkeypatch.setattr(ends, "adjust_logits", uncounted)
    with load() as engine:
        found = mixed(engine, asked[:FEW])
    assert "regret" in found.failed and first_wrong(found, asked).sampling.adjusts


@pytest.mark.slow
def test_shifted_seed(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: draws are of another seed than the request's."""

    def shifted(logits_TV: Tensor, positions_T: Tensor, controls: Any) -> Tensor:
        return sample_rows(logits_TV, positions_T, controls._replace(seed_B=controls.seed_B + 1))

    monkeypatch.setattr(ends, "sample_rows", shifted)
    with load() as engine:
        found = mixed(engine, asked[:FEW])
    assert {"regret", "identical"} <= set(found.failed)
    assert not first_wrong(found, asked).sampling.is_greedy


def other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    real = logprobs.Scores.told

    def told(self: logprobs.Scores, tokens: list[int], count: int) -> list[logprobs.Logprobs]:
        return real(logprobs.Scores(*(x.roll(-1, 0) for x in self)), tokens, count)

    monkeypatch.setattr(logprobs.Scores, "told", told)


def one_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    real = logprobs.Scores.told

    def told(self: logprobs.Scores, tokens: list[int], count: int) -> list[logprobs.Logprobs]:
        return real(self, tokens, max(count - 1, 0))

    monkeypatch.setattr(logprobs.Scores, "told", told)


def adjusted_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of logits that the temperature has changed."""
    real = ends.score_rows

    def halved(logits_TV: Tensor, *rest: Any) -> logprobs.Scores:
        return real(logits_TV / 1.5, *rest)

    monkeypatch.setattr(ends, "score_rows", halved)


def a_token_late(monkeypatch: pytest.MonkeyPatch) -> None:
    real, seen = StopStrings.feed, dict[int, Any]()

    def feed(self: StopStrings, new: str, is_watched: bool = True) -> tuple[str, str | None]:
        if id(self) in seen:
            return "", seen.pop(id(self))
        out, stop = real(self, new, is_watched)
        if stop is not None:
            seen[id(self)] = stop
        return out, None

    monkeypatch.setattr(StopStrings, "feed", feed)


def too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    real = StopStrings.feed
    monkeypatch.setattr(StopStrings, "feed", lambda self, new, is_watched=True: real(self, new))


# Whether a check looks at what is asked for.
OF_CHECK: dict[str, Callable[[SamplingParams], bool]] = {
    "logprobs": lambda asked: asked.num_logprobs is not None,
    "ends": lambda asked: bool(asked.stop or asked.stop_token_ids or asked.ignore_eos),
}


def submitted(monkeypatch: pytest.MonkeyPatch, **other: Any) -> None:
    real = DecodeLoop.submit

    def submit(self: DecodeLoop, *args: Any, **kwargs: Any) -> Any:
        ids, count, stop_ids, sampling = args
        if "min_tokens" in other:
            sampling = replace(sampling, min_tokens=0)
        stop_ids = stop_ids or other.get("stop_ids", ())
        kwargs["asked_stop_ids"] = other.get("asked_stop_ids", kwargs["asked_stop_ids"])
        return real(self, ids, count, stop_ids, sampling, **kwargs)

    monkeypatch.setattr(DecodeLoop, "submit", submit)


@pytest.mark.parametrize(
    ("break_", "check", "line"),
    [
        (other_rows, "logprobs", r"request \d+, logprobs \d: token \d+: "),
        (one_too_few, "logprobs", r"request \d+, logprobs \d: token \d+: .* most likely tokens"),
        (adjusted_ones, "logprobs", r"request \d+, logprobs \d: token \d+: "),
        (a_token_late, "ends", r"request \d+ \(.*stop \('.+: it ends behind \d+ tokens by "),
        (too_early, "ends", r"request \d+ \(.*min_tokens .*stop \('.+: it ends behind "),
        (
            partial(submitted, asked_stop_ids=()),
            "ends",
            r"\(.*stop_token_ids \(\d+,\).* not behind",
        ),
        (
            partial(submitted, stop_ids={2042}),
            "ends",
            r"\(.*ignore_eos True.*\d tokens by stop, where nothing",
        ),
    ],
)
def test_what_is_told(
    engine: Engine,
    asked: Asked,
    break_: Any,
    check: Any,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bug: log-probabilities are another row's, too few, or of other logits; a stop string counts
    a token late or before min_tokens; stop tokens or ignore_eos are not handed on."""
    break_(monkeypatch)
    told = OF_CHECK[check]
    found = mixed(engine, [one for one in asked if told(one[1].asked)][:4])
    assert re.search(line, found.failed[check]), found.failed


@pytest.mark.slow
def test_a_transcript_that_was_tampered_with(engine: Engine, healthy: CellResult) -> None:
    """Bug: prompts' log-probabilities are not looked at, NaN passes, a token has none, alternatives
    stand in any order, or texts and reasons of an end go unread."""
    built, found = engine.built, healthy.transcripts
    (scored,) = (t for t in found if t.asked.prompt_logprobs is not None)
    stopped = next(t for t in found if isinstance(t.stop_reason, str))
    prompt, told = scored.prompt_logprobs or [], scored.logprobs or []

    def logprobs_of(**changed: Any) -> str:
        return str(wrong_logprobs(built.loop, replace(scored, **changed), 1e-3)[1])

    def end_of(**changed: Any) -> str:
        return str(wrong_end(replace(stopped, **changed), built.stop_ids, built.tokenizer))

    off = {token: value + 0.01 for token, value in (prompt[3] or {}).items()}
    nan = dict.fromkeys(told[2], math.nan)
    assert logprobs_of() == end_of() == "None"
    wrong = logprobs_of(prompt_logprobs=[*prompt[:3], off, *prompt[4:]])
    assert wrong.startswith("prompt_logprobs 2: token 3: ")
    assert logprobs_of(logprobs=[*told[:2], nan, *told[3:]]).startswith("logprobs 0: token 2: ")
    own, *others = prompt[3] or {}
    turned = {token: (prompt[3] or {})[token] for token in (own, *reversed(others))}
    assert "out of order" in logprobs_of(prompt_logprobs=[*prompt[:3], turned, *prompt[4:]])
    assert logprobs_of(logprobs=told[1:]) == "logprobs 0: 7 entries, 8 tokens"
    assert logprobs_of(logprobs=None) == "logprobs 0: 0 entries, 8 tokens"
    assert "its text is" in end_of(text="") and "by stop, not" in end_of(stop_reason=None)


@pytest.mark.slow
def test_min_tokens_ignored(engine: Engine, asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: an answer ends before its min_tokens."""
    submitted(monkeypatch, min_tokens=0)
    found = mixed(engine, asked[:FEW])
    assert "regret" in found.failed and first_wrong(found, asked).asked.min_tokens > 0
    assert "min_tokens" in found.failed["ends"]


def test_an_answer_is_judged_by_its_own_options(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: of two cases to one prompt the second is ignored, and passes: what it got is what the
    first one got, and is judged as that."""
    assert engine.tokenizer is not None
    prompt = engine.tokenizer.encode_chat([{"role": "user", "content": "Count from 5 to 10."}])
    cases = [OptionCase(SamplingParams(min_tokens=n)) for n in (1, MAX_NEW_TOKENS)]
    submitted(monkeypatch, min_tokens=0)
    options: Any = {"max_new_tokens": MAX_NEW_TOKENS, "limits": Limits(), "cases": cases}
    (found,) = verify_mode(engine.built, "none", [prompt] * 2, [(BUCKET, "together")], **options)
    one, other = found.transcripts
    assert one.output_ids == other.output_ids and one.finish_reason == "stop"
    assert found.report.first_true is not None and found.report.first_true.request == 1


@pytest.mark.parametrize(
    ("top_p", "z_V", "emitted", "is_out"),
    [
        (0.5, [4.0, 0.0, -1.0], 1, True),
        (0.97, [4.0, 0.5, -9.0], 1, False),  # left out by a hair
        (1.0, [4.0, 0.0, -math.inf], 2, True),
        (1.0, [4.0, math.nan, 0.0], 0, None),
    ],
)
def test_edges_of_filters(
    engine: Engine, top_p: float, z_V: list[float], emitted: int, is_out: bool | None
) -> None:
    """Bug: a token that a filter clearly leaves out passes; one at its edge fails, though rounding
    decides there; NaN passes."""
    case = OptionCase(SamplingParams(temperature=1.0, top_p=top_p, seed=3))
    judge = judge_of(engine.built, case, [5], [emitted], 0.2)
    (regret,), _, _ = judge(torch.tensor([z_V]), [0], torch.tensor([emitted]))
    assert math.isnan(regret) if is_out is None else (regret == RULED_OUT_NATS) == is_out


def test_regret_of_a_draw(engine: Engine) -> None:
    """Bug: how far a token lies from the draw is measured without its noise, or against it, and
    who drew otherwise passes as a tie; or its probability is told as if it were not drawn."""
    case = OptionCase(SamplingParams(temperature=0.7, seed=5))
    controls = Controls.upload([case.sampling], torch.device("cpu"))
    z_TV, at_T = torch.randn(6, 50, generator=torch.Generator().manual_seed(0)), torch.arange(6)
    best_T = sample_rows(z_TV, at_T, controls)
    next_T = sample_rows(z_TV.scatter(1, best_T[:, None], -math.inf), at_T, controls)
    judge = judge_of(engine.built, case, [5], next_T.tolist(), 0.2)
    regrets, found, told = judge(z_TV, at_T.tolist(), next_T)
    score_TV = z_TV / 0.7 + gumbel(torch.full((6,), 5), at_T + 1, 50)
    best_score_T, next_score_T = score_TV.topk(2).values.unbind(1)
    assert found == best_T.tolist()
    torch.testing.assert_close(torch.tensor(regrets), best_score_T - next_score_T)
    logprob_T = (z_TV / 0.7).log_softmax(-1).gather(1, next_T[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(told), logprob_T)


def test_behind_a_token_that_does_not_fit(engine: Engine) -> None:
    """Bug: the judge stops with an error where the engine said what its grammar forbids."""
    case = OptionCase(SamplingParams(choice=("yes", "no")))
    judge = judge_of(engine.built, case, [5], [9, 9, 9], 0.2)
    z_TV = torch.zeros(3, engine.built.target.vocab_size)
    z_TV[:, 9] = 3.0
    found = judge(z_TV, [0, 1, 2], torch.tensor([9, 9, 9]))
    assert found.regret_nats == [RULED_OUT_NATS, 0.0, 0.0]


def test_the_largest_error_of_all_is_told(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: that of the last request stands in the result; or what is wrong is told of another
    request, or the last one's."""
    errors = iter([(0.2, None), (0.1, "logprobs 0: x"), (0.15, "logprobs 0: y")])
    monkeypatch.setattr("graphengine.verify.run.wrong_logprobs", lambda *arguments: next(errors))
    options: Any = {"max_new_tokens": 2, "limits": Limits()}
    options["cases"] = [OptionCase(SamplingParams(logprobs=0))] * 3
    ids = [[5], [6], [7]]
    (found,) = verify_mode(engine.built, "none", ids, [(BUCKET, "together")], **options)
    assert found.max_logprob_error_nats == 0.2
    assert found.failed["logprobs"] == "request 1, logprobs 0: x"


@pytest.mark.parametrize(("min_tokens", "end"), [(0, 2), (1, 2), (2, 4), (3, 4)])
@pytest.mark.parametrize("stop", [9, "9"])
def test_the_last_of_min_tokens_ends_nothing(min_tokens: int, end: int, stop: int | str) -> None:
    """Bug: a token that is still one of the least many, or a stop string that is complete with it,
    is held to end the answer."""
    named: Any = {"stop": (stop,)} if isinstance(stop, str) else {"stop_token_ids": (stop,)}
    asked = SamplingParams(min_tokens=min_tokens, **named)
    of_end: Any = {"budget": 8, "finish_reason": "stop", "stop_reason": stop}
    told = transcript([5, 9, 5, 9][:end], [end], asked=asked, **of_end)
    digits: Any = SimpleNamespace(is_contextual=False, decode=lambda ids, _: "".join(map(str, ids)))
    assert wrong_end(told, (), digits) is None
