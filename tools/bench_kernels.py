"""Time kernels inside a CUDA graph, beside torch.compile or FlashInfer, and sweep its sizes.

Why inside a graph: that is where the engine runs them; one launch at a time would measure the
host. Each graph holds at least 20 launches over buffers that together exceed the L2 cache twice,
and the median of the replays is divided by the number of launches.
Invariant: a kernel and its baseline see the same tensors, and the kernel's result is checked in the
same run (accept: in tests/kernels only); a fast wrong kernel would otherwise win.

    python tools/bench_kernels.py                                   # all kernels, about 3 minutes
    python tools/bench_kernels.py --kernels block_attention --batch 1 --kv 128 1024
    python tools/bench_kernels.py --kernels fp8_rows add_rms_norm_round --batch 8 16
    python tools/bench_kernels.py --sweep block_attention --kv 400 1024 8192   # about a minute
    python tools/bench_kernels.py --kernels chunk_attention --kv 1024 8192 32768
    python tools/bench_kernels.py --sweep chunk_attention --kv 1024 8192 32768
    python tools/bench_kernels.py --kernels pieces --kv 1024 2048 8192 16384 32768
    python tools/bench_kernels.py --out profiles/results/kernels.json

Needs a CUDA device. The last line of stdout is one JSON object. Shapes are Qwen3-8B's with a
block of 16: 32 query heads, 8 kv heads, head_dim 128, vocabulary 151936, hidden 4096; pages of 128.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch

from graphengine.decode.sampling import Controls, Sampling, sample_rows
from graphengine.kernels import (
    accept,
    add_rms_norm,
    argmax,
    block_attention,
    chunk_attention,
    context_kv,
    filter_threshold,
    fp8_rows,
    gumbel_argmax,
    merge_splits,
    qk_norm_rope,
)
from graphengine.kernels.block_attention_kernels import MAX_SPLITS
from graphengine.kernels.fp8 import round_rows_fp8
from graphengine.profiles import result_schema

N, K, H, V, L, G, S = 32, 8, 128, 151936, 5, 16, 128  # S as the engine's for our attention
EPS, MASK, POSITIONS = 1e-6, 151669, 40960
MIN_LAUNCHES, MAX_LAUNCHES, NUM_REPLAYS = 20, 400, 15
DEVICE, DTYPE = "cuda", torch.bfloat16
SAMPLING_KERNELS = ("filter_threshold", "gumbel_argmax", "sampled_tail")
FP8_KERNELS = ("fp8_rows", "add_rms_norm_round")
KERNELS = (
    *("qk_norm_rope", "context_kv", "accept", "argmax"),
    *(*FP8_KERNELS, *SAMPLING_KERNELS, "block_attention", "chunk_attention", "pieces"),
)
HIDDEN, WIDTHS = 4096, (4096, 12288, 20480)  # what o, down and fc read
Numbers = dict[str, float]


def num_sets(set_bytes: int) -> int:
    """How many copies of a kernel's buffers exceed L2 twice (at least 2)."""
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    return max(2, min(MAX_LAUNCHES, 1 + 2 * l2_bytes // set_bytes))


def graph_us(launch: Callable[[int], Any], sets: int) -> float:
    """Median microseconds of one launch; launch(i) runs on buffer set i."""
    order = list(itertools.islice(itertools.cycle(range(sets)), max(MIN_LAUNCHES, sets)))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # which may still be filling the buffers
    with torch.cuda.stream(side):
        for i in order[:3]:
            launch(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [launch(i) for i in order]
    times = []
    for _ in range(NUM_REPLAYS + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(order))
    del kept
    return statistics.median(times[3:])


def compare(
    kernel: Callable[[int], Any], baseline: Callable[[int], Any], sets: int, num_bytes: int
) -> Numbers:
    """Times of a kernel and of its compiled reference, with the kernel's bandwidth."""
    us = graph_us(kernel, sets)
    numbers = {"kernel_us": us, "kernel_gbps": num_bytes / us / 1e3}
    return numbers | {"compiled_us": graph_us(baseline, sets)}


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(fn, fullgraph=True, dynamic=False)


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
    torch.testing.assert_close(kernel(0), reference(0), rtol=2e-2, atol=1e-2)
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


def bench_argmax(T: int, baseline: bool = True) -> Numbers:
    num_bytes = T * V * DTYPE.itemsize
    sets = num_sets(num_bytes)
    logits = torch.randn(sets, T, V, device=DEVICE).to(DTYPE)
    assert torch.equal(argmax.argmax_rows(logits[0]).cpu(), logits[0].cpu().argmax(-1))

    def kernel(i: int) -> torch.Tensor:
        return argmax.argmax_rows(logits[i])

    if not baseline:
        return {"kernel_us": graph_us(kernel, sets)}
    fast = compiled(argmax.argmax_rows_reference)
    numbers = compare(kernel, lambda i: fast(logits[i]), sets, num_bytes)
    return numbers | {"eager_us": graph_us(lambda i: logits[i].argmax(-1), sets)}


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


# What every row asks for.
SAMPLINGS = {
    "both": Sampling(temperature=0.8, top_p=0.95, top_k=50),
    "top_p": Sampling(temperature=0.8, top_p=0.95),
    "top_k": Sampling(temperature=0.8, top_k=50),
    "plain": Sampling(temperature=0.8),
}


class SampledCase:
    """T rows of logits in rotating buffers, one request a row."""

    def __init__(self, T: int) -> None:
        self.num_bytes = T * V * DTYPE.itemsize
        self.sets = num_sets(self.num_bytes)
        self.logits = (torch.randn(self.sets, T, V, device=DEVICE) * 3).to(DTYPE)
        self.best = [argmax.argmax_rows(logits) for logits in self.logits]
        self.positions = torch.arange(T, device=DEVICE)
        self.controls = {
            name: Controls.upload([one.numbered(t) for t in range(T)], torch.device(DEVICE))
            for name, one in SAMPLINGS.items()
        }

    def threshold(self, name: str, fn: Callable[..., Any]) -> Callable[[int], torch.Tensor]:
        own = self.controls[name]
        settings = (*own[:3], own.min_p_B)
        return lambda i: fn(self.logits[i], self.best[i], *settings)

    def draw(self, thresholds: torch.Tensor, fn: Callable[..., Any]) -> Callable[[int], Any]:
        own = self.controls["plain"]
        rest = (thresholds, self.positions, own.temperature_B, own.seed_B)
        return lambda i: fn(self.logits[i], self.best[i], *rest)

    def tail(self, name: str) -> Callable[[int], torch.Tensor]:
        return lambda i: sample_rows(self.logits[i], self.positions, self.controls[name])


def check_rows(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal, but for a row in 16 or so: exp and log of kernel and reference differ in their last
    bits, and a near tie may fall either way."""
    assert (found != expected).sum() <= 1 + len(found) // 16


def bench_filter_threshold(T: int, baseline: bool = True) -> Numbers:
    case = SampledCase(T)
    for name in SAMPLINGS:
        found = case.threshold(name, filter_threshold.filter_threshold)(0)
        check_rows(found, case.threshold(name, filter_threshold.filter_threshold_reference)(0))
    names = list(SAMPLINGS) if baseline else ["both"]
    times = {
        f"{name}_us": graph_us(case.threshold(name, filter_threshold.filter_threshold), case.sets)
        for name in names
    }
    return {"kernel_us": times.pop("both_us")} | times


def bench_gumbel_argmax(T: int, baseline: bool = True) -> Numbers:
    case = SampledCase(T)
    everything = torch.full((T,), -torch.inf, device=DEVICE)
    kernel = case.draw(everything, gumbel_argmax.gumbel_argmax)
    check_rows(kernel(0), case.draw(everything, gumbel_argmax.gumbel_argmax_reference)(0))
    us = graph_us(kernel, case.sets)
    numbers = {"kernel_us": us, "kernel_gbps": case.num_bytes / us / 1e3}
    if baseline:
        eager = case.draw(everything, gumbel_argmax.gumbel_argmax_reference)
        numbers["eager_us"] = graph_us(eager, case.sets)
    return numbers


def bench_sampled_tail(T: int) -> Numbers:
    """What a verify that samples runs in place of one argmax."""
    case = SampledCase(T)
    return {f"{name}_us": graph_us(case.tail(name), case.sets) for name in SAMPLINGS}


class AttentionCase:
    """One batch of blocks over `kv` keys each (the block included), with rotating caches.

    An attention is timed between ordinary kernels (the negation of q), as in a step, and these
    are timed alone and subtracted. Back to back, programmatic launches would overlap each other
    as they never can there.
    """

    def __init__(self, B: int, kv: int, causal: bool) -> None:
        self.B, self.kv, self.causal = B, kv, causal
        self.kv_bytes = B * kv * 2 * K * H * DTYPE.itemsize
        self.sets = num_sets(self.kv_bytes)
        self.num_pages = -(-kv // S)
        count = B * self.num_pages
        self.caches = torch.randn(self.sets, 2, count + 1, S, K, H, dtype=DTYPE, device=DEVICE)
        W = -(-self.num_pages // 16) * 16  # one compiled kernel for all lengths
        self.table = torch.zeros(B, W, dtype=torch.int32, device=DEVICE)
        pages = 1 + torch.randperm(count, device=DEVICE).view(B, -1)
        self.table[:, : self.num_pages] = pages.to(torch.int32)
        self.start = torch.full((B,), kv - G, dtype=torch.int32, device=DEVICE)
        self.q = torch.randn(B * G, N, H, dtype=DTYPE, device=DEVICE)
        self.out, self.negated = torch.empty_like(self.q), torch.empty_like(self.q)
        self.expected: torch.Tensor | None = None
        self.between_us = graph_us(self.between, self.sets)

    def between(self, _: int) -> None:
        torch.neg(self.q, out=self.negated)

    def between_kernels_us(self, launch: Callable[[int], None]) -> float:
        def both(i: int) -> None:
            self.between(i)
            launch(i)

        return graph_us(both, self.sets) - self.between_us

    def ours_us(self, num_splits: int, config: block_attention.LaunchConfig | None) -> float:
        """Every configuration must agree with the first that was timed."""
        buffers = block_attention.workspace(self.B, G, N, H, num_splits, DEVICE)

        def launch(i: int) -> None:
            block_attention.block_attention(
                *(self.q, self.caches[i], self.table, self.start, G, self.causal),
                *(self.out, buffers, config),
            )

        us = self.between_kernels_us(launch)
        if self.expected is None:
            self.expected = self.out.clone()
        torch.testing.assert_close(self.out, self.expected, rtol=3e-2, atol=2e-2)
        return us

    def flashinfer_us(self) -> float:
        """FlashInfer fa2 in graph mode, planned for exactly these lengths."""
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        W = self.num_pages
        step = torch.arange(self.B + 1, dtype=torch.int32, device=DEVICE)
        last = torch.full((self.B,), self.kv - (W - 1) * S, dtype=torch.int32, device=DEVICE)
        layout = (step * G, step * W, self.table[:, :W].flatten(), last)
        names = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
        fixed = {f"{name}_buf": x.clone() for name, x in zip(names, layout, strict=True)}
        scratch = torch.zeros(256 << 20, dtype=torch.uint8, device=DEVICE)
        wrapper: Any = BatchPrefillWithPagedKVCacheWrapper(
            scratch, "NHD", use_cuda_graph=True, backend="fa2", **fixed
        )
        kinds = {"q_data_type": DTYPE, "kv_data_type": DTYPE}
        wrapper.plan(*(x.cpu() for x in layout), N, K, H, S, causal=self.causal, **kinds)
        out = torch.empty_like(self.out)

        def launch(i: int) -> None:
            wrapper.run(self.q, (self.caches[i, 0], self.caches[i, 1]), out=out)

        us = self.between_kernels_us(launch)  # both ran the same last set: results must agree
        torch.testing.assert_close(self.out, out, rtol=3e-2, atol=2e-2)
        return us


def default_splits(B: int) -> int:
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    return block_attention.choose_num_splits(B, K, num_sms, G * N // K)


def bench_block_attention(B: int, kv: int, causal: bool, flashinfer: bool) -> Numbers:
    case = AttentionCase(B, kv, causal)
    us = case.ours_us(default_splits(B), None)
    numbers = {"kernel_us": us, "kernel_gbps": case.kv_bytes / us / 1e3}
    return numbers | ({"flashinfer_us": case.flashinfer_us()} if flashinfer else {})


class ChunkCase:
    """A prompt of `kv` tokens, all its blocks in one launch."""

    def __init__(self, kv: int) -> None:
        B, self.kv = kv // chunk_attention.BLOCK, kv
        self.start = torch.arange(0, kv, chunk_attention.BLOCK, dtype=torch.int32, device=DEVICE)
        self.table = 1 + torch.randperm(kv // S, device=DEVICE).to(torch.int32).view(1, -1)
        self.cache = torch.randn(2, 1 + kv // S, S, K, H, dtype=DTYPE, device=DEVICE)
        self.q = torch.randn(kv, N, H, dtype=DTYPE, device=DEVICE)
        self.out = torch.empty_like(self.q)
        pages = self.table.expand(B, -1)
        self.inputs = (self.q, self.cache, pages, self.start)
        last = (self.q[-chunk_attention.BLOCK :], self.cache, pages[-1:], self.start[-1:])
        self.expected = chunk_attention.chunk_attention_reference(*last)

    def check(self, out: torch.Tensor) -> None:
        end = out[-chunk_attention.BLOCK :]
        torch.testing.assert_close(end, self.expected, rtol=3e-2, atol=2e-2)

    def tflops(self, us: float) -> float:
        return 4 * H * N * self.kv * (self.kv + 1) / 2 / us / 1e6

    def ours_us(self, config: chunk_attention.LaunchConfig) -> float:
        us = graph_us(
            lambda _: chunk_attention.chunk_attention(*self.inputs, self.out, config=config), sets=1
        )
        self.check(self.out)
        return us

    def flashinfer_us(self, backend: str) -> float:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        ends = torch.tensor([0, self.kv], dtype=torch.int32)
        layout = (ends, ends // S, self.table[0].cpu(), torch.tensor([S], dtype=torch.int32))
        scratch = torch.zeros(512 << 20, dtype=torch.uint8, device=DEVICE)
        wrapper: Any = BatchPrefillWithPagedKVCacheWrapper(scratch, "NHD", backend=backend)
        kinds = {"q_data_type": DTYPE, "kv_data_type": DTYPE}
        wrapper.plan(*layout, N, K, H, S, causal=True, **kinds)
        planes = (self.cache[0], self.cache[1])
        us = graph_us(lambda _: wrapper.run(self.q, planes, out=self.out), sets=1)
        self.check(self.out)
        return us


def bench_chunk_attention(kv: int, flashinfer: bool) -> Numbers:
    case = ChunkCase(kv)
    us = case.ours_us(chunk_attention.LaunchConfig())
    numbers = {"kernel_us": us, "kernel_tflops": case.tflops(us)}
    for backend in ("fa2", "fa3") if flashinfer else ():
        try:
            us = case.flashinfer_us(backend)
        except (ImportError, RuntimeError, ValueError) as error:  # fa3 is not built everywhere
            print(f"flashinfer {backend}: {str(error).splitlines()[0][:80]}", flush=True)
        else:
            numbers |= {f"{backend}_us": us, f"{backend}_tflops": case.tflops(us)}
    return numbers


def bench_piece(rows: int, kv: int) -> Numbers:
    """The last rows of a prompt behind much text, as a layer of its chunk attends: blocks of 16,
    and blocks of 128 whose keys are split among as many CTAs as the engine takes, one and two."""
    case = ChunkCase(kv)
    q, blocks = case.q[-rows:], rows // chunk_attention.BLOCK
    out, sets = torch.empty_like(q), num_sets(2 * kv * K * H * DTYPE.itemsize)
    caches = [case.cache, *(case.cache.clone() for _ in range(sets - 1))]  # layers differ
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    chosen = chunk_attention.choose_num_splits(blocks, N, num_sms)
    numbers: Numbers = {}

    def timed(name: str, launch: Callable[[int], None]) -> None:
        out.fill_(torch.nan)
        numbers[f"{name}_us"] = us = graph_us(launch, sets)
        numbers[f"{name}_tflops"] = 4 * H * N * rows * (kv - rows / 2) / us / 1e6
        case.check(out)

    starts = torch.arange(kv - rows, kv, G, dtype=torch.int32, device=DEVICE)
    table = case.table.expand(len(starts), -1)
    num_splits = block_attention.choose_num_splits(len(starts), K, num_sms, G * N // K)
    work = block_attention.workspace(len(starts), G, N, H, num_splits, DEVICE)
    timed(
        "blocks_of_16",
        lambda i: block_attention.block_attention(
            q, caches[i], table, starts, G, True, out, work, padded=-1
        ),
    )
    for Z in sorted({chosen, 1, 2 * chosen}):
        partials = merge_splits.workspace(rows, N, H, Z, DEVICE) if Z > 1 else None
        where = case.table.expand(blocks, -1), case.start[-blocks:], out, partials
        name = "split" if chosen == Z else f"split_in_{Z}"
        timed(name, lambda i, where=where: chunk_attention.chunk_attention(q, caches[i], *where))
    return numbers


def sweep_chunks(args: argparse.Namespace) -> Iterator[tuple[str, str, Numbers]]:
    cases = [ChunkCase(kv) for kv in args.kv]
    tiles = ((128, 2), (128, 3), (64, 4), (64, 6))
    for (tile, stages), pdl in itertools.product(tiles, (True, False)):
        config = chunk_attention.LaunchConfig(tile, stages, pdl)
        label = "_".join(f"{name}_{int(value)}" for name, value in config._asdict().items())
        times = {f"kv_{case.kv}_tflops": case.tflops(case.ours_us(config)) for case in cases}
        yield "chunk_attention", label, times


def bench(kernels: list[str], args: argparse.Namespace) -> Iterator[tuple[str, str, Numbers]]:
    for kv in args.kv if "chunk_attention" in kernels else ():
        if kv % chunk_attention.BLOCK:
            continue
        numbers = bench_chunk_attention(kv, not args.no_flashinfer)
        yield "chunk_attention", f"prompt_{kv}", numbers
    for rows, kv in itertools.product((128, 256), args.kv if "pieces" in kernels else ()):
        yield "pieces", f"rows_{rows}_kv_{kv}", bench_piece(rows, kv)
    for B in args.batch:
        T = B * G
        if "qk_norm_rope" in kernels:
            yield "qk_norm_rope", f"rows_{T}", bench_qk_norm_rope(T)
        if "context_kv" in kernels:
            yield "context_kv", f"rows_{T}", bench_context_kv(T)
        if "accept" in kernels:
            yield "accept", f"batch_{B}", bench_accept(B)
        if "argmax" in kernels:
            yield "argmax", f"rows_{T}", bench_argmax(T)
        for D in WIDTHS:
            if "fp8_rows" in kernels:
                yield "fp8_rows", f"rows_{T}_columns_{D}", bench_fp8_rows(T, D)
        for Z in (1, 2):
            if "add_rms_norm_round" in kernels:
                label = f"rows_{T}_partials_{Z}"
                yield "add_rms_norm_round", label, bench_add_rms_norm_round(T, Z)
        if "filter_threshold" in kernels:
            yield "filter_threshold", f"rows_{T}", bench_filter_threshold(T)
        if "gumbel_argmax" in kernels:
            yield "gumbel_argmax", f"rows_{T}", bench_gumbel_argmax(T)
        if "sampled_tail" in kernels:
            yield "sampled_tail", f"rows_{T}", bench_sampled_tail(T)
        for kv, causal in itertools.product(args.kv, (True, False)):
            if "block_attention" in kernels:
                label = f"batch_{B}_kv_{kv}_{'causal' if causal else 'full'}"
                numbers = bench_block_attention(B, kv, causal, not args.no_flashinfer)
                yield "block_attention", label, numbers


Candidate = tuple[int, block_attention.LaunchConfig]


def compile_candidate(candidate: Candidate) -> str | None:
    """In a worker: compiles (to triton's cache on disk) by one small launch; the error, if any."""
    num_splits, config = candidate
    try:
        AttentionCase(1, 2 * G, causal=True).ours_us(num_splits, config)
    except Exception as error:  # too much shared memory: not a candidate
        return str(error).splitlines()[0][:80]
    return None


def tile_candidates(B: int) -> list[Candidate]:
    """The default, then every tile that fits, with its chunks, warps and stages."""
    Z = default_splits(B)
    base = block_attention.choose_config(Z)
    sizes = [(64, c, 4, s) for c in (64, 128, 256) for s in (2, 3, 4)]
    sizes += [(128, c, w, s) for c in (128, 256) for w in (4, 8) for s in (2, 3)]
    names = ("kv_tile", "chunk", "num_warps", "num_stages")
    configs = [base._replace(**dict(zip(names, size, strict=True))) for size in sizes]
    # Several programs share a multiprocessor: small stages, and no merge that waits for others.
    shared = [
        (z, base._replace(kv_tile=64, chunk=c, num_stages=s, one_split=0, fused_merge=False))
        for z in (2 * Z, 4 * Z, 8 * Z)
        if z <= MAX_SPLITS
        for c in (64, 128)
        for s in (1, 2)
    ]
    return [*((Z, config) for config in dict.fromkeys([base, *configs])), *shared]


def launch_candidates(Z: int, base: block_attention.LaunchConfig) -> list[Candidate]:
    """One thing changed at a time: who merges, when the launch starts, how far keys are split."""
    changes: list[dict[str, Any]] = [{"pdl": False}, {"prefetch": not base.prefetch}]
    changes += [{"one_split": n} for n in (0, 256, 384, 512, 1024, 2048)]
    changes += [{"fused_merge": False, "merge_warps": w} for w in (4, 8)]
    changes += [{"fused_merge": False, "pdl": False}, {"polls": 0}]
    splits = sorted({max(1, Z // 2), min(32, 2 * Z), min(32, 4 * Z)} - {Z})
    everything = [(z, base._replace(one_split=n)) for z in splits for n in (0, base.one_split)]
    return [*everything, *((Z, base._replace(**change)) for change in changes)]


def sweep_attention(args: argparse.Namespace) -> Iterator[tuple[str, str, Numbers]]:
    """First tiles at the default splits; then, around the best two of them, splits and launch.

    All candidates are compiled by a pool of processes before any is timed.
    """
    num_workers = max(1, min(12, (os.cpu_count() or 2) - 2))
    best: dict[tuple[int, int], list[tuple[float, str]]] = {}
    with multiprocessing.get_context("spawn").Pool(num_workers) as pool:
        candidates = {B: tile_candidates(B) for B in args.batch}
        cases: dict[int, list[AttentionCase]] = {}
        for phase in range(2):
            flat = list(dict.fromkeys(itertools.chain(*candidates.values())))
            errors = dict(zip(flat, pool.map(compile_candidate, flat, chunksize=1), strict=True))
            for B in args.batch:
                cases = {B: cases.get(B) or [AttentionCase(B, kv, True) for kv in args.kv]}
                rows: list[tuple[float, Candidate]] = []
                for num_splits, config in candidates[B]:
                    label = f"batch_{B}_splits_{num_splits}_" + "_".join(
                        f"{name}_{int(value)}" for name, value in config._asdict().items()
                    )
                    if error := errors[num_splits, config]:
                        print(f"{label}: {error}", flush=True)
                        continue
                    us = [case.ours_us(num_splits, config) for case in cases[B]]
                    rows.append((statistics.geometric_mean(us), (num_splits, config)))
                    for kv, one in zip(args.kv, us, strict=True):
                        best.setdefault((B, kv), []).append((one, label))
                    keys = [f"kv_{kv}_us" for kv in args.kv]
                    yield "block_attention", label, dict(zip(keys, us, strict=True))
                if phase == 0:
                    winners = [candidate for _, candidate in sorted(rows)[:2]]
                    around = itertools.chain(*(launch_candidates(*w) for w in winners))
                    candidates[B] = list(dict.fromkeys(around))
    for (B, kv), timed in best.items():
        for us, label in sorted(timed)[:3]:
            print(f"best at batch {B}, kv {kv}: {us:7.2f} us  {label}", flush=True)


def sweep_constants(kernel: str, args: argparse.Namespace) -> Iterator[tuple[str, str, Numbers]]:
    """Every combination of a module's CAPITAL sizes, at each batch."""
    heads = {"HEADS_PER_PROGRAM": (2, 4, 8, 16)}
    chunks = {"CHUNK": (2048, 4096, 8192, 16384), "BLOCK": (1024, 2048)}
    search = {"PROGRAMS": (396, 660, 1320), "LANES": (128, 256), "UNROLL": (2, 4, 8)}
    module, run, grid = {
        "qk_norm_rope": (qk_norm_rope, bench_qk_norm_rope, heads),
        "context_kv": (context_kv, bench_context_kv, heads),
        "argmax": (argmax, bench_argmax, chunks),
        "filter_threshold": (filter_threshold, bench_filter_threshold, search),
        "gumbel_argmax": (gumbel_argmax, bench_gumbel_argmax, chunks | {"BLOCK": (256, 512, 1024)}),
    }[kernel]
    grid |= {"NUM_WARPS": (1, 2, 4, 8)}
    for values in itertools.product(*grid.values()):
        for name, value in zip(grid, values, strict=True):
            setattr(module, name, value)
        label = "_".join(f"{name.lower()}_{x}" for name, x in zip(grid, values, strict=True))
        times = {f"rows_{B * G}_us": run(B * G, baseline=False)["kernel_us"] for B in args.batch}
        yield kernel, label, times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    swept = [k for k in KERNELS if k not in ("accept", "sampled_tail", "pieces", *FP8_KERNELS)]
    parser.add_argument("--sweep", choices=swept)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 16])
    parser.add_argument("--kv", nargs="+", type=int, default=[128, 1024, 4096, 8192])
    parser.add_argument("--no-flashinfer", action="store_true", help="skip the baseline")
    parser.add_argument("--out", help="also store the result as JSON here")
    parser.add_argument(
        "--commit", metavar="SHA", help="commit to record where the checkout has no history"
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device: these are GPU timings; run tests/kernels on a CPU instead")
    torch.manual_seed(0)
    if args.sweep == "block_attention":
        rows = sweep_attention(args)
    elif args.sweep == "chunk_attention":
        rows = sweep_chunks(args)
    elif args.sweep:
        rows = sweep_constants(args.sweep, args)
    else:
        rows = bench(args.kernels, args)
    numbers: dict[str, dict[str, Numbers]] = {}
    for kernel, label, measured in rows:
        numbers.setdefault(kernel, {})[label] = {k: round(v, 3) for k, v in measured.items()}
        shown = "  ".join(f"{key} {value:9.2f}" for key, value in measured.items())
        print(f"{kernel:16} {label:28} {shown}", flush=True)
    config = {"sweep": args.sweep, "heads": [N, K, H], "block_length": G, "page_size": S}
    if args.out:
        config |= {"batch": args.batch, "kv": args.kv, "dtype": str(DTYPE)}
        env = result_schema.environment(args.commit)
        result_schema.write_result(args.out, "kernels", numbers, config=config, env=env)
    print(json.dumps({"config": config, "numbers": numbers}))


if __name__ == "__main__":
    main()
