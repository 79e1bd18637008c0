"""Skinny GEMM: a few activation rows against a large weight matrix, at the speed of memory.

Why: a decode step of Qwen3-8B with its drafter is 167 of these and nothing else of size. At 16
rows the arithmetic is free, so a GEMM is a stream over the weights, and what cuBLAS loses is its
start, its tail and its reduction kernel: 107.3 us for the four GEMMs of a layer against a floor of
86.5 (H200, 4.46 TB/s, cold weights, one CUDA graph; a plain Triton kernel without the reduction:
97.3).
Three things here: weights are the 64-row side of wgmma and the activations its 16 columns; K is
split so that every multiprocessor works, and the consumer adds the partials, since it reads them
anyway; and with programmatic dependent launch the first `num_stages` weight blocks of a CTA are
requested *before* the wait for the previous kernel, which no activation is needed for.

Invariant: one output element of one split is summed by one CTA in rising k, with no atomics, so a
result depends on shapes and config alone. Before `gdc_wait` only weights are read and nothing is
written; a read of x there would see the previous replay's activations, silently.

FP8 weights are multiplied as they are, by FP8 activations: a bf16 row is split into `hi + lo`, two
FP8 rows that together hold its 8 bits of mantissa, so that only the weights are rounded (widening
the weights in registers instead took as long as bf16: 47.5 us for gate_up).

Cost: E * D weight bytes from HBM; x is read once per tile of weight rows, from L2. Measured on an
H200 at T = 16, as a layer with its norms and PDL (floor 86.5 us): 100.9 us, cuBLAS 117.2; lm_head
[151936, 4096] 284 us (floor 279); no file of those is kept. FP8: a layer 62.1 us (floor 43.3),
lm_head 147.5 (139.5): profiles/results/2026-11-21-h200-skinny-fp8.json.

Two kernels: `_tma_kernel` (Gluon, Hopper: TMA into a ring of stages, wgmma) and `_pointer_kernel`
(plain Triton, unquantised: other GPUs, odd D, fp32, the interpreter). FP8 elsewhere runs in torch.

Legend: T rows (decode: requests * block), D inputs, E outputs, I MLP width, J = 2 * I, Z splits.
"""

# A Gluon kernel is not Python to a type checker: its parameters are constexpr only by annotation.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MIN_COLS = 16  # activation rows are padded to this: the least that a tensor-core dot takes
MAX_T = 128
SKINNY_T = 64  # above it cuBLAS streams the weights as well, and x no longer hides in L2
DEFAULT_SMS = 132  # of the table and the default rule; the grid asks the device
MAX_SPLITS = 8  # Inductor unrolls a sum over fewer than 8; more partials cost more than they give
FP8 = torch.float8_e4m3fn
PDL_OFF, PDL_LATE, PDL_EARLY = 0, 1, 2
INTERPRET = bool(knobs.runtime.interpret)


class Fp8Scales(NamedTuple):
    """With FP8 operands: x is `split_rows_fp8`'s [2, T, D], weight `quantize_rows_fp8`'s."""

    x_T: torch.Tensor  # fp32
    weight_E: torch.Tensor  # fp32, contiguous


class SkinnyConfig(NamedTuple):
    """What may be tuned without changing a result beyond rounding; all integers."""

    rows: int = 64  # weight rows of a tile (SwiGLU: of the gate tile and of the up tile)
    block_k: int = 128
    num_stages: int = 4  # blocks in flight in a CTA
    num_splits: int = 1  # Z
    ctas_per_sm: int = 2  # the grid is at most this many CTAs per multiprocessor; each loops
    num_warps: int = 4
    pdl: int = PDL_LATE  # when the next kernel may start: OFF, after the last load, EARLY
    use_tma: int = 1  # 0: the pointer kernel even on Hopper


