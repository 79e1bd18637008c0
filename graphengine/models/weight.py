"""The one declaration of a weight, which loader, dummy weights, byte counts and shards read.

A kind of layer declares, for each field of its tree, the file's tensors that the field is packed
from as rows; a field without any is None in the tree. Invariant: nobody else writes down a weight's
shape, so what is planned, drawn and counted is what is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Pick:
    """Rows of a tensor whose rows stand in equal groups, one a head: `ranges` of each group. A
    tensor whose heads differ (q, k, v in one) is one group."""

    num_groups: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def num_rows(self) -> int:
        """Rows of all groups."""
        return self.num_groups * sum(end - begin for begin, end in self.ranges)

    def of(self, tensor: Tensor) -> Tensor:
        """[num_groups * n, ..] -> [num_rows, ..]."""
        groups = tensor.unflatten(0, (self.num_groups, -1))
        return torch.cat([groups[:, begin:end] for begin, end in self.ranges], 1).flatten(0, 1)


class Experts(NamedTuple):
    """How files hold a tensor of all experts, [experts, rows, ..], of which each is a matrix or a
    bias of its own.

    `is_interleaved`: of an expert, the rows of its first and its second half in turn.
    `is_transposed`: as [experts, columns, rows], unless it is in MXFP4.
    `is_mxfp4`: config.json says that it is, and the kernel takes it.
    """

    is_interleaved: bool = False
    is_transposed: bool = False
    is_mxfp4: bool = False

    def meant_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """[experts, rows, ..] of the file's shape."""
        return (shape[0], shape[2], shape[1]) if self.is_transposed else shape

    def of(self, tensor: Tensor) -> Tensor:
        """The file's tensor -> [experts, rows, ..], first halves first; copied at most once."""
        tensor = tensor.mT if self.is_transposed else tensor
        return self.in_order(tensor).contiguous()

    def in_order(self, tensor: Tensor) -> Tensor:
        """The same of one in rows, as MXFP4 holds it."""
        if not self.is_interleaved:
            return tensor
        return tensor.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


class Stacked(NamedTuple):
    """A field of `size` equal matrices, [size, rows, columns], which its parts hold one after the
    other as rows; some files hold it as one tensor called `name` instead, and so it is drawn."""

    name: str
    size: int


class Weight(NamedTuple):
    """One tensor of a checkpoint; 35B-A3B has 30,720 of experts alone.

    `axis`: which dimension is cut among several GPUs, as in Megatron: rows (0) of what reads the
    residual stream, columns (1) of what writes it; None where each holds the whole, or no such cut
    is right (q, k, v in one tensor). Nothing but tests reads it yet.
    `initialiser`: how dummy weights draw it, the last two of MXFP4. `dtype`: None is the run's.
    `pick`: which of its rows are meant; several weights may share a tensor of the file. `offset` is
    added, in `dtype`.
    `stack`: what it is a part of, the same for every part of a field. `experts`: of a tensor that
    holds all of them, in another order of rows.
    """

    name: str
    shape: tuple[int, ...]
    axis: Literal[0, 1] | None = None
    initialiser: Literal["normal", "ones", "zeros", "codes", "scales"] = "normal"
    dtype: torch.dtype | None = None
    pick: Pick | None = None
    offset: float = 0.0
    stack: Stacked | None = None
    experts: Experts | None = None

    @property
    def meant_shape(self) -> tuple[int, ...]:
        """Shape of what `made_of` returns."""
        if self.experts is not None:
            return self.experts.meant_shape(self.shape)
        return self.shape if self.pick is None else (self.pick.num_rows, *self.shape[1:])

    @property
    def num_elements(self) -> int:
        """Elements of that."""
        return math.prod(self.meant_shape)

    def made_of(self, tensor: Tensor) -> Tensor:
        """What is meant, of the file's tensor."""
        if self.pick is not None:
            tensor = self.pick.of(tensor)
        if self.experts is not None:
            tensor = self.experts.of(tensor)
        return tensor + self.offset if self.offset else tensor


Fields = Mapping[str, tuple[Weight, ...]]
"""Field of a weight tree -> the tensors that it is packed from, in order."""


def norm(
    name: str, size: int, is_offset: bool = False, pick: Pick | None = None
) -> tuple[Weight, ...]:
    """A norm's weight: ones, whole on every GPU.

    Args: is_offset: the file holds w of `1 + w`, which is kept in float32: bfloat16 would lose it.
    """
    if not is_offset:
        return (Weight(name, (size,), initialiser="ones", pick=pick),)
    f32 = torch.float32
    return (Weight(name, (size,), initialiser="zeros", dtype=f32, pick=pick, offset=1.0),)


def behind(prefix: str, fields: Fields) -> Fields:
    """The same under names behind `prefix`."""

    def moved(parts: tuple[Weight, ...]) -> tuple[Weight, ...]:
        stack = parts[0].stack if parts else None
        stack = stack and stack._replace(name=prefix + stack.name)
        return tuple(part._replace(name=prefix + part.name, stack=stack) for part in parts)

    return {field: moved(parts) for field, parts in fields.items()}


def num_matrix_elements(parts: Iterable[Weight]) -> int:
    """What a forward reads of these: matrices; norms and biases (under 0.1 %) are left out."""
    matrices = [part for part in parts if len(part.shape) == 2 + (part.experts is not None)]
    return sum(part.num_elements for part in matrices)
