"""Loading is strict both ways: what is missing, unexpected, misshaped or damaged is refused.

A checkpoint that is loaded anyway gives wrong tokens or lost acceptance without any error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from graphengine.checkpoints.sources import Checkpoint, RandomSource, ShapeSource
from graphengine.checkpoints.weights import (
    distinct_tensors,
    draft_weights,
    quantized_draft_weights,
    target_weights,
)
from graphengine.config.draft_formats import parse_draft
from graphengine.config.model import ModelConfig
from graphengine.models.attention import AttentionWeights
from graphengine.models.decoder import Weights
from graphengine.models.dflash import DraftWeights
from graphengine.models.swiglu import SwigluWeights
from graphengine.models.weight import Weight, norm
from tests.support.checkpoints import edit_config, make_drafter, make_target
from tests.support.hybrids import make_hybrid

CPU = torch.device("cpu")
Tensors = dict[str, Tensor]


def load_target(directory: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Weights:
    config = ModelConfig.from_hf(json.loads((directory / "config.json").read_text()))
    return target_weights(Checkpoint(directory, CPU, dtype, **options), config, 16, CPU)


def load_drafter(directory: Path) -> DraftWeights:
    config = parse_draft(json.loads((directory / "config.json").read_text()))
    return draft_weights(Checkpoint(directory, CPU, torch.float32), config, 16, CPU)


def flat(tree: Any) -> list[Tensor]:
    """Tensors of a tree in order."""
    if isinstance(tree, Tensor):
        return [tree]
    return [t for node in tree for t in flat(node)] if isinstance(tree, tuple) else []


def same(found: Any, expected: Tensor) -> bool:
    return isinstance(found, Tensor) and torch.equal(found, expected)


def edit_tensors(directory: Path, change: Callable[[Tensors], Any]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return make_target(tmp_path / "target", tokenizer=False, bias=True)


@pytest.fixture
def drafter(target: Path, tmp_path: Path) -> Path:
    return make_drafter(tmp_path / "drafter", target, bias=True)


def test_every_tensor_arrives(target: Path, drafter: Path) -> None:
    """Bug: a tensor is packed at the wrong rows, or the context projection takes the wrong ones."""
    files, weights = load_file(target / "model.safetensors"), load_target(target)
    for i, layer in enumerate(weights.layers):
        attention, mixer = f"model.layers.{i}.self_attn.", layer.mixer
        assert isinstance(mixer, AttentionWeights)
        for kind, packed in (("weight", mixer.qkv_ED), ("bias", mixer.qkv_bias_E)):
            parts = [files[f"{attention}{name}_proj.{kind}"] for name in "qkv"]
            assert packed is not None
            torch.testing.assert_close(packed, torch.cat(parts), atol=0, rtol=0)
        assert same(mixer.o_DF, files[f"{attention}o_proj.weight"])
        assert mixer.o_bias_D is not None
        assert torch.equal(mixer.o_bias_D, files[f"{attention}o_proj.bias"])
        mlp = [files[f"model.layers.{i}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
        assert isinstance(layer.ffn, SwigluWeights)
        assert same(layer.ffn.gate_up_JD, torch.cat(mlp))
    drafts, own = load_drafter(drafter), load_file(drafter / "model.safetensors")
    for kind, packed in (("weight", drafts.context_kv_XD), ("bias", drafts.context_kv_bias_X)):
        parts = [own[f"layers.{i}.self_attn.{name}_proj.{kind}"] for i in (0, 1) for name in "kv"]
        assert packed is not None
        assert same(packed, torch.cat(parts))
    norms = torch.stack([own[f"layers.{i}.self_attn.k_norm.weight"] for i in (0, 1)])
    assert torch.equal(drafts.k_norm_LH, norms)
    total = sum(t.numel() for t in own.values())
    assert isinstance(drafts.context_kv_XD, Tensor)
    context = drafts.context_kv_XD.numel() + norms.numel()
    assert drafts.context_kv_bias_X is not None
    context += drafts.context_kv_bias_X.numel() + drafts.rope_PH.numel()
    assert sum(t.numel() for t in flat(drafts)) == total + context


def test_sharded_equals_single(tmp_path: Path) -> None:
    """Bug: a shard is skipped, or read under another's name."""
    single = make_target(tmp_path / "single", tokenizer=False, tie=False)
    sharded = make_target(tmp_path / "sharded", tokenizer=False, tie=False, sharded=True)
    assert len(list(sharded.glob("*.safetensors"))) > 2
    for a, b in zip(flat(load_target(single)), flat(load_target(sharded)), strict=True):
        assert torch.equal(a, b)


