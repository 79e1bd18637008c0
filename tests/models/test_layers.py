"""Which GEMM a projection goes through."""

from types import SimpleNamespace

import pytest
import torch

from graphengine.models import layers

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
