"""A mixture of experts equals transformers', from either form of its files, and is not half loaded.

Reference: transformers, dense, float32, eager attention and experts, loaded from the same files.
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

from graphengine.api import Engine
from graphengine.checkpoints.sources import Checkpoint
from graphengine.checkpoints.weights import target_weights
from graphengine.config import model as model_config
from graphengine.config.model import ModelConfig
from graphengine.kernels.moe import choose_reference
from graphengine.models import decoder, moe
from graphengine.models.layers import add as add_update
from graphengine.models.moe import MoeWeights
from tests.models.test_qwen3_golden import chain_logits, token_ids
from tests.support.checkpoints import edit_config, make_drafter, make_target
from tests.support.dflash_reference import force_drafts, load_target, plain_generate, run_target

CPU = torch.device("cpu")
NUM_TOKENS = 45
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"extra": {"num_experts": 7, "num_experts_per_tok": 2, "norm_topk_prob": True}},
    "tied-top-1": {"extra": {"num_experts_per_tok": 1, "norm_topk_prob": False}},
    "untied-not-normalised": {
        "tie": False,
        "extra": {"num_experts": 11, "num_experts_per_tok": 4, "norm_topk_prob": False},
    },
    "odd-heads": {
        "heads": 6,
        "kv_heads": 3,
        "head_dim": 32,
        "hidden": 48,
        "bias": True,
        "extra": {"num_experts": 5, "num_experts_per_tok": 4, "moe_intermediate_size": 20}
        | {"norm_topk_prob": True},
    },
    "all-experts": {"extra": {"num_experts": 3, "num_experts_per_tok": 3}},
}
Tensors = dict[str, Tensor]


def moe_target(directory: Path, **options: Any) -> Path:
    return make_target(directory, model_type="qwen3_moe", **options)


def rewrite(directory: Path, change: Callable[[Tensors], Any]) -> Path:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, file, metadata={"format": "pt"})
    return directory


def fuse(tensors: Tensors) -> None:
    """Per-expert tensors -> the two that hold all experts of a layer."""
    layers = {n.split(".mlp.experts.")[0] for n in tensors if ".mlp.experts." in n}
    for layer in layers:
        base, gate_up, down = f"{layer}.mlp.experts.", [], []
        while f"{base}{(e := len(down))}.up_proj.weight" in tensors:
            names = [f"{base}{e}.{part}_proj.weight" for part in ("gate", "up", "down")]
            gate, up, last = (tensors.pop(name) for name in names)
            gate_up.append(torch.cat([gate, up]))
            down.append(last)
        tensors[f"{base}gate_up_proj"] = torch.stack(gate_up)
        tensors[f"{base}down_proj"] = torch.stack(down)


def load(directory: Path) -> decoder.Weights:
    config = ModelConfig.from_hf(json.loads((directory / "config.json").read_text()))
    return target_weights(Checkpoint(directory, CPU, torch.float32), config, 8, CPU)


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    """Bug: gate and up are swapped, an expert is taken for its neighbour, weights are normalised
    or not the wrong way, or are applied before the down projection; or (H27) the fused form of the
    files is read as another order."""
    directory = moe_target(tmp_path, **CONFIGS[name])
    ids = token_ids(NUM_TOKENS)
    expected = run_target(load_target(directory), ids).logits
    for form in ("per expert", "fused"):
        if form == "fused":
            rewrite(directory, fuse)
        for chunks in ([NUM_TOKENS], [1] * NUM_TOKENS, [17, *[1] * 8, 20]):
            found = chain_logits(directory, ids, chunks)
            error = (found - expected).norm() / expected.norm()
            assert error < 2e-5, (form, len(chunks), error)
            assert torch.equal(found.argmax(-1), expected.argmax(-1))


def drop(*names: str) -> Callable[[Tensors], Any]:
    return lambda tensors: [tensors.pop(name) for name in names]


LAST = "model.layers.1.mlp.experts."


def add(name: str, *shape: int) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


def fused_then(change: Callable[[Tensors], Any]) -> Callable[[Tensors], Any]:
    def both(tensors: Tensors) -> None:
        fuse(tensors)
        change(tensors)

    return both


BROKEN: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "missing expert": (drop(f"{LAST}5.up_proj.weight"), r"5\.up_proj\.weight' is missing"),
    "extra expert": (add(f"{LAST}6.up_proj.weight", 40, 64), r"unexpected.*6\.up_proj"),
    "router": (drop("model.layers.0.mlp.gate.weight"), r"mlp\.gate\.weight' is missing"),
    "both forms": (add(f"{LAST}down_proj", 6, 64, 40), r"6 unexpected.*0\.down_proj"),
    "shared expert": (add("model.layers.0.mlp.shared_expert_gate.weight", 1, 64), "unexpected"),
    "fused, one missing": (fused_then(drop(f"{LAST}down_proj")), r"0\.down_proj.* is missing"),
    "fused, transposed": (
        fused_then(lambda t: t.update({f"{LAST}down_proj": torch.zeros(6, 40, 64)})),
        r"shape \[6, 40, 64\]",
    ),
    "fused, an expert more": (
        fused_then(lambda t: t.update({f"{LAST}gate_up_proj": torch.zeros(7, 80, 64)})),
        r"shape \[7, 80, 64\]",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_half_a_mixture_is_refused(tmp_path: Path, name: str) -> None:
    """Bug H27, H28: experts that no name matches stay zero, a tensor is dropped in silence."""
    change, message = BROKEN[name]
    directory = moe_target(tmp_path, tokenizer=False)
    load(directory)
    with pytest.raises(ValueError, match=message):
        load(rewrite(directory, change))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "two counts": ({"num_experts": 5}, "num_experts 5 and num_local_experts 6 disagree"),
    "no count": ({"num_local_experts": None}, "no num_experts"),
    "sparse step": ({"decoder_sparse_step": 2}, "decoder_sparse_step 2"),
    "dense layers": ({"mlp_only_layers": [0]}, r"mlp_only_layers \[0\]"),
    "more than all": ({"num_experts_per_tok": 7}, "num_experts_per_tok"),
    "no width": ({"moe_intermediate_size": None}, "no moe_intermediate_size"),
    "shared": ({"shared_expert_intermediate_size": 32}, "no shared expert"),
    "quantised": ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_configs_refused(tmp_path: Path, name: str) -> None:
    """Bug: a key that changes the result is not read."""
    change, message = REFUSED[name]
    edit_config(moe_target(tmp_path, tokenizer=False), lambda config: config | change)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_keys_that_may_be_missing(tmp_path: Path) -> None:
    """Bug: a default is the other family's: norm_topk_prob is false where a Qwen3-MoE file does not
    say, or the size of a dense MLP that no layer has is asked for."""
    path = moe_target(tmp_path, tokenizer=False) / "config.json"
    values = json.loads(path.read_text())
    del values["norm_topk_prob"], values["intermediate_size"], values["mlp_only_layers"]
    values["num_experts"] = values.pop("num_local_experts")
    config = ModelConfig.from_hf(values)
    assert config.moe is not None and not config.moe.norm_topk_prob
    assert config.moe.num_experts == 6
    values["norm_topk_prob"] = True
    config = ModelConfig.from_hf(values)
    assert config.moe is not None and config.moe.norm_topk_prob
    values["shared_expert_intermediate_size"] = 24
    always = model_config.MoeKeys(norm_topk_prob=True, reads_norm_key=False, has_shared_expert=True)
    raw = model_config.RawConfig(values, "config.json")
    assert model_config.MoeConfig.from_raw(raw, always).shared_expert_intermediate_size == 24
    values["norm_topk_prob"] = False
    with pytest.raises(ValueError, match="norm_topk_prob False has no meaning"):
        model_config.MoeConfig.from_raw(raw, always)


def test_contributions_are_added_before_they_are_rounded() -> None:
    """Bug: what the experts of a row give is rounded once by itself and once with the residual."""
    residual_TD = torch.full((1, 1), 256.0, dtype=torch.bfloat16)  # whose neighbour is 258
    assert add_update(residual_TD, torch.tensor([[[1.0]], [[2**-10]]])) == 258


@pytest.mark.parametrize("form", ["per expert", "fused"])
@torch.no_grad()
def test_shared_expert_equals_transformers(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug H28: the shared expert is dropped, is not gated, or is gated by what belongs to another
    row; or one family's normalisation is taken for the other's."""
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as theirs
    from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

    keys = model_config.MoeKeys(norm_topk_prob=True, reads_norm_key=False, has_shared_expert=True)
    row = replace(model_config.ARCHITECTURES["qwen3_moe"], moe=keys)
    monkeypatch.setitem(model_config.ARCHITECTURES, "with_shared", row)
    directory = moe_target(tmp_path, tokenizer=False, layers=1, extra={"norm_topk_prob": True})
    edit_config(
        directory,
        lambda c: c | {"model_type": "with_shared", "shared_expert_intermediate_size": 24},
    )
    with pytest.raises(ValueError, match=r"shared_expert\.gate_proj\.weight' is missing"):
        load(directory)
    base, generator = "model.layers.0.mlp.", torch.Generator().manual_seed(2)
    shapes = {
        "shared_expert.gate_proj": (24, 64),
        "shared_expert.up_proj": (24, 64),
        "shared_expert.down_proj": (64, 24),
        "shared_expert_gate": (1, 64),
    }
    for name, shape in shapes.items():
        tensor = torch.randn(shape, generator=generator) / shape[1] ** 0.5
        rewrite(directory, lambda t, n=name, x=tensor: t.update({f"{base}{n}.weight": x}))
    block_tensors = dict(load_file(directory / "model.safetensors"))
    fuse(block_tensors)
    if form == "fused":
        rewrite(directory, fuse)
    config = Qwen3_5MoeTextConfig(
        hidden_size=64,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=40,
        shared_expert_intermediate_size=24,
    )
    config._experts_implementation = "eager"
    block = theirs.Qwen3_5MoeSparseMoeBlock(config)
    block.load_state_dict(
        {n.removeprefix(base): t for n, t in block_tensors.items() if n.startswith(base)}
    )
    layer = load(directory).layers[0].ffn
    assert isinstance(layer, MoeWeights)
    h_TD = torch.randn(19, 64, generator=generator)
    x_TD = torch.nn.functional.rms_norm(h_TD, (64,), layer.post_norm_D, 1e-6)
    _, update_ZTD = moe.run(layer, h_TD, torch.zeros(19, 64), 1e-6)
    torch.testing.assert_close(update_ZTD.sum(0), block(x_TD[None])[0], rtol=2e-5, atol=2e-5)
    without = moe.run(layer._replace(shared_gate_up_JD=None), h_TD, torch.zeros(19, 64), 1e-6)[1]
    assert (without.sum(0) - update_ZTD.sum(0)).abs().max() > 1e-2


