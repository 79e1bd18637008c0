"""Bugs that others met with recurrent layers and experts, and the test here that would catch each.

The table is as tests/decode/test_bug_table.py's; captured graphs and compiled kernels are a GPU's
(`gpu`), the same chains and references run on the CPU, where every bug was planted by hand on
2026-11-24 and made a test of its row fail.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from graphengine.checkpoints.sources import Checkpoint
from graphengine.checkpoints.weights import target_weights
from graphengine.config.model import ModelConfig
from graphengine.decode import ends
from graphengine.decode.recurrence import KEPT_STATES, make_states, state_bytes
from graphengine.models.gated_delta import GatedDeltaWeights
from graphengine.verify.check import Limits, decide, decode, judge
from graphengine.verify.teacher import teacher_force
from tests.decode.test_engine import BLOCK, PROMPTS, ids_only
from tests.decode.test_recurrence import HybridPair, force, loop_of
from tests.models.test_qwen3_golden import token_ids
from tests.support.bug_table import Row, check_row
from tests.support.dflash_reference import load_target, plain_generate
from tests.support.hybrids import A, D, make_hybrid

RECURRENCE, GOLDEN = "test_recurrence.py", "test_hybrid_golden.py"
KERNEL, PREFILL = "test_gated_delta.py", "test_gated_delta_prefill.py"
HERE = "test_bug_table_hybrids.py"
TABLE: dict[str, Row] = {
    "H01": Row(
        "a verify of two requests in captured graphs: wrong logits where eager ones are right",
        "test_gpu_modes.py::test_modes_agree_with_recurrent_layers",
        f"{RECURRENCE}::test_random_acceptance_in_a_batch",
    ),
    "H02": Row(
        "a prompt as long as a block runs as a verify, which writes no state",
        f"{HERE}::test_prompts_as_long_as_a_block",
    ),
    "H03": Row(
        "nothing accepted is index -1: the neighbour's state",
        f"{KERNEL}::test_every_count_of_a_block",
        f"{RECURRENCE}::test_every_acceptance_length",
    ),
    "H04": Row(
        "a plain step behind a drafted one reads another row's state",
        f"{RECURRENCE}::test_lost_speculation_falls_back",
        f"{RECURRENCE}::test_drafted_and_plain_side_by_side",
        f"{KERNEL}::test_every_count_of_a_block",
    ),
    "H05": Row(
        "padding's slot is a real one",
        f"{RECURRENCE}::test_poison_where_nothing_may_be_read",
        f"{KERNEL}::test_rejected_rows_leave_no_trace",
    ),
    "H06": Row(
        "a graph replayed for a batch with padded rows: illegal access",
        "test_gpu_modes.py::test_modes_agree_with_recurrent_layers",
        f"{RECURRENCE}::test_bucket_size_changes_nothing",
        f"{RECURRENCE}::test_more_prompts_than_rows",
        f"{RECURRENCE}::test_only_the_row_that_changes_is_written",
    ),
    "H07": Row(
        "what is recorded is not what verify saw, but unrounded",
        f"{KERNEL}::test_partial_sums_are_rounded_as_the_model_rounds",
        f"{PREFILL}::test_partial_sums",
    ),
    "H08": Row(
        "the window is laid out by token where a sliding one is copied",
        f"{KERNEL}::test_every_count_of_a_block",
        f"{RECURRENCE}::test_states_are_those_of_single_steps",
        f"{PREFILL}::test_pieces_of_a_prompt_are_the_whole",
    ),
    "H09": Row(
        "K/V goes back behind rejected rows, the convolution's window does not",
        f"{RECURRENCE}::test_states_are_those_of_single_steps",
        why_not="LFM2, where others met it, is refused",
    ),
    "H10": Row(
        "beta is rounded in one path and not in the other",
        f"{KERNEL}::test_a_chain_of_blocks_is_single_steps",
        f"{RECURRENCE}::test_states_are_those_of_single_steps",
    ),
    "H11": Row(
        "corrections in bf16: long outputs degenerate",
        f"{KERNEL}::test_a_chain_of_blocks_is_single_steps",
    ),
    "H12": Row(
        "a faulty replay raises acceptance while the text loops",
        f"{HERE}::test_verify_sees_a_faulty_commit",
        why_not="acceptance has no upper alarm: what is said is judged by itself",
    ),
    "H13": Row(
        "only the first token behind a rollback is wrong",
        f"{RECURRENCE}::test_every_acceptance_length",
        f"{HERE}::test_verify_sees_a_faulty_commit",
    ),
    "H14": Row(
        "a prefix's state is of the position in front of the verify, or is missed",
        f"{PREFILL}::test_a_state_is_kept_on_the_way",
        "test_tiny_hybrid.py::test_turns_of_a_chat",
        why_not="states are kept of prompts alone, by their prefill",
    ),
    "H15": Row(
        "a hit's state is not of the boundary that its hash says",
        "test_kept_states.py::test_states_are_kept_of_what_they_are_found_by",
        "test_kept_states.py::test_states_go_with_their_pages",
        "test_tiny_hybrid.py::test_turns_of_a_chat",
    ),
    "H16": Row("nothing is ever hit", "test_tiny_hybrid.py::test_turns_of_a_chat"),
    "H17": Row(
        "beside running streams the state is not written and its slot is kept all the same",
        f"{HERE}::test_a_prompt_in_pieces_beside_a_stream_is_kept",
    ),
    "H18": Row(
        "states of chunks are indexed by request, or by another layer",
        f"{PREFILL}::test_prompts_side_by_side",
        f"{KERNEL}::test_layers_are_committed_apart",
        f"{GOLDEN}::test_engine_continues_as_transformers",
    ),
    "H19": Row(
        "a slot is reused as it was left, leaks, or is given to two",
        f"{PREFILL}::test_one_piece",
        "test_holdings.py::test_slots_return",
        f"{RECURRENCE}::test_short_then_long_then_short",
        f"{RECURRENCE}::test_cancel_in_every_state",
    ),
    "H20": Row("1 + w is read as w, or w as 1 + w", f"{GOLDEN}::test_logits_equal_transformers"),
    "H21": Row(
        "q and gate are two halves instead of by head", f"{GOLDEN}::test_logits_equal_transformers"
    ),
    "H22": Row("part of a head does not turn", f"{GOLDEN}::test_logits_equal_transformers"),
    "H23": Row(
        "the query is not scaled; the norm of q and k is a mean's",
        f"{KERNEL}::test_every_count_of_a_block",
        f"{KERNEL}::test_transformers_rule",
    ),
    "H24": Row(
        "a value head reads with the key head of its number modulo; a fixed number of layers",
        f"{KERNEL}::test_every_count_of_a_block",
        f"{GOLDEN}::test_logits_equal_transformers",
    ),
    "H25": Row("decays in bf16", f"{HERE}::test_what_stays_in_float32"),
    "H26": Row(
        "a tied head is left as it was made",
        f"{GOLDEN}::test_logits_equal_transformers",  # most of its pairs are tied
        f"{GOLDEN}::test_two_places_for_the_tie_must_agree",
    ),
    "H27": Row(
        "experts in the fused form are matched by no name and stay zero",
        "models/test_moe.py::test_half_a_mixture_is_refused",
        "models/test_moe.py::test_logits_equal_transformers",
        f"{GOLDEN}::test_published_files",
    ),
    "H28": Row(
        "the shared expert is dropped",
        "models/test_moe.py::test_half_a_mixture_is_refused",
        "models/test_moe.py::test_shared_expert_equals_transformers",
        f"{GOLDEN}::test_logits_equal_transformers",
    ),
    "H29": Row(
        "prompts of a batch leak into each other",
        f"{PREFILL}::test_prompts_side_by_side",
        f"{GOLDEN}::test_engine_continues_as_transformers",
    ),
    "H30": Row(
        "a drafter is never right",
        f"{GOLDEN}::test_a_drafter_is_accepted_as_its_reference",
        "test_tiny_hybrid.py::test_drafted_is_plain_is_transformers",
    ),
    "H31": Row(
        "a different token: a near tie or a fault?",
        "test_judging.py::test_a_tie_passes_and_re_anchors",
        "test_judging.py::test_places_name_step_and_row",
    ),
    "H32": Row(
        "a product over rows that are masked and hold anything",
        f"{KERNEL}::test_rejected_rows_leave_no_trace",
        f"{RECURRENCE}::test_poison_where_nothing_may_be_read",
    ),
    "H33": Row(
        "a verify streams all experts",
        "kernels/test_moe.py::test_a_block_streams_the_experts_it_chose",
    ),
    "H34": Row("a state a row: few requests fit", f"{HERE}::test_one_state_a_request"),
}


def test_every_row_is_there() -> None:
    """Bug: a row is dropped from the table, and with it the question whether it is tested."""
    assert list(TABLE) == [f"H{i:02}" for i in range(1, 35)]


@pytest.mark.parametrize("row", TABLE)
def test_row_is_covered(row: str) -> None:
    """Bug: a renamed or deleted test leaves a bug without one."""
    assert TABLE[row].tests
    check_row(row, TABLE[row])


# --- rows that had no test ---


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> HybridPair:
    return HybridPair(tmp_path_factory.mktemp("pair"))


@pytest.mark.slow
def test_prompts_as_long_as_a_block(pair: HybridPair) -> None:
    """Bug H02: a prompt of as many rows as a block is run as one: its state is never written."""
    model = load_target(pair.target)
    prompts = [token_ids(n, seed=n) for n in range(1, BLOCK + 3)]
    wanted = [plain_generate(model, prompt, 12) for prompt in prompts]
    for buckets in ((1,), (4,)):
        with pair.engine(buckets=buckets) as engine:
            assert ids_only(engine, prompts, max_new_tokens=12) == wanted


@pytest.mark.parametrize("lost", [-1, 1])
def test_verify_sees_a_faulty_commit(
    pair: HybridPair, lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug H12, H13: the state behind a step lacks its last row, or has a rejected one; the drafts
    are accepted as before, and nothing tells."""
    real = ends.advance_
    monkeypatch.setattr(
        ends, "advance_", lambda a, b, first, start, size: real(a, b, first, start + lost, size)
    )
    rng = random.Random(0)
    with pair.engine(buckets=(4,)) as engine:
        force(engine, pair, lambda request, step: rng.randrange(BLOCK - 1))
        loop = loop_of(engine)
        found = decode(loop, PROMPTS[:3], [30] * 3, ())
        scores = [teacher_force(loop, t.prompt_ids, t.output_ids) for t in found]
        report = judge(found, scores, Limits().tolerance_nats, ())
    assert set(decide(report, Limits())) & {"regret", "identical"}
    assert report.acceptance.mean_acceptance_length > 1


