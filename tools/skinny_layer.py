"""What tune_skinny.py times: GEMMs of Qwen3's shapes over distinct weights, alone or in a layer.

A layer is norm, qkv, o, norm, gate_up + SwiGLU, down, because a GEMM that overlaps with its
neighbours is not the one that is fastest alone. Attention is left out: `o` reads the q columns.
Invariant: launches of one graph read weights that together exceed the L2 cache, so that every byte
comes from HBM, and cuBLAS sees the same weights as our kernels.
"""

import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from graphengine.capture.torch_internals import scaled_mm
from graphengine.kernels.fp8 import (
    FP8,
    Fp8Scales,
    quantize_rows_fp8,
    round_rows_fp8,
    split_rows_fp8,
)
from graphengine.kernels.head_argmax import skinny_argmax
from graphengine.kernels.skinny_config import SKINNY_T, SkinnyConfig
from graphengine.kernels.skinny_linear import skinny_linear_partials, skinny_swiglu

PEAK_TBPS = 4.46  # read-only bandwidth of an H200, measured
EPS = 1e-6
MODELS = {"8b": (4096, 12288), "4b": (2560, 9728)}  # hidden, MLP width; 32 / 8 heads of 128
VOCABULARY, QKV_ROWS, ATTENTION_WIDTH, NUM_TAPS = 151936, 6144, 4096, 5
LAYER = ("qkv", "o", "gate_up", "down")
LABELS = (*LAYER, "fc", "lm_head", "delta_in")
# Other models: E and D of what differs from those above; "-fp8": of their drafters.
SHAPES = {
    "qwen3.5-4b": {
        "delta_in": (12352, 2560),
        "qkv": (10240, 2560),
        "gate_up": (18432, 2560),
        "down": (2560, 9216),
        "lm_head": (248320, 2560),
    },
    "qwen3.5-4b-fp8": {
        "gate_up": (18432, 2560),
        "down": (2560, 9216),
        "fc": (2560, 20480),
        "lm_head": (248320, 2560),
    },
    "qwen3.5-9b": {
        "delta_in": (12352, 4096),
        "qkv": (10240, 4096),
        "lm_head": (248320, 4096),
    },
    "qwen3.5-9b-fp8": {"fc": (4096, 32768), "lm_head": (248320, 4096)},
    "qwen3.6-27b": {
        "delta_in": (16480, 5120),
        "qkv": (14336, 5120),
        "o": (5120, 6144),
        "gate_up": (34816, 5120),
        "down": (5120, 17408),
        "lm_head": (248320, 5120),
    },
    "qwen3.6-27b-fp8": {
        "qkv": (6144, 5120),
        "o": (5120, 4096),
        "gate_up": (34816, 5120),
        "down": (5120, 17408),
        "fc": (5120, 25600),
        "lm_head": (248320, 5120),
    },
    "qwen3.6-35b-a3b": {
        "delta_in": (12352, 2048),
        "qkv": (9216, 2048),
        "o": (2048, 4096),
        "lm_head": (248320, 2048),
    },
    "qwen3-30b-a3b": {"qkv": (5120, 2048), "lm_head": (151936, 2048)},
    "llama-3.1-8b": {
        "gate_up": (28672, 4096),
        "down": (4096, 14336),
        "lm_head": (128256, 4096),
    },
    "llama-3.1-8b-fp8": {"lm_head": (128256, 4096)},
}
KINDS = {"gate_up": "swiglu", "lm_head": "argmax"}
MIN_LAUNCHES, NUM_REPLAYS = 24, 5
BURST_MS, NUM_ROUNDS = 30, 5  # above 64 rows power sets the clock, which follows within a burst
Weights = Callable[[int], torch.Tensor]
Configs = Mapping[str, SkinnyConfig | None]  # None: cuBLAS
Operands = tuple[torch.Tensor, torch.Tensor, Fp8Scales | None]


class Case(NamedTuple):
    """One shape to tune."""

    model: str
    name: str
    kind: str  # "partials", "swiglu" or "argmax"
    E: int
    D: int
    T: int
    weight_bytes: int

    @property
    def has_library(self) -> bool:
        """Whether cuBLAS multiplies the same operands: FP8 rows in two are ours alone."""
        return self.weight_bytes == 2 or self.T > SKINNY_T

    @property
    def us_at_peak(self) -> float:
        return self.E * self.D * self.weight_bytes / PEAK_TBPS / 1e6


def cases(names: Iterable[str], rows: Iterable[int], labels: Iterable[str] = LABELS) -> list[Case]:
    """Cases of a model in bf16, or of its drafter ("-fp8": layers, fc and lm_head in FP8)."""
    return [
        Case(name, label, KINDS.get(label, "partials"), E, D, T, 1 if name.endswith("-fp8") else 2)
        for name, T in itertools.product(names, rows)
        for label, (E, D) in shapes(name).items()
        if label in labels
    ]


