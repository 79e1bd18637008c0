"""filter_threshold against the definition, evaluated in float64 on sorted numpy rows.

A kept set is right if it is what min-p, top-k and then top-p leave, ties included. Where the mass
of a set equals top_p up to float32 rounding either neighbour is right: `ROUNDING`.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphengine.kernels import filter_threshold as module
from graphengine.kernels.argmax import argmax_rows
from graphengine.kernels.filter_threshold import MAX_VOCAB, filter_threshold
from graphengine.kernels.interpreter import INTERPRET
from tests.support.examples import examples

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ROUNDING = 2e-6
# The interpreter takes about 0.1 s an example.
MAX_EXAMPLES = examples(12 if INTERPRET else 150)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row alone gets two programs of several loads, a row of a batch one."""
    monkeypatch.setattr(module, "PROGRAMS", 2)


def thresholds(
    logits: torch.Tensor, temperature: Any, top_p: Any, top_k: Any, min_p: Any = 0.0
) -> torch.Tensor:
    """Settings: one of each request, or one number for all rows."""

    def column(x: Any, dtype: torch.dtype) -> torch.Tensor:
        x = torch.tensor(x, dtype=dtype, device=logits.device)
        return x if x.dim() else x.expand(len(logits)).contiguous()

    settings = column(temperature, torch.float32), column(top_p, torch.float32)
    settings = *settings, column(top_k, torch.int32), column(min_p, torch.float32)
    found = filter_threshold(logits, argmax_rows(logits), *settings)
    assert found.dtype == torch.float32 and found.shape == (len(logits),)
    return found


def check(
    row: torch.Tensor,
    found: float,
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float = 0.0,
) -> None:
    """Whether `found` is the threshold of one row."""
    z = np.sort(row.double().cpu().numpy())[::-1]
    if not np.isfinite(z).any() or np.isnan(z).any() or z[0] == np.inf or temperature == 0:
        assert found == -np.inf
        return
    floor = z[min(top_k, len(z)) - 1] if top_k else -np.inf
    if min_p:
        degrees = min(max(float(np.float32(temperature)), 1e-30), 1e30)
        bound = z[0] + degrees * np.log(np.float64(np.float32(min_p)))
        if (np.abs(z - bound) <= 1e-6 * (abs(z[0]) + abs(bound))).any() and min_p < 1:
            return  # either neighbour is right
        floor = max(floor, bound)
        found, floor = (z[z >= x].min() for x in (found, floor))  # the last one that is kept
    top_p = float(np.float32(top_p))
    if top_p == 1:
        assert found == floor
        return
    assert found in z and found >= floor
    p = np.where(z >= floor, np.exp((z - z[0]) / np.float64(np.float32(temperature))), 0.0)
    p /= p.sum()
    assert p[z >= found].sum() >= top_p * (1 - ROUNDING), "too little is kept"
    assert p[z > found].sum() <= top_p * (1 + ROUNDING), "one value less would do"


