"""Min-p, top-k, then top-p, as one number a row: the smallest logit that may be drawn.

Why: sorting 152k logits a row, or bisecting their range in 31 passes, costs more than the rest of a
sampled step. Here a logit is an integer of the same order (`ordered_key`), and the threshold is
found four bits at a time: a pass adds up the weight of the logits at or above each of 16 candidates
and keeps the largest candidate that still reaches the goal. bf16 logits have 16 bits that differ:
4 passes. The weight of a logit is 1 for top-k; for top-p it is its probability. Min-p needs no
search: it is a distance from the largest logit, and raises top-k's threshold.

Invariant: sums are of integers (counts, or probabilities in steps of 2^-42 of the largest), so
neither the order of additions nor who adds matters: a row's threshold is a function of its logits
and its request's settings alone, in every bucket and graph mode. Rounding to steps loses less than
V * 2^-42 of the mass (3.5e-8 at 152k tokens) and the goal, top_p times the sum, is a float32
product, so the cut is off by a float32 rounding of the mass and the error of `exp` at most.

Equal logits stand or fall together: ties with the last one kept are kept. A row without a filter, a
greedy row and one that names no token (best < 0) leave each launch after three loads.

Cost: [16, 151936] in bf16 takes 15 us where no row has a filter, 61 with top-k, 86 with top-p and
128 with both (one H200, before there was min-p: profiles/results/
2026-11-22-h200-kernels-sampled.json). Integer operations bound it, 55 a logit in a pass of top-k
and 95 in one of top-p: a pass reads 4.9 MB, 1.1 us at 4.46 TB/s. 10 launches and a memset.

Legend: T rows of B requests (T / B each), V vocabulary.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphengine.kernels.argmax import ordered_key
from graphengine.kernels.interpreter import INTERPRET
from graphengine.kernels.launch import on_grid

RADIX = 16  # candidates of a pass; digits are 4 bits
PROGRAMS = 660  # of a launch at most: as many as 132 multiprocessors hold
LANES = 128  # elements in one load: one a thread, which keeps its RADIX sums in registers
UNROLL = 4  # loads in flight
NUM_WARPS = 4
# Leading bits of a float32 key that differ between numbers of a type, in digits.
NUM_PASSES = {torch.bfloat16: 4, torch.float16: 5, torch.float32: 8}
MASS_ONE = 2.0**42  # the largest probability of a row
TEMPERATURES = 1e-30, 1e30  # nearest of these beyond: then no difference times 1 / t is a NaN
MAX_VOCAB = 2**20  # so that a sum stays below 2^63
REFERENCE_ROWS = 64  # at once: int64 hashes or sums of 64 rows of 152k tokens are 78 MB


def filter_threshold_reference(
    logits_TV: Tensor,
    best_T: Tensor,
    temperature_B: Tensor,
    top_p_B: Tensor,
    top_k_B: Tensor,
    min_p_B: Tensor,
) -> Tensor:
    """`filter_threshold` in plain torch, by sorting."""
    return by_rows(_sorted_threshold, logits_TV, best_T, temperature_B, top_p_B, top_k_B, min_p_B)


def by_rows(function: Callable[..., Tensor], logits_TV: Tensor, *columns: Tensor) -> Tensor:
    """A reference of some rows at a time; columns are of rows, or of requests with T / B rows."""
    T = len(logits_TV)
    tensors = (logits_TV, *(x.repeat_interleave(T // len(x)) for x in columns))
    pieces = zip(*(x.split(REFERENCE_ROWS) for x in tensors), strict=True)
    return torch.cat([function(*piece) for piece in pieces])


def _sorted_threshold(
    logits_TV: Tensor,
    best_T: Tensor,
    temperature_T: Tensor,
    top_p_T: Tensor,
    top_k_T: Tensor,
    min_p_T: Tensor,
) -> Tensor:
    T, V = logits_TV.shape
    drawn_T = (temperature_T > 0) & (best_T >= 0)
    by_k_T, by_p_T = drawn_T & (top_k_T > 0), drawn_T & (top_p_T < 1)
    if not (by_k_T | by_p_T | (drawn_T & (min_p_T > 0))).any():
        return temperature_T.new_full((T,), -torch.inf)
    z_TV = logits_TV.float().sort(dim=-1, descending=True).values
    kth_T1 = z_TV.gather(-1, top_k_T.long().clamp(1, V)[:, None] - 1)
    floor_T1 = torch.where(by_k_T[:, None], kth_T1, -torch.inf)
    degrees_T = temperature_T.clamp(*TEMPERATURES)
    likely_T1 = z_TV[:, :1] + (degrees_T * min_p_T.log())[:, None]
    floor_T1 = torch.where(drawn_T[:, None], floor_T1.maximum(likely_T1), floor_T1)
    scaled_TV = (z_TV - z_TV[:, :1]) / degrees_T[:, None]
    kept_TV = drawn_T[:, None] & (z_TV >= floor_T1)
    mass_TV = torch.where(kept_TV, scaled_TV.exp() * MASS_ONE, 0).long().cumsum(dim=-1)
    total_T = mass_TV[:, -1]
    goal_T = (total_T.float() * top_p_T).long().clamp(min=1).minimum(total_T)
    last_T = (mass_TV < goal_T[:, None]).sum(dim=-1).clamp(max=V - 1)
    last_T1 = z_TV.gather(-1, last_T[:, None])
    return torch.where(by_p_T[:, None], last_T1, floor_T1)[:, 0]


def filter_threshold(
    logits_TV: Tensor,
    best_T: Tensor,
    temperature_B: Tensor,
    top_p_B: Tensor,
    top_k_B: Tensor,
    min_p_B: Tensor,
) -> Tensor:
    """The logit of the last token that min-p, top-k and then top-p leave.

        floor[t] = max(the top_k-th largest logit, largest + temperature log(min_p))   (0: -inf)
        out[t] = max{x : sum_{logit >= x} p >= top_p * sum p}                 (top_p 1: floor)
        p[v] = exp((logit[v] - largest) / temperature) if logit[v] >= floor[t] else 0

    Args:
        logits_TV: [T, V] bf16, fp16 or fp32; last stride 1, row stride free; 1 <= V <= 2^20.
        best_T: int64 [T], index of the largest logit (`argmax_rows`); negative: no answer wanted.
        temperature_B: float32 [B]; 0 is greedy, so without a filter. Row t is of request t B / T.
        top_p_B: float32 [B] in (0, 1].
        top_k_B: int32 [B], 0 keeps all, more than V as well.
        min_p_B: float32 [B] in [0, 1].
    Returns: float32 [T]: one of the row's logits, min-p's bound, or -inf. Keep `logits >= out`.
    Raises: ValueError for a wrong shape, dtype or stride.
    Source: top-p as in Holtzman et al., arXiv:1904.09751; min-p: Nguyen et al., arXiv:2407.01082;
        the order as in vLLM (in transformers min-p comes last).
    """
    T, V = logits_TV.shape
    B = len(temperature_B)
    if logits_TV.dtype not in NUM_PASSES or logits_TV.stride(1) != 1 or not 1 <= V <= MAX_VOCAB:
        raise ValueError(
            f"logits are {logits_TV.dtype} {tuple(logits_TV.shape)}, strides "
            f"{logits_TV.stride()}; need contiguous rows of 1 to {MAX_VOCAB} floats"
        )
    if not (T and B) or T % B:
        raise ValueError(f"{T} rows are not of {B} requests")
    settings = (temperature_B, top_p_B, top_k_B)
    dtypes = (torch.float32, torch.float32, torch.int32, torch.float32)
    names = ("temperature", "top_p", "top_k", "min_p")
    for name, x, dtype in zip(names, (*settings, min_p_B), dtypes, strict=True):
        if x.shape != (B,) or x.dtype != dtype or not x.is_contiguous():
            raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}; need {dtype} [{B}]")
    if not (logits_TV.is_cuda or INTERPRET):
        return filter_threshold_reference(logits_TV, best_T, *settings, min_p_B)
    num_passes = NUM_PASSES[logits_TV.dtype]
    row_programs = max(1, min((V + LANES - 1) // LANES, PROGRAMS // T))
    sums = torch.zeros(2, T, num_passes, RADIX, dtype=torch.int64, device=logits_TV.device)
    # Two tensors: both must be aligned alike, or a row alone would compile other kernels.
    floor_T, threshold_T = (temperature_B.new_empty(T) for _ in range(2))
    for by_mass, found_T in ((False, floor_T), (True, threshold_T)):
        row_of_sums = sums[int(by_mass)]
        for step in range(num_passes):
            on_grid(_pass_kernel, (row_programs, T))(
                logits_TV,
                best_T,
                *settings,
                floor_T,
                row_of_sums,
                logits_TV.stride(0),
                V,
                T // B,
                step,
                num_passes,
                MASS_ONE=MASS_ONE,
                BY_MASS=by_mass,
                RADIX=RADIX,
                LANES=LANES,
                UNROLL=UNROLL,
                num_warps=NUM_WARPS,
            )
        on_grid(_finish_kernel, (T,))(
            logits_TV,
            best_T,
            *settings,
            min_p_B,
            floor_T,
            row_of_sums,
            found_T,
            logits_TV.stride(0),
            V,
            T // B,
            num_passes,
            BY_MASS=by_mass,
            RADIX=RADIX,
            num_warps=1,
        )
    return threshold_T


@triton.jit
def inverse_temperature(degrees):
    """1 / temperature, which is taken to lie in TEMPERATURES."""
    return 1 / tl.minimum(tl.maximum(degrees, 1e-30), 1e30)


@triton.jit
def _is_filtered(best, temperature, top_p, top_k, t, request, BY_MASS: tl.constexpr):
    drawn = (tl.load(best + t) >= 0) & (tl.load(temperature + request) > 0)
    if BY_MASS:
        return drawn & (tl.load(top_p + request) < 1)
    return drawn & (tl.load(top_k + request) > 0)


@triton.jit
def _found_key(
    sums_row, top_p, top_k, request, V, num_passes, BY_MASS: tl.constexpr, RADIX: tl.constexpr
):
    """The threshold's key as far as `num_passes` passes have found it; the other bits are 0."""
    if BY_MASS:
        total = tl.load(sums_row)  # at or above the lowest key of all
        goal = (total.to(tl.float32) * tl.load(top_p + request)).to(tl.int64)
        goal = tl.minimum(tl.maximum(goal, 1), total)
    else:
        goal = tl.minimum(tl.load(top_k + request), V).to(tl.int64)
    digit = tl.arange(0, RADIX)
    key = tl.full([], -(1 << 31), tl.int32)
    for step in range(num_passes):
        # Sums fall from digit to digit, and that of digit 0 was reached one pass before.
        reached = tl.load(sums_row + step * RADIX + digit) >= goal
        key += (tl.sum(reached.to(tl.int32), axis=0) - 1) << (28 - 4 * step)
    return key