def shapes(name: str) -> Mapping[str, tuple[int, int]]:
    """E and D of each GEMM."""
    if name in SHAPES:
        return SHAPES[name]
    D, width = MODELS[name.removesuffix("-fp8")]
    return {
        "qkv": (QKV_ROWS, D),
        "o": (D, ATTENTION_WIDTH),
        "gate_up": (2 * width, D),
        "down": (D, width),
        "fc": (D, NUM_TAPS * D),
        "lm_head": (VOCABULARY, D),
    }


def run(case: Case, config: SkinnyConfig, operands: Operands) -> torch.Tensor:
    x, weight, scales = operands
    if case.kind == "partials":
        return skinny_linear_partials(x, weight, None, config, scales)
    if case.kind == "argmax":
        return skinny_argmax(x, weight, config, scales)
    return skinny_swiglu(x, weight, config, scales)


def problem(case: Case, E: int, D: int) -> Operands:
    x = torch.randn(case.T, D, device="cuda").bfloat16()
    weight = torch.randn(E, D, device="cuda").mul_(D**-0.5).bfloat16()
    if case.weight_bytes == 2:
        return x, weight, None
    rows, x_scale = split_rows_fp8(x) if case.T <= SKINNY_T else round_rows_fp8(x)
    quantized, scale = quantize_rows_fp8(weight)
    return rows, quantized, Fp8Scales(x_scale, scale)


def library(operands: Operands) -> torch.Tensor:
    """cuBLAS's product of bf16 operands, or of FP8 ones with x as one row."""
    x, weight, scales = operands
    if scales is None:
        return F.linear(x, weight)
    return scaled_mm(x, weight, scales.x_T, scales.weight_E, torch.bfloat16)


