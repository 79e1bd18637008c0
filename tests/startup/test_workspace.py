"""What attention keeps for chunks: what is planned is what is made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from graphengine import TINY_TARGET, Engine
from graphengine.decode import attention
from graphengine.decode.attention import (
    ChunkAttention,
    LayerAttentions,
    Layout,
    TorchAttention,
)
from graphengine.decode.chunk_sizes import LONG_SIZES, PAIRED_SIZES
from graphengine.decode.fixed_chunk import FixedChunk
from graphengine.decode.flashinfer_attention import FLOAT_WORKSPACE_BYTES
from graphengine.decode.kvcache import page_bytes
from graphengine.models import gated_delta
from graphengine.startup.build import read_configs
from graphengine.startup.memory import plan_memory
from graphengine.startup.workspace import (
    FLASHINFER_WRAPPER_BYTES,
    bucket_scratch_bytes,
    chunk_scratch_bytes,
    forward_bytes,
    prefill_bytes,
    shared_scratch_bytes,
    tree_bytes,
)
from tests.startup.test_memory import H200, ON_GPU

NUM_SMS = 132


@pytest.mark.parametrize("size", [*LONG_SIZES, *PAIRED_SIZES])
def test_partial_results_of_a_chunk(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: halves, which split keys that a chunk of both would not, keep partial results that
    nobody planned."""
    made: list[Any] = []
    real = ChunkAttention.make_workspace

    def record(*args: Any) -> Any:
        made.append(real(*args))
        return made[-1]

    is_paired = size in PAIRED_SIZES
    with Engine.from_pretrained(TINY_TARGET, device="cpu", dtype="float32") as engine:
        loop = engine.built.loop
        pair = loop.prefill.pair
        with monkeypatch.context() as patch:
            patch.setattr(attention, "_num_sms", lambda device: NUM_SMS)
            patch.setattr(ChunkAttention, "make_workspace", staticmethod(record))
            FixedChunk(pair, size, is_long=True, is_paired=is_paired)
        config = replace(loop.config, prefill_sizes=(size,), far_prefill_sizes=())
        planned = chunk_scratch_bytes(config, pair.target.config, NUM_SMS)
    assert planned == tree_bytes(tuple(made)) > 0
    assert len(made) == 1 + is_paired


def test_plain_decoding_is_planned_as_by_itself() -> None:
    """Bug: of the buckets that a drafting engine may build to decode plainly, a part is planned for
    nobody: logits and graphs, buffers, or the attention's partial results."""
    config = replace(ON_GPU, attention_backend="triton", prefill_attention_backend="triton")
    config = replace(config, page_size=128, max_model_len=40_900)  # as many pages with a block
    target, draft = read_configs("qwen3-8b", "qwen3-8b-dflash-b16")
    drafted, alone = (
        plan_memory(config, target, drafter, H200, length_is_explicit=True)
        for drafter in (draft, None)
    )
    own = ("activation_bytes", "step_buffer_bytes", "attention_workspace_bytes")
    assert drafted.plain_decode_bytes == sum(getattr(alone, part) for part in own)
    assert alone.plain_decode_bytes == 0 < min(getattr(alone, part) for part in own)


def test_scratch_of_every_window() -> None:
    """Bug: what an attention of each window keeps, in chunks, steps or FlashInfer's own memory, is
    planned once."""
    target, _ = read_configs("gpt-oss-20b", None)
    ours = replace(ON_GPU, attention_backend="triton", prefill_attention_backend="triton")
    ours = replace(ours, prefill_sizes=(16, 128))
    whole = replace(target, windows=())
    for scratch in (
        lambda model: chunk_scratch_bytes(ours, model, NUM_SMS),
        lambda model: bucket_scratch_bytes(ours, model, None, 9, NUM_SMS),
        lambda model: bucket_scratch_bytes(ON_GPU, model, None, 9, NUM_SMS),
    ):
        assert scratch(target) == 2 * scratch(whole) > 0
    more = shared_scratch_bytes(ON_GPU, target) - shared_scratch_bytes(ON_GPU, whole)
    assert more == FLASHINFER_WRAPPER_BYTES


def test_scratch_of_who_plans() -> None:
    """Bug: where FlashInfer runs prefills alone, or steps alone, its scratch is planned twice, or
    the memory that a capture needs is the pool's."""
    target, _ = read_configs("qwen3-8b", None)
    planned = {
        (prefills, decodes): shared_scratch_bytes(
            replace(ON_GPU, prefill_attention_backend=prefills, attention_backend=decodes), target
        )
        for prefills in ("flashinfer", "triton")
        for decodes in ("flashinfer", "triton")
    }
    space = FLOAT_WORKSPACE_BYTES
    assert planned == {
        ("flashinfer", "flashinfer"): 2 * space + FLASHINFER_WRAPPER_BYTES,
        ("flashinfer", "triton"): space + FLASHINFER_WRAPPER_BYTES,
        ("triton", "flashinfer"): space,
        ("triton", "triton"): 0,
    }


