"""`graphengine verify --all-options` as it is typed; what it judges: test_option_cases.py."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from graphengine.cli.main import main
from graphengine.verify.option_cases import NUM_CASES


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


def test_temperature_is_refused() -> None:
    """Bug: `--temperature` compares distributions, and the cases are silently dropped."""
    result = verify("--temperature", "1")
    assert result.exit_code == 2 and "--all-options has temperatures" in result.stderr
