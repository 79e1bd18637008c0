"""Pools that are used to the last page, and requests and models that do not fit."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from graphengine.api import Engine
from graphengine.checkpoints.hub import TINY_TARGET
from graphengine.cli.main import main
from graphengine.config.bytesize import format_bytes
from graphengine.config.options import Options
from graphengine.decode.prefix_cache import PrefixCache
from graphengine.startup import memory
from graphengine.startup.build import read_configs
from graphengine.startup.memory import MemoryPlan, plan_memory
from graphengine.startup.options import resolve_options
from tests.support.checkpoints import make_drafter, make_target
from tests.support.dflash_reference import load_target, plain_generate

BLOCK = 4
PROMPTS = [[5], [7, 99, 23], [60, 61] * 4, list(range(100, 113)), list(range(9, 30))]
LENGTH = 24


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("pair")
    # Few likely tokens: the random drafter is right now and then, by luck.
    target = make_target(directory / "target", tie=False, likely_tokens=3)
    return target, make_drafter(directory / "draft", target, block_size=BLOCK)


def test_a_lowered_context_leaves_its_tables_to_the_pool() -> None:
    """Bug: where memory lowers the context, the pool is that of the longer one's rope tables and
    page tables, and what the shorter one saves is nobody's."""
    pair, gib = read_configs("qwen3-8b", "qwen3-8b-dflash-b16"), 1 << 30
    config = resolve_options(Options(device="cpu", dtype="bfloat16", buckets=(1, 64)), *pair)
    config = replace(config, device="cuda", max_model_len=40_000)
    device = memory.DeviceMemory(28 * gib, 28 * gib, 132)
    plan = plan_memory(config, *pair, device, length_is_explicit=False)
    assert plan.budget_bytes is not None and plan.max_model_len < config.max_model_len
    left = plan.budget_bytes - plan.fixed_bytes - plan.kv_pool_bytes
    assert 0 <= left < plan.kv_page_bytes


def test_two_positions_are_the_fewest() -> None:
    """Bug: a pool that holds a prompt's token and an answer's is refused, or the longest request
    that fits is told as of no tokens."""
    target, _ = read_configs("qwen3-8b", None)
    config = resolve_options(Options(device="cpu", dtype="bfloat16", page_size=1), target, None)
    on_gpu = replace(config, device="cuda")
    device = memory.DeviceMemory(80 << 30, 80 << 30, 132)
    page = plan_memory(on_gpu, target, None, device, length_is_explicit=False).kv_page_bytes
    small = replace(on_gpu, kv_cache_memory=4 * page)  # the null page, and one behind the last
    plan = plan_memory(small, target, None, device, length_is_explicit=False)
    assert plan.max_model_len == 2
    with pytest.raises(ValueError, match=r"the longest that fits is 2 tokens$"):
        plan_memory(small, target, None, device, length_is_explicit=True)


def test_what_is_left_is_never_less_than_nothing() -> None:
    """Bug: a pool beside weights that fill the GPU is refused with so many bytes below zero."""
    target, _ = read_configs("qwen3-8b", None)
    config = resolve_options(Options(device="cpu", dtype="bfloat16"), target, None)
    asked = replace(config, device="cuda", kv_cache_memory=1 << 30)
    device = memory.DeviceMemory(12 << 30, 80 << 30, 132)
    told = r"^--kv-cache-memory 1.00 GiB: 0 B are left of 4.00 GiB after 1\d.\d GiB for weights"
    with pytest.raises(ValueError, match=told):
        plan_memory(asked, target, None, device, length_is_explicit=True)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_full_pool_runs_a_long_mixed_load(pair: tuple[Path, Path], backend: Any) -> None:
    """Bug: with every page taken a step fails, a request starves, or two share a page."""
    model = load_target(pair[0])
    truth = [plain_generate(model, prompt, LENGTH) for prompt in PROMPTS]
    options: dict[str, Any] = {
        "buckets": (1, 2, 6),
        "page_size": 2,
        "max_model_len": 48,
        "device": "cpu",
    }
    with Engine.from_pretrained(
        *pair, buckets=(1,), page_size=2, max_model_len=48, device="cpu"
    ) as probe:
        page, one = probe.memory_plan.kv_page_bytes, probe.memory_plan.max_request_pages
    pages = 2 * one + 1  # two of the longest and the null page; six rows
    with Engine.from_pretrained(
        *pair, attention_backend=backend, kv_cache_memory=pages * page, **options
    ) as engine:
        assert engine.memory_plan.num_pages == pages
        loop, rng = engine.built.loop, random.Random(0)
        jobs = []
        for _ in range(70):
            which, budget = rng.randrange(len(PROMPTS)), rng.randint(1, LENGTH)
            request = loop.submit(list(PROMPTS[which]), budget, frozenset())
            jobs.append((request, truth[which][:budget]))
        fullest = loop.allocator.num_usable
        num_widths = set()
        with torch.no_grad():
            while loop.has_work:
                loop.admit()
                fullest = min(fullest, loop.allocator.num_free)
                num_widths.add(len(loop.running))
                loop.launch()
                loop.collect()
        for request, expected in jobs:
            assert request.output_ids == expected
        assert fullest == 0, "the pool was never exhausted exactly; change the seed"
        assert len(num_widths) > 2
        assert loop.allocator.num_free == loop.allocator.num_usable


