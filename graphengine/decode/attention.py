"""Attention over the paged cache: plan once per forward, run once per layer.

Backends with one interface: `TorchAttention` (any device and dtype; the reference),
`FlashInferAttention` (its own file; fa2, GPU, bf16), and our Triton kernels, which plan nothing.
Queries are ragged rows grouped by request; the last stands at its request's last key, and
`config.draft.AttentionRule` says which keys each sees.

Invariant: `plan` has run for exactly the current lengths before `run`.

Legend: T rows, N / K / H query heads / kv heads / head dim, S page size.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from graphengine.config.draft import AttentionRule
from graphengine.config.model import ModelConfig
from graphengine.decode.kvcache import pages_for
from graphengine.kernels import chunk_attention, merge_splits, output_gate
from graphengine.kernels.block_attention import Workspace, block_attention, choose_num_splits
from graphengine.kernels.block_attention import workspace as block_workspace

LEAST_SINK = -1e30  # of which nothing is left beside any key


class Layout(NamedTuple):
    """Which rows and pages belong to which of B requests, on the host, int32.

    A padded request has no query rows and no pages: attention touches nothing for it.
    """

    qo_indptr_cpu: Tensor  # [B + 1]
    paged_kv_indptr_cpu: Tensor  # [B + 1]
    paged_kv_indices_cpu: Tensor  # pages of all requests, one behind the other
    paged_kv_last_page_len_cpu: Tensor  # [B]

    @classmethod
    def build(
        cls,
        qo_lens: Sequence[int],
        kv_lens: Sequence[int],
        pages: Sequence[Sequence[int]],
        page_size: int,
        num_requests: int | None = None,
    ) -> Layout:
        """Packs lengths and pages.

        Args:
            qo_lens: query rows per request.
            kv_lens: keys per request, the block included.
            pages: each request's pages; those past kv_lens are left out. Those of an `array("i")`
                are copied at once, where a list is read number by number.
            num_requests: pads with empty requests up to this number.
        """
        padding = (num_requests or len(qo_lens)) - len(qo_lens)
        used = [pages_for(n, page_size) for n in kv_lens]
        qo, kv, indices, last = [0], [0], array("i"), list[int]()
        for length, kv_len, count, owned in zip(qo_lens, kv_lens, used, pages, strict=True):
            assert 0 < length <= kv_len and len(owned) >= count
            qo.append(qo[-1] + length)
            kv.append(kv[-1] + count)
            indices += array("i", owned[:count])
            last.append(kv_len - (count - 1) * page_size)
        qo += [qo[-1]] * padding
        kv += [kv[-1]] * padding
        last += [0] * padding
        as_int32 = functools.partial(torch.tensor, dtype=torch.int32)
        indices_cpu = torch.from_numpy(np.asarray(indices))
        return cls(as_int32(qo), as_int32(kv), indices_cpu, as_int32(last))


class Attention(Protocol):
    """Plans for a layout, then attends in any layer of one rule."""

    def plan(self, layout: Layout) -> None:
        """Prepares for `layout`; host work only, plus small asynchronous copies."""
        ...

    def run(
        self,
        q_TNH: Tensor,
        kv_cache: Tensor,
        out_TNH: Tensor,
        gate_TE: Tensor | None = None,
        sinks_N: Tensor | None = None,
    ) -> None:
        """`out = softmax(q k^T / sqrt(H)) v`. Mutates: out_TNH, the planned rows only.

        Args:
            kv_cache: [2, num_pages, S, K, H] of one layer.
            gate_TE: [T, E] or partial sums [Z, T, E], whose last columns gate: `out *= sigmoid`.
            sinks_N: a logit of each head that joins the softmax, without a value.
        """
        ...


class LayerAttentions(NamedTuple):
    """A target's attention: one of each rule, by layer."""

    layers: tuple[Attention, ...]

    @classmethod
    def of(cls, config: ModelConfig, make: Callable[[AttentionRule], Attention]) -> LayerAttentions:
        """Causal attention, of each window of the layers once."""
        windows = config.windows or (None,) * config.num_hidden_layers
        rules = [AttentionRule(causal=True, window=window) for window in windows]
        made = {rule: make(rule) for rule in dict.fromkeys(rules)}
        return cls(tuple(made[rule] for rule in rules))

    @property
    def distinct(self) -> tuple[Attention, ...]:
        """Each once: what is planned."""
        return tuple(dict.fromkeys(self.layers))


