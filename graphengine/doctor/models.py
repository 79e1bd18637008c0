"""What each model's files say by themselves: config, rope, weights, tokenizer, draft format.

Pure: from `ModelFiles` to findings. Nothing is compared with the other model here (`doctor_pair`).
Expected tensors come from the loader's own builders, run without bytes, so this list and the loader
cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby

import torch

from graphengine.checkpoints.weights import (
    ShapeSource,
    draft_vocabulary_shapes,
    draft_weights,
    target_weights,
)
from graphengine.config import draft_formats
from graphengine.config.draft import AttentionRule, DraftConfig
from graphengine.config.draft_formats import ARCHITECTURES
from graphengine.config.model import ModelConfig
from graphengine.config.rope import RopeConfig
from graphengine.doctor.files import ModelFiles
from graphengine.doctor.findings import Finding, error, info, ok, one_line, warning
from graphengine.doctor.weights import weight_findings

_META = torch.device("meta")
_FORMATS = {
    "z-lab-old": "architectures name DFlashDraftModel, block_size stands at the top level",
    "z-lab": "architectures name DFlashDraftModel, block_size stands in dflash_config",
    "speculators": "speculators_model_type is set",
    "deepspec": "architectures name Qwen3DSparkModel",
}
_SLOTS = {
    "anchor-dropped": "a row predicts the token at its own position; the anchor's row is dropped",
    "anchor-first": "a row predicts the token behind it; the anchor's row drafts too",
}


def parse_target(files: ModelFiles) -> tuple[ModelConfig | None, list[Finding]]:
    """The target's config, or why there is none."""
    missing = _missing_config(files, "target")
    if missing or files.config is None:
        return None, missing
    named = files.config.get("architectures")
    is_flat = isinstance(named, list) and any(name in ARCHITECTURES for name in named)
    if is_flat or "speculators_model_type" in files.config:
        remedy = "pass its target as MODEL and this one as --draft"
        return None, [error("target.config", "this is a drafter, not a target", remedy)]
    try:
        model = ModelConfig.from_hf(files.config, files.source)
    except Exception as problem:  # a ValueError that names the remedy, or a value of another type
        return None, [_refused("target.config", problem)]
    return model, [ok("target.config", _shape(model))]


def parse_draft(files: ModelFiles) -> tuple[DraftConfig | None, list[Finding]]:
    """The drafter's config, or why there is none."""
    missing = _missing_config(files, "draft")
    if missing or files.config is None:
        return None, missing
    try:
        draft = draft_formats.parse_draft(files.config, files.source)
    except Exception as problem:
        return None, [_refused("draft.config", problem)]
    return draft, [ok("draft.config", _shape(draft.model))]


def target_findings(files: ModelFiles, target: ModelConfig) -> Iterator[Finding]:
    """Rope, head, weights, tokenizer, chat template and stop tokens of a target."""
    yield _rope("target.rope", target.rope, target.head_dim)
    yield ok("target.head", "the embedding" if target.tie_word_embeddings else "its own")
    expected = ShapeSource(torch.bfloat16)
    target_weights(expected, target, 1, _META)
    optional = {"lm_head.weight": expected.asked["model.embed_tokens.weight"]}
    yield from weight_findings("target.weights", files, expected.asked, optional)
    yield from _tokenizer(files, target)
    yield from _stop_tokens(files, target)


def draft_findings(files: ModelFiles, draft: DraftConfig) -> Iterator[Finding]:
    """Format, slots, taps, block, layers, rope and weights of a drafter."""
    yield ok("draft.format", f"{draft.format}: {_FORMATS[draft.format]}")
    yield ok("draft.slots", f"{draft.slot_convention}: {_SLOTS[draft.slot_convention]}")
    taps = ", ".join(map(str, draft.target_layer_ids))
    yield ok("draft.taps", f"after target layers {taps} (counted from 0)")
    where = f", read from {draft.block_size_source}" if draft.block_size_source else ""
    size = f"{draft.block_size} rows, {draft.num_draft_tokens} drafts a step{where}"
    if draft.num_draft_tokens >= 1:
        yield ok("draft.block_size", size)
    else:
        yield error("draft.block_size", size, "a block needs at least one draft")
    yield ok("draft.layers", _layers(draft.attention_rules))
    yield _rope("draft.rope", draft.model.rope, draft.model.head_dim)
    yield from _amplitude(files, draft.model.rope)
    expected = ShapeSource(torch.bfloat16, files.headers or ())
    embed, head, _ = draft_vocabulary_shapes(expected, draft)
    draft_weights(expected, draft, 1, _META)
    yield _own("draft.embedding", embed)
    yield _own("draft.head", head)
    yield from weight_findings("draft.weights", files, expected.asked, {})
    for note in draft.notes:
        yield info("draft.note", one_line(note))