def test_waiting_requests_start_in_order(pair: tuple[Path, Path]) -> None:
    """Bug: a small request overtakes a large one that waits for pages, which then never starts."""
    options: dict[str, Any] = {
        "buckets": (1, 4),
        "page_size": 2,
        "max_model_len": 48,
        "device": "cpu",
    }
    with Engine.from_pretrained(
        *pair, buckets=(1,), page_size=2, max_model_len=48, device="cpu"
    ) as probe:
        page, one = probe.memory_plan.kv_page_bytes, probe.memory_plan.max_request_pages
    with Engine.from_pretrained(*pair, kv_cache_memory=(one + 5) * page, **options) as engine:
        loop = engine.built.loop
        budgets = [3, 40, 1, 47, 2, 2, 40, 5, 1]
        requests = [loop.submit([9], budget, frozenset()) for budget in budgets]
        started = []
        with torch.no_grad():
            while loop.has_work:
                started += [output.request.request_id for output in loop.admit()]
                loop.launch()
                loop.collect()
        assert started == [request.request_id for request in requests]
        assert [len(request.output_ids) for request in requests] == budgets


def test_too_large_for_the_pool_is_refused(pair: tuple[Path, Path]) -> None:
    """Bug: a request that no empty pool can hold waits for ever, and all behind it; or it is told
    what others leave of the pool as all of it."""
    with Engine.from_pretrained(
        *pair, buckets=(1,), page_size=2, max_model_len=48, device="cpu"
    ) as engine:
        loop = engine.built.loop
        allocator = loop.holdings.allocator = PrefixCache(9, 2)
        others = allocator.allocate(3)
        message = r"1 prompt and 40 new tokens need 23 pages of 2 tokens, the pool has 8; .*memory"
        with pytest.raises(ValueError, match=message):
            loop.submit([3], 40, frozenset())
        allocator.free(others)
        assert not loop.has_work
        assert len(engine.generate([3], max_new_tokens=11, ignore_eos=True)[0].token_ids) == 11


def test_more_than_the_machine_has_is_refused(pair: tuple[Path, Path]) -> None:
    """Bug: on the CPU nothing limits the buffers, and the system kills the process without a
    word."""
    args = ["run", str(pair[0]), "--draft", str(pair[1]), "--prompt", "hi", "--device", "cpu"]
    refused = CliRunner().invoke(main, [*args, "--bucket", "100000000"])
    assert refused.exit_code == 2
    message = " ".join(refused.stderr.split())
    assert "--bucket 100000000 needs" in message and "lower it or the context" in message


