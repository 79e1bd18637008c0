"""What launchers choose by shapes, dtypes and GPU: kernels, warps and heads of a program, noted in
place of launches of fake CUDA tensors."""

from __future__ import annotations

import pytest
import torch

from graphengine.kernels import (
    add_rms_norm,
    fp8_rows,
    gated_delta_prefill,
    output_gate,
    specialized_attention,
)
from graphengine.kernels.block_attention import workspace
from graphengine.kernels.interpreter import INTERPRET
from tests.support.kernel_launches import (
    BF16,
    FP32,
    LAUNCHES,
    attend,
    attend_chunk,
    empty,
    ints,
    mix,
)

pytestmark = pytest.mark.skipif(INTERPRET, reason="launchers take other ways where it interprets")


@pytest.mark.parametrize(
    ("T", "K", "dtype", "kernels", "num_warps"),
    [
        (255, 128, BF16, ["delta_prepare_kernel", "delta_scan_kernel"], 2),
        (256, 128, BF16, ["delta_prepare_kernel", "delta_scan_kernel"], 2),
        (257, 128, torch.float16, ["delta_prepare_kernel", "delta_scan_kernel"], 1),
        (257, 128, FP32, ["prepare_kernel", "scan_kernel"], 2),
        (257, 64, BF16, ["prepare_kernel", "scan_kernel"], 2),
    ],
)
def test_kernels_of_a_recurrence_s_prompt(
    launched, T: int, K: int, dtype: torch.dtype, kernels: list[str], num_warps: int
) -> None:
    """Bug: heads of 64, or float32, are given to kernels that were written for 128 and 16 bits; or
    few chunks, which leave multiprocessors idle, have a warp each."""
    R, N, NK = 2, 6, 2
    C = (2 * NK + N) * K
    weights = empty(C, 4, dtype=dtype), empty(N, dtype=FP32), empty(N, dtype=FP32)
    pools = empty(3, 3, C, dtype=dtype), empty(3, N, K, K, dtype=FP32)
    pieces = gated_delta_prefill.Pieces(*(ints(R, dtype=torch.int32) for _ in range(6)))
    projected, out = empty(T, C + N * K + 2 * N, dtype=dtype), empty(T, N, K, dtype=dtype)
    gated_delta_prefill.gated_delta_prefill_(projected, *weights, *pools, pieces, out)
    convolved, *others = launched
    assert convolved.kernel == "convolve_kernel" and convolved.grid[0] == (T + 7) // 8
    assert [found.kernel for found in others] == kernels
    assert others[0].options["num_warps"] == num_warps
    assert others[0].grid == ((T + 31) // 32 + 1, N, R)  # one more: it moves the windows


def test_threads_of_a_row() -> None:
    """Bug: a row alone is summed by few threads, or by more than registers are for; as wide a row
    as a program holds goes through torch."""
    found = [
        fp8_rows.row_options(T, D, torch.device("cpu"))
        for T, D in ((64, 4096), (65, 4096), (64, 16384), (65, 16384), (64, 16385), (1, 100))
    ]
    assert [(options["BLOCK"], options["num_warps"]) for options in found] == [
        *((4096, 32), (4096, 8), (16384, 32), (16384, 16), (32768, 16), (128, 1))
    ]


def test_rows_that_a_program_holds(launched) -> None:
    """Bug: as wide a row as a program holds, as eight taps of 4,096 are, goes through torch."""
    most = fp8_rows.MAX_D
    assert fp8_rows.runs_here(empty(1, most), most)
    assert not fp8_rows.runs_here(empty(1, most + 1), most + 1)


def test_a_norm_that_lets_the_next_kernel_start_early(launched) -> None:
    """Bug: what plain decoding asks of its norms is asked of none, or of all."""
    h, partials, weight = empty(16, 4096), empty(3, 16, 4096, dtype=FP32), empty(4096)
    for early in (False, True):
        add_rms_norm._launch(h, partials, weight, 1e-6, early, 0)
    add_rms_norm._launch(None, h, weight, 1e-6, False, 2)
    kept = [[found.options[name] for name in ("EARLY", "Z", "ADDS", "F")] for found in launched]
    assert kept == [[False, 3, True, 0], [True, 3, True, 0], [False, 1, False, 2]]


@pytest.mark.parametrize(("T", "heads"), [(1, 4), (1023, 4), (1024, 8)])
def test_heads_of_a_gate_s_program(launched, T: int, heads: int) -> None:
    """Bug: a prompt's rows, which are many, are gated by twice the programs."""
    N, V = 30, 128
    output_gate._launch(empty(T, N, V), empty(T, N * V), 0, empty(V), 1e-6, empty(T, N * V))
    (found,) = launched
    assert found.grid == (T, -(-N // heads)) and found.options["HEADS"] == heads


def test_who_sends_for_keys(launched) -> None:
    """Bug: a config that does not prefetch, as that of two splits, whose loads are under way at
    once, does so all the same."""
    for splits, more in ((2, {}), (8, {}), (8, {"prefetch": False})):
        attend(BF16, 128, 16, True, None, splits=splits, **more)
    assert [found.options["PREFETCH"] for found in launched] == [False, True, False]


@pytest.mark.parametrize(
    ("S", "H", "keys"),
    [(16, 128, 16), (64, 128, 64), (128, 128, 128), (64, 256, 64), (128, 256, 64)],
)
def test_keys_of_one_copy(launched, S: int, H: int, keys: int) -> None:
    """Bug: a page longer than a tile of keys is copied whole, over the tile's neighbours."""
    attend_chunk(S, H)
    (found,) = launched
    assert [found.arguments[i].block_shape for i in (1, 2)] == [[keys, 64]] * 2


@pytest.mark.parametrize(("S", "keys"), [(16, 16), (64, 64), (128, 64)])
def test_pages_of_specialised_warps(launched, S: int, keys: int) -> None:
    """Bug: the same of a step's; or a request's pages are looked up in another's row, where a
    table's rows are wider than what is used of them."""
    B, G, N, K, H, Z = 2, 16, 32, 8, 128, 3
    table, start = ints(B, 12, dtype=torch.int32).narrow(1, 0, 9), ints(B, dtype=torch.int32)
    q, out = (empty(B * G, N, H) for _ in range(2))
    given = q, empty(2, 9, S, K, H), table, start, G, True, out, workspace(B, G, N, H, Z, "cuda")
    specialized_attention.launch(*given, specialized_attention.SpecializedConfig(), None)
    (found,) = launched
    assert [found.arguments[i].block_shape for i in (1, 2)] == [[keys, 64]] * 2
    assert found.arguments[5] == 9 * S and found.arguments[10] == 12


def test_who_compares_experts(launched) -> None:
    """Bug: the warps of a row's program wait for one another to find an expert among 128, or hold
    copies of more logits than registers are for."""
    for experts in (64, 128, 256):
        mix(1, experts, 512)
    found = [x.options["COPIES"] for x in launched if x.kernel == "gate_up_row_kernel"]
    assert found == [4, 4, 1]


# Warps, registers of a thread, stages (0: Triton's own), and whether the launch is an early one.
HOW: dict[str, set[tuple[int, int, int, bool]]] = {
    "_accept_and_advance_kernel": {(1, 0, 0, False)},
    "_add_rms_norm_kernel": {(8, 255, 0, True), (32, 64, 0, True), (16, 128, 0, True)},
    "_adjust_kernel": {(4, 0, 0, False)},
    "_advance_kernel": {(1, 0, 0, False)},
    "_ban_words_kernel": {(1, 0, 0, False)},
    "_choose_kernel": {(8, 0, 0, True)},
    "_chunk_argmax_kernel": {(4, 0, 0, False)},
    "_chunk_kernel": {(4, 0, 0, False)},
    "_collect_kernel": {(4, 0, 0, True)},
    "_context_kv_write_kernel": {(4, 255, 0, True)},
    "_down_kernel": {(4, 0, 3, True), (4, 128, 0, True)},
    "_finish_kernel": {(1, 0, 0, False)},
    "_gate_up_kernel": {(4, 0, 3, True), (4, 128, 0, True)},
    "_mask_logits_kernel": {(4, 0, 0, False)},
    "_output_gate_kernel": {(0, 0, 0, True)},
    "_pass_kernel": {(4, 0, 0, False)},
    "_place_rows_kernel": {(1, 0, 0, False), (4, 0, 0, False)},
    "_publish_drafts_kernel": {(1, 0, 0, False)},
    "_qk_norm_rope_write_kernel": {(4, 255, 0, True)},
    "_rows_to_fp8_kernel": {(8, 255, 0, True), (32, 64, 0, True), (16, 128, 0, True)},
    "_swiglu_kernel": {(0, 0, 0, True)},
    "_write_tap_kernel": {(0, 0, 0, True)},
    "block_attention_kernel": {(4, 255, 6, True), (4, 255, 3, True), (8, 255, 3, True)},
    "chunk_attention_kernel": {(4, 168, 0, True), (4, 168, 0, False)},
    "chunk_swiglu_kernel": {(4, 168, 0, True)},
    "combine_argmax_kernel": {(1, 0, 0, True)},
    "commit_kernel": {(4, 0, 0, True)},
    "convolve_kernel": {(4, 0, 0, True)},
    "delta_prepare_kernel": {(1, 0, 0, True), (2, 0, 0, True)},
    "delta_scan_kernel": {(4, 0, 0, True)},
    "down_row_kernel": {(1, 0, 0, True)},
    "gate_up_row_kernel": {(4, 0, 0, True)},
    "large_chunk_linear_kernel": {(4, 168, 0, True)},
    "merge_splits_kernel": {(0, 0, 0, True)},
    "norm_router_kernel": {(4, 0, 0, True)},
    "router_kernel": {(4, 0, 0, True)},
    "specialized_attention_kernel": {(4, 168, 0, True)},
    "step_kernel": {(8, 0, 0, True), (1, 0, 0, True)},
    "verify_kernel": {(8, 0, 0, True), (4, 0, 0, True)},
}


def test_how_every_kernel_is_launched(launched) -> None:
    """Bug: a kernel of a step begins when the one in front has ended; one that loads and stores in
    place has several warps, of which one writes before another has read; or a program has fewer
    registers than it was measured with. GEMMs aside, whose configs say so."""
    for name, launch in LAUNCHES.items():
        if not name.startswith(("GEMM", "head")):
            launch()
    found: dict[str, set[tuple[int, int, int, bool]]] = {}
    for kernel, _, _, options in launched:
        sizes = (options.get(size, 0) for size in ("num_warps", "maxnreg", "num_stages"))
        found.setdefault(kernel, set()).add((*sizes, options.get("launch_pdl", False)))
    assert found == HOW
