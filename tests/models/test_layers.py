"""Which GEMM a projection goes through, and which norm stands in front of it."""

from types import SimpleNamespace

import pytest
import torch

from graphengine.kernels.fp8 import FP8
from graphengine.models import layers
from tests.support.fake_hopper import fake_hopper

ROWS, INPUTS, WEIGHTS = 1024, 64, 4096  # 128 tiles of a chunk's GEMM, of 132


def calls_of(op: str, monkeypatch: pytest.MonkeyPatch) -> list:
    """The calls of a chunk's GEMM, as on a GPU of 132 multiprocessors."""
    calls = []
    monkeypatch.setattr(layers, "_takes_skinny", lambda x: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132)
    )
    real = getattr(layers, op)
    monkeypatch.setattr(layers, op, lambda *args: calls.append(args) or real(*args))
    return calls


@pytest.mark.parametrize(
    ("num_rows", "num_weights", "inputs", "has_bias", "is_fp8", "expected"),
    [
        (ROWS, WEIGHTS, INPUTS, False, False, True),
        (ROWS - 1, WEIGHTS, INPUTS, False, False, False),
        (ROWS, WEIGHTS + 512, INPUTS, False, False, False),  # tiles for a tenth of a second round
        (128, 34816, INPUTS, False, False, True),  # 128 wide tiles
        (ROWS, WEIGHTS, INPUTS, True, False, False),
        (ROWS, WEIGHTS, INPUTS, False, True, False),
        (ROWS, WEIGHTS - 8, INPUTS, False, False, False),  # gates that are no eights
        (ROWS, WEIGHTS, INPUTS + 4, False, False, False),  # rows that TMA cannot address
    ],
)
def test_swiglu_of_a_chunk(
    num_rows, num_weights, inputs, has_bias, is_fp8, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a long chunk's SwiGLU stands behind cuBLAS although our GEMM ends in it; or that GEMM
    gets FP8, leaves a bias out, takes what cuBLAS is faster at, or refuses a model whose sizes it
    cannot address."""
    calls = calls_of("chunk_swiglu", monkeypatch)
    x = torch.randn(num_rows, inputs).bfloat16()
    matrix = torch.randn(num_weights, inputs).bfloat16() / 8
    bias = torch.randn(num_weights).bfloat16() if has_bias else None
    gate, up = torch.nn.functional.linear(x, matrix, bias).float().chunk(2, dim=-1)
    act = layers.linear_swiglu(x, layers.quantize_fp8(matrix) if is_fp8 else matrix, bias)
    assert bool(calls) == expected
    difference = act.float() - torch.nn.functional.silu(gate) * up
    assert difference.norm() < (8e-2 if is_fp8 else 1e-2) * up.norm()


@pytest.mark.parametrize(("num_rows", "weights", "expected"), [(128, 34816, 1), (1024, 4096, 0)])
def test_a_compiled_step_is_no_chunk(num_rows, weights, expected, monkeypatch) -> None:
    """Bug: a step of 64 requests goes through the GEMM of a prompt where it is compiled, which was
    measured for up to 128 rows alone."""
    calls = calls_of("chunk_swiglu", monkeypatch)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    x, matrix = (torch.zeros(n, INPUTS, dtype=torch.bfloat16) for n in (num_rows, weights))
    layers.linear_swiglu(x, matrix)
    assert len(calls) == expected


@pytest.mark.parametrize(
    ("num_rows", "num_weights", "inputs", "kind", "expected"),
    [
        (ROWS, 6144, INPUTS, "plain", True),  # 128 large tiles
        (ROWS - 1, 6144, INPUTS, "plain", False),
        (ROWS, WEIGHTS, INPUTS, "plain", False),  # 88
        (ROWS, 6144, INPUTS, "bias", False),
        (ROWS, 6144, INPUTS, "FP8", False),
        (ROWS, 6144, INPUTS, "strided", False),  # rows that TMA may not be able to address
        (ROWS, 6148, INPUTS, "plain", False),
        (ROWS, 6144, INPUTS + 4, "plain", False),
    ],
)
def test_linear_of_a_chunk(num_rows, num_weights, inputs, kind, expected, monkeypatch) -> None:
    """Bug: a long chunk's projection stands behind cuBLAS although ours is through earlier; or ours
    gets FP8, leaves a bias out, or fails on what it cannot address."""
    calls = calls_of("chunk_linear", monkeypatch)
    x = torch.randn(num_rows, inputs + 1).bfloat16()[:, :inputs]
    x = x if kind == "strided" else x.contiguous()
    matrix = torch.randn(num_weights, inputs).bfloat16() / 8
    bias = torch.randn(num_weights).bfloat16() if kind == "bias" else None
    given = layers.quantize_fp8(matrix) if kind == "FP8" else matrix
    y = layers.linear(x, given, bias).float()
    assert bool(calls) == expected
    expected_y = torch.nn.functional.linear(x, matrix, bias).float()
    assert (y - expected_y).norm() < (8e-2 if kind == "FP8" else 1e-2) * expected_y.norm()


@pytest.mark.parametrize(
    ("num_rows", "num_weights", "inputs", "kind", "expected"),
    [
        (16, 6144, 2560, "bf16", ("", True)),  # two CTAs a multiprocessor
        (16, 19456, 2560, "bf16", ("", False)),  # one
        (256, 6144, 2560, "bf16", ("", False)),  # cuBLAS
        (16, 6144, 2560, "bias", ("", False)),
        (16, 6144, 4096, "FP8", ("_split",)),
        (64, 6144, 4096, "FP8", ("_split",)),
        (65, 6144, 4096, "FP8", ("_round",)),  # a tile that takes one row
        (256, 999, 4096, "FP8", ("_round",)),
        (16, 6144, 4096, "FP8 and bias", ("_reference",)),
    ],
)
def test_how_a_norm_hands_rows_on(
    num_rows, num_weights, inputs, kind, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a norm in front of a GEMM with one CTA a multiprocessor starts beside what it waits for,
    which costs 8B 0.8 % of a step; or rows come in two to a tile that takes one, or in one where
    none of x is to be lost."""
    asked = []
    for name in ("", "_split", "_round", "_reference"):

        def note(h_TD, update, weight_D, eps, *early, name=name):
            asked.append((name, *early))
            return (h_TD,) * (3 if name in ("_split", "_round") else 2)

        monkeypatch.setattr(layers.kernels, f"add_rms_norm{name}", note)
    with fake_hopper(monkeypatch):
        h, norm = (torch.empty(*n, inputs, device="cuda").bfloat16() for n in ((num_rows,), ()))
        weight = torch.empty(num_weights, inputs, device="cuda", dtype=torch.bfloat16)
        scales = torch.empty(num_weights, device="cuda")
        matrix = layers.Fp8Matrix(weight.to(FP8), scales) if "FP8" in kind else weight
        layers.add_rms_norm(h, h, norm, 1e-6, matrix, norm if "bias" in kind else None)
    assert asked == [expected]


@pytest.mark.parametrize(
    ("multiplies", "num_weights", "kind", "expected"),
    [
        ("linear", 6144, "bf16", "library_linear"),  # whose table has splits
        ("linear", 24576, "bf16", "skinny_linear"),
        ("linear", 6144, "FP8", "skinny_linear_partials"),  # which cuBLAS does not take
        ("linear_partials", 6144, "bf16", "skinny_linear_partials"),
        ("linear_partials", 999, "bias", "library_linear"),
    ],
)
def test_who_multiplies_in_splits(
    multiplies, num_weights, kind, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a product whose splits nobody adds on the way costs another launch, which cuBLAS does
    not; or rows that a norm has split in two are given to cuBLAS."""
    asked = []
    for name in ("library_linear", "skinny_linear", "skinny_linear_partials"):
        monkeypatch.setattr(
            layers, name, lambda x, *_, name=name, **__: asked.append(name) or x.bfloat16()
        )
    with fake_hopper(monkeypatch):
        x = torch.empty(16, 4096, device="cuda").bfloat16()
        matrix = torch.empty(num_weights, 4096, device="cuda").bfloat16()
        if kind == "FP8":
            scales = torch.empty(num_weights, device="cuda")
            x = layers.Fp8Rows(torch.stack([x, x]).to(FP8), scales)
            matrix = layers.Fp8Matrix(matrix.to(FP8), scales)
        bias = torch.empty(num_weights, device="cuda") if kind == "bias" else None
        getattr(layers, multiplies)(x, matrix, bias)
    assert asked == [expected]
