"""`verify` has teeth: seeded faults of the kinds that others shipped, each fails the right check.

On the bundled pair, in float32. A fault of the target's side must fail `regret`; a fault of the
drafter's side must fail `acceptance` and nothing else, because a wrong draft is only rejected.
Faults are put in from outside: nothing in the package knows of them. What a fault leaves unwritten
is read as it was before, so the K/V pools start with known contents.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from graphengine.api import Engine
from graphengine.checkpoints.hub import BUNDLED, TINY_DRAFT, TINY_TARGET
from graphengine.cli.verify import PROBES, PROMPTS
from graphengine.decode import buckets, holdings
from graphengine.decode.kvcache import NULL_PAGE
from graphengine.models.layers import rope_table
from graphengine.verify.check import Limits, Report, decide, decode, judge
from graphengine.verify.run import returning, verify_mode
from graphengine.verify.teacher import teacher_force
from graphengine.verify.told import Transcript
from tests.support.chains import insert_
from tests.support.checkpoints import edit_config

NUM_PROMPTS = 4
NUM_PROBES = 8
MAX_NEW_TOKENS = 48
BACKENDS = ["torch", "triton"]

# The rest shows that other faults of these kinds are seen too; `regret`, `finite` and `acceptance`
# fail once without them.
slow = pytest.mark.slow


def load(
    target: Path = TINY_TARGET, draft: Path | None = TINY_DRAFT, fill: float = 0.0, **options: Any
) -> Engine:
    options = {"buckets": (NUM_PROMPTS + NUM_PROBES,), "max_model_len": 256} | options
    engine = Engine.from_pretrained(target, draft, device="cpu", **options)
    prefill = engine.built.loop.prefill
    for model in (prefill.pair.target, prefill.pair.proposer):
        if hasattr(model, "kv_pool"):
            model.kv_pool[:, :, NULL_PAGE + 1 :] = fill  # type: ignore[attr-defined]
    return engine


def prompt_ids(engine: Engine) -> list[list[int]]:
    assert engine.tokenizer is not None
    prompts, probes = (
        [json.loads(line)["prompt"] for line in path.read_text().splitlines()]
        for path in (PROMPTS, PROBES)
    )
    # The longest of each kind, and probes on which the model is unsure.
    texts = prompts[-NUM_PROMPTS:] + probes[:NUM_PROBES]
    return [engine.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts]


def run(engine: Engine) -> list[Transcript]:
    ids = prompt_ids(engine)
    built = engine.built
    return decode(built.loop, ids, [MAX_NEW_TOKENS] * len(ids), built.stop_ids)


def report_of(engine: Engine, transcripts: list[Transcript]) -> Report:
    built = engine.built
    scores = [teacher_force(built.loop, t.prompt_ids, t.output_ids) for t in transcripts]
    tolerance = Limits().tolerance_nats
    return judge(transcripts, scores, tolerance, built.stop_ids, NUM_PROMPTS)


@pytest.fixture(scope="module")
def limits() -> Limits:
    """What the healthy pair passes; the floor on acceptance lies 5 percent below it."""
    with load() as engine:
        report = report_of(engine, run(engine))
    assert report.identical_fraction == 1.0 and report.max_regret_nats == 0.0
    limits = Limits(min_acceptance=0.95 * report.acceptance.mean_acceptance_length)
    assert decide(report, limits) == {}
    return limits


def failed(engine: Engine, limits: Limits) -> set[str]:
    return set(decide(report_of(engine, run(engine)), limits))


def put_before(engine: Engine, name: str, first: Callable[[Any], None]) -> None:
    """Does `first(step buffers)` in front of every step `name`."""
    for bucket in engine.built.loop.first.buckets.values():
        insert_(bucket, name, partial(first, bucket.buffers))


def stale_plans(attention: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every plan is the one of the step before, while the rows stay the same."""
    before: list[Any] = []
    plan = attention.plan

    def late(layout: Any) -> None:
        same = before and len(before[-1].paged_kv_last_page_len_cpu) == len(
            layout.paged_kv_last_page_len_cpu
        )
        plan(before[-1] if same else layout)
        before.append(layout)

    monkeypatch.setattr(attention, "plan", late)


@slow
@pytest.mark.parametrize("offset", [-1, 1])
@pytest.mark.parametrize("backend", BACKENDS)
def test_target_slot_off_by_one(limits: Limits, backend: str, offset: int) -> None:
    """Bug: verify writes its rows' K/V one slot too early or too late.

    One too late leaves every row blind to itself alone; a sure model hardly minds, so either check
    of the output may be the one that sees it.
    """
    with load(attention_backend=backend) as engine:
        put_before(engine, "verify.00", lambda views: views.slots_T.add_(offset))
        assert failed(engine, limits) & {"regret", "identical"}


@pytest.mark.slow
@pytest.mark.parametrize("offset", [-1, 1])
def test_target_slot_off_by_one_over_garbage(limits: Limits, offset: int) -> None:
    """Bug: the same, where the memory held NaN before: the request stops with an error, and that
    passed as an output without a wrong token."""
    with load(fill=math.nan) as engine:
        put_before(engine, "verify.00", lambda views: views.slots_T.add_(offset))
        assert "finite" in failed(engine, limits)


@slow
def test_drafter_slot_off_by_one(limits: Limits) -> None:
    """Bug: the drafter's context is written one slot too late; the output stays right."""
    with load() as engine:
        put_before(engine, "draft.context", lambda views: views.context_slots_T.add_(1))
        assert failed(engine, limits) == {"acceptance"}


