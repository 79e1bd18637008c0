"""MXFP4 -> floats: how gpt-oss's files hold the matrices of experts.

    value = e2m1(code) * 2^(scale - 127), one scale for 32 values next to each other in a row

Two tensors of bytes stand for one of floats: `.._blocks`, two codes a byte with the first in the
low half, and `.._scales`. Unpacked as transformers does it (`integrations/mxfp4.py`, ldexp): every
code at every scale is exact, and infinite past the dtype's range. One expert at a time, so that
beside the result little more than the bytes is held.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphengine.checkpoints.sources import TensorSource
from graphengine.models.weight import Weight

BLOCK = 32  # values of a scale
_HALVES = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
HALVES = (*_HALVES, *(-value for value in _HALVES))  # e2m1 by code, doubled
FACTORS = tuple(2.0 ** (scale - 128) for scale in range(256))  # and all of these are float32


def taken(source: TensorSource, weight: Weight) -> Tensor | None:
    """The weight, in the run's dtype, of a source that has it in MXFP4; None where it does not.

    Raises:
        ValueError: blocks or scales are missing or misshaped.
    """
    experts, names = weight.experts, [f"{weight.name}_{part}" for part in ("blocks", "scales")]
    if experts is None or not experts.is_transposed or not any(map(source.has, names)):
        return None
    *rows, columns = shape = weight.meant_shape
    if columns % BLOCK:
        raise ValueError(
            f"{names[0]}: MXFP4 has {BLOCK} columns a scale, the config implies {columns}; the "
            "checkpoint is not the model that its config.json describes"
        )
    sizes = (*rows, columns // BLOCK, BLOCK // 2), (*rows, columns // BLOCK)
    blocks, scales = (
        source.take(Weight(name, size, dtype=torch.uint8))
        for name, size in zip(names, sizes, strict=True)
    )
    out = torch.empty(shape, dtype=source.dtype, device=blocks.device)
    if not out.is_meta:
        for e in range(len(out)):
            values = unpacked(blocks[e : e + 1], scales[e : e + 1], source.dtype)
            out[e] = experts.in_order(values)[0]
    return out


def unpacked(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """[.., blocks, 16] and [.., blocks], both uint8 -> [.., 32 * blocks]."""
    f32, device = torch.float32, blocks.device
    values, factors = (torch.tensor(t, dtype=f32, device=device) for t in (HALVES, FACTORS))
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    return (values[codes.int()] * factors[scales.int()][..., None]).to(dtype).flatten(-2)
