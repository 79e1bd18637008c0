"""A forward pass as data: a chain of named steps that pass tensors along.

`Dense` is a segment between two attentions: pure up to declared cache writes, the unit that is
compiled and captured. `AttentionStep` is what stays eager in piecewise mode, `Host` what stays so
in every mode. A chain is written once; `runners` holds the ways to run it. This package knows
callables, tensors and buckets, never models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

Carry = tuple[Tensor, ...]
"""What one step hands to the next, e.g. (residual, query)."""


@dataclass(frozen=True, slots=True)
class _Named:
    name: str
    run: Callable[[Carry], Carry]


class Dense(_Named):
    """A segment that can be captured: fixed shapes, no host work, no synchronisation."""


class AttentionStep(_Named):
    """An attention that was planned before the chain runs; eager unless the mode is full."""


class Host(_Named):
    """Work of the host that the device's next steps wait for: never captured, in no mode. It hands
    the carry on as it is, and does nothing where nothing is to be done, as while capturing."""


Step = Dense | AttentionStep | Host
Chain = Sequence[Step]
