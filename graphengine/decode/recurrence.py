"""State of a fixed size by request: its pool, its records, and how a chain runs over them.

A verify reads the committed state and never writes it: what it would need to advance is recorded,
and behind acceptance one step applies exactly the accepted rows of every layer (`advance_`). (A
block of one row has none to reject; it advances its state itself, but for the window.) So a
verify can be repeated, a rejected row leaves no trace, and no state is kept by row. The other way,
to fold the pending rows at the start of the next verify, reads a state less (12 of 39 us a step at
batch 1, Qwen3.5-4B, by arithmetic), but puts the fold's serial rows in front of every layer, keeps
records twice, and owes a flush to whoever copies a state; one launch for all layers owes nothing.

An answer also leaves its state every `answer_spacing` tokens, in a launch in front of that step and
by turns in two more slots of its request: its own state may be past the answer's end, by what steps
in flight have added. So the next turn begins at most as many tokens in front of the last answer's
end, or, where the answer was too short to leave a state, behind the last chunk of its prompt.

Slot 0 is the null slot: padding rows, warm-ups and timings use it, and nobody reads what is there.
Invariant: a running request owns one slot; a prompt's first chunk begins from zero by its position,
whatever an earlier owner left, or behind a kept state (`prefix_cache`), which is copied to it.

Legend: L recurrent layers, S slots, B requests, G rows of a block, T rows, R pieces of prompts,
C channels, N / V value heads / head dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from graphengine.config.engine import EngineConfig
from graphengine.config.model import ModelConfig
from graphengine.decode.buffers import Arena, RecurrentBuffers
from graphengine.kernels.gated_delta import Records, gated_delta_commit_, gated_delta_verify_
from graphengine.kernels.gated_delta_prefill import Pieces, gated_delta_prefill_
from graphengine.models.decoder import layer_kinds
from graphengine.models.gated_delta import GatedDeltaWeights, RecurrentState
from graphengine.models.layers import output_gate

NULL_SLOT = 0
KEPT_STATES = 16  # of prompts and answers, for prompts that begin like them
KEPT_SPACING = 2048  # tokens of a long prompt from one to the next; a state weighs as much as 1,536
ANSWER_SPACING = 32  # and of an answer


class States(NamedTuple):
    """The pool of all recurrent layers."""

    windows_LSXC: Tensor  # model dtype: the last columns in front of the convolution
    states_LSNVK: Tensor  # float32


def recurrent_states(config: ModelConfig) -> list[RecurrentState]:
    """The state entries of the layers that have one of a fixed size."""
    entries = [kind.mixer.state(config) for kind in layer_kinds(config)]
    return [entry for entry in entries if isinstance(entry, RecurrentState)]


def state_bytes(config: ModelConfig, element_bytes: int) -> int:
    """Bytes of one slot, all layers."""
    return sum(
        math.prod(entry.window_shape) * element_bytes + math.prod(entry.state_shape) * 4
        for entry in recurrent_states(config)
    )


def num_slots(config: EngineConfig) -> int:
    """The null slot, one for every row that there can be, and those that are kept of prompts."""
    return 1 + max(config.buckets) + KEPT_STATES * config.shares_prefixes


def make_states(
    config: ModelConfig, num_slots: int, dtype: torch.dtype, device: torch.device
) -> States | None:
    """Zeros for that many slots, the null slot among them; None for a target without recurrence."""
    entries = recurrent_states(config)
    if not entries:
        return None
    shape = len(entries), num_slots
    return States(
        torch.zeros(*shape, *entries[0].window_shape, dtype=dtype, device=device),
        torch.zeros(*shape, *entries[0].state_shape, dtype=torch.float32, device=device),
    )


class Recurrence(Protocol):
    """Runs a chain's recurrent layers."""

    def run(self, layer: GatedDeltaWeights, index: int, projected_TE: Tensor, eps: float) -> Tensor:
        """Gated outputs [T, N, V] of recurrent layer `index`, from what it projected."""
        ...


def answer_spacing(page_size: int) -> int:
    """Tokens of an answer from one state that it leaves to the next. With longer blocks none is
    kept, since a step could pass two."""
    return min(page_size, ANSWER_SPACING)


