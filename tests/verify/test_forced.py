"""`verify --forced-acceptance`: every accepted length is run, and a wrong commit is seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from graphengine.api import Engine
from graphengine.checkpoints.hub import BUNDLED, TINY_DRAFT, TINY_TARGET
from graphengine.cli.main import main
from graphengine.cli.verify import PROBES
from graphengine.config.options import SamplingParams
from graphengine.decode import ends
from graphengine.decode.metrics import Acceptance
from graphengine.verify.check import Limits, Mix, judge
from graphengine.verify.forced import ForcedLength, lengths, missed
from graphengine.verify.option_cases import OptionCase
from graphengine.verify.run import CellResult, verify_mode
from graphengine.verify.teacher import TokenScores
from tests.support.transcripts import transcript

# Of the bundled probes: the targets are unsure of what follows, and the drafters rarely right.
PROMPTS = [json.loads(line)["prompt"] for line in PROBES.read_text().splitlines()[:2]]
NUM_TOKENS = 36


@pytest.mark.slow
@pytest.mark.parametrize(("pair", "num_drafts"), [("tiny", 5), ("tiny-hybrid", 15)])
def test_bundled_pairs_pass_at_every_length(tmp_path: Path, pair: str, num_drafts: int) -> None:
    """Bug: a length is forced that a block does not have, or another one than the row says."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    args = ["verify", pair, "--forced-acceptance", "--bucket", "2", "--device", "cpu", "--json"]
    args += ["--prompt-file", str(prompts), "--max-new-tokens", str(NUM_TOKENS)]
    args += [] if num_drafts == 15 else ["--num-speculative-tokens", str(num_drafts)]
    done = CliRunner().invoke(main, args)
    assert done.exit_code == 0, done.output
    numbers = json.loads(done.stdout)["numbers"]
    names = [f"none_torch_forced_{length}" for length in range(num_drafts + 1)]
    found = [numbers.pop(name)["bucket_2_together"] for name in names]
    assert set(numbers) == {"plain"}
    for length, cell in enumerate(found):
        assert cell["num_same_as_plain"] == len(PROMPTS)
        # The last step of a text may be right to its end; the drafts behind that are not known.
        assert length / 2 < cell["mean_acceptance_length"] <= length + 1.5


