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
    FlashInferAttention,
    Layout,
    TorchAttention,
    flashinfer_can_window,
    make_workspace,
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
                answer[row, head] = scores.softmax(0) @ v[seen, kv_head]
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


def attend(attention: Attention, case: Case, page_size: int, num_requests: int) -> Tensor:
    """Runs with padding behind the real rows; what padding leaves is checked here."""
    rows, padding = len(case.q_TNH), 3
    q = torch.cat(
        [case.q_TNH, torch.full_like(case.q_TNH[:1], float("nan")).expand(padding, -1, -1)]
    )
    out = torch.full_like(q, 77.0)
    attention.plan(Layout.build(case.qo_lens, case.kv_lens, case.pages, page_size, num_requests))
    attention.run(q, case.kv_cache, out)
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


def test_which_windows_flashinfer_takes() -> None:
    """Bug: a non-causal window that ends inside the block is left to fa2, which never ends it."""

    def takes(*rules: AttentionRule) -> bool:
        return flashinfer_can_window(rules, 8)

    full = AttentionRule(causal=False)
    assert takes(full) and takes(full, AttentionRule(causal=True, window=2))
    assert takes(AttentionRule(causal=False, window=8))
    assert not takes(full, AttentionRule(causal=False, window=7))
    # A plan of more rows than a tile could leave out the block's last keys.
    assert not flashinfer_can_window([AttentionRule(causal=False, window=99)], 17)
    assert flashinfer_can_window([AttentionRule(causal=True, window=99)], 17)


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


# --- FlashInfer ---

BIG_SHAPES = SHAPES | {
    "long": [(16, 1037), (16, 16), (16, 300)],
    "prefill": [(129, 129), (65, 700)],
}


@pytest.mark.gpu
@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (4, 2, 64), (6, 3, 128)])
def test_flashinfer_equals_formula(
    heads: int, kv_heads: int, head_dim: int, causal: bool, fixed: bool
) -> None:
    """Bug: the plan is not made for these lengths, padded requests corrupt the merge, or what
    lies behind the last key of the last page is read (NaN there)."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    config = replace(
        MODEL, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim
    )
    for page_size in (1, 16):
        # One wrapper for all shapes: a plan must not remember the one before.
        size = {"num_requests": 7, "max_pages": 4096} if fixed else {}
        rule = AttentionRule(causal=causal)
        attention = FlashInferAttention(
            config, page_size, rule, make_workspace(device), dtype, **size
        )
        reference = TorchAttention(config, page_size, rule, device)
        # The fixed wrapper is planned first at its largest: rows never exceed the first plan.
        names = sorted(BIG_SHAPES, key=lambda n: -sum(rows for rows, _ in BIG_SHAPES[n]))
        for name in names:
            case = make_case(config, BIG_SHAPES[name], page_size, causal, device, dtype)
            requests = 7 if fixed else len(case.qo_lens)
            found = attend(attention, case, page_size, requests)
            torch.testing.assert_close(found, case.expected_TNH, atol=2e-2, rtol=2e-2)
            close = attend(reference, case, page_size, requests)
            assert (found - close).abs().max() <= 2e-2


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


@pytest.mark.gpu
@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [16, 40, 300])
def test_flashinfer_windows_equal_formula(window: int, causal: bool, fixed: bool) -> None:
    """Bug T24: window_left off by one, dropped for non-causal rows, or planned for other chunks
    than the kernel reads."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    config = replace(MODEL, num_attention_heads=8, num_key_value_heads=2, head_dim=128)
    shapes = [[(16, 1037), (16, 16), (16, 300)], [(16, 4000)], [(7, 45), (16, 17), (16, 316)]]
    for page_size in (1, 16):
        size = {"num_requests": 4, "max_pages": 8192} if fixed else {}
        workspace = make_workspace(device)
        rule = AttentionRule(causal=causal, window=window)
        attention = FlashInferAttention(config, page_size, rule, workspace, dtype, **size)
        for shape in shapes:
            case = make_case(config, shape, page_size, causal, device, dtype, window)
            requests = 4 if fixed else len(case.qo_lens)
            found = attend(attention, case, page_size, requests)
            torch.testing.assert_close(found, case.expected_TNH, atol=2e-2, rtol=2e-2)


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


@pytest.mark.gpu
@pytest.mark.parametrize("fixed", [True, False])
def test_flashinfer_plans_ahead_of_a_busy_gpu(fixed: bool) -> None:
    """Bug: with the GPU a chunk behind, the next chunk's plan overwrites the pinned memory from
    which this one's is still to be copied; long prompts get wrong K/V or an illegal address."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    config = replace(MODEL, num_attention_heads=8, num_key_value_heads=2, head_dim=128)
    shapes = [[(16, 1037), (16, 16), (16, 300)], [(16, 4000)], [(7, 45), (1, 17), (16, 316)]]
    cases = [make_case(config, shape, 16, True, device, dtype) for shape in shapes]
    size = {"num_requests": 4, "max_pages": 8192} if fixed else {}
    attention = FlashInferAttention(config, 16, CAUSAL, make_workspace(device), dtype, **size)
    for is_warm in (False, True):
        found = [torch.empty_like(case.q_TNH) for case in cases]
        torch.cuda.synchronize()
        if is_warm:
            torch.cuda._sleep(200_000_000)  # clock cycles, about 0.1 s
        for case, out in zip(cases, found, strict=True):
            requests = 4 if fixed else len(case.qo_lens)
            layout = Layout.build(case.qo_lens, case.kv_lens, case.pages, 16, requests)
            attention.plan(layout)
            attention.run(case.q_TNH, case.kv_cache, out)
        for case, out in zip(cases, found, strict=True):
            torch.testing.assert_close(out.float(), case.expected_TNH, atol=2e-2, rtol=2e-2)
