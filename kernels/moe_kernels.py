"""The Triton kernels of moe.py, and their launches.

Up to STREAM_ROWS rows one program chooses and plans: it holds all pairs and compares each with
each, so that an expert's place in the list and a pair's place among its expert's come from counting
(no sort, no atomics). Of more rows, as in a prompt, each 16 are chosen by a program of their own,
and each expert's program counts and collects its pairs.

Weights are the side of the product that is 64 rows for wgmma, an expert's rows its 16 columns; a
row that is none is zero by value. Invariant: nothing is read or written before `gdc_wait`.

Legend: T rows, D hidden, E experts, K of them a row, P = T * K pairs, S slots, I expert width.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from graphengine.kernels.clamped_swiglu import Clamp, activate, clamp_options
from graphengine.kernels.interpreter import INTERPRET, dot
from graphengine.kernels.launch import on_grid, pdl_options

STREAM_ROWS = 64  # past it nearly every expert is chosen, and rows are many for each
CHOICE_ROWS = 16  # that are chosen at once
PAIR_CHUNK = 1024  # of a prompt's, read at once
_LOWEST = tl.constexpr(-0x7FFFFFFFFFFFFFFF)


class Tile(NamedTuple):
    """How a product is cut: rows of the expert, rows of weights, and how deep it is fetched."""

    rows: int = 16
    outputs: int = 64
    block_k: int = 128
    num_stages: int = 3
    num_warps: int = 4


def tile_of(num_rows: int, element_bytes: int) -> Tile:
    """Narrow columns where weights are streamed (targets: 1 to 2 rows an expert), a product's tile
    for a prompt. At 8 and 16 rows no other of 16 was faster (H100, shapes of 30B and 35B-A3B)."""
    block_k = 256 // element_bytes
    if num_rows <= STREAM_ROWS:
        return Tile(block_k=block_k)
    return Tile(rows=64, block_k=block_k // 2)


def num_slots(num_rows: int, num_experts: int, top_k: int) -> int:
    """Slots for every expert that so many rows can choose; for a prompt, one an expert."""
    return num_experts if num_rows > STREAM_ROWS else min(num_experts, num_rows * top_k)


def launch_route(
    logits_TE: torch.Tensor, top_k: int, normalise: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(expert_TK, weight_TK, slots_S3, pairs_P); shapes are the caller's to check."""
    (T, E), device = logits_TE.shape, logits_TE.device
    expert_TK = torch.empty((T, top_k), dtype=torch.int32, device=device)
    weight_TK = torch.empty((T, top_k), dtype=torch.float32, device=device)
    slots_S3 = torch.empty((num_slots(T, E, top_k), 3), dtype=torch.int32, device=device)
    pairs_P = torch.empty(T * top_k, dtype=torch.int32, device=device)
    plans, pairs = T <= STREAM_ROWS, T * top_k
    on_grid(_choose_kernel, (1 if plans else triton.cdiv(T, CHOICE_ROWS),))(
        logits_TE,
        expert_TK,
        weight_TK,
        slots_S3,
        pairs_P,
        T,
        len(slots_S3),
        E=E,
        E_PAD=triton.next_power_of_2(E),
        K=top_k,
        K_PAD=triton.next_power_of_2(top_k),
        NORMALISE=normalise,
        ROWS=CHOICE_ROWS,
        TILES=triton.cdiv(T, CHOICE_ROWS) if plans else 1,
        P_PAD=triton.next_power_of_2(pairs) if plans else 1,
        CHUNK=min(16, triton.next_power_of_2(pairs)),
        S_PAD=triton.next_power_of_2(len(slots_S3)) if plans else 1,
        PLANS=plans,
        num_warps=8,
        **pdl_options(device),
    )
    if not plans:
        at = expert_TK, slots_S3, pairs_P, pairs
        on_grid(_collect_kernel, (E,))(*at, CHUNK=PAIR_CHUNK, num_warps=4, **pdl_options(device))
    return expert_TK, weight_TK, slots_S3, pairs_P


