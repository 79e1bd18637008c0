"""mask_logits_ and publish_drafts_ against plain torch, and against Python's own bits."""

from __future__ import annotations

import math
import random

import pytest
import torch

from graphengine.kernels import mask_logits as module
from graphengine.kernels.mask_logits import mask_logits_
from graphengine.kernels.publish_drafts import publish_drafts_, publish_drafts_reference_


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("B", "G", "V"), [(1, 1, 31), (2, 3, 32), (3, 4, 197), (1, 16, 2049)])
def test_a_bit_is_a_token(device, monkeypatch, B, G, V, dtype) -> None:
    """Bug: bits are counted from the other end, a row reads another row's words, the last word's
    bits run over, or a request without a grammar is masked too."""
    monkeypatch.setattr(module, "CHUNK", 64)  # several programs a row
    words = (V + 31) // 32
    rng = random.Random(B * V)
    free = [[rng.random() < 0.3 for _ in range(V)] for _ in range(B * G)]
    bits = [[sum(row[w * 32 + i] << i for i in range(min(32, V - w * 32))) for w in range(words)]
            for row in free]  # fmt: skip
    mask = torch.tensor(bits, dtype=torch.int64).to(torch.int32).to(device)
    is_on = torch.tensor([b % 2 == 0 for b in range(B)], dtype=torch.int32, device=device)
    wide = torch.randn(B * G, V + 5, device=device).to(dtype)  # rows with a stride
    logits = wide[:, :V]
    expected = logits.clone()
    for t, row in enumerate(free):
        if t // G % 2 == 0:
            expected[t, [v for v in range(V) if not row[v]]] = -math.inf
    behind = wide[:, V:].clone()
    mask_logits_(logits, mask, is_on)
    assert torch.equal(logits, expected) and torch.equal(wide[:, V:], behind)


@pytest.mark.parametrize(("B", "G"), [(1, 2), (3, 5), (2, 16)])
def test_forced_tokens_are_drafts(device, B, G) -> None:
    """Bug: the anchor is replaced, a row without a grammar takes what an older request was forced
    to, or the host reads other drafts than are verified."""
    torch.manual_seed(B)
    drafts = torch.randint(0, 50, (B, G), device=device)
    forced = torch.where(torch.rand(B, G, device=device) < 0.5, 7, -1)
    forced[:, 0] = 3
    is_on = torch.tensor([b % 2 for b in range(B)], dtype=torch.int32, device=device)
    step = torch.full((B,), 2**31 - 1, device=device)
    words, expected = torch.zeros_like(drafts), drafts.clone()
    again = torch.zeros_like(drafts)
    publish_drafts_reference_(expected, forced, is_on, step, again)
    before = drafts.clone()
    publish_drafts_(drafts, forced, is_on, step, words)
    assert torch.equal(drafts, expected) and torch.equal(words, again)
    assert torch.equal(drafts[:, 0], before[:, 0]) and torch.equal(drafts[::2], before[::2])
    assert torch.equal(words & 0xFFFFFFFF, drafts) and bool((words >> 32 == 2**31 - 1).all())


def test_drafts_of_wider_tensors(device) -> None:
    """Bug: one tensor's rows are found by another's stride: a request is forced to another's
    tokens, or the host looks for its drafts where another's are."""
    drafts, forced = torch.arange(12).view(3, 4), torch.tensor([[-1, -1, 70, -1]] * 3)
    forced[1, 3] = 80
    found = []
    for is_wide in (False, True):
        state = []
        for more, x in enumerate((drafts, forced, torch.zeros_like(drafts)), 1):
            wide = torch.cat([x, torch.full((3, more), 9)], 1) if is_wide else x.clone()
            state.append(wide.to(device)[:, :4])
        is_on = torch.tensor([1, 1, 0], dtype=torch.int32, device=device)
        ids, own, words = state
        publish_drafts_(ids, own, is_on, torch.full((3,), 5, device=device), words)
        found.append([x.tolist() for x in state])
    assert found[0] == found[1]
    assert found[0][0] == [[0, 1, 70, 3], [4, 5, 70, 80], [8, 9, 10, 11]]


def test_a_draft_that_is_none(device) -> None:
    """Bug: a drafter whose logits are not finite drafts -1: the word's step is another, and the
    host waits for this one's for good."""
    drafts, forced = torch.tensor([[5, -1, -1]]), torch.tensor([[-1, -1, 7]])
    words, step = torch.zeros_like(drafts), torch.tensor([3])
    sent = [x.to(device) for x in (drafts, forced, torch.ones(1, dtype=torch.int32), step, words)]
    publish_drafts_(*sent)
    assert sent[0].tolist() == [[5, -1, 7]]
    assert (sent[-1] >> 32).tolist() == [[3, 3, 3]]
    assert sent[-1].to(torch.int32).tolist() == [[5, -1, 7]]


def test_refusals(device) -> None:
    """Bug: a mask, or what is said of requests, of another shape is read beyond its end."""
    logits = torch.zeros(4, 70, device=device)
    mask, is_on = torch.zeros(4, 3, dtype=torch.int32, device=device), torch.ones(2, device=device)
    with pytest.raises(ValueError, match="need int32"):
        mask_logits_(logits, mask[:, :2], is_on.int())
    with pytest.raises(ValueError, match="need int32"):
        mask_logits_(logits, mask.repeat(1, 2)[:, ::2], is_on.int())
    for bad in (is_on, torch.ones(3, dtype=torch.int32, device=device), is_on[:0].int()):
        with pytest.raises(ValueError, match="is_on"):
            mask_logits_(logits, mask, bad)
    with pytest.raises(ValueError, match="strides"):
        mask_logits_(logits.T, torch.zeros(70, 1, dtype=torch.int32, device=device), is_on.int())
    ids = torch.zeros(2, 4, dtype=torch.int64, device=device)
    step = ids[:, 0].contiguous()
    with pytest.raises(ValueError, match="words"):
        publish_drafts_(ids, ids, is_on.int(), step, ids[:, :3])
    with pytest.raises(ValueError, match="step"):
        publish_drafts_(ids, ids, is_on.int(), ids[:, 0], ids)
    with pytest.raises(ValueError, match="is_on"):
        publish_drafts_(ids, ids, is_on[:1].int(), step, ids)