def test_masks_of_every_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: of the masks of a prefill's windows, whose rows are those of all heads of a group, the
    plan counts one, of one head."""
    target, _ = read_configs("gpt-oss-20b", None)
    config = replace(ON_GPU, prefill_attention_backend="torch", prefill_chunk=64)
    lengths = [replace(config, max_model_len=length) for length in (1024, 2048)]
    one, two = (prefill_bytes(each, target, None, 2) for each in lengths)
    attended: list[Tensor] = []
    real = F.scaled_dot_product_attention

    def record(*args: Any, attn_mask: Tensor, **rest: Any) -> Tensor:
        attended.append(attn_mask)
        return real(*args, attn_mask=attn_mask, **rest)

    device, dtype = torch.device("cpu"), torch.bfloat16
    attentions = LayerAttentions.of(target, lambda rule: TorchAttention(target, 16, rule, device))
    layout = Layout.build([64], [1024], [list(range(64))], 16)
    cache = torch.zeros(2, 64, 16, target.num_key_value_heads, target.head_dim, dtype=dtype)
    q_TNH = torch.zeros(64, target.num_attention_heads, target.head_dim, dtype=dtype)
    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    sinks_N = torch.zeros(target.num_attention_heads, dtype=dtype)
    for each in attentions.distinct:
        each.plan(layout)
        each.run(q_TNH, cache, torch.empty_like(q_TNH), sinks_N=sinks_N)
    keys = slice(0, 1024)  # without the sink, which widens a mask's copy
    of_one = attended[0][:, keys].numel()
    assert len(attended) == 2
    needed = (2 + 1 + 2) * of_one  # both, a copy, and in bf16
    assert two - one >= needed + 2 * cache.nbytes, "keys and values, gathered and wider for sinks"


def test_first_tokens_that_are_chosen() -> None:
    """Bug: to adjust or to mask the logits of first tokens takes memory that is in no plan, or is
    planned for the other of the two."""
    target, _ = read_configs("qwen3-8b", None)
    config = replace(ON_GPU, sampling=True)
    plain, adjusted, masked, both = (
        prefill_bytes(replace(config, **options), target, None, 2)
        for options in (
            {},
            {"adjustments": True},
            {"structured_outputs": True},
            {"adjustments": True, "structured_outputs": True},
        )
    )
    logits = 16 * 151_936  # of the largest bucket
    assert adjusted - plain == logits * (4 + 4 + 4), "counts, biases and logits, in four bytes"
    assert masked - plain == logits * 2, "a copy in the model's dtype"
    assert both - plain == (adjusted - plain) + (masked - plain)


def test_a_hybrid_s_chunk_is_planned_to_the_byte() -> None:
    """Bug: of a recurrent layer's chunk a part is planned half, which a plan's other parts hide:
    where memory is short a long prompt finds none."""
    target, _ = read_configs("qwen3.5-4b", None)
    columns, values = 8192 + 4096, 4096
    in_model_dtype = (columns + 2 * values) * 2  # projected; what is read and what is gated of it
    in_float32 = (2 * columns + values) * 4  # convolved, and what the solve leaves; the gated norm
    assert gated_delta.row_bytes(target, 2) == in_model_dtype + in_float32
    residual = (2 * target.hidden_size + target.q_size) * 2
    rows = ON_GPU.prefill_chunk
    planned = forward_bytes(target, rows, 2)
    assert planned == rows * (residual + in_model_dtype + in_float32)


def test_activations_of_captured_chunks_are_those_of_the_longest() -> None:
    """Bug: the graphs of chunks share a pool, which is planned for the shortest of them."""
    target, _ = read_configs("qwen3-8b", None)
    config = replace(ON_GPU, graph_mode="full", prefill_attention_backend="triton")
    called, captured = (
        [
            prefill_bytes(replace(config, graph_mode=mode, prefill_sizes=sizes), target, None, 2)
            for sizes in ((16, 512), (16, 2048))
        ]
        for mode in ("none", "full")
    )
    of_pool = [graphs - none for none, graphs in zip(called, captured, strict=True)]
    more = forward_bytes(target, 2048, 2) - forward_bytes(target, 512, 2)
    assert of_pool[1] - of_pool[0] == more > 0


def test_a_context_of_one_token_is_none() -> None:
    """Bug: where room is left for one token, which is no context, one is told to fit."""
    target, _ = read_configs("qwen3-8b", None)
    room = 2 * page_bytes(target, 2, 2)  # the null page, and one for a token and the row behind it
    config = replace(ON_GPU, device="cpu", page_size=2, kv_cache_memory=room, max_model_len=64)
    with pytest.raises(ValueError, match="that fits is 0 tokens; raise --kv-cache-memory or lower"):
        plan_memory(config, target, None, None, length_is_explicit=False)
