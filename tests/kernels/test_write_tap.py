"""Taps against plain assignment."""

import pytest
import torch

from graphengine.kernels.interpreter import INTERPRET
from graphengine.kernels.write_tap import write_tap_


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("T", "D", "taps"), [(7, 2560, 5), (1, 8, 1), (16, 1000, 3)])
def test_writes_its_columns_and_no_others(device, dtype, T, D, taps) -> None:
    """Bug: the last columns are left out, or a tap spills into its neighbour's or the next row's,
    which costs acceptance and nothing else, so nobody sees it."""
    for tap in range(taps):
        out = torch.full((T + 2, taps * D + 8), torch.nan, device=device, dtype=dtype)
        h = torch.randn(T, D, device=device).to(dtype)
        write_tap_(h, out[1:-1, : taps * D], tap * D)
        assert torch.equal(out[1:-1, tap * D : (tap + 1) * D], h)
        out[1:-1, tap * D : (tap + 1) * D] = torch.nan
        assert bool(out.isnan().all())


def test_refusals(device) -> None:
    """Bug: columns beyond the last row's end, or in front of the first one's, are written into
    another allocation."""
    h, wide = torch.zeros(4, 8, device=device), torch.zeros(4, 16, device=device)
    for taps, column in ((wide, 9), (wide, -1), (h.bfloat16(), 0), (h[:3], 0)):
        with pytest.raises(ValueError, match="are needed"):
            write_tap_(h, taps, column)
    if device != "cpu" or INTERPRET:
        with pytest.raises(ValueError, match="dense"):
            write_tap_(h, torch.zeros(16, 4, device=device).t(), 0)
