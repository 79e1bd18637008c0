"""The pair of a soak: small, with random weights that make drafts right by luck, and little memory.

The target's head favours a few tokens, so that every acceptance length comes up.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from graphengine.api import Engine
from graphengine.checkpoints.hub import TINY_TARGET

BLOCK, VOCAB, LIKELY_TOKENS = 8, 2048, 2
END = 2042  # the bundled tokenizer's
TARGET_POSITIONS, DRAFT_POSITIONS = 224, 160
POOL_BYTES = 1600 << 10  # in float32 some 130 pages of 8 tokens: six long requests
MAX_LOGPROBS = 3
HYBRID: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
}
Options = dict[str, Any]


def make_pair(directory: Path, is_hybrid: bool) -> tuple[Path, Path]:
    """The config.json of a small target and its drafter; weights are random at load."""
    model = {
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "eos_token_id": END,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": TARGET_POSITIONS,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
    }
    dflash = {"target_layer_ids": [0, 1], "mask_token_id": VOCAB - 1, "block_size": BLOCK}
    draft = model | {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": 1,
        "max_position_embeddings": DRAFT_POSITIONS,
        "dflash_config": dflash,
    }
    if is_hybrid:
        model |= HYBRID
    paths = directory / "target", directory / "drafter"
    for path, config in zip(paths, (model, draft), strict=True):
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config))
    for file in TINY_TARGET.glob("tokenizer*.json"):
        shutil.copy(file, paths[0])
    return paths


def open_engine(target: Path, drafter: Path | None, options: Options) -> Engine:
    """An engine on the pair, its head narrowed to a few tokens."""
    engine = Engine.from_pretrained(
        target,
        drafter,
        load_format="dummy",
        kv_cache_memory=POOL_BYTES,
        finish_in_plain_decode=True,
        prepare_plain_decode=True,
        fallback=False,  # judged by measured times, which no seed decides
        acceptance_floor=0.0,
        sampling=True,
        adjustments=True,
        structured_outputs=True,
        max_logprobs=MAX_LOGPROBS,
        **options,
    )
    head: Any = engine.built.loop.prefill.pair.target.weights.lm_head_VD
    head[LIKELY_TOKENS:] *= 0.02
    return engine
