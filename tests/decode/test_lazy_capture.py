"""Buckets built at their first use: the same tokens, and nothing of the running requests lost."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from graphengine.api import Engine
from graphengine.checkpoints.hub import TINY_TARGET
from graphengine.cli.main import main
from graphengine.config.options import Options
from graphengine.decode import buckets
from graphengine.startup.build import read_configs
from graphengine.startup.options import resolve_options
from tests.support.checkpoints import make_drafter, make_target

PROMPTS = [[7, 99, 23], list(range(100, 117)), [5], [250, 1, 2, 3], [60, 61] * 5]
BACKENDS = ["torch", "triton"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("pair")
    # Few likely tokens: the random drafter is right now and then, so rows advance differently.
    target = make_target(directory / "target", tie=False, likely_tokens=3)
    return target, make_drafter(directory / "drafter", target, block_size=4)


def engine(pair: tuple[Path, Path], **options: Any) -> Engine:
    options = {"buckets": (1, 2, 4), "page_size": 4, "max_model_len": 96} | options
    return Engine.from_pretrained(*pair, **options)


def ids(found: Engine, prompts: list[list[int]], count: int = 20) -> list[list[int]]:
    results = found.generate(prompts, max_new_tokens=count, ignore_eos=True)
    return [result.token_ids for result in results]


def built(found: Engine) -> list[int]:
    return list(found.built.loop.first.buckets)


@pytest.fixture(scope="module", params=BACKENDS)
def truth(pair: tuple[Path, Path], request: pytest.FixtureRequest) -> Iterator[tuple[str, Any]]:
    with engine(pair, attention_backend=request.param) as all_built:
        assert built(all_built) == [1, 2, 4]
        assert all_built.startup.buckets == (1, 2, 4)
        yield request.param, {tuple(p): ids(all_built, [p])[0] for p in PROMPTS}


@pytest.mark.parametrize(("first_batch", "first"), [(1, 1), (2, 2), (3, 4), (9, 4)])
def test_only_the_first_batch_is_built_ahead(
    pair: tuple[Path, Path], first_batch: int, first: int
) -> None:
    """Bug: a start for one prompt pays for buckets that nobody has asked for, or the first request
    waits for its own."""
    with engine(pair, lazy_capture=True, first_batch=first_batch) as lazy:
        assert built(lazy) == [first]
        assert lazy.startup.buckets == (first,)
        loop = lazy.built.loop
        ids(lazy, PROMPTS[: min(first_batch, first)], count=1)
        assert not loop.first.built_late_s


def test_larger_and_smaller_later(pair: tuple[Path, Path], truth: tuple[str, Any]) -> None:
    """Bug: a bucket built later has buffers, pages or a mask of the earlier one; rows that still
    run when the batch shrinks into a new bucket lose their state as the buffers are cleared."""
    backend, expected = truth
    with engine(pair, attention_backend=backend, lazy_capture=True) as lazy:
        assert ids(lazy, PROMPTS[:1]) == [expected[tuple(PROMPTS[0])]]
        assert built(lazy) == [1]
        # Three of different lengths in bucket 4, then two, then one; the fourth waits for no one.
        loop = lazy.built.loop
        requests = [
            loop.submit(prompt, count, ())
            for prompt, count in zip(PROMPTS, (20, 9, 5, 20, 13), strict=True)
        ]
        while loop.has_work:
            loop.admit()
            loop.launch()
            loop.collect()
        for prompt, request in zip(PROMPTS, requests, strict=True):
            assert request.output_ids == expected[tuple(prompt)][: len(request.output_ids)]
        assert [len(r.output_ids) for r in requests] == [20, 9, 5, 20, 13]
        assert built(lazy) == [1, 2, 4]
        assert sorted(loop.first.built_late_s) == [2, 4]
        assert loop.allocator.num_free == loop.allocator.num_usable
        assert ids(lazy, PROMPTS) == [expected[tuple(p)] for p in PROMPTS]


def test_more_requests_than_the_built_bucket(pair: tuple[Path, Path]) -> None:
    """Bug: admission counts the buckets that exist instead of those that may be built, and a batch
    runs one by one; or the clock is told as the seconds that it waited."""
    with engine(pair, lazy_capture=True) as lazy:
        began = time.perf_counter()
        ids(lazy, PROMPTS[:4], count=4)
        waited = sum(lazy.built.loop.first.built_late_s.values())
        assert {1, 4} <= set(built(lazy)) and 0 < waited < time.perf_counter() - began


def test_draws_of_simulated_acceptance_go_on(pair: tuple[Path, Path]) -> None:
    """Bug: warming a bucket in the middle of a run walks on in the table of draws, so that lazy and
    eager runs of one seed differ."""
    outcomes = []
    for lazy_capture in (False, True):
        with engine(pair, simulate_acceptance=2.5, lazy_capture=lazy_capture) as simulated:
            results = simulated.generate(PROMPTS[:1], max_new_tokens=15, ignore_eos=True)
            results += simulated.generate(PROMPTS[:2], max_new_tokens=15, ignore_eos=True)
            outcomes.append([r.metrics.acceptance.steps_by_accepted for r in results])
    assert outcomes[0] == outcomes[1]


def test_warming_up_in_the_middle_of_a_run(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a bucket that is built late runs on the rows of the batch before: it writes into pages
    that prompts own by now, or walks on in the draws of a simulated acceptance."""
    monkeypatch.setattr(buckets, "compile_segments", tuple)  # runs ahead, at once
    prompts = [list(range(n, n + 70)) for n in (100, 200)]
    for options in ({}, {"simulate_acceptance": 2.5}):
        outcomes = []
        for lazy_capture in (False, True):
            with engine(pair, compile=True, lazy_capture=lazy_capture, **options) as found:
                first = ids(found, PROMPTS[2:3], count=40)
                results = found.generate(prompts, max_new_tokens=15, ignore_eos=True)
                histograms = [r.metrics.acceptance.steps_by_accepted for r in results]
                outcomes.append((first, [r.token_ids for r in results], histograms))
        assert outcomes[0] == outcomes[1]


