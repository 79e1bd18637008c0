"""The memory plan against what is really allocated."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphengine.api import Engine
from graphengine.config.bytesize import format_bytes
from graphengine.config.draft import AttentionRule, DraftConfig
from graphengine.config.engine import EngineConfig
from graphengine.config.options import Options
from graphengine.decode.kvcache import pages_for
from graphengine.decode.prefill import SCORED_ROWS
from graphengine.drafters.dflash import DFlash
from graphengine.startup.build import read_configs
from graphengine.startup.memory import GPU_MARGIN_BYTES, DeviceMemory, MemoryPlan, plan_memory
from graphengine.startup.options import resolve_options
from graphengine.startup.workspace import (
    FLASHINFER_WRAPPER_BYTES,
    GRAPH_BYTES,
    SAMPLED_ROW_BYTES,
    STEP_GRAPH_BYTES,
)
from tests.support.checkpoints import as_speculators, make_drafter, make_target
from tests.support.examples import examples

GIB = 1 << 30
BLOCK = 4
H200 = DeviceMemory(140 * GIB, 141 * GIB, 132)
ON_GPU = EngineConfig(
    device="cuda",
    dtype="bfloat16",
    buckets=(1, 8, 16),
    graph_mode="piecewise",
    compile=True,
    attention_backend="flashinfer",
    prefill_attention_backend="flashinfer",
    page_size=16,
    max_model_len=40944,
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("pair")
    # Few likely tokens: the random drafter is right now and then, by luck.
    target = make_target(directory / "target", tie=False, likely_tokens=3)
    return target, make_drafter(directory / "draft", target, block_size=BLOCK)


def plan_8b(
    config: EngineConfig = ON_GPU, memory: DeviceMemory = H200, **options: Any
) -> MemoryPlan:
    target, draft = read_configs("qwen3-8b", "qwen3-8b-dflash-b16")
    options = {"length_is_explicit": False} | options
    return plan_memory(config, target, draft, memory, **options)


def size(*tensors: torch.Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


# --- the plan is what is allocated ---


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("quantization", ["none", "fp8", "fp8-dynamic"])
def test_plan_equals_what_is_built(
    tmp_path: Path, tie: bool, bias: bool, quantization: str
) -> None:
    """Bug: a new weight, copy or buffer is forgotten in the plan, so the pool takes its memory."""
    target = make_target(tmp_path / "t", tie=tie, bias=bias, layers=3)
    draft = make_drafter(tmp_path / "d", target, bias=bias, taps=(0, 2), block_size=BLOCK)
    options: dict[str, Any] = {
        "draft_quantization": quantization,
        "max_model_len": 64,
        "device": "cpu",
    }
    with Engine.from_pretrained(target, draft, buckets=(1, 3), page_size=4, **options) as engine:
        plan, loop = engine.memory_plan, engine.built.loop
        weights = plan.target_weight_bytes + plan.draft_weight_bytes + plan.quantized_weight_bytes
        assert weights + plan.rope_table_bytes == engine.startup.weight_bytes
        assert (plan.quantized_weight_bytes > 0) == (quantization != "none")
        assert plan.step_buffer_bytes == loop.first.builder.arena.num_bytes
        drafter = loop.prefill.pair.proposer
        assert isinstance(drafter, DFlash)
        pools = [loop.prefill.pair.target.kv_pool, drafter.kv_pool]
        assert plan.kv_pool_bytes == size(*pools)
        assert plan.num_pages == loop.allocator.num_pages == pools[0].shape[2]
        assert plan.max_model_len == engine.config.max_model_len == 64


def test_plan_of_blocks_of_their_own(pair: tuple[Path, Path]) -> None:
    """Bug: buffers or pages are planned for another block than the longest, or the kernel's partial
    results for another block than their bucket's."""
    with Engine.from_pretrained(
        *pair,
        buckets=(4, 1),
        num_speculative_tokens=(1, 2),
        max_model_len=60,
        page_size=4,
        device="cpu",
        attention_backend="triton",
    ) as engine:
        plan: Any = engine.memory_plan
        loop: Any = engine.built.loop
        assert loop.block == 3 and plan.max_request_pages == pages_for(60 + 3, 4)
        assert plan.step_buffer_bytes == loop.first.builder.arena.num_bytes
        spaces = [
            attention._workspace
            for bucket in loop.first.buckets.values()
            for attention in bucket.attentions
        ]
        assert plan.attention_workspace_bytes == sum(size(*space) for space in spaces) > 0


