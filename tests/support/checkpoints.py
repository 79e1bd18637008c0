"""Small checkpoints with random weights, written as Hugging Face directories for tests.

Why random and not trained: a test of numerics needs every weight to matter, and any shape. Norms
are drawn around one and biases away from zero, so that a forgotten one changes the result; the
projections are large enough that argmax margins dwarf float32 noise and outputs vary.
Invariant: the same arguments give the same bytes; the files are what transformers itself writes,
so that transformers can load them as the reference.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Enough text for a few merges; every byte is in the alphabet anyway.
_TEXT = [
    "the quick brown fox jumps over the lazy dog, and then the dog sleeps in the sun",
    "Tom has 3 apples and buys 4 more; how many apples does Tom have now?",
    "def add(first, second): return first + second",
    '{"name": "Ada", "role": "user", "content": "hello"}',
]
_EMBEDDING_STD = 0.12
_PROJECTION_GAIN = 1.2  # standard deviation = gain / sqrt(fan-in)
_EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40},
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 7},
}
_ROUTER_GAIN = 3.0  # rows must choose apart
_OUTPUT_GAIN = 2.0  # o_proj, down_proj and fc: layers must outweigh the embedding's echo


def make_target(
    directory: Path,
    *,
    model_type: str = "qwen3",
    tie: bool = True,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    intermediate: int = 96,
    vocab: int = 512,
    seed: int = 0,
    bias: bool = False,
    mlp_bias: bool = False,
    rope: Mapping[str, Any] | None = None,
    max_positions: int = 512,
    tokenizer: bool = True,
    sharded: bool = False,
    dtype: str = "float32",
    likely_tokens: int | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a target of a `model_type` that transformers knows.

    Args:
        rope: keys merged into config.json, flat (`rope_theta`, `rope_scaling`) or nested
            (`rope_parameters`); default a flat rope_theta of 10000.
        tokenizer: byte-level BPE with a ChatML template, and generation_config.json whose end
            tokens are <|im_end|> and <|endoftext|>. Needs vocab >= 272.
        sharded: several files and an index instead of one.
        likely_tokens: makes all but the first few rows of an untied head small, so that few
            tokens ever come up and a drafter with random weights is often right by luck.
        extra: further keys of the config; for experts their number and width, else 6, 2 and 40.

    Returns:
        The directory.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if model_type == "gpt_oss" and rope is None:  # it must say how rope is scaled
        rope = {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
    config = AutoConfig.for_model(
        model_type,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tie,
        attention_bias=bias,
        pad_token_id=None,  # Phi-3's own lies outside a small vocabulary
        **({"mlp_bias": mlp_bias} if model_type == "llama" else {}),
        **_EXPERTS.get(model_type, {}) | dict(extra or {}),
    )
    model: Any = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_random(name, tuple(parameter.shape), generator))
        if likely_tokens is not None:
            assert not tie, "a tied head is the embedding"
            model.lm_head.weight[likely_tokens:] *= 0.02
    model = model.to(getattr(torch, dtype))
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory, max_shard_size="64KB" if sharded else "5GB")
    edit_config(
        directory,
        lambda values: (
            _set_rope(values, rope) | {"eos_token_id": None, "bos_token_id": None, "dtype": dtype}
        ),
    )
    (directory / "generation_config.json").unlink(missing_ok=True)
    if tokenizer:
        _write_tokenizer(directory, vocab)
    return directory


def make_drafter(
    directory: Path,
    target_directory: Path,
    *,
    layers: int = 2,
    taps: tuple[int, ...] = (0, 1),
    block_size: int = 4,
    mask_token_id: int | None = None,
    seed: int = 1,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    intermediate: int | None = None,
    max_positions: int | None = None,
    bias: bool = False,
    rope: Mapping[str, Any] | None = None,
    nested: bool = True,
    dtype: str = "float32",
    hidden: int | None = None,
    own_embedding: bool = False,
    own_head: bool = False,
    sliding: str = "",
    window: int | None = None,
    extra: Mapping[str, Any] | None = None,
    dflash_extra: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a DFlash drafter of a target, in the z-lab format.

    Args:
        taps: target layers, 0-based, tapped at their output.
        mask_token_id: default the last row of the target's vocabulary.
        rope: as for `make_target`; default a flat rope_theta of 1000000, unlike the target's.
        nested: DFlash keys inside `dflash_config` (the newer generation); otherwise
            `block_size` and `num_target_layers` stand at the top level (the older one).
        hidden: the drafter's own width; where it is not the target's, both tables are its own.
        own_embedding, own_head: ship tables that differ from the target's.
        sliding: a letter a layer, s for sliding_attention; anything else is full_attention.
        extra, dflash_extra: further keys at the top level and inside dflash_config.

    Returns:
        The directory.
    """
    target = json.loads((target_directory / "config.json").read_text())
    target_hidden, vocab = target["hidden_size"], target["vocab_size"]
    hidden = int(hidden or target_hidden)
    heads = int(heads or target["num_attention_heads"])
    kv_heads = int(kv_heads or target["num_key_value_heads"])
    head_dim = int(head_dim or target["head_dim"])
    intermediate = int(intermediate or target["intermediate_size"])
    dflash: dict[str, Any] = {
        "mask_token_id": vocab - 1 if mask_token_id is None else mask_token_id,
        "target_layer_ids": list(taps),
    }
    outer = {"block_size": block_size, "num_target_layers": target["num_hidden_layers"]}
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": bias,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "layer_types": [
            "sliding_attention" if kind == "s" else "full_attention"
            for kind in sliding.ljust(layers, "f")
        ],
        "max_position_embeddings": max_positions or target["max_position_embeddings"],
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "sliding_window": window,
        "use_sliding_window": "s" in sliding,
        "tie_word_embeddings": False,
        "vocab_size": vocab,
        "dtype": dtype,
        "dflash_config": dflash | outer if nested else dflash,
    }
    if not nested:
        config |= outer
    config |= {"rope_theta": 1000000.0, "rope_scaling": None} if rope is None else dict(rope)
    config |= dict(extra or {})
    config["dflash_config"] |= dict(dflash_extra or {})
    if hidden != target_hidden:
        config["target_hidden_size"] = target_hidden

    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(taps) * target_hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(layers):
        prefix, attention = f"layers.{layer}.", f"layers.{layer}.self_attn."
        sizes = {"q": (heads * head_dim, hidden), "o": (hidden, heads * head_dim)}
        sizes |= dict.fromkeys("kv", (kv_heads * head_dim, hidden))
        for name, shape in sizes.items():
            shapes[f"{attention}{name}_proj.weight"] = shape
            if bias:
                shapes[f"{attention}{name}_proj.bias"] = shape[:1]
        shapes |= {f"{attention}{name}_norm.weight": (head_dim,) for name in "qk"}
        shapes |= {
            f"{prefix}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")
        }
        shapes |= {
            f"{prefix}mlp.{name}_proj.weight": (intermediate, hidden) for name in ("gate", "up")
        }
        shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, intermediate)
    if own_embedding or hidden != target_hidden:
        shapes["embed_tokens.weight"] = (vocab, hidden)
    if own_head or hidden != target_hidden:
        shapes["lm_head.weight"] = (vocab, hidden)
    generator = torch.Generator().manual_seed(seed)
    kind = getattr(torch, dtype)
    tensors = {name: _random(name, shape, generator).to(kind) for name, shape in shapes.items()}
    return write_checkpoint(directory, config, tensors)


