"""Experts for a few rows: choices, plan and products against references and plain arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from graphengine.kernels import moe, moe_kernels
from graphengine.kernels.interpreter import INTERPRET
from graphengine.kernels.moe import Routing, experts, experts_reference

# T, E, K, D, I: more pairs than experts, fewer, one row, one expert a row, all; odd sizes.
SHAPES = [
    (1, 7, 2, 40, 20),
    (5, 12, 3, 72, 33),
    (16, 32, 4, 64, 48),
    (17, 5, 5, 48, 16),
    (33, 3, 1, 130, 70),
    (70, 6, 2, 40, 24),
    (131, 40, 8, 33, 16),
]


def layer(shape: tuple[int, ...], device: str, dtype: torch.dtype = torch.float32) -> list:
    T, E, _, D, I = shape  # noqa: E741
    sizes = [(T, D), (T, E), (E, 2 * I, D), (E, D, I), (T, D), (T, 1)]
    scales = [1.0, 2.0, D**-0.5, I**-0.5, 1.0, 1.0]
    tensors = [torch.randn(s, device=device) * c for s, c in zip(sizes, scales, strict=True)]
    return [x.to(dtype) for x in tensors]


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_routes_like_the_reference(device, poisoned_outputs, shape, normalise) -> None:
    """Bug: the softmax runs over a padded row, a tie goes to the higher expert, an expert that is
    chosen has no slot, a pair stands in another expert's list, or weights are not rounded as the
    model rounds them."""
    T, E, K, _, _ = shape
    logits = torch.randn(T, E, device=device).bfloat16().float()
    logits[0] = logits[0].round()  # many ties, -0 among them
    logits[T // 2, : E // 2] = float("nan")
    found = moe.route(logits, K, normalise)
    expected = moe.route_reference(logits, K, normalise)
    for name in ("expert_TK", "slots_S3", "pairs_P"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    torch.testing.assert_close(found.weight_TK, expected.weight_TK, equal_nan=True)
    probabilities = logits[1:].softmax(-1) if T > 1 else logits.softmax(-1)
    good = ~probabilities.isnan().any(-1)
    top = probabilities[good].topk(K).values
    weights = found.weight_TK[1:][good] if T > 1 else found.weight_TK[good]
    top = top / top.sum(-1, keepdim=True) if normalise else top
    torch.testing.assert_close(weights, top)
    pairs = {  # every pair once, under its own expert
        int(pair): int(e)
        for e, begin, end in found.slots_S3.tolist()
        for pair in found.pairs_P[begin:end]
    }
    assert [pairs[p] for p in range(T * K)] == found.expert_TK.flatten().tolist()
    rounded = moe.route(logits.bfloat16(), K, normalise).weight_TK
    wanted = rounded.bfloat16().float()
    torch.testing.assert_close(rounded, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_shared", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_is_the_weighted_sum(device, poisoned_outputs, shape, has_shared, dtype) -> None:
    """Bug: gate and up come from each other's rows, an expert's second tile of rows is left out or
    added to the first, the last columns are, or the shared expert's gate is another row's."""
    T, _, K, D, _ = shape
    tensors = layer(shape, device, dtype)
    x, logits, gate_up, down, shared, gate = tensors
    of_shared = (shared, gate) if has_shared else (None, None)
    arguments: Any = (*tensors[:4], *of_shared, K, True)
    out = experts(*arguments)
    assert out.shape == (K + has_shared, T, D)
    chosen, weights = moe.choose_reference(logits, K, True)
    expected = torch.zeros(T, D, device=device)
    for t in range(T):
        for e, w in zip(chosen[t].tolist(), weights[t], strict=True):
            g, u = F.linear(x[t].float(), gate_up[e].float()).chunk(2)
            expected[t] += w * F.linear((F.silu(g) * u).to(dtype).float(), down[e].float())
    if has_shared:
        expected += gate.float().sigmoid() * shared.float()
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2  # the interpreter truncates to bf16
    error = (out.sum(0) - expected).norm() / expected.norm()
    assert error < tolerance, error
    others: list[Any] = [*tensors[:4], *of_shared, K, 1]
    theirs = experts_reference(*others)
    torch.testing.assert_close(out, theirs, atol=tolerance * 10, rtol=tolerance * 10)


@pytest.mark.parametrize("shape", [(16, 12, 4, 64, 48), (40, 6, 2, 40, 24), (70, 6, 2, 40, 24)])
def test_a_row_is_alone(device, poisoned_outputs, shape) -> None:
    """Bug: a row's result changes with its neighbours: the order of its contributions is that of
    experts or of arrival, or a poisoned row reaches the others."""
    T, _, K, _, _ = shape
    tensors = layer(shape, device)
    before = experts(*tensors, K, True)
    kept = torch.arange(0, T, 3)
    others = [x.clone() for x in layer(shape, device)]
    for mine, theirs in zip(tensors, others, strict=True):
        if mine.shape[0] == T and mine is not tensors[2] and mine is not tensors[3]:
            theirs[kept] = mine[kept]
    others[2:4] = tensors[2:4]
    others[0][1] = others[1][1] = float("nan")
    after = experts(*others, K, True)
    assert_same(after[:, kept], before[:, kept])
    assert after[:, 1].isnan().all(dim=-1)[:K].all()
    moved = torch.randperm(T)
    rows = [x if i in (2, 3) else x[moved] for i, x in enumerate(tensors)]
    assert_same(experts(*rows, K, True), before[:, moved])


def clamped(shape: tuple[int, ...], device: str, dtype: torch.dtype = torch.float32) -> list:
    """A layer without a shared expert, its biases, and a limit that half of the products pass."""
    E, _, D, I = shape[1:]  # noqa: E741 (moe.py's width)
    biases = [torch.randn(s, device=device).to(dtype) for s in ((E, 2 * I), (E, D))]
    return [*layer(shape, device, dtype)[:4], None, None, shape[2], True, *biases, (1.702, 0.7)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_biases_and_a_clamp(device, poisoned_outputs, shape, dtype) -> None:
    """Bug: a bias is another expert's or half's, is added behind the weight, or to the padding;
    gate is clamped from below too, or up from one side; alpha is left out, or the one beside up."""
    arguments = clamped(shape, device, dtype)
    x, logits, gate_up, down, *_, gate_up_bias, down_bias, (alpha, limit) = arguments
    out = experts(*arguments)
    chosen, weights = moe.choose_reference(logits, shape[2], True)
    expected = torch.zeros(x.shape, device=device)
    for t in range(len(x)):
        for e, w in zip(chosen[t].tolist(), weights[t], strict=True):
            y = gate_up[e].float() @ x[t].float() + gate_up_bias[e].float()
            g, u = y.chunk(2)
            g, u = torch.minimum(g, torch.tensor(limit)), u.clamp(-limit, limit)
            act = ((u + 1) * g * torch.sigmoid(alpha * g)).to(dtype).float()
            expected[t] += w * (down[e].float() @ act + down_bias[e].float())
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    assert (out.sum(0) - expected).norm() < tolerance * expected.norm()
    torch.testing.assert_close(
        out, experts_reference(*arguments), atol=tolerance * 10, rtol=tolerance * 10
    )


@pytest.mark.parametrize("shape", [(16, 12, 4, 64, 48), (70, 6, 2, 40, 24)])
def test_a_clamp_keeps_what_is_no_number(device, poisoned_outputs, shape) -> None:
    """Bug: the smaller of NaN and the limit is the limit: a poisoned row gives tokens; or it, or a
    row that is new beside it, changes another."""
    arguments = clamped(shape, device)
    before = experts(*arguments)
    arguments[0], arguments[1] = arguments[0].clone(), arguments[1].clone()
    arguments[0][1, 3] = float("nan")
    arguments[1][2] = arguments[1][2].roll(1)
    after = experts(*arguments)
    assert after[:, 1].isnan().all()
    kept = [0, *range(3, shape[0])]
    assert_same(after[:, kept], before[:, kept])


def test_a_clamp_keeps_an_up_that_is_no_number(device) -> None:
    """Bug: where gate is a number and up is none, up becomes the limit (seen on a GPU alone, whose
    minimum drops NaN)."""
    arguments = clamped((3, 4, 2, 32, 24), device)
    arguments[8][:, 24:] = torch.nan
    assert experts(*arguments).isnan().all()


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit for bit on a GPU; numpy's products, which the interpreter takes, round a row by its place
    on some CPUs."""
    tolerance = 1e-5 if INTERPRET else 0.0
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_a_block_streams_the_experts_it_chose() -> None:
    """Bug H33: a verify is launched over all experts, or with a prompt's tile."""
    assert moe_kernels.num_slots(1, 128, 8) == 8
    assert moe_kernels.num_slots(16, 256, 8) == 128
    assert moe_kernels.num_slots(64, 128, 8) == 128
    assert moe_kernels.num_slots(64, 128, 1) == 64 and moe_kernels.num_slots(65, 128, 1) == 128
    assert {moe_kernels.tile_of(T, 2).rows for T in (1, 16, 64)} == {16}
    assert moe_kernels.tile_of(65, 2).rows == 64
    routing = moe.route_reference(torch.randn(4, 64).repeat(4, 1), 8, True)  # rows choose alike
    live = (routing.slots_S3[:, 2] > routing.slots_S3[:, 1]).sum()
    assert isinstance(routing, Routing) and len(routing.slots_S3) == 64 and live <= 32


