"""merge_splits against softmax over all keys at once."""

import pytest
import torch

from graphengine.kernels.merge_splits import Workspace, merge_splits, workspace

NAN, INF = torch.nan, torch.inf


def split_softmax(device, T, N, H, sizes) -> tuple[Workspace, torch.Tensor]:
    """Partial results over so many keys each, 0: a split without any; and the whole."""
    scores = torch.randn(T, N, sum(sizes), device=device, dtype=torch.float64) * 5
    values = torch.randn(sum(sizes), H, device=device, dtype=torch.float64)
    made = workspace(T, N, H, len(sizes), device)
    made.out_ZTNH.fill_(NAN)
    parts = zip(scores.split(sizes, -1), values.split(sizes), strict=True)
    for z, (s, v) in enumerate(parts):
        made.lse_ZTN[z] = s.logsumexp(-1) * 1.4426950408889634
        if len(v):
            made.out_ZTNH[z] = s.softmax(-1) @ v
    return made, scores.softmax(-1) @ values


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", [[9], [40, 3], [0, 7, 0, 0, 70], [1] * 16])
@pytest.mark.parametrize(("T", "N", "H"), [(3, 5, 128), (33, 2, 256)])
def test_is_the_softmax_over_all(device, T, N, H, sizes, dtype) -> None:
    """Bug: a split that saw nothing is read, the last rows are lost, or weights do not add to 1."""
    partials, expected = split_softmax(device, T, N, H, sizes)
    out = torch.full((T, N, H), NAN, dtype=dtype, device=device)
    merge_splits(partials, out)
    exact = dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=1e-5 if exact else 1e-2, atol=1e-2)


def test_nothing_is_zeros_and_what_is_no_number_stays(device) -> None:
    """Bug: a padded row is NaN, or a NaN that a row has seen is hidden from its guards."""
    partials, _ = split_softmax(device, 4, 1, 128, [5, 6])
    partials.lse_ZTN[:, 0] = -INF
    partials.lse_ZTN[1, 1] = NAN
    partials.out_ZTNH[0, 2] = NAN
    out = torch.full((4, 1, 128), 7.0, device=device)
    merge_splits(partials, out)
    assert (out[0] == 0).all()
    assert out[1:3].isnan().all()
    assert out[3].isfinite().all()
