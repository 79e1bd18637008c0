"""The references inside torch.compile: the cache is mutated in place and never copied, and what is
traced has the shapes of what runs.

On the CPU alone: on a GPU the kernels stand outside of compiled segments, for dynamo traces no
launch with `launch_pdl` (torch 2.13: SPECIAL_CONFIG_NAMES in triton_kernel_wrap.py).
"""

import math
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from graphengine import kernels
from graphengine.kernels.context_kv import context_kv_write_
from graphengine.kernels.interpreter import INTERPRET
from graphengine.kernels.qk_norm_rope import qk_norm_rope_write_
from graphengine.kernels.skinny_config import rule_config

DEFINED = re.compile(r'"graphengine::(\w+)"')
ALLOCATION = re.compile(r"empty_strided_\w+\(\(([\d, ]+)\)")


@pytest.mark.slow
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


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


HIDDEN, HEADS, EXPERTS, WIDTH = 32, 3, 6, 24
X_TD = rows(5, HIDDEN)
WIDE = rows(5, 512).bfloat16(), rows(320, 512).bfloat16(), None, None
EXPERT_WEIGHTS = (rows(EXPERTS, 2 * WIDTH, HIDDEN), rows(EXPERTS, HIDDEN, WIDTH))
BIASES = (rows(EXPERTS), rows(EXPERTS, 2 * WIDTH), rows(EXPERTS, HIDDEN))
CLAMP = [1.702, 0.5]
FOUR_BITS = (rows(5, 64).bfloat16(), rows(5, 3).bfloat16())  # of three experts, 64 wide
FOUR_BITS += (torch.ones(3, 2, 1, 1024, dtype=torch.int16), torch.full((3, 2, 1, 128), 120).byte())
FOUR_BITS += (torch.ones(3, 1, 1, 1024, dtype=torch.int16), torch.full((3, 1, 1, 128), 120).byte())
SHARED = (rows(2 * WIDTH, HIDDEN), rows(HIDDEN, WIDTH), rows(1, HIDDEN))
ROW = (X_TD[:1], rows(2, 1, HIDDEN), rows(HIDDEN), 1e-6)
# Arguments of every op, no two of their sizes equal, so that none can stand for another.
OPS: dict[str, list[tuple[Any, ...]]] = {
    "skinny_linear": [(*WIDE, [*rule_config(5, 320, 512, 2, False)])],
    "skinny_linear_partials": [(*WIDE, [*rule_config(5, 320, 512, 2, False)])],
    "skinny_swiglu": [(*WIDE, [*rule_config(5, 320, 512, 2, True)])],
    "skinny_argmax": [(*WIDE, [*rule_config(5, 320, 512, 2, False)])],
    "experts": [
        (X_TD, rows(5, EXPERTS), *EXPERT_WEIGHTS, None, None, 2, True),
        (X_TD, rows(5, EXPERTS), *EXPERT_WEIGHTS, rows(5, HIDDEN), rows(5, 1), 4, False),
        (X_TD, rows(5, EXPERTS), *EXPERT_WEIGHTS, None, None, 2, True, *BIASES[1:], CLAMP),
    ],
    "experts_mxfp4": [
        (*FOUR_BITS, 2, True, None, None, None),
        (*FOUR_BITS, 3, True, rows(3, 128).bfloat16(), rows(3, 64).bfloat16(), CLAMP),
    ],
    "experts_row": [
        (*ROW, rows(EXPERTS, HIDDEN), *EXPERT_WEIGHTS, None, None, None, 2, True),
        (*ROW, rows(EXPERTS, HIDDEN), *EXPERT_WEIGHTS, *SHARED, 4, False),
        (*ROW, rows(EXPERTS, HIDDEN), *EXPERT_WEIGHTS, *[None] * 3, 2, True, *BIASES, CLAMP),
    ],
    "router_logits": [
        (X_TD, rows(EXPERTS, HIDDEN), None),
        (X_TD, rows(EXPERTS, HIDDEN), rows(1, HIDDEN)),
        (X_TD, rows(EXPERTS, HIDDEN), None, BIASES[0]),
    ],
    "output_gate": [
        (rows(5, HEADS, 16), rows(5, 99), 7, rows(16), 1e-6),
        (rows(5, HEADS, 16), rows(2, 5, 99), 7, rows(16), 1e-6),
    ],
    "argmax_rows": [(rows(5, 99),)],
    "swiglu": [(rows(5, 2 * WIDTH),)],
    "chunk_swiglu": [WIDE[:2]],
    "chunk_linear": [WIDE[:2]],
    "rows_to_fp8": [(X_TD.bfloat16(), 2)],
    "add_rms_norm": [
        (X_TD, rows(5, HIDDEN), rows(HIDDEN), 1e-6, True),
        (X_TD.bfloat16(), rows(2, 5, HIDDEN), rows(HIDDEN), 1e-6, False),
        (None, rows(2, 5, HIDDEN), rows(HIDDEN).bfloat16(), 1e-6, False),
    ],
    "add_rms_norm_fp8": [(X_TD.bfloat16(), rows(2, 5, HIDDEN), rows(HIDDEN), 1e-6, 2)],
}


MODULES = {  # of every op
    name: path.stem
    for path in Path(kernels.__path__[0]).glob("*.py")
    for name in DEFINED.findall(path.read_text())
}


def test_every_op_is_here() -> None:
    """Bug: a new op's trace is compared with nothing."""
    assert MODULES.keys() == OPS.keys()


@pytest.mark.parametrize(
    ("name", "given"), [(name, given) for name, calls in OPS.items() for given in calls]
)
def test_an_op_is_traced_as_it_runs(name: str, given: tuple[Any, ...]) -> None:
    """Bug: a compiled segment is told another shape, dtype or stride than the op returns."""
    import_module(f"graphengine.kernels.{MODULES[name]}")
    op = getattr(torch.ops.graphengine, name).default
    torch.library.opcheck(op, given, test_utils=("test_schema", "test_faketensor"))
