"""Bugs that others met in DFlash engines, and the test here that would catch each.

Why a table: most of them leave the output right and only lower acceptance, so nothing but a test
made for it notices. A row names its tests, which must exist, or says why it cannot apply; a row
whose feature is refused names the test of the refusal, and gets others when the feature comes.
Planted by hand on 2026-11-24, every bug but T12's (a GPU's) made a test of its row fail.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from graphengine.api import Engine
from graphengine.decode.attention import Layout
from tests.decode.test_engine import BLOCK, PROMPTS, Pair, force, ids_only, loop_of
from tests.support.bug_table import Row, check_row
from tests.support.chains import insert_

GOLDEN, TINY = "test_dflash_golden.py", "test_tiny_pair.py"
FORMATS = "test_draft_formats.py"
TABLE: dict[str, Row] = {
    "T01": Row(
        "taps off by one layer cost a few percent of acceptance",
        f"{GOLDEN}::test_drafts_equal_reference",
        f"{GOLDEN}::test_comparison_has_teeth",
        f"{TINY}::test_reference_agrees_and_a_tap_off_by_one_is_worse",
    ),
    "T02": Row(
        "the last layer is tapped after the norm, or out of range; layer 0 is skipped",
        f"{GOLDEN}::test_drafts_equal_reference",  # its pair "tap-last-layer"
        "test_draft_config.py::test_taps_at_the_edge_of_the_target",
    ),
    "T03": Row(
        "missing taps are guessed, duplicates and negatives accepted",
        "test_config_refusals.py::test_drafter_refusals",
    ),
    "T04": Row(
        "the draft forward is not the published one, or not over chunks",
        f"{GOLDEN}::test_drafts_equal_reference",
        "test_bug_table.py::test_chunks_give_the_same_context",
    ),
    "T05": Row(
        "a default theta replaces the file's under one spelling",
        "test_rope.py::test_theta_in_every_spelling",
        "test_rope.py::test_yarn_in_every_spelling",
        "test_rope.py::test_resaved_by_transformers",
    ),
    "T06": Row(
        "yarn's amplitude; partial_rotary_factor ignored",
        "test_rope.py::test_yarn_amplitude",
        "test_rope.py::test_scaled_ropes_equal_transformers",
        "test_config_refusals.py::test_model_refusals",
    ),
    "T07": Row(
        "slots shifted by one; an anchor-first drafter run with the other convention",
        f"{GOLDEN}::test_comparison_has_teeth",
        f"{FORMATS}::test_drafts_equal_reference",
        "test_draft_config.py::test_what_is_detected",
        "test_draft_config.py::test_wrong_speculative_tokens_are_named",
    ),
    "T08": Row(
        "positions of block and context rows after any accepted length",
        f"{GOLDEN}::test_drafts_equal_reference",
        "test_engine.py::test_random_acceptance_in_a_batch",
    ),
    "T09": Row(
        "nothing or everything accepted: context rows, bonus",
        "test_engine.py::test_every_acceptance_length",
        "test_accept.py::test_every_number_accepted",
    ),
    "T10": Row(
        "K/V beyond the valid length is read",
        "test_engine.py::test_poisoned_cache_changes_nothing",
        f"{GOLDEN}::test_rejected_context_rows_are_never_seen",
        "test_gpu_modes.py::test_poisoned_cache_changes_nothing",
    ),
    "T11": Row(
        "graph replay differs from eager; garbage in padded rows matters",
        "test_gpu_modes.py::test_modes_agree",
        "test_bug_table.py::test_garbage_in_padded_rows",
        "test_engine.py::test_bucket_size_changes_nothing",
    ),
    "T12": Row(
        "a graph is frozen at the length of its capture",
        "test_gpu_modes.py::test_ten_times_longer_than_captured",
        "test_block_attention_on_gpu.py::test_one_capture_serves_every_length",
    ),
    "T13": Row(
        "a first request near its limit decides shapes for later ones",
        "test_engine.py::test_short_then_long_then_short",
        "test_gpu_modes.py::test_ten_times_longer_than_captured",
    ),
    "T14": Row(
        "what the last occupant of a row left is used",
        "test_engine.py::test_short_then_long_then_short",
        "test_engine.py::test_more_prompts_than_rows",
    ),
    "T15": Row(
        "the drafter's context depends on how the prompt was cut",
        "test_bug_table.py::test_chunks_give_the_same_context",
    ),
    "T16": Row(
        "acceptance after a prefix hit",
        "test_prefix_hits.py::test_turns_of_a_chat",
        "test_tiny_hybrid.py::test_turns_of_a_chat",
    ),
    "T17": Row(
        "drafts written into shared pages",
        "test_prefix_hits.py::test_random_texts_that_share_their_beginnings",
        "test_prefix_cache.py::test_pages_are_shared_and_never_written",
        "test_prefix_hits.py::test_turns_of_a_chat",
    ),
    "T18": Row(
        "a full hit recomputes the last block", "test_prefix_hits.py::test_the_same_prompt_again"
    ),
    "T19": Row(
        "abort in a step, end while a step is in flight: leaks (there is no preemption: pages are "
        "reserved at admission)",
        "test_engine_ends.py::test_cancel_in_every_state",
        "test_kvcache.py::test_loop_in_any_order",
        "test_interrupts.py::test_ctrl_c_between_any_two_lines",
    ),
    "T20": Row(
        "stop tokens and budgets inside an accepted run; the mask id as a stop token",
        "test_engine_ends.py::test_stop_token_at_every_place",
        "test_engine_ends.py::test_budget_at_every_place",
    ),
    "T21": Row(
        "writes past the last page or position at the context's end",
        "test_engine_ends.py::test_context_limit",
        "test_engine_ends.py::test_longest_context_of_the_model",
        "test_fallback.py::test_last_block_in_plain_decode",
        "test_accept.py::test_past_the_end_of_the_table",
    ),
    "T22": Row(
        "sliding layers: causality by the wrong rule",
        "test_draft_config.py::test_attention_rules",
        "test_draft_config.py::test_speculators_attention_rules",
        f"{FORMATS}::test_drafts_equal_reference",
    ),
    "T23": Row(
        "mixed layers share one mask",
        "test_draft_config.py::test_attention_rules",
        f"{FORMATS}::test_drafts_equal_reference",
        f"{FORMATS}::test_comparison_has_teeth",
    ),
    "T24": Row(
        "a window one too long",
        f"{FORMATS}::test_drafts_equal_reference",
        f"{FORMATS}::test_comparison_has_teeth",
    ),
    "T25": Row(
        "the sampled distribution is not the target's",
        "test_drawn_tokens.py::test_first_tokens_follow_the_target",
        "test_sampling.py::test_draws_follow_the_distribution",
    ),
    "T26": Row(
        "the residual where p is one-hot, or sums to 0",
        "test_sampling.py::test_small_and_large_temperatures",
        why_not="no residual is formed: a draft is kept where it equals the target's own draw",
    ),
    "T27": Row(
        "a seed gives other tokens in another batch",
        "test_drawn_tokens.py::test_same_seed_same_tokens",
    ),
    "T28": Row("ranks disagree on what was accepted", why_not="one GPU; no tensor parallelism"),
    "T29": Row(
        "a head of the drafter's own is replaced by the target's, or the other way round",
        "test_draft_vocabulary.py::test_sharing",
        f"{FORMATS}::test_drafts_equal_reference",
    ),
    "T30": Row(
        "d2t read as ids",
        "test_draft_vocabulary.py::test_broken_maps",
        f"{FORMATS}::test_drafts_equal_reference",
    ),
    "T31": Row(
        "tied embeddings: the drafter's head is the table; quantised heads",
        "test_weights.py::test_tied_checkpoints_with_a_stored_head",
        "test_draft_vocabulary.py::test_tied_target",
        "test_config_refusals.py::test_model_refusals",
    ),
    "T32": Row(
        "embedding scale and soft cap (Gemma) left out in the drafter",
        "test_config_refusals.py::test_drafter_refusals",
        "test_config_refusals.py::test_other_models_are_refused",
        why_not="no Gemma target runs; the keys are refused",
    ),
    "T33": Row(
        "unknown, missing or misshaped tensors are skipped",
        "test_weights.py::test_damaged_target_is_refused",
        "test_weights.py::test_damaged_drafter_is_refused",
        "test_bad_files.py::test_fuzzed_headers",
    ),
    "T34": Row(
        "block_size at its two places",
        "test_config.py::test_generations_of_the_format_agree",
        "test_draft_config.py::test_nested_keys_win_and_are_named",
    ),
    "T35": Row(
        "an fp16 target takes the drafter along to fp16, which overflows",
        "test_build.py::test_float16_is_refused_and_converted",
    ),
    "T36": Row(
        "the fused context K/V differs from the layers' own projections",
        f"{GOLDEN}::test_fused_context_equals_every_layers_own",
        "test_context_kv.py::test_matches_the_formula",
    ),
    "T37": Row(
        "recurrent states after a partial accept",
        "test_recurrence.py::test_states_are_those_of_single_steps",
        "test_recurrence.py::test_random_acceptance_in_a_batch",
        "test_gated_delta.py::test_every_count_of_a_block",
    ),
    "T38": Row(
        "the budget forgets drafter, taps or logits; a full pool fails in the middle",
        "test_memory.py::test_plan_equals_what_is_built",
        "test_memory.py::test_pools_of_almost_one_request",
        "test_engine.py::test_pool_smaller_than_the_demand",
        "test_soak.py::test_300_steps",
        "test_gpu_modes.py::test_memory_returns",
    ),
    "T39": Row(
        "lengths on the host fall behind or run ahead of the device's",
        "test_bug_table.py::test_lengths_are_the_devices_when_planned",
    ),
    "T40": Row(
        "late positions lose acceptance first",
        f"{TINY}::test_acceptance_floors",
        "test_guards.py::test_acceptance_warning",
    ),
    "T41": Row(
        "measured on raw text or with thinking on",
        "test_chat_template.py::test_chat_template",
        "test_chat_template.py::test_thinking_is_switched_off",
    ),
    "T42": Row(
        "acceptance falls with concurrency", f"{TINY}::test_acceptance_does_not_depend_on_the_batch"
    ),
    "T43": Row(
        "head_dim 128 is hard-wired",
        # The bundled pair's is 64, the golden pairs' 16 and 32.
        f"{TINY}::test_acceptance_floors",
        f"{GOLDEN}::test_drafts_equal_reference",
    ),
    "T44": Row(
        "a token is accepted that the target would not say",
        f"{TINY}::test_lossless",
        "test_engine.py::test_speculative_equals_plain",
        "test_verify_faults.py::test_target_slot_off_by_one",
    ),
    "T45": Row(
        "crashes after thousands of steps",
        "test_soak.py::test_300_steps",
        "test_soak.py::test_500_steps_on_the_gpu",
    ),
    "T46": Row(
        "drafter and target read different page layouts",
        "test_block_attention.py::test_matches_sdpa",
        "test_context_kv.py::test_matches_the_formula",
        f"{GOLDEN}::test_drafts_equal_reference",
    ),
}


def test_every_row_is_there() -> None:
    """Bug: a row is dropped from the table, and with it the question whether it is tested."""
    assert list(TABLE) == [f"T{i:02}" for i in range(1, 47)]
    assert all(row.tests or row.why_not for row in TABLE.values())


@pytest.mark.parametrize("row", TABLE)
def test_row_is_covered(row: str) -> None:
    """Bug: a renamed or deleted test leaves a bug without one."""
    check_row(row, TABLE[row])


# --- rows that had no test ---


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def engine(pair: Pair) -> Iterator[Engine]:
    with pair.engine(buckets=(4,)) as engine:
        yield engine


def test_garbage_in_padded_rows(engine: Engine, pair: Pair) -> None:
    """Bug T11: ids of rows that hold no request decide something for those that do."""
    loop = loop_of(engine)
    rng = random.Random(0)
    force(engine, pair, lambda request, step: rng.randrange(BLOCK))
    bucket = loop.first._buckets[4]
    views, filled = bucket.buffers, []

    def fill() -> None:
        for row, start in enumerate(views.start_B.tolist()):
            if start == 0:
                for ids in (views.block_ids_BG, views.draft_ids_BG):
                    ids[row] = torch.randint(0, 512, (BLOCK,))
                filled.append(row)

    for name in ("draft.00", "verify.00", "draft.context"):
        insert_(bucket, name, fill)
    for count in (1, 3):
        wanted = [pair.plain(p, 25) for p in PROMPTS[:count]]
        assert ids_only(engine, PROMPTS[:count], max_new_tokens=25) == wanted
    assert len(filled) > 50


def test_chunks_give_the_same_context(pair: Pair) -> None:
    """Bug T15: the drafter's context K/V of a prompt depends on how the prompt was cut: a chunk's
    taps are lost, shifted, or written to another chunk's slots."""
    found: dict[int, list[torch.Tensor]] = {}
    for chunk in (1000, 1, 5, 16, 17):
        with pair.engine(buckets=(2,)) as engine:
            loop = loop_of(engine)
            loop.prefill = replace(loop.prefill, chunk=chunk)
            requests = [loop.submit(list(p), 9, frozenset()) for p in (PROMPTS[1], PROMPTS[4])]
            with torch.no_grad():
                loop.admit()
            pools = [loop.prefill.pair.target.kv_pool, loop.prefill.pair.proposer.kv_pool]
            found[chunk] = [
                pool[:, :, request.pages].flatten(2, 3)[:, :, : len(request.prompt_ids)].clone()
                for pool in pools
                for request in requests
            ]
            loop.reset()
            wanted = [pair.plain(p, 9) for p in (PROMPTS[1], PROMPTS[4])]
            assert ids_only(engine, [PROMPTS[1], PROMPTS[4]], max_new_tokens=9) == wanted
    whole = found.pop(1000)
    assert all(part.abs().sum() > 0 for part in whole)
    for parts in found.values():
        for part, other in zip(parts, whole, strict=True):
            torch.testing.assert_close(part, other, atol=2e-5, rtol=2e-5)


def test_lengths_are_the_devices_when_planned(
    engine: Engine, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug T39: attention is planned for lengths that the device does not have: the drafter's rows
    read stale keys, or miss their own."""
    loop = loop_of(engine)
    rng = random.Random(1)
    force(engine, pair, lambda request, step: rng.randrange(BLOCK))
    lane, real, seen = loop.first, Layout.build, []

    def build(qo_lens: list[int], *others: Any) -> Any:
        found, block = real(qo_lens, *others), qo_lens[0]
        if lane.bucket is None or found.qo_indptr_cpu[-1] != block * len(lane.rows):
            return found  # a prompt's
        host = [request.start if request is not None else 0 for request in lane.rows]
        assert host == lane.bucket.buffers.start_B.tolist()[: len(host)]
        pages = found.paged_kv_indptr_cpu.diff()[: len(host)]
        last = found.paged_kv_last_page_len_cpu[: len(host)]
        lengths = ((pages - 1) * engine.config.page_size + last).tolist()
        assert lengths == [start + block for start in host]
        seen.append(host)
        return found

    monkeypatch.setattr(Layout, "build", build)
    ids_only(engine, PROMPTS, max_new_tokens=30)
    assert len(seen) > 15
