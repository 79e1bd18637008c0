"""Prefill: runs prompts through the target in chunks, the drafter's context right behind them.

Short prompts, several together, fill a chunk of a fixed size (`fixed_chunk`); the rows of a long
one, and all on the CPU, run eagerly, as many as there are up to `chunk` in a forward. A graph mode
changes who launches a kernel, and never what the K/V of a prompt is.

When they are queued is `admission`'s.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from graphengine import names
from graphengine.capture.runners import run_chain
from graphengine.decode.adjustments import adjust_first
from graphengine.decode.attention import LayerAttentions, Layout, TorchAttention
from graphengine.decode.chains import prefill_chains
from graphengine.decode.chunk_sizes import BLOCK, FAR, FAR_LEAST, first_rows, forward_time
from graphengine.decode.fixed_chunk import FixedChunk, Piece
from graphengine.decode.kvcache import keyed_layers_in
from graphengine.decode.logprobs import Scores, score_rows
from graphengine.decode.masks import mask_first
from graphengine.decode.proposer import Pair
from graphengine.decode.recurrence import KEPT_SPACING, NULL_SLOT, pieces_of
from graphengine.decode.request import Request
from graphengine.decode.sampling import Controls, sample_rows
from graphengine.decode.stack import Rows
from graphengine.kernels.argmax import argmax_rows
from graphengine.kernels.gated_delta_prefill import CHUNK, Pieces
from graphengine.models.decoder import read_over_one_row

SCORED_ROWS = 64  # of a prompt whose log-probabilities are asked for, in a forward

Work = list[tuple[Request, Piece]]
"""What one forward runs."""


class FirstTokens(NamedTuple):
    """Of a forward, on their way to the host; those of prompts that go on are passed over."""

    work: Work
    ids_R: Tensor
    are_there: torch.cuda.Event | None
    scores: Scores | None

    @classmethod
    def fetch(cls, work: Work, ids_R: Tensor, scores: Scores | None = None) -> FirstTokens:
        """Queues the copy behind what computes them."""
        if not ids_R.is_cuda:
            return cls(work, ids_R, None, scores)
        host_R = torch.empty(ids_R.shape, dtype=ids_R.dtype, pin_memory=True)
        host_R.copy_(ids_R, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return cls(work, host_R, event, scores)

    @property
    def is_there(self) -> bool:
        """Whether they need no waiting for."""
        return self.are_there is None or self.are_there.query()

    def wait(self) -> list[tuple[Request, int]]:
        """Waits for them, and notes when they came."""
        if self.are_there is not None:
            with names.range_("wait"):
                self.are_there.synchronize()
        came_s, done = time.perf_counter(), []
        found = zip(self.work, self.ids_R.tolist(), strict=False)
        for i, ((request, piece), token) in enumerate(found):
            if _completes(request, piece):
                request.prefilled_s = came_s
                done.append((request, token))
                if self.scores is not None and request.logprobs is not None and token >= 0:
                    own = Scores(*(x[i : i + 1] for x in self.scores))
                    request.output_logprobs = own.told([token], request.logprobs)
        return done


@dataclass(frozen=True, slots=True)
class Prefill:
    """What a prefill needs; holds no state of requests.

    `chunk`: rows of an eager forward at most. `fixed`: ascending sizes; empty: all is eager. `far`:
    ascending too, for far pieces, more than FAR_LEAST rows of one prompt behind FAR others: those
    of a long prompt beside running streams, its remainder, a next turn behind a long text.
    """

    pair: Pair
    attention: LayerAttentions
    chunk: int
    fixed: tuple[FixedChunk, ...] = ()
    far: tuple[FixedChunk, ...] = ()
    keyed_in: int = field(init=False)  # one layer of the target in so many has keys
    times: dict[int, float] = field(init=False)  # `forward_time` of the chunks, by size

    def __post_init__(self) -> None:
        target = self.pair.target.config
        object.__setattr__(self, "keyed_in", keyed_layers_in(target))
        sizes = {chunk.size for chunk in (*self.fixed, *self.far)}
        times = {size: forward_time(size, read_over_one_row(target, size)) for size in sizes}
        object.__setattr__(self, "times", times)

    def split(
        self, requests: Sequence[Request], rows_at: Callable[[int], int | None] = lambda _: None
    ) -> Iterator[Work]:
        """The forwards, in order. A fixed chunk is shared by as many prompts as it holds; a longer
        or a far piece runs alone, since company would save it nothing and cost it time. No forward
        has two pieces of a prompt, since recurrent layers run all pieces at once.

        Args: rows_at: most rows of a forward that begins at a position; None: as many as pay.
        """
        work: Work = []
        room = limit = 0
        for request in requests:
            begin, ids = request.num_cached_tokens, request.prompt_ids
            if request.prompt_logprobs is not None:  # alone, and eagerly
                if work:
                    yield work
                    work = []
                while begin < len(ids) and request.finish_reason is None:
                    end = min(begin + SCORED_ROWS, len(ids))
                    yield [(request, Piece(ids, begin, end, request.pages, request.state_slot))]
                    begin = end
                continue
            while begin < len(ids) and request.finish_reason is None:
                most, left = rows_at(begin), len(ids) - begin
                is_far = self._is_far(begin, left, most)
                if not work:
                    room, limit = self._space(most, len(requests))
                end = begin + self._rows_of_next(begin, left, room, most)
                is_full = self._room_for(end - begin) > room or len(work) == limit
                if work and (is_far or is_full):
                    yield work
                    work = []
                    continue
                kept = self._kept(request, begin, end)
                piece = Piece(ids, begin, end, request.pages, request.state_slot, *kept)
                work.append((request, piece))
                begin, room = end, room - self._room_for(piece.num_rows)
                if is_far or room <= 0 or begin < len(ids):
                    yield work
                    work = []
        if work:
            yield work

    def _space(self, most: int | None, num_requests: int) -> tuple[int, int]:
        """Rows and prompts of a forward that prompts share."""
        shared = self._shared(most)
        if shared is not None:
            return shared.size, shared.num_prompts
        return min(self.chunk, most or self.chunk), num_requests

    def _kept(self, request: Request, begin: int, end: int) -> tuple[int, int]:
        """Rows of this piece behind which the state is kept, and its slot; 0, 0: nowhere. These are
        whole chunks of the scan, up to the last one in front of the prompt's last token, which is
        always run, and in a long prompt some before, KEPT_SPACING apart. Mutates: request."""
        wanted, spare = len(request.prompt_ids) - 1, request.spare_slots
        rows = (min(end, wanted) - begin) // CHUNK * CHUNK
        is_last = wanted - end < CHUNK
        is_due = (begin + rows) // KEPT_SPACING > begin // KEPT_SPACING and len(spare) > 1
        if rows < 1 or not spare or not (is_last or is_due):
            return 0, NULL_SLOT
        request.kept_slots[begin + rows] = spare.pop()
        return rows, request.kept_slots[begin + rows]

    def _shared(self, most: int | None) -> FixedChunk | None:
        """The largest chunk that prompts share, of so many rows at most if there is one."""
        chunks = [chunk for chunk in self.fixed if not chunk.is_long]
        fitting = [chunk for chunk in chunks if most is None or chunk.size <= most]
        return (fitting or chunks[:1] or [None])[-1]

    def _is_far(self, begin: int, num_rows: int, most: int | None) -> bool:
        """Whether so many rows of a prompt from there on begin with a far piece."""
        if not self.far or begin < FAR or num_rows <= FAR_LEAST:
            return False
        return most is None or most >= self.far[0].size

    def _chunks(self, begin: int, num_rows: int, most: int | None = None) -> tuple[FixedChunk, ...]:
        """Chunks that the next of so many rows may run in, ascending."""
        if not self._is_far(begin, num_rows, most):
            return self.fixed
        return *self.far, *(chunk for chunk in self.fixed if chunk.is_long)

    def _rows_of_next(self, begin: int, left: int, room: int, most: int | None) -> int:
        """Rows of a prompt that its next forward takes of those that are left. What fits a chunk
        that prompts share is not cut."""
        shared, is_far = self._shared(most), self._is_far(begin, left, most)
        if not is_far:
            if shared is None or left <= shared.size:
                return min(left, room if shared is None else left)
            if shared is self.fixed[-1] and most is None:
                return min(left, self.chunk)  # eager
        chunks = self._chunks(begin, left, most)
        fits = math.inf if most is None else max(most, chunks[0].size)
        sizes = [chunk.size for chunk in chunks if chunk.size <= fits]
        return min(left, first_rows(left, tuple((size, self.times[size]) for size in sizes)))

    def _room_for(self, num_rows: int) -> int:
        return -(-num_rows // BLOCK) * BLOCK if self.fixed else num_rows

    def queue(self, work: Work) -> FirstTokens | None:
        """One forward, and the first tokens of the prompts that it completes. Mutates: the K/V of
        every row, what the proposer keeps of them."""
        began = time.perf_counter()
        for request, piece in work:
            if piece.begin == request.num_cached_tokens:
                request.prefill_s = began
        pieces = [piece for _, piece in work]
        num_rows = sum(self._room_for(piece.num_rows) for piece in pieces)
        is_scored = work[0][0].prompt_logprobs is not None
        chunks = () if is_scored else self._chunks(pieces[0].begin, pieces[0].num_rows)
        chunk = next((chunk for chunk in chunks if chunk.size >= num_rows), None)
        tokens: list[FirstTokens] = []

        def take(logits_RV: Tensor, ids_R: Tensor | None = None) -> None:
            tokens.append(_first_tokens(work, logits_RV, ids_R))

        taker = take if any(_completes(*part) for part in work) else None
        with names.range_(names.chunk_name(num_rows) if chunk is None else chunk.name):
            if chunk is not None:
                chunk.run(pieces, taker)
            elif is_scored:
                last_1V = self._scored_logits(*work[0])
                if taker is not None:
                    taker(last_1V)
            else:
                self.logits(pieces, take=taker)
        return tokens[0] if tokens else None

    def _scored_logits(self, request: Request, piece: Piece) -> Tensor:
        """The last row's logits, [1, V]; tells the request of all rows. Waits for the device.
        Mutates: request, and what `logits` does."""
        logits_TV = self.logits([piece], range(piece.num_rows))
        said = list(piece.ids[piece.begin + 1 : piece.end + 1])
        if said and request.prompt_logprobs is not None:
            ids_T = torch.tensor(said).to(logits_TV.device)
            scores = score_rows(logits_TV[: len(said)], ids_T, request.prompt_logprobs)
            request.prompt_scores += scores.told(said, request.prompt_logprobs)
        return logits_TV[-1:]

    def logits(
        self,
        pieces: list[Piece],
        at: Sequence[int] | None = None,
        take: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """One forward of these pieces -> logits [R, V] of rows `at`, by default each piece's last.

        Args: take: called with them before the proposer's part is queued.

        Mutates: the K/V of the rows, their recurrent states, what the proposer keeps of them.
        """
        size = self.pair.config.page_size
        lengths, pages = [piece.num_rows for piece in pieces], [piece.pages for piece in pieces]
        positions = [torch.arange(piece.begin, piece.end) for piece in pieces]
        slots = [
            torch.tensor(piece.pages)[at // size] * size + at % size
            for piece, at in zip(pieces, positions, strict=True)
        ]
        ids = [torch.tensor(piece.ids[piece.begin : piece.end]) for piece in pieces]
        last_rows = torch.tensor(lengths).cumsum(0) - 1
        rows = Rows(*map(self._upload, map(torch.cat, (ids, positions, slots))))
        logit_rows_R = self._upload(torch.tensor(at) if at else last_rows)
        recurrent = None
        if self.pair.target.states is not None:
            known = [(p.num_rows, p.begin, p.state_slot, p.keep, p.kept_slot) for p in pieces]
            recurrent = Pieces(*self._upload(pieces_of(known)))
        layout = Layout.build(lengths, [piece.end for piece in pieces], pages, size)
        with names.range_("plan"):
            for attention in self.attention.distinct:
                attention.plan(layout)
        return self._run_chains(rows, logit_rows_R, self.attention, recurrent, take)

    def _upload(self, x: Tensor) -> Tensor:
        """A copy that nobody waits for."""
        device = self.pair.target.kv_pool.device
        return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x

    def run_padding(self, num_rows: int) -> None:
        """A forward of nobody's rows, without attention, for its kernels alone (`compile_ahead`).
        Mutates: the K/V of the null page."""
        target, device = self.pair.target, self.pair.target.kv_pool.device
        zeros_T = torch.zeros(num_rows, dtype=torch.int64, device=device)
        config, page_size = target.config, self.pair.config.page_size
        unplanned = LayerAttentions.of(
            config, lambda rule: TorchAttention(config, page_size, rule, device)
        )
        nothing = Pieces(*pieces_of([(0, 0, NULL_SLOT, 0, NULL_SLOT)]).to(device))
        self._run_chains(Rows(zeros_T, zeros_T, zeros_T), zeros_T[:1], unplanned, nothing)

    def _run_chains(
        self,
        rows: Rows,
        logit_rows_R: Tensor,
        attention: LayerAttentions,
        pieces: Pieces | None,
        take: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """The target over these rows and the drafter's context of them -> logits_RV."""
        target = self.pair.target
        shape = len(rows.token_ids_T), target.config.num_attention_heads, target.config.head_dim
        attn_TNH = target.kv_pool.new_empty(shape)
        chain, context = prefill_chains(self.pair, rows, logit_rows_R, attention, attn_TNH, pieces)
        (logits_RV,) = run_chain(chain)
        if take is not None:
            take(logits_RV)
        run_chain(context)
        return logits_RV


