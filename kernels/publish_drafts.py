"""A block's drafts to the host, while the device goes on to verify them.

Why: what a grammar leaves to a row depends on the drafts in front of it, and the host works that
out while the layers run. Before that, tokens that a grammar leaves no choice about take the place
of what the drafter proposed. The words bear the step's number, as those of kernels/accept.py: the
host looks at them, and there is neither a copy nor an event.

Legend: B requests, G rows of a block.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphengine.kernels.interpreter import INTERPRET
from graphengine.kernels.launch import on_grid


def publish_drafts_reference_(
    draft_ids_BG: Tensor, forced_BG: Tensor, is_on_B: Tensor, step_B: Tensor, words_BG: Tensor
) -> None:
    """`publish_drafts_` in plain torch."""
    is_forced_BG = (forced_BG >= 0) & (is_on_B != 0)[:, None]
    is_forced_BG[:, 0] = False
    draft_ids_BG.copy_(torch.where(is_forced_BG, forced_BG, draft_ids_BG))
    words_BG.copy_((step_B[:, None] << 32) | (draft_ids_BG & 0xFFFFFFFF))


def publish_drafts_(
    draft_ids_BG: Tensor, forced_BG: Tensor, is_on_B: Tensor, step_B: Tensor, words_BG: Tensor
) -> None:
    """`draft[b, i] = forced[b, i]` where that is a token, `words = step << 32 | draft`.

    Args:
        draft_ids_BG: int64, the anchor and its drafts; last stride 1.
        forced_BG: int64, -1 where nothing is forced; its first column is not looked at.
        is_on_B: int32; 0: nothing is forced there.
        step_B: int64, the step's number.
        words_BG: int64, usually pinned memory of the host.
    Mutates: draft_ids_BG but for the anchor, words_BG.
    Raises: ValueError for a wrong shape or dtype, with the tensor's name.
    """
    B, G = draft_ids_BG.shape
    for name, x, shape in (
        ("draft_ids", draft_ids_BG, (B, G)),
        ("forced", forced_BG, (B, G)),
        ("words", words_BG, (B, G)),
        ("step", step_B, (B,)),
    ):
        if x.shape != shape or x.dtype != torch.int64 or x.stride(-1) != 1:
            raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}; need int64 {shape}, dense")
    if is_on_B.shape != (B,) or is_on_B.dtype != torch.int32:
        raise ValueError(f"is_on is {is_on_B.dtype} {tuple(is_on_B.shape)}; need int32 {(B,)}")
    tensors = draft_ids_BG, forced_BG, is_on_B, step_B, words_BG
    if not (draft_ids_BG.is_cuda or INTERPRET):
        publish_drafts_reference_(*tensors)
        return
    on_grid(_publish_drafts_kernel, (B,))(
        *tensors,
        draft_ids_BG.stride(0),
        forced_BG.stride(0),
        words_BG.stride(0),
        G=G,
        G_POW2=1 << (G - 1).bit_length(),
        num_warps=1,
    )


@triton.jit
def _publish_drafts_kernel(
    draft_ids,
    forced,
    is_on,
    steps,
    words,
    draft_stride,
    forced_stride,
    words_stride,
    G: tl.constexpr,
    G_POW2: tl.constexpr,
):
    b, i = tl.program_id(0).to(tl.int64), tl.arange(0, G_POW2)
    live, number = i < G, tl.load(steps + b) << 32
    draft = tl.load(draft_ids + b * draft_stride + i, mask=live, other=0)
    may_be_forced = i < tl.where(tl.load(is_on + b) != 0, G, 0)
    own = tl.load(forced + b * forced_stride + i, mask=may_be_forced & (i > 0), other=-1)
    draft = tl.where(own >= 0, own, draft)
    tl.store(draft_ids + b * draft_stride + i, draft, mask=live)
    # .wt: as in the accept kernel.
    value = draft.to(tl.uint32).to(tl.int64)
    tl.store(words + b * words_stride + i, number | value, mask=live, cache_modifier=".wt")
