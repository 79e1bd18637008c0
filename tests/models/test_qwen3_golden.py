"""The target equals transformers' Qwen3 on random configs, in every way in which rows can be fed.

Reference: transformers, dense, float32, eager attention, loaded from the same files. Random norms
and biases make every weight matter; the shapes are odd on purpose.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from graphengine.api import Engine
from graphengine.checkpoints.sources import Checkpoint
from graphengine.checkpoints.weights import target_weights
from graphengine.config.model import ModelConfig
from graphengine.decode.attention import LayerAttentions, Layout, TorchAttention
from graphengine.decode.kvcache import make_pool, pages_for
from graphengine.decode.segments import Segments, logits_segment
from graphengine.decode.stack import Rows, Target, last_step, no_tap, target_chain
from tests.support.checkpoints import edit_config, make_target
from tests.support.dflash_reference import load_target, plain_generate, run_target

YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
MSCALE = {"mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 16, "beta_slow": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
ODD = {"heads": 6, "kv_heads": 3, "head_dim": 32, "hidden": 48, "intermediate": 80}

CONFIGS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie": False},
    "odd-heads": ODD,
    "mha": {"heads": 3, "kv_heads": 3, "head_dim": 10},
    "mqa-bias": {"kv_heads": 1, "bias": True},
    "one-layer": {"layers": 1, "bias": True, "tie": False},
    "theta-nested": {"rope": {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}},
    "theta-nested-wins": {
        "rope": {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"}}
    },
    "yarn-flat": {
        "rope": {"rope_theta": 1e4, "rope_scaling": {"type": "yarn", **YARN}},
        "layers": 1,
    },
    "yarn-nested-mscale": {
        "rope": {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", **YARN, **MSCALE}},
    },
    "yarn-attention-factor": {
        "rope": {
            "rope_theta": 5e4,
            "rope_scaling": {"rope_type": "yarn", **YARN, "attention_factor": 1.3},
        },
        **ODD,
    },
    "yarn-no-truncate": {
        "rope": {
            "rope_theta": 1e4,
            "rope_scaling": {"rope_type": "yarn", **YARN, "truncate": False},
        },
        "head_dim": 32,
    },
    "llama3-nested": {"rope": {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}}, "head_dim": 32},
    "llama3-flat": {"rope": {"rope_theta": 1e4, "rope_scaling": LLAMA3}, "tie": False},
}
NUM_TOKENS = 45
CHUNKINGS: dict[str, list[int]] = {
    "whole": [NUM_TOKENS],
    "step-by-step": [1] * NUM_TOKENS,
    "page-edges": [4, 4, 3, 1, 5, 8, 20],
    "prompt-then-steps": [17] + [1] * 8 + [20],
}


def token_ids(count: int, vocab: int = 512, seed: int = 3) -> list[int]:
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def chain_logits(
    directory: Path,
    ids: Sequence[int],
    chunks: Sequence[int],
    page_size: int = 4,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Logits of every row, fed through the engine's own chain in chunks; unread K/V is NaN."""
    cpu = torch.device("cpu")
    config = ModelConfig.from_hf(json.loads((directory / "config.json").read_text()))
    weights = target_weights(Checkpoint(directory, cpu, dtype), config, len(ids), cpu)
    pages = list(range(pages_for(len(ids), page_size), 0, -1))  # descending: no accidental order
    pool = make_pool(config, len(pages) + 1, page_size, dtype, cpu).fill_(float("nan"))
    attention = LayerAttentions.of(config, lambda r: TorchAttention(config, page_size, r, cpu))
    target = Target(config=config, weights=weights, kv_pool=pool)
    done, logits = 0, []
    for count in chunks:
        positions = torch.arange(done, done + count)
        slots = torch.tensor(pages)[positions // page_size] * page_size + positions % page_size
        rows = Rows(torch.tensor(ids[done : done + count]), positions, slots)
        attn = torch.full((count, config.num_attention_heads, config.head_dim), float("nan"))
        for each in attention.distinct:
            each.plan(Layout.build([count], [done + count], [pages], page_size))
        carry: Any = ()
        chain = target_chain("verify", target, rows, attention, attn.to(dtype), Segments(), no_tap)
        for step in [*chain, last_step("verify", target, no_tap, logits_segment)]:
            carry = step.run(carry)
        logits.append(carry[0])
        done += count
    return torch.cat(logits)


def check_logits(directory: Path) -> None:
    """In chunks of every kind they are transformers'."""
    ids = token_ids(NUM_TOKENS)
    expected = run_target(load_target(directory), ids).logits
    for chunking, chunks in CHUNKINGS.items():
        found = chain_logits(directory, ids, chunks)
        torch.testing.assert_close(
            found, expected, atol=1e-4, rtol=1e-4, msg=lambda m, c=chunking: f"{c}: {m}"
        )


def check_logits_relative(directory: Path) -> None:
    """The same by their norm: within 2e-5."""
    ids = token_ids(NUM_TOKENS)
    expected = run_target(load_target(directory), ids).logits
    for chunking, chunks in CHUNKINGS.items():
        found = chain_logits(directory, ids, chunks)
        error = (found - expected).norm() / expected.norm()
        assert error < 2e-5, f"{chunking}: {error}"


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    """Bug: a weight is packed in the wrong order, or rope, norms, biases, GQA groups or the paged
    cache differ from the architecture for some shape or some spelling of the rope keys."""
    directory = make_target(tmp_path, **CONFIGS[name])
    check_logits(directory)


@torch.no_grad()
def test_scaled_rope_is_not_a_no_op(tmp_path: Path) -> None:
    """Bug: the golden rope cases pass because scaling changes nothing at these positions."""
    ids = token_ids(NUM_TOKENS)
    plain = run_target(load_target(make_target(tmp_path / "plain", head_dim=32)), ids).logits
    for name in ("yarn-no-truncate", "llama3-nested"):
        scaled = make_target(tmp_path / name, **CONFIGS[name])
        other = run_target(load_target(scaled), ids).logits
        assert (other - plain).abs().max() > 0.05, name


@torch.no_grad()
def test_bfloat16_is_as_close_as_transformers(tmp_path: Path) -> None:
    """Bug: a norm, rope or softmax runs in bf16, or a value is rounded twice: bf16 logits drift
    from the float32 truth further than a plain bf16 implementation's."""
    directory = make_target(tmp_path, layers=4, hidden=128, head_dim=32, dtype="bfloat16")
    ids = token_ids(200)
    truth = run_target(load_target(directory), ids).logits.log_softmax(-1)
    theirs = run_target(load_target(directory, torch.bfloat16), ids).logits.float().log_softmax(-1)
    ours = chain_logits(directory, ids, [64, 100, 36], 16, torch.bfloat16).float().log_softmax(-1)
    difference, allowed = (ours - truth).abs(), (theirs - truth).abs()
    assert difference.mean() <= 1.1 * allowed.mean()
    assert difference.quantile(0.99) <= 1.1 * allowed.quantile(0.99)
    top = truth.topk(2).values
    clear = (top[:, 0] - top[:, 1]) > 2 * allowed.quantile(0.999)
    assert clear.sum() > 50
    assert torch.equal(ours.argmax(-1)[clear], truth.argmax(-1)[clear])


@pytest.mark.parametrize("chunk", [1, 4, 5, 2048])
@pytest.mark.parametrize("name", ["tied", "odd-heads", "yarn-nested-mscale"])
def test_engine_continues_as_transformers(tmp_path: Path, name: str, chunk: int) -> None:
    """Bug: chunked prefill of several prompts mixes up rows, positions or slots, or the last row's
    logits are taken from the wrong place; or decoding goes on from a wrong position."""
    directory = make_target(tmp_path, **CONFIGS[name])
    prompts = [token_ids(n, seed=n) for n in (1, 4, 9, 13)]
    model = load_target(directory)
    with Engine.from_pretrained(directory, buckets=(4,), page_size=4, max_model_len=96) as engine:
        loop = engine._built.loop  # type: ignore[union-attr]
        loop.prefill = dataclasses.replace(loop.prefill, chunk=chunk)
        results = engine.generate(prompts, max_new_tokens=12, ignore_eos=True)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == plain_generate(model, prompt, 12)


def test_config_key_order_do_not_matter(tmp_path: Path) -> None:
    """Bug: parsing depends on the order of config.json's keys."""
    directory = make_target(tmp_path)
    path = directory / "config.json"
    before = ModelConfig.from_hf(json.loads(path.read_text()))
    edit_config(directory, lambda values: dict(reversed(list(values.items()))))
    assert ModelConfig.from_hf(json.loads(path.read_text())) == before