def test_a_file_that_is_written_over(target: Path, drafter: Path) -> None:
    """Bug: weights lie in the file's memory map, so that a copy over it changes a running engine's
    tokens, or ends its process."""
    trees = load_target(target), load_drafter(drafter)
    before = [tensor.clone() for tensor in flat(trees)]
    for directory in (target, drafter):
        file = directory / "model.safetensors"
        with file.open("r+b") as opened:
            opened.write(bytes(file.stat().st_size))
    assert all(map(torch.equal, flat(trees), before))


def test_progress_of_a_tensor_that_holds_several(tmp_path: Path) -> None:
    """Bug: what several weights are parts of counts once for each of them, so that of Qwen3-Next's
    files more is loaded than there is."""
    seen: list[tuple[int, int]] = []
    directory = make_hybrid(tmp_path, model_type="qwen3_next", tokenizer=False)
    load_target(directory, progress=lambda *state: seen.append(state))
    tensors = load_file(directory / "model.safetensors").values()
    assert seen[-1][0] == sum(t.numel() * t.element_size() for t in tensors) < seen[-1][1]


def test_dtype_and_progress(target: Path) -> None:
    """Bug: weights stay in the file's dtype, the rope table is rounded, progress passes the end."""
    seen: list[tuple[int, int]] = []
    weights = load_target(target, torch.bfloat16, progress=lambda *state: seen.append(state))
    assert {t.dtype for t in flat(weights[:-1])} == {torch.bfloat16}
    assert weights.rope_PH.dtype == torch.float32
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    done, total = seen[-1]
    assert 0.9 * total < done <= total
    tensors = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    for i, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2])):
        save_file({name: tensors[name] for name in names}, target / f"model-{i}.safetensors")
    seen.clear()
    load_target(target, torch.bfloat16, progress=lambda *state: seen.append(state))
    sizes = [path.stat().st_size for path in target.glob("*.safetensors")]
    assert len(sizes) == 2 and {whole for _, whole in seen} == {sum(sizes)}


def test_what_a_norm_is_of_is_not_rounded(tmp_path: Path) -> None:
    """Bug: 1 is added to a norm's w in the file's bfloat16, which keeps 7 bits of the sum."""
    w = (torch.arange(1, 9) / 1000).bfloat16()
    save_file({"norm.weight": w}, tmp_path / "model.safetensors")
    (declared,) = norm("norm.weight", 8, is_offset=True)
    found = Checkpoint(tmp_path, CPU, torch.bfloat16).take(declared)
    assert found.dtype == torch.float32 and torch.equal(found, 1 + w.float())


def drop(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(name)


def put(name: str, value: Tensor) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: value})


Q = "model.layers.1.self_attn.q_proj.weight"
TARGET_DAMAGE: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "missing": (drop(Q), rf"tensor '{Q}' is missing"),
    "missing-norm": (drop("model.norm.weight"), "tensor 'model.norm.weight' is missing"),
    "missing-bias": (drop("model.layers.0.self_attn.k_proj.bias"), "k_proj.bias' is missing"),
    "unexpected": (put("model.layers.2.mlp.up_proj.weight", torch.zeros(3)), "1 unexpected tens"),
    "misshaped": (
        put(Q, torch.zeros(64, 63)),
        r"has shape \[64, 63\], the config implies \[64, 64\]",
    ),
    "transposed": (put("model.layers.0.mlp.up_proj.weight", torch.zeros(64, 96)), r"\[96, 64\]"),
    "quantised": (put(Q, torch.zeros(64, 64, dtype=torch.int8)), "dtype torch.int8; only unquant"),
    "scales": (put(Q + "_scale", torch.zeros(64)), "unexpected"),
}


@pytest.mark.parametrize("name", TARGET_DAMAGE)
def test_damaged_target_is_refused(target: Path, name: str) -> None:
    """Bug T33: tensors are skipped or left at zero because names or shapes do not match."""
    damage, message = TARGET_DAMAGE[name]
    edit_tensors(target, damage)
    with pytest.raises(ValueError, match=message):
        load_target(target)


DRAFTER_DAMAGE: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "missing": (drop("hidden_norm.weight"), "'hidden_norm.weight' is missing"),
    "own-head": (put("lm_head.weight", torch.zeros(512, 64)), r"unexpected tensors \(lm_head"),
    "mask-embedding": (put("mask_hidden", torch.zeros(64)), "unexpected"),
    "taps": (put("fc.weight", torch.zeros(64, 64)), r"\[64, 64\], the config implies \[64, 128\]"),
}


