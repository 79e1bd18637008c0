"""Between requests on the host and the rows of a bucket: write them, and read what came of a step.

Everything about a request that a step reads is written here, when the request joins. From then on
the steps keep it current themselves, and nobody touches its row when others come or go. Invariant:
a row without a request is padding: start 0, pages all NULL_PAGE. A row left over from an older
request would write into pages that belong to somebody else by now.

Results come without a copy and without an event: the accept kernel stores words into memory of the
host that bear the number of their step, and the host looks until all of them do, while the device
works on. Invariant: no number comes twice in 2**32 steps, and what the warm-up of a bucket has
written is cleared, or words of another step could pass.

Legend: B requests of the bucket, G rows of a block, W pages per request, X words of a request.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from graphengine.decode.adjustments import write_tables_
from graphengine.decode.buffers import StepBuffers
from graphengine.decode.kvcache import NULL_PAGE
from graphengine.decode.request import Request
from graphengine.decode.sampling import GREEDY, Controls
from graphengine.kernels.accept import NUM_RESULTS, next_block

# How often a wait asks whether the device still works; the answer takes about a microsecond.
_ASK_EVERY_S = 1e-3


class Results(NamedTuple):
    """What a step tells the host of its requests, as it comes in."""

    words_BX: Tensor  # int64, a view; of a whole step [B, G + 1]: target ids, number accepted
    number: int  # of the step, as the upper halves of its words hold it

    @classmethod
    def of(cls, buffers: StepBuffers, step: int, num_requests: int) -> Results:
        """The results of a bucket's step, launched or about to be."""
        begin = step % NUM_RESULTS * (buffers.block + 1)
        return cls.numbered(
            buffers.results_BX[:num_requests, begin : begin + buffers.block + 1], step
        )

    @classmethod
    def numbered(cls, words_BX: Tensor, step: int) -> Results:
        """Words that a step writes."""
        return cls(words_BX, (step + 2**31) % 2**32 - 2**31)

    def are_there(self) -> bool:
        """Whether the step has written them all. By numpy, which keeps Python's lock for so few."""
        return bool((self.words_BX.numpy() >> 32 == self.number).all())

    def wait(self) -> None:
        """Returns as soon as they are there; what the step still does then is not waited for.

        Raises:
            RuntimeError: the device has failed, or is done and has not written them.
        """
        ask_at = time.perf_counter() + _ASK_EVERY_S
        while not self.are_there():
            if time.perf_counter() < ask_at:
                os.sched_yield()
                continue
            is_on_gpu = self.words_BX.is_pinned()
            if not is_on_gpu or torch.cuda.current_stream().query():
                if is_on_gpu:
                    torch.cuda.synchronize()  # the caller may have changed streams
                if not self.are_there():
                    raise RuntimeError(f"step {self.number} is over and gave no results: a defect")
            ask_at = time.perf_counter() + _ASK_EVERY_S

    def read(self) -> tuple[list[list[int]], list[int]]:
        """Target ids [B][G] and accepted drafts [B], once they are there."""
        values = self.values()
        return [row[:-1] for row in values], [row[-1] for row in values]

    def values(self) -> list[list[int]]:
        """The words without the step's number, once they are there."""
        return self.words_BX.to(torch.int32).tolist()


def write_rows_(
    buffers: StepBuffers,
    rows: Mapping[int, Request | None],
    mask_token_id: int,
    page_size: int,
    step: int,
) -> None:
    """Begins these rows anew, the others go on: pages, lengths, next block, sampling, what they
    ask of their logits; None is padding. No block of theirs was verified, so the drafter's context
    of them, if run now, touches only the null page. Mutates: buffers.

    Args:
        rows: row -> the prefilled request with its pages, of which no step is in flight.
        mask_token_id: what a block holds behind its anchor.
        step: the number of the next step.
    """
    width, block = buffers.page_table_BW.shape[1], buffers.block
    requests = list(rows.values())
    table = torch.full((len(rows), width), NULL_PAGE, dtype=torch.int32)
    for pages, request in zip(table.numpy(), requests, strict=True):
        if request is not None:
            pages[: len(request.pages)] = request.pages
    known = [(r.start, r.anchor) if r is not None else (0, 0) for r in requests]
    start_B, anchor_B = torch.tensor(known, dtype=torch.int32).unbind(1)
    block_ids, positions, slots = next_block(
        start_B, anchor_B, table, block, mask_token_id, page_size
    )
    device = buffers.start_B.device
    samplings = [r.sampling if r is not None else GREEDY for r in requests]
    controls = Controls.upload(samplings, device)
    at_R = torch.tensor(list(rows)).to(device)
    columns = [
        (buffers.page_table_BW, table),
        (buffers.start_B, start_B),
        (buffers.block_ids_BG, block_ids),
        (buffers.positions_T, positions),
        (buffers.slots_T, slots),
        *zip(buffers.controls, controls, strict=True),
    ]
    as_int32 = partial(torch.tensor, dtype=torch.int32)
    if buffers.recurrent is not None:
        held = [request.state_slot if request is not None else 0 for request in requests]
        # A request whose steps are only timed has no slot of its own: then it keeps nothing either.
        kept = [r.answer_slots if r is not None and r.state_slot else [] for r in requests]
        columns.append((buffers.recurrent.slots_B, as_int32(held)))
        columns.append((buffers.recurrent.kept_slots_B2, as_int32([k or [0, 0] for k in kept])))
    if buffers.grammar is not None:
        has_one = [r is not None and r.matcher is not None for r in requests]
        columns.append((buffers.grammar.is_on_B, as_int32(has_one)))
    for tensor, values in columns:
        by_row = tensor.view(buffers.start_B.shape[0], -1)
        by_row.index_copy_(0, at_R, values.view(len(rows), -1).to(device))
    if buffers.tables is not None:
        write_tables_(buffers.tables, rows)
    for tensor in (buffers.context_positions_T, buffers.context_slots_T):
        tensor.view(-1, block).index_fill_(0, at_R, 0)
    buffers.step_B.index_fill_(0, at_R, step)
