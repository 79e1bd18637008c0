"""Small hybrids with random weights: Gated-DeltaNet and gated-attention layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tests.support.checkpoints import make_target

D, A = "linear_attention", "full_attention"
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 24,
}


def rope_of(theta: float = 1e4, factor: float = 0.25) -> dict[str, Any]:
    """`rope_parameters` as published files have them."""
    return {
        "rope_parameters": {
            "rope_theta": theta,
            "rope_type": "default",
            "partial_rotary_factor": factor,
            "mrope_section": [1, 1, 0],
            "mrope_interleaved": True,
        }
    }


def make_hybrid(
    directory: Path,
    *,
    layer_types: Sequence[str] = (D, D, D, A),
    key_heads: int = 2,
    value_heads: int = 4,
    width: int = 16,
    factor: float = 0.25,
    model_type: str = "qwen3_5_text",
    extra: dict[str, Any] | None = None,
    **options: Any,
) -> Path:
    """A target whose heads are not hidden / heads wide, with slow and fast decays.

    Norms of the file are drawn around one, so `1 + w` is around two.
    """
    keys: dict[str, Any] = {} if model_type == "qwen3_5_text" else dict(EXPERTS)
    keys |= {
        "layer_types": list(layer_types),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": width,
        "linear_value_head_dim": width,
        "linear_conv_kernel_dim": 4,
        **rope_of(factor=factor),
    }
    given: dict[str, Any] = {"head_dim": 32, "rope": rope_of(factor=factor)} | options
    given |= {"layers": len(layer_types), "extra": keys | (extra or {})}
    make_target(directory, model_type=model_type, **given)
    # transformers 5.2 to 5.5 write a text model under the whole model's names
    file = directory / "model.safetensors"
    tensors = {name.replace("language_model.", ""): t for name, t in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return directory
