"""Experts in MXFP4: equal to those in bf16, whoever else is there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphengine.kernels import moe_mxfp4_stream
from graphengine.kernels.interpreter import INTERPRET
from graphengine.kernels.moe import experts
from graphengine.kernels.moe_mxfp4 import experts_mxfp4
from graphengine.kernels.mxfp4 import Mxfp4, out_of_turn, pack_mxfp4

CLAMP: Any = (1.702, 1.5)


def make(T: int, D: int, I: int, E: int, device: str) -> Any:  # noqa: E741 (moe.py's width)
    """x, logits, both matrices and both biases."""

    def matrix(rows: int, columns: int) -> Mxfp4:
        blocks = torch.randint(256, (E, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 124, (E, rows, columns // 32), dtype=torch.uint8)
        return Mxfp4(*(x.to(device) for x in pack_mxfp4(blocks, scales)))

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size).to(device, torch.bfloat16)

    x, logits, biases = normal(T, D), normal(T, E), (normal(E, 2 * I), normal(E, D))
    return x, logits, matrix(2 * I, D), matrix(D, I), *biases


@pytest.mark.parametrize(
    ("T", "D", "I", "E"),
    [
        *((1, 64, 64, 4), (5, 128, 192, 8), (40, 320, 128, 4), (60, 64, 64, 3)),
        *((70, 192, 64, 9), (520, 64, 128, 5)),
    ],
)
def test_equals_bf16(device, T: int, D: int, I: int, E: int) -> None:  # noqa: E741 (moe.py's width)
    """Bug: gate and up rows are exchanged, a bias is another row's, rows past an expert's are
    written, or the last columns of a width that no tile divides are lost."""
    x, logits, gate_up, down, *biases = make(T, D, I, E, device)
    dense = out_of_turn(gate_up.dense(x.dtype)), down.dense(x.dtype)
    for of_experts in ((*biases, CLAMP), (None, None, None)):
        found = experts_mxfp4(x, logits, gate_up, down, 3, True, *of_experts)
        expected = experts(x, logits, *dense, None, None, 3, True, *of_experts)
        assert found.shape == (3, T, D) and found.isfinite().all()
        assert (found - expected).norm() <= 4e-3 * expected.norm()


def test_a_row_does_not_see_the_others(device) -> None:
    """Bug: a row's bits change with who shares its experts."""
    x, logits, gate_up, down, *biases = make(6, 128, 64, 8, device)
    rest: tuple[Any, ...] = gate_up, down, 2, True, *biases, CLAMP
    whole = experts_mxfp4(x, logits, *rest)
    for rows in (slice(2, 3), slice(1, 5)):
        assert torch.equal(experts_mxfp4(x[rows], logits[rows], *rest), whole[:, rows])


@pytest.mark.skipif(not INTERPRET, reason="the reference has no streams")
def test_a_stream_is_asked_for_both_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: experts wider than shared memory are streamed where their rows are not: no launch."""
    asked: list[tuple[torch.Size, int]] = []
    monkeypatch.setattr(moe_mxfp4_stream, "takes", lambda x, inter: asked.append((x.shape, inter)))
    x, logits, gate_up, down, *_ = make(2, 128, 64, 4, "cpu")
    experts_mxfp4(x, logits, gate_up, down, 2, True)
    assert asked == [((2, 128), 64)]


def test_what_does_not_belong_together() -> None:
    """Bug: columns in no multiple of 64, floats in place of codes or a bias of other experts run,
    and read past their end."""
    x, logits, gate_up, down, *biases = make(2, 128, 64, 4, "cpu")
    other = Mxfp4(*(part[:, :, :1] for part in gate_up))
    half = Mxfp4(*(part[:, :1].contiguous() for part in gate_up))  # 32 outputs, of a block of down
    no_biases: dict[str, Any] = {"gate_up_bias_EJ": None, "down_bias_ED": None}
    for change in (
        {"gate_up": other},
        {"gate_up": half, "down": Mxfp4(*(part[:, :, :0] for part in down)), **no_biases},
        {"down": down._replace(codes=down.codes.float())},
        {"down_bias_ED": biases[1][:3]},
        {"x_TD": x.float()},
    ):
        told = {"x_TD": x, "logits_TE": logits, "gate_up": gate_up, "down": down, "top_k": 2}
        told |= {"gate_up_bias_EJ": biases[0], "down_bias_ED": biases[1], "normalise": True}
        with pytest.raises(ValueError, match=r"need|biases|contiguous"):
            experts_mxfp4(**told | change)
