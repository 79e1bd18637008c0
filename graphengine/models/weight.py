"""The one declaration of a weight, which loader, dummy weights, byte counts and shards read.

A kind of layer declares, for each field of its tree, the file's tensors that the field is packed
from as rows; a field without any is None in the tree. Invariant: nobody else writes down a weight's
shape, so what is planned, drawn and counted is what is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch


class Stack(NamedTuple):
    """A field of `size` equal matrices, [size, rows, columns], which its parts hold one after the
    other as rows; some files hold it as one tensor called `name` instead."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of a checkpoint.

    `axis`: which dimension is cut among several GPUs, as in Megatron: rows (0) of what reads the
    residual stream, columns (1) of what writes it; None where each holds the whole.
    `initialiser`: how dummy weights draw it. `dtype`: None is the run's. `stack`: what it is a part
    of, the same for every part of a field.
    """

    name: str
    shape: tuple[int, ...]
    axis: Literal[0, 1] | None = None
    initialiser: Literal["normal", "ones"] = "normal"
    dtype: torch.dtype | None = None
    stack: Stack | None = None

    @property
    def num_elements(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.shape)


Fields = Mapping[str, tuple[Weight, ...]]
"""Field of a weight tree -> the tensors that it is packed from, in order."""


def norm(name: str, size: int) -> tuple[Weight, ...]:
    """A norm's weight: ones, whole on every GPU."""
    return (Weight(name, (size,), initialiser="ones"),)


def behind(prefix: str, fields: Fields) -> Fields:
    """The same under names behind `prefix`."""

    def moved(part: Weight) -> Weight:
        stack = part.stack and part.stack._replace(name=prefix + part.stack.name)
        return replace(part, name=prefix + part.name, stack=stack)

    return {field: tuple(map(moved, parts)) for field, parts in fields.items()}


def num_matrix_elements(parts: Iterable[Weight]) -> int:
    """What a forward reads of these: matrices; norms and biases (under 0.01 %) are left out."""
    return sum(part.num_elements for part in parts if len(part.shape) == 2)
