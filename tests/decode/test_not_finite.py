"""Logits that are not finite: one request ends with an error, its neighbours never notice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from graphengine.api import Engine
from graphengine.drafters.dflash import DFlash
from tests.decode.test_engine import (
    BACKENDS,
    BLOCK,
    PROMPTS,
    Pair,
    assert_idle,
    force,
    ids_only,
    tokens,
)
from tests.support.checkpoints import make_target
from tests.support.guarded import run_cli


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(params=BACKENDS)
def engine(pair: Pair, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with pair.engine(attention_backend=request.param, max_model_len=44) as engine:
        yield engine
        assert_idle(engine)


def embedding(engine: Engine) -> torch.Tensor:
    return engine.built.loop.prefill.pair.target.weights.embed_VD


def first_place(row: list[int], others: list[list[int]], begin: int) -> int:
    """A place in `row` whose token comes up for the first time there and nowhere in `others`."""
    taken = {token for other in others for token in other}
    return next(i for i in range(begin, len(row)) if row[i] not in taken and row[i] not in row[:i])


@pytest.mark.parametrize(
    ("accepted", "value"), [*((n, float("nan")) for n in (0, 1, BLOCK - 1)), (1, float("inf"))]
)
def test_not_finite_ends_one_request(
    engine: Engine, pair: Pair, value: float, accepted: int
) -> None:
    """Bug: a NaN ends the engine or its neighbours, comes out as token 0, goes unnoticed, or is
    found again by whoever asks with the text that met it."""
    prompts = PROMPTS[:4]
    plain = [pair.plain(p, 24) for p in prompts]
    others = [*prompts, plain[0], plain[2], plain[3]]
    place = first_place(plain[1], others, 5)
    table, token = embedding(engine), plain[1][place]
    kept = table[token].clone()
    table[token] = value  # the rows of this token, and all behind them, are not finite
    force(engine, pair, accepted)
    results = engine.generate(prompts, max_new_tokens=24, ignore_eos=True)
    assert [r.finish_reason for r in results] == ["length", "error", "length", "length"]
    # Masked keys count with weight 0, and 0 * NaN is NaN: rows before it in its block fall too.
    broken, count = results[1], len(results[1].token_ids)
    assert place + 1 - BLOCK < count <= place + 1
    assert [r.token_ids for r in results] == [plain[0], plain[1][:count], *plain[2:]]
    position = len(prompts[1]) + count
    assert f"logits for position {position} hold a NaN or an infinity" in (broken.error or "")
    assert [r.error for r in results if r.finish_reason == "length"] == [None] * 3
    table[token] = kept
    text = [*prompts[1], *plain[1][: count + 1]]
    assert ids_only(engine, [text], max_new_tokens=1) == [[plain[1][count + 1]]]
    # The pages that hold NaN belong to others now.
    assert ids_only(engine, prompts, max_new_tokens=24) == plain


def test_not_finite_in_the_prompt(engine: Engine, pair: Pair) -> None:
    """Bug: the first token is the prefill's, and nobody looks at its logits."""
    table = embedding(engine)
    kept = table[400].clone()
    table[400] = float("nan")
    for prompts in ([[9, 400, 8]], [[9, 400, 8], PROMPTS[0]]):
        last = [c.result for c in engine.stream_many(prompts) if c.index == 0][-1]
        assert last is not None and last.finish_reason == "error" and last.token_ids == []
        assert last.text == "" and "position 3" in (last.error or "")
        assert last.metrics.num_output_tokens == 0 and last.metrics.tokens_per_s == 0
    bad, good = engine.generate([[400], PROMPTS[0]], max_new_tokens=9, ignore_eos=True)
    assert bad.finish_reason == "error" and good.token_ids == pair.plain(PROMPTS[0], 9)
    table[400] = kept


def test_broken_drafter_costs_acceptance_alone(engine: Engine, pair: Pair) -> None:
    """Bug: a drafter that gives NaN drafts row -1 of the embedding, or ends the request."""
    drafter = engine.built.loop.prefill.pair.proposer
    assert isinstance(drafter, DFlash)
    drafter.weights.norm_D.fill_(float("nan"))
    results = engine.generate(PROMPTS, max_new_tokens=20, ignore_eos=True)
    assert tokens(results) == [pair.plain(p, 20) for p in PROMPTS]


def test_not_finite_without_a_drafter(pair: Pair) -> None:
    """Bug: plain decoding has a check of its own, or none; or the last chunk, which holds no token,
    tells all log-probabilities again."""
    plain = pair.plain(PROMPTS[0], 24)
    place = first_place(plain, PROMPTS[:1], 4)
    with pair.engine(draft=False) as engine:
        embedding(engine)[plain[place]] = float("nan")
        asked = {"max_new_tokens": 24, "ignore_eos": True, "logprobs": 0}
        *_, last = chunks = [*engine.stream_many(PROMPTS[:1], **asked)]
        assert last.result is not None and last.result.finish_reason == "error"
        assert last.result.token_ids == plain[: place + 1] and last.token_ids == []
        assert [len(c.logprobs or []) for c in chunks] == [len(c.token_ids) for c in chunks]


def test_command_says_what_failed(tmp_path: Path) -> None:
    """Bug: an answer that broke off looks like a short answer, the exit code says all went well,
    or --quiet hides why it does not."""
    target = make_target(tmp_path / "target", max_positions=128)
    path = target / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, path, metadata={"format": "pt"})
    found = run_cli(target, "--draft", "none", "--prompt", "hello", "--bucket", "1", "--json")
    assert found.exit_code == 1, found.output
    (result,) = json.loads(found.stdout)["results"]
    assert result["finish_reason"] == "error" and "a NaN or an infinity" in result["error"]
    assert "warning: prompt 1 failed: the target's logits for position" in found.stderr
    quiet = run_cli(target, "--draft", "none", "--prompt", "hello", "--bucket", "1", "--quiet")
    assert quiet.exit_code == 1 and quiet.stdout.strip() == ""
    assert quiet.stderr.startswith("warning: prompt 1 failed: ") and quiet.stderr.count("\n") == 1