def captured(launches: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """One graph of the launches, which have run once before."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        launches()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launches()
    return graph


def replays_us(graph: torch.cuda.CUDAGraph, num_replays: int) -> float:
    """Microseconds of one replay among as many in a row."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(num_replays):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000 / num_replays


def graph_us(launches: Callable[[], Any], count: int) -> float:
    """Median microseconds of one of `count` launches captured in one graph."""
    graph = captured(launches)
    times = [replays_us(graph, 1) / count for _ in range(NUM_REPLAYS + 2)]
    return statistics.median(times[2:])


def bursts_us(graphs: list[torch.cuda.CUDAGraph], count: int) -> list[float]:
    """Median microseconds of one of `count` launches of each graph, under sustained load: bursts
    of all graphs in turn, so that they see the same clocks; the first round is not counted."""
    nums = [max(1, int(BURST_MS * 1000 / replays_us(graph, 1))) for graph in graphs]
    rounds = [
        [replays_us(graph, num) / count for graph, num in zip(graphs, nums, strict=True)]
        for _ in range(NUM_ROUNDS + 1)
    ]
    return [statistics.median(times) for times in zip(*rounds[1:], strict=True)]


class Pool:
    """Distinct weights cut out of one large random buffer; their values do not matter here."""

    def __init__(self, num_bytes: int) -> None:
        self.buffer = torch.empty(num_bytes // 2, dtype=torch.bfloat16, device="cuda")
        for part in self.buffer.split(1 << 28):
            part.normal_(std=0.02)

    def weights(self, case: Case, offset_bytes: int = 0, stride_bytes: int = 0) -> Weights:
        """weights(i): the i-th [E, D]; stride_bytes 0 packs them densely."""
        size = case.E * case.D * case.weight_bytes
        flat = self.buffer.view(torch.uint8)
        dtype = FP8 if case.weight_bytes == 1 else torch.bfloat16

        def weight(i: int) -> torch.Tensor:
            first = offset_bytes + i * (stride_bytes or size)
            return flat[first : first + size].view(dtype).view(case.E, case.D)

        return weight

    def copies(self, num_bytes: int) -> int:
        return self.buffer.numel() * 2 // num_bytes


@triton.jit
def _add_norm_kernel(
    h, parts, weight, normed, D, plane, eps, Z: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """h += sum of Z partials (in place); normed = rmsnorm(h) * weight. One row a program."""
    d = tl.arange(0, BLOCK)
    live = d < D
    at = tl.program_id(0) * D + d
    w = tl.load(weight + d, mask=live, other=0.0).to(tl.float32)
    if PDL == 2:
        gdc_launch_dependents()
    if PDL > 0:
        gdc_wait()
    total = tl.load(h + at, mask=live, other=0.0).to(tl.float32)
    for z in tl.static_range(Z):  # pyright: ignore[reportGeneralTypeIssues]
        total += tl.load(parts + z * plane + at, mask=live, other=0.0).to(tl.float32)
    if PDL == 1:
        gdc_launch_dependents()
    total = total.to(h.dtype.element_ty).to(tl.float32)
    tl.store(h + at, total.to(h.dtype.element_ty), mask=live)
    y = total * tl.rsqrt(tl.sum(total * total) / D + eps) * w
    tl.store(normed + at, y.to(normed.dtype.element_ty), mask=live)


@triton.jit
def _first_columns_kernel(
    parts, out, E, plane, Z: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """out = the first columns of the sum of Z partials: stands for rope and attention."""
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL == 2:
        gdc_launch_dependents()
    if PDL > 0:
        gdc_wait()
    total = tl.zeros([BLOCK], tl.float32)
    for z in tl.static_range(Z):  # pyright: ignore[reportGeneralTypeIssues]
        total += tl.load(parts + z * plane + tl.program_id(0) * E + d).to(tl.float32)
    if PDL == 1:
        gdc_launch_dependents()
    width = tl.num_programs(1) * BLOCK
    tl.store(out + tl.program_id(0) * width + d, total.to(out.dtype.element_ty))


@triton.jit
def _swiglu_kernel(gate_up, out, width, BLOCK: tl.constexpr):
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = gate_up + tl.program_id(0) * 2 * width + d
    gate = tl.load(row, mask=d < width, other=0.0).to(tl.float32)
    up = tl.load(row + width, mask=d < width, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + tl.program_id(0) * width + d, y.to(out.dtype.element_ty), mask=d < width)


def swiglu(gate_up_TJ: torch.Tensor, out_TI: torch.Tensor) -> None:
    T, width = out_TI.shape
    grid = (T, triton.cdiv(width, 1024))
    _swiglu_kernel[grid](gate_up_TJ, out_TI, width, BLOCK=1024)  # pyright: ignore[reportArgumentType]


class LayerBench:
    """Whole layers in one graph: each GEMM by cuBLAS (None) or by a config."""

    def __init__(self, model: str, T: int, pool: Pool) -> None:
        self.T = T
        self.cases = {c.name: c for c in cases([model], [T]) if c.name in LAYER}
        sizes = {n: c.E * c.D * c.weight_bytes for n, c in self.cases.items()}
        stride = sum(sizes.values())
        self.num_layers = min(MIN_LAUNCHES, pool.copies(stride))
        offsets = itertools.accumulate((sizes[n] for n in LAYER[:-1]), initial=0)
        self.weights = {
            n: pool.weights(self.cases[n], at, stride) for n, at in zip(LAYER, offsets, strict=True)
        }
        # FP8 activations stand ready: what splits or rounds them is not timed.
        self.in_fp8 = {}
        for name, case in self.cases.items():
            if case.weight_bytes == 1:
                x, _, scales = problem(case, 64, case.D)
                ones = torch.ones(case.E, device="cuda")
                self.in_fp8[name] = (x, scales._replace(weight_E=ones) if scales else None)
        hidden, width = MODELS[model.removesuffix("-fp8")]
        empty = {"dtype": torch.bfloat16, "device": "cuda"}
        self.h_TD = torch.randn(T, hidden, device="cuda").bfloat16()
        self.zero_ZTD = torch.zeros(1, T, hidden, **empty)
        self.norm_D = torch.ones(hidden, **empty)
        self.normed_TD = torch.empty(T, hidden, **empty)
        self.attn_TF = torch.empty(T, ATTENTION_WIDTH, **empty)
        self.act_TI = torch.empty(T, width, **empty)

    def gemm(self, name: str, i: int, x: torch.Tensor, config: SkinnyConfig | None) -> torch.Tensor:
        x, scales = self.in_fp8.get(name, (x, None))
        operands = (x, self.weights[name](i), scales)
        if config is not None:
            return run(self.cases[name], config, operands)
        y = library(operands)
        if name == "gate_up":
            swiglu(y, self.act_TI)
            return self.act_TI
        return y[None]

    def add_norm(self, parts_ZTD: torch.Tensor, glue: int) -> None:
        (Z, T, D), pdl = parts_ZTD.shape, {"launch_pdl": True} if glue else {}
        block = triton.next_power_of_2(D)
        tensors = (self.h_TD, parts_ZTD, self.norm_D, self.normed_TD)
        _add_norm_kernel[(T,)](
            *(*tensors, D, T * D, EPS),
            **{"Z": Z, "BLOCK": block, "PDL": glue, "num_warps": 8, **pdl},
        )

    def us(self, *paths: tuple[Configs, int]) -> list[float]:
        """Microseconds of a layer on each path: (configs, the small kernels' PDL mode).

        Above 64 rows under sustained load and in turn.
        """
        if self.T <= SKINNY_T:
            return [graph_us(self.launches(*path), self.num_layers) for path in paths]
        return bursts_us([captured(self.launches(*path)) for path in paths], self.num_layers)

    def launches(self, configs: Configs, glue: int) -> Callable[[], None]:
        """All layers, by these configs; glue as a config's `pdl`."""
        pdl = {"launch_pdl": True} if glue else {}

        def launches() -> None:
            parts = self.zero_ZTD
            for i in range(self.num_layers):
                self.add_norm(parts, glue)
                qkv_ZTE = self.gemm("qkv", i, self.normed_TD, configs["qkv"])
                Z, T, E = qkv_ZTE.shape
                _first_columns_kernel[(T, ATTENTION_WIDTH // 1024)](
                    *(qkv_ZTE, self.attn_TF, E, T * E),
                    **{"Z": Z, "BLOCK": 1024, "PDL": glue, **pdl},
                )
                self.add_norm(self.gemm("o", i, self.attn_TF, configs["o"]), glue)
                act = self.gemm("gate_up", i, self.normed_TD, configs["gate_up"])
                parts = self.gemm("down", i, act, configs["down"])

        return launches
