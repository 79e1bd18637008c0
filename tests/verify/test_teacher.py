"""Teacher forcing against transformers, and the runs that `verify` judges, on a small pair."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from graphengine.api import Engine
from graphengine.decode.prefill import FirstTokens, Prefill, Work
from graphengine.verify import teacher
from graphengine.verify.check import Limits, decode, mixed
from graphengine.verify.run import compare_with_plain, numbers, verify_mode
from graphengine.verify.teacher import teacher_force
from graphengine.verify.told import wrong_end
from tests.support.checkpoints import make_drafter, make_target
from tests.support.dflash_reference import load_target, run_target


def test_mixed_order() -> None:
    """Bug: the mix drops or repeats a prompt, or all end together."""
    order, budgets = mixed([5, 50, 10, 40, 20], 100)
    assert sorted(order) == list(range(5)) and order[:2] == [0, 1]
    assert len(set(budgets)) > 2 and min(budgets) >= 1


@pytest.mark.parametrize("chunk", [1, 3, 7, 256])
def test_teacher_equals_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """Bug: a row's logits judge the wrong token, or a chunk boundary loses or shifts rows."""
    monkeypatch.setattr(teacher, "CHUNK", chunk)
    target = make_target(tmp_path, tie=False)
    model = load_target(target)
    generator = torch.Generator().manual_seed(0)
    with Engine.from_pretrained(target, buckets=(1,), page_size=4, max_model_len=64) as engine:
        loop = engine.built.loop
        for num_prompt, num_output in ((1, 1), (3, 5), (6, 1), (7, 14)):
            ids = torch.randint(0, 500, (num_prompt + num_output,), generator=generator).tolist()
            found = teacher_force(loop, ids[:num_prompt], ids[num_prompt:])
            logprobs = run_target(model, ids).logits.log_softmax(-1)[num_prompt - 1 : -1]
            emitted = torch.tensor(ids[num_prompt:])
            own = logprobs.gather(1, emitted[:, None])[:, 0]
            assert found.best_ids == logprobs.argmax(-1).tolist()
            torch.testing.assert_close(torch.tensor(found.logprob), own, atol=2e-4, rtol=1e-4)
            expected = logprobs.amax(-1) - own
            torch.testing.assert_close(
                torch.tensor(found.regret_nats), expected, atol=2e-4, rtol=1e-4
            )
            assert loop.allocator.num_free == loop.allocator.num_usable


def test_decode_runs_in_the_bucket_asked_for(tmp_path: Path) -> None:
    """Bug: `bucket 4, alone` runs in bucket 1, so padded rows are never tried."""
    target = make_target(tmp_path / "target", tie=False)
    drafter = make_drafter(tmp_path / "drafter", target)
    prompts = [[1, 2], [3, 4, 5], [6], [7, 8, 9, 10], [11]]
    with Engine.from_pretrained(target, drafter, buckets=(1, 2, 4), max_model_len=64) as engine:
        loop: Any = engine.built.loop
        used: list[tuple[int, int]] = []
        queue_step = loop.first._queue_step

        def spy() -> None:
            used.append((loop.first.bucket.size, len(loop.running)))
            queue_step()

        loop.first._queue_step = spy
        outputs = set()
        for bucket, alone in ((4, True), (1, False), (2, False), (None, False)):
            used.clear()
            found = decode(loop, prompts, [9] * 5, (), bucket=bucket, one_by_one=alone)
            outputs.add(str([t.output_ids for t in found]))
            assert all(sum(t.committed) == len(t.output_ids) == 9 for t in found)
            if bucket is not None:
                assert {size for size, _ in used} == {bucket}
                assert max(rows for _, rows in used) == (1 if alone else bucket)
            else:
                assert {size for size, _ in used} >= {4, 1}
        assert len(outputs) == 1 and loop.first.only_bucket is None