def _missing_config(files: ModelFiles, part: str) -> list[Finding]:
    found = []
    remedy = "pass a directory, a hub id in the local cache, or a preset"
    for key in ("directory", "config"):
        if key in files.problems:
            found.append(error(f"{part}.{key}", files.problems[key], remedy))
    return found


def _refused(name: str, problem: Exception) -> Finding:
    """A parser's message already names key, value and remedy."""
    kind = "" if isinstance(problem, ValueError) else f"{type(problem).__name__}: "
    return error(name, kind + one_line(problem), "see the message; compare the published file")


def _shape(model: ModelConfig) -> str:
    return (
        f"{model.num_hidden_layers} layers, hidden {model.hidden_size}, MLP "
        f"{model.intermediate_size}, heads {model.num_attention_heads}/"
        f"{model.num_key_value_heads} x {model.head_dim}, vocabulary {model.vocab_size}, "
        f"{model.max_position_embeddings} positions{', biases' if model.attention_bias else ''}"
    )


def _rope(name: str, rope: RopeConfig, head_dim: int) -> Finding:
    value = f"theta {rope.theta:.10g}, {head_dim} rotary dims of {head_dim}, "
    value += "not scaled" if rope.kind == "default" else f"{rope.kind} x {rope.factor:g}"
    if rope.original_max_position_embeddings:
        value += f" from {rope.original_max_position_embeddings} positions"
    if rope.amplitude != 1.0:
        value += f", amplitude {rope.amplitude:.5f}"
    return ok(name, value)


def _amplitude(files: ModelFiles, rope: RopeConfig) -> Iterator[Finding]:
    """Engines read one yarn file in two ways; which one a drafter was trained with is not in it."""
    if rope.kind != "yarn" or files.config is None:
        return
    layers = files.config.get("transformer_layer_config")
    config = layers if isinstance(layers, Mapping) else files.config
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    per_type = next((value for value in scaling.values() if isinstance(value, Mapping)), None)
    scaling = scaling if per_type is None else per_type
    is_said = scaling.get("attention_factor") is not None
    if "mscale" in scaling and "mscale_all_dim" in scaling and not is_said:
        yield warning(
            "draft.rope_amplitude",
            f"{rope.amplitude:.5f}, from mscale and mscale_all_dim as transformers does",
            "engines that ignore the two keys use 0.1 ln(factor) + 1: compare the acceptance, and "
            "set attention_factor if theirs is better",
        )


def _layers(rules: tuple[AttentionRule, ...]) -> str:
    """Runs of equal layers, in order."""

    def text(rule: AttentionRule) -> str:
        kind = "full" if rule.window is None else f"window {rule.window}"
        return f"{kind}, {'causal' if rule.causal else 'non-causal'}"

    runs = [(rule, len(list(same))) for rule, same in groupby(rules)]
    return "; ".join(f"{count} x {text(rule)}" for rule, count in runs)


def _own(name: str, tensor: torch.Tensor | None) -> Finding:
    if tensor is None:
        return ok(name, "the target's")
    return ok(name, f"its own {list(tensor.shape)}, unless it equals the target's")


def _tokenizer(files: ModelFiles, target: ModelConfig) -> Iterator[Finding]:
    name = "target.tokenizer"
    if files.tokenizer is None:
        reason = files.problems.get("tokenizer", "no tokenizer.json")
        remedy = "fetch the whole model directory; without it only token ids can be passed"
        yield (info if files.is_preset else error)(name, reason, remedy)
        return
    num_tokens, template = files.tokenizer
    yield ok(name, f"{num_tokens} tokens for {target.vocab_size} rows of the embedding")
    name, problem = "target.chat_template", files.problems.get("chat_template")
    if problem is not None:
        yield error(name, problem, "fetch the file again, or pass --raw text")
    elif template is None:
        yield warning(name, "none", "pass --raw text, or add the template")
    elif "enable_thinking" in template:
        yield info(
            name,
            "knows enable_thinking; it is switched off",
            "the published Qwen3 drafters are trained without thinking",
        )
    else:
        yield ok(name, "present")


def _stop_tokens(files: ModelFiles, target: ModelConfig) -> Iterator[Finding]:
    name = "target.stop_tokens"
    if files.stop_ids is None:
        if problem := files.problems.get("stop_tokens"):
            yield error(name, problem, "write the ids of the end tokens, or fetch the file again")
        return
    ids, source = files.stop_ids
    outside = [token for token in ids if token >= target.vocab_size]
    if not ids and not files.is_preset:
        remedy = "answers end at --max-new-tokens alone; add eos_token_id"
        yield warning(name, "none", remedy)
    elif outside:
        remedy = "they never come up: write the ids of the end tokens"
        yield warning(name, f"{outside} lie outside {target.vocab_size}", remedy)
    elif ids:
        yield ok(name, f"{', '.join(map(str, ids))} from {source}")
