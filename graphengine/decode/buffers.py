"""The tensors that outlive a replay, at fixed addresses, sized for the largest bucket.

Everything else on the device is either weights, the K/V pools, or graph-owned and valid only until
the next replay. A bucket sees the beginning of each tensor's memory: its requests, each with as
many rows as its own block has, so that what a kernel gets is contiguous whatever the block.

Legend: B requests, G rows of a request in a verify (anchor and drafts), T = B * G rows, W pages per
request, N / H query heads / head dim, X words of results.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphengine.config.model import ModelConfig
from graphengine.decode.logprobs import Scores
from graphengine.decode.sampling import Controls
from graphengine.kernels.accept import NUM_RESULTS
from graphengine.kernels.adjust_logits import Tables
from graphengine.kernels.gated_delta import Records


class Arena:
    """Memory by name. Whoever takes a name first decides its size, later takers see its beginning:
    so the largest bucket comes first, and a smaller one moves nothing."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        """Args: dtype: of hidden states."""
        self._device, self.dtype = device, dtype
        self._flat: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """A contiguous tensor at the beginning of the memory of that name; zeros when new."""
        return self._view(name, shape, dtype, self._device)

    def take_on_host(self, name: str, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """The same of the host, pinned where the device is a GPU."""
        on_gpu = self._device.type == "cuda"
        return self._view(name, shape, dtype, "cpu" if on_gpu else self._device, on_gpu)

    def _view(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        where: torch.device | str,
        pin: bool = False,
    ) -> Tensor:
        count = math.prod(shape)
        flat = self._flat.get(name)
        if flat is None:
            flat = self._flat[name] = torch.zeros(count, dtype=dtype, device=where, pin_memory=pin)
        assert count <= flat.numel() and dtype == flat.dtype, name
        return flat[:count].view(shape)

    def clear_(self, *only: str) -> None:
        """Zeroes the memory of these names, or all: then every row is padding. No step may be
        running. Mutates: the memory."""
        for name in only or self._flat:
            self._flat[name].zero_()

    @property
    def num_bytes(self) -> int:
        """Size of all memory, that without bytes (device meta) included."""
        return sum(flat.numel() * flat.element_size() for flat in self._flat.values())


class RecurrentBuffers(NamedTuple):
    """What a block leaves for the recurrent layers (`decode.recurrence`)."""

    slots_B: Tensor  # int32; 0, the null slot, for padding
    kept_slots_B2: Tensor  # int32; of the last states of answers, 0 where none is kept
    records: Records  # of all layers, which come first in each


class Launched:
    """The step that is being launched: its number, and the matchers of its rows that have one."""

    def __init__(self) -> None:
        self.step = 0
        self.matchers: dict[int, Any] = {}


class GrammarBuffers(NamedTuple):
    """What a block gives to the host for its masks, and takes from there (`decode.masks`)."""

    is_on_B: Tensor  # int32; 0: a row without a grammar, or padding
    forced_BG: Tensor  # int64; -1: nothing
    mask_TW: Tensor  # int32, a bit a token; W = ceil(V / 32)
    words_BG: Tensor  # int64 on the host: drafts, as kernels/publish_drafts.py has them
    host_forced_BG: Tensor  # the same two, on the host, as the device was last told
    host_mask_TW: Tensor
    launched: Launched


class StepBuffers(NamedTuple):
    """State of the running block of every request in the bucket.

    `start_B` counts committed tokens (= position of the anchor); 0 marks a padded row, which
    touches only the null page. `positions_T` / `slots_T` belong to the block in `block_ids_BG`;
    the `context_*` pair keeps those of the block verified last, for what the drafter makes of it.
    `results_BX` is memory of the host, pinned, that the accept kernel writes and `rows` reads.
    `own`: what the proposer keeps beside these (`Proposer.buffers`). `tables`, `scores` and
    `grammar` are of engines whose requests may have their logits adjusted, log-probabilities, and
    a grammar.
    """

    block_ids_BG: Tensor  # int64: anchor, MASK, ..; plain decode: the anchor
    draft_ids_BG: Tensor  # int64: anchor, d_1 .. d_{G-1}; plain decode: block_ids_BG itself
    start_B: Tensor  # int32
    step_B: Tensor  # int64: number of the step, equal in all rows
    results_BX: Tensor  # int64 on the host: words of kernels/accept.py
    page_table_BW: Tensor  # int32
    controls: Controls  # read by the end that samples alone
    positions_T: Tensor  # int64
    slots_T: Tensor  # int64
    context_positions_T: Tensor  # int64
    context_slots_T: Tensor  # int64
    attn_TNH: Tensor  # model dtype; the target's attention output
    own: tuple[Tensor, ...]
    recurrent: RecurrentBuffers | None = None
    tables: Tables | None = None
    scores: Scores | None = None
    grammar: GrammarBuffers | None = None

    @classmethod
    def take(
        cls, arena: Arena, target: ModelConfig, num_requests: int, block: int, width: int
    ) -> StepBuffers:
        """Buffers of requests with `block` rows and `width` pages each; padding until written."""
        rows = num_requests * block
        take, f32, i32 = arena.take, torch.float32, torch.int32
        block_ids_BG = take("block_ids", num_requests, block)
        return cls(
            block_ids_BG=block_ids_BG,
            draft_ids_BG=take("draft_ids", num_requests, block) if block > 1 else block_ids_BG,
            start_B=take("start", num_requests, dtype=i32),
            step_B=take("step", num_requests),
            results_BX=arena.take_on_host("results", num_requests, NUM_RESULTS * (block + 1)),
            page_table_BW=take("page_table", num_requests, width, dtype=i32),
            controls=Controls(
                take("temperature", num_requests, dtype=f32),
                take("top_p", num_requests, dtype=f32),
                take("top_k", num_requests, dtype=i32),
                take("seed", num_requests),
                take("min_p", num_requests, dtype=f32),
            ),
            positions_T=take("positions", rows),
            slots_T=take("slots", rows),
            context_positions_T=take("context_positions", rows),
            context_slots_T=take("context_slots", rows),
            attn_TNH=take(
                "attn", rows, target.num_attention_heads, target.head_dim, dtype=arena.dtype
            ),
            own=(),
        )

    @property
    def block(self) -> int:
        """Rows of a request in a verify."""
        return self.block_ids_BG.shape[1]
