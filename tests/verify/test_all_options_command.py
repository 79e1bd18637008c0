"""`graphengine verify --all-options` as it is typed; what it judges: test_option_cases.py."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from graphengine.cli.main import main
from graphengine.config.options import SamplingParams
from graphengine.report import stderr_console
from graphengine.verify import option_cases, run
from graphengine.verify.check import judge
from graphengine.verify.option_cases import NUM_CASES, OptionCase
from graphengine.verify.report import report_cells
from graphengine.verify.run import Cell, CellResult
from graphengine.verify.teacher import TokenScores
from tests.support.transcripts import transcript


def verify(*args: str) -> Result:
    typed = ("--all-options", "--bucket", "8", "--max-new-tokens", "16", *args)
    return CliRunner().invoke(main, ["verify", *typed])


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "identical"), [("float32", 1.0), ("bfloat16", 0.95)])
def test_few_prompts_ask_for_everything(tmp_path: Path, dtype: str, identical: float) -> None:
    """Bug: with fewer prompts than cases the last kinds are never asked for; a hybrid's states
    advance by rows that a mask has cut; bfloat16's rounding fails log-probabilities; nobody asks
    for anything, and all options are said to be mixed."""
    path = tmp_path / "few.jsonl"
    path.write_text('{"prompt": "Compare the bee and the duck."}\n{"prompt": "Why?"}\n')
    result = verify("tiny-hybrid", "--prompt-file", str(path), "--dtype", dtype, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["config"]["grammars"] is True
    cell = found["numbers"]["none_torch"]["bucket_8_together"]
    assert cell["identical_fraction"] >= identical and cell["num_tokens"] > 4 * NUM_CASES
    assert cell["max_logprob_error_nats"] > 0, "no log-probability was asked for"


@pytest.mark.slow
def test_without_llguidance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: without the extra nothing can be verified, or grammars seem to be covered."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    result = verify("--max-new-tokens", "4")
    assert result.exit_code == 0, result.output
    assert "all options mixed but grammars (install them:" in result.stdout


def test_what_was_asked_for_where_a_token_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: beside a token that differs stands what another request asked for; or what runs is told
    with the bucket as its mix."""
    told = [transcript([5, 6], [1, 1]) for _ in range(3)]
    scores = [TokenScores([0.1 * (i == 1), 0.0], [5 + (i == 1), 6], [-0.5] * 2) for i in range(3)]
    report = judge(told, scores, 0.2, [])
    cell = Cell("none torch", 8, "together")
    found = CellResult(cell=cell, report=report, failed={}, transcripts=told)
    cases = [OptionCase(SamplingParams(seed=k)) for k in (11, 22, 33)]
    monkeypatch.setattr(option_cases, "cases_for", lambda *_: cases)
    monkeypatch.setattr(run, "verify_mode", lambda *_, progress, **__: progress(cell) or [found])
    path = tmp_path / "few.jsonl"
    path.write_text('{"prompt": [1, 2]}\n')
    result = verify("--prompt-file", str(path), "--draft", "none")
    assert "request 1, token 0" in result.stderr, result.output
    assert "none torch: bucket 8, together\n" in result.stderr
    assert "(asked for: seed 22)" in result.stderr, result.stderr


@pytest.mark.parametrize(
    ("texts", "grammars", "mixed"),
    [
        (True, True, ""),
        (True, False, ' but grammars (install them: pip install "graphengine[grammar]")'),
        (False, False, " but grammars and stop strings (this model has no tokenizer)"),
    ],
)
def test_what_was_not_mixed_is_told(
    capsys: pytest.CaptureFixture[str], texts: bool, grammars: bool, mixed: str
) -> None:
    """Bug: PASS of all options, where some could not be asked for; or the cause is another's."""
    told = [transcript([5, 6], [1, 1])]
    report = judge(told, [TokenScores([0.0] * 2, [5, 6], [-0.5] * 2)], 0.2, [])
    cell = CellResult(cell=Cell("m", 8, "alone"), report=report, failed={}, transcripts=told)
    options: dict[str, Any] = dict.fromkeys(("prompt_file", "output_json", "as_json"))
    options |= {"all_options": True, "texts": texts, "grammars": grammars}
    assert report_cells("m", None, [cell], [], options, stderr_console(quiet=True))
    assert capsys.readouterr().out == f"PASS: 1 runs, 2 tokens judged, all options mixed{mixed}\n"


def test_what_a_case_asks_for_is_told_whole() -> None:
    """Bug: a failure of bad words, which are tokens and no option's text, names all but these."""
    asked = SamplingParams(frequency_penalty=0.5, regex="a+")
    assert str(OptionCase(asked, ((5,), (6, 7)))) == (
        "frequency_penalty 0.5, regex, bad_words ((5,), (6, 7))"
    )
    assert (str(OptionCase(asked)), str(OptionCase())) == (
        "frequency_penalty 0.5, regex",
        "greedy",
    )


def test_temperature_is_refused() -> None:
    """Bug: `--temperature` compares distributions, and the cases are silently dropped."""
    result = verify("--temperature", "1")
    assert result.exit_code == 2 and "--all-options has temperatures" in result.stderr
