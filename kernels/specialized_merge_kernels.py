"""How the splits of specialized_attention_kernels.py are put together, and who writes what.

Legend as there. A target is (first row of the block, first head, behind the kv head's last, G).
"""

# Gluon is not typed for a type checker.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from graphengine.kernels.arrival_kernels import meet
from graphengine.kernels.chunk_attention_kernels import ROWS
from graphengine.kernels.triton_internals import barrier


@gluon.jit
def place_of(row, target, POSITIONS: gl.constexpr):
    """(row of q and out, query head, whether it exists) of packed rows."""
    first_row, first_head, behind_head, G = target
    t, head = row % POSITIONS, first_head + row // POSITIONS
    return first_row + t, head, (t < G) & (head < behind_head)


@gluon.jit
def _merge_rows(
    io,
    target,
    first,
    live,
    WIDTH: gl.constexpr,
    POSITIONS: gl.constexpr,
    SHARE: gl.constexpr,
    POW2: gl.constexpr,
):
    """SHARE packed rows of POW2/2 < live <= POW2 partials, in the order of their splits."""
    out, partial_out, partial_lse, _, T, N = io
    SPREAD: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    row = first + gl.arange(0, SHARE, gl.SliceLayout(1, SPREAD))
    t, head, exists = place_of(row, target, POSITIONS)
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, SPREAD))[None, :]
    none = float("-inf")
    highest = gl.full([SHARE], none, gl.float32, gl.SliceLayout(1, SPREAD))
    sums = ()
    tiles = ()
    for z in gl.static_range(POW2):
        written = exists & (z < live)
        index = (z * T + t) * N + head
        # .cg: from L2, because another multiprocessor has just written it.
        lse = gl.load(partial_lse + index, mask=written, other=none, cache_modifier=".cg")
        at = partial_out + index[:, None] * WIDTH + column
        tile = gl.load(at, mask=written[:, None], other=0.0, cache_modifier=".cg")
        highest = gl.maximum(highest, lse)
        sums = sums + (lse,)
        tiles = tiles + (tile,)
    shift = gl.where(highest == none, 0.0, highest)
    total = gl.zeros([SHARE], gl.float32, gl.SliceLayout(1, SPREAD))
    merged = gl.zeros([SHARE, WIDTH], gl.float32, SPREAD)
    for z in gl.static_range(POW2):
        weight = gl.exp2(sums[z] - shift)
        total += weight
        merged += tiles[z] * weight[:, None]
    merged = merged * (1.0 / gl.where(total == 0.0, 1.0, total))[:, None]
    at = (t * N + head)[:, None] * WIDTH + column
    gl.store(out + at, merged.to(gl.bfloat16), mask=exists[:, None])


@gluon.jit
def merge_together(
    io,
    target,
    split,
    live,
    WIDTH: gl.constexpr,
    POSITIONS: gl.constexpr,
    SPLITS: gl.constexpr,
    POLLS: gl.constexpr,
):
    """Merge a tile's rows inside the splits that made the partials, each a share of the rows."""
    word = io[3] + gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
    barrier()  # every thread's partial is stored before one thread says so
    has_all, mine = meet(word, split, live, POLLS)
    if has_all:
        for log2 in gl.static_range(1, 6):
            if (1 << log2) < 2 * SPLITS:  # noqa: SIM102 (known at compile time)
                if (live > (1 << log2) // 2) & (live <= 1 << log2):
                    SHARE: gl.constexpr = ROWS >> log2
                    for share in range(1 << log2):
                        if (mine >> (share % live)) & 1:
                            _merge_rows(
                                *(io, target, share * SHARE, live),
                                *(WIDTH, POSITIONS, SHARE, 1 << log2),
                            )


@gluon.jit
def store_zeros(out, target, N, WIDTH: gl.constexpr, POSITIONS: gl.constexpr):
    SPREAD: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, SPREAD))
    t, head, exists = place_of(row, target, POSITIONS)
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, SPREAD))[None, :]
    zeros = gl.zeros([ROWS, WIDTH], gl.bfloat16, SPREAD)
    gl.store(out + (t * N + head)[:, None] * WIDTH + column, zeros, mask=exists[:, None])
