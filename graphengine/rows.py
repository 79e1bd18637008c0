"""Between requests on the host and the rows of a bucket: load them, and where results come back.

Why: a bucket's buffers are only what the device needs for its next block, so everything about a
request that a step reads is written here, in one place, whenever the batch changes. From then on
the steps keep it current themselves. Invariant: row b holds request b, and every row behind the
last request is padding: start 0, pages all NULL_PAGE. A row left over from an older batch would
write into pages that belong to somebody else by now.

Legend: B requests of the bucket, G rows of a block, W pages per request, T = B * G.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from graphengine.buffers import StepBuffers
from graphengine.kernels.accept import next_block
from graphengine.kvcache import NULL_PAGE
from graphengine.request import Request
from graphengine.sampling import GREEDY, Controls


class Results(NamedTuple):
    """Where one step's results land on the host, and when they are there."""

    target_ids_cpu: Tensor  # int64 [T], pinned
    num_accepted_cpu: Tensor  # int32 [B], pinned
    ready: torch.cuda.Event | None

    @classmethod
    def make(cls, buffers: StepBuffers) -> Results:
        """Room for the largest bucket's results."""
        on_gpu = buffers.start_B.is_cuda

        def pinned(like: Tensor) -> Tensor:
            return torch.empty(like.shape, dtype=like.dtype, pin_memory=on_gpu)

        return cls(
            pinned(buffers.target_ids_BG.view(-1)),
            pinned(buffers.num_accepted_B),
            torch.cuda.Event() if on_gpu else None,
        )

    def copy_(self, buffers: StepBuffers) -> None:
        """Queues the copy of what a step left in a bucket's buffers. Mutates: self."""
        ids_T, accepted_B = buffers.target_ids_BG.view(-1), buffers.num_accepted_B
        self.target_ids_cpu[: len(ids_T)].copy_(ids_T, non_blocking=True)
        self.num_accepted_cpu[: len(accepted_B)].copy_(accepted_B, non_blocking=True)
        if self.ready is not None:
            self.ready.record()

    def read(self, num_requests: int, block: int) -> tuple[list[list[int]], list[int]]:
        """Target ids [B][G] and accepted drafts [B] of the first requests, once it is `ready`.

        Args:
            block: rows of a request in the bucket that the copy is of.
        """
        ids_T = self.target_ids_cpu[: num_requests * block]
        return ids_T.view(-1, block).tolist(), self.num_accepted_cpu[:num_requests].tolist()


def load_(
    buffers: StepBuffers, requests: list[Request], mask_token_id: int, page_size: int
) -> None:
    """Writes requests into the rows of a bucket, padding behind them: pages, lengths, next block,
    and, where a request samples, its temperature and the like. Mutates: buffers.

    Args:
        buffers: the bucket's, of at least as many rows as requests.
        requests: prefilled, with their pages; no step of theirs is in flight.
        mask_token_id: what a block holds behind its anchor.
    """
    device = buffers.start_B.device
    num_rows, width = buffers.page_table_BW.shape
    padding = num_rows - len(requests)
    table = [r.pages + [NULL_PAGE] * (width - len(r.pages)) for r in requests]
    table += [[NULL_PAGE] * width] * padding

    def upload(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32).to(device)

    buffers.page_table_BW.copy_(torch.tensor(table, dtype=torch.int32))
    buffers.start_B.copy_(upload([r.start for r in requests] + [0] * padding))
    anchors = upload([r.anchor for r in requests] + [0] * padding)
    block_ids, positions, slots = next_block(
        buffers.start_B, anchors, buffers.page_table_BW, buffers.block, mask_token_id, page_size
    )
    buffers.block_ids_BG.copy_(block_ids)
    buffers.positions_T.copy_(positions)
    buffers.slots_T.copy_(slots)
    if any(not r.sampling.is_greedy for r in requests):
        controls = Controls.upload([r.sampling for r in requests] + [GREEDY] * padding, device)
        buffers.temperature_B.copy_(controls.temperature_B)
        buffers.top_p_B.copy_(controls.top_p_B)
        buffers.top_k_B.copy_(controls.top_k_B)
        buffers.seed_B.copy_(controls.seed_B)