def test_a_prompt_in_pieces_beside_a_stream_is_kept(pair: HybridPair) -> None:
    """Bug H17: a prompt that came in pieces between the steps of a stream leaves no state, or one
    that was never written; who asks again hears something else."""
    prompt, other = token_ids(110, seed=1), token_ids(5, seed=2)
    options: dict[str, Any] = {"max_num_batched_tokens": 64, "max_model_len": 256, "page_size": 16}
    with pair.engine(**options) as engine:
        loop = loop_of(engine)
        stream = loop.submit(other, 60, ())
        running = loop.run()
        while not stream.output_ids:
            next(running)
        first = loop.submit(prompt, 9, ())
        while not first.output_ids:
            next(running)
        assert stream.finish_reason is None
        for pool in loop.prefill.pair.target.states:  # what nobody holds is of no use to a hit
            pool[:, loop.state_slots._free] = float("nan")
        again = loop.submit(prompt, 9, ())
        for _ in running:
            pass
    assert first.output_ids == plain_generate(load_target(pair.target), prompt, 9)
    assert again.output_ids == first.output_ids
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 96)


def test_what_stays_in_float32(tmp_path: Path) -> None:
    """Bug H25: decays of a bf16 run are rounded: a slow head forgets at another rate."""
    directory = make_hybrid(tmp_path, layer_types=[D, A], tokenizer=False)
    config = ModelConfig.from_hf(json.loads((directory / "config.json").read_text()))
    device = torch.device("cpu")
    weights = target_weights(Checkpoint(directory, device, torch.bfloat16), config, 8, device)
    mixer = weights.layers[0].mixer
    assert isinstance(mixer, GatedDeltaWeights)
    file = load_file(directory / "model.safetensors")
    prefix = "model.layers.0."
    for found, name, offset in (
        (mixer.a_log_N, "linear_attn.A_log", 0),
        (mixer.dt_bias_N, "linear_attn.dt_bias", 0),
        (mixer.norm_V, "linear_attn.norm.weight", 0),
        (mixer.input_norm_D, "input_layernorm.weight", 1),
    ):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, file[prefix + name] + offset)


