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

Where a config has `cols`, the kernel is wide_linear.py's, for 65 to 256 rows, or, with `consumers`,
specialized_linear.py's, for up to 192. Else there are two, in skinny_kernels.py:
`skinny_tma_kernel` (Gluon, Hopper: TMA into a ring of stages, wgmma) and `skinny_pointer_kernel`
(plain Triton, unquantised: other GPUs, odd D, fp32, the interpreter). FP8 elsewhere runs in torch.
Their sizes are chosen in skinny_config.py. A head whose logits are wanted for their argmax alone
ends otherwise: head_argmax.py.

Legend: T rows (decode: requests * block), D inputs, E outputs, I MLP width, J = 2 * I, Z splits.
"""

# Gluon is not typed for a type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from graphengine.capture.torch_internals import constant_in_graphs
from graphengine.kernels.fp8 import FP8, Fp8Scales, widened
from graphengine.kernels.interpreter import INTERPRET
from graphengine.kernels.launch import early_options, on_grid, on_hopper, supports_pdl
from graphengine.kernels.skinny_config import (
    MAX_SPLITS,
    MAX_T,
    NARROW_T,
    PDL_OFF,
    SkinnyConfig,
    cdiv,
    choose_config,
    num_columns,
    rule_config,
    split_width,
)
from graphengine.kernels.skinny_kernels import skinny_pointer_kernel, skinny_tma_kernel
from graphengine.kernels.specialized_linear import check_tile, launch_specialized
from graphengine.kernels.wide_linear import PAIR, gluon_dtype, launch_wide


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
        x_TD: [T, D] bf16, fp16 or fp32, 1 <= T <= 256, last stride 1; or FP8 [2, T, D],
            T <= 128, or [T, D] for a config with cols.
        weight_ED: [E, D] of x's dtype; last stride 1.
        num_splits: Z; None takes the config's.
        config: None takes `choose_config`'s, and the rule's where that has none.
        scales: with FP8 operands, whose products they multiply.
    Returns: fp32 [Z, T, E], contiguous.
    Raises: ValueError for shapes, dtypes or strides that the kernels cannot address; a config with
        cols runs on Hopper alone, in 16 or 8 bits.
    Source: split-K with a deferred reduction.
    """
    config = resolve(x_TD, weight_ED, config, swiglu=False)
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
    config = resolve(x_TD, weight_ED, config, swiglu=False)._replace(num_splits=1)
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
    config = resolve(x_TD, gate_up_JD, config, swiglu=True)._replace(num_splits=1)
    operands = (x_TD, gate_up_JD, *(scales or (None, None)))
    return torch.ops.graphengine.skinny_swiglu(*operands, list(config))


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


def resolve(
    x_TD: torch.Tensor, weight_ED: torch.Tensor, config: SkinnyConfig | None, swiglu: bool
) -> SkinnyConfig:
    """The config, or for None the one of these shapes that takes x as it is: one with `cols` takes
    neither FP8 in two rows nor, where another kernel does, other dtypes and GPUs than Hopper's."""
    if config is not None:
        return config
    (T, D), E = x_TD.shape[-2:], weight_ED.shape[0]
    shape = (min(T, MAX_T), E, D, weight_ED.element_size(), swiglu)
    chosen = choose_config(*shape)
    if chosen and chosen.cols:
        in_fp8, in_16_bits = x_TD.dtype == FP8, x_TD.element_size() == 2
        takes = x_TD.dim() == 2 if in_fp8 else x_TD.is_cuda and in_16_bits and is_hopper()
        chosen = chosen if takes else None
    return chosen or rule_config(*shape)


def _check_inputs(
    x: torch.Tensor,
    weight_ED: torch.Tensor,
    scales: Fp8Scales | None,
    config: SkinnyConfig,
    swiglu: bool,
) -> None:
    in_two = scales is not None and not config.cols  # x as hi and lo
    expected = "[2, T, D]" if in_two else "[T, D]"
    if (
        x.dim() != (3 if in_two else 2)
        or (in_two and x.shape[0] != 2)
        or weight_ED.dim() != 2
        or x.shape[-1] != weight_ED.shape[1]
    ):
        raise ValueError(
            f"x {tuple(x.shape)} and weight {tuple(weight_ED.shape)}: need {expected} and [E, D]"
        )
    T, E = x.shape[-2], weight_ED.shape[0]
    if not 1 <= T <= MAX_T:
        raise ValueError(f"x has {T} rows: use F.linear for none or for more than {MAX_T}")
    if T > NARROW_T and not config.cols:
        raise ValueError(f"x has {T} rows: more than {NARROW_T} need a config with cols")
    if config.cols and config.num_stages < 2:  # a slot is free when the next one has come
        raise ValueError(f"num_stages {config.num_stages}: a config with cols needs two or more")
    if config.consumers:
        check_tile(config, swiglu, weight_ED.element_size())
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