def as_speculators(
    directory: Path,
    z_lab: Path,
    target_directory: Path,
    *,
    kept: Sequence[int] | None = None,
    verifier: str | None = None,
    **extra: Any,
) -> Path:
    """Saves a z-lab drafter as speculators does: the same drafter, said in its keys.

    Args:
        kept: target ids of a reduced draft vocabulary, in draft order; default all of them.
        verifier: `name_or_path` of the verifier block; default the target's directory.
        extra: further keys at the top level, such as `sample_from_anchor`.

    Returns:
        The directory.
    """
    from transformers import Qwen3Config

    config = json.loads((z_lab / "config.json").read_text())
    dflash = config["dflash_config"]
    tensors = load_file(z_lab / "model.safetensors")
    block_size = dflash.get("block_size", config.get("block_size"))
    drop = ("architectures", "dflash_config", "block_size", "num_target_layers", "dtype")
    drop += ("target_hidden_size", "is_causal", "sample_from_anchor")
    by_type = {}
    if "full_attention" in (config.get("rope_parameters") or {}):  # transformers 5.2 has one rope
        by_type["rope_parameters"] = config.pop("rope_parameters")
    layers = Qwen3Config(**{k: v for k, v in config.items() if k not in drop})
    vocab = config["vocab_size"]
    if kept is not None:
        ids = torch.tensor(kept)
        head = tensors.get("lm_head.weight", output_table(target_directory))
        tensors["lm_head.weight"] = head[ids].clone()
        tensors["d2t"] = ids - torch.arange(len(kept))
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).scatter_(0, ids, True)
    written = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.5.0",
        "transformer_layer_config": layers.to_diff_dict() | by_type,
        "draft_vocab_size": vocab if kept is None else len(kept),
        "block_size": block_size,
        "target_hidden_size": config.get("target_hidden_size"),
        "aux_hidden_state_layer_ids": [tap + 1 for tap in dflash["target_layer_ids"]],
        "mask_token_id": dflash["mask_token_id"],
        "sliding_window_non_causal": config.get("is_causal") is False,
        "sample_from_anchor": False,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": block_size - 1}],
            "verifier": {
                "name_or_path": str(target_directory) if verifier is None else verifier,
                "architectures": ["Qwen3ForCausalLM"],
            },
        },
    }
    return write_checkpoint(directory, written | extra, tensors)