def test_a_build_that_fails_leaves_the_engine_usable(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: Ctrl-C while a bucket is built leaves a half-built one, pages, or rows behind."""
    with engine(pair, lazy_capture=True) as lazy:
        loop: Any = lazy.built.loop
        expected = ids(lazy, PROMPTS[:1])

        def interrupted(size: int) -> Any:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(loop.first.builder, "build", interrupted)
            with pytest.raises(KeyboardInterrupt):
                ids(lazy, PROMPTS[:3])
        assert built(lazy) == [1]
        assert not loop.has_work
        assert loop.allocator.num_free == loop.allocator.num_usable
        assert ids(lazy, PROMPTS[:1]) == expected
        assert ids(lazy, PROMPTS[:3])[0] == expected[0]


@pytest.mark.parametrize(
    ("args", "num_prompts", "ahead", "late"),
    [
        ([], 1, [1], []),
        ([], 2, [1, 2, 4], []),
        (["--no-lazy-capture"], 1, [1, 2, 4], []),
        (["--lazy-capture"], 3, [4], []),
        (["--lazy-capture"], 5, [4], ["1"]),
    ],
)
def test_command_line(
    pair: tuple[Path, Path], args: list[str], num_prompts: int, ahead: list[int], late: list[str]
) -> None:
    """Bug: one answer waits for buckets that it never uses, or a batch stops half-way."""
    prompts = [text for _ in range(num_prompts) for text in ("--prompt", "a b")]
    done = CliRunner().invoke(
        main,
        ["run", str(pair[0]), "--draft", str(pair[1]), "--bucket", "1,2,4", "--device", "cpu"]
        + ["--max-new-tokens", "9", "--ignore-eos", "--json", *prompts, *args],
    )
    assert done.exit_code == 0, done.output
    startup = json.loads(done.stdout)["startup"]
    assert startup["buckets_built_ahead"] == ahead
    assert list(startup["buckets_built_late_s"]) == late


def test_first_batch_is_checked() -> None:
    """Bug: a first batch of nothing picks a bucket by accident."""
    target, _ = read_configs(TINY_TARGET, None)
    with pytest.raises(ValueError, match="first_batch is 0"):
        resolve_options(Options(device="cpu", first_batch=0), target, None)


@pytest.mark.gpu
@pytest.mark.parametrize("graph_mode", ["none", "piecewise", "full"])
@pytest.mark.parametrize("backend", ["flashinfer", "triton"])
def test_a_later_larger_capture(tmp_path: Path, graph_mode: Any, backend: Any) -> None:
    """Bug: a larger bucket captured after a smaller one shares pool memory that the smaller one's
    graphs still read, so that one of the two gives other tokens afterwards."""
    target = make_target(
        tmp_path / "target",
        layers=3,
        hidden=128,
        heads=4,
        kv_heads=2,
        head_dim=64,
        intermediate=256,
        tie=False,
        likely_tokens=4,
        dtype="bfloat16",
    )
    drafter = make_drafter(
        tmp_path / "drafter", target, taps=(0, 2), block_size=8, dtype="bfloat16"
    )
    options: Any = {
        "buckets": (1, 3, 8),
        "max_model_len": 480,
        "graph_mode": graph_mode,
        "attention_backend": backend,
        "device": "cuda",
        "fallback": False,
    }
    prompts = [list(range(n, 3 * n + 4)) for n in range(1, 9)]
    batches = [prompts[:1], prompts, prompts[:1], prompts[:3], prompts, prompts[:1]]
    outcomes = []
    for lazy_capture in (False, True):
        with Engine.from_pretrained(target, drafter, lazy_capture=lazy_capture, **options) as found:
            outcomes.append([ids(found, batch, count=40) for batch in batches])
            if lazy_capture:
                assert list(found.built.loop.first.buckets) == [1, 3, 8]
    assert outcomes[0] == outcomes[1]