def test_weights_that_the_machine_cannot_hold(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: `bench qwen3-8b` on a small machine is told to lower --bucket 1, and the context,
    which it does not have; no such thing makes room for the weights."""
    monkeypatch.setattr("graphengine.startup.memory.host_memory_bytes", lambda: 1000)
    with pytest.raises(ValueError, match=r"1000 B; take a smaller model or dtype"):
        Engine.from_pretrained(*pair, buckets=(1,), device="cpu")


def test_logits_of_a_step_count_on_the_cpu_too(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: buffers and pool fit, a step's logits do not: the system kills the process after it has
    printed its plan."""
    options: dict[str, Any] = {"buckets": (64,), "device": "cpu", "max_model_len": 64}
    with Engine.from_pretrained(*pair, **options) as engine:
        plan, config = engine.memory_plan, engine.built.target
    rows = 64 * BLOCK
    assert plan.activation_bytes > rows * config.vocab_size * 4
    total = plan.fixed_bytes + plan.kv_pool_bytes
    monkeypatch.setattr(memory, "host_memory_bytes", lambda: total - plan.activation_bytes)
    with pytest.raises(ValueError, match=r"--bucket 64 needs .* lower it"):
        Engine.from_pretrained(*pair, **options)
    monkeypatch.setattr(memory, "host_memory_bytes", lambda: total)
    Engine.from_pretrained(*pair, **options).close()


def test_weights_count_on_the_cpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: weights alone are more than the machine has, or are once bf16 is widened to float32, and
    loading ends in the system's killer instead of one line; or that has only the target's."""
    monkeypatch.setattr(memory, "host_memory_bytes", lambda: 1 << 40)
    target, draft = read_configs("qwen3-8b", "qwen3-8b-dflash-b16")

    def plan(dtype: Any) -> MemoryPlan:
        asked = Options(device="cpu", dtype=dtype, max_model_len=512, buckets=(1,))
        config = resolve_options(asked, target, draft)
        return plan_memory(config, target, draft, None, length_is_explicit=True)

    roomy = plan("float32")
    sizes = roomy.fixed_bytes + roomy.kv_pool_bytes, (8_190_735_360 + 1_090_570_112) * 4
    needed, weights = map(format_bytes, sizes)
    monkeypatch.setattr(memory, "host_memory_bytes", lambda: 24 << 30)
    plan("bfloat16")
    text = f"needs {needed}, {weights} of them for weights in float32, .* smaller model"
    with pytest.raises(ValueError, match=text):
        plan("float32")


def test_the_json_of_a_plan() -> None:
    """Bug: what follows from a plan's parts, as how many requests its pool holds, is in its lines
    alone."""
    target, _ = read_configs(TINY_TARGET, None)
    config = resolve_options(Options(device="cpu", max_model_len=64, buckets=(3,)), target, None)
    plan = plan_memory(config, target, None, None, length_is_explicit=True)
    sums = ("fixed_bytes", "kv_pool_bytes", "num_full_requests")
    assert plan.to_json() == asdict(plan) | {name: getattr(plan, name) for name in sums}
    assert plan.num_full_requests == 3


def test_context_cap(pair: tuple[Path, Path]) -> None:
    """Bug: a drafting run plans positions that the models do not have, or a plain one loses some
    of its window."""
    for draft, cap in ((pair[1], 512 - BLOCK), (None, 512)):
        with Engine.from_pretrained(pair[0], draft, buckets=(1,), device="cpu") as engine:
            assert engine.memory_plan.max_model_len == engine.config.max_model_len == cap


def test_run_prints_the_plan(pair: tuple[Path, Path]) -> None:
    """Bug: the option does not reach the pool, or the plan that is shown is not the one in use."""
    args = ["run", str(pair[0]), "--draft", str(pair[1]), "--prompt", "hi", "--max-new-tokens", "4"]
    args += ["--bucket", "2", "--max-model-len", "64", "--device", "cpu"]
    result = CliRunner().invoke(main, [*args, "--kv-cache-memory", "128KiB", "--json"])
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    plan = values["memory_plan"]
    assert values["config"]["kv_cache_memory"] == 128 << 10
    assert plan["kv_pool_bytes"] == values["startup"]["kv_pool_bytes"] <= 128 << 10
    assert plan["num_pages"] == values["startup"]["num_pages"]
    assert "memory plan: target weight" in result.stderr
    assert f"in {plan['num_pages']} pages of 16 tokens" in result.stderr
    for value, code, message in (("1KiB", 2, "raise --kv-cache-memory"), ("x", 2, "2GiB")):
        refused = CliRunner().invoke(main, [*args, "--kv-cache-memory", value])
        assert refused.exit_code == code
        assert message in " ".join(refused.stderr.split())
