"""FlashInfer's attention, fa2: planned once per forward, run once per layer. The only importer of
flashinfer, but for `flashinfer_internals`.

Backend fa2 is passed by name: "auto" picks fa3 on Hopper, which packs no GQA heads and splits no
KV; at 4k tokens it took 57.7 us against 14.3 us on an H200. Planning from an upper bound gives
wrong results in flashinfer 0.6.12 (an empty planned chunk corrupts the merge).

Legend: T rows, N / H query heads / head dim.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphengine.config.draft import AttentionRule, DraftSpec
from graphengine.config.model import ModelConfig
from graphengine.decode import flashinfer_internals
from graphengine.decode.attention import Layout, gate_rows_

FLASHINFER_HEAD_DIMS = (64, 128, 256)
FA2_MIN_ROWS = 16  # of a tile of queries
FLOAT_WORKSPACE_BYTES = 256 << 20
LN2 = math.log(2.0)


class FlashInferAttention:
    """FlashInfer's paged prefill kernel, fa2.

    With `num_requests` the wrapper's metadata has fixed addresses, so that a captured launch stays
    valid when `plan` runs before each replay; eager calls use the same wrapper, so all graph modes
    run the same kernel with the same plan. Without it (prefill) sizes are free.

    A plan's copies leave from pinned memory that the wrapper uses again (0.6.12, scheduler.cuh), so
    a plan first waits for those of the one before: in a prefill's queue of chunks one's kernels
    would run with the next one's tiles, silently or into an illegal address.

    A window is fa2's `window_left`, which counts keys before the row's own and is applied whatever
    the causality (0.6.12, variants.cuh). For non-causal rows it is exact within two limits: there
    is no end to the right, so the window must reach over the block; and a split plan holds
    `window_left` keys and a tile of rows, so the block must fit the smallest tile (scheduler.cuh).
    """

    def __init__(
        self,
        config: ModelConfig,
        page_size: int,
        rule: AttentionRule,
        workspace: Tensor,
        dtype: torch.dtype,
        num_requests: int | None = None,
        max_pages: int = 0,
    ):
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self._config, self._page_size, self._rule = config, page_size, rule
        self._dtype, self._device = dtype, workspace.device
        self._num_rows = 0
        # Behind the last plan's copies; a stand-in for the wrapper may be planned on the CPU.
        self._copied = torch.cuda.Event() if workspace.is_cuda else None
        fixed: dict[str, Any] = {}
        if num_requests is not None:
            sizes = {
                "qo_indptr_buf": num_requests + 1,
                "paged_kv_indptr_buf": num_requests + 1,
                "paged_kv_indices_buf": max_pages,
                "paged_kv_last_page_len_buf": num_requests,
            }
            fixed = {k: workspace.new_zeros(n, dtype=torch.int32) for k, n in sizes.items()}
            fixed["use_cuda_graph"] = True
        self._wrapper: Any = BatchPrefillWithPagedKVCacheWrapper(
            workspace, "NHD", backend="fa2", **fixed
        )

    def plan(self, layout: Layout) -> None:
        config = self._config
        self._num_rows = int(layout.qo_indptr_cpu[-1])
        if self._copied is not None:
            self._copied.synchronize()  # at once before the first
        # The planner reads lengths on the host but copies the indices to the device; from pageable
        # host memory it would wait for the stream, so they are sent ahead.
        indices = layout.paged_kv_indices_cpu.to(self._device, non_blocking=True)
        self._wrapper.plan(
            layout.qo_indptr_cpu,
            layout.paged_kv_indptr_cpu,
            indices,
            layout.paged_kv_last_page_len_cpu,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            self._page_size,
            causal=self._rule.causal,
            window_left=(self._rule.window or 0) - 1,  # -1: none
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )
        if self._copied is not None:
            self._copied.record()

    def run(
        self,
        q_TNH: Tensor,
        kv_cache: Tensor,
        out_TNH: Tensor,
        gate_TE: Tensor | None = None,
        sinks_N: Tensor | None = None,
    ) -> None:
        if not self._num_rows:  # not planned yet: no rows
            return
        # flashinfer takes planned rows alone, so no padding; a capture is planned for all rows.
        planned = slice(self._num_rows)
        q_TNH, out_TNH = q_TNH[planned], out_TNH[planned]
        # Passing out= matters: without it 0.6.12 allocates and zero-fills in every layer.
        cache = kv_cache[0], kv_cache[1]
        if sinks_N is None:
            self._wrapper.run(q_TNH, cache, out=out_TNH)
        else:
            # What a sink takes is known afterwards: e^lse of e^lse + e^sink is left, lse base 2.
            _, lse_TN = self._wrapper.run(q_TNH, cache, out=out_TNH, return_lse=True)
            out_TNH *= torch.sigmoid(lse_TN * LN2 - sinks_N)[..., None]
        gate_rows_(out_TNH, gate_TE if gate_TE is None else gate_TE[..., planned, :])


def compile_flashinfer_ahead(
    dtype: torch.dtype, target: ModelConfig, draft: DraftSpec | None
) -> threading.Event:
    """Starts FlashInfer's compiler beside everything else; a cold one takes half a minute.

    It is a subprocess that makes no CUDA call, so it may run while weights load, segments compile
    and graphs are captured. Whoever plans first waits for its lock. What fails here is left to fail
    there, where it has a caller.

    Args: draft: None where it does not attend with FlashInfer.

    Returns:
        Set once FlashInfer's modules are imported, or cannot be, which takes a second: whoever
        imports them, or much else of torch, waits for it.
    """
    kinds = {(target.head_dim, window is not None) for window in target.distinct_windows}
    if draft is not None:
        windowed = {rule.window is not None for rule in draft.attention_rules}
        kinds |= {(model.head_dim, has) for model in draft.models for has in windowed}
    imported = threading.Event()

    def build() -> None:
        modules: list[Any] = []
        try:
            modules = [flashinfer_internals.planned_module(dtype, *kind) for kind in sorted(kinds)]
        except Exception as error:
            logging.getLogger(__name__).warning("FlashInfer compiles nothing ahead: %s", error)
        finally:
            imported.set()
        for module in modules:
            with contextlib.suppress(Exception):
                flashinfer_internals.build(module)

    threading.Thread(target=build, name="flashinfer-compiler", daemon=True).start()
    return imported


def flashinfer_can_window(rules: Sequence[AttentionRule], block: int) -> bool:
    """Whether fa2's windows are exactly these rules for a block of that many rows."""
    return all(r.window is None or r.causal or block <= min(r.window, FA2_MIN_ROWS) for r in rules)


def flashinfer_missing() -> bool:
    """Whether the `cuda` extra is not installed."""
    return importlib.util.find_spec("flashinfer") is None


def make_workspace(device: torch.device) -> Tensor:
    """FlashInfer's scratch for split-KV partials; wrappers on one stream share it."""
    return torch.zeros(FLOAT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
