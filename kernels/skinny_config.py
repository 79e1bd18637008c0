"""Launch configs of our GEMMs: a measured table, and a rule for every other shape.

Invariant: a config changes the order of a sum (num_splits, block_k) and the time. In FP8 `cols`
also says how x is rounded: to one row, not to hi and lo; so it may stand above SKINNY_T rows alone.

Legend: T rows, D inputs, E outputs (SwiGLU: J = 2 * I, gate and up), Z splits.
"""

from typing import NamedTuple

MIN_COLS = 16  # activation rows are padded to this: the least that a tensor-core dot takes
MAX_T = 256
NARROW_T = 128  # above it a tile is one of wide_linear.py, which has `cols`
MIDDLE_T = 192  # above it no tile is one of specialized_linear.py
SKINNY_T = 64  # above it cuBLAS streams most weights as well: only what is in the table is ours
DEFAULT_SMS = 132  # of the table and the default rule; the grid asks the device
MAX_SPLITS = 8  # Inductor unrolls a sum over fewer than 8; more partials cost more than they give
PDL_OFF, PDL_LATE, PDL_EARLY = 0, 1, 2


class SkinnyConfig(NamedTuple):
    """What may be tuned without changing a result beyond rounding; all integers."""

    rows: int = 64  # weight rows of a tile (SwiGLU: of the gate and of the up tile; cols: of both)
    block_k: int = 128
    num_stages: int = 4  # blocks in flight in a CTA
    num_splits: int = 1  # Z
    ctas_per_sm: int = 2  # without cols: at most so many CTAs per multiprocessor; each loops
    num_warps: int = 4  # without consumers
    pdl: int = PDL_LATE  # when the next kernel may start: OFF, after the last load, EARLY
    use_tma: int = 1  # 0: the pointer kernel even on Hopper
    cols: int = 0  # rows of x in a tile of wide_linear.py; 0: all, in skinny_kernels.py
    consumers: int = 0  # with cols: warpgroups in specialized_linear.py; 0: wide_linear.py