class TorchAttention:
    """Gathers each request's keys and calls scaled_dot_product_attention."""

    def __init__(
        self, config: ModelConfig, page_size: int, rule: AttentionRule, device: torch.device
    ):
        self._page_size, self._rule, self._device = page_size, rule, device
        self._group = config.num_attention_heads // config.num_key_value_heads
        self._requests: list[tuple[slice, Tensor, Tensor | None]] = []

    def plan(self, layout: Layout) -> None:
        size, causal, window = self._page_size, self._rule.causal, self._rule.window
        qo, kv = layout.qo_indptr_cpu.tolist(), layout.paged_kv_indptr_cpu.tolist()
        last = layout.paged_kv_last_page_len_cpu.tolist()
        offsets = torch.arange(size)
        self._requests = []
        for b, kv_tail in enumerate(last):
            num_rows, num_pages = qo[b + 1] - qo[b], kv[b + 1] - kv[b]
            if num_rows == 0:
                continue
            kv_len = (num_pages - 1) * size + kv_tail
            pages = layout.paged_kv_indices_cpu[kv[b] : kv[b + 1]].long()
            slots = (pages[:, None] * size + offsets).flatten()[:kv_len].to(self._device)
            mask = None
            if (causal and num_rows > 1) or window is not None:
                position = torch.arange(kv_len)
                behind = position[-num_rows:, None] - position
                mask = (behind >= 0) | (not causal)
                mask &= behind.abs() < (window or kv_len)
                mask = mask.repeat(self._group, 1).to(self._device)
            self._requests.append((slice(qo[b], qo[b + 1]), slots, mask))

    def run(
        self,
        q_TNH: Tensor,
        kv_cache: Tensor,
        out_TNH: Tensor,
        gate_TE: Tensor | None = None,
        sinks_N: Tensor | None = None,
    ) -> None:
        k_all, v_all = kv_cache.flatten(1, 2).unbind(0)
        for rows, slots, mask in self._requests:
            q = q_TNH[rows].transpose(0, 1)
            k = k_all[slots].transpose(0, 1)
            v = v_all[slots].transpose(0, 1)
            # Rows of a group's heads one behind the other, against its keys: grouped heads without
            # copies of the keys. Keys repeated by a stride of 0 are wrong: CUDA's kernel for masks
            # then gets rows of 64 n + 1 keys wrong (torch 2.11; pytorch issue 191937).
            grouped = q.unflatten(0, (-1, self._group)).flatten(1, 2)[None]
            head_dim, scale = q.shape[-1], None
            if sinks_N is not None:
                scale = head_dim**-0.5
                grouped, k, v, mask = _with_sink(grouped, k, v, mask, sinks_N)
            attended = F.scaled_dot_product_attention(
                grouped, k[None], v[None], attn_mask=mask, scale=scale
            )
            out_TNH[rows] = attended[..., :head_dim].reshape(q.shape).transpose(0, 1)
            gate_rows_(out_TNH[rows], gate_TE if gate_TE is None else gate_TE[..., rows, :])


