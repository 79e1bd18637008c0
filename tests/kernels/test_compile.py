"""The references inside torch.compile: the cache is mutated in place and never copied.

On the CPU alone: on a GPU the kernels stand outside of compiled segments, for dynamo traces no
launch with `launch_pdl` (torch 2.13: SPECIAL_CONFIG_NAMES in triton_kernel_wrap.py).
"""

import math
import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from graphengine.kernels.context_kv import context_kv_write_
from graphengine.kernels.interpreter import INTERPRET
from graphengine.kernels.qk_norm_rope import qk_norm_rope_write_

ALLOCATION = re.compile(r"empty_strided_\w+\(\(([\d, ]+)\)")


@pytest.mark.skipif(INTERPRET, reason="the interpreter is not traced by dynamo")
def test_compiled_step_mutates_the_cache_in_place() -> None:
    """Bug: a graph break, a lost mutation, or functionalisation that clones the whole cache, which
    costs gigabytes of traffic a step and is invisible in the results."""
    N, K, H, S, L, T = 3, 2, 16, 4, 2, 6

    def segment(qkv, weight, weights, rope, positions, slots, cache, pool, kv):
        q = qk_norm_rope_write_(qkv, weight, weight, rope, positions, slots, cache, 1e-6)
        context_kv_write_(kv, weights, rope, positions, slots, pool, 1e-6)
        return q * 2

    def arguments():
        generator = torch.Generator().manual_seed(0)

        def rand(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        return (
            rand(T, (N + 2 * K) * H),
            rand(H),
            rand(L, H),
            rand(20, H),
            torch.arange(T),
            torch.tensor([4, 9, 5, 40, 41, 42]),
            torch.zeros(2, 99, S, K, H),
            torch.zeros(L, 2, 99, S, K, H),
            rand(T, L * 2 * K * H),
        )

    expected, got = arguments(), arguments()
    expected_q = segment(*expected)
    compiled = torch.compile(segment, fullgraph=True, dynamic=False)
    q, sources = run_and_get_code(compiled, *got)
    torch.testing.assert_close(q, expected_q)
    assert expected[6].any()
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    sizes = [
        math.prod(int(x) for x in shape.replace(" ", "").split(",") if x)
        for shape in ALLOCATION.findall("\n".join(sources))
    ]
    assert sizes
    assert max(sizes) < expected[6].numel(), "a buffer as large as the cache was allocated"
