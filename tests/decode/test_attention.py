"""Attention backends against a dense formula at odd lengths, with everything unread poisoned.

The dense formula knows no pages: each request's keys are kept as a plain tensor and scattered into
a cache that is NaN everywhere else (other pages, the null page, the rest of the last page).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from graphengine.config.draft import CAUSAL, AttentionRule
from graphengine.config.model import ModelConfig
from graphengine.config.rope import RopeConfig
from graphengine.decode.attention import (
    Attention,
    BlockAttention,
    ChunkAttention,
    LayerAttentions,
    Layout,
    TorchAttention,
)
from graphengine.decode.kvcache import pages_for

CPU = torch.device("cpu")
MODEL = ModelConfig(
    vocab_size=32,
    hidden_size=24,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=10,
    rms_norm_eps=1e-6,
    max_position_embeddings=64,
    tie_word_embeddings=True,
    attention_bias=False,
    rope=RopeConfig(theta=1e4),
)
# (query rows, keys) per request
SHAPES = {
    "one": [(1, 1)],
    "decode": [(1, 17), (1, 3), (1, 16)],
    "block": [(4, 4), (4, 19), (4, 33)],
    "ragged": [(7, 7), (1, 30), (13, 29), (2, 65)],
}


class Case(NamedTuple):
    """Queries, a poisoned cache, where the keys are, and the right answer."""

    q_TNH: Tensor
    kv_cache: Tensor
    qo_lens: list[int]
    kv_lens: list[int]
    pages: list[list[int]]
    expected_TNH: Tensor


def make_case(
    config: ModelConfig,
    shape: list[tuple[int, int]],
    page_size: int,
    causal: bool,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Case:
    generator = torch.Generator().manual_seed(len(shape) + page_size)
    heads, kv_heads, head_dim = (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
    )

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype).float()

    needed = [pages_for(kv_len, page_size) for _, kv_len in shape]
    free = (1 + torch.randperm(sum(needed) + 5, generator=generator)).tolist()
    cache = torch.full((2, len(free) + 1, page_size, kv_heads, head_dim), float("nan"))
    queries, expected, pages = [], [], []
    for (rows, kv_len), count in zip(shape, needed, strict=True):
        q, k, v = normal(rows, heads, head_dim), normal(kv_len, kv_heads, head_dim), None
        v = normal(kv_len, kv_heads, head_dim)
        own = [free.pop() for _ in range(count)]
        for position in range(kv_len):
            cache[0, own[position // page_size], position % page_size] = k[position]
            cache[1, own[position // page_size], position % page_size] = v[position]
        answer = torch.empty(rows, heads, head_dim)
        for row in range(rows):
            place = kv_len - rows + row
            seen = [
                key
                for key in range(kv_len)
                if (key <= place or not causal) and (window is None or abs(key - place) < window)
            ]
            for head in range(heads):
                kv_head = head * kv_heads // heads
                scores = (k[seen, kv_head] @ q[row, head]) * head_dim**-0.5
                weights = scores.exp()
                rest = 0.0 if sinks is None else float(sinks[head].exp())
                answer[row, head] = weights @ v[seen, kv_head] / (weights.sum() + rest)
        queries.append(q)
        expected.append(answer)
        pages.append([*own, free[0]])  # one page more than needed, as reserved ahead
    return Case(
        torch.cat(queries).to(device, dtype),
        cache.to(device, dtype),
        [rows for rows, _ in shape],
        [kv_len for _, kv_len in shape],
        pages,
        torch.cat(expected).to(device),
    )


def attend(
    attention: Attention,
    case: Case,
    page_size: int,
    num_requests: int,
    sinks: Tensor | None = None,
) -> Tensor:
    """Runs with padding behind the real rows; what padding leaves is checked here."""
    rows, padding = len(case.q_TNH), 3
    q = torch.cat(
        [case.q_TNH, torch.full_like(case.q_TNH[:1], float("nan")).expand(padding, -1, -1)]
    )
    out = torch.full_like(q, 77.0)
    attention.plan(Layout.build(case.qo_lens, case.kv_lens, case.pages, page_size, num_requests))
    attention.run(q, case.kv_cache, out, sinks_N=sinks)
    assert (out[rows:] == 77.0).all(), "a row of no request was written"
    return out[:rows].float()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("name", SHAPES)
def test_torch_attention_equals_formula(name: str, page_size: int, causal: bool) -> None:
    """Bug: a key too many or too few at a page's edge, the mask's diagonal off by one, heads mapped
    to the wrong kv head."""
    case = make_case(MODEL, SHAPES[name], page_size, causal)
    attention = TorchAttention(MODEL, page_size, AttentionRule(causal=causal), CPU)
    # Planned twice: the second plan must not remember the first.
    attend(attention, make_case(MODEL, SHAPES["ragged"], page_size, causal), page_size, 4)
    found = attend(attention, case, page_size, len(case.qo_lens) + 2)
    torch.testing.assert_close(found, case.expected_TNH, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 3, 8, 1000])
@pytest.mark.parametrize("name", SHAPES)
def test_torch_windows_equal_formula(name: str, window: int, causal: bool) -> None:
    """Bug T22, T24: a window one key too wide or too narrow, open to the right where it is not, or
    dropped for a single row."""
    case = make_case(MODEL, SHAPES[name], 3, causal, window=window)
    attention = TorchAttention(MODEL, 3, AttentionRule(causal=causal, window=window), CPU)
    found = attend(attention, case, 3, len(case.qo_lens) + 1)
    torch.testing.assert_close(found, case.expected_TNH, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("name", SHAPES)
def test_torch_sinks_equal_formula(name: str, window: int | None) -> None:
    """Bug: a sink goes to another head of its group, adds a value of its own, is scaled as a score
    is, is dropped where one row needs no mask, or is NaN of every key where it is -inf, none."""
    sinks = torch.linspace(-2, 5, MODEL.num_attention_heads)
    sinks[:2] = torch.tensor([-torch.inf, torch.finfo(torch.float32).min])
    case = make_case(MODEL, SHAPES[name], 3, True, window=window, sinks=sinks)
    attention = TorchAttention(MODEL, 3, AttentionRule(causal=True, window=window), CPU)
    found = attend(attention, case, 3, len(case.qo_lens) + 1, sinks)
    torch.testing.assert_close(found, case.expected_TNH, atol=1e-5, rtol=1e-5)


def test_layers_of_a_window_share_an_attention() -> None:
    """Bug: a layer gets another's window; or each layer an attention of its own, so that a step
    plans as many as there are layers."""
    made: list[AttentionRule] = []

    def make(rule: AttentionRule) -> Attention:
        made.append(rule)
        return TorchAttention(MODEL, 3, rule, CPU)

    whole = LayerAttentions.of(replace(MODEL, num_hidden_layers=3), make)
    assert made == [CAUSAL] and whole.layers == whole.distinct * 3
    made.clear()
    found = LayerAttentions.of(replace(MODEL, num_hidden_layers=3, windows=(4, None, 4)), make)
    assert made == [AttentionRule(causal=True, window=4), CAUSAL]
    first, second = found.distinct
    assert found.layers == (first, second, first)


@settings(deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.integers(1, 9), st.integers(0, 40), st.integers(0, 3)), max_size=5
    ),
    page_size=st.integers(1, 17),
    padding=st.integers(0, 4),
)
def test_layout_equals_a_loop(
    requests: list[tuple[int, int, int]], page_size: int, padding: int
) -> None:
    """Bug: prefix sums, the last page's length (never 0 for a full page) or padding are off."""
    qo_lens = [rows for rows, _, _ in requests]
    kv_lens = [rows + context for rows, context, _ in requests]
    pages, page = [], 1
    for kv_len, (_, _, spare) in zip(kv_lens, requests, strict=True):
        count = -(-kv_len // page_size) + spare
        pages.append(list(range(page, page + count)))
        page += count
    layout = Layout.build(qo_lens, kv_lens, pages, page_size, len(requests) + padding)
    qo, kv, last = (layout[i].tolist() for i in (0, 1, 3))
    assert len(qo) == len(kv) == len(requests) + padding + 1
    assert all(tensor.dtype == torch.int32 for tensor in layout)
    for b, (rows, kv_len, owned) in enumerate(zip(qo_lens, kv_lens, pages, strict=True)):
        assert qo[b + 1] - qo[b] == rows
        used = layout.paged_kv_indices_cpu[kv[b] : kv[b + 1]].tolist()
        positions = [(p, i) for p in used for i in range(page_size)]
        positions = positions[: len(positions) - page_size + last[b]]
        expected = [(owned[i // page_size], i % page_size) for i in range(kv_len)]
        assert positions == expected
        assert 1 <= last[b] <= page_size
    assert qo[len(requests) :] == [sum(qo_lens)] * (padding + 1)
    assert kv[len(requests) :] == [len(layout.paged_kv_indices_cpu)] * (padding + 1)


@pytest.mark.parametrize(("rows", "kv_len", "pages"), [(0, 4, 1), (5, 4, 1), (1, 5, 1)])
def test_layout_refuses_nonsense(rows: int, kv_len: int, pages: int) -> None:
    """Bug: more rows than keys, or keys beyond the reserved pages, reach the kernel."""
    with pytest.raises(AssertionError):
        Layout.build([rows], [kv_len], [[1] * pages], 4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_equals_formula_on_a_gpu(dtype: torch.dtype) -> None:
    """Bug: CUDA's attention with a mask answers rows of 64 n + 1 keys wrongly where keys are
    repeated by a stride of 0: the first token of such a prompt in float32 is another."""
    device = torch.device("cuda")
    config = replace(MODEL, num_attention_heads=8, num_key_value_heads=2, head_dim=128)
    attention = TorchAttention(config, 16, CAUSAL, device)
    for keys in (33, 64, 65, 66, 97, 129, 193):
        case = make_case(config, [(keys, keys), (9, keys)], 16, True, device, dtype)
        bound = 1e-5 if dtype == torch.float32 else 2e-2
        found = attend(attention, case, 16, 2)
        torch.testing.assert_close(found, case.expected_TNH, atol=bound, rtol=bound)


@pytest.mark.parametrize("block", [1, 16, 17, 64])
def test_no_two_programs_share_a_multiprocessor(block: int) -> None:
    """Bug: rows of a long block or of many heads are one tile to whoever splits the keys, so that
    programs wait for one another and partials are twice as many."""
    config = replace(MODEL, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    device = torch.device("meta")
    for num_blocks in (1, 2, 3):
        made = BlockAttention.make_workspace(config, num_blocks, block, 132, device)
        of_a_split = num_blocks * 8 * -(-block * 4 // 64)
        assert len(made.lse_ZTN) == 132 // of_a_split


def test_chunks_that_fill_a_gpu_have_no_partial_results() -> None:
    """Bug: keys that are not split have partial results, which are then merged: 33 MB for 2,048
    rows of an 8B."""
    device = torch.device("meta")
    assert ChunkAttention.make_workspace(MODEL, 12, 132, device) is None
    made = ChunkAttention.make_workspace(MODEL, 11, 132, device)
    assert made is not None and len(made.lse_ZTN) == 132 // (11 * MODEL.num_attention_heads)