@pytest.mark.parametrize("name", DRAFTER_DAMAGE)
def test_damaged_drafter_is_refused(drafter: Path, name: str) -> None:
    """Bug T33: a drafter of another variant (own head, mask row, other taps) loads in part."""
    damage, message = DRAFTER_DAMAGE[name]
    edit_tensors(drafter, damage)
    with pytest.raises(ValueError, match=message):
        load_drafter(drafter)


def test_float8_is_refused(target: Path) -> None:
    """Bug: float8 counts as floating point, so a scaled checkpoint loads without its scales."""
    edit_tensors(target, put(Q, torch.zeros(64, 64).to(torch.float8_e4m3fn)))
    with pytest.raises(ValueError, match=r"only unquantised"):
        load_target(target)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_file_is_refused(target: Path, keep: int) -> None:
    """Bug: an interrupted download is a traceback of the format's library, or loads as zeros."""
    path = target / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match="truncated or damaged, fetch it again"):
        load_target(target)


def test_the_same_weights_in_another_form_beside(target: Path) -> None:
    """Bug: `consolidated.safetensors`, the same tensors under other names, is read as well, and a
    checkpoint that loads everywhere else is refused for names that are not the model's."""
    save_file({"layers.0.attention.wq.weight": torch.zeros(2)}, target / "consolidated.safetensors")
    assert load_target(target)


def test_missing_files_are_refused(tmp_path: Path) -> None:
    """Bug: a shard that was never fetched is noticed only through a missing tensor, or not."""
    sharded = make_target(tmp_path, tokenizer=False, sharded=True)
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.rename(sharded / "elsewhere")
    with pytest.raises(ValueError, match=rf"no weight files \['{shard.name}'\]; fetch"):
        load_target(sharded)
    (sharded / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ValueError, match="not a safetensors index"):
        load_target(sharded)
    for path in [*sharded.glob("*.safetensors"), sharded / "model.safetensors.index.json"]:
        path.unlink()
    with pytest.raises(ValueError, match=r"no model\.safetensors; fetch"):
        load_target(sharded)


def test_tensor_in_two_files_is_refused(target: Path) -> None:
    """Bug: of two files with the same tensor one wins by the order of their names."""
    whole = (target / "model.safetensors").rename(target / "model-00001-of-00002.safetensors")
    save_file({Q: load_file(whole)[Q]}, target / "model-00002-of-00002.safetensors")
    with pytest.raises(ValueError, match="is in two files"):
        load_target(target)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/absolute/outside.safetensors"])
def test_index_cannot_leave_the_directory(target: Path, tmp_path: Path, name: str) -> None:
    """Bug: an index that names a path outside makes the loader read any file of the machine."""
    outside = tmp_path / "outside.safetensors"
    (target / "model.safetensors").rename(outside)
    name = name.replace("/absolute", str(tmp_path))
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(outside), name)}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="outside"):
        load_target(target)


def test_tied_checkpoints_with_a_stored_head(tmp_path: Path) -> None:
    """Bug T31: a stored copy of a tied head is an unexpected tensor; or a head of its own is
    replaced by the embedding without a word."""
    target = make_target(tmp_path, tokenizer=False)
    table = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    weights = load_target(target)
    assert weights.lm_head_VD.data_ptr() == weights.embed_VD.data_ptr()
    edit_tensors(target, put("lm_head.weight", table.clone()))
    weights = load_target(target)
    assert weights.lm_head_VD.data_ptr() == weights.embed_VD.data_ptr()
    edit_tensors(target, put("lm_head.weight", table + 1))
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from the embedding"):
        load_target(target)
    edit_config(target, lambda values: values | {"tie_word_embeddings": False})
    assert torch.equal(load_target(target).lm_head_VD, table + 1)


def test_buffers_of_old_checkpoints_are_ignored(target: Path) -> None:
    """Bug: rotary_emb.inv_freq, which old versions stored, counts as unexpected."""
    edit_tensors(target, put("model.layers.0.self_attn.rotary_emb.inv_freq", torch.zeros(8)))
    load_target(target)


@pytest.mark.parametrize("count", [5, 6])
def test_unexpected_tensors_are_counted(tmp_path: Path, count: int) -> None:
    """Bug: tensors that are for something else, which are skipped, are counted among those that are
    unexpected; or of six none is said to be left out."""
    names = [f"x{i}" for i in range(count)]
    kept = {name: torch.zeros(1) for name in [*names, "mtp.a", "mtp.b", "rotary_emb.inv_freq"]}
    save_file(kept, tmp_path / "model.safetensors")
    source = Checkpoint(tmp_path, CPU, torch.float32)
    shown = ", ".join(names[:5]) + ", .." * (count > 5)
    with pytest.raises(ValueError, match=rf": {count} unexpected tensors \({re.escape(shown)}\);"):
        source.finish(("mtp.",))