@triton.jit(do_not_specialize=["rows", "step", "num_passes"])
def _pass_kernel(
    logits,
    best,
    temperature,
    top_p,
    top_k,
    floor,
    sums,
    row_stride,
    V,
    rows,
    step,
    num_passes,
    MASS_ONE: tl.constexpr,
    BY_MASS: tl.constexpr,
    RADIX: tl.constexpr,
    LANES: tl.constexpr,
    UNROLL: tl.constexpr,
):
    t = tl.program_id(1).to(tl.int64)
    request = t // rows
    if not _is_filtered(best, temperature, top_p, top_k, t, request, BY_MASS):
        return
    sums_row = sums + t * num_passes * RADIX
    known = _found_key(sums_row, top_p, top_k, request, V, step, BY_MASS, RADIX)
    digit = tl.arange(0, RADIX)
    candidate = known + (digit << (28 - 4 * step))  # wraps around zero, as keys do
    row = logits + t * row_stride
    largest = tl.load(row + tl.load(best + t)).to(tl.float32)
    lowest = tl.load(floor + t) if BY_MASS else 0.0
    inverse = inverse_temperature(tl.load(temperature + request))
    lane = tl.arange(0, LANES)
    total = tl.zeros([RADIX, LANES], tl.int64 if BY_MASS else tl.int32)
    first, stride = tl.program_id(0) * LANES, tl.num_programs(0) * LANES
    for start in tl.range(first, V, stride, loop_unroll_factor=UNROLL):
        live = start + lane < V
        x = tl.load(row + start + lane, mask=live, other=-float("inf")).to(tl.float32)
        if BY_MASS:
            p = tl.exp((x - largest) * inverse)
            weight = tl.where(live & (x >= lowest), (p * MASS_ONE).to(tl.int64), 0)
        else:
            weight = live.to(tl.int32)
        total += tl.where(ordered_key(x)[None, :] >= candidate[:, None], weight[None, :], 0)
    above = tl.sum(total, axis=1).to(tl.int64)
    tl.atomic_add(sums_row + step * RADIX + digit, above, sem="relaxed")