# (E, D, bytes of a weight, T rounded up to 16, 32, 64) -> config. Filled by tools/tune_skinny.py.
TUNED: dict[tuple[int, int, int, int], SkinnyConfig] = {
    (6144, 4096, 2, 16): SkinnyConfig(64, 256, 5, 4, 1, 4, 2, 1),
    (4096, 4096, 2, 16): SkinnyConfig(64, 256, 5, 2, 1, 4, 2, 1),
    (24576, 4096, 2, 16): SkinnyConfig(128, 128, 2, 1, 1, 8, 2, 1),
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
    (2560, 4096, 2, 16): SkinnyConfig(128, 64, 5, 6, 1, 4, 2, 1),
    (19456, 2560, 2, 16): SkinnyConfig(64, 128, 2, 1, 2, 4, 2, 1),
    (2560, 9728, 2, 16): SkinnyConfig(64, 256, 5, 3, 1, 4, 2, 1),
    (2560, 12800, 2, 16): SkinnyConfig(64, 128, 10, 3, 1, 4, 1, 1),
    (151936, 2560, 2, 16): SkinnyConfig(128, 128, 5, 1, 1, 4, 1, 1),
}


def num_columns(T: int) -> int:
    """T rounded up to the tile: a power of two, at least MIN_COLS."""
    return max(MIN_COLS, 1 << (T - 1).bit_length())


def choose_config(
    T: int, E: int, D: int, weight_bytes: int = 2, swiglu: bool = False
) -> SkinnyConfig | None:
    """The tuned config of a shape on a Hopper GPU, the rule's otherwise; None for cuBLAS.

    Args: T, E, D: of x [T, D] and weight [E, D] (SwiGLU: E = J). weight_bytes: 2, or 1 for FP8.
    Returns: a config for the functions below, or None where F.linear is faster (T > 64).
    """
    if not 1 <= T <= SKINNY_T:
        return None
    tuned = TUNED.get((E, D, weight_bytes, num_columns(T)))
    return tuned or rule_config(T, E, D, weight_bytes, swiglu)


