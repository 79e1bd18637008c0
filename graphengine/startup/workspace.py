"""Estimates of what a run takes beside weights, buffers and K/V: activations, graphs, scratch.

Why estimates: these tensors come and go inside a forward, so no builder can be asked. Each formula
counts what is alive at the worst moment, from above; a GPU test compares the sum with what torch
reports (tests/startup/test_memory_on_gpu.py). One that is too low shows as a failed prefill or
capture.
"""

from __future__ import annotations

from typing import Any

import torch

from graphengine.checkpoints.weights import tree_bytes
from graphengine.config.draft import DraftConfig, DraftSpec
from graphengine.config.draft_length import draft_at
from graphengine.config.engine import EngineConfig
from graphengine.config.model import ModelConfig
from graphengine.decode.attention import BlockAttention, ChunkAttention
from graphengine.decode.chunk_sizes import BLOCK, PAIRED_SIZES, is_long
from graphengine.decode.ends import end_names
from graphengine.decode.fixed_chunk import MOST_PROMPTS
from graphengine.decode.flashinfer_attention import FLOAT_WORKSPACE_BYTES
from graphengine.decode.kvcache import page_bytes
from graphengine.decode.prefill import SCORED_ROWS
from graphengine.kernels import chunk_attention
from graphengine.models.decoder import layer_kinds

# FlashInfer allocates this on the device for each wrapper, beside the shared workspace.
FLASHINFER_WRAPPER_BYTES = 8 << 20
# The driver's own memory for an instantiated graph of a few kernels (estimate), and for those of
# some hundred kernels that are a whole step, greedy or sampled.
GRAPH_BYTES = 1 << 20
STEP_GRAPH_BYTES = 4 << 20
# Of a sampled row: 256 int64 sums of its threshold's passes, a candidate token of each chunk.
SAMPLED_ROW_BYTES = 4096
META = torch.device("meta")


def carry_bytes(model: ModelConfig, element_bytes: int) -> int:
    """Bytes of a row, all layers, that cross from a step to the next: residual and query, or what a
    mixer that gates or recurs has projected."""
    total = 0
    for mixer, _ in layer_kinds(model):
        query = model.q_size * element_bytes
        total += model.hidden_size * element_bytes
        is_wide = mixer.gates or mixer.write_state_ is None
        total += mixer.row_bytes(model, element_bytes) if is_wide else query
    return total


def num_dense_steps(model: ModelConfig) -> int:
    """Steps of a forward that are graphs of their own in mode piecewise."""
    num_recurrent = sum(mixer.write_state_ is None for mixer, _ in layer_kinds(model))
    return model.num_hidden_layers + num_recurrent


def forward_bytes(model: ModelConfig, num_rows: int, element_bytes: int) -> int:
    """Most bytes of temporaries alive at once in an eager layer: residual and its norm, what the
    mixer's step gives, and the wider of mixer, ffn and a norm in float32."""
    kinds = set(layer_kinds(model))
    parts = max(part.row_bytes(model, element_bytes) for kind in kinds for part in kind)
    residual = (2 * model.hidden_size + model.q_size) * element_bytes
    return num_rows * (residual + max(parts, 3 * model.hidden_size * 4))


def rounding_bytes(config: EngineConfig, draft: DraftSpec | None, num_rows: int) -> int:
    """Rounding activations in plain torch, as where our kernel does not run, holds three fp32
    copies; the widest are the taps before fc."""
    if not isinstance(draft, DraftConfig) or config.draft_quantization != "fp8-dynamic":
        return 0
    return num_rows * 3 * draft.num_taps * draft.tap_size * 4


def prefill_bytes(
    config: EngineConfig, target: ModelConfig, draft: DraftSpec | None, element_bytes: int
) -> int:
    """A chunk's activations, its taps and context K/V, and the logits of the last rows.

    Where our attention runs long chunks, all of a fixed size, these keep their taps, scored rows
    alone run eagerly, and our kernel rounds.
    """
    rows = min(config.prefill_chunk, max(config.buckets) * config.max_model_len)
    is_fixed = config.prefill_attention_backend == "triton"
    work = forward_bytes(target, rows, element_bytes)
    taps = 0
    if isinstance(draft, DraftConfig):
        hidden = draft.model.hidden_size
        eager = min(SCORED_ROWS, rows) if is_fixed else rows
        taps = eager * draft.num_taps * draft.tap_size * element_bytes
        kv_row = page_bytes(draft.model, 1, element_bytes)
        work = max(work, rows * (2 * hidden * element_bytes + 2 * hidden * 4 + kv_row))
        work = max(work, rounding_bytes(config, draft, rows) * (not is_fixed))
    if config.prefill_attention_backend == "torch":  # gathers keys and values, builds masks
        copies = 2 if target.has_sinks else 1  # one wider
        # Of each window a mask with the rows of a group's heads, and one in the model's dtype.
        masks = len(target.distinct_windows) + copies - 1 + element_bytes
        masked_rows = rows * target.num_attention_heads // target.num_key_value_heads
        per_key = 2 * copies * target.kv_size * element_bytes + masked_rows * masks
        work += config.max_model_len * per_key
    # To adjust first tokens takes two tables and float32 logits, to mask them a copy, to score rows
    # two copies in float32.
    copied = element_bytes * bool(config.structured_outputs)
    adjusted = 12 * bool(config.adjustments)
    logits = min(max(config.buckets), rows) * (element_bytes + adjusted + copied)
    if config.max_logprobs:
        logits = max(logits, min(SCORED_ROWS, rows) * (element_bytes + 8))
    logits *= target.vocab_size
    return work + taps + logits + _fixed_chunk_bytes(config, target, draft, element_bytes)


