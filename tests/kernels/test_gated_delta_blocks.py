"""The recurrence over blocks longer than the least rows of a matrix product."""

from __future__ import annotations

import torch

from graphengine.kernels.gated_delta import Records, gated_delta_commit_
from tests.kernels.test_gated_delta import (
    close,
    empty_records,
    gated,
    make,
    oracle,
    project,
    verify,
)


def test_a_block_of_17_rows(device: str) -> None:
    """Bug: with 16 drafts the last row is left out: what the target says behind it is read from
    memory of another step, or its state lacks an accepted token."""
    heads, block = (1, 2), 17
    layer = make(heads, 2, device, torch.float32)
    projected = project(block, heads, device, torch.float32, seed=3)
    slots = torch.ones(1, dtype=torch.int32, device=device)
    records = empty_records(1, 1, block, layer)
    expected, state, window = oracle(layer, 1, projected, block)
    out = verify(layer, slots, projected, Records(*(x[0] for x in records)))
    close(out, gated(expected, projected, layer))
    pools = layer.windows_S3C[None], layer.states_SNVK[None]
    gated_delta_commit_(records, *pools, slots, slots.long(), slots + block)
    close(layer.states_SNVK[1], state)
    assert torch.equal(layer.windows_S3C[1], window)