@pytest.mark.parametrize("kept", [None, [3, 7, 300]])
def test_tables_of_the_drafters_own(
    tmp_path: Path, pair: tuple[Path, Path], kept: list[int] | None
) -> None:
    """Bug: a head of the drafter's own, or its rounded copy, is planned as large as the target's;
    or the buffers that decode plainly are not planned."""
    z_lab = make_drafter(tmp_path / "z", pair[0], own_embedding=True, own_head=True)
    draft = as_speculators(tmp_path / "s", z_lab, pair[0], kept=kept)
    with Engine.from_pretrained(
        pair[0],
        draft,
        buckets=(1, 3),
        max_model_len=64,
        device="cpu",
        draft_quantization="fp8",
        prepare_plain_decode=True,
    ) as engine:
        plan, loop = engine.memory_plan, engine.built.loop
        weights = plan.target_weight_bytes + plan.draft_weight_bytes + plan.quantized_weight_bytes
        assert weights + plan.rope_table_bytes == engine.startup.weight_bytes
        assert loop.fallback is not None and loop.fallback.plain is not None
        assert plan.plain_decode_bytes >= loop.fallback.plain.builder.arena.num_bytes > 0


def test_budget_is_what_may_be_filled_and_is_free() -> None:
    """Bug: the share that must stay free is taken of the free memory: other processes' use lets
    more be filled."""
    config = replace(ON_GPU, gpu_memory_utilization=0.75)
    plan = plan_8b(config, DeviceMemory(120 * GIB, 160 * GIB, 132))
    assert plan.budget_bytes == 80 * GIB


def test_published_sizes() -> None:
    """Bug: a factor (bytes, layers, taps) is wrong; sizes are those of the published files."""
    plan = plan_8b()
    assert plan.target_weight_bytes == pytest.approx(16.38e9, rel=0.01)
    # 1.95 GiB as published, and a packed copy of every layer's k_proj and v_proj.
    assert plan.draft_weight_bytes == pytest.approx(1.95 * GIB + 5 * 2 * 1024 * 4096 * 2, rel=0.01)
    assert plan.kv_page_bytes == 16 * (36 + 5) * 2 * 8 * 128 * 2
    assert plan.num_pages == 1 + 16 * (40944 + 16) // 16


@pytest.mark.parametrize("field", ["buckets", "draft_quantization", "page_size", "prefill_chunk"])
def test_larger_needs_more(field: str) -> None:
    """Bug: an option that costs memory does not show in the plan."""
    larger: dict[str, Any] = {
        "buckets": (1, 8, 16, 64),
        "draft_quantization": "fp8",
        "page_size": 8,  # a longer page table
        "prefill_chunk": 4096,
    }
    config = replace(ON_GPU, **{field: larger[field]})
    assert plan_8b(config).fixed_bytes > plan_8b().fixed_bytes


def test_chunks_behind_a_long_text_are_in_the_plan() -> None:
    """Bug: partial results of split keys, or what each captured chunk keeps, are in nobody's
    budget."""
    config = replace(ON_GPU, graph_mode="full", prefill_sizes=(16, 2048))
    one, more = plan_8b(config), plan_8b(replace(config, far_prefill_sizes=(128, 256)))
    partials = 4 * 128 * 32 * (128 + 1) * 4  # of 4 splits of 128 rows, or 2 of 256
    assert more.attention_workspace_bytes - one.attention_workspace_bytes == 2 * partials
    kept = 384 * (5 * 4096 + 32 * 128) * 2 + 2 * STEP_GRAPH_BYTES
    assert more.prefill_bytes - one.prefill_bytes >= kept


