"""argmax_rows against numpy, whose argmax documents the same rule (first maximum, NaN first)."""

import pytest
import torch

from graphengine.kernels.argmax import CHUNK, argmax_rows

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def numpy_argmax(logits: torch.Tensor) -> list[int]:
    return logits.float().cpu().numpy().argmax(axis=1).tolist()


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
    assert argmax_rows(logits)[:5].tolist() == [0, CHUNK - 1, 0, 0, 9]


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_wins(device, dtype) -> None:
    """Bug: a NaN hidden by a comparison that is always false, so a broken model looks healthy."""
    logits = torch.randn(3, 2 * CHUNK, device=device).to(dtype)
    logits[0, [CHUNK + 5, 300]] = torch.nan
    logits[1, 2] = torch.inf
    logits[1, CHUNK + 1] = -torch.nan  # the sign of a NaN must not matter
    logits[2] = torch.nan
    assert argmax_rows(logits).tolist() == [300, CHUNK + 1, 0]


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
