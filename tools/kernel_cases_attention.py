"""Attention of blocks, of whole prompts and of a prompt's last rows, beside FlashInfer's."""

from collections.abc import Callable
from typing import Any

import torch
from kernel_timing import DEVICE, DTYPE, G, H, K, N, Numbers, S, graph_us, num_sets

from graphengine.kernels import block_attention, chunk_attention, merge_splits


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