def test_ties_and_poison() -> None:
    """Bug: equal logits, common in bf16, are ordered as a sort happens to leave them; a row that is
    not a number names an expert beyond the last."""
    logits = torch.tensor(
        [[1.0, 2, 2, 0, 2, -0.0, 0], [torch.nan] * 7, [1, 9, 0, 0, 0, 3, torch.nan]]
    )
    chosen, weights = choose_reference(logits, 3, True)
    assert chosen.tolist() == [[1, 2, 4], [0, 1, 2], [1, 5, 0]]
    assert weights[1:].isnan().all() and weights[0].tolist() == pytest.approx([1 / 3] * 3)


@pytest.mark.slow
@pytest.mark.parametrize("speculates", ["forced", "ngram"])
def test_engine_says_what_plain_decoding_says(tmp_path: Path, speculates: str) -> None:
    """Bug: a block's rows disturb each other's experts, or a chunk of a prompt is routed as another
    kind of step."""
    directory = moe_target(tmp_path / "target", layers=3, **CONFIGS["untied-not-normalised"])
    prompts = [token_ids(n, seed=n) for n in (1, 9, 23)]
    model = load_target(directory)
    truth = {tuple(p): plain_generate(model, p, 40) for p in prompts}
    draft: Any = "ngram"
    if speculates == "forced":
        draft = make_drafter(tmp_path / "drafter", directory, block_size=6, intermediate=96)
    for drafter in (None, draft):
        number = None if drafter is None else 5  # not what is fastest here
        run = {"buckets": (2,), "page_size": 4, "num_speculative_tokens": number}
        with Engine.from_pretrained(directory, drafter, max_model_len=96, **run) as engine:
            if drafter is not None and speculates == "forced":
                force_drafts(
                    engine, truth, lambda request, step: (5 * step + request.request_id) % 6
                )
            results = engine.generate(prompts, max_new_tokens=30, ignore_eos=True)
        for prompt, result in zip(prompts, results, strict=True):
            assert result.token_ids == truth[tuple(prompt)][:30], drafter


@pytest.mark.slow
def test_compiled_segments_hold_the_constants(tmp_path: Path) -> None:
    """Bug: a segment compiled for one number of experts a row serves a model of another, whose
    tensors have the same shapes."""
    for per_token, normalises in ((1, True), (2, True), (2, False)):
        extra = {"num_experts_per_tok": per_token, "norm_topk_prob": normalises}
        name = f"{per_token}-{normalises}"
        directory = moe_target(tmp_path / name, layers=1, extra=extra)
        tokens = plain_generate(load_target(directory), [3, 4, 5], 12)
        with Engine.from_pretrained(
            directory, buckets=(1,), max_model_len=64, compile=True
        ) as engine:
            (result,) = engine.generate([[3, 4, 5]], max_new_tokens=12, ignore_eos=True)
        assert result.token_ids == tokens, name