def test_what_no_prompt_runs_eagerly_is_not_in_the_plan() -> None:
    """Bug: half a GiB stays empty where every chunk is of a fixed size: taps of a chunk that each
    keeps for itself, and copies that our kernel does not make."""
    ours = replace(ON_GPU, prefill_attention_backend="triton", prefill_sizes=(16, 2048))
    plans = [plan_8b(replace(ours, draft_quantization=q)) for q in ("fp8", "fp8-dynamic")]
    assert plans[0].prefill_bytes == plans[1].prefill_bytes
    eager = replace(ours, prefill_attention_backend="flashinfer")
    taps = (ON_GPU.prefill_chunk - SCORED_ROWS) * 5 * 4096 * 2
    assert plan_8b(eager).prefill_bytes - plan_8b(ours).prefill_bytes == taps


def test_rounded_activations_are_in_the_plan() -> None:
    """Bug: three fp32 copies of a chunk's taps, more than a layer of the target takes, are not."""
    plans = [plan_8b(replace(ON_GPU, draft_quantization=q)) for q in ("fp8", "fp8-dynamic")]
    few, many = (plan.prefill_bytes - plan_8b().prefill_bytes for plan in plans)
    assert few == 0 < many
    rows, taps, copies = ON_GPU.prefill_chunk, 5 * 4096, 3
    assert plans[1].prefill_bytes >= rows * taps * (copies * 4 + 2)
    assert plans[0].quantized_weight_bytes == plans[1].quantized_weight_bytes > 0
    assert plans[1].activation_bytes > plans[0].activation_bytes


@settings(max_examples=examples(60), deadline=None)
@given(
    free=st.integers(0, 200),
    used=st.integers(0, 100),
    utilization=st.floats(0.05, 1.0),
    buckets=st.sets(st.integers(1, 64), min_size=1, max_size=3),
    length=st.integers(2, 40944),
    explicit=st.booleans(),
    asked=st.none() | st.integers(1, 150 * GIB),
    mode=st.sampled_from(["none", "piecewise", "full"]),
    backend=st.sampled_from(["flashinfer", "triton"]),
)
def test_plan_never_exceeds_its_budget(
    free: int,
    used: int,
    utilization: float,
    buckets: set[int],
    length: int,
    explicit: bool,
    asked: int | None,
    mode: Any,
    backend: Any,
) -> None:
    """Bug: rounding, a shortened context or an explicit pool plans more than there is, or a pool
    in which the longest request can never start."""
    config = replace(
        ON_GPU,
        buckets=tuple(sorted(buckets)),
        gpu_memory_utilization=utilization,
        max_model_len=length,
        kv_cache_memory=asked,
        graph_mode=mode,
        attention_backend=backend,
    )
    memory = DeviceMemory(free * GIB, (free + used) * GIB, 132)
    try:
        plan = plan_8b(config, memory, length_is_explicit=explicit)
    except ValueError:
        return
    assert plan.budget_bytes is not None
    assert plan.fixed_bytes + plan.kv_pool_bytes <= plan.budget_bytes
    assert plan.max_request_pages + 1 <= plan.num_pages
    assert plan.num_pages <= 1 + max(buckets) * plan.max_request_pages
    assert plan.max_model_len == length or (not explicit and 2 <= plan.max_model_len < length)
    if asked is not None:
        assert plan.kv_pool_bytes <= asked
    assert plan.margin_bytes == GPU_MARGIN_BYTES


@pytest.mark.parametrize(
    ("options", "page_size"),
    [
        ({"attention_backend": "triton"}, 128),
        ({"attention_backend": "torch"}, 16),
        ({"attention_backend": "triton", "page_size": 16}, 16),
    ],
)
def test_page_size_follows_the_attention(options: Any, page_size: int) -> None:
    """Bug: our attention runs with pages that do not hold a tile, or a user's size is ignored."""
    pair = read_configs("qwen3-8b", "qwen3-8b-dflash-b16")
    assert resolve_options(Options(device="cpu", **options), *pair).page_size == page_size


