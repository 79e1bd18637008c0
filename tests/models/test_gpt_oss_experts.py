"""gpt-oss's experts equal transformers', from either form of its files, and are not half loaded.

Reference: transformers' GptOssMLP in float32 with eager experts. The layers around them are
Qwen3-MoE's, so that nothing here hangs on gpt-oss's attention.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from graphengine.capture.compile import compile_segments
from graphengine.checkpoints.sources import Checkpoint, RandomSource, ShapeSource
from graphengine.checkpoints.weights import target_weights, tree_bytes
from graphengine.config import model as model_config
from graphengine.config.model import ModelConfig
from graphengine.config.moe import Clamp, MoeKeys
from graphengine.kernels.mxfp4 import Mxfp4, out_of_turn
from graphengine.models import decoder, moe
from graphengine.models.moe import MoeWeights
from graphengine.models.weight import num_matrix_elements
from graphengine.startup.build import read_configs
from tests.support.checkpoints import edit_config, make_target

CPU, META = torch.device("cpu"), torch.device("meta")
KEYS = MoeKeys(norm_topk_prob=True, reads_norm_key=False, is_clamped=True)
BASE = "model.layers.0.mlp."
Tensors = dict[str, Tensor]


pytestmark = pytest.mark.usefixtures("clamped")


@pytest.fixture
def clamped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model_type whose layers are Qwen3-MoE's but for their experts, which are gpt-oss's."""
    rows = model_config.ARCHITECTURES
    row = replace(rows["qwen3_moe"], moe=KEYS, quantised=("mxfp4",))
    monkeypatch.setitem(rows, "clamped", row)


def gpt_oss_mlp(hidden: int, inter: int, num: int, **extra: Any) -> Any:
    """Theirs, with weights of which every one matters."""
    from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    sizes = {"hidden_size": hidden, "intermediate_size": inter, "num_local_experts": num}
    config = GptOssConfig(**sizes, num_experts_per_tok=4, **extra)
    config._experts_implementation = "eager"
    mlp = GptOssMLP(config)
    # transformers 5.2 has them as constants and reads neither key
    for key in ("limit", "alpha"):
        setattr(mlp.experts, key, extra.get(f"swiglu_{key}", getattr(mlp.experts, key)))
    generator = torch.Generator().manual_seed(num)
    with torch.no_grad():
        for name, parameter in mlp.named_parameters():
            gain = 0.5 if name.endswith("bias") else 1.5 * parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * gain)
    return mlp


def write(
    directory: Path, mlp: Any, change: Callable[[Tensors], Any] | None = None, **extra: Any
) -> Path:
    """A model of one layer with these experts, as transformers saves them unquantised."""
    (num, hidden, twice), inter = mlp.experts.gate_up_proj.shape, mlp.experts.intermediate_size
    assert twice == 2 * inter
    options: dict[str, Any] = {"hidden": hidden, "intermediate": inter, "layers": 1}
    make_target(directory, model_type="qwen3_moe", tokenizer=False, **options)
    file = directory / "model.safetensors"
    tensors = {n: t for n, t in load_file(file).items() if ".mlp." not in n}
    tensors |= {BASE + n: t for n, t in mlp.state_dict().items()}
    if change is not None:
        change(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, file, metadata={"format": "pt"})
    own = {"model_type": "clamped", "num_local_experts": num, "num_experts_per_tok": 4}
    own["num_experts"] = None
    edit_config(directory, lambda c: {**c, **own, "norm_topk_prob": None, **extra})
    return directory


def config_of(directory: Path) -> ModelConfig:
    return ModelConfig.from_hf(json.loads((directory / "config.json").read_text()))


def load(directory: Path, dtype: torch.dtype = torch.float32) -> MoeWeights:
    config = config_of(directory)
    layer = target_weights(Checkpoint(directory, CPU, dtype), config, 8, CPU).layers[0].ffn
    assert isinstance(layer, MoeWeights)
    return layer