def test_slots_of_the_most_rows_of_a_block(device) -> None:
    """Bug: 64 rows are planned as a prompt's: programs of experts that nobody chose stand between
    those that have rows."""
    logits = torch.randn(1, 24, device=device).repeat(64, 1)
    for route in (moe.route, moe.route_reference):
        slots = route(logits, 2, True).slots_S3.tolist()
        assert [begin < end for _, begin, end in slots] == [True] * 2 + [False] * 22
        assert [end for _, _, end in slots[:2]] == [64, 128]


def test_refusals(device) -> None:
    """Bug: what does not belong together is read beyond its end."""
    x, logits, gate_up, down, shared, gate = layer((4, 6, 2, 40, 24), device)
    good = (x, logits, gate_up, down, shared, gate)
    for place, wrong in (
        (1, logits[:, :5].contiguous()),
        (2, gate_up[:, :, :39].contiguous()),
        (3, down[:5]),
        (3, down.bfloat16()),
        (0, torch.zeros(4, 80, device=device)[:, ::2]),
        (5, gate[:3]),
        (4, None),
        (5, None),
    ):
        bad = [wrong if i == place else one for i, one in enumerate(good)]
        with pytest.raises(ValueError, match=r"need|contiguous|neither"):
            experts(*bad, 2, True)
    biases = torch.zeros(6, 48, device=device), torch.zeros(6, 40, device=device)
    for wrong in ((None, biases[1]), (biases[0], None), (biases[1], biases[0])):
        with pytest.raises(ValueError, match="neither"):
            experts(*good[:4], None, None, 2, True, *wrong)
    with pytest.raises(ValueError, match="contiguous"):
        experts(*good[:4], None, None, 2, True, biases[0].half(), biases[1])
    with pytest.raises(ValueError, match="top 7"):
        experts(*good, 7, True)
