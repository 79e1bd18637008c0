"""One-line slips of a step that no larger test saw: a constant in place of a config's value, a
guard that only a broken drafter needs, a list that is not emptied."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from graphengine.api import Engine
from graphengine.decode.fallback import Fallback
from graphengine.decode.guards import WINDOW, FallbackWarning
from graphengine.decode.sampling import Controls, Sampling, random_seed, sample_rows
from tests.decode.test_engine import BLOCK, PROMPTS, Pair, force, loop_of
from tests.support.checkpoints import as_speculators, edit_config, make_drafter, make_target
from tests.support.dflash_reference import (
    DraftReference,
    load_target,
    plain_generate,
    run_target,
    speculative_generate,
)

PROMPT = [7, 99, 23, 4]


def test_each_model_has_its_own_eps(tmp_path: Path) -> None:
    """Bug: a norm takes 1e-6, which most files have, for the eps of its own: the target's last one
    gives other tokens, the one over the drafter's context loses acceptance."""
    target = make_target(tmp_path / "target", tie=False, likely_tokens=3)
    drafter = make_drafter(tmp_path / "drafter", target, block_size=5)
    edit_config(target, lambda values: values | {"rms_norm_eps": 0.5})
    edit_config(drafter, lambda values: values | {"rms_norm_eps": 60.0})
    reference = DraftReference.load(drafter, load_target(target))
    tokens, counts = speculative_generate(reference, PROMPT, 60)
    histogram = [counts.count(a) for a in range(reference.block_size)]
    assert sum(histogram[1:]) >= 5, "the pair never agrees, the test would be vacuous"
    with Engine.from_pretrained(target, drafter, buckets=(1,)) as engine:
        (result,) = engine.generate(PROMPT, max_new_tokens=60, ignore_eos=True)
    assert result.token_ids == tokens[:60]
    assert result.metrics.acceptance.steps_by_accepted == histogram


def test_the_head_sees_a_norm_with_its_own_eps(tmp_path: Path) -> None:
    """Bug: as above, where no first choice shows it: the logits are scaled, and drawn from a
    sharper distribution; in a prompt's last row or in a step's."""
    target = make_target(tmp_path / "target", tie=False)
    edit_config(target, lambda values: values | {"rms_norm_eps": 40.0})
    model = load_target(target)
    with Engine.from_pretrained(target, buckets=(1,)) as engine:
        for seed in range(8):
            sampling = Sampling(temperature=1.0, seed=seed)
            controls = Controls.upload([sampling], torch.device("cpu"))
            (result,) = engine.generate(
                PROMPT, max_new_tokens=6, ignore_eos=True, temperature=1.0, seed=seed
            )
            ids = [*PROMPT, *result.token_ids]
            logits = run_target(model, ids).logits
            for place in range(len(PROMPT) - 1, len(ids) - 1):
                drawn = sample_rows(logits[place : place + 1], torch.tensor([place]), controls)
                assert int(drawn) == ids[place + 1], (seed, place)


def test_a_drafter_of_few_ids_that_gives_nan(tmp_path: Path) -> None:
    """Bug: row -1, which NaN drafts, is looked up in the map from the drafter's ids."""
    target = make_target(tmp_path / "target")
    drafter = make_drafter(tmp_path / "drafter", target)
    few = as_speculators(tmp_path / "few", drafter, target, kept=[3, 7, 300])
    path = few / "model.safetensors"
    tensors = load_file(path)
    tensors["norm.weight"].fill_(float("nan"))
    save_file(tensors, path)
    with Engine.from_pretrained(target, few, buckets=(1,)) as engine:
        (result,) = engine.generate(PROMPT, max_new_tokens=20, ignore_eos=True)
    assert result.token_ids == plain_generate(load_target(target), PROMPT, 20)


def test_what_failed_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: requests that ended for want of memory are given out again by the next call, which does
    not know them; or a library without memory for its handle ends the call."""
    small = Pair(tmp_path, max_positions=48)

    def build() -> None:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")

    with small.engine(max_model_len=48, finish_in_plain_decode=True) as engine:
        monkeypatch.setattr(loop_of(engine).fallback, "_build_plain", build)
        force(engine, small, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stream = engine.stream_many(PROMPTS[1:2], max_new_tokens=40, ignore_eos=True)
            chunks = [chunk for chunk, _ in zip(stream, range(99), strict=False)]
            assert chunks[-1].result is not None and chunks[-1].result.finish_reason == "error"
            for count in range(1, len(chunks)):  # dropped behind each chunk, the last but one too
                force(engine, small, 1)
                dropped = engine.stream_many(PROMPTS[1:2], max_new_tokens=40, ignore_eos=True)
                for _ in zip(range(count), dropped, strict=False):
                    pass
                del dropped
                force(engine, small, 1)
                (result,) = engine.generate(PROMPTS[:1], max_new_tokens=4, ignore_eos=True)
                assert result.token_ids == small.plain(PROMPTS[0], 4)
    assert BLOCK > 1


def test_plain_steps_of_a_plain_engine(tmp_path: Path) -> None:
    """Bug: every step of an engine without a drafter counts as one that left speculation, and its
    acceptance length is 0."""
    with Engine.from_pretrained(make_target(tmp_path), buckets=(1,)) as engine:
        (result,) = engine.generate(PROMPT, max_new_tokens=9, ignore_eos=True)
        with pytest.raises(ValueError, match="outside the vocabulary of 512"):
            engine.generate([0, 512])
    metrics = result.metrics
    assert (metrics.num_plain_steps, metrics.acceptance.num_steps) == (0, 8)
    assert metrics.acceptance.mean_acceptance_length == 1.0


def test_numbers_at_the_edge_of_their_types() -> None:
    """Bug: calls without a seed repeat each other; the last seed has no successor, so that a second
    prompt is refused; a top_k past 32 bits is an error of torch's."""
    assert len({random_seed() for _ in range(9)}) == 9
    last = Sampling(temperature=1.0, top_k=1 << 40, seed=2**63 - 1)
    assert last.numbered(1).seed == 0
    assert Controls.upload([last], torch.device("cpu")).top_k_B.tolist() == [2**31 - 1]


def test_the_host_s_memory_can_lack_too() -> None:
    """Bug: an error of memory that is not CUDA's, and may say nothing, ends a generation that could
    do without plain decoding."""

    def build() -> Any:
        raise MemoryError

    lane: Any = SimpleNamespace(config=SimpleNamespace(acceptance_floor=0.0, fallback=False))
    with pytest.warns(FallbackWarning, match="no memory to build"):
        assert Fallback(lane, build).plain_lane() is None


def test_who_was_seen_for_a_whole_window_leaves() -> None:
    """Bug: a request whose own steps are all that was judged goes on with speculation that has
    lost; or one with fewer leaves on what others have shown."""
    requests: list[Any] = [
        SimpleNamespace(
            acceptance=SimpleNamespace(num_steps=n), fallback_reason=None, finish_reason=None
        )
        for n in (WINDOW - 1, WINDOW)
    ]
    config = SimpleNamespace(acceptance_floor=0.0, fallback=True)
    lane: Any = SimpleNamespace(config=config, running=requests, must_drain=False)
    fallback = Fallback(lane, lambda: lane)
    lost: Any = SimpleNamespace(verdict=lambda size: "lost")
    fallback.guard = lost
    fallback._leave_if_lost(1)
    assert [request.fallback_reason for request in requests] == [None, "lost"]
