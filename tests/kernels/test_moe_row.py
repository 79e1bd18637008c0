"""One row's experts against the reference, and against the same row in a block."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphengine.kernels import moe_row
from graphengine.kernels.interpreter import INTERPRET
from graphengine.kernels.moe_row import (
    DOWN_TILE,
    Biases,
    RowTile,
    Shared,
    experts_row,
    experts_row_reference,
    router_logits,
    runs_row,
)

# E, K, D, I: sizes that no tile divides, all experts, one of many, the published number.
SHAPES = [(7, 2, 40, 20), (5, 5, 72, 33), (33, 1, 130, 70), (256, 8, 64, 32)]
# Each way of weighting and each dtype, in half as many runs as all pairs.
WEIGHTING = pytest.mark.parametrize(
    ("normalise", "dtype"), [(True, torch.bfloat16), (False, torch.float16)]
)


def normed_to(x_1D: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """A residual, an update, a norm's weight and eps of which the norm is x."""
    return torch.ones_like(x_1D), torch.zeros_like(x_1D), x_1D[0].contiguous(), 0.0


def layer(shape, device, dtype) -> tuple[list[torch.Tensor], Shared]:
    E, _, D, I = shape  # noqa: E741
    sizes = [(1, D), (E, D), (E, 2 * I, D), (E, D, I), (2 * I, D), (D, I), (1, D)]
    tensors = [torch.randn(s, device=device) * s[-1] ** -0.5 for s in sizes]
    tensors[0] *= D**0.5
    tensors = [x.to(dtype) for x in tensors]
    return tensors[:4], Shared(*tensors[4:])


@pytest.fixture(params=["tiles", "small tiles"])
def tiles(request, monkeypatch) -> None:
    if request.param == "small tiles":  # several programs a matrix at these sizes
        for name in ("ROUTER_TILE", "GATE_UP_TILE", "DOWN_TILE"):
            monkeypatch.setattr(moe_row, name, RowTile(256, 1))


