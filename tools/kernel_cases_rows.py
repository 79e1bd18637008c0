"""Kernels on rows of hidden states, queries and keys, each beside its compiled reference."""

from collections.abc import Callable
from typing import Any

import torch
from kernel_timing import (
    DEVICE,
    DTYPE,
    EPS,
    MASK,
    MIN_LAUNCHES,
    POSITIONS,
    G,
    H,
    K,
    L,
    N,
    Numbers,
    S,
    compare,
    compiled,
    graph_us,
    num_sets,
)

from graphengine.kernels import accept, add_rms_norm, context_kv, fp8_rows, qk_norm_rope
from graphengine.kernels.fp8 import round_rows_fp8

HIDDEN, WIDTHS = 4096, (4096, 12288, 20480)  # what o, down and fc read


def rope_inputs(T: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rope = torch.randn(POSITIONS, H, device=DEVICE)
    return rope, torch.randint(0, POSITIONS, (T,), device=DEVICE), torch.arange(T, device=DEVICE)


def bench_qk_norm_rope(T: int, baseline: bool = True) -> Numbers:
    num_bytes = 2 * T * (N + 2 * K) * H * DTYPE.itemsize
    sets = num_sets(num_bytes)
    qkv = torch.randn(sets, T, (N + 2 * K) * H, device=DEVICE).to(DTYPE)
    weights = torch.randn(2, H, device=DEVICE).to(DTYPE)
    rope, positions, slots = rope_inputs(T)
    cache = torch.zeros(sets, 2, T // S + 1, S, K, H, dtype=DTYPE, device=DEVICE)

    def launch(fn: Callable[..., Any]) -> Callable[[int], Any]:
        return lambda i: fn(qkv[i], *weights, rope, positions, slots, cache[i], EPS)

    kernel = launch(qk_norm_rope.qk_norm_rope_write_)
    reference = launch(qk_norm_rope.qk_norm_rope_write_reference_)
    q, written = kernel(0), cache[0].clone()
    expected = reference(0), cache[0]
    torch.testing.assert_close((q, written), expected, rtol=2e-2, atol=1e-2)
    if not baseline:
        return {"kernel_us": graph_us(kernel, sets)}
    fast = launch(compiled(qk_norm_rope.qk_norm_rope_write_reference_))
    return compare(kernel, fast, sets, num_bytes)


def bench_context_kv(T: int, baseline: bool = True) -> Numbers:
    num_bytes = 2 * T * L * 2 * K * H * DTYPE.itemsize
    sets = num_sets(num_bytes)
    kv = torch.randn(sets, T, L * 2 * K * H, device=DEVICE).to(DTYPE)
    weight = torch.randn(L, H, device=DEVICE).to(DTYPE)
    rope, positions, slots = rope_inputs(T)
    pool = torch.zeros(sets, L, 2, T // S + 1, S, K, H, dtype=DTYPE, device=DEVICE)

    def launch(fn: Callable[..., Any]) -> Callable[[int], Any]:
        return lambda i: fn(kv[i], weight, rope, positions, slots, pool[i], EPS)

    kernel = launch(context_kv.context_kv_write_)
    kernel(0)
    written = pool[0].clone()
    launch(context_kv.context_kv_write_reference_)(0)
    torch.testing.assert_close(pool[0], written, rtol=2e-2, atol=1e-2)
    if not baseline:
        return {"kernel_us": graph_us(kernel, sets)}
    return compare(
        kernel, launch(compiled(context_kv.context_kv_write_reference_)), sets, num_bytes
    )


def bench_accept(B: int) -> Numbers:
    W = 512
    draft, target = (torch.randint(0, 3, (B, G), device=DEVICE) for _ in range(2))
    table = torch.randint(1, 9999, (B, W), dtype=torch.int32, device=DEVICE)
    start = torch.ones(B, dtype=torch.int32, device=DEVICE)
    block, *rows = (torch.zeros(B * G, dtype=torch.int64, device=DEVICE) for _ in range(5))
    step = torch.zeros(B, dtype=torch.int64, device=DEVICE)
    results = torch.zeros(B, accept.NUM_RESULTS * (G + 1), dtype=torch.int64, device=DEVICE)
    state = (start, table, block.view(B, G), *rows, step, results)

    def launch(fn: Callable[..., Any]) -> Callable[[int], Any]:
        return lambda i: fn(draft, target, *state, MASK, S)

    fast = launch(compiled(accept.accept_and_advance_reference_))
    return compare(launch(accept.accept_and_advance_), fast, MIN_LAUNCHES, 8 * B * 11 * G)


def bench_fp8_rows(T: int, D: int) -> Numbers:
    """One FP8 row, as activations are rounded above 64 rows."""
    num_bytes = 3 * T * D
    sets = num_sets(num_bytes)
    x = torch.randn(sets, T, D, device=DEVICE).to(DTYPE)
    for got, wanted in zip(fp8_rows.round_rows(x[0]), round_rows_fp8(x[0].cpu()), strict=True):
        assert torch.equal(got.cpu().float(), wanted.float())
    fast = compiled(round_rows_fp8)
    return compare(lambda i: fp8_rows.round_rows(x[i]), lambda i: fast(x[i]), sets, num_bytes)


def bench_add_rms_norm_round(T: int, Z: int) -> Numbers:
    """The norm between two FP8 GEMMs; Z partial sums."""
    num_bytes = T * HIDDEN * (2 + 4 * Z + 2 + 1)
    sets = num_sets(num_bytes)
    h = torch.randn(sets, T, HIDDEN, device=DEVICE).to(DTYPE)
    update = torch.randn(sets, Z, T, HIDDEN, device=DEVICE)
    weight = torch.ones(HIDDEN, dtype=DTYPE, device=DEVICE)

    def reference(h: torch.Tensor, update: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h, x = add_rms_norm.add_rms_norm_reference(h, update, weight, EPS)
        return h, *round_rows_fp8(x)

    def kernel(i: int) -> tuple[torch.Tensor, ...]:
        return add_rms_norm.add_rms_norm_round(h[i], update[i], weight, EPS)

    (h_out, rows, _), (wanted_h, wanted, _) = kernel(0), reference(h[0], update[0])
    assert torch.equal(h_out, wanted_h)
    differ = rows.float() != wanted.float()
    assert float(differ.float().mean()) < 1e-2  # the last bit of x decides some
    fast = compiled(reference)
    return compare(kernel, lambda i: fast(h[i], update[i]), sets, num_bytes)