def as_deepspec(directory: Path, z_lab: Path, target_directory: Path) -> Path:
    """Saves a z-lab drafter's weights as DeepSpec does: flat keys, anchor first, with copies of
    the target's embedding and head. Returns the directory."""
    config = json.loads((z_lab / "config.json").read_text())
    dflash = config.pop("dflash_config")
    kept = {key: dflash[key] for key in ("mask_token_id", "target_layer_ids")}
    outer = {key: dflash.get(key, config.get(key)) for key in ("block_size", "num_target_layers")}
    config |= kept | outer | {"architectures": ["Qwen3DSparkModel"], "num_anchors": 512}
    config |= {"enable_confidence_head": False, "markov_rank": 0, "tie_word_embeddings": False}
    target = load_file(target_directory / "model.safetensors")
    tensors = load_file(z_lab / "model.safetensors") | {
        "embed_tokens.weight": target["model.embed_tokens.weight"].clone(),
        "lm_head.weight": output_table(target_directory).clone(),
    }
    return write_checkpoint(directory, config, tensors)


def output_table(target_directory: Path) -> torch.Tensor:
    """A target's head, which may be its embedding."""
    target = load_file(target_directory / "model.safetensors")
    return target.get("lm_head.weight", target["model.embed_tokens.weight"])


def write_checkpoint(
    directory: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> Path:
    """One safetensors file and config.json. Returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    return directory


def edit_config(directory: Path, change: Any, name: str = "config.json") -> None:
    """Rewrites a JSON file of a checkpoint: `change` maps the old object to the new one."""
    path = directory / name
    path.write_text(json.dumps(change(json.loads(path.read_text())), indent=2))


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if name.endswith("A_log"):  # from heads that forget at once to heads that hardly forget
        return torch.linspace(-5, 1, shape[0]) + 0.3 * noise
    if name.endswith("sinks"):  # about as likely as a key
        return 2.0 + noise
    if name.endswith("dt_bias"):
        return 0.5 * noise
    if name.endswith("conv1d.weight"):
        return 0.6 * noise
    if name.endswith("norm.weight"):
        return 1.0 + 0.2 * noise
    if name.endswith("bias"):
        return 0.3 * noise
    if "embed_tokens" in name or "lm_head" in name:
        return _EMBEDDING_STD * noise
    gain = _OUTPUT_GAIN if "o_proj" in name or "down_proj" in name else _PROJECTION_GAIN
    gain = _ROUTER_GAIN if name.endswith(("mlp.gate.weight", "mlp.router.weight")) else gain
    return noise * gain / shape[-1] ** 0.5


def _set_rope(values: dict[str, Any], rope: Mapping[str, Any] | None) -> dict[str, Any]:
    kept = {k: v for k, v in values.items() if k not in ("rope_parameters", "rope_scaling")}
    kept.pop("rope_theta", None)
    return kept | ({"rope_theta": 10000.0, "rope_scaling": None} if rope is None else dict(rope))


def _write_tokenizer(directory: Path, vocab: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab < 272:
        raise ValueError(f"vocab {vocab} is too small for 256 bytes and special tokens")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    bpe.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - 8,  # rows are left over, as in real tables: one is the mask token's
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_TEXT, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
