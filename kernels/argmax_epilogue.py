"""What ends a tile of the head's GEMM where its logits are not wanted: one candidate a row of x.

Why: head_argmax.py. How: a tile [weight rows, rows of x] is ranked in the registers that hold its
sums and in their layout, one int32 an element (`argmax.ranked`), so no second tile of registers is
needed and one reduction over the weight rows finds value and index.

Invariant: the sums are the ones that would have been written, rounded to bf16 as they would have
been, so the winner is `argmax_rows`'s of those logits, bit for bit. Weight rows past the end rank
below every number. The lowest rank has no key of a number, and where a tile has no other the key is
below all.
"""

# Gluon is not typed for a type checker.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from graphengine.kernels import argmax

MAX_RANKED = 1 << 16  # weight rows that one CTA ranks: an index has 16 bits
# The same functions, compiled as Gluon's.
_ranked = gluon.jit(argmax.ranked.fn)
_key_of_rank = gluon.jit(argmax.key_of_rank.fn)
_index_of_rank = gluon.jit(argmax.index_of_rank.fn)
_packed_candidate = gluon.jit(argmax.packed_candidate.fn)


# Two sums to bf16 in one instruction, as fp32 bits: the compiler converts them one by one here
# (SASS of triton 3.6), with an instruction of a quarter of the rate or less.
ROUND_TWO: gl.constexpr = gl.constexpr("""{
    .reg .b32 both;
    cvt.rn.bf16x2.f32 both, $3, $2;
    shl.b32 $0, both, 16;
    and.b32 $1, both, 0xffff0000;
}""")


@gluon.jit
def lowest_ranks(ROWS: gl.constexpr, COLS: gl.constexpr, LAYOUT: gl.constexpr):
    """Ranks below all others [ROWS, COLS]."""
    return gl.full([ROWS, COLS], -(1 << 31), gl.int32, LAYOUT)


@gluon.jit
def better_ranks(best, y, index, live):
    """The larger of `best` and the ranks of y [ROWS, COLS]; index and live: of its weight rows."""
    bits = gl.inline_asm_elementwise(ROUND_TWO, "=r,=r,f,f", [y], gl.int32, is_pure=True, pack=2)
    rank = gl.where(live[:, None], _ranked(bits, index[:, None]), -(1 << 31))
    return gl.maximum(best, rank)


@gluon.jit
def store_candidates(best, candidate, place, num_places, t, T, first, step, ROWS: gl.constexpr):
    """Writes candidate[t + c, place] of [T, num_places] for every column c of the ranks.

    Ranked row i is weight row first + i // ROWS * step + i % ROWS.

    A thread holds rows r and r + 8; the rest of a column lies in eight lanes and several warps. It
    is turned through shared memory, so that a thread reduces a column's part alone: a third fewer
    instructions than a butterfly of shuffles that leaves all lanes with all results.
    """
    COLS: gl.constexpr = best.shape[1]
    HALF: gl.constexpr = best.shape[0] // 2
    ACROSS: gl.constexpr = min(gl.num_warps(), max(1, COLS // 32))
    DOWN: gl.constexpr = gl.num_warps() // ACROSS
    COLUMNS: gl.constexpr = gl.BlockedLayout([HALF // DOWN, 1], [1, 32], [DOWN, ACROSS], [1, 0])
    half = gl.max(best.reshape([HALF // 8, 2, 8, COLS]), axis=1).reshape([HALF, COLS])
    rank = gl.max(gl.convert_layout(half, COLUMNS), axis=0)
    i = _index_of_rank(rank)
    _store_best(rank, first + i // ROWS * step + i % ROWS, candidate, place, num_places, t, T)


@gluon.jit
def store_best(best, candidate, place, num_places, t, T, first):
    """As `store_candidates` for ranks of weight rows first + i, where there is no shared memory to
    turn them in; all of them may be past the end."""
    rank = gl.max(best, axis=0)
    _store_best(rank, first + _index_of_rank(rank), candidate, place, num_places, t, T)


@gluon.jit
def _store_best(rank, index, candidate, place, num_places, t, T):
    key = gl.where(rank == -(1 << 31), rank, _key_of_rank(rank))  # below every number's
    t = t + gl.arange(0, rank.shape[0], rank.type.layout)
    at = candidate + t.to(gl.int64) * num_places + place
    gl.store(at, _packed_candidate(key, index), mask=t < T)
