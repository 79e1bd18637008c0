"""What `verify` judges, on made-up numbers: verdicts, places, limits, and how they are told."""

from __future__ import annotations

import io
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from graphengine.config.options import SamplingParams
from graphengine.decode.metrics import Acceptance
from graphengine.verify import option_cases
from graphengine.verify.check import (
    MIN_IDENTICAL,
    CheckName,
    Limits,
    Place,
    decide,
    decode,
    disagreement,
    judge,
)
from graphengine.verify.report import _table, describe, finish
from graphengine.verify.run import Cell, CellResult, numbers
from graphengine.verify.teacher import TokenScores
from graphengine.verify.told import _compare, wrong_end, wrong_logprobs
from tests.support.byte_tokens import FallsBackToBytes
from tests.support.transcripts import transcript

STOP = 9


def scores(best: list[int], regret: list[float]) -> TokenScores:
    return TokenScores(regret, best, [-0.5] * len(best))


def test_places_name_step_and_row() -> None:
    """Bug: the report points at another step or row than the one that emitted the token."""
    one = transcript([5, 6, 7, 8, 4], [1, 3, 1])
    other = transcript([5, 6], [1, 1])
    report = judge(
        [one, other],
        [scores([5, 6, 7, 2, 3], [0, 0, 0, 0.7, 0.1]), scores([5, 6], [0, 0])],
        0.2,
        [],
    )
    place = report.first_true
    assert place is not None
    assert (place.request, place.index, place.step, place.row, place.num_committed) == (
        *(0, 3, 1, 2, 3),
    )
    assert (place.emitted_id, place.best_id, place.regret_nats) == (8, 2, 0.7)
    assert [(tie.index, tie.step) for tie in report.ties] == [(4, 2)]
    assert (report.num_tokens, report.num_identical, report.num_true) == (7, 5, 1)
    assert report.max_regret_nats == 0.7
    assert report.mean_regret_nats == pytest.approx(0.8 / 7)


def test_a_tie_passes_and_re_anchors() -> None:
    """Bug: a benign tie fails, or everything behind it counts as different."""
    report = judge([transcript([5, 6, 7], [1, 2])], [scores([5, 2, 7], [0, 0.19, 0])], 0.2, [])
    assert report.first_true is None and len(report.ties) == 1
    assert decide(report, Limits(min_identical=0.6)) == {}
    assert set(decide(report, Limits(min_identical=0.7))) == {"identical"}
    assert set(decide(report, Limits(min_identical=0.0, tolerance_nats=0.1))) == set()


def test_nan_fails() -> None:
    """Bug: NaN passes because `nan > tolerance` is false."""
    report = judge([transcript([5, 6], [1, 1])], [scores([5, 6], [0, math.nan])], 0.2, [])
    assert report.num_nonfinite == 1 and report.first_true is not None
    assert {"finite", "regret"} <= set(decide(report, Limits()))


def test_the_mean_is_of_the_tokens_that_have_a_regret() -> None:
    """Bug: a token whose logits are NaN counts as one without regret, and lowers the mean."""
    told = scores([2, 6, 7], [0.5, math.nan, 0.1])
    report = judge([transcript([5, 6, 7], [1, 2])], [told], 0.2, [])
    assert (report.num_nonfinite, report.max_regret_nats) == (1, 0.5)
    assert report.mean_regret_nats == pytest.approx(0.3)


def test_acceptance_counts_the_first_prompts_only() -> None:
    """Bug: the floor is compared with other prompts than it was measured on."""
    good, bad = transcript([5] * 5, [1, 4]), transcript([5] * 3, [1, 1, 1])
    perfect = [scores([5] * 5, [0.0] * 5), scores([5] * 3, [0.0] * 3)]
    limits = Limits(min_acceptance=3.9)
    assert decide(judge([good, bad], perfect, 0.2, [], num_counted=1), limits) == {}
    assert set(decide(judge([good, bad], perfect, 0.2, []), limits)) == {"acceptance"}