# (E, D, bytes of a weight, T rounded up to 16 .. 256 or 192) -> config. Filled by
# tools/tune_skinny.py; (19456, 2560, 1, 256) is its second, whose first was a tile that is gone.
# What has consumers was chosen by scripts of which tools/judge_skinny.py is what is left, at up to
# 128 rows by what a step of the engine takes (2026-11-22-h200-specialized.json): alone more shapes
# are faster. A layer of 4B in bf16 at 256 rows was judged so too (-gemm-in-engine.json).
TUNED: dict[tuple[int, int, int, int], SkinnyConfig] = {
    (6144, 4096, 2, 16): SkinnyConfig(64, 256, 5, 4, 1, 4, 2, 1),
    (4096, 4096, 2, 16): SkinnyConfig(64, 256, 5, 2, 1, 4, 2, 1),
    (24576, 4096, 2, 16): SkinnyConfig(192, 128, 4, 1, 1, 4, 2, 1, 16, 3),
    (4096, 12288, 2, 16): SkinnyConfig(64, 256, 5, 2, 1, 4, 1, 1),
    (4096, 20480, 2, 16): SkinnyConfig(64, 256, 5, 2, 1, 4, 1, 1),
    (151936, 4096, 2, 16): SkinnyConfig(64, 128, 3, 1, 3, 4, 1, 1),
    (6144, 4096, 1, 16): SkinnyConfig(64, 128, 4, 4, 3, 4, 2, 1),
    (4096, 4096, 1, 16): SkinnyConfig(64, 256, 2, 4, 2, 4, 2, 1),
    (24576, 4096, 1, 16): SkinnyConfig(64, 256, 2, 1, 2, 4, 2, 1),
    (4096, 12288, 1, 16): SkinnyConfig(64, 256, 4, 4, 2, 4, 2, 1),
    (4096, 20480, 1, 16): SkinnyConfig(64, 256, 8, 4, 1, 4, 1, 1),
    (151936, 4096, 1, 16): SkinnyConfig(64, 256, 2, 1, 4, 4, 1, 1),
    (6144, 2560, 2, 16): SkinnyConfig(64, 256, 2, 5, 2, 4, 2, 1),
    (2560, 4096, 2, 16): SkinnyConfig(64, 256, 5, 3, 1, 4, 2, 1),
    (19456, 2560, 2, 16): SkinnyConfig(192, 128, 4, 1, 1, 4, 2, 1, 16, 3),
    (2560, 9728, 2, 16): SkinnyConfig(64, 256, 5, 3, 1, 4, 2, 1),
    (2560, 12800, 2, 16): SkinnyConfig(64, 128, 10, 3, 1, 4, 1, 1),
    (151936, 2560, 2, 16): SkinnyConfig(64, 128, 11, 1, 1, 4, 1, 1, 16, 1),
    (6144, 2560, 1, 16): SkinnyConfig(64, 256, 3, 2, 2, 4, 1, 1),
    (2560, 4096, 1, 16): SkinnyConfig(64, 256, 3, 4, 2, 4, 1, 1),
    (19456, 2560, 1, 16): SkinnyConfig(64, 256, 2, 1, 2, 4, 1, 1),
    (2560, 9728, 1, 16): SkinnyConfig(64, 256, 4, 5, 2, 4, 1, 1),
    (2560, 12800, 1, 16): SkinnyConfig(64, 128, 6, 6, 2, 4, 1, 1),
    (151936, 2560, 1, 16): SkinnyConfig(64, 256, 2, 1, 4, 4, 1, 1),
    (6144, 4096, 2, 128): SkinnyConfig(128, 64, 6, 2, 1, 8, 1, 1, 128),
    (4096, 4096, 2, 128): SkinnyConfig(64, 128, 4, 2, 1, 4, 2, 1),
    (24576, 4096, 2, 128): SkinnyConfig(192, 64, 5, 1, 1, 4, 1, 1, 128),
    (4096, 12288, 2, 128): SkinnyConfig(64, 128, 4, 2, 1, 4, 2, 1),
    (4096, 20480, 2, 128): SkinnyConfig(128, 64, 6, 4, 1, 8, 1, 1, 128),
    (151936, 4096, 2, 128): SkinnyConfig(192, 64, 5, 1, 1, 4, 1, 1, 128),
    (6144, 4096, 1, 128): SkinnyConfig(64, 128, 8, 1, 1, 4, 1, 1, 128, 1),
    (4096, 4096, 1, 128): SkinnyConfig(64, 128, 8, 2, 1, 4, 1, 1, 128, 1),
    (24576, 4096, 1, 128): SkinnyConfig(64, 128, 3, 1, 1, 4, 1, 1, 128),
    (4096, 12288, 1, 128): SkinnyConfig(64, 128, 8, 2, 1, 4, 1, 1, 128, 1),
    (4096, 20480, 1, 128): SkinnyConfig(64, 128, 8, 2, 1, 4, 1, 1, 128, 1),
    (151936, 4096, 1, 128): SkinnyConfig(192, 64, 5, 1, 1, 4, 1, 1, 128),
    (6144, 2560, 2, 128): SkinnyConfig(64, 128, 4, 1, 1, 4, 2, 1),
    (2560, 4096, 2, 128): SkinnyConfig(64, 128, 4, 3, 1, 4, 1, 1),
    (19456, 2560, 2, 128): SkinnyConfig(192, 64, 5, 1, 1, 4, 1, 1, 128),
    (2560, 9728, 2, 128): SkinnyConfig(64, 128, 4, 3, 1, 4, 2, 1),
    (2560, 12800, 2, 128): SkinnyConfig(64, 128, 4, 3, 1, 4, 1, 1),
    (151936, 2560, 2, 128): SkinnyConfig(192, 64, 5, 1, 1, 4, 1, 1, 128),
    (2560, 12800, 1, 128): SkinnyConfig(64, 128, 8, 3, 1, 4, 1, 1, 128, 1),
    (151936, 2560, 1, 128): SkinnyConfig(192, 64, 5, 1, 1, 4, 1, 1, 128),
    (6144, 2560, 1, 128): SkinnyConfig(64, 128, 8, 1, 1, 4, 1, 1, 128, 1),
    (2560, 4096, 1, 128): SkinnyConfig(64, 128, 8, 3, 1, 4, 1, 1, 128, 1),
    (19456, 2560, 1, 128): SkinnyConfig(64, 128, 3, 1, 1, 4, 1, 1, 128),
    (2560, 9728, 1, 128): SkinnyConfig(64, 128, 8, 3, 1, 4, 1, 1, 128, 1),
    (6144, 4096, 2, 192): SkinnyConfig(64, 64, 6, 1, 1, 4, 1, 1, 192, 1),
    (4096, 4096, 2, 192): SkinnyConfig(64, 64, 6, 2, 1, 4, 1, 1, 192, 1),
    (4096, 12288, 2, 192): SkinnyConfig(64, 64, 6, 2, 1, 4, 1, 1, 192, 1),
    (4096, 20480, 2, 192): SkinnyConfig(64, 64, 6, 2, 1, 4, 1, 1, 192, 1),
    (24576, 4096, 2, 192): SkinnyConfig(192, 64, 4, 1, 1, 4, 1, 1, 192, 3),
    (151936, 4096, 2, 192): SkinnyConfig(128, 64, 5, 1, 1, 4, 1, 1, 192, 2),
    (6144, 2560, 2, 192): SkinnyConfig(64, 64, 6, 1, 1, 4, 1, 1, 192, 1),
    (2560, 4096, 2, 192): SkinnyConfig(64, 64, 6, 3, 1, 4, 1, 1, 192, 1),
    (2560, 9728, 2, 192): SkinnyConfig(64, 64, 6, 3, 1, 4, 1, 1, 192, 1),
    (2560, 12800, 2, 192): SkinnyConfig(64, 64, 6, 3, 1, 4, 1, 1, 192, 1),
    (19456, 2560, 2, 192): SkinnyConfig(192, 64, 4, 1, 1, 4, 1, 1, 192, 3),
    (151936, 2560, 2, 192): SkinnyConfig(128, 64, 5, 1, 1, 4, 1, 1, 192, 2),
    (6144, 4096, 1, 192): SkinnyConfig(64, 128, 6, 1, 1, 4, 1, 1, 192, 1),
    (4096, 4096, 1, 192): SkinnyConfig(64, 128, 6, 2, 1, 4, 1, 1, 192, 1),
    (4096, 12288, 1, 192): SkinnyConfig(64, 128, 6, 2, 1, 4, 1, 1, 192, 1),
    (4096, 20480, 1, 192): SkinnyConfig(64, 128, 6, 2, 1, 4, 1, 1, 192, 1),
    (24576, 4096, 1, 192): SkinnyConfig(192, 128, 4, 1, 1, 4, 1, 1, 192, 3),
    (151936, 4096, 1, 192): SkinnyConfig(128, 128, 5, 1, 1, 4, 1, 1, 192, 2),
    (6144, 2560, 1, 192): SkinnyConfig(64, 128, 6, 1, 1, 4, 1, 1, 192, 1),
    (2560, 4096, 1, 192): SkinnyConfig(64, 128, 6, 3, 1, 4, 1, 1, 192, 1),
    (2560, 9728, 1, 192): SkinnyConfig(64, 128, 6, 3, 1, 4, 1, 1, 192, 1),
    (2560, 12800, 1, 192): SkinnyConfig(64, 128, 6, 3, 1, 4, 1, 1, 192, 1),
    (19456, 2560, 1, 192): SkinnyConfig(192, 128, 4, 1, 1, 4, 1, 1, 192, 3),
    (151936, 2560, 1, 192): SkinnyConfig(128, 128, 5, 1, 1, 4, 1, 1, 192, 2),
    (6144, 4096, 2, 256): SkinnyConfig(192, 64, 5, 2, 1, 4, 2, 1, 128),
    (4096, 4096, 2, 256): SkinnyConfig(64, 64, 5, 2, 1, 4, 2, 1, 256),
    (24576, 4096, 2, 256): SkinnyConfig(192, 64, 4, 1, 1, 8, 1, 1, 256),
    (4096, 12288, 2, 256): SkinnyConfig(64, 64, 5, 2, 1, 4, 2, 1, 256),
    (4096, 20480, 2, 256): SkinnyConfig(64, 64, 5, 2, 1, 4, 1, 1, 256),
    (151936, 4096, 2, 256): SkinnyConfig(192, 64, 4, 1, 1, 8, 1, 1, 256),
    (6144, 4096, 1, 256): SkinnyConfig(64, 128, 5, 1, 1, 4, 1, 1, 256),
    (4096, 4096, 1, 256): SkinnyConfig(64, 128, 5, 2, 1, 4, 1, 1, 256),
    (24576, 4096, 1, 256): SkinnyConfig(192, 128, 4, 1, 1, 8, 1, 1, 256),
    (4096, 12288, 1, 256): SkinnyConfig(64, 128, 5, 2, 1, 4, 1, 1, 256),
    (4096, 20480, 1, 256): SkinnyConfig(64, 128, 5, 2, 1, 4, 1, 1, 256),
    (151936, 4096, 1, 256): SkinnyConfig(128, 128, 4, 1, 1, 8, 1, 1, 256),
    (151936, 2560, 2, 256): SkinnyConfig(128, 64, 4, 1, 1, 8, 1, 1, 256),
    (2560, 4096, 2, 256): SkinnyConfig(64, 64, 5, 3, 1, 4, 2, 1, 256),
    (19456, 2560, 2, 256): SkinnyConfig(192, 64, 4, 1, 1, 8, 1, 1, 256),
    (2560, 9728, 2, 256): SkinnyConfig(64, 64, 5, 3, 1, 4, 2, 1, 256),
    (2560, 12800, 2, 256): SkinnyConfig(64, 64, 5, 3, 1, 4, 1, 1, 256),
    (2560, 12800, 1, 256): SkinnyConfig(64, 128, 5, 3, 1, 4, 1, 1, 256),
    (151936, 2560, 1, 256): SkinnyConfig(192, 64, 5, 1, 1, 4, 1, 1, 128),
    (2560, 4096, 1, 256): SkinnyConfig(64, 128, 5, 3, 1, 4, 1, 1, 256),
    (19456, 2560, 1, 256): SkinnyConfig(192, 128, 4, 1, 1, 8, 1, 1, 256),
    (2560, 9728, 1, 256): SkinnyConfig(64, 128, 5, 3, 1, 4, 1, 1, 256),
    # Hybrids, attention beside experts, Llama: chosen alone, then by what steps behind 768 tokens
    # take, drafted and plain (2026-11-27-h200-*-judged-*.json, of shared rows 2026-11-29-).
    (12352, 2560, 2, 16): SkinnyConfig(64, 256, 5, 2, 1, 4, 2, 1),
    (10240, 2560, 2, 16): SkinnyConfig(64, 256, 5, 2, 1, 4, 2, 1),
    (18432, 2560, 2, 16): SkinnyConfig(144, 128, 4, 1, 1, 4, 2, 1, 16, 3),
    (2560, 9216, 2, 16): SkinnyConfig(64, 256, 5, 6, 1, 4, 1, 1),
    (248320, 2560, 2, 16): SkinnyConfig(64, 256, 5, 1, 1, 4, 1, 1),
    (18432, 2560, 1, 16): SkinnyConfig(64, 256, 2, 1, 2, 4, 2, 1),
    (2560, 9216, 1, 16): SkinnyConfig(64, 256, 4, 5, 2, 4, 1, 1),
    (2560, 20480, 1, 16): SkinnyConfig(128, 256, 5, 6, 1, 4, 1, 1),
    (248320, 2560, 1, 16): SkinnyConfig(64, 256, 2, 1, 4, 4, 1, 1),
    (12352, 2048, 2, 16): SkinnyConfig(64, 256, 5, 1, 1, 4, 2, 1),
    (9216, 2048, 2, 16): SkinnyConfig(192, 64, 8, 2, 1, 4, 2, 1, 16, 3),
    (2048, 4096, 2, 16): SkinnyConfig(64, 256, 3, 4, 1, 4, 1, 1),
    (248320, 2048, 2, 16): SkinnyConfig(64, 128, 3, 1, 3, 4, 1, 1),
    (5120, 2048, 2, 16): SkinnyConfig(80, 128, 5, 2, 1, 4, 2, 1, 16, 2),
    (151936, 2048, 2, 16): SkinnyConfig(64, 128, 11, 1, 1, 4, 1, 1, 16, 1),
    (16480, 5120, 2, 16): SkinnyConfig(128, 128, 5, 1, 1, 4, 2, 1),
    (14336, 5120, 2, 16): SkinnyConfig(64, 128, 3, 1, 2, 4, 1, 1),
    (5120, 6144, 2, 16): SkinnyConfig(64, 256, 5, 3, 1, 4, 1, 1),
    (34816, 5120, 2, 16): SkinnyConfig(64, 128, 11, 1, 1, 4, 2, 1, 16, 1),
    (5120, 17408, 2, 16): SkinnyConfig(64, 128, 10, 3, 1, 4, 1, 1, 16, 1),
    (248320, 5120, 2, 16): SkinnyConfig(64, 128, 5, 1, 2, 4, 1, 1),
    (16480, 5120, 2, 128): SkinnyConfig(128, 64, 6, 1, 1, 4, 1, 1, 128, 2),  # a prompt's
    (5120, 17408, 2, 128): SkinnyConfig(128, 64, 6, 3, 1, 4, 1, 1, 128, 2),  # a prompt's
    (6144, 5120, 1, 16): SkinnyConfig(128, 128, 5, 5, 2, 4, 1, 1),
    (5120, 4096, 1, 16): SkinnyConfig(64, 128, 6, 3, 2, 4, 1, 1),
    (34816, 5120, 1, 16): SkinnyConfig(64, 128, 2, 1, 3, 4, 1, 1),
    (5120, 17408, 1, 16): SkinnyConfig(128, 256, 5, 3, 1, 4, 1, 1),
    (5120, 25600, 1, 16): SkinnyConfig(64, 256, 2, 4, 3, 4, 1, 1),
    (248320, 5120, 1, 16): SkinnyConfig(64, 256, 2, 1, 4, 4, 1, 1),
    (28672, 4096, 2, 16): SkinnyConfig(224, 128, 3, 1, 1, 4, 2, 1, 16, 4),
    (4096, 14336, 2, 16): SkinnyConfig(64, 256, 5, 2, 1, 4, 1, 1),
    (128256, 4096, 2, 16): SkinnyConfig(64, 256, 2, 1, 2, 4, 1, 1),
    (128256, 4096, 1, 16): SkinnyConfig(64, 256, 4, 1, 2, 4, 1, 1),
    (12352, 4096, 2, 16): SkinnyConfig(64, 128, 10, 2, 1, 4, 1, 1),
    (10240, 4096, 2, 16): SkinnyConfig(64, 256, 5, 4, 1, 4, 1, 1),
    (248320, 4096, 2, 16): SkinnyConfig(64, 128, 3, 1, 3, 4, 1, 1),
    (4096, 32768, 1, 16): SkinnyConfig(128, 256, 5, 4, 1, 4, 1, 1),
    (248320, 4096, 1, 16): SkinnyConfig(64, 256, 4, 1, 2, 4, 1, 1),
    (18432, 2560, 2, 128): SkinnyConfig(192, 64, 5, 1, 1, 4, 1, 1, 128),
    (2560, 9216, 2, 128): SkinnyConfig(64, 64, 9, 3, 1, 4, 1, 1, 128, 1),
    (248320, 2560, 2, 128): SkinnyConfig(192, 64, 5, 1, 1, 4, 1, 1, 128),
    (2560, 9216, 2, 256): SkinnyConfig(64, 64, 5, 3, 1, 4, 1, 1, 256),
    (248320, 2560, 2, 256): SkinnyConfig(128, 64, 4, 1, 1, 8, 1, 1, 256),
    (18432, 2560, 1, 128): SkinnyConfig(64, 128, 3, 1, 1, 4, 1, 1, 128),
    (2560, 9216, 1, 128): SkinnyConfig(64, 128, 8, 3, 1, 4, 1, 1, 128, 1),
    (2560, 20480, 1, 128): SkinnyConfig(64, 128, 8, 3, 1, 4, 1, 1, 128, 1),
    (248320, 2560, 1, 128): SkinnyConfig(192, 64, 5, 1, 1, 4, 1, 1, 128),
    (18432, 2560, 1, 256): SkinnyConfig(192, 128, 4, 1, 1, 8, 1, 1, 256),
    (2560, 9216, 1, 256): SkinnyConfig(64, 128, 5, 3, 1, 4, 1, 1, 256),
    (2560, 20480, 1, 256): SkinnyConfig(64, 128, 5, 3, 1, 4, 1, 1, 256),
    (248320, 2560, 1, 256): SkinnyConfig(192, 64, 5, 1, 1, 4, 1, 1, 128),
}