@pytest.mark.slow
def test_stale_plan_of_the_target(limits: Limits, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: verify runs with the lengths of an earlier step (its plan was not renewed)."""
    with load() as engine:
        for bucket in engine.built.loop.first.buckets.values():
            stale_plans(bucket.attentions[0], monkeypatch)
        assert "regret" in failed(engine, limits)


@slow
def test_stale_plan_of_the_drafter(limits: Limits, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the drafter sees the lengths of an earlier step."""
    with load() as engine:
        for bucket in engine.built.loop.first.buckets.values():
            for attention in bucket.attentions[1:]:
                stale_plans(attention, monkeypatch)
        assert failed(engine, limits) == {"acceptance"}


@slow
@pytest.mark.parametrize("name", ["positions_T", "start_B"])
def test_stale_graph(limits: Limits, name: str) -> None:
    """Bug: a replay reads a frozen copy: the positions or the lengths of an earlier step."""
    seen: list[Any] = []

    def freeze(views: Any) -> None:
        # Every second step sees what the step before it saw, plus what it had to.
        tensor = getattr(views, name)
        now = tensor.clone()
        if len(seen) % 2:
            tensor.copy_(seen[-1])
        seen.append(now)

    with load(attention_backend="triton") as engine:
        put_before(engine, "verify.00", freeze)
        assert "regret" in failed(engine, limits)


@slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_mask_leak(limits: Limits, backend: str) -> None:
    """Bug: verify's causal mask is missing, so rows see the drafts that they are to judge."""
    with load(attention_backend=backend) as engine:
        for bucket in engine.built.loop.first.buckets.values():
            attention: Any = bucket.attentions[0]
            attention._rule = replace(attention._rule, causal=False)
        assert "regret" in failed(engine, limits)


def test_causal_drafter(limits: Limits) -> None:
    """Bug: the drafter's block is masked causally."""
    with load() as engine:
        for bucket in engine.built.loop.first.buckets.values():
            for attention in bucket.attentions[1:]:
                attention._rule = replace(attention._rule, causal=True)  # type: ignore[attr-defined]
        assert failed(engine, limits) == {"acceptance"}


def edited(
    directory: Path, source: Path, change: Callable[[dict[str, Any]], dict[str, Any]]
) -> Path:
    shutil.copytree(source, directory)
    edit_config(directory, change)
    return directory


@slow
def test_wrong_tap(tmp_path: Path, limits: Limits) -> None:
    """Bug: the drafter is fed with the outputs of the layers next to the right ones."""

    def shift(config: dict[str, Any]) -> dict[str, Any]:
        nested = config["dflash_config"]
        nested["target_layer_ids"] = [tap + 1 for tap in nested["target_layer_ids"]]
        return config

    with load(draft=edited(tmp_path / "draft", TINY_DRAFT, shift)) as engine:
        assert failed(engine, limits) == {"acceptance"}


def wrong_theta(config: dict[str, Any]) -> dict[str, Any]:
    return config | {"rope_theta": 10000.0}


@slow
def test_rope_theta_of_the_drafter(tmp_path: Path, limits: Limits) -> None:
    """Bug: the drafter's theta is a default instead of its own."""
    with load(draft=edited(tmp_path / "draft", TINY_DRAFT, wrong_theta)) as engine:
        assert failed(engine, limits) == {"acceptance"}


@slow
def test_rope_theta_of_the_decoding_target(limits: Limits, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: decode rotates with another theta than prefill does."""
    chains = buckets.step_chains

    def rotated(pair: Any, *args: Any) -> Any:
        target = pair.target
        rope = replace(target.config.rope, theta=10000.0)
        old = target.weights.rope_PH
        table = rope_table(rope, target.config.head_dim, old.shape[0], old.device)
        weights = target.weights._replace(rope_PH=table)
        return chains(replace(pair, target=replace(target, weights=weights)), *args)

    monkeypatch.setattr(buckets, "step_chains", rotated)
    with load() as engine:
        assert "regret" in failed(engine, limits)


@slow
def test_rope_theta_of_the_whole_target(tmp_path: Path, limits: Limits) -> None:
    """Bug: the target's theta is wrong everywhere. The plain model is then wrong in the same way:
    only another model's judgement shows it, so verify's own `regret` must not be sold as proof.
    The drafter, trained beside the right target, gives it away."""
    with load(edited(tmp_path / "target", TINY_TARGET, wrong_theta)) as engine:
        transcripts = run(engine)
        assert set(decide(report_of(engine, transcripts), limits)) == {"acceptance"}
    with load() as engine:
        assert "regret" in decide(report_of(engine, transcripts), limits)


@pytest.mark.slow
def test_a_state_that_is_not_copied_behind_a_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a row or two behind a hit begin from another state. No default prompt began there, and
    such a fault of a kernel (its window was written before it was read) passed as lossless."""
    target, draft = BUNDLED["tiny-hybrid"]
    failed = []
    for is_broken in (False, True):
        if is_broken:
            monkeypatch.setattr(holdings, "copy_state_", lambda states, source, slot: None)
        with load(target, draft, buckets=(1,)) as engine:
            built = engine.built
            ids = returning(prompt_ids(engine)[0], 256)
            assert [len(prompt) for prompt in ids] == [129, 129, 130, 130]
            asked: Any = {"max_new_tokens": 12, "limits": Limits()}
            (found,) = verify_mode(built, "none torch", ids, [(1, "alone")], **asked)
            failed.append(set(found.failed))
    assert failed == [set(), {"regret", "identical"}]


def test_prompts_that_return_fit_the_context() -> None:
    """Bug: a model of few positions is refused for prompts that nobody asked for."""
    assert [len(prompt) for prompt in returning([5, 6], 130)] == [129, 129]
    assert returning([5, 6], 129) == []