@pytest.mark.parametrize(
    ("output", "reason", "budget", "right"),
    [
        ([1, 2, STOP], "stop", 8, True),
        ([1, 2, STOP], "length", 3, False),
        ([1, STOP, 2], "length", 3, False),
        ([1, 2, 3], "length", 3, True),
        ([1, 2, 3], "length", 4, False),
        ([1, 2, 3], "stop", 3, False),
        ([1, 2, 3], "abort", 3, False),
    ],
)
def test_ends(output: list[int], reason: str, budget: int, right: bool) -> None:
    """Bug: lost tokens, or surplus ones behind a stop token, pass since each one is right."""
    one = transcript(output, [1, len(output) - 1], finish_reason=reason, budget=budget)
    report = judge([one], [scores(output, [0.0] * 3)], 0.2, [STOP])
    assert ("ends" in decide(report, Limits())) != right


def test_a_wrong_end_is_told_with_the_one_that_is_due() -> None:
    """Bug: the end that was found is told as the one that is due, or without what is due to end the
    answer."""
    asked = SamplingParams(stop_token_ids=(6,))
    late = transcript([5, 6, 7], [1, 2], asked=asked)
    told = "it ends behind 3 tokens by length, not behind 2 tokens by stop at 6"
    assert wrong_end(late, [STOP], None) == told
    early = transcript([5], [1], asked=asked, budget=3, finish_reason="stop", stop_reason=6)
    told = "it ends behind 1 tokens by stop at 6, where nothing is due to end it"
    assert wrong_end(early, [STOP], None) == told


def test_disagreement() -> None:
    """Bug: another graph mode's tokens are not compared, or a shorter output passes."""
    a, b = transcript([5, 6, 7], [1, 2]), transcript([5, 2, 7], [1, 2])
    assert disagreement([a], [a]) is None
    assert "token 1" in str(disagreement([a], [b]))
    assert "length" in str(disagreement([a], [transcript([5, 6], [1, 1])]))


def test_each_failure_says_what_was_measured() -> None:
    """Bug: what was measured is told as what was expected, or a request or count as another's."""
    report = judge([transcript([5], [1])], [scores([5], [0.0])], 0.2, [])
    changes: dict[str, Any] = {"num_tokens": 200, "num_identical": 150, "num_nonfinite": 3}
    changes |= {"num_true": 4, "max_regret_nats": 1.5, "acceptance": Acceptance(3, [2, 2, 0, 0])}
    changes |= {"wrong_ends": {7: "(greedy): it ends late", 9: "(greedy): it ends early"}}
    limits = Limits(tolerance_nats=0.25, min_identical=0.95, min_acceptance=3.0)
    assert decide(replace(report, **changes), limits) == {
        "finite": "3 tokens have NaN or Inf under the plain model",
        "regret": "4 of 200 tokens lie more than 0.25 nats below the plain model's choice, the "
        "worst by 1.5",
        "identical": "75.00% of the tokens are the plain model's first choice, 95.00% expected",
        "ends": "2 wrong ends; request 7 (greedy): it ends late",
        "acceptance": "1.50 tokens a step, 3 expected: the output is right, the drafter is fed or "
        "wired wrongly (taps, rope, mask, K/V) or is another target's",
    }
    stopped = replace(report, errors={5: "no logits", 6: "nor here"})
    assert decide(stopped, Limits()) == {"finite": "2 requests were stopped; request 5: no logits"}


def test_what_passes_unless_told_otherwise() -> None:
    """Bug: a default is so wide that faults pass: a token 0.3 nats below the best, one of ten in
    bfloat16, one of a hundred in float32."""
    report = judge([transcript([5], [1])], [scores([2], [0.3])], Limits().tolerance_nats, [])
    assert "regret" in decide(report, Limits(min_identical=0.0))
    for dtype, share in (("bfloat16", 10), ("float32", 100)):
        output = [5] * share
        judged = scores([2, *output[1:]], [0.1, *[0.0] * (share - 1)])
        report = judge([transcript(output, [1] * share)], [judged], 0.2, [])
        limits = Limits(min_identical=MIN_IDENTICAL[dtype])
        assert set(decide(report, limits)) == {"identical"}