def copy_state_(states: States, source: int, slot: int) -> None:
    """What one slot holds into another. Mutates: the states."""
    for pool in states:
        pool[:, slot] = pool[:, source]


@dataclass(frozen=True, slots=True)
class VerifyRecurrence:
    """Blocks of equal length, from the committed states. Mutates: the records, and the states of
    blocks of one row."""

    states: States
    buffers: RecurrentBuffers

    def run(self, layer: GatedDeltaWeights, index: int, projected_TE: Tensor, eps: float) -> Tensor:
        windows_LSXC, states_LSNVK = self.states
        own = self.buffers
        return gated_delta_verify_(
            projected_TE,
            layer.conv_C14.squeeze(1),
            layer.a_log_N,
            layer.dt_bias_N,
            windows_LSXC[index],
            states_LSNVK[index],
            own.slots_B,
            layer.norm_V,
            eps,
            Records(*(x[index] for x in own.records)),
        )


@dataclass(frozen=True, slots=True)
class PrefillRecurrence:
    """Pieces of prompts, each from its slot's state. Mutates: the states."""

    states: States
    pieces: Pieces
    out_TNV: Tensor

    def run(self, layer: GatedDeltaWeights, index: int, projected_TE: Tensor, eps: float) -> Tensor:
        gated_delta_prefill_(
            projected_TE,
            layer.conv_C14.squeeze(1),
            layer.a_log_N,
            layer.dt_bias_N,
            self.states.windows_LSXC[index],
            self.states.states_LSNVK[index],
            self.pieces,
            self.out_TNV,
        )
        gate = self.states.windows_LSXC.shape[-1]
        gated_TF = output_gate(self.out_TNV, projected_TE, gate, layer.norm_V, eps)
        return gated_TF.view_as(self.out_TNV)


def advance_(
    states: States,
    buffers: RecurrentBuffers,
    first_positions_B: Tensor,
    start_B: Tensor,
    spacing: int,
) -> None:
    """Applies the rows that acceptance has committed, `start - first position` of each request, and
    keeps what is behind a multiple of `spacing` that they pass, unless that is 0. Mutates: the
    states of the requests' slots."""
    slots_B, kept_B2, records = buffers
    gated_delta_commit_(records, *states, slots_B, first_positions_B, start_B, kept_B2, spacing)


def take_buffers(
    arena: Arena, config: ModelConfig, num_requests: int, block: int
) -> RecurrentBuffers | None:
    """A bucket's records and slots; None for a target without recurrence."""
    entries = recurrent_states(config)
    if not entries:
        return None
    own, layers, take = entries[0].config, len(entries), arena.take
    heads, dtype, f32 = own.num_value_heads, arena.dtype, torch.float32
    columns, by_request = entries[0].window_shape[0] + block, (layers, num_requests)
    rows = block if block > 1 else 0  # one row is not rejected: its columns alone are recorded
    return RecurrentBuffers(
        take("state_slots", num_requests, dtype=torch.int32),
        take("kept_slots", num_requests, 2, dtype=torch.int32),
        Records(
            take("delta_raw", *by_request, columns, own.num_channels, dtype=dtype),
            take("delta_keys", *by_request, rows, own.key_size, dtype=f32),
            take("delta_rows", *by_request, rows, heads, own.head_dim, dtype=f32),
            take("delta_gates", *by_request, rows, heads, dtype=f32),
        ),
    )


def prefill_recurrence(
    states: States | None, pieces: Pieces | None, num_rows: int
) -> PrefillRecurrence | None:
    """The recurrence of a prefill of so many rows; rows of no piece give zeros."""
    if states is None:
        return None
    assert pieces is not None
    heads, width = states.states_LSNVK.shape[2:4]
    return PrefillRecurrence(states, pieces, states.windows_LSXC.new_zeros(num_rows, heads, width))


def pieces_of(known: Sequence[tuple[int, ...]]) -> Tensor:
    """What `Pieces` of consecutive rows hold, int32 [6, R] on the host.

    Args: known: of each its number of rows, then position, slot, rows to keep and their slot.
    """
    lengths_R, *others = torch.tensor(known, dtype=torch.int32).T
    ends_R = lengths_R.cumsum(0, dtype=torch.int32)
    return torch.stack([ends_R - lengths_R, ends_R, *others])