@pytest.mark.parametrize("page_size", [4, 16, 128])
def test_pools_of_almost_one_request(page_size: int) -> None:
    """Bug: the null page, or the block behind the last token, is forgotten where the pool is small:
    a page too few for the longest request, or a context shorter than what fits."""
    config = replace(ON_GPU, page_size=page_size)
    rows = 16
    full = plan_8b(config)
    for num_pages in (2, 5, 40, full.max_request_pages, full.max_request_pages + 1):
        for spare in (0, full.kv_page_bytes - 1):
            asked = replace(config, kv_cache_memory=num_pages * full.kv_page_bytes + spare)
            fits = num_pages > full.max_request_pages
            if not fits:
                with pytest.raises(ValueError, match="a context of"):
                    plan_8b(asked, length_is_explicit=True)
            longest = (num_pages - 1) * page_size - rows
            if longest < 2:
                with pytest.raises(ValueError, match="fits is 0 tokens"):
                    plan_8b(asked)
                continue
            plan = plan_8b(asked, length_is_explicit=fits)
            assert plan.num_pages == num_pages == plan.max_request_pages + 1
            assert plan.max_model_len == (config.max_model_len if fits else longest)
    assert full.budget_bytes is not None
    exactly = full.budget_bytes - full.fixed_bytes
    assert plan_8b(replace(config, kv_cache_memory=exactly)).num_pages == full.num_pages
    with pytest.raises(ValueError, match="--kv-cache-memory"):
        plan_8b(replace(config, kv_cache_memory=exactly + 1))


def test_refusals_name_the_numbers() -> None:
    """Bug: a model that cannot fit is refused after it was read, or without saying by how much; or
    pages of 16 are advised to who has them."""
    small = DeviceMemory(24 * GIB, 24 * GIB, 128)
    with pytest.raises(ValueError, match=r"context of 40944 tokens needs 6.41 GiB .* the longest"):
        plan_8b(memory=small, length_is_explicit=True)
    tiny = DeviceMemory(16 * GIB, 16 * GIB, 128)
    with pytest.raises(ValueError, match=r"weights and work space.*fits is 0 tokens; free memory"):
        plan_8b(memory=tiny)
    with pytest.raises(ValueError, match=r"--kv-cache-memory 200 GiB: 10\d GiB are left of 126"):
        plan_8b(replace(ON_GPU, kv_cache_memory=200 * GIB))
    with pytest.raises(ValueError, match=r"fits is 0 tokens; raise --kv-cache-memory or.+-size$"):
        plan_8b(replace(ON_GPU, kv_cache_memory=1 << 20))
    wasteful = replace(ON_GPU, page_size=128, max_model_len=300, kv_cache_memory=64 << 20)
    needs = r"needs 82.0 MiB .* 64.0 MiB are left .* fits is 240 tokens; .* --page-size 16"
    with pytest.raises(ValueError, match=needs):
        plan_8b(wasteful, length_is_explicit=True)
    assert plan_8b(replace(wasteful, page_size=16), length_is_explicit=True).max_model_len == 300
    target, draft = read_configs("qwen3-8b", "qwen3-8b-dflash-b16")
    absurd = replace(target, hidden_size=1 << 62)
    with pytest.raises(ValueError, match="impossible size"):
        plan_memory(ON_GPU, absurd, draft, H200, length_is_explicit=False)


def test_plan_text_adds_up() -> None:
    """Bug: a part is in the sum and not in the text, so the numbers a user sees do not add up."""
    plan = plan_8b()
    text = " ".join(plan.lines())
    for name, value in asdict(plan).items():
        if name.endswith("_bytes") and value and name != "kv_page_bytes":
            assert format_bytes(value) in text, name
    assert f"; {format_bytes(plan.fixed_bytes + plan.kv_pool_bytes)} of " in text
    assert "quantized" not in text
    roomy = plan_8b(replace(ON_GPU, max_model_len=300))  # the null page is nobody's
    assert roomy.num_full_requests == max(ON_GPU.buckets)
    values = plan.to_json()
    parts = ["target_weight", "draft_weight", "quantized_weight", "rope_table", "recurrent_state"]
    parts += ["step_buffer", "prefill", "attention_workspace", "activation", "plain_decode"]
    parts += ["margin"]
    assert values["fixed_bytes"] == sum(values[f"{part}_bytes"] for part in parts)
    assert set(parts) | {"budget", "kv_page", "kv_pool", "fixed"} == {
        name.removesuffix("_bytes") for name in values if name.endswith("_bytes")
    }


