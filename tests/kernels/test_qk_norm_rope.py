"""qk_norm_rope_write_ against a complex-number loop in float64."""

from typing import Any

import pytest
import torch

from graphengine.kernels.add_rms_norm import add_rms_norm
from graphengine.kernels.interpreter import INTERPRET
from graphengine.kernels.qk_norm_rope import qk_norm_rope_write_
from graphengine.kernels.skinny_config import PDL_EARLY, SkinnyConfig
from graphengine.kernels.skinny_linear import skinny_linear_partials

EPS = 1e-6
# Half an ulp: one rounding, no second one anywhere. The interpreter truncates to bf16: one ulp.
TOLERANCE: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2**-7 if INTERPRET else 1.01 * 2**-8, "atol": 1e-5},
}
SHAPES = [
    (7, 5, 3, 64, 4),
    (16, 32, 8, 128, 16),
    (3, 2, 1, 256, 1),
    (4, 3, 1, 2, 5),
    (1, 1, 1, 8, 3),
]


def rope_table(num_positions: int, head_dim: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(fp32 table cos | sin, float64 angles [P, H/2])."""
    angle = torch.arange(num_positions, dtype=torch.float64, device=device)[:, None] * (
        10000.0 ** (-torch.arange(head_dim // 2, device=device) / (head_dim // 2))
    )
    return torch.cat((angle.cos(), angle.sin()), dim=1).float(), angle


def normed_and_rotated(x_H: torch.Tensor, weight_H: torch.Tensor | None, angle_F: torch.Tensor):
    """One head: RMSNorm if there is a weight, then lo + i*hi turned by the angle, in float64."""
    x = x_H.double()
    if weight_H is not None:
        x = x / (x.pow(2).sum() / x.numel() + EPS).sqrt() * weight_H.double()
    half = x.numel() // 2
    turned = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones_like(angle_F), angle_F)
    return torch.cat((turned.real, turned.imag))


def make(device: str, dtype: torch.dtype, T: int, N: int, K: int, H: int, S: int, num_pages=9):
    qkv = torch.randn(T, (N + 2 * K) * H, device=device).to(dtype)
    q_norm = (1 + 0.3 * torch.randn(H, device=device)).to(dtype)
    k_norm = (1 + 0.3 * torch.randn(H, device=device)).to(dtype)
    rope, angle = rope_table(300, H, device)
    positions = torch.randint(0, 300, (T,), device=device)
    slots = torch.randperm((num_pages - 1) * S, device=device)[:T] + S
    cache = torch.full((2, num_pages, S, K, H), torch.nan, dtype=dtype, device=device)
    return qkv, q_norm, k_norm, rope, angle, positions, slots, cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("T", "N", "K", "H", "S"), SHAPES)
@pytest.mark.parametrize("has_norms", [True, False])
def test_matches_the_formula(device, dtype, T, N, K, H, S, has_norms) -> None:
    """Bug: wrong norm weight (q's for k), a norm where the model has none, interleaved instead of
    half-split rotation, a swapped plane, a slot computed with the wrong page size, or any write
    outside the slots."""
    num_pages = max(9, T // S + 3)
    qkv, q_norm, k_norm, rope, angle, positions, slots, cache = make(
        device, dtype, T, N, K, H, S, num_pages
    )
    if not has_norms:
        q_norm = k_norm = None
    q = qk_norm_rope_write_(qkv, q_norm, k_norm, rope, positions, slots, cache, EPS)
    assert q.shape == (T, N, H)
    assert q.dtype == dtype
    assert q.is_contiguous()
    flat = cache.view(2, num_pages * S, K, H)
    heads = qkv.view(T, N + 2 * K, H)
    for t in range(T):
        turn = angle[positions[t]]
        for n in range(N):
            expected = normed_and_rotated(heads[t, n], q_norm, turn)
            torch.testing.assert_close(q[t, n].double(), expected, **TOLERANCE[dtype])
        for k in range(K):
            expected = normed_and_rotated(heads[t, N + k], k_norm, turn)
            got = flat[0, slots[t], k].double()
            torch.testing.assert_close(got, expected, **TOLERANCE[dtype])
            assert torch.equal(flat[1, slots[t], k], heads[t, N + K + k])  # v bit for bit
    untouched = torch.ones(num_pages * S, dtype=torch.bool, device=device)
    untouched[slots] = False
    assert flat[:, untouched].isnan().all()


def test_heads_near_zero(device) -> None:
    """Bug: eps is left out: a head of zeros becomes NaN, and every key beside it in a softmax."""
    qkv, q_norm, k_norm, rope, angle, positions, slots, cache = make(
        device, torch.float32, 3, 2, 1, 8, 4
    )
    qkv *= torch.tensor([[0.0], [1e-4], [1e-3]], device=device)
    q = qk_norm_rope_write_(qkv, q_norm, k_norm, rope, positions, slots, cache, EPS)
    for t, heads in enumerate(qkv.view(3, 4, 8)):
        found = [*q[t], cache[0].flatten(0, 1)[slots[t], 0]]
        for x, weight, out in zip(heads, (q_norm, q_norm, k_norm), found, strict=False):
            expected = normed_and_rotated(x, weight, angle[positions[t]])
            torch.testing.assert_close(out.double(), expected, **TOLERANCE[torch.float32])


def test_padded_rows_touch_only_slot_zero(device) -> None:
    """Bug: padding written into a live page, which corrupts another request's keys."""
    T, N, K, H, S = 5, 4, 2, 32, 4
    qkv, q_norm, k_norm, rope, _, _, _, cache = make(device, torch.float32, T, N, K, H, S)
    zeros = torch.zeros(T, dtype=torch.int64, device=device)
    qk_norm_rope_write_(qkv, q_norm, k_norm, rope, zeros, zeros, cache, EPS)
    assert cache.view(2, -1, K, H)[:, 0].isfinite().all()
    assert cache.view(2, -1, K, H)[:, 1:].isnan().all()


def test_strided_rows_and_planes(device) -> None:
    """Bug: a stride taken for granted: qkv inside a wider GEMM output, a cache whose planes lie
    in a pool of another order, int32 positions."""
    T, N, K, H, S = 6, 4, 2, 32, 4
    qkv, q_norm, k_norm, rope, _, positions, slots, cache = make(
        device, torch.bfloat16, T, N, K, H, S
    )
    expected_q = qk_norm_rope_write_(qkv, q_norm, k_norm, rope, positions, slots, cache, EPS)
    wide = torch.full((T, qkv.shape[1] + 64), torch.nan, dtype=qkv.dtype, device=device)
    wide[:, 16 : 16 + qkv.shape[1]] = qkv
    pool = torch.full((2, 3, *cache.shape[1:]), torch.nan, dtype=qkv.dtype, device=device)
    q = qk_norm_rope_write_(
        wide[:, 16 : 16 + qkv.shape[1]],
        q_norm,
        k_norm,
        rope,
        positions.int(),
        slots.int(),
        pool[:, 1],
        EPS,
    )
    assert torch.equal(q, expected_q)
    assert torch.equal(pool[:, 1].isnan(), cache.isnan())
    assert torch.equal(pool[:, 1].nan_to_num(), cache.nan_to_num())
    assert pool[:, [0, 2]].isnan().all()


def test_no_rows(device) -> None:
    """Bug: an empty grid is a launch error."""
    qkv, q_norm, k_norm, rope, _, _, _, cache = make(device, torch.float32, 3, 2, 1, 16, 4)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    q = qk_norm_rope_write_(qkv[:0], q_norm, k_norm, rope, none, none, cache, EPS)
    assert q.shape == (0, 2, 16)
    assert cache.isnan().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv": lambda x: x.T.contiguous().T}, "contiguous"),
        ({"qkv": lambda x: x.double()}, "dtype"),
        ({"qkv": lambda x: x[:, :-1]}, "columns"),
        ({"qkv": lambda x: x[:, :32]}, "32 columns"),  # of k and v alone
        ({"rope": lambda x: x.bfloat16()}, "float32"),
        ({"rope": lambda x: x[:, :8].contiguous()}, "float32"),
        ({"rope": lambda x: x.repeat(1, 2)[:, ::2]}, "rope has strides"),
        ({"positions": lambda x: x[:-1]}, "positions"),
        ({"slots": lambda x: x[:-1]}, "slots"),
        ({"positions": lambda x: x.repeat_interleave(2)[::2]}, "positions has stride 2"),
        ({"slots": lambda x: x.repeat_interleave(2)[::2]}, "slots has stride 2"),
        ({"cache": lambda x: x[:, ::2]}, "plane"),
        ({"cache": lambda x: x[..., :15].contiguous()}, "15 is odd"),
        ({"k_norm": lambda x: x[:-2]}, "k_norm"),
        ({"q_norm": lambda x: None}, "both None"),
    ],
)
def test_refuses_what_it_cannot_address(device, change, message) -> None:
    """Bug: a wrong stride or dtype read as if it were right."""
    qkv, q_norm, k_norm, rope, _, positions, slots, cache = make(
        device, torch.float32, 4, 2, 1, 16, 4
    )
    args: dict[str, Any] = {"qkv": qkv, "q_norm": q_norm, "k_norm": k_norm, "rope": rope}
    args |= {"positions": positions, "slots": slots, "cache": cache}
    args |= {name: convert(args[name]) for name, convert in change.items()}
    with pytest.raises(ValueError, match=message):
        qk_norm_rope_write_(*args.values(), eps=EPS)