def test_the_worst_prompt_is_in_the_table() -> None:
    """Bug: "least" is the best prompt's acceptance, behind which a lost one hides; or 0, that of a
    prompt which ended with its first token and has none."""
    ran = [transcript([5] * 5, [1, 4]), transcript([5] * 3, [1, 1, 1]), transcript([5], [1])]
    report = judge(ran, [scores([5] * n, [0.0] * n) for n in (5, 3, 1)], 0.2, [])
    cell = CellResult(cell=Cell("m", 1, "alone"), report=report, failed={}, transcripts=ran)
    cells = {str(column.header): list(column.cells) for column in _table([cell]).columns}
    assert (cells["accept"], cells["least"]) == (["2.00"], ["1.00"])


def test_every_column_has_its_own_number() -> None:
    """Bug: the mean regret is the largest one, or another column has its neighbour's number; what
    has none shows 0, or a count of 0 as none."""
    ran = [transcript([5, 6, 7, 8, 9], [1, 2, 2]), transcript([5], [1])]
    judged = [scores([5, 6, 2, 3, 4], [0, 0, 0.5, 0.1, 0.1]), scores([5], [0])]
    report = judge(ran, judged, 0.2, [])
    cell = CellResult(cell=Cell("full x", 8, "mixed"), report=report, failed={}, transcripts=ran)
    alone = replace(report, acceptance=Acceptance(0), acceptance_per_prompt=[0.0])
    failed: dict[CheckName, str] = {"regret": "1 of 6", "ends": "1 wrong end"}
    rows = [replace(cell, same_as_plain=1), replace(cell, report=alone, failed=failed)]
    rows.append(replace(cell, same_as_plain=0))
    shown = _table(rows)
    for i, cells in enumerate(
        (
            ["2.00", "2.00", "1/2", "pass"],
            ["-", "-", "-", "[red]FAIL[/] regret ends"],
            ["2.00", "2.00", "0/2", "pass"],
        )
    ):
        assert {str(column.header): list(column.cells)[i] for column in shown.columns} == {
            "mode": "full x",
            "bucket": "8",
            "mix": "mixed",
            "tokens": "6",
            "identical": "50.00%",
            "ties": "2",
            "over": "1",
            "max regret": "0.5",
            "mean": "0.12",
            **dict(zip(("accept", "least", "= plain", "verdict"), cells, strict=True)),
        }


def test_the_numbers_of_a_cell() -> None:
    """Bug: ties and tokens beyond the tolerance stand in each other's place in the JSON; or what
    was not asked for has a number all the same."""
    ran = [transcript([5, 6, 7], [1, 2]), transcript([5], [1])]
    report = judge(ran, [scores([5, 2, 3], [0, 0.5, 0.1]), scores([4], [0.9])], 0.2, [])
    cell = CellResult(cell=Cell("full x", 2, "alone"), report=report, failed={}, transcripts=ran)
    other = replace(cell, cell=Cell("full x", 2, "mixed"), same_as_plain=1)
    found = numbers([cell, replace(other, max_logprob_error_nats=0.3)])["full_x"]
    alone = found["bucket_2_alone"]
    assert alone == {
        "num_tokens": 4,
        "identical_fraction": 0.25,
        "max_regret_nats": 0.9,
        "mean_regret_nats": pytest.approx(1.5 / 4),
        "num_over_tolerance": 2,
        "num_ties": 1,
        "num_nonfinite": 0,
        "mean_acceptance_length": 2.0,
        "mean_acceptance_per_prompt_tokens": [2.0, 0.0],
    }
    same = {"num_same_as_plain": 1, "num_prompts": 2, "max_logprob_error_nats": 0.3}
    assert found["bucket_2_mixed"] == alone | same


