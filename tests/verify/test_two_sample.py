"""The sampled mode of `verify`: its test keeps its level, and a biased acceptance fails it."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from scipy import stats

from graphengine.api import Engine
from graphengine.checkpoints.hub import TINY_DRAFT, TINY_TARGET
from graphengine.checkpoints.tokenizer import Tokenizer
from graphengine.cli import verify as cli_verify
from graphengine.cli.main import main
from graphengine.decode import ends
from graphengine.decode.sampling import GREEDY, Sampling
from graphengine.prompts import read_prompt_file
from graphengine.verify import run as verify_run
from graphengine.verify.run import Draws, draw, encode
from graphengine.verify.two_sample import LEVEL, Comparison, PlaceTest, compare, judge_draws
from tests.support.checkpoints import make_drafter, make_target


def runs(tokens: Any) -> list[list[int]]:
    return [[int(token)] for token in tokens]


def test_pvalues_are_uniform_under_the_null() -> None:
    """Bug: the p-value is anti-conservative, so a right engine fails more often than stated."""
    rng = np.random.default_rng(0)
    shares = np.array([0.55, 0.2, 0.1, 0.05, 0.05, 0.03, 0.02])
    pvalues = []
    for _ in range(300):
        a, b = rng.choice(7, size=80, p=shares), rng.choice(7, size=50, p=shares)
        pvalues.append(compare([runs(a)], [runs(b)], [0]).tests[0].pvalue)
    assert stats.kstest(pvalues, "uniform").pvalue > 1e-3
    assert sum(p < 0.05 for p in pvalues) < 30


def test_pvalues_equal_scipys() -> None:
    """Bug: the statistic is not chi-square, or runs of unequal number are weighted wrongly."""
    rng = np.random.default_rng(1)
    for shift in (0.0, 0.05, 0.1, 0.15):
        a = rng.choice(3, size=400, p=[0.5, 0.3, 0.2])
        b = rng.choice(3, size=600, p=[0.5 - shift, 0.3, 0.2 + shift])
        table = np.array([np.bincount(x, minlength=3) for x in (a, b)])
        expected: Any = stats.chi2_contingency(table)
        found = compare([runs(a)], [runs(b)], [0]).tests[0]
        assert found.num_tokens == 3
        if expected.pvalue > 0.02:
            assert found.pvalue == pytest.approx(expected.pvalue, rel=0.4)
        else:
            assert found.pvalue < 0.03


def test_tables_as_uneven_as_the_observed_one_count() -> None:
    """Bug: shuffles that tie with the observation are left out, so that few draws, of which two in
    six part like this by chance, fail a right engine."""
    (found,) = compare([runs([0, 0])], [runs([1, 1])], [0]).tests
    assert found.pvalue == pytest.approx(1 / 3, abs=0.15)
    (found,) = compare([runs([0, 1])], [runs([0, 1])], [0]).tests
    assert found.pvalue == 1


def test_bonferroni_and_ends() -> None:
    """Bug: with many places the total level grows; a run that ended early is left out,
    or counts as its last token once more."""
    same = [[1, 2, 3]] * 50
    result = compare([same, same], [same, same], [0, 1, 5])
    assert result.threshold == pytest.approx(LEVEL / 6) and result.passed
    ended = compare([[[1, 2]] * 50], [[[1]] * 50], [0, 1])
    assert not ended.passed and ended.smallest.position == 1
    assert ended.smallest.pvalue > 0, "as few shuffles as were made cannot show that it is 0"
    assert not compare([[[1, 0]] * 50], [[[1]] * 50], [0, 1]).passed, "0 is a token, not an end"
    assert not compare([[[1, 1]] * 50], [[[1]] * 50], [0, 1]).passed, "nor is the last one again"
    with pytest.raises(ValueError, match="at least 2"):
        compare([[[1]]], [[[1]]], [0])


# --- the command ---


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A pair with wide distributions, whose drafter is now and then right, and two prompts."""
    directory = tmp_path_factory.mktemp("pair")
    target = make_target(directory / "target", tie=False, likely_tokens=6)
    drafter = make_drafter(directory / "drafter", target)
    prompts = directory / "prompts.jsonl"
    prompts.write_text('{"prompt": [7, 99, 23]}\n{"prompt": [250, 1, 2, 3]}\n')
    return target, drafter, prompts


def verify(pair: tuple[Path, Path, Path], *args: str) -> Result:
    target, drafter, prompts = pair
    common = ("--prompt-file", str(prompts), "--bucket", "16", "--max-new-tokens", "6")
    sampled = ("--temperature", "1", "--top-k", "6", "--num-samples", "150")
    where = ["verify", str(target), "--draft", str(drafter)]
    return CliRunner().invoke(main, [*where, *common, *sampled, *args])


