"""What layers declare of their weights equals what transformers has, and feeds all who count."""

from __future__ import annotations

import json
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch

from graphengine.checkpoints.hub import TINY_DRAFT, TINY_TARGET
from graphengine.checkpoints.sources import Checkpoint, RandomSource
from graphengine.checkpoints.weights import draft_weights, target_weights, tree_bytes
from graphengine.config.draft import DraftConfig
from graphengine.config.model import ARCHITECTURES, ModelConfig
from graphengine.measure.segment_bytes import segment_bytes
from graphengine.models import decoder, dflash, gated_attention
from graphengine.models.weight import Weight, num_matrix_elements
from graphengine.startup.build import read_configs
from tests.support.checkpoints import make_target
from tests.support.hybrids import make_hybrid

CPU = torch.device("cpu")


def declared(config: ModelConfig) -> dict[str, Weight]:
    """Every weight of a target, by the name in its file."""
    layers = decoder.layer_weights(config, "model.layers.")
    groups = [decoder.outer_weights(config), *(part for layer in layers for part in layer)]
    return {w.name: w for fields in groups for parts in fields.values() for w in parts}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_names_shapes_and_shards_are_transformers(
    tmp_path: Path, model_type: str, bias: bool
) -> None:
    """Bug: a weight has another name, shape or number in the file than its declaration says, or
    is cut among GPUs along the dimension that would have to be whole."""
    from transformers import AutoConfig

    is_hybrid = ARCHITECTURES[model_type].is_hybrid
    options: dict[str, Any] = {"model_type": model_type, "tie": False, "tokenizer": False}
    if is_hybrid and bias:
        pytest.skip("its biases are refused")
    if is_hybrid:
        directory = make_hybrid(tmp_path, **options)
    else:
        directory = make_target(tmp_path, bias=bias, mlp_bias=bias, **options)
    config = ModelConfig.from_hf(json.loads((directory / "config.json").read_text()))
    target_weights(Checkpoint(directory, CPU, torch.float32), config, 4, CPU)  # none is left over
    found = declared(config)
    plan = AutoConfig.for_model(model_type).base_model_tp_plan
    assert plan is not None
    # gpt-oss's experts are dealt out whole
    is_cut = any("layers" in pattern for pattern in plan) and "ep_router" not in plan.values()
    # theirs name the dimension of the transposed matrix; a router is whole on each GPU
    axes: dict[str, int | None] = {"colwise": 0, "packed_colwise": 0, "rowwise": 1}
    axes |= {"rowwise_split_input": 1}
    axes |= {"colwise_gather_output": None}  # packed: no cut of its rows is one of each part
    for name, weight in found.items():
        if "layers" not in name or len(weight.shape) != 2 or "linear_attn" in name or not is_cut:
            continue  # theirs gathers what a recurrent layer gives
        module = weight.stack.name if weight.stack else name
        module = module.removeprefix("model.").removesuffix(".weight")
        kinds = {kind for pattern, kind in plan.items() if fnmatch(module, pattern)}
        kinds -= {"moe_tp_experts"} if "experts" in module else set()
        assert kinds or name.endswith(("mlp.gate.weight", "expert_gate.weight")), name
        assert [weight.axis] == ([axes[kind] for kind in kinds] or [None]), name
    norms = {name for name, weight in found.items() if weight.initialiser != "normal"}
    assert norms == {name for name in found if name.endswith("norm.weight")}


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_offsets_of_norms(monkeypatch: pytest.MonkeyPatch, model_type: str) -> None:
    """Bug: a row says that norms multiply by `1 + w`, and attention multiplies by w."""
    row = replace(ARCHITECTURES[model_type], has_offset_norms=True)
    config = replace(read_configs(TINY_TARGET, None)[0], model_type=model_type)
    monkeypatch.setitem(ARCHITECTURES, model_type, row)
    norms = [weight for name, weight in declared(config).items() if name.endswith("norm.weight")]
    assert norms and all(weight.offset == 1.0 for weight in norms)


def test_published_sizes() -> None:
    """Bug: a declaration counts a matrix twice or not at all."""
    sizes = {"qwen3-8b": 8.19e9, "qwen3-4b": 4.02e9, "llama-3.1-8b": 8.03e9}
    sizes |= {"qwen3-30b-a3b": 30.53e9, "qwen3.6-35b-a3b": 34.66e9}
    sizes |= {"qwen3.5-4b": 4.206e9, "qwen3.5-9b": 8.954e9, "qwen3.6-27b": 26.896e9}
    for preset, size in sizes.items():
        config, _ = read_configs(preset, None)
        layers = decoder.layer_weights(config, "model.layers.")
        groups = [decoder.outer_weights(config), *(part for layer in layers for part in layer)]
        found = [weight for fields in groups for parts in fields.values() for weight in parts]
        if config.tie_word_embeddings:
            found = [weight for weight in found if weight.name != "lm_head.weight"]
        assert sum(w.num_elements for w in found) == pytest.approx(size, rel=0.001)
    # 8B-b16: 5 layers of attention and MLP, and fc, are its published 1.05 billion parameters.
    _, draft = read_configs("qwen3-8b", "qwen3-8b-dflash-b16")
    assert isinstance(draft, DraftConfig)
    groups = [dflash.outer_weights(draft)]
    groups += [part for layer in decoder.layer_weights(draft.model) for part in layer]
    total = sum(num_matrix_elements(parts) for fields in groups for parts in fields.values())
    assert total == pytest.approx(1.05e9, rel=0.01)


def test_bytes_of_a_tensor_that_two_weights_share() -> None:
    """Bug: queries and gates, which a file has as one tensor, are each counted as the whole, and a
    hybrid's floor is too high."""
    config, _ = read_configs("qwen3.5-4b", None)
    rows = 2 * config.q_size + 2 * config.kv_size
    packed = gated_attention.weights(config)["qkvg_ED"]
    assert num_matrix_elements(packed) == config.hidden_size * rows


def test_bytes_of_a_built_tree() -> None:
    """Bug: the floor of a segment counts other matrices than a built tree holds."""
    config, draft = read_configs(TINY_TARGET, TINY_DRAFT)
    assert isinstance(draft, DraftConfig)
    target = target_weights(RandomSource(CPU, torch.float32), config, 4, CPU)
    drafter = draft_weights(RandomSource(CPU, torch.float32), draft, 4, CPU)

    def matrices(tree: object) -> int:
        nodes = tree if isinstance(tree, tuple) else ()
        own = tree.numel() if isinstance(tree, torch.Tensor) and tree.dim() == 2 else 0
        return own + sum(map(matrices, nodes))

    found = segment_bytes(config, draft, 1, 1)
    head = target.lm_head_VD.numel()
    assert found["verify"] == matrices(target.layers) + head
    tables = [drafter.fc_DC, drafter.context_kv_XD]
    assert found["draft.context"] == sum(map(matrices, tables))
    in_draft = found["draft"] + found["draft.00"]
    assert in_draft == matrices(drafter.layers) + head
    assert found["speculate"] == found["verify"] + in_draft + found["draft.context"]
    assert tree_bytes(target.layers) > 4 * matrices(target.layers)
