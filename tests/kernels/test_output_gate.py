"""output_gate against transformers' gated norm and torch's sigmoid."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from graphengine.kernels.interpreter import INTERPRET
from graphengine.kernels.output_gate import MANY_ROWS, gate_, output_gate, output_gate_reference
from graphengine.kernels.qk_norm_rope import sum_partials

HALF = torch.float16 if INTERPRET else torch.bfloat16
EPS = 1e-5
BOUNDS: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"rtol": 2e-6, "atol": 2e-6},
    HALF: {"rtol": 8e-3, "atol": 1e-3},
}
SHAPES = {"one row": (1, 4, 16), "heads of no whole program": (5, 6, 32), "wide": (3, 2, 256)}


def make(device: str, shape: tuple[int, int, int], dtype: torch.dtype, splits: int):
    """x, a projection with columns before and behind z's in wider rows, where they begin, z."""
    T, N, V = shape
    generator = torch.Generator().manual_seed(T)
    x = torch.randn(T, N, V, generator=generator).to(dtype)
    parts = torch.randn(max(splits, 1), T, N * V + 24, generator=generator)
    whole = parts.sum(0).to(dtype)
    z = whole[:, 8 : 8 + N * V].view(T, N, V)
    projected = F.pad(parts if splits else whole, (0, 8), value=torch.nan)
    return x.to(device), projected.to(device)[..., :-8], 8, z.to(device)


@pytest.mark.parametrize("splits", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("shape", SHAPES)
def test_gated_norm(device: str, shape: str, dtype: torch.dtype, splits: int) -> None:
    """Bug: another head's or row's gate, a norm over all heads, silu of an unrounded z."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

    x, projected, begin, z = make(device, SHAPES[shape], dtype, splits)
    theirs = Qwen3_5RMSNormGated(x.shape[-1], eps=EPS).to(device)
    theirs.weight.data.normal_()
    found = output_gate(x, projected, begin, theirs.weight.data, EPS)
    expected = theirs(x.float(), z.float()).flatten(1)
    torch.testing.assert_close(found.float(), expected, **BOUNDS[dtype])


@pytest.mark.gpu  # interpreted, each of its programs costs milliseconds
def test_many_rows() -> None:
    """Bug: a head of the second half of a program is another's, or one behind the last is written,
    where a program has more heads."""
    x, projected, begin, _ = make("cuda", (MANY_ROWS + 2, 12, 16), HALF, 0)
    weight = torch.linspace(0.5, 2, 16, device="cuda")
    found, expected = (
        gate(x, projected, begin, weight, EPS) for gate in (output_gate, output_gate_reference)
    )
    torch.testing.assert_close(found, expected, **BOUNDS[HALF])


@pytest.mark.parametrize("splits", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_sigmoid(device: str, dtype: torch.dtype, splits: int) -> None:
    """Bug: the norm's gate is taken for attention's, or columns in front of its own."""
    x, projected, _, _ = make(device, (4, 5, 32), dtype, splits)
    z = sum_partials(projected[..., -160:], dtype).view_as(x)
    expected = x.float() * torch.sigmoid(z.float())
    gate_(x, projected)
    torch.testing.assert_close(x.float(), expected, **BOUNDS[dtype])


def gated_(x: torch.Tensor, projected: torch.Tensor) -> torch.Tensor:
    """A copy of x behind attention's gate."""
    gate_(x := x.clone(), projected)
    return x


@pytest.mark.parametrize("normed", [False, True])
def test_parts_are_their_rounded_sum(device: str, normed: bool) -> None:
    """Bug: a gate that comes as partial sums is not rounded, so a row's bits hang on how the
    projection in front was split."""
    x, parts, begin, _ = make(device, (4, 5, 32), HALF, 2)
    weight, whole = torch.linspace(0.5, 2, 32, device=device), sum_partials(parts, HALF)
    found, expected = (
        output_gate(x, z, begin, weight, EPS) if normed else gated_(x, z) for z in (parts, whole)
    )
    assert torch.equal(found, expected)


def test_refusals(device: str) -> None:
    """Bug: columns past the projection's end, or in front of it, are read."""
    x, projected, _, _ = make(device, (4, 5, 32), HALF, 0)
    weight = torch.ones(32, device=device)
    with pytest.raises(ValueError, match="need 4 rows with 160 columns from 25 on"):
        output_gate(x, projected, 25, weight, EPS)
    with pytest.raises(ValueError, match="from -1 on"):
        output_gate(x, projected, -1, weight, EPS)
    with pytest.raises(ValueError, match="need 4 rows"):
        output_gate(x, projected[:3], 0, weight, EPS)
    with pytest.raises(ValueError, match="from -9 on"):
        gate_(x, projected[:, :151])