def num_columns(T: int) -> int:
    """T rounded up to the tile: a power of two, at least MIN_COLS."""
    return max(MIN_COLS, 1 << (T - 1).bit_length())


def table_rows(T: int) -> int:
    """T rounded up as in TUNED: a tile of x may have 192 rows."""
    return MIDDLE_T if NARROW_T < T <= MIDDLE_T else num_columns(T)


def choose_config(
    T: int, E: int, D: int, weight_bytes: int = 2, swiglu: bool = False
) -> SkinnyConfig | None:
    """The tuned config of a shape on a Hopper GPU, the rule's otherwise; None for cuBLAS.

    Args: T, E, D: of x [T, D] and weight [E, D] (SwiGLU: E = J). weight_bytes: 2, or 1 for FP8.
    Returns: a config for skinny_linear.py, or None where F.linear is faster (T > 64, unless the
    shape is in the table).
    """
    if not 1 <= T <= MAX_T:
        return None
    shape = (E, D, weight_bytes)
    tuned = TUNED.get((*shape, table_rows(T))) or TUNED.get((*shape, num_columns(T)))
    if tuned is None and T <= SKINNY_T:
        return rule_config(T, E, D, weight_bytes, swiglu)
    return tuned


def rule_config(T: int, E: int, D: int, weight_bytes: int, swiglu: bool) -> SkinnyConfig:
    """A config for any shape: tiles of 64 rows; the fewest splits that give about one CTA per
    multiprocessor; stages so that a kernel fills less than half of the shared memory, because the
    next kernel's CTAs wait beside it with their first weights loaded. Above 128 rows, where only
    the table is used, one that suits every shape."""
    if T > NARROW_T:
        return SkinnyConfig(rows=128, block_k=64, num_stages=4, num_warps=8, cols=256)
    cols = num_columns(T)
    block_k = 64 if swiglu and weight_bytes == 2 else 128
    rows = 128 if E >= 512 * DEFAULT_SMS and not swiglu else 64
    tiles = cdiv(E // 2 if swiglu else E, rows)
    blocks = cdiv(D, block_k)
    num_splits = 1
    while not swiglu and tiles * num_splits < 0.9 * DEFAULT_SMS and num_splits < MAX_SPLITS - 1:
        num_splits += 1
    num_splits = max(1, min(num_splits, blocks // 4))
    items = tiles * num_splits
    ctas_per_sm = 1 if rows == 128 else min(3, cdiv(items, DEFAULT_SMS))
    grid = min(items, ctas_per_sm * DEFAULT_SMS)
    stage_bytes = block_k * (rows * (2 if swiglu else 1) * weight_bytes + cols * 2)
    all_bytes = (190 if rows == 128 else 108) * 1024 * DEFAULT_SMS  # in flight on the GPU
    num_stages = max(2, min(8, all_bytes // max(grid, DEFAULT_SMS) // stage_bytes))
    return SkinnyConfig(
        rows=rows,
        block_k=block_k,
        num_stages=num_stages,
        num_splits=num_splits,
        ctas_per_sm=ctas_per_sm,
    )


def split_width(D: int, num_splits: int, block_k: int) -> int:
    """Columns of one split: whole blocks, the same number in each."""
    return block_k * cdiv(cdiv(D, block_k), num_splits)


def cdiv(a: int, b: int) -> int:
    """Ceiling of a / b."""
    return (a + b - 1) // b
