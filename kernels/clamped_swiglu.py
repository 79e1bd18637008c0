"""What experts make of gate and up: SwiGLU, or gpt-oss's, which is clamped.

    y = silu(gate) * up
    y = (max(min(up, limit), -limit) + 1) * g * sigmoid(alpha * g),  g = min(gate, limit)

In a file of its own because the kernels of a few rows and those of one share it. A limit is a
constant of the kernel, so that without one nothing is left of it. Invariant: what is not a number
stays none.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from collections.abc import Sequence

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

Clamp = Sequence[float]
"""alpha and limit."""


def activate_reference(gate: torch.Tensor, up: torch.Tensor, clamp: Clamp | None) -> torch.Tensor:
    """`activate` in plain torch."""
    if clamp is None:
        return F.silu(gate) * up
    alpha, limit = clamp
    gate = gate.clamp(max=limit)
    return (up.clamp(-limit, limit) + 1) * (gate * (alpha * gate).sigmoid())


def clamp_options(clamp: Clamp | None) -> dict[str, float | None]:
    """The constants of a kernel that activates."""
    alpha, limit = clamp or (None, None)
    return {"ALPHA": alpha, "LIMIT": limit}


@triton.jit
def activate(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """The formula, in float32: the first without a limit. `where` keeps NaN; minimum does not."""
    if LIMIT is None:
        y = gate / (1.0 + tl.exp(-gate)) * up
    else:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        y = (up + 1.0) * (gate / (1.0 + tl.exp(-ALPHA * gate)))
    return y