def _fixed_chunk_bytes(
    config: EngineConfig, target: ModelConfig, draft: DraftSpec | None, element_bytes: int
) -> int:
    """What chunks of a fixed size keep: taps, attention's output and logits of each, the longest
    one's activations in the graphs' pool, and the driver's memory for graphs."""
    if not config.prefill_sizes:
        return 0
    taps, layers = 0, num_dense_steps(target)
    if isinstance(draft, DraftConfig):
        taps = draft.num_taps * draft.tap_size
    kept = (taps + target.q_size) * element_bytes
    if config.graph_mode == "piecewise":  # every layer's carry crosses to the next graph
        kept += carry_bytes(target, element_bytes)
    num_graphs = {"none": 0, "piecewise": layers + 2, "full": STEP_GRAPH_BYTES // GRAPH_BYTES}
    logits = min(MOST_PROMPTS, max(config.buckets)) * target.vocab_size
    each = num_graphs[config.graph_mode] * GRAPH_BYTES + 2 * logits * element_bytes
    sizes = config.prefill_sizes + config.far_prefill_sizes
    total = sum(sizes) * kept + len(sizes) * each
    work = forward_bytes(target, max(config.prefill_sizes), element_bytes)
    return total + (work if config.graph_mode != "none" else 0)


def activation_bytes(
    config: EngineConfig, target: ModelConfig, draft: DraftSpec | None, element_bytes: int
) -> int:
    """A step's temporaries and logits. With graphs: one set for warming up and one for their
    shared pool, carries that stay alive between them, the driver's memory for the graphs.

    Piecewise: every layer's residual and query cross from a graph to the next, in each bucket.
    """
    block = draft.num_verify_rows if draft else 1
    models = [target, *(draft.models if draft else ())]
    rows = max(config.buckets) * block
    logits = rows * target.vocab_size * element_bytes
    work = max(forward_bytes(model, rows, element_bytes) for model in models)
    work = max(work, rounding_bytes(config, draft, rows))
    if config.sampling or config.structured_outputs:
        work += rows * SAMPLED_ROW_BYTES
    # Adjusted logits are in float32; to score a row is to copy it and to take its exponentials.
    copies = bool(config.adjustments) + 3 * (config.max_logprobs > 0)
    work += copies * rows * target.vocab_size * 4
    total = (work + 2 * logits) * (1 if config.graph_mode == "none" else 2)
    num_ends = len(end_names(config))
    if config.graph_mode == "piecewise":
        row = sum(carry_bytes(model, element_bytes) for model in models)
        total += sum(config.buckets) * block * row
        # A step with another end than the greedy one ends in two graphs of its own.
        num_graphs = sum(num_dense_steps(m) + 3 for m in models) + 2 * num_ends - 2
        if config.structured_outputs and not config.plans_attention:  # steps in another order
            num_graphs *= 2
        total += len(config.buckets) * num_graphs * GRAPH_BYTES
    elif config.graph_mode == "full":
        total += len(config.buckets) * num_ends * STEP_GRAPH_BYTES
    return total


def shared_scratch_bytes(config: EngineConfig, target: ModelConfig) -> int:
    """FlashInfer's scratch: one for all buckets, one and each window's wrapper for prefills."""
    prefills, decodes = config.prefill_attention_backend, config.attention_backend
    wrappers = len(target.distinct_windows) * FLASHINFER_WRAPPER_BYTES
    total = FLOAT_WORKSPACE_BYTES + wrappers if prefills == "flashinfer" else 0
    return total + (FLOAT_WORKSPACE_BYTES if decodes == "flashinfer" else 0)


def chunk_scratch_bytes(config: EngineConfig, target: ModelConfig, num_sms: int) -> int:
    """Partial results of the attention of every chunk of a fixed size."""
    shorts = [size for size in config.prefill_sizes if not is_long(size)]
    longs = [*config.far_prefill_sizes]
    for size in filter(is_long, config.prefill_sizes):
        longs += [size // 2] * 2 if size in PAIRED_SIZES else [size]
    made: list[Any] = [
        BlockAttention.make_workspace(target, size // BLOCK, BLOCK, num_sms, META)
        for size in shorts
    ]
    made += [
        ChunkAttention.make_workspace(target, size // chunk_attention.BLOCK, num_sms, META)
        for size in longs
    ]
    return len(target.distinct_windows) * tree_bytes(tuple(made))


def bucket_scratch_bytes(
    config: EngineConfig, target: ModelConfig, draft: DraftSpec | None, width: int, num_sms: int
) -> int:
    """FlashInfer's metadata, or our kernel's partial results: of every bucket, for the verify and
    for each kind of draft layer."""
    total = 0
    for size in config.buckets:
        own = draft_at(config, draft, size) if draft else None
        rows = own.num_verify_rows if own else 1
        kinds = [(target, rows)] * len(target.distinct_windows)
        if own is not None:
            rules = set(own.attention_rules)
            kinds += [(model, own.block_size) for model in own.models for _ in rules]
        if config.attention_backend == "flashinfer":
            total += len(kinds) * (FLASHINFER_WRAPPER_BYTES + size * width * 4)
        elif config.attention_backend == "triton":
            for model, block in kinds:
                made = BlockAttention.make_workspace(model, size, block, num_sms, META)
                total += tree_bytes(made)
    return total
