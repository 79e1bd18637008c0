"""The drawn token: argmax of log-probability plus noise keyed by (seed, position, token).

Why: written with torch ops the noise of [16, 151936] logits is int64 hashes and float32 temporaries
of 20 MB each, in a kernel per operation. Here it is made in registers while the logits stream by
once, and the maximum is taken in two stages as in argmax.py.

Invariant: the token is a function of (seed, position, logits) alone: the noise knows no row, chunk
or step, and equal scores go to the lower index. Greedy rows, and rows that name no token, keep the
answer of `argmax_rows` and hash nothing.

Precision: the noise is `-log(E)` of an exponential number E; both are float32 within a few units of
their last place where it matters (small E: the winners), so a probability is off by about 1e-6 of
itself. Two candidates that close may be told apart differently on a CPU.

Cost: [16, 151936] in bf16 takes 16 us (one H200, profiles/results/
2026-11-22-h200-kernels-sampled.json). 120 instructions a logit bound it, for a 64-bit hash and two
logarithms: the 4.9 MB alone take 1.1 us at 4.46 TB/s. Two launches.

Legend: T rows of B requests (T / B each), V vocabulary, C chunks of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphengine.kernels.argmax import combine_argmax, ordered_key, packed_candidate
from graphengine.kernels.filter_threshold import TEMPERATURES, by_rows, inverse_temperature
from graphengine.kernels.interpreter import INTERPRET
from graphengine.kernels.launch import on_grid

CHUNK = 2048  # elements of a row in one program
BLOCK = 512  # elements in one load: 4 a thread with 4 warps
NUM_WARPS = 4

UNIFORM_BITS = 40
# splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014): the
# step of its counter, and the multipliers of its finalizer.
GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIERS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


# --- reference ---


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _right(x: Tensor, count: int) -> Tensor:
    """Logical shift; torch's of int64 is arithmetic."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def _mix(x: Tensor) -> Tensor:
    """The finalizer of splitmix64: a bijection of 64 bits in which every input bit matters."""
    x = (x ^ _right(x, 30)) * _signed(MULTIPLIERS[0])
    x = (x ^ _right(x, 27)) * _signed(MULTIPLIERS[1])
    return x ^ _right(x, 31)


def uniform(seed_T: Tensor, position_T: Tensor, num_tokens: int) -> Tensor:
    """Uniform numbers in (0, 1), float32 [T, V]: a hash of (seed, position, token).

    Small values keep their relative precision (40 bits below 1), and they are what the winner of
    152k candidates is made of.
    """
    golden = _signed(GOLDEN)
    row = _mix(_mix(seed_T + golden) ^ (position_T * golden))
    token = torch.arange(1, num_tokens + 1, device=seed_T.device)
    bits = _right(_mix(row[:, None] + token * golden), 64 - UNIFORM_BITS)
    return ((bits.float() + 0.5) * 2.0**-UNIFORM_BITS).clamp(max=1 - 2.0**-24)


def gumbel(seed_T: Tensor, position_T: Tensor, num_tokens: int) -> Tensor:
    """Standard Gumbel noise `-log(-log(1 - u))`, float32 [T, V]."""
    return -torch.log(-torch.log1p(-uniform(seed_T, position_T, num_tokens)))


def gumbel_argmax_reference(
    logits_TV: Tensor,
    best_T: Tensor,
    threshold_T: Tensor,
    positions_T: Tensor,
    temperature_B: Tensor,
    seed_B: Tensor,
) -> Tensor:
    """`gumbel_argmax` in plain torch."""
    return by_rows(_draw, logits_TV, best_T, threshold_T, positions_T, temperature_B, seed_B)


def _draw(
    logits_TV: Tensor,
    best_T: Tensor,
    threshold_T: Tensor,
    positions_T: Tensor,
    temperature_T: Tensor,
    seed_T: Tensor,
) -> Tensor:
    z_TV = logits_TV.float()
    # The largest becomes 0, so a small temperature cannot overflow.
    largest_T1 = z_TV.gather(-1, best_T.clamp(min=0)[:, None])
    scaled_TV = (z_TV - largest_T1) / temperature_T.clamp(*TEMPERATURES)[:, None]
    scores_TV = scaled_TV + gumbel(seed_T, positions_T + 1, z_TV.shape[1])
    scores_TV = scores_TV.masked_fill_(z_TV < threshold_T[:, None], -torch.inf)
    return torch.where((temperature_T > 0) & (best_T >= 0), scores_TV.argmax(dim=-1), best_T)


# --- kernel ---


