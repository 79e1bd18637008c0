"""The tensors that outlive a replay, at fixed addresses, sized for the largest bucket.

Everything else on the device is either weights, the K/V pools, or graph-owned and valid only until
the next replay. A bucket sees the beginning of each tensor's memory: its requests, each with as
many rows as its own block has, so that what a kernel gets is contiguous whatever the block.

Legend: B requests, G rows of a request in a verify (anchor and drafts), T = B * G rows, W pages per
request, C = taps * hidden, N / H query heads / head dim, X words of results. In draft_block_ids,
draft_positions, draft_slots and draft_attn, G and T count the rows of a draft forward: as many, or
one less when the anchor's row predicts too (anchor-first drafters).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from graphengine.config.draft import DraftConfig
from graphengine.config.model import ModelConfig
from graphengine.kernels.accept import NUM_RESULTS


class StepBuffers(NamedTuple):
    """State of the running block of every request in the bucket.

    `start_B` counts committed tokens (= position of the anchor); 0 marks a padded row, which
    touches only the null page. `positions_T` / `slots_T` belong to the block in `block_ids_BG`;
    the `context_*` pair keeps those of the block verified last, for the drafter's context K/V.
    Where a draft has as many rows as a verify, `draft_block_ids_BG`, `draft_positions_T` and
    `draft_slots_T` are the block's own tensors; else the draft chain copies them.
    `results_BX` is memory of the host, pinned, that the accept kernel writes and `rows` reads.
    """

    block_ids_BG: Tensor  # int64: anchor, MASK, ..; plain decode: the anchor
    draft_ids_BG: Tensor  # int64: anchor, d_1 .. d_{G-1}
    start_B: Tensor  # int32
    step_B: Tensor  # int64: number of the step, equal in all rows
    results_BX: Tensor  # int64 on the host: words of kernels/accept.py
    page_table_BW: Tensor  # int32
    temperature_B: Tensor  # float32; these four are read by the sampled verify chain alone
    top_p_B: Tensor  # float32
    top_k_B: Tensor  # int32
    seed_B: Tensor  # int64
    positions_T: Tensor  # int64
    slots_T: Tensor  # int64
    draft_block_ids_BG: Tensor  # int64
    draft_positions_T: Tensor  # int64
    draft_slots_T: Tensor  # int64
    context_positions_T: Tensor  # int64
    context_slots_T: Tensor  # int64
    taps_TC: Tensor  # model dtype
    attn_TNH: Tensor  # model dtype; the target's attention output
    draft_attn_TNH: Tensor  # model dtype; the drafter's

    @classmethod
    def make(
        cls,
        target: ModelConfig,
        draft: DraftConfig | None,
        max_batch: int,
        max_pages: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> StepBuffers:
        """Zeroed buffers: every row is padding until a request is loaded."""
        block = draft.num_verify_rows if draft else 1
        draft_block = draft.block_size if draft else 1
        rows, draft_rows = max_batch * block, max_batch * draft_block

        def ids(*shape: int, kind: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        def values(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        def on_host(*shape: int) -> Tensor:
            is_gpu = device.type == "cuda"
            where = torch.device("cpu") if is_gpu else device
            return torch.zeros(shape, dtype=torch.int64, device=where, pin_memory=is_gpu)

        taps = draft.num_taps * draft.tap_size if draft else 0
        heads = (target.num_attention_heads, target.head_dim)
        draft_heads = (draft.model.num_attention_heads, draft.model.head_dim) if draft else (0, 0)
        block_ids, positions, slots = ids(max_batch, block), ids(rows), ids(rows)
        own = draft_block != block
        return cls(
            block_ids_BG=block_ids,
            # Without a drafter the block is its own draft.
            draft_ids_BG=ids(max_batch, block) if draft else block_ids,
            start_B=ids(max_batch, kind=torch.int32),
            step_B=ids(max_batch),
            results_BX=on_host(max_batch, NUM_RESULTS * (block + 1)),
            page_table_BW=ids(max_batch, max_pages, kind=torch.int32),
            temperature_B=ids(max_batch, kind=torch.float32),
            top_p_B=ids(max_batch, kind=torch.float32),
            top_k_B=ids(max_batch, kind=torch.int32),
            seed_B=ids(max_batch),
            positions_T=positions,
            slots_T=slots,
            draft_block_ids_BG=ids(max_batch, draft_block) if own else block_ids,
            draft_positions_T=ids(draft_rows) if own else positions,
            draft_slots_T=ids(draft_rows) if own else slots,
            context_positions_T=ids(rows),
            context_slots_T=ids(rows),
            taps_TC=values(rows, taps),
            attn_TNH=values(rows, *heads),
            draft_attn_TNH=values(draft_rows, *draft_heads),
        )

    @property
    def block(self) -> int:
        """Rows of a request in a verify."""
        return self.block_ids_BG.shape[1]

    @property
    def draft_block(self) -> int:
        """Rows of a request in a draft forward."""
        return self.draft_block_ids_BG.shape[1]

    def bucket(self, num_requests: int, draft: DraftConfig | None = None) -> StepBuffers:
        """Views for `num_requests` requests; blocks of other buckets lie elsewhere in the memory.

        Args:
            draft: whose block they run, at most that of the whole; None: the same block.
        """
        block = draft.num_verify_rows if draft else self.block
        draft_block = draft.block_size if draft else self.draft_block

        def view(name: str, tensor: Tensor) -> Tensor:
            dims = name.split("_")[-1]
            drafts = name.startswith("draft_") and name != "draft_ids_BG"
            rows = num_requests * (draft_block if drafts else block)
            if dims == "BG":
                return tensor.view(-1)[:rows].view(num_requests, -1)
            return tensor[: rows if dims.startswith("T") else num_requests]

        pairs = zip(self._fields, self, strict=True)
        return StepBuffers(*(view(name, tensor) for name, tensor in pairs))

    def clear_(self) -> None:
        """Makes every row padding; no step may be running. Mutates: all tensors."""
        for tensor in self:
            tensor.zero_()
