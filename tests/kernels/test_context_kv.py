"""context_kv_write_ against a loop over layers, rows and heads in float64."""

from typing import Any

import pytest
import torch

from graphengine.kernels.context_kv import context_kv_write_
from graphengine.kernels.interpreter import INTERPRET

EPS = 1e-6
# Half an ulp: one rounding. The interpreter truncates to bf16 instead: one ulp.
TOLERANCE: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2**-7 if INTERPRET else 1.01 * 2**-8, "atol": 1e-5},
}


def make(device: str, dtype: torch.dtype, T: int, L: int, K: int, H: int, S: int):
    kv = torch.randn(T, L * 2 * K * H, device=device).to(dtype)
    k_norm = (1 + 0.3 * torch.randn(L, H, device=device)).to(dtype)
    angle = torch.rand(50, H // 2, dtype=torch.float64, device=device) * 6.3
    rope = torch.cat((angle.cos(), angle.sin()), dim=1).float()
    positions = torch.randint(0, 50, (T,), device=device)
    num_pages = T // S + 3
    slots = torch.randperm((num_pages - 1) * S, device=device)[:T] + S
    pool = torch.full((L, 2, num_pages, S, K, H), torch.nan, dtype=dtype, device=device)
    return kv, k_norm, rope, positions, slots, pool, angle


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("T", "L", "K", "H", "S"),
    [(7, 3, 2, 64, 4), (16, 5, 8, 128, 16), (2, 1, 1, 4, 1), (5, 7, 3, 16, 3)],
)
def test_matches_the_formula(device, dtype, T, L, K, H, S) -> None:
    """Bug: layer and plane swapped in the row layout, one layer's norm weight used for all, or a
    write outside the slots."""
    kv, k_norm, rope, positions, slots, pool, angle = make(device, dtype, T, L, K, H, S)
    context_kv_write_(kv, k_norm, rope, positions, slots, pool, EPS)
    flat = pool.view(L, 2, -1, K, H)
    rows = kv.view(T, L, 2, K, H)
    for t in range(T):
        turn = torch.polar(torch.ones_like(angle[0]), angle[positions[t]])
        for layer in range(L):
            k = rows[t, layer, 0].double()
            k = k / (k.pow(2).sum(1, keepdim=True) / H + EPS).sqrt() * k_norm[layer].double()
            turned = torch.complex(k[:, : H // 2], k[:, H // 2 :]) * turn
            expected = torch.cat((turned.real, turned.imag), dim=1)
            got = flat[layer, 0, slots[t]].double()
            torch.testing.assert_close(got, expected, **TOLERANCE[dtype])
            assert torch.equal(flat[layer, 1, slots[t]], rows[t, layer, 1])
    untouched = torch.ones(flat.shape[2], dtype=torch.bool, device=device)
    untouched[slots] = False
    assert flat[:, :, untouched].isnan().all()


def test_padded_rows_touch_only_slot_zero(device) -> None:
    """Bug: an inactive request's context rows written into somebody's page."""
    kv, k_norm, rope, positions, slots, pool, _ = make(device, torch.float32, 4, 2, 2, 16, 4)
    context_kv_write_(kv, k_norm, rope, positions * 0, slots * 0, pool, EPS)
    flat = pool.view(2, 2, -1, 2, 16)
    assert flat[:, :, 0].isfinite().all()
    assert flat[:, :, 1:].isnan().all()


def test_strided_rows(device) -> None:
    """Bug: the row stride of a slice of a wider GEMM output taken for the row width."""
    kv, k_norm, rope, positions, slots, pool, _ = make(device, torch.float32, 4, 2, 2, 16, 4)
    context_kv_write_(kv, k_norm, rope, positions, slots, pool, EPS)
    wide = torch.cat((kv, torch.full((4, 32), torch.nan, device=device)), dim=1)
    again = torch.full_like(pool, torch.nan)
    context_kv_write_(wide[:, : kv.shape[1]], k_norm, rope, positions, slots, again, EPS)
    assert torch.equal(again.nan_to_num(7.0), pool.nan_to_num(7.0))


def test_planes_of_a_larger_pool(device) -> None:
    """Bug: planes with other pages between them are taken for neighbours: V is written into keys of
    another request, or one layer's K into another's."""
    kv, k_norm, rope, positions, slots, pool, _ = make(device, torch.float32, 4, 2, 2, 16, 4)
    context_kv_write_(kv, k_norm, rope, positions, slots, pool, EPS)
    L, planes, num_pages, *page = pool.shape
    larger = torch.full((L + 1, planes + 1, num_pages + 3, *page), torch.nan, device=device)
    part = larger[1:, :2, :num_pages]
    context_kv_write_(kv, k_norm, rope, positions, slots, part, EPS)
    assert torch.equal(part.nan_to_num(7.0), pool.nan_to_num(7.0))
    part.fill_(torch.nan)
    assert larger.isnan().all()


def test_refuses_another_number_of_layers(device) -> None:
    """Bug: rows of a drafter with other layers spread over the wrong layers of the pool."""
    kv, k_norm, rope, positions, slots, pool, _ = make(device, torch.float32, 4, 2, 2, 16, 4)
    with pytest.raises(ValueError, match="1 layers"):
        context_kv_write_(kv, k_norm, rope, positions, slots, pool[:1], EPS)
    with pytest.raises(ValueError, match="2 layers"):
        context_kv_write_(kv, k_norm[:1], rope, positions, slots, pool, EPS)
    with pytest.raises(ValueError, match="plane"):
        context_kv_write_(kv, k_norm, rope, positions, slots, pool[:, :, ::2], EPS)