def test_one_state_a_request(pair: HybridPair) -> None:
    """Bug H34: states are kept for every row of a block, or are not planned: what they take is
    taken from the pages, and few requests fit."""
    with pair.engine(buckets=(1, 4)) as engine:
        target = loop_of(engine).prefill.pair.target
        states, own = target.states, loop_of(engine).first.buckets[4].buffers.recurrent
        assert states is not None and own is not None
        num_slots = 1 + 4 + KEPT_STATES  # nobody's, one a row, those of prompts
        assert states.states_LSNVK.shape[1] == states.windows_LSXC.shape[1] == num_slots
        taken = sum(x.numel() * x.element_size() for x in states)
        assert engine.memory_plan.recurrent_state_bytes == taken
        assert taken == num_slots * state_bytes(target.config, 4)
        half = make_states(target.config, num_slots, torch.bfloat16, torch.device("meta"))
        assert half is not None, "the recurrence stays float32"
        assert sum(x.nbytes for x in half) == num_slots * state_bytes(target.config, 2)
        tensors = own.slots_B, own.kept_slots_B2, *own.records
        of_rows = sum(x.untyped_storage().nbytes() for x in tensors) // 4  # of one request
        assert of_rows < BLOCK * states.states_LSNVK[:, 0].numel() * 4