def launch_gate_up(
    x_TD: torch.Tensor,
    gate_up_EJD: torch.Tensor,
    slots_S3: torch.Tensor,
    pairs_P: torch.Tensor,
    top_k: int,
    bias_EJ: torch.Tensor | None = None,
    clamp: Clamp | None = None,
) -> torch.Tensor:
    """`activate(gate_e(x_t), up_e(x_t))` of every pair -> [P, I] in x's dtype."""
    (T, D), I = x_TD.shape, gate_up_EJD.shape[1] // 2  # noqa: E741
    out_PI = x_TD.new_empty((T * top_k, I))
    tile = tile_of(T, x_TD.element_size())
    on_grid(_gate_up_kernel, (triton.cdiv(I, tile.outputs), len(slots_S3)))(
        x_TD,
        gate_up_EJD,
        bias_EJ,
        slots_S3,
        pairs_P,
        out_PI,
        I,
        D=D,
        K=top_k,
        **clamp_options(clamp),
        **_tile(tile, x_TD),
    )
    return out_PI


def launch_down(
    act_PI: torch.Tensor,
    down_EDI: torch.Tensor,
    weight_TK: torch.Tensor,
    slots_S3: torch.Tensor,
    pairs_P: torch.Tensor,
    shared_TD: torch.Tensor | None,
    shared_gate_T1: torch.Tensor | None,
    bias_ED: torch.Tensor | None = None,
) -> torch.Tensor:
    """What each pair adds to its row, weighted, float32 [Z, T, D]; the shared expert's last."""
    (T, K), (_, D, I) = weight_TK.shape, down_EDI.shape  # noqa: E741
    has_shared = shared_TD is not None
    out_ZTD = torch.empty((K + has_shared, T, D), dtype=torch.float32, device=act_PI.device)
    tile = tile_of(T, act_PI.element_size())
    on_grid(_down_kernel, (triton.cdiv(D, tile.outputs), len(slots_S3) + has_shared))(
        act_PI,
        down_EDI,
        bias_ED,
        weight_TK,
        slots_S3,
        pairs_P,
        shared_TD if shared_TD is not None else act_PI,
        shared_gate_T1 if shared_gate_T1 is not None else act_PI,
        out_ZTD,
        T,
        len(slots_S3),
        D,
        I=I,
        K=K,
        SHARED=has_shared,
        **_tile(tile, act_PI),
    )
    return out_ZTD


def _tile(tile: Tile, x: torch.Tensor) -> dict[str, Any]:
    return {
        "ROWS": tile.rows,
        "OUTPUTS": tile.outputs,
        "BLOCK_K": tile.block_k,
        "DOT_FP32": INTERPRET,
        "num_stages": tile.num_stages,
        "num_warps": tile.num_warps,
        **pdl_options(x.device),
    }


