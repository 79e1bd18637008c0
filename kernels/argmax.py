"""Row-wise argmax over a vocabulary, in two stages.

Why: torch.argmax of [16, 151936] gives each row to one program, so 16 of the GPU's 132
multiprocessors stream 4.9 MB while the others wait, twice per decode step. Here every row is cut
into chunks that fill the machine, and a second tiny kernel combines them.

Invariant: the answer is the one that torch documents on the CPU: the first index of the largest
value, NaN above everything, -0.0 equal to 0.0. It does not depend on the chunk size, because the
order of candidates is total: (value as a sortable integer, then the lower index). If ties were
left to the schedule, greedy decoding would not be reproducible and draft and verify could
disagree about equal logits.

A row whose largest value is not finite (a NaN or +inf anywhere, or -inf everywhere) names no token:
its answer is NOT_FINITE. Every logit is read here anyway and the largest value is at hand, so a
broken model is noticed for two comparisons a row.

The candidates of a row may also come out of the head's GEMM (head_argmax.py): `ranked` is what
its tiles are reduced by, an order of 16 bits of logit and 16 of index, so that one reduction of
int32 finds both.

Cost: T * V elements are read once; [16, 151936] bf16 is 4.9 MB, 1.1 us at 4.46 TB/s (less from
L2, where the lm_head has just written it), plus two launches.

Legend: T rows, V vocabulary, C chunks of a row.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from graphengine.kernels.interpreter import INTERPRET
from graphengine.kernels.launch import on_grid, pdl_options

CHUNK = 4096  # elements of a row in one program
BLOCK = 1024  # elements in one load: 16 bytes a thread in bf16 with 4 warps
NUM_WARPS = 4
NOT_FINITE = -1  # the answer for a row that names no token


def argmax_rows_reference(logits_TV: torch.Tensor) -> torch.Tensor:
    """`argmax_rows` in plain torch."""
    best = logits_TV.argmax(dim=-1, keepdim=True)
    return torch.where(logits_TV.gather(-1, best).isfinite(), best, NOT_FINITE)[:, 0]


def argmax_rows(logits_TV: torch.Tensor) -> torch.Tensor:
    """Index of each row's largest element.

    out[t] = min{v : logits[t, v] == max_w logits[t, w]}, NaN counting as the largest value;
    NOT_FINITE (-1) where that maximum is NaN, +inf or -inf

    Args: logits_TV: [T, V] bf16, fp16 or fp32; last stride 1, row stride free; 1 <= V < 2^31.
    Returns: int64 [T], -1 or in [0, V). Clamp it before it indexes anything.
    Raises: ValueError for another rank, dtype or stride.
    Source: torch.argmax ("the indices of the first maximal value are returned").
    """
    if logits_TV.dim() != 2 or logits_TV.shape[1] == 0:
        raise ValueError(f"logits are {tuple(logits_TV.shape)}; need [T, V] with V >= 1")
    if logits_TV.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"logits are {logits_TV.dtype}; need bfloat16, float16 or float32")
    if logits_TV.stride(1) != 1:
        raise ValueError(f"logits have strides {logits_TV.stride()}; make rows contiguous")
    if logits_TV.is_cpu and not (INTERPRET or torch.compiler.is_compiling()):
        # The first call of any op imports the compiler: 1 s.
        return argmax_rows_reference(logits_TV)
    return torch.ops.graphengine.argmax_rows(logits_TV)


def _launch(logits_TV: torch.Tensor) -> torch.Tensor:
    T, V = logits_TV.shape
    C = (V + CHUNK - 1) // CHUNK
    candidate_TC = torch.empty((T, C), dtype=torch.int64, device=logits_TV.device)
    if T:
        on_grid(_chunk_argmax_kernel, (C, T))(
            logits_TV,
            candidate_TC,
            logits_TV.stride(0),
            V,
            CHUNK=CHUNK,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
    return combine_argmax(candidate_TC)


# A custom op: a segment may end in it, and dynamo does not trace a launch with launch_pdl.
@torch.library.custom_op(
    "graphengine::argmax_rows", mutates_args=(), schema="(Tensor logits) -> Tensor"
)
def _argmax_rows_op(logits):
    return _launch(logits) if logits.is_cuda or INTERPRET else argmax_rows_reference(logits)


@_argmax_rows_op.register_fake
def _(logits):
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


def combine_argmax(candidate_TC: torch.Tensor) -> torch.Tensor:
    """The second stage: index of each row's largest `packed_candidate`, int64 [T]; NOT_FINITE where
    its key is no number's."""
    T, C = candidate_TC.shape
    best_T = torch.empty(T, dtype=torch.int64, device=candidate_TC.device)
    if T:
        C_POW2 = triton.next_power_of_2(C)
        on_grid(combine_argmax_kernel, (T,))(
            candidate_TC,
            best_T,
            C,
            C_POW2=C_POW2,
            NOT_FINITE=NOT_FINITE,
            num_warps=max(1, min(8, C_POW2 // 256)),
            **pdl_options(candidate_TC.device),
        )
    return best_T


@triton.jit
def ordered_key(x):
    """float32 to an int32 of the same order: flip the magnitude of negatives. NaN is the largest,
    -0.0 equals 0.0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(x != x, 0x7FFFFFFF, key)


@triton.jit
def packed_candidate(key, index):
    """Key above, complement of the index below: the maximum is the lowest index of the best key."""
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def ranked(bits, index):
    """int32 of the order of (value, the lower index), for the fp32 bits of a bf16 value.

    Its key, which for a negative is minus its magnitude, above, and the complement of index < 2^16
    below. NaN, which arithmetic leaves without a sign, is the largest."""
    sign = bits >> 31
    return ((bits & 0x7FFFFFFF) ^ sign) - sign + (0xFFFF - index)


@triton.jit
def key_of_rank(rank):
    """`ordered_key` of the bf16 that was ranked."""
    key = rank & -0x10000
    return key + (key >> 31)


@triton.jit
def index_of_rank(rank):
    """The index that was ranked."""
    return 0xFFFF - (rank & 0xFFFF)


@triton.jit
def _chunk_argmax_kernel(
    logits, candidate, row_stride, V, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    chunk = tl.program_id(0)
    t = tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    lowest = tl.constexpr(-(1 << 31))  # below the key of -inf, so it never wins
    best_key = tl.full([BLOCK], lowest, tl.int32)
    best_index = tl.full([BLOCK], 0, tl.int32)
    for offset in tl.static_range(0, CHUNK, BLOCK):  # pyright: ignore[reportGeneralTypeIssues]
        index = chunk * CHUNK + offset + lane
        live = index < V
        x = tl.load(logits + t * row_stride + index, mask=live, other=0.0).to(tl.float32)
        key = tl.where(live, ordered_key(x), lowest)
        better = key > best_key  # strict: a lane sees its indices in rising order
        best_key = tl.where(better, key, best_key)
        best_index = tl.where(better, index, best_index)
    packed = packed_candidate(best_key, best_index)
    tl.store(candidate + t * tl.num_programs(0) + chunk, tl.max(packed, axis=0))


@triton.jit(do_not_specialize=["C"])
def combine_argmax_kernel(
    candidate, best, C, C_POW2: tl.constexpr, NOT_FINITE: tl.constexpr, PDL: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, C_POW2)
    lowest = tl.constexpr(-(1 << 63))
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    packed = tl.load(candidate + t * C + chunk, mask=chunk < C, other=lowest)
    winner = tl.max(packed, axis=0)
    key = winner >> 32
    finite = (key < 0x7F800000) & (key > -0x7F800001)  # the keys of +inf and -inf; NaN is above
    tl.store(best + t, tl.where(finite, 0x7FFFFFFF - (winner & 0x7FFFFFFF), NOT_FINITE))
