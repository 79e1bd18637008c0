"""MXFP4: how gpt-oss's files hold the matrices of experts, and what is made of it.

Two tensors of bytes stand for one of floats: `.._blocks`, two codes a byte with the first in the
low half, and `.._scales`, one for 32 codes next to each other in a row. A run in bf16 multiplies
them as they are (`kernels.mxfp4`); any other has them widened, as transformers does it
(`integrations/mxfp4.py`, ldexp): every code at every scale is exact, and infinite past the dtype's
range. One expert at a time, so that beside the result little more than the bytes is held.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphengine.checkpoints.sources import TensorSource
from graphengine.kernels.mxfp4 import (
    BLOCK,
    GROUP,
    HALF_WORDS,
    MOST_SCALE,
    SCALES,
    Mxfp4,
    in_turn,
    pack_mxfp4,
    widened,
)
from graphengine.models.weight import Weight


def taken(source: TensorSource, weight: Weight) -> Tensor | Mxfp4 | None:
    """The weight, of a source that has it in MXFP4; None where it does not. As it is where
    it `is_mxfp4` and the run is in bf16, else in the run's dtype.

    Raises:
        ValueError: blocks or scales are missing, misshaped, or larger than any weight; or the
            source has floats for them, for which no memory is planned.
    """
    experts, names = weight.experts, [f"{weight.name}_{part}" for part in ("blocks", "scales")]
    if experts is None or not experts.is_transposed:
        return None
    if not any(map(source.has, names)):
        if not experts.is_mxfp4:
            return None
        if source.has(weight.name):
            raise ValueError(
                f"{weight.name} is of floats, but config.json says mxfp4; remove "
                "quantization_config from it"
            )
    *rows, columns = shape = weight.meant_shape
    if columns % GROUP:
        raise ValueError(
            f"{names[0]}: MXFP4 has {GROUP} columns a scale, the config implies {columns}; the "
            "checkpoint is not the model that its config.json describes"
        )
    sizes = (*rows, columns // GROUP, GROUP // 2), (*rows, columns // GROUP)
    kinds = zip(names, sizes, ("codes", "scales"), strict=True)
    blocks, scales = (
        source.take(Weight(name, size, dtype=torch.uint8, initialiser=kind))
        for name, size, kind in kinds
    )
    num_experts = 0 if scales.is_meta else len(scales)  # a plan's tensors have no bytes
    if not experts.is_mxfp4 or source.dtype != torch.bfloat16:
        out = torch.empty(shape, dtype=source.dtype, device=blocks.device)
        for e in range(num_experts):
            out[e] = experts.in_order(unpacked(blocks[e : e + 1], scales[e : e + 1], out.dtype))[0]
        return out
    whole = rows[0], rows[1] // BLOCK, columns // BLOCK
    codes = blocks.new_empty(*whole, HALF_WORDS, dtype=torch.int16)
    out = Mxfp4(codes, scales.new_empty(*whole, SCALES))
    if num_experts and (largest := int(scales.max())) > MOST_SCALE:
        raise ValueError(
            f"{names[1]}: a scale of 2^{largest - 127}, weights are far below 1; the file is "
            "damaged, fetch it again"
        )
    for e in range(num_experts):
        ordered = [experts.in_order(x[e : e + 1]) for x in (blocks, scales)]
        if experts.is_interleaved:  # gate and up
            ordered = [in_turn(x) for x in ordered]
        for kept, new in zip(out, pack_mxfp4(*ordered), strict=True):
            kept[e] = new[0]
    return out


def unpacked(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """[.., blocks, 16] and [.., blocks], both uint8 -> [.., 32 * blocks]."""
    return widened(torch.stack([blocks & 15, blocks >> 4], -1).flatten(-3), scales, dtype)