def _completes(request: Request, piece: Piece) -> bool:
    return piece.end == len(request.prompt_ids)


def _first_tokens(work: Work, logits_RV: Tensor, ids_R: Tensor | None) -> FirstTokens:
    """Those of prompts that this forward completes. Args: ids_R: the first choices, if known."""
    if any(r.chooses for r, _ in work):
        ids_R = _draw(work, logits_RV)
    elif ids_R is None:
        ids_R = argmax_rows(logits_RV)
    scores = None
    asked = [r.logprobs for r, _ in work if r.logprobs is not None]
    if asked:
        scores = score_rows(logits_RV[: len(work)], ids_R[: len(work)], max(asked))
    return FirstTokens.fetch(work, ids_R, scores)


def _draw(work: Work, logits_RV: Tensor) -> Tensor:
    """The token after each piece, drawn or, at temperature 0, its first choice."""
    device, requests = logits_RV.device, [request for request, _ in work]
    position_R = torch.tensor([piece.end - 1 for _, piece in work]).to(device)
    controls = Controls.upload([request.sampling for request in requests], device)
    logits_RV = logits_RV[: len(work)]
    if any(request.sampling.adjusts for request in requests):
        logits_RV = adjust_first(logits_RV, position_R, requests)
    if any(request.matcher is not None for request in requests):
        logits_RV = mask_first(logits_RV, requests)
    return sample_rows(logits_RV, position_R, controls)