@WEIGHTING
@pytest.mark.parametrize("has_shared", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_reference(
    device, poisoned_outputs, tiles, shape, has_shared, normalise, dtype
) -> None:
    """Bug: a slot takes another rank's expert or weight, the last rows of a tile are left out, the
    shared expert's gate is the router's last row, or a part of the update is not in the norm."""
    (h, *matrices), shared = layer(shape, device, dtype)
    parts = SHAPES.index(shape)  # 0: the update is whole, in h's dtype
    update = torch.randn(parts, *h.shape, device=device) if parts else torch.randn_like(h)
    norm = torch.rand(shape[2], device=device) + 0.5
    row = (h, update, norm if parts == 3 else norm.to(dtype), 1e-6)
    of_shared = shared if has_shared else None
    arguments: tuple[Any, ...] = (*row, *matrices, of_shared, shape[1], normalise)
    (h_out, out), (h_wanted, wanted) = experts_row(*arguments), experts_row_reference(*arguments)
    assert out.shape == wanted.shape == (shape[1] + has_shared, 1, shape[2])
    torch.testing.assert_close(h_out, h_wanted)
    torch.testing.assert_close(out, wanted, atol=0.02, rtol=0.02)


def biases_of(shape, device, dtype) -> Biases:
    E, _, D, I = shape  # noqa: E741
    return Biases(*(torch.randn(s, device=device).to(dtype) for s in ((E,), (E, 2 * I), (E, D))))


@WEIGHTING
@pytest.mark.parametrize("shape", SHAPES[:2])
def test_biases_and_a_clamp(device, poisoned_outputs, tiles, shape, normalise, dtype) -> None:
    """Bug: one row alone has no biases, those of another expert or half, or no clamp."""
    (h, *matrices), _ = layer(shape, device, dtype)
    how = None, shape[1], normalise, biases_of(shape, device, dtype), (1.702, 0.7)
    arguments: tuple[Any, ...] = (*normed_to(h), *matrices, *how)
    out, wanted = experts_row(*arguments)[1], experts_row_reference(*arguments)[1]
    torch.testing.assert_close(out, wanted, atol=0.02, rtol=0.02)
    plain = experts_row(*arguments[:-2])[1]
    assert (plain - out).abs().max() > 0.1
    poisoned = torch.full_like(h, float("nan"))
    assert experts_row(*normed_to(poisoned), *arguments[4:])[1].isnan().all()


def test_experts_wider_than_a_tile(device, poisoned_outputs) -> None:
    """Bug: where a row of down is more than a program holds at once, it is given none."""
    shape = (3, 2, 24, DOWN_TILE.elements + 1)
    (h, *matrices), shared = layer(shape, device, torch.bfloat16)
    arguments: tuple[Any, ...] = (*normed_to(h), *matrices, shared, shape[1], True)
    out, expected = experts_row(*arguments)[1], experts_row_reference(*arguments)[1]
    torch.testing.assert_close(out, expected, atol=0.02, rtol=0.02)


def test_a_negative_zero_ties_with_zero(device, poisoned_outputs) -> None:
    """Bug: a logit that was rounded to -0 is less than 0, so the higher expert is chosen."""
    x, router, gate_up, down = layer((4, 1, 48, 16), device, torch.float16)[0]
    router.fill_(-1)
    router[:2] = 0
    router[0, 0], router[1, 0] = -(2.0**-24), 2.0**-24  # times 1/4, float16 has no such numbers
    x[:, 0] = 0.25
    x[:, 1:] = x[:, 1:].abs()
    arguments = (*normed_to(x), router, gate_up, down, None, 1, False)
    out, expected = experts_row(*arguments)[1], experts_row_reference(*arguments)[1]
    torch.testing.assert_close(out, expected, atol=0.02, rtol=0.02)
    lower = experts_row(*normed_to(x), router[:1], gate_up[:1], down[:1], None, 1, True)[1]
    assert torch.nn.functional.cosine_similarity(out[0], lower[0]) > 0.99


def test_ties_and_nan_choose_as_in_a_block(device, poisoned_outputs) -> None:
    """Bug: a tie goes to the higher expert, a negative tie turns round, or NaN names an expert that
    does not exist."""
    E, K, D, I = 32, 6, 48, 16  # noqa: E741
    x = torch.zeros(1, D, device=device, dtype=torch.bfloat16)
    x[0, 0] = 1
    for seed in range(8):
        torch.manual_seed(seed)
        _, router, gate_up, down = layer((E, K, D, I), device, torch.bfloat16)[0]
        logits = torch.randint(-3, 2, (E,), device=device) * (1.0 if seed % 2 else -0.25)
        router.zero_()
        router[:, 0] = logits.bfloat16()
        if seed == 7:
            router[:28] = float("nan")
        arguments = (*normed_to(x), router, gate_up, down, None, K, False)
        out, expected = experts_row(*arguments)[1], experts_row_reference(*arguments)[1]
        torch.testing.assert_close(out, expected, atol=0.02, rtol=0.02, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("T", [1, 5, 16])
def test_logits_of_a_row_hang_on_that_row(device, poisoned_outputs, T, dtype) -> None:
    """Bug: the gate is taken of another row, or a row routes otherwise alone than in a block."""
    (_, router, *_), shared = layer((33, 1, 130, 70), device, dtype)
    x = torch.randn(T, 130, device=device).to(dtype)
    logits, gate = router_logits(x, router, shared.gate_1D)
    assert gate is not None
    torch.testing.assert_close(logits, x @ router.T, atol=0.02, rtol=0.02)
    torch.testing.assert_close(gate, x @ shared.gate_1D.T, atol=0.02, rtol=0.02)
    if device == "cuda" or INTERPRET:
        for t in range(T):
            alone = router_logits(x[t : t + 1].contiguous(), router, None)
            assert torch.equal(alone[0][0], logits[t]) and alone[1] is None
    bias = torch.randn(33, device=device).to(dtype)
    moved, _ = router_logits(x, router, None, bias)
    torch.testing.assert_close(moved, x @ router.T + bias, atol=0.03, rtol=0.03)


def test_which_rows_it_takes(device, monkeypatch) -> None:
    """Bug: a shared expert of another width than the others' ends plain decoding with an error."""
    monkeypatch.setattr(moe_row, "INTERPRET", True)
    (x, *_), shared = layer((6, 2, 40, 24), device, torch.bfloat16)
    assert runs_row(x, shared, 24) and runs_row(x, None, 20)
    assert not runs_row(x, shared, 20)
    assert not runs_row(x.repeat(2, 1), shared, 24) and not runs_row(x.float(), None, 24)


def test_refusals(device) -> None:
    """Bug: what does not belong together is read beyond its end."""
    (x, *matrices), shared = layer((6, 2, 40, 24), device, torch.bfloat16)
    h, update, norm, eps = normed_to(x)
    good = [h, update, norm, *matrices, shared]
    for place, wrong in (
        (0, h.repeat(2, 1)),
        (1, update.float()),
        (1, update[None]),
        (1, update[:, :39].contiguous()),
        (2, norm.half()),
        (2, norm[:39].contiguous()),
        (3, matrices[0][:5].contiguous()),
        (4, matrices[1].float()),
        (5, matrices[2].transpose(1, 2)),
        (5, matrices[2].repeat(1, 1, 2)[..., ::2]),
        (6, Shared(shared.gate_up_JD[:40], shared.down_DI[:, :20], shared.gate_1D)),
    ):
        bad: list[Any] = list(good)
        bad[place] = wrong
        h, update, norm, router, gate_up, down, own = bad
        with pytest.raises(ValueError, match=r"need|contiguous"):
            experts_row(h, update, norm, eps, router, gate_up, down, own, 2, True)
    for args in ((x, matrices[0][:, :39], None), (x, matrices[0], shared.gate_1D[:, :39])):
        with pytest.raises(ValueError, match="need"):
            router_logits(*args)
    biases = biases_of((6, 2, 40, 24), device, torch.bfloat16)
    with pytest.raises(ValueError, match="need one for each of 6 rows"):
        router_logits(x, matrices[0], None, matrices[0][0, :5])
    row: tuple[Any, ...] = (*normed_to(x), *matrices, None, 2, True)
    for wrong in (biases._replace(down_ED=None), biases._replace(router_E=torch.zeros(5))):
        with pytest.raises(ValueError, match="the biases need"):
            experts_row(*row, biases=wrong)
    with pytest.raises(ValueError, match="contiguous"):
        experts_row(*row, biases=biases._replace(router_E=torch.zeros(6)))