@pytest.mark.parametrize("num_rows", [1, 19, 70])
@pytest.mark.parametrize(
    ("hidden", "inter", "num", "said"),
    [
        (96, 160, 8, {}),
        (160, 96, 32, {"swiglu_limit": 0.6}),
        (40, 36, 11, {"swiglu_limit": 1.0, "swiglu_alpha": 1.1}),
    ],
)
@torch.no_grad()
def test_equals_transformers(
    tmp_path: Path,
    hidden: int,
    inter: int,
    num: int,
    said: dict[str, Any],
    num_rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bug: gate and up are swapped or not taken apart, a product is transposed, a bias is left out
    or weighted twice, the limit or alpha is another, or the weights are those of all experts."""
    mlp = gpt_oss_mlp(hidden, inter, num, **said)
    layer = load(write(tmp_path, mlp, **said))
    h_TD = 3 * torch.randn(num_rows, hidden, generator=torch.Generator().manual_seed(num_rows))
    update = torch.zeros(num_rows, hidden)
    x_TD = torch.nn.functional.rms_norm(h_TD, (hidden,), layer.post_norm_D, 1e-6)
    expected = mlp(x_TD[None])[0][0]
    found = moe.run(layer, h_TD, update, 1e-6)[1].sum(0)
    assert (found - expected).norm() < 2e-5 * expected.norm()
    if num_rows == 1:  # as on a GPU, where one row has kernels of its own
        with monkeypatch.context() as patch:
            patch.setattr(moe, "runs_row", lambda *_: True)
            alone = moe.run(layer, h_TD, update, 1e-6)[1].sum(0)
        assert (alone - expected).norm() < 2e-5 * expected.norm()
    assert layer.clamp is not None
    others = [{"clamp": Clamp(1.0, layer.clamp.limit)}, {"router_bias_E": torch.zeros(num)}]
    if said:  # the default limit is hardly reached
        others.append({"clamp": Clamp(layer.clamp.alpha, 1e9)})
    for other in others:
        wrong = moe.run(layer._replace(**other), h_TD, update, 1e-6)[1].sum(0)
        assert (wrong - expected).norm() > 1e-2 * expected.norm(), other


def packed(tensors: Tensors) -> None:
    """Experts in MXFP4: random ones, for what they were would have to be rounded."""
    generator = torch.Generator().manual_seed(3)
    for name in ("gate_up_proj", "down_proj"):
        num, columns, rows = tensors.pop(f"{BASE}experts.{name}").shape
        shape = (num, rows, columns // 32)
        blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 124, shape, generator=generator, dtype=torch.uint8)
        tensors[f"{BASE}experts.{name}_blocks"] = blocks
        tensors[f"{BASE}experts.{name}_scales"] = scales


def unpacked(tensors: Tensors) -> None:
    """The same as transformers saves them, dequantised."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    packed(tensors)
    for name in ("gate_up_proj", "down_proj"):
        parts = (tensors.pop(f"{BASE}experts.{name}_{part}") for part in ("blocks", "scales"))
        tensors[f"{BASE}experts.{name}"] = convert_moe_packed_tensors(*parts)


@torch.no_grad()
def test_bf16_keeps_four_bits(tmp_path: Path) -> None:
    """Bug: a run in bf16 widens what its kernel reads as it is, four times the bytes; or gate and
    up are in turn in what is kept, and exchanged in every other row."""
    mlp = gpt_oss_mlp(128, 192, 8)
    said = {"quantization_config": {"quant_method": "mxfp4"}}
    kept = load(write(tmp_path / "packed", mlp, packed, **said), torch.bfloat16)
    wide = load(write(tmp_path / "unpacked", mlp, unpacked), torch.bfloat16)
    pairs = (kept.gate_up_EJD, wide.gate_up_EJD), (kept.down_EDI, wide.down_EDI)
    for ours, theirs in pairs:
        assert isinstance(ours, Mxfp4) and isinstance(theirs, Tensor)
        dense = ours.dense(torch.bfloat16)
        assert torch.equal(out_of_turn(dense) if len(theirs[0]) > 128 else dense, theirs)
    for num_rows in (1, 5, 70):
        h_TD = torch.randn(num_rows, 128, generator=torch.Generator().manual_seed(5)).bfloat16()
        found = [moe.run(layer, h_TD, torch.zeros_like(h_TD), 1e-6)[1] for layer in (kept, wide)]
        assert (found[0].sum(0) - found[1].sum(0)).norm() <= 1e-2 * found[1].sum(0).norm()


def test_dummies_and_plans_have_four_bits() -> None:
    """Bug: a plan counts experts in bf16 that are loaded in four bits, dummy codes are all zeros,
    or a floor counts them by their number of weights."""
    config, _ = read_configs("gpt-oss-20b", None)
    config = replace(config, num_hidden_layers=2)
    plan = target_weights(ShapeSource(torch.bfloat16), config, 1, META)
    ffn = plan.layers[0].ffn
    assert isinstance(ffn, MoeWeights) and isinstance(ffn.gate_up_EJD, Mxfp4)
    first = ffn.gate_up_EJD.codes
    assert first.dtype == torch.int16 and first.shape == (32, 90, 45, 1024)
    of_experts = 32 * 3 * 2880 * 2880
    assert tree_bytes((ffn.gate_up_EJD, ffn.down_EDI)) == of_experts * 17 // 32
    assert config.moe is not None
    small = replace(config, hidden_size=64, moe=replace(config.moe, moe_intermediate_size=64))
    drawn = target_weights(RandomSource(CPU, torch.bfloat16), small, 1, CPU).layers[0].ffn
    assert isinstance(drawn, MoeWeights) and isinstance(drawn.gate_up_EJD, Mxfp4)
    assert 0.015 < drawn.gate_up_EJD.dense(torch.float32).std() < 0.03
    fields = decoder.layer_weights(config)[0].ffn
    one = moe.num_read_elements(config, fields, 1) - 32 * 2880
    assert one == pytest.approx(of_experts * 4 / 32 * 17 / 64, rel=1e-6)


def test_a_scale_past_any_weight(tmp_path: Path) -> None:
    """Bug: a scale that the kernel's factor has no exponent for is widened to another number, or
    the last that it has is refused."""

    def damaged(scale: int) -> Path:
        def damage(tensors: Tensors) -> None:
            packed(tensors)
            tensors[f"{BASE}experts.down_proj_scales"][3, 2, 1] = scale

        said = {"quantization_config": {"quant_method": "mxfp4"}}
        return write(tmp_path / f"{scale}", gpt_oss_mlp(128, 192, 8), damage, **said)

    load(damaged(128), torch.bfloat16)
    directory = damaged(129)
    with pytest.raises(ValueError, match=r"down_proj_scales: a scale of 2\^2"):
        load(directory, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_forms_give_one_tree(tmp_path: Path, dtype: torch.dtype) -> None:
    """Bug: one form is transposed, or its rows are taken apart, otherwise than the other."""
    mlp = gpt_oss_mlp(96, 160, 8)
    quantised = {"quantization_config": {"quant_method": "mxfp4"}}
    one = load(write(tmp_path / "packed", mlp, packed, **quantised), dtype)
    other = load(write(tmp_path / "unpacked", mlp, unpacked), dtype)
    for name, tensor in one._asdict().items():
        theirs = getattr(other, name)
        if not isinstance(tensor, Tensor):
            assert tensor == theirs
            continue
        assert torch.equal(tensor, theirs) and tensor.is_contiguous() and theirs.is_contiguous()
        assert tensor.dtype == theirs.dtype == dtype
    assert isinstance(one.gate_up_EJD, Tensor) and isinstance(one.down_EDI, Tensor)
    assert one.gate_up_EJD.shape == (8, 320, 96) and one.down_EDI.shape == (8, 96, 160)
    saved = load_file(tmp_path / "unpacked" / "model.safetensors")
    rows = saved[f"{BASE}experts.gate_up_proj"].mT.to(dtype)
    assert torch.equal(one.gate_up_EJD[:, :160], rows[:, 0::2])
    assert torch.equal(one.gate_up_EJD[:, 160:], rows[:, 1::2])
    assert torch.equal(one.down_EDI, saved[f"{BASE}experts.down_proj"].mT.to(dtype))
    bias = saved[f"{BASE}experts.gate_up_proj_bias"].to(dtype)
    assert one.gate_up_bias_EJ is not None
    assert torch.equal(one.gate_up_bias_EJ, torch.cat([bias[:, 0::2], bias[:, 1::2]], 1))


def drop(*names: str) -> Callable[[Tensors], Any]:
    return lambda tensors: [tensors.pop(BASE + name) for name in names]


def put(name: str, tensor: Tensor) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({BASE + name: tensor})


def zeros(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


FLOATS = torch.bfloat16
# The tensors that a file is given in place of its own -> what is said of it.
BROKEN: dict[str, tuple[bool, Callable[[Tensors], Any], str]] = {
    "no scales": (True, drop("experts.down_proj_scales"), "down_proj_scales' is missing"),
    "no blocks": (True, drop("experts.down_proj_blocks"), "down_proj_blocks' is missing"),
    "neither": (
        True,
        drop("experts.gate_up_proj_blocks", "experts.gate_up_proj_scales"),
        r"experts\.gate_up_proj' is missing",
    ),
    "both forms": (
        True,
        put("experts.down_proj", zeros(8, 160, 96, dtype=FLOATS)),
        r"1 unexpected tensors \(model\.layers\.0\.mlp\.experts\.down_proj\)",
    ),
    "blocks of floats": (
        True,
        put("experts.down_proj_blocks", zeros(8, 96, 5, 16, dtype=FLOATS)),
        r"down_proj_blocks' has dtype torch\.bfloat16",
    ),
    "scales of another kind": (
        True,
        put("experts.down_proj_scales", zeros(8, 96, 5, dtype=torch.int8)),
        r"down_proj_scales' has dtype torch\.int8; expected uint8",
    ),
    "blocks of another width": (
        True,
        put("experts.down_proj_blocks", zeros(8, 96, 5, 32)),
        r"shape \[8, 96, 5, 32\], the config implies \[8, 96, 5, 16\]",
    ),
    "scales of rows": (
        True,
        put("experts.down_proj_scales", zeros(8, 96)),
        r"shape \[8, 96\], the config implies \[8, 96, 5\]",
    ),
    "not transposed": (
        False,
        put("experts.gate_up_proj", zeros(8, 320, 96, dtype=FLOATS)),
        r"shape \[8, 320, 96\], the config implies \[8, 96, 320\]",
    ),
    "floats of eight bits": (
        False,
        put("experts.down_proj", zeros(8, 160, 96, dtype=torch.float8_e4m3fn)),
        "only unquantised float",
    ),
    "no bias": (False, drop("experts.down_proj_bias"), "down_proj_bias' is missing"),
    "no router's bias": (False, drop("router.bias"), r"router\.bias' is missing"),
    "bias of a half": (
        True,
        put("experts.gate_up_proj_bias", zeros(8, 160, dtype=FLOATS)),
        r"shape \[8, 160\], the config implies \[8, 320\]",
    ),
    "another name": (True, put("gate.weight", zeros(8, 96, dtype=FLOATS)), "1 unexpected"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_half_a_mixture_is_refused(tmp_path: Path, name: str) -> None:
    """Bug: experts that no name matches stay zero, or a tensor is dropped in silence."""
    is_packed, change, message = BROKEN[name]

    def both(tensors: Tensors) -> None:
        if is_packed:
            packed(tensors)
        change(tensors)

    with pytest.raises(ValueError, match=message) as refusal:
        load(write(tmp_path, gpt_oss_mlp(96, 160, 8), both))
    assert str(tmp_path) in str(refusal.value)


def test_codes_are_no_other_models(tmp_path: Path) -> None:
    """Bug: a model whose family has no MXFP4 is loaded from it, scales and all."""
    directory = make_target(tmp_path, model_type="qwen3_moe", tokenizer=False, layers=1)
    file = directory / "model.safetensors"
    tensors = load_file(file) | {f"{BASE}experts.down_proj_blocks": zeros(6, 64, 2, 16)}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="1 unexpected tensors"):
        load(directory)


def test_what_is_planned_is_what_is_loaded(tmp_path: Path) -> None:
    """Bug: the memory plan, dummy weights and a file's tree differ in a shape or a dtype, or a
    floor counts biases as matrices."""
    directory = write(tmp_path, gpt_oss_mlp(96, 160, 8), packed)
    config, dtype = config_of(directory), torch.bfloat16
    loaded = target_weights(Checkpoint(directory, CPU, dtype), config, 8, CPU)
    drawn = target_weights(RandomSource(CPU, dtype), config, 8, CPU)
    planned = target_weights(ShapeSource(dtype), config, 8, META)
    assert tree_bytes(loaded) == tree_bytes(drawn) == tree_bytes(planned)
    for layer in (drawn.layers[0].ffn, planned.layers[0].ffn):
        for one, other in zip(layer, load(directory, dtype), strict=True):
            if isinstance(other, Tensor):
                assert isinstance(one, Tensor) and one.dtype == other.dtype
                assert (one.shape, one.stride()) == (other.shape, other.stride())
            else:
                assert one == other
    drawn_layer = drawn.layers[0].ffn
    assert isinstance(drawn_layer, MoeWeights) and drawn_layer.down_bias_ED is not None
    assert drawn_layer.down_bias_ED.std() > 0.01
    fields = moe.weights(config)
    matrices = 8 * (320 * 96 + 96 * 160)
    assert sum(map(num_matrix_elements, fields.values())) == 8 * 96 + matrices
    assert moe.num_read_elements(config, fields, 1) == 8 * 96 + matrices // 2


def test_published_size() -> None:
    """Bug: a declaration counts a matrix of gpt-oss-20b twice or not at all."""
    values = {"hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32}
    values |= {"num_attention_heads": 64, "num_hidden_layers": 24, "vocab_size": 201088}
    values |= {"num_experts_per_tok": 4, "experts_per_token": 4}
    values |= {"rope_parameters": {"rope_theta": 150000, "rope_type": "default"}}
    config = ModelConfig.from_hf(values | {"model_type": "gpt_oss"})
    assert config.moe is not None and config.moe.clamp == Clamp(1.702, 7.0)
    groups = [decoder.outer_weights(config)]
    groups += [part for layer in decoder.layer_weights(config) for part in layer]
    total = sum(w.num_elements for fields in groups for parts in fields.values() for w in parts)
    assert total == pytest.approx(20.91e9, rel=0.001)


@pytest.mark.slow
@torch.no_grad()
def test_compiled_segments_hold_the_clamp(tmp_path: Path) -> None:
    """Bug: a segment that was compiled for one limit serves a model of another."""
    layer = load(write(tmp_path, gpt_oss_mlp(96, 160, 8)))
    h_TD, update = (
        torch.randn(5, 96, generator=torch.Generator().manual_seed(0)),
        torch.zeros(5, 96),
    )
    (run,) = compile_segments([moe.run])
    found = []
    for limit in (7.0, 0.5):
        own = layer._replace(clamp=Clamp(1.702, limit))
        found.append(run(own, h_TD, update, 1e-6)[1])
        torch.testing.assert_close(found[-1], moe.run(own, h_TD, update, 1e-6)[1])
    assert (found[0] - found[1]).abs().max() > 0.01