def hybrid(accepts: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> dict[str, CellResult]:
    """Mode -> result, own drafts and forced ones of blocks of 8 rows; states advance by
    `accepts[rows]` instead of the rows that were committed, where it says so."""
    target, draft = BUNDLED["tiny-hybrid"]
    run: dict[str, Any] = {"max_new_tokens": NUM_TOKENS, "limits": Limits()}
    cells: Any = [(len(PROMPTS), "together")]
    asked: dict[str, Any] = {"buckets": (len(PROMPTS),), "max_model_len": 160, "device": "cpu"}
    asked |= {"acceptance_floor": 0.0, "fallback": False}
    with Engine.from_pretrained(target, None, **asked) as engine:
        assert engine.tokenizer is not None
        chats = [[{"role": "user", "content": text}] for text in PROMPTS]
        ids = [engine.tokenizer.encode_chat(chat) for chat in chats]
        (plain,) = verify_mode(engine.built, "plain", ids, cells, **run)
    advance_ = ends.advance_

    def wrong_(states: Any, buffers: Any, first_B: Tensor, start_B: Tensor, size: int) -> None:
        rows = (start_B - first_B).tolist()
        rows = torch.tensor([accepts.get(n, n) for n in rows], dtype=start_B.dtype)
        advance_(states, buffers, first_B, first_B.to(start_B.dtype) + rows, size)

    monkeypatch.setattr(ends, "advance_", wrong_)
    with Engine.from_pretrained(target, draft, num_speculative_tokens=7, **asked) as engine:
        found = verify_mode(engine.built, "own", ids, cells, **run)
        forced = ForcedLength.of(plain.transcripts)
        found += verify_mode(engine.built, "none", ids, cells, forced=forced, **run)
    return {result.cell.mode: result for result in found}


def failing(results: dict[str, CellResult]) -> set[str]:
    return {mode for mode, result in results.items() if "regret" in result.failed}


@pytest.mark.slow
def test_a_commit_of_one_row_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a recurrent state advances by one rejected row; of a whole block there is none."""
    found = hybrid({rows: rows + 1 for rows in range(1, 8)}, monkeypatch)
    assert failing(found) >= {f"none forced {length}" for length in range(7)}


@pytest.mark.slow
def test_a_commit_that_is_wrong_for_one_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: one length is committed wrongly, and the drafter at hand does not reach it."""
    found = hybrid({6: 5}, monkeypatch)
    assert not found["own"].report.acceptance.steps_by_accepted[5]
    assert failing(found) == {"none forced 5"}


@pytest.mark.parametrize("mix", ["alone", "mixed"])
def test_one_prompt_that_is_asked_for_two_things(mix: Mix) -> None:
    """Bug: requests with one prompt, as --all-options makes of few, are all drafted the last
    one's answer: where that is short, or another, no step accepts a length, and it fails."""
    asked: dict[str, Any] = {"buckets": (3,), "num_speculative_tokens": 2, "device": "cpu"}
    cases = [OptionCase(), OptionCase(), OptionCase(SamplingParams(max_new_tokens=1))]
    run: dict[str, Any] = {"max_new_tokens": 12, "limits": Limits(), "cases": cases}
    with Engine.from_pretrained(TINY_TARGET, TINY_DRAFT, max_model_len=64, **asked) as engine:
        assert engine.tokenizer is not None
        ids = [engine.tokenizer.encode("Count")] * 3
        (plain,) = verify_mode(engine.built, "none", ids, [(3, "together")], **run)
        forced = ForcedLength.of(plain.transcripts)
        found = verify_mode(engine.built, "none", ids, [(3, mix)], forced=forced, **run)
    accepted = [t.acceptance.mean_acceptance_length for t in found[-1].transcripts[:2]]
    assert min(accepted) > 2 and not any(result.failed for result in found)


def test_each_bucket_has_the_lengths_of_its_own_block() -> None:
    """Bug: a larger bucket, whose blocks are shorter, is asked for lengths of the longest one, and
    fails since no step of it can accept so many."""
    asked: dict[str, Any] = {"buckets": (1, 2), "num_speculative_tokens": (5, 2), "device": "cpu"}
    with Engine.from_pretrained(TINY_TARGET, TINY_DRAFT, max_model_len=64, **asked) as engine:
        found = [lengths(engine.built.loop, bucket) for bucket in (1, 2)]
    assert found == [range(6), range(3)]


def test_a_length_that_nobody_reached() -> None:
    """Bug: texts part at the first token, no draft is right any more, and the length passes."""
    acceptance = Acceptance(3, [4, 0, 1, 0])
    said = transcript([5, 6], [1, 1], acceptance=acceptance)
    report = judge([said], [TokenScores([0.0, 0.0], [5, 6], [-0.5, -0.5])], 0.2, [])
    assert [missed(report, length) is None for length in range(4)] == [True, False, True, False]
    assert "no step accepted 3 drafts" in str(missed(report, 3))


@pytest.mark.gpu
def test_captured_modes_on_a_gpu(tmp_path: Path) -> None:
    """Bug: a captured step reads forced drafts of another position, row or length."""
    prompts, path = tmp_path / "prompts.jsonl", tmp_path / "verify.json"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    args = ["verify", "tiny-hybrid", "--matrix", "--forced-acceptance", "--device", "cuda"]
    args += ["--dtype", "float32", "--no-compile", "--bucket", "1,3", "--output-json", str(path)]
    args += ["--prompt-file", str(prompts), "--num-speculative-tokens", "3"]
    done = CliRunner().invoke(main, args)
    assert done.exit_code == 0, done.output
    modes = {name.split("_")[0] for name in json.loads(path.read_text())["numbers"]}
    assert modes == {"plain", "none", "piecewise", "full"}
