"""MXFP4: every code and scale as transformers reads it, and files that hold half of it refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from graphengine.checkpoints import mxfp4
from graphengine.checkpoints.sources import ShapeSource
from graphengine.checkpoints.weights import target_weights
from graphengine.models import decoder, moe
from graphengine.models.weight import Experts, Weight
from graphengine.startup.build import read_configs

MATRIX = Weight("experts.down_proj", (3, 64, 40), experts=Experts(is_transposed=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_code_at_every_scale(dtype: torch.dtype) -> None:
    """Bug: the high half of a byte comes first, a code's sign is lost, a scale is off by one, is
    rounded as a power that a library computes, or is flushed where it is small (0 is 2^-127)."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    codes = torch.arange(256, dtype=torch.uint8)  # as bytes: every pair of codes
    blocks = codes.view(1, 1, 16, 16).repeat(1, 256, 1, 1)
    scales = codes.view(1, 256, 1).repeat(1, 1, 16)
    found = mxfp4.unpacked(blocks, scales, dtype)
    assert found.dtype == dtype and found.shape == (1, 256, 512)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=dtype).mT
    assert torch.equal(found, theirs)
    numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    numbers += [-number for number in numbers]
    ours = found[0].double()
    for scale in (0, 1, 118, 127, 128, 140, 253, 254, 255):
        for byte in range(256):
            for place, code in ((0, byte & 15), (1, byte >> 4)):
                value = ours[scale, 2 * byte + place].item()
                wanted = numbers[code] * 2.0 ** (scale - 127)
                wanted = torch.tensor(wanted, dtype=torch.float64).to(dtype).item()
                assert value == wanted
                assert math.copysign(1, value) == math.copysign(1, wanted)


def test_what_is_asked_for() -> None:
    """Bug: doctor, which loads shapes alone, looks for other tensors than the loader reads; or
    reads the transposed shape of what is not transposed."""
    names = [f"experts.down_proj_{part}" for part in ("blocks", "scales")]
    source = ShapeSource(torch.bfloat16, names)
    found = mxfp4.taken(source, MATRIX)
    assert isinstance(found, torch.Tensor) and found.shape == (3, 40, 64)
    assert found.dtype == torch.bfloat16
    assert source.asked == {names[0]: (3, 40, 2, 16), names[1]: (3, 40, 2)}
    assert source.integers == dict.fromkeys(names, torch.uint8)
    assert mxfp4.taken(ShapeSource(torch.bfloat16, ["experts.down_proj"]), MATRIX) is None
    ordinary = Weight("experts.down_proj", (40, 64))
    assert mxfp4.taken(source, ordinary) is None


def test_floats_that_are_called_mxfp4() -> None:
    """Bug: of a model that was saved dequantised with its old config.json blocks are said to be
    missing, as if the file were incomplete."""
    kept = MATRIX._replace(experts=Experts(is_transposed=True, is_mxfp4=True))
    with pytest.raises(ValueError, match=r"down_proj is .* says mxfp4; remove quantization_config"):
        mxfp4.taken(ShapeSource(torch.bfloat16, ["experts.down_proj"]), kept)


def test_columns_that_are_no_blocks() -> None:
    """Bug: a width that no block divides loses its last columns, or ends in a traceback."""
    odd = Weight("experts.down_proj", (3, 40, 64), experts=Experts(is_transposed=True))
    with pytest.raises(ValueError, match=r"down_proj_blocks: .* 32 columns .* implies 40"):
        mxfp4.taken(ShapeSource(torch.float32, ["experts.down_proj_scales"]), odd)


def test_a_width_that_is_no_blocks() -> None:
    """Bug: of an expert whose width the kernel's blocks do not divide one matrix is kept in four
    bits and the other widened, which no product takes; or a floor counts neither as widened."""
    config, _ = read_configs("gpt-oss-20b", None)
    assert config.moe is not None and config.moe.is_mxfp4
    sizes = {"moe_intermediate_size": 96, "num_experts": 8}
    config = replace(config, num_hidden_layers=1, moe=replace(config.moe, **sizes))
    device = torch.device("meta")
    ffn = target_weights(ShapeSource(torch.bfloat16), config, 1, device).layers[0].ffn
    assert isinstance(ffn, moe.MoeWeights)
    assert isinstance(ffn.gate_up_EJD, torch.Tensor) and isinstance(ffn.down_EDI, torch.Tensor)
    read = moe.num_read_elements(config, decoder.layer_weights(config)[0].ffn, 1000)
    assert read == 8 * (2880 + 3 * 2880 * 96)