def test_head_dim_that_is_no_power_of_two(device) -> None:
    """Bug: a kernel tile that silently drops the dims past the power of two."""
    T, N, K, H, S = 3, 2, 1, 96, 4
    qkv, q_norm, k_norm, rope, angle, positions, slots, cache = make(
        device, torch.float32, T, N, K, H, S
    )
    args = (qkv, q_norm, k_norm, rope, positions, slots, cache, EPS)
    if device == "cuda" or INTERPRET:
        with pytest.raises(ValueError, match="head_dim 96"):
            qk_norm_rope_write_(*args)
    else:
        q = qk_norm_rope_write_(*args)
        expected = normed_and_rotated(qkv[2, H : 2 * H], q_norm, angle[positions[2]])
        torch.testing.assert_close(q[2, 1].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_adds_partials(device, dtype, num_splits) -> None:
    """Bug: a split left out, or added after the norm, when the GEMM hands over fp32 partials."""
    qkv, q_norm, k_norm, rope, _, positions, slots, cache = make(device, dtype, 7, 5, 3, 64, 4)
    partials = torch.randn(num_splits, *qkv.shape, device=device)
    expected = cache.clone()
    arguments = (q_norm, k_norm, rope, positions, slots)
    q = qk_norm_rope_write_(partials, *arguments, cache, EPS)
    q_expected = qk_norm_rope_write_(partials.sum(0).to(dtype), *arguments, expected, EPS)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(q, q_expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(cache, expected, equal_nan=True, rtol=tolerance, atol=tolerance)
    assert q.dtype == dtype


def test_adds_partials_of_wider_rows(device) -> None:
    """Bug: partial sums beside others', as those of one GEMM for several projections, are found as
    if their rows were dense."""
    qkv, q_norm, k_norm, rope, _, positions, slots, cache = make(
        device, torch.float32, 5, 2, 1, 16, 4
    )
    wide = torch.randn(3, len(qkv), qkv.shape[1] + 8, device=device)
    partials, arguments = wide[..., : qkv.shape[1]], (q_norm, k_norm, rope, positions, slots)
    expected = cache.clone()
    q = qk_norm_rope_write_(partials, *arguments, cache, EPS)
    assert torch.equal(q, qk_norm_rope_write_(partials.contiguous(), *arguments, expected, EPS))
    assert torch.equal(cache.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [1, 4])
def test_a_captured_layer_reads_this_replay(num_splits) -> None:
    """Bug: positions or slots read before this replay has advanced them, or projections before the
    wait: the kernels between advance and qk-norm may all be in flight at once."""
    torch.use_deterministic_algorithms(False)  # its fill kernels would stand between the launches
    T, N, K, H, S, D = 16, 32, 8, 128, 16, 2560
    _, q_norm, k_norm, rope, _, _, _, cache = make("cuda", torch.bfloat16, T, N, K, H, S, 40)
    positions, slots = (torch.arange(T, device="cuda") + n for n in (0, S))
    h, norm = torch.randn(T, D, device="cuda").bfloat16(), torch.ones(D, device="cuda").bfloat16()
    weight = torch.randn((N + 2 * K) * H, D, device="cuda").bfloat16() / 50
    config = SkinnyConfig(64, 256, 2, num_splits, 2, 4, PDL_EARLY)

    def layer() -> torch.Tensor:
        positions.add_(1)
        slots.add_(1)
        _, x = add_rms_norm(None, h, norm, EPS, early=True)
        qkv = skinny_linear_partials(x, weight, None, config)
        return qk_norm_rope_write_(qkv, q_norm, k_norm, rope, positions, slots, cache, EPS)

    layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q = layer()
    for _ in range(20):
        h.normal_()
        graph.replay()
        torch.cuda.synchronize()
        found = q.clone(), cache.clone()
        positions.sub_(1)
        slots.sub_(1)
        cache.fill_(torch.nan)
        expected = layer()
        assert torch.equal(found[0], expected)
        written = ~cache.isnan()
        assert written.sum() == 2 * T * K * H
        assert torch.equal(found[1][written], cache[written])
        cache.fill_(torch.nan)