def rule_config(T: int, E: int, D: int, weight_bytes: int, swiglu: bool) -> SkinnyConfig:
    """A config for any shape: tiles of 64 rows; the fewest splits that give about one CTA per
    multiprocessor; stages so that a kernel fills less than half of the shared memory, because the
    next kernel's CTAs wait beside it with their first weights loaded."""
    cols = num_columns(T)
    block_k = 64 if swiglu and weight_bytes == 2 else 128
    rows = 128 if E >= 512 * DEFAULT_SMS and not swiglu else 64
    tiles = _cdiv(E // 2 if swiglu else E, rows)
    blocks = _cdiv(D, block_k)
    num_splits = 1
    while not swiglu and tiles * num_splits < 0.9 * DEFAULT_SMS and num_splits < MAX_SPLITS - 1:
        num_splits += 1
    num_splits = max(1, min(num_splits, blocks // 4))
    items = tiles * num_splits
    ctas_per_sm = 1 if rows == 128 else min(3, _cdiv(items, DEFAULT_SMS))
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


def quantize_rows_fp8(weight_ED: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds each row to e4m3 with a scale of its own: `weight[e] ~ fp8[e] * scale[e]`.

    scale[e] = max_d |weight[e, d]| / 448; the relative error of an element is at most 2^-4 where
    fp8 is normal (over 2^-6 * scale).

    Returns: (float8_e4m3fn [E, D], fp32 scale_E [E]), on weight's device.
    """
    limit = torch.finfo(FP8).max
    quantized = torch.empty_like(weight_ED, dtype=FP8, memory_format=torch.contiguous_format)
    scale_E = torch.empty(weight_ED.shape[0], dtype=torch.float32, device=weight_ED.device)
    chunk = 16384  # rows at a time: an lm_head in fp32 is 2.5 GB
    for first in range(0, weight_ED.shape[0], chunk):
        rows = weight_ED[first : first + chunk].float()
        scale = rows.abs().amax(dim=1).clamp_(min=1e-12) / limit
        scale_E[first : first + chunk] = scale
        quantized[first : first + chunk] = (rows / scale[:, None]).clamp_(-limit, limit).to(FP8)
    return quantized, scale_E


def split_rows_fp8(x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Writes each row as the sum of two e4m3 rows with one scale: `x ~ (hi + lo) * scale`.

    scale[t] = max_d |x[t, d]| / 448; hi = fp8(x / scale); lo = fp8(x / scale - hi). The error of an
    element is at most max(2^-8 |x|, 2^-10 scale), which is bf16's own or 2e-6 of the row's maximum.

    Returns: (float8_e4m3fn [2, T, D], fp32 scale_T [T]).
    """
    x32 = x_TD.float()
    scale_T = x32.abs().amax(dim=-1).clamp(min=1e-12) / torch.finfo(FP8).max
    scaled = x32 / scale_T[:, None]
    hi = scaled.to(FP8)
    lo = (scaled - hi.float()).to(FP8)
    return torch.stack([hi, lo]), scale_T


def skinny_linear_partials(
    x_TD: torch.Tensor,
    weight_ED: torch.Tensor,
    num_splits: int | None = None,
    config: SkinnyConfig | None = None,
    scales: Fp8Scales | None = None,
) -> torch.Tensor:
    """x @ weight^T cut over K into Z partial sums, for a consumer that adds them.

    out[z, t, e] = sum_{d in split z} x[t, d] * weight[e, d];  y = out.sum(0)
    split z = [z * n, (z + 1) * n), n = block_k * ceil(ceil(D / block_k) / Z); the last is shorter

    Args:
        x_TD: [T, D] bf16, fp16 or fp32, 1 <= T <= 128, last stride 1; or FP8 [2, T, D].
        weight_ED: [E, D] of x's dtype; last stride 1.
        num_splits: Z; None takes the config's.
        config: None takes `choose_config`'s, and the rule's for T > 64.
        scales: with FP8 operands, whose products they multiply.
    Returns: fp32 [Z, T, E], contiguous.
    Raises: ValueError for shapes, dtypes or strides that the kernels cannot address.
    Source: split-K with a deferred reduction.
    """
    config = _resolve(x_TD, weight_ED, config, swiglu=False)
    if num_splits is not None:
        config = config._replace(num_splits=num_splits)
    operands = (x_TD, weight_ED, *(scales or (None, None)))
    return torch.ops.graphengine.skinny_linear_partials(*operands, list(config))


def skinny_linear(
    x_TD: torch.Tensor,
    weight_ED: torch.Tensor,
    config: SkinnyConfig | None = None,
    scales: Fp8Scales | None = None,
) -> torch.Tensor:
    """y[t, e] = sum_d x[t, d] * weight[e, d], rounded once: F.linear without a split.

    Args: as `skinny_linear_partials`; the config's num_splits is not used.
    Returns: [T, E], contiguous, dtype of x; bf16 for FP8.
    Raises: ValueError for shapes, dtypes or strides that the kernels cannot address.
    """
    config = _resolve(x_TD, weight_ED, config, swiglu=False)._replace(num_splits=1)
    operands = (x_TD, weight_ED, *(scales or (None, None)))
    return torch.ops.graphengine.skinny_linear(*operands, list(config))


def skinny_swiglu(
    x_TD: torch.Tensor,
    gate_up_JD: torch.Tensor,
    config: SkinnyConfig | None = None,
    scales: Fp8Scales | None = None,
) -> torch.Tensor:
    """act[t, i] = silu(g) * u with g = x[t] . gate_up[i], u = x[t] . gate_up[i + I].

    Both sums stay in fp32 in one CTA; the one rounding is of the product, where F.linear followed
    by SwiGLU rounds g and u as well.

    Args: as `skinny_linear`; gate_up_JD is [2 * I, D], rows packed gate | up.
    Returns: act_TI [T, I], contiguous, dtype of x; bf16 for FP8.
    Raises: ValueError for shapes, dtypes or strides that the kernels cannot address.
    """
    config = _resolve(x_TD, gate_up_JD, config, swiglu=True)._replace(num_splits=1)
    operands = (x_TD, gate_up_JD, *(scales or (None, None)))
    return torch.ops.graphengine.skinny_swiglu(*operands, list(config))


def split_width(D: int, num_splits: int, block_k: int) -> int:
    """Columns of one split: whole blocks, the same number in each."""
    return block_k * _cdiv(_cdiv(D, block_k), num_splits)


def skinny_linear_partials_reference(
    x_TD: torch.Tensor, weight_ED: torch.Tensor, config: SkinnyConfig
) -> torch.Tensor:
    """`skinny_linear_partials` in plain torch, unquantised: fp32 products of a split's columns."""
    n = split_width(x_TD.shape[-1], config.num_splits, config.block_k)
    splits = [slice(z * n, (z + 1) * n) for z in range(config.num_splits)]
    return torch.stack([x_TD[:, s].float() @ weight_ED[:, s].float().T for s in splits])


def skinny_swiglu_reference(x_TD: torch.Tensor, gate_up_JD: torch.Tensor) -> torch.Tensor:
    """`skinny_swiglu` in plain torch, unquantised, fp32 inside."""
    gate, up = (x_TD.float() @ gate_up_JD.float().T).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x_TD.dtype)


def widened(
    x: torch.Tensor, weight_ED: torch.Tensor, scales: Fp8Scales | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operands as the references take them: FP8 multiplied out to fp32."""
    if scales is None:
        return x, weight_ED
    return x.float().sum(0) * scales.x_T[:, None], weight_ED.float() * scales.weight_E[:, None]


def _cdiv(a: int, b: int) -> int:
    return (a + b - 1) // b


def _resolve(
    x_TD: torch.Tensor, weight_ED: torch.Tensor, config: SkinnyConfig | None, swiglu: bool
) -> SkinnyConfig:
    if config is not None:
        return config
    (T, D), E = x_TD.shape[-2:], weight_ED.shape[0]
    shape = (min(T, MAX_T), E, D, weight_ED.element_size(), swiglu)
    return choose_config(*shape) or rule_config(*shape)


def _check_inputs(
    x: torch.Tensor,
    weight_ED: torch.Tensor,
    scales: Fp8Scales | None,
    config: SkinnyConfig,
    swiglu: bool,
) -> None:
    expected = "[T, D]" if scales is None else "[2, T, D]"
    if (
        x.dim() != (2 if scales is None else 3)
        or (scales is not None and x.shape[0] != 2)
        or weight_ED.dim() != 2
        or x.shape[-1] != weight_ED.shape[1]
    ):
        raise ValueError(
            f"x {tuple(x.shape)} and weight {tuple(weight_ED.shape)}: need {expected} and [E, D]"
        )
    T, E = x.shape[-2], weight_ED.shape[0]
    if not 1 <= T <= MAX_T:
        raise ValueError(f"x has {T} rows: use F.linear for none or for more than {MAX_T}")
    if swiglu and E % 2:
        raise ValueError(f"gate_up has {E} rows: pack as many gate rows as up rows")
    if x.stride(-1) != 1 or weight_ED.stride(1) != 1 or (scales and not x.is_contiguous()):
        raise ValueError(
            f"x strides {x.stride()}, weight strides {weight_ED.stride()}: make rows contiguous"
        )
    if scales is None and x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"x is {x.dtype}; need bfloat16, float16 or float32, or {FP8} with scales")
    if weight_ED.dtype != x.dtype or (scales is not None and x.dtype != FP8):
        raise ValueError(
            f"weight is {weight_ED.dtype}, x {x.dtype}: cast one; scales belong to {FP8}"
        )
    for name, scale, length in zip(("x", "weight"), scales or (), (T, E), strict=False):
        if scale.shape != (length,) or scale.dtype != torch.float32 or not scale.is_contiguous():
            raise ValueError(
                f"{name}'s scale is {scale.dtype} {tuple(scale.shape)}; need float32 [{length}]"
            )
    if not 1 <= config.num_splits <= MAX_SPLITS:
        raise ValueError(f"num_splits {config.num_splits}: choose 1 to {MAX_SPLITS}")


def _launch(
    x: torch.Tensor,
    weight_ED: torch.Tensor,
    scales: Fp8Scales | None,
    out: torch.Tensor,
    config: SkinnyConfig,
    swiglu: bool,
) -> torch.Tensor:
    """Runs the kernel of the config into out [Z, T, E], [T, E] or (SwiGLU) [T, I]."""
    (T, D), E = x.shape[-2:], out.shape[-1]
    cols = num_columns(T)
    items = _cdiv(E, config.rows) * config.num_splits
    width = split_width(D, config.num_splits, config.block_k)
    capability = torch.cuda.get_device_capability(x.device) if x.is_cuda else (0, 0)
    pdl = config.pdl if capability >= (9, 0) else PDL_OFF
    sizes = {"ROWS": config.rows, "COLS": cols, "BLOCK_K": config.block_k}
    flags = {"SWIGLU": swiglu, "PDL": pdl}
    options = {"num_warps": config.num_warps} | ({"launch_pdl": True} if pdl else {})
    if _runs_tma(x, weight_ED, config):
        x_rows = x.view(-1, D)
        weight_layout, x_layout = (
            gl.NVMMASharedLayout.get_default_for([height, config.block_k], _gluon_dtype(tensor))
            for height, tensor in ((config.rows, weight_ED), (cols, x_rows))
        )
        num_sms = torch.cuda.get_device_properties(x.device).multi_processor_count
        _tma_kernel[(min(items, config.ctas_per_sm * num_sms),)](
            TensorDescriptor.from_tensor(weight_ED, [config.rows, config.block_k], weight_layout),
            TensorDescriptor.from_tensor(x_rows, [cols, config.block_k], x_layout),
            *(scales or (out, out)),  # pointers that are not read
            out,
            *(T, E, items, config.num_splits, width // config.block_k),
            **sizes,
            **flags,
            STAGES=config.num_stages,
            FP8=scales is not None,
            **options,
        )
    else:
        _pointer_kernel[(items,)](
            weight_ED,
            x,
            out,
            *(T, E, D, config.num_splits, width // config.block_k),
            *(weight_ED.stride(0), x.stride(0)),
            **sizes,
            **flags,
            EVEN_K=width * config.num_splits == D,
            DOT_FP32=INTERPRET,
            num_stages=config.num_stages,
            **options,
        )
    return out


def _runs_tma(x: torch.Tensor, weight_ED: torch.Tensor, config: SkinnyConfig) -> bool:
    """Hopper, 16- or 8-bit operands, and rows that begin at multiples of 16 bytes."""
    if not (config.use_tma and x.is_cuda) or torch.cuda.get_device_capability(x.device)[0] != 9:
        return False
    aligned = all(
        y.data_ptr() % 16 == 0 and y.stride(-2) * y.element_size() % 16 == 0 for y in (x, weight_ED)
    )
    return aligned and x.element_size() <= 2


def _gluon_dtype(x: torch.Tensor) -> gl.dtype:
    return {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, FP8: gl.float8e4nv}[x.dtype]


_SCHEMA = "(Tensor x, Tensor weight, Tensor? x_scale, Tensor? w_scale, int[] config) -> Tensor"


def _prepare(x, weight, x_scale, w_scale, config, swiglu):
    """(scales, config, whether a kernel runs); refuses what it cannot address."""
    scales = None if x_scale is None or w_scale is None else Fp8Scales(x_scale, w_scale)
    config = SkinnyConfig(*config)
    _check_inputs(x, weight, scales, config, swiglu)
    if scales is not None:
        return scales, config, _runs_tma(x, weight, config)
    return scales, config, x.is_cuda or INTERPRET


def _empty_out(x, outputs):
    """[T, outputs] in the dtype of the result."""
    dtype = torch.bfloat16 if x.dtype == FP8 else x.dtype
    return x.new_empty((x.shape[-2], outputs), dtype=dtype)


# Custom ops: dynamo does not trace a launch with TMA descriptors or launch_pdl, and Inductor calls
# an op once, on its inputs as they are. All three return a new contiguous tensor.
@torch.library.custom_op("graphengine::skinny_linear_partials", mutates_args=(), schema=_SCHEMA)
def _partials_op(x, weight, x_scale, w_scale, config):
    scales, config, has_kernel = _prepare(x, weight, x_scale, w_scale, config, False)
    if not has_kernel:
        return skinny_linear_partials_reference(*widened(x, weight, scales), config)
    shape = (config.num_splits, x.shape[-2], weight.shape[0])
    return _launch(x, weight, scales, x.new_empty(shape, dtype=torch.float32), config, False)


@_partials_op.register_fake
def _(x, weight, x_scale, w_scale, config):
    shape = (SkinnyConfig(*config).num_splits, x.shape[-2], weight.shape[0])
    return x.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("graphengine::skinny_linear", mutates_args=(), schema=_SCHEMA)
def _linear_op(x, weight, x_scale, w_scale, config):
    scales, config, has_kernel = _prepare(x, weight, x_scale, w_scale, config, False)
    out = _empty_out(x, weight.shape[0])
    if not has_kernel:
        wide = widened(x, weight, scales)
        return skinny_linear_partials_reference(*wide, config)[0].to(out.dtype)
    return _launch(x, weight, scales, out, config, False)


@_linear_op.register_fake
def _(x, weight, x_scale, w_scale, config):
    return _empty_out(x, weight.shape[0])


@torch.library.custom_op("graphengine::skinny_swiglu", mutates_args=(), schema=_SCHEMA)
def _swiglu_op(x, weight, x_scale, w_scale, config):
    scales, config, has_kernel = _prepare(x, weight, x_scale, w_scale, config, True)
    out = _empty_out(x, weight.shape[0] // 2)
    if not has_kernel:
        return skinny_swiglu_reference(*widened(x, weight, scales)).to(out.dtype)
    return _launch(x, weight, scales, out, config, True)


@_swiglu_op.register_fake
def _(x, weight, x_scale, w_scale, config):
    return _empty_out(x, weight.shape[0] // 2)


@gluon.jit
def _next_block(
    item, k, row, col, step, num_splits, num_k, ROWS: gl.constexpr, BLOCK_K: gl.constexpr
):
    """The block after (item, k) in a CTA's order, with its first weight row and column."""
    k += 1
    col += BLOCK_K
    if k == num_k:
        item += step
        k = item * 0
        row = item // num_splits * ROWS
        col = item % num_splits * num_k * BLOCK_K
    return item, k, row, col


@gluon.jit
def _load_weights(desc, row, col, up_row, ready, smem, slot, live, SWIGLU: gl.constexpr):
    if SWIGLU:
        tma.async_copy_global_to_shared(desc, [row, col], ready, smem.index(2 * slot), pred=live)
        tma.async_copy_global_to_shared(
            desc, [up_row, col], ready, smem.index(2 * slot + 1), pred=live
        )
    else:
        tma.async_copy_global_to_shared(desc, [row, col], ready, smem.index(slot), pred=live)


@gluon.jit
def _load_x(desc, col, lo_row, ready, smem, slot, live, FP8: gl.constexpr):
    if FP8:
        tma.async_copy_global_to_shared(desc, [0, col], ready, smem.index(2 * slot), pred=live)
        tma.async_copy_global_to_shared(
            desc, [lo_row, col], ready, smem.index(2 * slot + 1), pred=live
        )
    else:
        tma.async_copy_global_to_shared(desc, [0, col], ready, smem.index(slot), pred=live)


@gluon.jit(do_not_specialize=["T", "num_items", "num_splits", "num_k"])
def _tma_kernel(
    w_desc,
    x_desc,
    x_scale,
    w_scale,
    out,
    T,
    E,
    num_items,
    num_splits,
    num_k,
    ROWS: gl.constexpr,
    COLS: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    SWIGLU: gl.constexpr,
    PDL: gl.constexpr,
    FP8: gl.constexpr,
):
    """A CTA takes items (weight tile, split) first, first + step, ...; its blocks of all items are
    one sequence through a ring of STAGES buffers, so the next item's weights are in flight during
    an epilogue. A stage's barrier counts the bytes of its weights and of its x."""
    HALVES: gl.constexpr = 2 if SWIGLU else 1
    PARTS: gl.constexpr = 2 if FP8 else 1  # of x: hi and lo
    BYTES: gl.constexpr = w_desc.dtype.primitive_bitwidth // 8
    STAGE_BYTES: gl.constexpr = (HALVES * ROWS + PARTS * COLS) * BLOCK_K * BYTES
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [gl.num_warps(), 1], [16, COLS, 32 // BYTES]
    )
    VEC: gl.constexpr = 128 // out.dtype.element_ty.primitive_bitwidth
    ALONG: gl.constexpr = min(32, ROWS // VEC)
    OUT: gl.constexpr = gl.BlockedLayout(
        [VEC, 1], [ALONG, 32 // ALONG], [1, gl.num_warps()], [0, 1]
    )
    w_smem = gl.allocate_shared_memory(
        w_desc.dtype, [STAGES * HALVES, ROWS, BLOCK_K], w_desc.layout
    )
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [STAGES * PARTS, COLS, BLOCK_K], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
    fence_async_shared()

    first = gl.program_id(0)
    step = gl.num_programs(0)
    total = (num_items - first + step - 1) // step * num_k
    row = first // num_splits * ROWS
    first_col = first % num_splits * num_k * BLOCK_K
    item, k, col = first, first * 0, first_col
    for s in gl.static_range(STAGES):
        bar = ready.index(s)
        mbarrier.expect(bar, STAGE_BYTES, pred=s < total)
        _load_weights(w_desc, row, col, row + E, bar, w_smem, s, s < total, SWIGLU)
        item, k, row, col = _next_block(item, k, row, col, step, num_splits, num_k, ROWS, BLOCK_K)
    if PDL > 0:
        gdc_wait()
    x_item, x_k, x_row, x_col = first, first * 0, first * 0, first_col
    for s in gl.static_range(STAGES):
        _load_x(x_desc, x_col, T, ready.index(s), x_smem, s, s < total, FP8)
        x_item, x_k, x_row, x_col = _next_block(
            x_item, x_k, x_row, x_col, step, num_splits, num_k, ROWS, BLOCK_K
        )
    if PDL == 2:
        gdc_launch_dependents()

    slot = first * 0
    phase = first * 0
    num_loaded = first * 0 + STAGES
    r_in_tile = gl.arange(0, ROWS, gl.SliceLayout(1, OUT))
    t = gl.arange(0, COLS, gl.SliceLayout(0, OUT))
    for done in range(first, num_items, step):
        acc = gl.zeros([ROWS, COLS], gl.float32, ACC)
        up = gl.zeros([ROWS, COLS], gl.float32, ACC)
        for _ in range(num_k):
            bar = ready.index(slot)
            mbarrier.wait(bar, phase)
            x_t = x_smem.index(slot * PARTS).permute((1, 0))
            w = w_smem.index(slot * HALVES)
            acc = warpgroup_mma(w, x_t, acc, is_async=True)
            if SWIGLU:
                w_up = w_smem.index(slot * HALVES + 1)
                up = warpgroup_mma(w_up, x_t, up, is_async=True)
            if FP8:
                lo_t = x_smem.index(slot * PARTS + 1).permute((1, 0))
                acc = warpgroup_mma(w, lo_t, acc, is_async=True)
                if SWIGLU:
                    up = warpgroup_mma(w_up, lo_t, up, is_async=True)
            if SWIGLU:
                acc, up = warpgroup_mma_wait(0, deps=[acc, up])
            else:
                acc = warpgroup_mma_wait(0, deps=[acc])
            # The slot is free: the compiler puts a barrier between wgmma's reads and these writes.
            live = num_loaded < total
            mbarrier.expect(bar, STAGE_BYTES, pred=live)
            _load_weights(w_desc, row, col, row + E, bar, w_smem, slot, live, SWIGLU)
            _load_x(x_desc, col, T, bar, x_smem, slot, live, FP8)
            item, k, row, col = _next_block(
                item, k, row, col, step, num_splits, num_k, ROWS, BLOCK_K
            )
            num_loaded += 1
            if PDL == 1:  # noqa: SIM102 (a compile-time test around one at run time)
                if num_loaded == total:
                    gdc_launch_dependents()
            slot += 1
            wrap = slot == STAGES
            phase = gl.where(wrap, phase ^ 1, phase)
            slot = gl.where(wrap, 0, slot)

        y = gl.convert_layout(acc, OUT)
        r = done // num_splits * ROWS + r_in_tile
        live_r = r < E
        if FP8:
            of_x = gl.load(x_scale + t, mask=t < T, other=0.0)[None, :]
            y = y * gl.load(w_scale + r, mask=live_r, other=0.0)[:, None] * of_x
        if SWIGLU:
            u = gl.convert_layout(up, OUT)
            if FP8:
                u = u * gl.load(w_scale + E + r, mask=live_r, other=0.0)[:, None] * of_x
            y = y / (1.0 + gl.exp(-y)) * u
        at = (done % num_splits * T + t).to(gl.int64) * E
        gl.store(
            out + at[None, :] + r[:, None],
            y.to(out.dtype.element_ty),
            mask=live_r[:, None] & (t < T)[None, :],
        )


@triton.jit
def _dot(w, x, acc, DOT_FP32: tl.constexpr):
    """w @ x^T + acc. The interpreter multiplies bf16 as raw uint16 (triton 3.6, 3.7: create_dot in
    runtime/interpreter.py), so it is given the same values in fp32; delete when it is fixed."""
    if DOT_FP32:
        w = w.to(tl.float32)
        x = x.to(tl.float32)
    return tl.dot(w, tl.trans(x), acc, input_precision="ieee")


@triton.jit(do_not_specialize=["T", "num_splits", "num_k"])
def _pointer_kernel(
    weight,
    x,
    out,
    T,
    E,
    D,
    num_splits,
    num_k,
    weight_row_stride,
    x_row_stride,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWIGLU: tl.constexpr,
    PDL: tl.constexpr,
    EVEN_K: tl.constexpr,
    DOT_FP32: tl.constexpr,
):
    tile = tl.program_id(0) // num_splits
    split = tl.program_id(0) % num_splits
    r = tile * ROWS + tl.arange(0, ROWS)
    t = tl.arange(0, COLS)
    live_r = r < E
    live_t = t < T
    k = split * num_k * BLOCK_K + tl.arange(0, BLOCK_K)
    w_at = weight + r.to(tl.int64)[:, None] * weight_row_stride + k[None, :]
    x_at = x + t[:, None] * x_row_stride + k[None, :]
    up_offset = E.to(tl.int64) * weight_row_stride if SWIGLU else 0
    acc = tl.zeros([ROWS, COLS], tl.float32)
    up = tl.zeros([ROWS, COLS], tl.float32)
    if PDL > 0:
        gdc_wait()
    for _ in range(num_k):
        w_mask = live_r[:, None]
        x_mask = live_t[:, None]
        if not EVEN_K:
            w_mask = w_mask & (k < D)[None, :]
            x_mask = x_mask & (k < D)[None, :]
        x_tile = tl.load(x_at, mask=x_mask, other=0.0)
        acc = _dot(tl.load(w_at, mask=w_mask, other=0.0), x_tile, acc, DOT_FP32)
        if SWIGLU:
            w_up = tl.load(w_at + up_offset, mask=w_mask, other=0.0)
            up = _dot(w_up, x_tile, up, DOT_FP32)
        w_at += BLOCK_K
        x_at += BLOCK_K
        k += BLOCK_K
    if PDL > 0:
        gdc_launch_dependents()
    if SWIGLU:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    at = (split * T + t).to(tl.int64) * E
    tl.store(
        out + at[None, :] + r[:, None],
        acc.to(out.dtype.element_ty),
        mask=live_r[:, None] & live_t[None, :],
    )