def test_right_engine_passes(pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """Bug: speculative draws differ from plain ones, or both use the same seeds and prove
    nothing."""
    path = tmp_path / "verify.json"
    result = verify(pair, "--output-json", str(path))
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("PASS: smallest p-value")
    numbers = json.loads(path.read_text())["numbers"]["sampled"]
    assert numbers["num_tests"] == 10 and numbers["num_tests_with_choice"] == 10
    assert numbers["mean_acceptance_length"] > 1.02, "no draft was ever accepted"
    assert 1e-3 < numbers["smallest_pvalue_fraction"] < 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "message"),
    [(("--num-samples", "5"), "no difference could fail"), (("--top-k", "1"), "only one token")],
)
def test_a_test_that_cannot_fail_is_no_proof(
    pair: tuple[Path, Path, Path], args: tuple[str, ...], message: str
) -> None:
    """Bug: PASS where even draws without a token in common would have passed."""
    result = verify(pair, *args)
    assert result.exit_code == 1, result.output
    assert result.stdout.startswith("FAIL: ") and message in result.stdout


def test_biased_acceptance_fails(
    pair: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a draft is accepted because it is among the target's three most likely tokens: text that
    reads well, from another distribution."""
    make = ends.make_end

    def biased(name: str, chain: str, target: Any, buffers: Any, *others: Any) -> Any:
        steps = make(name, chain, target, buffers, *others)
        if name != ends.SAMPLED or chain == "decode":
            return steps
        real, inner = ends.sample_rows, steps[-1]

        def sample(logits_TV: Any, positions_T: Any, controls: Any) -> Any:
            drawn = real(logits_TV, positions_T, controls).view_as(buffers.draft_ids_BG)
            likely = logits_TV.topk(3).indices.view(*drawn.shape, 3)
            drafts = torch.cat([buffers.draft_ids_BG[:, 1:], drawn[:, -1:]], dim=1)
            near = (likely == drafts[..., None]).any(-1)
            return torch.where(near, drafts, drawn).flatten()

        def run(carry: Any) -> Any:
            with monkeypatch.context() as patch:
                patch.setattr(ends, "sample_rows", sample)
                return inner.run(carry)

        return [*steps[:-1], type(inner)(inner.name, run)]

    monkeypatch.setattr("graphengine.decode.chains.make_end", biased)
    result = verify(pair)
    assert result.exit_code == 1, result.output
    assert "FAIL: speculative and plain draws differ" in result.stdout


@pytest.mark.parametrize(("minimum", "passes"), [(None, True), (3.0, True), (3.1, False)])
def test_acceptance_is_that_of_the_drafter(minimum: float | None, passes: bool) -> None:
    """Bug: --min-acceptance is held against the plain draws, which take a token a step."""
    outputs = [runs([1, 2] * 50)]
    options = {"max_new_tokens": 1, "seed": 0, "num_samples": 100, "min_acceptance": minimum}
    drafted, plain = Draws(outputs, 3.0, {}), Draws(outputs, 1.0, {})
    passed, told, numbers = judge_draws(drafted, plain, options)
    assert passed == passes and numbers["mean_acceptance_length"] == 3.0
    assert ("acceptance: 3.00 tokens a step, 3.1 expected" in told) == (not passes)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--temperature", "-1"), "temperature is -1"),
        (("--top-p", "2", "--temperature", "1"), "top_p is 2"),
        (("--draft", "none", "--temperature", "1"), "pass --draft"),
        (("--matrix", "--temperature", "1"), "--matrix is greedy"),
        (("--num-samples", "1", "--temperature", "1"), "--num-samples"),
    ],
)
def test_refusals(args: tuple[str, ...], message: str) -> None:
    """Bug: a combination without a meaning runs, or is a traceback."""
    result = CliRunner().invoke(main, ["verify", *args])
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())


def test_draws_are_of_unsure_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: drawn are bundled prompts of whose answers the model is sure, so that few places have
    more than one token."""
    asked: list[list[int]] = []

    def compare_draws(run: cli_verify._Run) -> bool:
        asked.extend(run.ids)
        return True

    monkeypatch.setattr(cli_verify._Run, "compare_draws", compare_draws)
    result = CliRunner().invoke(main, ["verify", "--temperature", "1"])
    assert result.exit_code == 0, result.output
    probes = [turn for (turn,) in read_prompt_file(cli_verify.PROBES)]
    assert asked == encode(Tokenizer(TINY_TARGET), probes, raw=False)[-4:]


def test_the_level_itself() -> None:
    """Bug: a p-value at the level, or ten times above it, is a difference; or one below it none."""
    for pvalue, passes in ((0.002, True), (0.001, True), (0.00099, False)):
        tests = [PlaceTest(0, 0, 0.5, 2), PlaceTest(0, 1, pvalue, 2)]
        assert Comparison(tests, 0.001).passed == passes


def test_draws_belong_to_their_prompts(tmp_path: Path) -> None:
    """Bug: what is compared as draws of one prompt are those of several, alike on both sides."""
    target, ids = make_target(tmp_path, layers=1), [[7, 99, 23], [250, 1]]
    with Engine.from_pretrained(target, buckets=(4,), max_model_len=32) as engine:
        found = draw(engine.built, ids, 3, 4, GREEDY).outputs
        said = [r.token_ids for r in engine.generate(ids, max_new_tokens=4)]
    assert found == [[one] * 3 for one in said] and said[0] != said[1]


def test_where_draws_differ_is_told() -> None:
    """Bug: the prompt of the place that differs most is told as its token, or numbers of the result
    are others' than the text's."""
    same, plain = [[7, 8, 9, 9]] * 50, [[4, 5, 6, 7], [4, 5, 6, 8]] * 25
    drafted = [[4, 5, 6, 7], [4, 5, 5, 8], [4, 5, 4, 8]] * 16 + plain[:2]
    options = {"max_new_tokens": 3, "seed": 0, "num_samples": 50, "min_acceptance": None}
    passed, told, numbers = judge_draws(
        Draws([same, drafted], 2.5, {}), Draws([same, plain], 1.0, {}), options
    )
    pvalue = numbers.pop("smallest_pvalue_fraction")
    assert not passed and pvalue < 1e-3
    assert told == (
        f"speculative and plain draws differ: smallest p-value {pvalue:.2g} (prompt 1, token 2, 3 "
        "different tokens); less than 0.0017 would fail: 0.01 over 6 tests, 1 of them with more "
        "than one token"
    )
    assert numbers == {
        "num_tests": 6,
        "num_tests_with_choice": 1,
        "threshold_pvalue_fraction": LEVEL / 6,
        "mean_acceptance_length": 2.5,
    }


def test_no_place_behind_an_answer_s_end_is_tested() -> None:
    """Bug: the place behind the last token, where all draws have ended, counts as a test, which
    makes every other one need a greater difference."""
    draws = Draws([[[1] * 5, [2] * 5] * 50], 3.0, {})
    for length, count in ((1, 1), (3, 3), (5, 4)):
        options = {"max_new_tokens": length, "seed": 0, "num_samples": 100, "min_acceptance": None}
        assert f" over {count} tests" in judge_draws(draws, draws, options)[1]


def test_draws_that_stop_with_the_drafter_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: plain draws that all end well hide those that a fault of the drafter has stopped, and
    what is left of these is compared."""
    whole = [[[1]] * 2 for _ in range(4)]
    drawn = [Draws([[[]] * 2, *whole[1:]], 1.0, {1: "not finite"}), Draws(whole, 1.0, {})]
    engine = nullcontext(SimpleNamespace(built=None))
    monkeypatch.setattr(cli_verify._Run, "engine", lambda *asked: engine)
    monkeypatch.setattr(verify_run, "draw", lambda *asked: drawn.pop(0))
    result = CliRunner().invoke(main, ["verify", "--temperature", "1", "--num-samples", "2"])
    assert result.exit_code == 1, result.output
    assert "finite: 1 requests were stopped; request 1: not finite" in result.stdout


def test_which_draws_are_made_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: plain draws, with no drafter, are said to be made with it; or some of them have the
    seeds of drafted ones, so that the two sets are no samples of their own."""
    seeds: list[int] = []

    def noted(built: Any, ids: Any, count: int, length: int, sampling: Sampling) -> Draws:
        seeds.append(sampling.seed)
        return drawn

    drawn = Draws([[[1], [2]] * 50 for _ in range(4)], 3.0, {})
    engine = nullcontext(SimpleNamespace(built=None))
    monkeypatch.setattr(cli_verify._Run, "engine", lambda *asked: engine)
    monkeypatch.setattr(verify_run, "draw", noted)
    line = ["verify", "--temperature", "1", "--draft", str(TINY_DRAFT), "--seed", "7"]
    result = CliRunner().invoke(main, line)
    assert result.exit_code == 0, result.output
    lines = [f"drawing 100 x 4 with drafter {drafter}\n" for drafter in (TINY_DRAFT, None)]
    assert result.stderr == "".join(lines) and seeds == [7, 7 + 400]
