"""Fetching a TMA descriptor ahead of its first use.

Why: a descriptor is a kernel parameter, 128 bytes that every multiprocessor fetches from memory at
its first copy. That of the activations is first used behind the wait for the kernel in front, where
everybody waits for it; CUTLASS prefetches its descriptors for the same reason. What it gains was
not measured by itself. Gluon has no name for it, so the parameter is named as in the compiler's
PTX.
"""

# Gluon is not typed for a type checker.
# pyright: reportArgumentType=false

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@triton.constexpr_function
def _prefetch_asm(kernel: str, place: int) -> str:
    return (
        "{ .reg .b64 at; "
        f"mov.b64 at, {kernel}_param_{place}; "
        "cvta.param.u64 at, at; prefetch.tensormap [at]; mov.b32 $0, 0; }"
    )


@gluon.jit
def prefetch_descriptor(KERNEL: gl.constexpr, PLACE: gl.constexpr):
    """Sends for the descriptor that is parameter PLACE of KERNEL; one of rank r is 1 + 2 r."""
    asm: gl.constexpr = _prefetch_asm(KERNEL, PLACE)
    gl.inline_asm_elementwise(asm, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
