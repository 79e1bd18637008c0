"""Prefill: runs prompts through the target in chunks, keeping the drafter's context in step.

Eager and uncompiled on every device: a prompt's length is data, and a graph mode must not change
what the prompt's K/V is. The drafter's context K/V of a chunk is written right after the chunk, for
all of its rows; no draft forward is needed until the prompt is complete.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from graphengine import names
from graphengine.capture.runners import run_chain
from graphengine.capture.steps import Step
from graphengine.decode.attention import Attention, Layout, TorchAttention
from graphengine.decode.chains import Drafter, context_chain
from graphengine.decode.chains import tap_writer as make_tap_writer
from graphengine.decode.request import Request
from graphengine.decode.sampling import Controls, sample_rows
from graphengine.decode.segments import Segments, row_logits_segment
from graphengine.decode.stack import Rows, Target, target_chain
from graphengine.kernels.argmax import argmax_rows


@dataclass(frozen=True, slots=True)
class Prefill:
    """What a prefill needs; holds no state of requests."""

    target: Target
    drafter: Drafter | None
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
            pieces: list[tuple[int, int]] = []  # index, rows
            room = self.chunk
            for i, request in enumerate(requests):
                rows = min(len(request.prompt_ids) - done[i], room)
                if rows > 0:
                    pieces.append((i, rows))
                    room -= rows
            if not pieces:
                break
            logits_TV = self._forward(requests, done, pieces)
            for row, (i, rows) in enumerate(pieces):
                done[i] += rows
                if done[i] == len(requests[i].prompt_ids):
                    first_tokens[i] = _pick(requests[i], logits_TV[row : row + 1])
        return torch.cat([first_tokens[i] for i in range(len(requests))]).tolist()

    def _forward(
        self, requests: list[Request], done: list[int], pieces: list[tuple[int, int]]
    ) -> Tensor:
        """One chunk; returns the logits of each piece's last row."""
        device = self.target.kv_pool.device
        ids, positions, slots, last_rows = [], [], [], []
        for i, rows in pieces:
            request, begin = requests[i], done[i]
            ids += request.prompt_ids[begin : begin + rows]
            for position in range(begin, begin + rows):
                page = request.pages[position // self.page_size]
                positions.append(position)
                slots.append(page * self.page_size + position % self.page_size)
            last_rows.append(len(ids) - 1)

        def upload(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)

        rows = Rows(upload(ids), upload(positions), upload(slots))
        layout = Layout.build(
            [rows for _, rows in pieces],
            [done[i] + rows for i, rows in pieces],
            [requests[i].pages for i, _ in pieces],
            self.page_size,
        )
        with names.range_("plan"):
            self.attention.plan(layout)
        return self._run_chains(rows, upload(last_rows), self.attention)

    def run_padding(self, num_rows: int) -> None:
        """A forward of rows that are no request's, without attention, for its kernels alone: what
        it computes, if it is let compute (`compile_ahead`), is nobody's.

        Mutates: the K/V of the null page.
        """
        config, device = self.target.config, self.target.kv_pool.device
        zeros_T = torch.zeros(num_rows, dtype=torch.int64, device=device)
        unplanned = TorchAttention(config, self.page_size, True, device)
        self._run_chains(Rows(zeros_T, zeros_T, zeros_T), zeros_T[:1], unplanned)

    def _run_chains(self, rows: Rows, last_rows_R: Tensor, attention: Attention) -> Tensor:
        """The target over these rows and the drafter's context of them -> logits_RV."""
        config, pool = self.target.config, self.target.kv_pool
        num_rows = rows.token_ids_T.shape[0]
        attn_TNH = pool.new_empty(num_rows, config.num_attention_heads, config.head_dim)
        drafter, segments = self.drafter, Segments()
        tap_ = lambda layer, h_TD: None  # noqa: E731 - the no-op twin of tap_writer
        context: list[Step] = []
        if drafter is not None:
            width = drafter.config.num_taps * config.hidden_size
            taps_TC = pool.new_empty(num_rows, width)
            tap_ = make_tap_writer(drafter.config, taps_TC)
            where = rows.positions_T, rows.slots_T
            context = context_chain(drafter, taps_TC, *where, segments, names.PREFILL_CONTEXT)
        chain = target_chain(
            "prefill",
            self.target,
            rows,
            attention,
            attn_TNH,
            segments,
            tap_,
            partial(row_logits_segment, last_rows_R),
        )
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
