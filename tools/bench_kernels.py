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
from collections.abc import Iterator

import torch
from kernel_cases_attention import bench_block_attention, bench_chunk_attention, bench_piece
from kernel_cases_logits import (
    bench_argmax,
    bench_filter_threshold,
    bench_gumbel_argmax,
    bench_sampled_tail,
)
from kernel_cases_rows import (
    WIDTHS,
    bench_accept,
    bench_add_rms_norm_round,
    bench_context_kv,
    bench_fp8_rows,
    bench_qk_norm_rope,
)
from kernel_sweeps import sweep_attention, sweep_chunks, sweep_constants
from kernel_timing import DTYPE, G, H, K, N, Numbers, S
from result_file import add_result_file, parser_of, store

from graphengine.kernels import chunk_attention

ROW_KERNELS = {
    "qk_norm_rope": bench_qk_norm_rope,
    "context_kv": bench_context_kv,
    "argmax": bench_argmax,
    "filter_threshold": bench_filter_threshold,
    "gumbel_argmax": bench_gumbel_argmax,
    "sampled_tail": bench_sampled_tail,
}
ATTENTIONS = ("block_attention", "chunk_attention")
KERNELS = (*ROW_KERNELS, "accept", "fp8_rows", "add_rms_norm_round", "pieces", *ATTENTIONS)
SWEPT = (*(name for name in ROW_KERNELS if name != "sampled_tail"), *ATTENTIONS)


def bench(kernels: list[str], args: argparse.Namespace) -> Iterator[tuple[str, str, Numbers]]:
    has_flashinfer = not args.no_flashinfer
    if "chunk_attention" in kernels:
        for kv in args.kv:
            if kv % chunk_attention.BLOCK == 0:
                numbers = bench_chunk_attention(kv, has_flashinfer)
                yield "chunk_attention", f"prompt_{kv}", numbers
    if "pieces" in kernels:
        for rows, kv in itertools.product((128, 256), args.kv):
            yield "pieces", f"rows_{rows}_kv_{kv}", bench_piece(rows, kv)
    for B in args.batch:
        T = B * G
        for name, bench_rows in ROW_KERNELS.items():
            if name in kernels:
                yield name, f"rows_{T}", bench_rows(T)
        if "accept" in kernels:
            yield "accept", f"batch_{B}", bench_accept(B)
        if "fp8_rows" in kernels:
            for D in WIDTHS:
                yield "fp8_rows", f"rows_{T}_columns_{D}", bench_fp8_rows(T, D)
        if "add_rms_norm_round" in kernels:
            for Z in (1, 2):
                label = f"rows_{T}_partials_{Z}"
                yield "add_rms_norm_round", label, bench_add_rms_norm_round(T, Z)
        if "block_attention" in kernels:
            for kv, causal in itertools.product(args.kv, (True, False)):
                label = f"batch_{B}_kv_{kv}_{'causal' if causal else 'full'}"
                yield "block_attention", label, bench_block_attention(B, kv, causal, has_flashinfer)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--sweep", choices=SWEPT)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 16])
    parser.add_argument("--kv", nargs="+", type=int, default=[128, 1024, 4096, 8192])
    parser.add_argument("--no-flashinfer", action="store_true", help="skip the baseline")
    add_result_file(parser)
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
    store(args, "kernels", numbers, config=config)
    print(json.dumps({"config": config, "numbers": numbers}))


if __name__ == "__main__":
    main()
