"""Prefill: runs prompts through the target in chunks, keeping the drafter's context in step.

Eager and uncompiled on every device: a prompt's length is data, and a graph mode must not change
what the prompt's K/V is. The drafter's context of a chunk is written right after the chunk, for all
of its rows; no draft forward is needed until the prompt is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from graphengine import names
from graphengine.capture.runners import run_chain
from graphengine.decode.attention import Attention, Layout, TorchAttention
from graphengine.decode.proposer import Proposer
from graphengine.decode.request import Request
from graphengine.decode.sampling import Controls, sample_rows
from graphengine.decode.segments import Segments, row_logits_segment
from graphengine.decode.stack import Rows, Target, target_chain
from graphengine.kernels.argmax import argmax_rows


class Piece(NamedTuple):
    """Rows begin .. end - 1 of a sequence, whose earlier rows have been run."""

    ids: Sequence[int]
    begin: int
    end: int
    pages: list[int]


@dataclass(frozen=True, slots=True)
class Prefill:
    """What a prefill needs; holds no state of requests."""

    target: Target
    proposer: Proposer
    attention: Attention
    page_size: int
    chunk: int

    def run(self, requests: list[Request]) -> list[int]:
        """Writes the K/V of every prompt and picks each first token. Waits for the device.

        Args:
            requests: with pages reserved; all are run together, at most `chunk` rows a forward.

        Returns:
            The first token of each request, in order.
        """
        first_tokens: dict[int, Tensor] = {}
        done = [0] * len(requests)
        while True:
            pieces: dict[int, Piece] = {}  # by index of the request
            room = self.chunk
            for i, request in enumerate(requests):
                begin, ids = done[i], request.prompt_ids
                done[i] = min(len(ids), begin + room)
                room -= done[i] - begin
                if done[i] > begin:
                    pieces[i] = Piece(ids, begin, done[i], request.pages)
            if not pieces:
                break
            logits_RV = self.logits(list(pieces.values()))
            for row, i in enumerate(pieces):
                if done[i] == len(requests[i].prompt_ids):
                    first_tokens[i] = _pick(requests[i], logits_RV[row : row + 1])
        return torch.cat([first_tokens[i] for i in range(len(requests))]).tolist()

    def logits(self, pieces: list[Piece], rows: Sequence[int] | None = None) -> Tensor:
        """One forward of these pieces -> logits [R, V] of `rows`, by default each piece's last.

        Mutates: the K/V of the rows, and what the proposer keeps of them.
        """
        size, device = self.page_size, self.target.kv_pool.device
        ids, positions, slots, last_rows = [], [], [], []
        for piece in pieces:
            ids += piece.ids[piece.begin : piece.end]
            for position in range(piece.begin, piece.end):
                positions.append(position)
                slots.append(piece.pages[position // size] * size + position % size)
            last_rows.append(len(ids) - 1)

        def upload(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)

        layout = Layout.build(
            [piece.end - piece.begin for piece in pieces],
            [piece.end for piece in pieces],
            [piece.pages for piece in pieces],
            size,
        )
        with names.range_("plan"):
            self.attention.plan(layout)
        where = Rows(upload(ids), upload(positions), upload(slots))
        return self._run_chains(where, upload(rows or last_rows), self.attention)

    def run_padding(self, num_rows: int) -> None:
        """A forward of rows that are no request's, without attention, for its kernels alone: what
        it computes, if it is let compute (`compile_ahead`), is nobody's.

        Mutates: the K/V of the null page.
        """
        device = self.target.kv_pool.device
        zeros_T = torch.zeros(num_rows, dtype=torch.int64, device=device)
        unplanned = TorchAttention(self.target.config, self.page_size, True, device)
        self._run_chains(Rows(zeros_T, zeros_T, zeros_T), zeros_T[:1], unplanned)

    def _run_chains(self, rows: Rows, logit_rows_R: Tensor, attention: Attention) -> Tensor:
        """The target over these rows and the drafter's context of them -> logits_RV."""
        config, segments = self.target.config, Segments()
        heads = config.num_attention_heads, config.head_dim
        attn_TNH = self.target.kv_pool.new_empty(rows.token_ids_T.shape[0], *heads)
        tap_, context = self.proposer.prefill(rows, segments)
        end = partial(row_logits_segment, logit_rows_R)
        chain = target_chain("prefill", self.target, rows, attention, attn_TNH, segments, tap_, end)
        (logits_RV,) = run_chain(chain)
        run_chain(context)
        return logits_RV


def _pick(request: Request, logits_1V: Tensor) -> Tensor:
    """The token after a prompt's last row: int64 [1]."""
    if request.sampling.is_greedy:
        return argmax_rows(logits_1V)
    device = logits_1V.device
    position = torch.tensor([len(request.prompt_ids) - 1]).to(device)
    return sample_rows(logits_1V, position, Controls.upload([request.sampling], device))
