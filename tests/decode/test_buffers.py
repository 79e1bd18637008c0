"""buffers: what outlives a replay keeps its address, its beginning and its zeros."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphengine.config.draft import DraftConfig
from graphengine.decode.buffers import Arena, StepBuffers
from graphengine.decode.proposer import Proposer, step_buffers
from graphengine.drafters.dflash import DFlash
from graphengine.kernels.accept import NUM_RESULTS
from tests.decode.test_kvcache import DRAFT, MODEL


def test_later_takers_see_the_beginning() -> None:
    """Bug: a smaller bucket gets memory of its own, so a graph and the host write to two places; or
    a larger one, or one of another type, gets what lies behind."""
    arena = Arena(torch.device("cpu"), torch.bfloat16)
    whole = arena.take("ids", 3, 4)
    assert not whole.any()
    whole += torch.arange(12).view(3, 4)
    assert arena.take("ids", 2, 2).tolist() == [[0, 1], [2, 3]]
    for shape, dtype in (((13,), torch.int64), ((2,), torch.int32)):
        with pytest.raises(AssertionError, match="ids"):
            arena.take("ids", *shape, dtype=dtype)
    arena.take_on_host("results", 5)
    assert arena.num_bytes == (12 + 5) * 8


def drafter(config: DraftConfig | None) -> Any:
    """A proposer as far as buffers need it."""
    nothing: Any = None
    names = ("weights", "embed_VD", "lm_head_VD", "kv_pool")
    weights: dict[str, Any] = dict.fromkeys(names, nothing)
    return Proposer() if config is None else DFlash(config=config, **weights)


def flat(buffers: StepBuffers) -> dict[str, torch.Tensor]:
    fields = buffers._asdict()
    for name in ("own", "controls", "recurrent", "tables", "scores", "grammar"):
        parts: Any = fields.pop(name)
        fields |= {f"{name}.{k}": v for k, v in parts._asdict().items()} if parts else {}
    fields.pop("grammar.launched", None)
    return fields


EVERYTHING: Any = SimpleNamespace(adjustments=True, max_logprobs=3, structured_outputs=True)
ANCHOR_FIRST = replace(DRAFT, slot_convention="anchor-first")


@pytest.mark.parametrize("num_drafts", [None, 2])
@pytest.mark.parametrize("draft", [DRAFT, ANCHOR_FIRST, None])
@pytest.mark.parametrize("size", [1, 3, 6])
def test_bucket_views(draft: DraftConfig | None, size: int, num_drafts: int | None) -> None:
    """Bug: a bucket's view is a copy or moves when another is made, cuts rows where requests are
    meant, keeps the stride of the longest block, takes a draft's rows to be as many as a verify's
    where the anchor predicts too, or parts block and draft block where they are one tensor."""
    arena = Arena(torch.device("cpu"), torch.float32)
    whole = flat(step_buffers(arena, MODEL, drafter(draft), 6, 9, EVERYTHING))
    num_bytes = arena.num_bytes
    own = drafter(draft.shortened(num_drafts) if draft and num_drafts else draft)
    buffers = step_buffers(arena, MODEL, own, size, 9, EVERYTHING)
    assert buffers.block == own.num_draft_tokens + 1 and arena.num_bytes == num_bytes
    draft_block = own.config.block_size if draft else 1
    for name, view in flat(buffers).items():
        dims = name.split("_")[-1]
        is_drafts = name.startswith("own.") and name != "own.taps_TC"
        block = draft_block if is_drafts else buffers.block
        shape = (size, block) if dims == "BG" else (size * block if dims[0] == "T" else size,)
        if name.startswith("scores."):
            shape = (NUM_RESULTS, size, block)
        assert view.shape[: len(shape)] == shape, name
        assert view.is_contiguous() and view.data_ptr() == whole[name].data_ptr(), name
    assert step_buffers(arena, MODEL, own, size, 9).tables is None  # what nobody asks for
    assert (buffers.draft_ids_BG is buffers.block_ids_BG) == (draft is None)
    if draft is not None:
        taps, block_ids = buffers.own.taps_TC, buffers.own.block_ids_BG  # type: ignore[attr-defined]
        assert taps.shape[1] == 2 * MODEL.hidden_size
        is_shared = block_ids.data_ptr() == buffers.block_ids_BG.data_ptr()
        assert is_shared == (draft is DRAFT)
    for tensor in whole.values():
        tensor.fill_(1)
    arena.clear_("results")
    assert not buffers.results_BX.any() and buffers.start_B.all()
    arena.clear_()
    assert not any(tensor.any() for tensor in whole.values())
