"""argmax_rows against numpy, whose argmax documents the same rule (first maximum, NaN first).

A row whose maximum is not finite has no answer: -1.
"""

import pytest
import torch

from graphengine.kernels.argmax import CHUNK, NOT_FINITE, argmax_rows

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def numpy_argmax(logits: torch.Tensor) -> list[int]:
    values = logits.float().cpu().numpy()
    best = values.argmax(axis=1)
    return [
        int(v) if abs(row[v]) < float("inf") else -1 for v, row in zip(best, values, strict=True)
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("V", [1, 7, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1333])
def test_matches_numpy(device, dtype, V) -> None:
    """Bug: the tail of a row, or a chunk of its own, lost or read past the end."""
    storage = torch.full((5, V + 9), torch.inf, device=device).to(dtype)  # a row stride past V
    logits = storage[:, :V]
    logits.copy_(torch.randn(5, V, device=device))
    best = argmax_rows(logits)
    assert best.dtype == torch.int64
    assert best.tolist() == numpy_argmax(logits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_go_to_the_lowest_index(device, dtype) -> None:
    """Bug: a tie decided by which program finishes last: greedy output changes between runs."""
    logits = torch.randint(0, 3, (8, 3 * CHUNK), device=device).to(dtype)
    logits[0] = 1.5
    logits[1] = -2.0
    logits[1, [CHUNK - 1, CHUNK, 2 * CHUNK]] = 7.0
    logits[2] = -torch.inf
    logits[3] = 0.0
    logits[3, :5] = -0.0
    logits[4] = -1.0
    logits[4, [9, CHUNK + 9]] = torch.tensor([-0.0, 0.0], device=device).to(dtype)
    assert argmax_rows(logits).tolist() == numpy_argmax(logits)
    assert argmax_rows(logits)[:5].tolist() == [0, CHUNK - 1, -1, 0, 9]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("V", [3, CHUNK, 2 * CHUNK + 5])
def test_what_is_not_finite_has_no_answer(device, dtype, V) -> None:
    """Bug: a NaN or an overflow hidden by a comparison that is always false, so a broken model
    looks healthy; or a healthy row next to it is given up as well."""
    logits = torch.randn(9, V, device=device).to(dtype)
    healthy = numpy_argmax(logits)
    logits[0, V - 1] = torch.nan
    logits[1, 2] = torch.inf
    logits[2, [0, V - 1]] = torch.tensor([torch.inf, -torch.nan], device=device).to(dtype)
    logits[3] = torch.nan
    logits[4] = -torch.inf
    logits[5, 0] = -torch.nan  # the sign of a NaN must not matter
    logits[6] = -torch.inf
    logits[6, 1] = torch.finfo(dtype).min  # masked but for one: that one it is
    logits[7, 1] = torch.finfo(dtype).max
    expected = [NOT_FINITE] * 6 + [1, 1, healthy[8]]
    assert NOT_FINITE == -1
    assert argmax_rows(logits).tolist() == expected == numpy_argmax(logits)


def test_refuses(device) -> None:
    """Bug: integers or a transposed matrix read as rows of floats."""
    logits = torch.randn(4, 6, device=device)
    for bad in (logits.T, logits.int(), logits[0], logits[:, :0]):
        with pytest.raises(ValueError, match="logits"):
            argmax_rows(bad)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 15, 16, 256])
def test_vocabulary_size(T) -> None:
    """Bug: an index or an offset that overflows only at the real size."""
    logits = torch.randn(T, 151936, device="cuda").bfloat16()
    assert argmax_rows(logits).tolist() == numpy_argmax(logits)