def test_a_difference_is_told_where_it_stands() -> None:
    """Bug: a step's last token, the target's own, is called an accepted draft; or what stands in
    front of one of the first tokens is left out."""
    one = transcript(list(range(20)), [1, 3, 4, 4, 4, 4])
    report = judge([one], [scores(list(range(20)), [0.0] * 20)], 0.2, [])
    result = CellResult(cell=Cell("full", 1, "alone"), report=report, failed={}, transcripts=[one])
    for index, step, row, count, role, after in (
        (0, 0, 0, 1, "the prefill's token", []),
        (2, 1, 1, 3, "row 1 of 3 committed, accepted draft", [0, 1]),
        (3, 1, 2, 3, "row 2 of 3 committed, the target's own token", [0, 1, 2]),
        (18, 5, 2, 4, "accepted draft", list(range(6, 18))),
    ):
        text = describe(result, Place(0, index, step, row, count, index, 99, 0.5, -1.0), None)
        assert f"token {index} (" in text and f"{role})" in text, text
        assert f"after {after}, then {list(range(index + 1, 20))[:12]}" in text


@pytest.mark.parametrize(("skips", "text"), [(True, " a b"), (False, " a<s> b")])
def test_the_text_of_an_answer(skips: bool, text: str) -> None:
    """Bug: a right answer's text is called wrong where a tokenizer keeps no space in front of a
    text, or where special tokens are asked for."""
    tokenizer: Any = FallsBackToBytes()
    asked = SamplingParams(max_new_tokens=5, skip_special_tokens=skips)
    ids = [*tokenizer.encode(" a"), tokenizer.encode_special("<s>"), *tokenizer.encode(" b")]
    told = transcript(ids, [5], prompt_ids=tokenizer.encode("a"), asked=asked)
    assert wrong_end(replace(told, text=text), (), tokenizer) is None
    assert "its text is" in (wrong_end(replace(told, text=text.strip()), (), tokenizer) or "")


def test_a_stop_that_is_one_character_of_two_tokens() -> None:
    """Bug: the sign for its first half takes its place, so a right end at it is called wrong."""
    tokenizer: Any = FallsBackToBytes()
    asked = SamplingParams(max_new_tokens=9, stop=("\u00e8",))
    ids = tokenizer.encode("a\u00e8")
    of_end: Any = {"budget": 9, "finish_reason": "stop", "stop_reason": "\u00e8"}
    told = transcript(ids, [3], asked=asked, text="a", **of_end)
    assert len(ids) == 3
    assert wrong_end(told, (), tokenizer) is None


def test_log_probabilities_begin_with_the_token_itself() -> None:
    """Bug: an entry that names another token first, as likely as the one that was said, passes."""
    true_V = torch.tensor([0.4, 0.4, 0.2]).log()
    said, other = {1: float(true_V[1])}, {0: float(true_V[0])}
    assert _compare(true_V, 1, 1, said | other, 0.01)[1] is None
    assert _compare(true_V, 1, 1, other | said, 0.01)[1] == "0 stands first, 1 was said"


def test_what_is_wrong_with_a_log_probability() -> None:
    """Bug: the plain model's number is told on the other side of the one that is off, or others
    than the entry's tokens are called unlikely or out of order."""
    true_V = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    own = [round(float(x), 4) for x in true_V]
    for k, entry, text in (
        (0, {1: -1.0}, "1 has -1.0000, the plain model -1.3863 nats"),
        (1, {1: own[1], 2: own[2]}, "[2] are not the 1 most likely tokens"),
        (2, {2: own[2], 1: own[1], 0: own[0]}, "[1, 0] are out of order"),
    ):
        assert _compare(true_V, next(iter(entry)), k, entry, 0.01)[1] == text


@pytest.mark.parametrize(
    ("asked", "told", "text"),
    [
        ({"logprobs": 0}, {"logprobs": [{5: -0.1}]}, "logprobs 0: 1 entries, 2 tokens"),
        ({"logprobs": 0}, {}, "logprobs 0: 0 entries, 2 tokens"),
        ({"prompt_logprobs": 1}, {"prompt_logprobs": []}, "prompt_logprobs 1: 0 entries, 1 tokens"),
        ({}, {"logprobs": [{5: -0.1}, {6: -0.1}]}, "logprobs None: 2 entries, 2 tokens"),
    ],
)
def test_every_token_has_its_log_probabilities(
    asked: dict[str, Any], told: dict[str, Any], text: str
) -> None:
    """Bug: an answer with log-probabilities of fewer tokens than it has, or none, passes."""
    answer = transcript([5, 6], [1, 1], asked=SamplingParams(**asked), **told)
    nobody: Any = None  # no forward is needed to say so
    assert wrong_logprobs(nobody, answer, 1.0) == (0.0, text)