@st.composite
def rows(draw: Any) -> tuple[torch.Tensor, float, float, int, float]:
    V = draw(st.sampled_from([1, 2, 31, 127, 128, 129, 300]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    x = torch.randn(V, generator=generator) * draw(st.sampled_from([1e-20, 1e-3, 1.0, 5.0, 1e4]))
    kind = draw(st.sampled_from(["plain", "ties", "all_equal", "masked", "one", "shifted"]))
    if kind == "ties":
        x = (x * 2).round() / 2
    elif kind == "all_equal":
        x = x[:1].expand(V).clone()
    elif kind == "masked":
        x[torch.rand(V, generator=generator) < 0.7] = -torch.inf
    elif kind == "one":
        x[1:] = -torch.inf
    elif kind == "shifted":
        x = x - 3000  # no logit is positive
    if draw(st.integers(0, 9)) == 0:
        x[draw(st.integers(0, V - 1))] = draw(st.sampled_from([torch.nan, torch.inf, -torch.inf]))
    temperature = draw(st.sampled_from([0.0, 1e-38, 1e-6, 0.1, 0.7, 1.0, 2.5, 1e6, 1e38]))
    top_p = draw(st.sampled_from([1.0, 1 - 2**-24, 0.999, 0.9, 0.5, 0.1, 1e-6, 1e-38]))
    top_k = draw(st.sampled_from([0, 1, 2, 20, V - 1, V, V + 1, 2**31 - 1]))
    min_p = draw(st.sampled_from([0.0, 0.0, 0.0, 1e-30, 0.01, 0.2, 0.9, 1.0]))
    return x, temperature, top_p, top_k, min_p


@pytest.mark.parametrize("dtype", DTYPES)
@settings(
    max_examples=MAX_EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(case=rows())
def test_is_the_definition(device, dtype, case) -> None:
    """Bug: the crossing value left out, top-p of the mass before top-k, a tie cut in two, a
    masked logit that counts, a sum that overflows."""
    x, temperature, top_p, top_k, min_p = case
    logits = x.to(device).to(dtype)[None]
    (found,) = thresholds(logits, temperature, top_p, top_k, min_p).tolist()
    check(logits[0], found, temperature, top_p, top_k, min_p)


def test_min_p_alone(device) -> None:
    """Bug: where nobody asks for top-k or top-p, min-p is forgotten: unlikely tokens are said."""
    logits = torch.tensor([[0.0, -1.0, -2.0, -3.0], [5.0, 4.0, 3.0, 2.0]], device=device)
    found = thresholds(logits, 2.0, 1.0, 0, [0.5, 0.0])
    torch.testing.assert_close(found.cpu(), torch.tensor([2 * math.log(0.5), -math.inf]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_requests_side_by_side(device, dtype) -> None:
    """Bug: a row reads its neighbour's settings, sums or largest logit; or an answer depends on
    the batch or on the row's place in memory."""
    storage = torch.full((12, 300), torch.nan, device=device).to(dtype)  # a row stride past V
    logits = storage[:, :290]
    logits.copy_(torch.randn(12, 290) * 4)
    logits[7, 3] = torch.nan
    temperature, top_p = [0.0, 1.0, 0.6, 2.0], [1.0, 0.8, 1.0, 0.3]
    top_k, min_p = [0, 0, 5, 40], [0.1, 0.0, 0.3, 0.02]
    found = thresholds(logits, temperature, top_p, top_k, min_p)
    for t in range(12):
        own = temperature[t // 3], top_p[t // 3], top_k[t // 3], min_p[t // 3]
        check(logits[t], float(found[t]), *own)
        if t % 2:
            assert thresholds(logits[t : t + 1].clone(), *own) == found[t]
    assert (found[:3] == -torch.inf).all() and found[7] == -torch.inf
    assert (found[[3, 4, 5, 6, 8, 9, 10, 11]] > -torch.inf).all()


def test_order_of_equal_masses(device) -> None:
    """Bug: sums of floats, whose rounding depends on where in the row a token stands."""
    x = torch.randn(1, 300, device=device) * 3
    first = thresholds(x, 1.0, 0.9, 0)
    for seed in range(3):
        order = torch.randperm(300, generator=torch.Generator().manual_seed(seed)).to(device)
        assert thresholds(x[:, order], 1.0, 0.9, 0) == first


def test_the_process_s_default_dtype(device) -> None:
    """Bug: where a user computes in float64 by default, so is the threshold of rows without a
    filter, and whoever draws is refused."""
    logits_TV = torch.tensor([[1.0, 3.0, 2.0]], dtype=torch.float32, device=device)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        for top_k, least in ((0, -math.inf), (2, 2.0)):
            found = thresholds(logits_TV, 1.0, 1.0, top_k, 0.0)
            assert found.dtype == torch.float32 and found.item() == least
    finally:
        torch.set_default_dtype(before)


def test_refuses(device) -> None:
    """Bug: integers, a transposed matrix or settings of other rows read as if they were right, or
    sums of more tokens than have room run over."""
    logits = torch.randn(4, 6, device=device)
    too_many = torch.empty(1, MAX_VOCAB + 1, device=device)
    for bad in (logits.T, logits.int(), logits[:, :0], too_many):
        with pytest.raises(ValueError, match="logits"):
            filter_threshold(bad, torch.zeros(4), *(torch.zeros(2),) * 4)
    best = argmax_rows(logits)
    f32, i32 = (torch.ones(2, device=device).to(x) for x in (torch.float32, torch.int32))
    with pytest.raises(ValueError, match="4 rows are not of 3"):
        filter_threshold(logits, best, torch.ones(3, device=device), f32, i32, f32)
    with pytest.raises(ValueError, match="4 rows are not of 0"):
        filter_threshold(logits, best, f32[:0], f32[:0], i32[:0], f32[:0])
    for name, bad in (
        ("top_k", (f32, f32, f32)),
        ("top_p", (f32, i32, i32)),
        ("top_p", (f32, f32[:1], i32)),
    ):
        with pytest.raises(ValueError, match=f"{name} is"):
            filter_threshold(logits, best, *bad, f32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("T", "V"), [(1, 151936), (15, 151937), (16, 151936), (256, 8191)])
def test_vocabulary_size(monkeypatch: pytest.MonkeyPatch, dtype, T, V) -> None:
    """Bug: at the real size and chunk a tail is lost, or an answer comes from unwritten memory."""
    monkeypatch.undo()
    generator = torch.Generator("cuda").manual_seed(T)
    logits = (torch.randn(T, V, device="cuda", generator=generator) * 3).to(dtype)
    own = [[0.7, 0.95, 0], [1.0, 1.0, 50], [1.5, 0.6, 1000], [0.0, 1.0, 0], [1.0, 1.0, 0]]
    settings = [list(column) for column in zip(*(own[t % 5] for t in range(T)), strict=True)]
    for _ in range(2):
        poison = [torch.full((1 << k,), torch.nan, device="cuda") for k in range(8, 22)]
        del poison  # what the launcher allocates next
        found = thresholds(logits, *settings)
        for t in range(0, T, 7):
            check(logits[t], float(found[t]), *own[t % 5])
        assert torch.equal(found, thresholds(logits.flip(1).contiguous(), *settings))


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, 1), (0.50001, 3), (1e-20, 1)])
def test_a_goal_that_is_met_exactly(top_p: float, kept: int) -> None:
    """Bug: a token that holds just the share asked for is followed by another; or a share below
    what sums can hold keeps none."""
    logits = torch.tensor([[0.0, -math.log(2), -math.log(2), -50.0]])
    assert int((logits >= thresholds(logits, 1.0, top_p, 0)).sum()) == kept