def test_what_is_whole_in_the_file_is_not_copied(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a matrix that is packed with no other is held twice while it loads."""
    taken: list[Tensor] = []
    take = Checkpoint.take

    def recorded(self: Checkpoint, weight: Weight) -> Tensor:
        taken.append(take(self, weight))
        return taken[-1]

    monkeypatch.setattr(Checkpoint, "take", recorded)
    mixer = load_target(target).layers[0].mixer
    assert isinstance(mixer, AttentionWeights)
    assert any(mixer.o_DF is tensor for tensor in taken)


def test_random_weights_have_the_checkpoints_shapes(target: Path, drafter: Path) -> None:
    """Bug: load_format dummy measures other shapes than the real checkpoint has."""
    config = ModelConfig.from_hf(json.loads((target / "config.json").read_text()))
    draft = parse_draft(json.loads((drafter / "config.json").read_text()))
    dummy = target_weights(RandomSource(CPU, torch.float32), config, 16, CPU)
    dummy_draft = draft_weights(RandomSource(CPU, torch.float32, 1), draft, 16, CPU)
    pairs = [(dummy, load_target(target)), (dummy_draft, load_drafter(drafter))]
    for random, real in pairs:
        assert [t.shape for t in flat(random)] == [t.shape for t in flat(real)]
        assert all(t.isfinite().all() for t in flat(random))
    again = target_weights(RandomSource(CPU, torch.float32), config, 16, CPU)
    assert all(torch.equal(a, b) for a, b in zip(flat(dummy), flat(again), strict=True))


def test_experts_are_made_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a start plans and draws 30,720 matrices of 35B-A3B one by one, and is 3 s longer; or
    what is drawn as one has another shape than what files hold in parts."""
    directory = make_hybrid(tmp_path, model_type="qwen3_5_moe_text")
    config = ModelConfig.from_hf(json.loads((directory / "config.json").read_text()))
    assert config.moe is not None
    asked = list[str]()
    for kind in (RandomSource, ShapeSource):
        take = kind.take

        def recorded(self: Any, weight: Weight, take: Any = take) -> Tensor:
            asked.append(weight.name)
            return take(self, weight)

        monkeypatch.setattr(kind, "take", recorded)
    real = flat(load_target(directory))
    for source in (RandomSource(CPU, torch.float32), ShapeSource(torch.float32)):
        asked.clear()
        tree = target_weights(source, config, 16, CPU)
        assert [t.shape for t in flat(tree)] == [t.shape for t in real]
        of_experts = [name for name in asked if ".experts." in name]
        assert len(of_experts) == 2 * config.num_hidden_layers
    names = ["another"]  # of files, which hold what they hold
    target_weights(ShapeSource(torch.float32, names), config, 16, CPU)
    assert sum(".experts.5." in name for name in asked) == 3 * config.num_hidden_layers


def test_uniform_weights_are_those_of_the_peers_loader() -> None:
    """Bug: norms stay at one, and what is compared with a peer is not like it."""
    source = RandomSource(CPU, torch.bfloat16, is_uniform=True)
    for declared in (*norm("model.norm.weight", 4096), Weight("lm_head.weight", (4096,))):
        weight = source.take(declared).float()
        assert weight.abs().max() <= 1e-3
        assert weight.std() == pytest.approx(2e-3 / 12**0.5, rel=0.1)


def test_dummy_weights_are_those_of_their_seed() -> None:
    """Bug: a dummy drafter is drawn like its target, so that what both have alike is equal; or two
    starts draw two models."""
    declared = Weight("fc.weight", (8, 8))
    first, again, other = (
        RandomSource(CPU, torch.float32, seed).take(declared) for seed in (0, 0, 1)
    )
    assert torch.equal(first, again) and not torch.isin(first, other).any()


def test_every_matrix_of_a_drafter_is_rounded(tmp_path: Path) -> None:
    """Bug: a matrix stays as it was, and an FP8 drafter reads twice that one's bytes."""
    target = make_target(tmp_path / "target", tokenizer=False)
    rounded = quantized_draft_weights(load_drafter(make_drafter(tmp_path / "drafter", target)))
    kept = [x for x in distinct_tensors(rounded) if x.dim() == 2 and x.dtype == torch.float32]
    assert {id(x) for x in kept} == {id(rounded.k_norm_LH), id(rounded.rope_PH)}
