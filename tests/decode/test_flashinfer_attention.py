"""FlashInfer's attention equals the formula, with windows and sinks, at any lengths."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graphengine.config.draft import CAUSAL, AttentionRule
from graphengine.decode.attention import Layout, TorchAttention
from graphengine.decode.flashinfer_attention import (
    FlashInferAttention,
    flashinfer_can_window,
    make_workspace,
)
from tests.decode.test_attention import MODEL, SHAPES, attend, make_case

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


@pytest.mark.gpu
@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("window", [None, 40])
def test_flashinfer_sinks_equal_formula(window: int | None, fixed: bool) -> None:
    """Bug: FlashInfer's log-sum-exp is taken to be of base e, or of scores without their scale; or
    rows past the planned ones are scaled as well."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    config = replace(MODEL, num_attention_heads=16, num_key_value_heads=2, head_dim=64)
    size = {"num_requests": 4, "max_pages": 8192} if fixed else {}
    rule = AttentionRule(causal=True, window=window)
    attention = FlashInferAttention(config, 16, rule, make_workspace(device), dtype, **size)
    sinks = torch.linspace(-2, 5, 16)
    for shape in ([(16, 1037), (16, 16), (16, 300)], [(7, 45), (1, 17), (16, 316)]):
        case = make_case(config, shape, 16, True, device, dtype, window, sinks)
        requests = 4 if fixed else len(case.qo_lens)
        found = attend(attention, case, 16, requests, sinks.to(device, dtype))
        torch.testing.assert_close(found, case.expected_TNH, atol=2e-2, rtol=2e-2)
