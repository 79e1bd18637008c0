"""Sinks of block_attention: a logit of each head that joins every row's softmax."""

from __future__ import annotations

import pytest
import torch

from graphengine.kernels.block_attention import block_attention, workspace
from tests.kernels.test_block_attention import TOLERANCE, check_counts, make, small


@pytest.mark.parametrize(("window", "padded"), [(None, 0), (9, 0), (9, -1)])
@pytest.mark.parametrize("G", [1, 6])
def test_sinks_are_seen_once(device, G, window, padded) -> None:
    """Bug: each split of a request adds the sink, none does where the first has no keys in the
    window, a head takes another's, or a padded request's zeros become NaN."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    N, K, H, S, num_splits = 6, 2, 16, 8, 3
    starts = [1, 0, 20, 200] if padded == 0 else [0, -1, 20, 200]
    made = make(device, dtype, starts, G, N, K, H, S, 230 // S + 1, padded)
    sinks = torch.linspace(-2, 5, N, device=device)
    buffers, found = workspace(4, G, N, H, num_splits, device), torch.full_like(made[0], torch.nan)
    rest = {"window": window, "padded": padded, "sinks_N": sinks}
    block_attention(*made, G, True, found, buffers, small(device), **rest)
    # as if one more key of a value of zeros had been seen: what is left of all weights
    q, cache, table, _ = (x.double() if x.is_floating_point() else x for x in made)
    expected = torch.zeros_like(q)
    for b, first in enumerate(starts):
        if first == padded:
            continue
        k, v = cache[:, table[b].long()].reshape(2, -1, K, H)
        for i in range(G):
            seen = slice(max(0, first + i + 1 - (window or 999)), first + i + 1)
            for n in range(N):
                weight = (k[seen, n // 3] @ q[b * G + i, n] * H**-0.5).exp()
                total = weight.sum() + sinks[n].double().exp()
                expected[b * G + i, n] = weight @ v[seen, n // 3] / total
    torch.testing.assert_close(found.double(), expected, **TOLERANCE[dtype])
    check_counts(buffers)


def test_what_sinks_cannot_be(device) -> None:
    """Bug: a vector of kv heads passes for one of query heads, and heads read past its end."""
    q, cache, table, start = make(device, torch.float32, [1], 2, 4, 2, 16, 8, 2)
    buffers = workspace(1, 2, 4, 16, 1, device)
    args = (q, cache, table, start, 2, True, torch.empty_like(q), buffers)
    for sinks, gate in ((torch.zeros(2), None), (torch.zeros(4), q.flatten(1))):
        with pytest.raises(ValueError, match="sinks"):
            block_attention(*args, gate_TE=gate, sinks_N=sinks.to(device))