def _with_sink(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks_N: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Wider heads, and one key more whose value is 0. In the new columns the other keys are 0, and
    the first of them makes a row's score with the new key the sink of its head; so one mask does
    for all heads. A sink of -inf is none, and is clamped since -inf times 0 is NaN."""
    num_heads, _, head_dim = k.shape
    num_rows = q.shape[2] * num_heads // len(sinks_N)
    q, k, v = (F.pad(x, (0, 8, 0, more)) for x, more in ((q, 0), (k, 1), (v, 1)))
    sinks = sinks_N.clamp(LEAST_SINK).view(num_heads, -1)
    q[0, :, :, head_dim] = sinks.repeat_interleave(num_rows, 1)
    q[..., head_dim] *= head_dim**0.5
    k[:, -1, head_dim] = 1.0
    return q, k, v, mask if mask is None else F.pad(mask, (0, 1), value=True)


def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


class BlockAttention:
    """Our split-KV kernel over blocks of equal length; lengths are read on the device, no plan.

    Block b, a request's or a piece of a prompt (`fixed_chunk`), stands at positions start_B[b] ..
    and sees its keys through row b of the page table.
    """

    def __init__(
        self,
        config: ModelConfig,
        rule: AttentionRule,
        page_table_BW: Tensor,
        start_B: Tensor,
        block: int,
        padded: int = 0,
    ) -> None:
        """Args: padded: the start of a block that is none."""
        self._block, self._rule, self._padded = block, rule, padded
        self._page_table_BW, self._start_B = page_table_BW, start_B
        num_sms = _num_sms(start_B.device)
        self._workspace = self.make_workspace(config, len(start_B), block, num_sms, start_B.device)

    @staticmethod
    def make_workspace(
        config: ModelConfig, num_blocks: int, block: int, num_sms: int, device: torch.device
    ) -> Workspace:
        """Partial results of the blocks."""
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        num_splits = choose_num_splits(num_blocks, kv_heads, num_sms, block * (heads // kv_heads))
        return block_workspace(num_blocks, block, heads, config.head_dim, num_splits, device)

    def plan(self, layout: Layout) -> None:
        """Nothing to do: the lengths are on the device."""

    def run(
        self,
        q_TNH: Tensor,
        kv_cache: Tensor,
        out_TNH: Tensor,
        gate_TE: Tensor | None = None,
        sinks_N: Tensor | None = None,
    ) -> None:
        block_attention(
            q_TNH,
            kv_cache,
            self._page_table_BW,
            self._start_B,
            self._block,
            self._rule.causal,
            out_TNH,
            self._workspace,
            window=self._rule.window,
            padded=self._padded,
            gate_TE=gate_TE,
            sinks_N=sinks_N,
        )


class ChunkAttention:
    """Our kernel for blocks of many rows of a prompt, where it `takes` them; nothing to plan."""

    def __init__(
        self, config: ModelConfig, rule: AttentionRule, page_table_BW: Tensor, start_B: Tensor
    ) -> None:
        """Args: rule: a causal one. start_B: -1 for a block without a prompt."""
        assert rule.causal
        self._window, self._page_table_BW, self._start_B = rule.window, page_table_BW, start_B
        num_sms = _num_sms(start_B.device)
        self._partials = self.make_workspace(config, len(start_B), num_sms, start_B.device)

    @staticmethod
    def make_workspace(
        config: ModelConfig, num_blocks: int, num_sms: int, device: torch.device
    ) -> merge_splits.Workspace | None:
        """Partial results, where so few blocks have their keys split."""
        heads = config.num_attention_heads
        num_splits = chunk_attention.choose_num_splits(num_blocks, heads, num_sms)
        if num_splits == 1:
            return None
        rows = num_blocks * chunk_attention.BLOCK
        return merge_splits.workspace(rows, heads, config.head_dim, num_splits, device)

    def plan(self, layout: Layout) -> None:
        """Nothing to do: the lengths are on the device."""

    def run(
        self,
        q_TNH: Tensor,
        kv_cache: Tensor,
        out_TNH: Tensor,
        gate_TE: Tensor | None = None,
        sinks_N: Tensor | None = None,
    ) -> None:
        chunk_attention.chunk_attention(
            q_TNH,
            kv_cache,
            self._page_table_BW,
            self._start_B,
            out_TNH,
            self._partials,
            window=self._window,
            sinks_N=sinks_N,
        )
        gate_rows_(out_TNH, gate_TE)


def gate_rows_(out_TNH: Tensor, gate_TE: Tensor | None) -> None:
    """`out *= sigmoid(gate)`, if there is a gate. Mutates: out_TNH."""
    if gate_TE is not None:
        output_gate.gate_(out_TNH, gate_TE)
