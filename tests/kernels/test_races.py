"""What tests/support/races.py sees: every interpreted kernel test runs under it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from graphengine.kernels.interpreter import INTERPRET

pytestmark = pytest.mark.skipif(not INTERPRET, reason="watches interpreted kernels")


@triton.jit
def shift_kernel(x, BY: tl.constexpr, WAITS: tl.constexpr):
    """x[i] = x[i + BY], in place."""
    i = tl.arange(0, 8)
    held = tl.load(x + i + BY)
    if WAITS:
        tl.debug_barrier()
    tl.store(x + i, held)


@triton.jit
def pass_on_kernel(x):
    """Each program takes what the one before it left."""
    at = x + tl.program_id(0)
    tl.store(at + 1, tl.load(at))


@pytest.mark.parametrize(
    ("by", "waits", "num_warps", "is_race"),
    [(1, False, 4, True), (1, True, 4, False), (1, False, 1, False), (0, False, 4, False)],
)
def test_threads_of_a_program(by: int, waits: bool, num_warps: int, is_race: bool) -> None:
    """Bug: a warp overwrites what another has yet to read, and no test on a CPU can fail."""
    x = torch.arange(16.0)

    launch: Any = shift_kernel[(1,)]

    def run() -> None:
        launch(x, BY=by, WAITS=waits, num_warps=num_warps)

    if is_race:
        with pytest.raises(Exception, match=r"Race.*writes what .* reads"):
            run()
    else:
        run()
        assert x[:8].tolist() == [*range(by, 8 + by)]


def test_programs_of_a_launch() -> None:
    """Bug: a program reads what another one of the same launch may not have written yet."""
    launch: Any = pass_on_kernel[(2,)]
    with pytest.raises(Exception, match=r"Race.*reads what .* wrote"):
        launch(torch.zeros(4))