@pytest.mark.parametrize("wish", ["sampling", "structured_outputs"])
def test_a_plan_has_room_for_draws(wish: str) -> None:
    """Bug: rows that are drawn cost nothing in the plan of those who want them, or something in
    everybody's."""
    rows, eager = max(ON_GPU.buckets) * 16, replace(ON_GPU, graph_mode="none")
    parts = [plan_8b(replace(eager, **{wish: on})).activation_bytes for on in (False, True)]
    assert parts[1] - parts[0] == rows * SAMPLED_ROW_BYTES


@pytest.mark.parametrize(("wish", "copies"), [({"adjustments": True}, 1), ({"max_logprobs": 5}, 3)])
def test_a_plan_has_room_for_copies_of_logits(wish: dict[str, Any], copies: int) -> None:
    """Bug: float32 logits of rows that are adjusted or scored are planned as a byte each."""
    rows, eager = max(ON_GPU.buckets) * 16, replace(ON_GPU, graph_mode="none")
    parts = [plan_8b(replace(eager, **asked)).activation_bytes for asked in ({}, wish)]
    assert parts[1] - parts[0] == copies * rows * 151_936 * 4


def test_what_each_part_counts() -> None:
    """Bug: one kind of draft layers, one set of logits, one bucket's or end's graphs or carries, a
    chunk of one prompt or none of the buffers that decode plainly are planned where more are."""
    target, draft = read_configs("qwen3-8b", "qwen3-8b-dflash-b16")
    assert isinstance(draft, DraftConfig)

    def plan(draft: Any = draft, target: Any = target, **changes: Any) -> MemoryPlan:
        config = replace(ON_GPU, **changes)
        return plan_memory(config, target, draft, H200, length_is_explicit=False)

    base = plan()
    rules = (AttentionRule(causal=True, window=64), *draft.attention_rules[1:])
    mixed = plan(replace(draft, layer_attention=rules))
    more = mixed.attention_workspace_bytes - base.attention_workspace_bytes
    assert more >= len(ON_GPU.buckets) * FLASHINFER_WRAPPER_BYTES
    wide = replace(target, vocab_size=target.vocab_size + 1024)
    wide_draft = replace(draft, model=replace(draft.model, vocab_size=wide.vocab_size))
    more = plan(wide_draft, wide).activation_bytes - base.activation_bytes
    logits = 16 * 16 * 1024 * 2
    assert more == 2 * 2 * logits, "of draft and verify, warming up and captured"
    carries = 16 * 41 * (4096 + 32 * 128) * 2  # a residual and a query of each row and layer
    for mode, kept in (("piecewise", 41 * GRAPH_BYTES + carries), ("full", 2 * STEP_GRAPH_BYTES)):
        drawn = {"graph_mode": mode, "sampling": True}  # two ends
        one, two = (plan(buckets=b, **drawn).activation_bytes for b in ((16,), (1, 16)))
        assert two - one >= kept
    one, four = (plan(buckets=(n,), max_model_len=64).prefill_bytes for n in (1, 4))
    assert four - one >= 3 * 64 * 5 * 4096 * 2, "taps of every row"
    ours = {"attention_backend": "triton", "prefill_attention_backend": "triton"}
    long, short = (plan(max_model_len=n, **ours).plain_decode_bytes for n in (40944, 1024))
    assert long - short >= 16 * (40944 - 1024) // 16 * 4, "page tables of 16 rows"
    none, scored = (plan(max_logprobs=n).prefill_bytes for n in (0, 5))
    assert scored - none == (SCORED_ROWS * (2 + 2 * 4) - 16 * 2) * 151_936, "two float32 copies"
    free, held = (plan(structured_outputs=on, **ours).activation_bytes for on in (False, True))
    assert held - free >= 3 * (36 + 5) * GRAPH_BYTES, "graphs of steps in another order"
