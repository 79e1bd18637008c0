"""A forward over a fixed number of prompt rows, at fixed addresses, so that a graph can hold it.

A chunk is a verify with another end: blocks of 16 rows (of 128 where it has many, or many in front
of it), each with its own start and pages, of one prompt or of several. The K/V of all rows of a
layer is written before its attention reads, so a later block of a prompt sees the earlier ones;
lengths are read on the device, so nothing is planned and the host launches one graph (mode full),
or one a segment. The same kernels run in every mode. Of a dense target in mode full the largest is
two halves on two streams: one's products fill what the other's last programs and norms leave empty.

Segments run uncompiled: what Inductor would fuse in them is one kernel already, in our own.

Invariant: what no prompt needs changes nothing that anyone reads. A block without a prompt has
start -1: its attention gives zeros and its K/V goes to the null page. Rows of a block behind its
prompt's end hold token 0 and write to the slots behind the prompt, which the first step writes
again before it reads them: a row in front of them reads finite numbers there, and a masked number
that is not finite is not nothing.

Legend: n rows, B blocks, R prompts, W pages a prompt, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from graphengine import names
from graphengine.capture.beside import beside, other_stream
from graphengine.capture.runners import EagerRunner, GraphPool, Runner, capture_ends
from graphengine.capture.steps import AttentionStep, Carry, Dense, Host, Step
from graphengine.config.draft import AttentionRule
from graphengine.decode.attention import (
    Attention,
    BlockAttention,
    ChunkAttention,
    LayerAttentions,
)
from graphengine.decode.chains import prefill_chains
from graphengine.decode.chunk_sizes import BLOCK
from graphengine.decode.proposer import Pair
from graphengine.decode.stack import Rows
from graphengine.kernels import chunk_attention
from graphengine.kernels.argmax import argmax_rows
from graphengine.kernels.gated_delta_prefill import Pieces
from graphengine.kernels.place_rows import Placed, place_rows_

MOST_PROMPTS = 16  # of a chunk: for as many rows the head streams its weights once
NO_PROMPT = -1  # start of a block
FIRST_TOKEN, GOES_ON = names.FIRST_TOKEN, "goes_on"  # how a chunk ends

Taker = Callable[[Tensor, Tensor], None]
"""Gets logits_RV and ids_R."""


class Piece(NamedTuple):
    """Rows begin .. end - 1 of a sequence, whose earlier rows have been run."""

    ids: Sequence[int]
    begin: int
    end: int
    pages: list[int]
    state_slot: int = 0
    keep: int = 0  # rows behind which the state is kept as well, in kept_slot
    kept_slot: int = 0

    @property
    def num_rows(self) -> int:
        """Rows that are run."""
        return self.end - self.begin


Array = TypeVar("Array", Tensor, "np.ndarray[Any, Any]")


class Sent(NamedTuple, Generic[Array]):
    """What the host tells a chunk: views of one int32 array, so that one copy sends it."""

    ids_n: Array
    start_B: Array  # position of a block's first row
    end_B: Array  # and behind its piece's last
    owner_B: Array  # row of `pages_RW`
    last_R: Array  # the row of each piece whose logits are wanted
    pieces_6R: Array  # what recurrent layers go by (`Pieces`)
    pages_RW: Array

    @classmethod
    def of(cls, flat_X: Array, size: int, blocks: int, num_prompts: int) -> Sent[Array]:
        """The views. Pages come last: those of prompts that there are not are not sent."""
        lengths = size, blocks, blocks, blocks, num_prompts, 6 * num_prompts
        borders = [0, *accumulate(lengths), len(flat_X)]
        ids, start, end, owner, last, pieces, pages = (
            flat_X[begin:behind] for begin, behind in pairwise(borders)
        )
        pages_RW = pages.reshape(num_prompts, -1)
        return cls(ids, start, end, owner, last, pieces.reshape(6, -1), pages_RW)


class Upload(NamedTuple):
    """The host's side of `Sent`, pinned where there is a GPU. NumPy's views, since torch takes 3 us
    to write a number and 0.1 for each of a list."""

    flat_X: np.ndarray[Any, Any]
    sent: Sent[np.ndarray[Any, Any]]
    copies: list[tuple[Tensor, Tensor]]  # to the device and from here, by number of prompts
    is_free: torch.cuda.Event | None  # behind the last run that read it


class ChunkBuffers(NamedTuple):
    """At fixed addresses: what was sent, what is made of it, and what a run has given."""

    sent: Sent[Tensor]
    rows: Rows
    table_BW: Tensor  # int32
    last_R: Tensor  # int64
    logits_RV: Tensor  # model dtype
    ids_R: Tensor  # int64


class FixedChunk:
    """One size: its inputs, its chain, and what the last run gave."""

    def __init__(
        self, pair: Pair, size: int, is_long: bool = False, is_paired: bool = False
    ) -> None:
        """
        Args:
            is_long: in blocks of `chunk_attention`.
            is_paired: its halves run beside each other, each layer's attention of the second behind
                the first's keys. Nobody may tap the last layer: the first half does not run it.
        """
        target, width = pair.target, pair.width
        config, new_zeros = target.config, target.kv_pool.new_zeros
        self.size, self.is_long, self.is_paired = size, is_long, is_paired
        self._recurs = target.states is not None
        self._first_row = size // 2 if is_paired else 0  # of those among which logits are wanted
        self.block = chunk_attention.BLOCK if is_long else BLOCK
        blocks = size // self.block
        most = 1 if is_long else min(blocks, MOST_PROMPTS, max(pair.config.buckets))
        self.num_prompts = most  # of a run at most
        self.name = names.chunk_name(size, is_paired)
        self._flat_X = new_zeros(size + 3 * blocks + (7 + width) * most, dtype=torch.int32)
        longs = partial(new_zeros, dtype=torch.int64)
        buffers = self._buffers = ChunkBuffers(
            sent=self._parts(self._flat_X),
            rows=Rows(longs(size), longs(size), longs(size)),
            table_BW=self._flat_X.new_zeros(blocks, width),
            last_R=longs(most),
            logits_RV=new_zeros(most, config.vocab_size),
            ids_R=longs(most),
        )
        buffers.sent.start_B.fill_(NO_PROMPT)
        self._uploads = deque([self._new_upload()])
        self._attn_TNH = new_zeros(size, config.num_attention_heads, config.head_dim)
        self._takers = list[Taker]()
        self._pair = pair
        self._steps = head, ends, tail = self._steps_of(pair)
        self._runners: Mapping[str, Runner] = {
            end: EagerRunner([*head, *steps, *tail], lambda: ()) for end, steps in ends.items()
        }

    def short_chain(self) -> list[Step]:
        """The same of few layers, which have all kernels of a run that ends a prompt, and warm up
        what all are captured of: not all are launched twice. Mutates, when run: the null page."""
        head, ends, tail = self._steps_of(self._pair.shortened())
        return [*head, *ends[FIRST_TOKEN], *tail]

    def _steps_of(self, pair: Pair) -> tuple[list[Step], dict[str, list[Step]], list[Step]]:
        """Of these layers the steps in front of an end, the ends, and those behind."""
        buffers, attn_TNH, size = self._buffers, self._attn_TNH, self.size
        begins = [0, size // 2] if self.is_paired else [0]
        *fronts, (chain, tail) = [
            self._chains_of(pair, slice(begin, begin + size // len(begins)), attn_TNH)
            for begin in begins
        ]
        *head, attend, last = chain
        stream = other_stream(attn_TNH.device)
        for (*its_head, _, _), its_tail in fronts:
            head = beside(its_head, head, stream)
            tail = beside(its_tail, tail, stream)
        first, *rest = head

        *sent, _, pages_RW = buffers.sent
        placed = Placed(*buffers.rows, buffers.table_BW, buffers.last_R)
        place_ = partial(place_rows_, *sent, pages_RW, pair.config.page_size, placed)

        # Neither holds `self`: who drops a chunk gives its weights and graphs back at once.
        def begin(carry: Carry) -> Carry:
            place_()
            return first.run(carry)

        def end(carry: Carry) -> Carry:
            (logits_RV,) = last.run(carry)
            buffers.logits_RV.copy_(logits_RV)
            buffers.ids_R.copy_(argmax_rows(logits_RV))
            return ()

        takers = self._takers

        def hand_over(carry: Carry) -> Carry:
            for take in takers:
                take(buffers.logits_RV, buffers.ids_R)
            return carry

        # Of the last layer of a prompt that goes on, K/V alone is wanted.
        ended = [attend, Dense(last.name, end), Host(FIRST_TOKEN, hand_over)]
        ends: dict[str, list[Step]] = {FIRST_TOKEN: ended}
        is_tapped = pair.target.config.num_hidden_layers - 1 in pair.proposer.taps
        if self.is_long and isinstance(attend, AttentionStep) and not is_tapped:
            ends[GOES_ON] = []
        return [Dense(first.name, begin), *rest], ends, tail

    def _chains_of(
        self, pair: Pair, rows: slice, attn_TNH: Tensor
    ) -> tuple[list[Step], list[Step]]:
        """`prefill_chains` of these rows, whole blocks; logits are of those of the last ones."""
        config, buffers = pair.target.config, self._buffers
        blocks = slice(rows.start // self.block, rows.stop // self.block)
        table_BW, start_B = buffers.table_BW[blocks], buffers.sent.start_B[blocks]

        def make(rule: AttentionRule) -> Attention:
            if self.is_long:
                return ChunkAttention(config, rule, table_BW, start_B)
            return BlockAttention(config, rule, table_BW, start_B, BLOCK, padded=NO_PROMPT)

        attention = LayerAttentions.of(config, make)
        own = Rows(*(x[rows] for x in buffers.rows))
        pieces = Pieces(*buffers.sent.pieces_6R)
        return prefill_chains(pair, own, buffers.last_R, attention, attn_TNH[rows], pieces)

    def capture_(self, pool: GraphPool, whole: bool) -> None:
        """From now on replays graphs; `short_chain` has run where captures are recorded.

        Args: whole: one graph, attention included.
        """
        head, ends, tail = self._steps
        self._runners = capture_ends(self.name, head, ends, tail, (), pool, whole=whole)

    def _new_upload(self) -> Upload:
        flat_X, most = self._flat_X, self.num_prompts
        host_X = torch.zeros(flat_X.shape, dtype=torch.int32, pin_memory=flat_X.is_cuda)
        width = self._buffers.sent.pages_RW.shape[1]
        used = [len(flat_X) - (most - 1 - k) * width for k in range(most)]
        copies = [(flat_X[:n], host_X[:n]) for n in used]
        is_free, written_X = torch.cuda.Event() if flat_X.is_cuda else None, host_X.numpy()
        return Upload(written_X, self._parts(written_X), copies, is_free)

    def _next_upload(self) -> Upload:
        """One that no run still reads: the oldest, or where that is in use a new one."""
        oldest = self._uploads[0]
        if oldest.is_free is None or oldest.is_free.query():
            self._uploads.rotate(-1)
        else:
            self._uploads.append(self._new_upload())
        return self._uploads[-1]

    def _parts(self, flat_X: Array) -> Sent[Array]:
        return Sent.of(flat_X, self.size, self.size // self.block, self.num_prompts)

    def run(self, pieces: Sequence[Piece], take: Taker | None = None) -> None:
        """Queues a forward of these, at most `num_prompts` and `size` rows in blocks.

        Args:
            take: called with the logits behind each piece's last row and their first choices, int64
                ids_R, -1 where they are not finite. They hold until the next run; rows past the
                last piece mean nothing. What it queues comes before what the proposer does. None:
                none of the prompts ends here.

        Mutates: the K/V of the rows, what the proposer keeps of them.
        """
        upload = self._next_upload()
        sent, block = upload.sent, 0
        device_X, host_X = upload.copies[len(pieces) - 1]
        upload.flat_X[: len(host_X)].fill(0)
        sent.start_B.fill(NO_PROMPT)
        for k, (ids, begin, end, pages, *state) in enumerate(pieces):
            first, behind = block * self.block, block + -(-(end - begin) // self.block)
            sent.ids_n[first : first + end - begin] = ids[begin:end]
            sent.start_B[block:behind] = np.arange(begin, end, self.block)
            sent.end_B[block:behind] = end
            sent.owner_B[block:behind] = k
            sent.last_R[k] = first + end - begin - 1 - self._first_row
            if self._recurs:
                sent.pieces_6R[:, k] = first, first + end - begin, begin, *state
            sent.pages_RW[k, : len(pages)] = pages
            block = behind
        device_X.copy_(host_X, non_blocking=True)
        end = GOES_ON if take is None and GOES_ON in self._runners else FIRST_TOKEN
        self._takers += [take] if take is not None else []
        try:
            self._runners[end].run()
        finally:
            self._takers.clear()
        if upload.is_free is not None:
            upload.is_free.record()