@pytest.mark.parametrize("bucket", [2, 3])
def test_who_runs_together_hangs_on_no_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket: int
) -> None:
    """Bug: a newcomer's first token is taken when the device happens to be done, so that another
    run, or another graph mode, has other prompts in one forward, rounds otherwise, and a tie makes
    it differ from the first: FAIL on a busy machine."""
    rng = random.Random(2)
    prompts = [[rng.randrange(1, 99) for _ in range(rng.randrange(2, 30))] for _ in range(14)]
    budgets = [rng.randrange(1, 9) for _ in prompts]
    together: list[list[list[tuple[int, int, int]]]] = []
    queue = Prefill.queue

    def spied(prefill: Prefill, work: Work) -> Any:
        together[-1].append(
            [(prompts.index(r.prompt_ids), piece.begin, piece.end) for r, piece in work]
        )
        return queue(prefill, work)

    monkeypatch.setattr(Prefill, "queue", spied)
    options: Any = {"buckets": (bucket,), "max_model_len": 64, "max_num_batched_tokens": 16}
    with Engine.from_pretrained(make_target(tmp_path, layers=1), **options) as engine:
        for seed in range(6):
            pace = random.Random(seed)
            late = property(lambda _, pace=pace, seed=seed: not seed or pace.random() < 0.3)
            monkeypatch.setattr(FirstTokens, "is_there", late)
            together.append([])
            decode(engine.built.loop, prompts, budgets, ())
        assert not engine.built.loop.is_repeatable
    assert all(found == together[0] for found in together)
    assert max(len(work) for work in together[0]) > 1


def test_modes_are_compared_prompt_by_prompt(tmp_path: Path) -> None:
    """Bug: a graph mode that says other tokens than another one passes; or a mixed cell reports in
    the order in which it ran, so that prompts are judged by other prompts' numbers."""
    target = make_target(tmp_path / "target")
    prompts = [[3] * n for n in (9, 2, 5, 7)]
    cells: Any = [(2, "mixed")]
    options: Any = {"max_new_tokens": 8, "limits": Limits()}
    with Engine.from_pretrained(target, buckets=(2,), max_model_len=64) as engine:
        (first,) = verify_mode(engine.built, "none torch", prompts, cells, **options)
        assert [t.prompt_ids for t in first.transcripts] == prompts
        (same,) = verify_mode(engine.built, "full torch", prompts, cells, first=[first], **options)
        assert not same.failed
        one, *rest = first.transcripts
        other = replace(one, output_ids=[*one.output_ids[:-1], one.output_ids[-1] ^ 1])
        changed = replace(first, transcripts=[other, *rest])
        (found,) = verify_mode(
            engine.built, "full torch", prompts, cells, first=[changed], **options
        )
        assert list(found.failed) == ["modes"]
        (compared,) = compare_with_plain([first], [changed])
        told = numbers([compared])["none_torch"]["bucket_2_mixed"]
        assert (told["num_same_as_plain"], told["num_prompts"]) == (3, 4)


def test_one_text_of_two_prompts(tmp_path: Path) -> None:
    """Bug: a prompt that ends where another one's answer goes on is judged by that one's numbers,
    one token late, since both texts are the same."""
    target = make_target(tmp_path, layers=1)
    options: Any = {"max_new_tokens": 99, "limits": Limits()}
    with Engine.from_pretrained(target, buckets=(1,), max_model_len=16) as engine:
        (answer,) = decode(engine.built.loop, [[3] * 12], [99], ())
        prompts = [[3] * 12, [3] * 12 + answer.output_ids[:1]]
        (found,) = verify_mode(engine.built, "none torch", prompts, [(1, "alone")], **options)
        texts = [[*t.prompt_ids, *t.output_ids] for t in found.transcripts]
        assert texts[0] == texts[1] and found.report.num_tokens == 4 + 3
        assert not found.failed


def test_a_context_that_is_full(tmp_path: Path) -> None:
    """Bug: an answer that ends with the context counts as cut off too early; or the bucket that was
    asked for stays for whoever decodes next, the slot of a state with who judged."""
    target = make_target(tmp_path, layers=1)
    with Engine.from_pretrained(target, buckets=(1, 2), max_model_len=16) as engine:
        loop = engine.built.loop
        (found,) = decode(loop, [[3] * 12], [99], (), bucket=2)
        assert loop.first.only_bucket is None
        assert len(teacher_force(loop, [3] * 12, found.output_ids).logprob) == 4
        assert loop.state_slots.num_free == loop.state_slots.num_usable
    assert (found.budget, len(found.output_ids), found.finish_reason) == (4, 4, "length")
    assert wrong_end(found, (), None) is None