def test_what_lies_at_a_limit_passes() -> None:
    """Bug: a token exactly as far below the best as is allowed, or a share of identical ones that
    is just the one asked for, fails; an exact log-probability does at a tolerance of 0."""
    report = judge([transcript([5, 6], [1, 1])], [scores([5, 2], [0, 0.25])], 0.25, [])
    assert report.first_true is None and len(report.ties) == 1
    assert decide(report, Limits(min_identical=0.5)) == {}
    true_V = torch.tensor([0.5, 0.25, 0.25]).log()
    assert _compare(true_V, 0, 0, {0: float(true_V[0])}, 0.0) == (0.0, None)


def test_the_first_and_the_last_token_of_a_vocabulary_run() -> None:
    """Bug: `verify` refuses a prompt with token 0, Qwen3's "!", or takes one past the last."""

    def reset() -> None:
        raise InterruptedError

    target = SimpleNamespace(config=SimpleNamespace(vocab_size=8))
    loop: Any = SimpleNamespace(
        prefill=SimpleNamespace(pair=SimpleNamespace(target=target)), reset=reset
    )
    with pytest.raises(InterruptedError):  # taken, and about to run
        decode(loop, [[0, 7]], [1], ())
    for token in (-1, 8):
        with pytest.raises(ValueError, match=rf"token ids \[{token}\] lie outside"):
            decode(loop, [[0, token]], [1], ())


def test_draws_of_a_batch_have_seeds_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: `--all-options` draws every answer with one seed, so rows that draw with each other's
    pass."""
    ids = [[1]] * option_cases.NUM_CASES
    monkeypatch.setattr(
        option_cases, "decode", lambda *_: [transcript([5, 6, 7, 8], [1, 3]) for _ in ids]
    )
    target = SimpleNamespace(vocab_size=50)
    built: Any = SimpleNamespace(loop=None, stop_ids=(), tokenizer=None, target=target)
    found = option_cases.cases_for(built, ids, 8, 70, grammars=False)
    seeds = {i: case.asked.seed for i, case in enumerate(found) if not case.sampling.is_greedy}
    assert len(seeds) > 1 and seeds == {i: 70 + i for i in seeds}


def test_a_verdict_that_stdout_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: in a Latin-1 locale a FAIL about a text in another script ends as refused input."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "latin-1", write_through=True))
    options = {"output_json": None, "as_json": False, "prompt_file": None}
    finish("target", None, ["x"], [], {}, "FAIL: '\u4e2d'", options, Console(quiet=True))
    assert written.getvalue() == b"FAIL: '\\u4e2d'\n"


@pytest.mark.parametrize("file", [None, Path("/a/b/mine.jsonl")])
def test_the_json_of_a_verdict(file: Path | None, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: of several failures or divergences the JSON has one, or it does not say what was asked,
    or where files lie on this machine."""
    options = {"output_json": None, "as_json": True, "prompt_file": file, "quiet": True}
    options |= {"commit": None, "buckets": (1, 8), "seed": 3}
    texts = ["first divergence", "first benign tie"]
    finish(
        "/m/target", "d", ["x: 1", "y: 2"], texts, {"a": {}}, "FAIL", options, Console(quiet=True)
    )
    assert json.loads(capsys.readouterr().out) == {
        "config": {
            "verdict": "FAIL",
            "failures": ["x: 1", "y: 2"],
            "divergences": texts,
            "model": "target",
            "draft": "d",
            "buckets": [1, 8],
            "seed": 3,
            "prompt_file": "mine.jsonl" if file else "bundled",
        },
        "numbers": {"a": {}},
    }