def gumbel_argmax(
    logits_TV: Tensor,
    best_T: Tensor,
    threshold_T: Tensor,
    positions_T: Tensor,
    temperature_B: Tensor,
    seed_B: Tensor,
) -> Tensor:
    """Draws the token after each row.

        out[t] = argmax_{v : logit >= threshold} (logit[t, v] - logit[t, best]) / temperature + g
        g[t, v] = Gumbel noise keyed by (seed, positions[t] + 1, v);  temperature 0: out = best

    Args:
        logits_TV: [T, V] bf16, fp16 or fp32; last stride 1, row stride free; 1 <= V < 2^31.
        best_T: int64 [T], index of the largest logit (`argmax_rows`); negative ones are passed on.
        threshold_T: float32 [T], from `filter_threshold`.
        positions_T: int64 [T], of the rows; the token drawn stands one further.
        temperature_B: float32 [B]. Row t is of request t B / T.
        seed_B: int64 [B].
    Returns: int64 [T], in [0, V), or -1 where best_T is negative.
    Raises: ValueError for a wrong shape, dtype or stride.
    Source: the Gumbel-max trick (Gumbel 1954; Maddison et al., arXiv:1411.0030).
    """
    T, V = logits_TV.shape
    B = len(temperature_B)
    if not (T and B) or T % B:
        raise ValueError(f"{T} rows are not of {B} requests")
    if logits_TV.stride(1) != 1 or not logits_TV.dtype.is_floating_point:
        raise ValueError(
            f"logits are {logits_TV.dtype}, strides {logits_TV.stride()}; need dense rows of floats"
        )
    wanted = {
        "best": (best_T, T, torch.int64),
        "threshold": (threshold_T, T, torch.float32),
        "positions": (positions_T, T, torch.int64),
        "temperature": (temperature_B, B, torch.float32),
        "seed": (seed_B, B, torch.int64),
    }
    for name, (x, size, dtype) in wanted.items():
        if x.shape != (size,) or x.dtype != dtype or not x.is_contiguous():
            raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}; need {dtype} [{size}]")
    if not (logits_TV.is_cuda or INTERPRET):
        return gumbel_argmax_reference(
            logits_TV, best_T, threshold_T, positions_T, temperature_B, seed_B
        )
    C = (V + CHUNK - 1) // CHUNK
    candidate_TC = torch.empty((T, C), dtype=torch.int64, device=logits_TV.device)
    on_grid(_chunk_kernel, (C, T))(
        logits_TV,
        best_T,
        threshold_T,
        positions_T,
        temperature_B,
        seed_B,
        candidate_TC,
        logits_TV.stride(0),
        V,
        T // B,
        CHUNK=CHUNK,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )
    return combine_argmax(candidate_TC)


@triton.jit
def _splitmix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _exponential(u):
    """-log(1 - u): the series where 1 - u would round u away; its error is below 1e-8 of it."""
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6))))))
    return tl.where(u < 0.0625, series, -tl.log(1 - u))


@triton.jit(do_not_specialize=["rows"])
def _chunk_kernel(
    logits,
    best,
    threshold,
    positions,
    temperature,
    seed,
    candidate,
    row_stride,
    V,
    rows,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    chunk = tl.program_id(0)
    t = tl.program_id(1).to(tl.int64)
    request = t // rows
    out = candidate + t * tl.num_programs(0) + chunk
    first = tl.load(best + t)
    degrees = tl.load(temperature + request)
    if (first < 0) | (degrees <= 0):
        # Every chunk names the row's best; the key of a NaN stands for none.
        key = tl.where(first < 0, 0x7FFFFFFF, 0)
        tl.store(out, packed_candidate(key, tl.maximum(first, 0).to(tl.int32)))
        return
    row = logits + t * row_stride
    largest = tl.load(row + first).to(tl.float32)
    lowest = tl.load(threshold + t)
    inverse = inverse_temperature(degrees)
    golden = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    position = (tl.load(positions + t) + 1).to(tl.uint64)
    state = _splitmix(_splitmix(tl.load(seed + request).to(tl.uint64) + golden) ^ position * golden)
    lane = tl.arange(0, BLOCK)
    best_key = tl.full([BLOCK], -(1 << 31), tl.int32)
    best_index = tl.full([BLOCK], 0, tl.int32)
    for offset in tl.static_range(0, CHUNK, BLOCK):  # pyright: ignore[reportGeneralTypeIssues]
        index = chunk * CHUNK + offset + lane
        x = tl.load(row + index, mask=index < V, other=-float("inf")).to(tl.float32)
        bits = _splitmix(state + (index + 1).to(tl.uint64) * golden) >> 24  # leaves 40
        u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.0**-40, 1 - 2.0**-24)
        score = (x - largest) * inverse - tl.log(_exponential(u))
        score = tl.where(x >= lowest, score, -float("inf"))
        key = ordered_key(score)
        better = key > best_key  # strict: a lane sees its indices in rising order
        best_key = tl.where(better, key, best_key)
        best_index = tl.where(better, index, best_index)
    tl.store(out, tl.max(packed_candidate(best_key, best_index), axis=0))