@triton.jit(do_not_specialize=["rows", "num_passes"])
def _finish_kernel(
    logits,
    best,
    temperature,
    top_p,
    top_k,
    min_p,
    floor,
    sums,
    found,
    row_stride,
    V,
    rows,
    num_passes,
    BY_MASS: tl.constexpr,
    RADIX: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    request = t // rows
    threshold = tl.load(floor + t) if BY_MASS else -float("inf")
    if _is_filtered(best, temperature, top_p, top_k, t, request, BY_MASS):
        sums_row = sums + t * num_passes * RADIX
        key = _found_key(sums_row, top_p, top_k, request, V, num_passes, BY_MASS, RADIX)
        # Bits that no pass looked at: 0 in a positive number of a short type, so 1 in the key of a
        # negative one. With them the key is that of a logit.
        unseen = (1 << (32 - 4 * num_passes)) - 1
        key = tl.where(key < 0, key | unseen, key)
        threshold = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    if not BY_MASS:
        first, share = tl.load(best + t), tl.load(min_p + request)
        degrees = tl.load(temperature + request)
        if (first >= 0) & (degrees > 0) & (share > 0):
            largest = tl.load(logits + t * row_stride + first).to(tl.float32)
            distance = tl.log(share) / inverse_temperature(degrees)
            threshold = tl.maximum(threshold, largest + distance)
    tl.store(found + t, threshold)