@triton.jit(do_not_specialize=["num_rows", "num_slots"])
def _choose_kernel(
    logits,
    experts,
    weights,
    slots,
    pairs,
    num_rows,
    num_slots,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    NORMALISE: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    P_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    S_PAD: tl.constexpr,
    PLANS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    e = tl.arange(0, E_PAD)[None, :]
    k = tl.arange(0, K_PAD)[None, :]
    for tile in range(TILES):
        t = (tl.program_id(0) + tile) * ROWS + tl.arange(0, ROWS)[:, None]
        live = t < num_rows
        x = tl.load(logits + t.to(tl.int64) * E + e, mask=live & (e < E), other=float("-inf"))
        x = tl.where(live, x.to(tl.float32), 0.0)  # rows of -inf alone would be NaN
        x = tl.where(e < E, x, float("-inf"))
        # As integers in the order of the floats, -0 as 0 and NaN as -inf; below, the lower expert
        # first. So what is chosen hangs on no exponential.
        order = tl.where((x != x) | (x == 0.0), tl.where(x == 0.0, 0.0, float("-inf")), x)
        bits = order.to(tl.int32, bitcast=True)
        bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        keys = bits.to(tl.int64) * E_PAD + (E_PAD - 1 - e)
        p = tl.exp(x - tl.max(x, axis=1)[:, None])
        p = p / tl.sum(p, axis=1)[:, None]
        chosen = tl.zeros((ROWS, K_PAD), tl.int32)
        weight = tl.zeros((ROWS, K_PAD), tl.float32)
        for i in tl.static_range(K):
            best = tl.max(keys, axis=1)[:, None]
            at = (E_PAD - 1 - (best & (E_PAD - 1))).to(tl.int32)
            keys = tl.where(e == at, _LOWEST, keys)
            chosen = tl.where(k == i, at, chosen)
            weight = tl.where(k == i, tl.sum(tl.where(e == at, p, 0.0), axis=1)[:, None], weight)
        if NORMALISE:
            weight = weight / tl.sum(weight, axis=1)[:, None]
        weight = weight.to(logits.dtype.element_ty).to(tl.float32)
        tl.store(experts + t * K + k, chosen, mask=live & (k < K))
        tl.store(weights + t * K + k, weight, mask=live & (k < K))
    if PLANS:
        tl.debug_barrier()  # this program reads what its other threads have written
        num_pairs = num_rows * K
        p = tl.arange(0, P_PAD)
        mine = tl.load(experts + p, mask=p < num_pairs, other=E_PAD)
        each = tl.arange(0, E_PAD)
        place = tl.zeros((P_PAD,), tl.int32)
        count = tl.zeros((E_PAD,), tl.int32)
        for start in range(0, num_pairs, CHUNK):
            q = start + tl.arange(0, CHUNK)[None, :]
            other = tl.load(experts + q, mask=q < num_pairs, other=E_PAD)
            is_before = (other < mine[:, None]) | ((other == mine[:, None]) & (q < p[:, None]))
            place += tl.sum(is_before.to(tl.int32), axis=1)
            count += tl.sum((other == each[:, None]).to(tl.int32), axis=1)
        tl.store(pairs + place, p, mask=p < num_pairs)
        hit = (count > 0).to(tl.int32)
        row = slots + (tl.cumsum(hit, axis=0) - hit) * 3
        end = tl.cumsum(count, axis=0)
        tl.store(row, each, mask=hit > 0)
        tl.store(row + 1, end - count, mask=hit > 0)
        tl.store(row + 2, end, mask=hit > 0)
        at = tl.arange(0, S_PAD)
        is_empty = (at >= tl.sum(hit, axis=0)) & (at < num_slots)
        for field in tl.static_range(3):
            tl.store(slots + at * 3 + field, 0, mask=is_empty)


@triton.jit(do_not_specialize=["num_pairs"])
def _collect_kernel(experts, slots, pairs, num_pairs, CHUNK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    e = tl.program_id(0)
    begin = 0
    for start in range(0, num_pairs, CHUNK):
        p = start + tl.arange(0, CHUNK)
        other = tl.load(experts + p, mask=p < num_pairs, other=0x7FFFFFFF)
        begin += tl.sum((other < e).to(tl.int32), axis=0)
    end = begin
    for start in range(0, num_pairs, CHUNK):
        p = start + tl.arange(0, CHUNK)
        hit = (tl.load(experts + p, mask=p < num_pairs, other=0x7FFFFFFF) == e).to(tl.int32)
        tl.store(pairs + end + tl.cumsum(hit, axis=0) - hit, p, mask=hit > 0)
        end += tl.sum(hit, axis=0)
    tl.store(slots + e * 3, e)
    tl.store(slots + e * 3 + 1, begin)
    tl.store(slots + e * 3 + 2, end)


@triton.jit(do_not_specialize=["I"])
def _gate_up_kernel(
    x,
    gate_up,
    bias,
    slots,
    pairs,
    out,
    I,  # noqa: E741
    D: tl.constexpr,
    K: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT_FP32: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = slots + tl.program_id(1) * 3
    e, begin, end = tl.load(slot).to(tl.int64), tl.load(slot + 1), tl.load(slot + 2)
    i = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    d = tl.arange(0, BLOCK_K)
    gate_row = gate_up + (e * 2 * I + i)[:, None] * D + d[None, :]
    if bias is not None:
        gate_bias = tl.load(bias + e * 2 * I + i, mask=i < I, other=0.0).to(tl.float32)
        up_bias = tl.load(bias + e * 2 * I + I + i, mask=i < I, other=0.0).to(tl.float32)
    for start in range(begin, end, ROWS):
        at = start + tl.arange(0, ROWS)
        pair = tl.load(pairs + at, mask=at < end, other=0)
        x_row = x + (pair // K).to(tl.int64)[None, :] * D + d[:, None]
        gate = tl.zeros((OUTPUTS, ROWS), tl.float32)
        up = tl.zeros((OUTPUTS, ROWS), tl.float32)
        for k in range(0, D, BLOCK_K):
            rest = D - k
            live = (i < I)[:, None] & (d < rest)[None, :]
            rows = tl.load(x_row + k, mask=(at < end)[None, :] & (d < rest)[:, None], other=0.0)
            weight = tl.load(gate_row + k, mask=live, other=0.0)
            gate = dot(weight, rows, gate, DOT_FP32)
            weight = tl.load(gate_row + I * D + k, mask=live, other=0.0)
            up = dot(weight, rows, up, DOT_FP32)
        if bias is not None:
            gate += gate_bias[:, None]
            up += up_bias[:, None]
        y = activate(gate, up, ALPHA, LIMIT)
        to = out + pair.to(tl.int64)[None, :] * I + i[:, None]
        tl.store(to, y.to(out.dtype.element_ty), mask=(at < end)[None, :] & (i < I)[:, None])


@triton.jit(do_not_specialize=["num_rows", "num_slots", "D"])
def _down_kernel(
    act,
    down,
    bias,
    weights,
    slots,
    pairs,
    shared,
    shared_gate,
    out,
    num_rows,
    num_slots,
    D,
    I: tl.constexpr,  # noqa: E741
    K: tl.constexpr,
    SHARED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT_FP32: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_shared = SHARED and tl.program_id(1) == num_slots
    if is_shared:
        for start in range(0, num_rows, ROWS):
            t = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
            live = (t < num_rows) & (n < D)[None, :]
            y = tl.load(shared + t * D + n[None, :], mask=live, other=0.0).to(tl.float32)
            gate = tl.load(shared_gate + t, mask=t < num_rows, other=0.0).to(tl.float32)
            to = out + (K * num_rows.to(tl.int64) + t) * D + n[None, :]
            tl.store(to, y / (1.0 + tl.exp(-gate)), mask=live)
    else:
        slot = slots + tl.program_id(1) * 3
        e, begin, end = tl.load(slot).to(tl.int64), tl.load(slot + 1), tl.load(slot + 2)
        i = tl.arange(0, BLOCK_K)
        down_row = down + (e * D + n)[:, None] * I + i[None, :]
        if bias is not None:
            added = tl.load(bias + e * D + n, mask=n < D, other=0.0).to(tl.float32)
        for start in range(begin, end, ROWS):
            at = start + tl.arange(0, ROWS)
            pair = tl.load(pairs + at, mask=at < end, other=0).to(tl.int64)
            act_row = act + pair[None, :] * I + i[:, None]
            y = tl.zeros((OUTPUTS, ROWS), tl.float32)
            for k in range(0, I, BLOCK_K):
                rest = I - k
                live = (n < D)[:, None] & (i < rest)[None, :]
                rows = tl.load(
                    act_row + k, mask=(at < end)[None, :] & (i < rest)[:, None], other=0.0
                )
                y = dot(tl.load(down_row + k, mask=live, other=0.0), rows, y, DOT_FP32)
            if bias is not None:
                y += added[:, None]
            y *= tl.load(weights + pair, mask=at < end, other=0.0)[None, :]
            to = out + ((pair % K) * num_rows + pair // K)[None, :] * D + n[:, None]
            tl.store(to, y, mask=(at < end)[None, :] & (n < D)[:, None])