def launch(
    x: torch.Tensor,
    weight_ED: torch.Tensor,
    scales: Fp8Scales | None,
    out: torch.Tensor,
    config: SkinnyConfig,
    swiglu: bool,
) -> torch.Tensor:
    """Runs the kernel of the config into out [Z, T, E], [T, E], (SwiGLU) [T, I], or, in int64, the
    candidates of head_argmax.py."""
    if config.cols:
        if not runs_tma(x, weight_ED, config) or (swiglu and out.shape[-1] % PAIR):
            raise ValueError(
                f"x {x.dtype} {tuple(x.shape)}, weight {tuple(weight_ED.shape)}: a config with cols"
                f" needs Hopper, rows of 8 or 16 bits that begin at multiples of 16 bytes, and I a"
                f" multiple of {PAIR}"
            )
        run = launch_specialized if config.consumers else launch_wide
        return run(x, weight_ED, scales, out, config, swiglu)
    (T, D), E = x.shape[-2:], weight_ED.shape[0] // (1 + swiglu)
    cols = num_columns(T)
    items = cdiv(E, config.rows) * config.num_splits
    width = split_width(D, config.num_splits, config.block_k)
    pdl = config.pdl if supports_pdl(x.device) else PDL_OFF
    sizes = {"ROWS": config.rows, "COLS": cols, "BLOCK_K": config.block_k}
    options = {"num_warps": config.num_warps, "SWIGLU": swiglu} | early_options(pdl)
    if runs_tma(x, weight_ED, config):
        x_rows = x.view(-1, D)
        weight_layout, x_layout = (
            gl.NVMMASharedLayout.get_default_for([height, config.block_k], gluon_dtype(tensor))
            for height, tensor in ((config.rows, weight_ED), (cols, x_rows))
        )
        on_grid(skinny_tma_kernel, (num_ctas(items, config, x.device),))(
            TensorDescriptor.from_tensor(weight_ED, [config.rows, config.block_k], weight_layout),
            TensorDescriptor.from_tensor(x_rows, [cols, config.block_k], x_layout),
            *(scales or (out, out)),  # pointers that are not read
            out,
            *(T, E, items, config.num_splits, width // config.block_k),
            **sizes,
            STAGES=config.num_stages,
            FP8=scales is not None,
            **options,
        )
    else:
        on_grid(skinny_pointer_kernel, (items,))(
            weight_ED,
            x,
            out,
            *(T, E, D, config.num_splits, width // config.block_k),
            *(weight_ED.stride(0), x.stride(0)),
            **sizes,
            EVEN_K=width * config.num_splits == D,
            DOT_FP32=INTERPRET,
            num_stages=config.num_stages,
            **options,
        )
    return out


@constant_in_graphs
def is_hopper() -> bool:
    """Whether the GPU has the tensor-core and copy instructions that the TMA kernels are written
    in."""
    return torch.cuda.get_device_capability()[0] == 9


def num_ctas(items: int, config: SkinnyConfig, device: torch.device) -> int:
    """The grid of `skinny_tma_kernel`, whose CTAs take `items` in turn."""
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return min(items, config.ctas_per_sm * num_sms)


def runs_tma(x: torch.Tensor, weight_ED: torch.Tensor, config: SkinnyConfig) -> bool:
    """Hopper, 16- or 8-bit operands, and rows that begin at multiples of 16 bytes."""
    if not (config.use_tma and on_hopper(x)):
        return False
    aligned = all(
        y.data_ptr() % 16 == 0 and y.stride(-2) * y.element_size() % 16 == 0 for y in (x, weight_ED)
    )
    return aligned and x.element_size() <= 2


SCHEMA = "(Tensor x, Tensor weight, Tensor? x_scale, Tensor? w_scale, int[] config) -> Tensor"


def prepare(x, weight, x_scale, w_scale, config, swiglu):
    """(scales, config, whether a kernel runs); refuses what it cannot address."""
    scales = None if x_scale is None or w_scale is None else Fp8Scales(x_scale, w_scale)
    config = SkinnyConfig(*config)
    _check_inputs(x, weight, scales, config, swiglu)
    if scales is not None:
        return scales, config, runs_tma(x, weight, config)
    return scales, config, x.is_cuda or (INTERPRET and not config.cols)


def _empty_out(x, outputs):
    """[T, outputs] in the dtype of the result."""
    dtype = torch.bfloat16 if x.dtype == FP8 else x.dtype
    return x.new_empty((x.shape[-2], outputs), dtype=dtype)


# Custom ops: dynamo does not trace a launch with TMA descriptors or launch_pdl, and Inductor calls
# an op once, on its inputs as they are. All three return a new contiguous tensor.
@torch.library.custom_op("graphengine::skinny_linear_partials", mutates_args=(), schema=SCHEMA)
def _partials_op(x, weight, x_scale, w_scale, config):
    scales, config, has_kernel = prepare(x, weight, x_scale, w_scale, config, False)
    if not has_kernel:
        return skinny_linear_partials_reference(*widened(x, weight, scales), config)
    shape = (config.num_splits, x.shape[-2], weight.shape[0])
    return launch(x, weight, scales, x.new_empty(shape, dtype=torch.float32), config, False)


@_partials_op.register_fake
def _(x, weight, x_scale, w_scale, config):
    shape = (SkinnyConfig(*config).num_splits, x.shape[-2], weight.shape[0])
    return x.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("graphengine::skinny_linear", mutates_args=(), schema=SCHEMA)
def _linear_op(x, weight, x_scale, w_scale, config):
    scales, config, has_kernel = prepare(x, weight, x_scale, w_scale, config, False)
    out = _empty_out(x, weight.shape[0])
    if not has_kernel:
        wide = widened(x, weight, scales)
        return skinny_linear_partials_reference(*wide, config)[0].to(out.dtype)
    return launch(x, weight, scales, out, config, False)


@_linear_op.register_fake
def _(x, weight, x_scale, w_scale, config):
    return _empty_out(x, weight.shape[0])


@torch.library.custom_op("graphengine::skinny_swiglu", mutates_args=(), schema=SCHEMA)
def _swiglu_op(x, weight, x_scale, w_scale, config):
    scales, config, has_kernel = prepare(x, weight, x_scale, w_scale, config, True)
    out = _empty_out(x, weight.shape[0] // 2)
    if not has_kernel:
        return skinny_swiglu_reference(*widened(x, weight, scales)).to(out.dtype)
    return launch(x, weight, scales, out, config, True)


@_swiglu_op.register_fake
def _(x, weight, x_scale, w_scale, config):
    return _empty_out(x, weight.shape[0] // 2)
