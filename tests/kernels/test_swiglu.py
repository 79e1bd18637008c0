"""SwiGLU against torch's own."""

import pytest
import torch
import torch.nn.functional as F

from graphengine.kernels.swiglu import swiglu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("T", "width"), [(1, 8), (3, 1000), (2, 1024), (2, 1536)])
def test_it_is_silu_of_the_gate_times_up(device, dtype, T, width) -> None:
    """Bug: gate and up are taken from each other's columns or the next row's, the last columns are
    left out, or the product is rounded twice."""
    x = torch.randn(T, 2 * width, device=device).to(dtype)
    x[0, :4] = torch.tensor([-100.0, 100.0, 0.0, -0.0])
    gate, up = x.double().chunk(2, dim=-1)
    expected = (F.silu(gate) * up).to(dtype)
    tolerance = 2e-6 if dtype == torch.float32 else 8e-3  # a rounding of bf16
    torch.testing.assert_close(swiglu(x), expected, atol=1e-6, rtol=tolerance)


def test_refusals(device) -> None:
    """Bug: half a pair, or rows with a gap, are read as if they were dense."""
    for x in (torch.zeros(2, 7, device=device), torch.zeros(2, 16, device=device)[:, :8]):
        with pytest.raises(ValueError, match="dense pairs"):
            swiglu(x)
