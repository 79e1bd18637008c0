"""What kernels need to know of Triton's interpreter (TRITON_INTERPRET=1)."""

import triton
import triton.language as tl
from triton import knobs

INTERPRET = bool(knobs.runtime.interpret)


@triton.jit
def dot(a, b, acc, DOT_FP32: tl.constexpr):
    """a @ b + acc. The interpreter multiplies bf16 as raw uint16 (triton 3.6, 3.7: create_dot in
    runtime/interpreter.py), so it is given the same values in fp32; delete when it is fixed."""
    if DOT_FP32:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")
