"""What tune_skinny.py tries on a shape: variants are compiled, candidates are timed.

A variant is a tile and its stages; the split of K and the grid are arguments of its kernel, so that
many candidates share one. Up to 64 rows the tiles are skinny_kernels.py's, above that they are
wide_linear.py's, up to 192 rows specialized_linear.py's too; and the one that the table has now.
"""

import itertools

from skinny_layer import Case

from graphengine.kernels.skinny_config import (
    MIDDLE_T,
    SKINNY_T,
    SkinnyConfig,
    cdiv,
    choose_config,
    num_columns,
    table_rows,
)

SMEM_BYTES = 226 * 1024
# (weight rows, rows of x, warps, KB of stages, block_k in bf16): one CTA a multiprocessor, or two
# or three, of which one multiplies while another begins or stores.
WIDE_TILES = {
    128: (
        (192, 128, 4, 200, 64),
        (192, 128, 8, 200, 64),
        (128, 128, 8, 200, 64),
        (256, 128, 8, 200, 64),
        (192, 128, 4, 100, 32),
        (128, 128, 4, 100, 64),
        (128, 128, 8, 100, 64),
        (64, 128, 4, 100, 64),
        (64, 128, 4, 72, 64),
    ),
    256: (
        (192, 256, 8, 224, 64),
        (192, 256, 8, 168, 64),
        (128, 256, 8, 200, 64),
        (64, 256, 4, 200, 64),
        (256, 128, 8, 200, 64),
        (192, 128, 4, 200, 64),
        (192, 128, 4, 100, 32),
        (128, 128, 4, 100, 64),
        (128, 128, 8, 100, 64),
        (64, 256, 4, 100, 32),
    ),
}


def variants(case: Case) -> list[SkinnyConfig]:
    """Tiles and stages to compile."""
    found = _wide_variants(case) if case.T > SKINNY_T else _skinny_variants(case)
    found += _specialized_variants(case)
    now = choose_config(case.T, case.E, case.D, case.weight_bytes, case.kind == "swiglu")
    if now is not None and (now.cols or case.T > SKINNY_T):
        found.append(now._replace(num_splits=1))
    return [*dict.fromkeys(found)]


def candidates(case: Case, config: SkinnyConfig, num_sms: int) -> list[SkinnyConfig]:
    """A variant with every useful number of splits and grid."""
    if config.cols:
        return _wide_candidates(case, config, num_sms)
    return _skinny_candidates(case, config, num_sms)


def _wide_variants(case: Case) -> list[SkinnyConfig]:
    found = []
    for rows, cols, num_warps, kilobytes, block_k in WIDE_TILES[num_columns(case.T)]:
        num_stages = kilobytes * 1024 // (2 * (rows + cols) * block_k)
        width = 2 * block_k // case.weight_bytes
        found.append(SkinnyConfig(rows, width, num_stages, 1, 1, num_warps, cols=cols))
    return found


def _specialized_variants(case: Case) -> list[SkinnyConfig]:
    """One to three consumers, as many stages as there is room for; not for FP8 rows in two."""
    if case.T > MIDDLE_T or (case.weight_bytes == 1 and case.T <= SKINNY_T):
        return []
    cols = table_rows(case.T)
    found = []
    for consumers, block_k in itertools.product((1, 2, 3), (64, 128) if cols < 64 else (64,)):
        width, rows = 2 * block_k // case.weight_bytes, 64 * consumers
        num_stages = min(20, 220 * 1024 // (2 * (rows + cols) * block_k))
        config = SkinnyConfig(rows, width, num_stages, 1, 1, 4, cols=cols, consumers=consumers)
        found.append(config)
    return found


def _wide_candidates(case: Case, config: SkinnyConfig, num_sms: int) -> list[SkinnyConfig]:
    """Those that keep most multiprocessors busy, in few waves where they leave partial sums."""
    smem = (
        case.weight_bytes * (config.rows + config.cols) * config.block_k * config.num_stages + 1024
    )
    slots = num_sms * (1 if config.consumers else SMEM_BYTES // smem)
    tiles = cdiv(case.T, config.cols) * cdiv(case.E, config.rows)
    blocks = cdiv(case.D, config.block_k)
    found = []
    for num_splits in (1, 2, 3, 4, 5, 6, 7) if case.kind == "partials" else (1,):
        items = tiles * num_splits
        busy = items / (min(slots, max(items, num_sms)) * cdiv(items, slots))
        waste = cdiv(blocks, num_splits) * num_splits / blocks
        if busy > 0.7 and waste < 1.1 and (num_splits == 1 or items < 2.5 * num_sms):
            found.append(config._replace(num_splits=num_splits))
    return found


def _smem_bytes(case: Case, config: SkinnyConfig) -> int:
    cols = num_columns(case.T)
    tiles = config.rows * (2 if case.kind == "swiglu" else 1) * case.weight_bytes
    epilogue = min(config.rows * cols * 4, 16384)  # what the compiler takes to turn the layout
    # x in FP8 is hi and lo: as many bytes as in bf16
    return (tiles + 2 * cols) * config.block_k * config.num_stages + epilogue + 2048


def _skinny_variants(case: Case) -> list[SkinnyConfig]:
    swiglu = case.kind == "swiglu"
    found = []
    for rows, block_k, budget in itertools.product(
        (64, 128), (64, 128, 256), (52, 72, 104, 148, 200)
    ):
        if case.weight_bytes == 1 and block_k == 64:
            continue
        one = SkinnyConfig(rows=rows, block_k=block_k, num_stages=1)
        stage = _smem_bytes(case, one) - _smem_bytes(case, one._replace(num_stages=0))
        num_stages = min(12, budget * 1024 // stage)
        if num_stages < 2 or (swiglu and rows == 128 and block_k == 256):
            continue
        num_warps = 8 if rows == 128 and swiglu else 4
        config = one._replace(num_stages=num_stages, num_warps=num_warps)
        if _smem_bytes(case, config) <= SMEM_BYTES:
            found.append(config)
    pointer = SkinnyConfig(rows=64, block_k=64 if swiglu else 128, num_stages=4, use_tma=0)
    return found + ([pointer] if case.weight_bytes == 2 else [])


def _skinny_candidates(case: Case, config: SkinnyConfig, num_sms: int) -> list[SkinnyConfig]:
    outputs = case.E // 2 if case.kind == "swiglu" else case.E
    tiles = cdiv(outputs, config.rows)
    blocks = cdiv(case.D, config.block_k)
    found = []
    for num_splits in (1, 2, 3, 4, 5, 6) if case.kind == "partials" else (1,):
        items = tiles * num_splits
        waste = cdiv(blocks, num_splits) * num_splits / blocks
        for ctas_per_sm in (1, 2, 3, 4) if config.use_tma else (1,):
            grid = min(items, ctas_per_sm * num_sms)
            resident = ctas_per_sm * (_smem_bytes(case, config) + 1024) <= SMEM_BYTES + 2048
            balance = items / (grid * cdiv(items, grid))
            enough = grid >= 0.6 * num_sms and grid * _smem_bytes(case, config) > 5e6
            if not config.use_tma or (resident and balance > 0.85 and enough and waste < 1.1):
                found.append(config._replace(num_splits=num_splits, ctas_per_sm=ctas_per_sm))
            if grid == items:
                break  # more CTAs than items: the same launch
    return found
