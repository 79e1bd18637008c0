"""What each model's files say by themselves: config, rope, weights, tokenizer, draft format.

Pure: from `ModelFiles` to findings. Nothing is compared with the other model here (`doctor.pair`).
Expected tensors come from the loader's own builders, run without bytes, so this list and the loader
cannot disagree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import groupby

import torch

from graphengine.checkpoints import sources, weights
from graphengine.config import draft_formats
from graphengine.config.bytesize import format_bytes
from graphengine.config.draft import AttentionRule, DraftConfig
from graphengine.config.model import ARCHITECTURES, ModelConfig
from graphengine.config.rope import RopeConfig
from graphengine.doctor.files import CONVERSATION, ModelFiles
from graphengine.doctor.findings import Finding, error, info, ok, one_line, reason, warning
from graphengine.startup.workspace import META

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
_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
_INTEGERS = {"BOOL": 1} | {f"{kind}{8 * size}": size for kind in "IU" for size in (1, 2, 4, 8)}
_REFUSED = "see the message; if the published file says the same, this model is not supported"

Shapes = Mapping[str, tuple[int, ...]]
"""Name of a tensor -> its shape."""


def parse_target(files: ModelFiles) -> tuple[ModelConfig | None, list[Finding]]:
    """The target's config, or why there is none."""
    missing = _missing_config(files, "target")
    if missing or files.config is None:
        return None, missing
    named = files.config.get("architectures")
    known = draft_formats.ARCHITECTURES
    is_flat = isinstance(named, list) and any(name in known for name in named)
    if is_flat or "speculators_model_type" in files.config:
        remedy = "pass its target as MODEL and this one as --draft"
        return None, [error("target.config", "this is a drafter, not a target", remedy)]
    try:
        model = ModelConfig.from_hf(files.config, files.source)
    except Exception as problem:  # a ValueError that names the remedy, or a value of another type
        return None, [error("target.config", reason(problem), _REFUSED)]
    return model, [ok("target.config", _shape(model))]


def parse_draft(files: ModelFiles) -> tuple[DraftConfig | None, list[Finding]]:
    """The drafter's config, or why there is none."""
    missing = _missing_config(files, "draft")
    if missing or files.config is None:
        return None, missing
    try:
        draft = draft_formats.parse_draft(files.config, files.source)
    except Exception as problem:
        return None, [error("draft.config", reason(problem), _REFUSED)]
    return draft, [ok("draft.config", _shape(draft.model))]


def target_findings(files: ModelFiles, target: ModelConfig) -> Iterator[Finding]:
    """Rope, head, weights, tokenizer, chat template and stop tokens of a target."""
    yield _rope("target.rope", target.rope, target.head_dim)
    yield ok("target.head", "the embedding" if target.tie_word_embeddings else "its own")
    # Which form its experts have; a head beside a tied embedding is looked at below.
    present = [name for name in files.headers or () if name != "lm_head.weight"]
    expected = sources.ShapeSource(torch.bfloat16, present)
    weights.target_weights(expected, target, 1, META)
    optional = {"lm_head.weight": (target.vocab_size, target.hidden_size)}
    skipped = ARCHITECTURES[target.model_type].skipped
    yield from _weights("target.weights", files, expected, optional, skipped)
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
    yield ok("draft.block_size", size)
    runs = [(_layer(rule), len(list(same))) for rule, same in groupby(draft.attention_rules)]
    yield ok("draft.layers", "; ".join(f"{count} x {layer}" for layer, count in runs))
    yield _rope("draft.rope", draft.model.rope, draft.model.head_dim)
    yield from _amplitude(files, draft.model.rope)
    expected = sources.ShapeSource(torch.bfloat16, files.headers or ())
    embed, head, _ = weights.draft_vocabulary_shapes(expected, draft)
    weights.draft_weights(expected, draft, 1, META)
    for name, tensor in (("draft.embedding", embed), ("draft.head", head)):
        text = "the target's"
        if tensor is not None:
            text = f"its own {list(tensor.shape)}, unless it equals the target's"
        yield ok(name, text)
    yield from _weights("draft.weights", files, expected, {})
    for note in draft.notes:
        yield info("draft.note", one_line(note))


def _missing_config(files: ModelFiles, part: str) -> list[Finding]:
    remedy = "pass a directory, a hub id in the local cache, or a preset"
    missing = [key for key in ("directory", "config") if key in files.problems]
    return [error(f"{part}.{key}", files.problems[key], remedy) for key in missing]


def _shape(model: ModelConfig) -> str:
    width = f"MLP {model.intermediate_size}"
    if (moe := model.moe) is not None:
        width = f"{moe.num_experts} experts x {moe.moe_intermediate_size}, "
        width += f"{moe.num_experts_per_tok} a token"
        if moe.shared_expert_intermediate_size:
            width += f" and a shared one x {moe.shared_expert_intermediate_size}"
    return (
        f"{model.num_hidden_layers} layers, hidden {model.hidden_size}, "
        f"{width}, heads {model.num_attention_heads}/"
        f"{model.num_key_value_heads} x {model.head_dim}, vocabulary {model.vocab_size}, "
        f"{model.max_position_embeddings} positions{', biases' if model.attention_bias else ''}"
    )


def _rope(name: str, rope: RopeConfig, head_dim: int) -> Finding:
    value = f"theta {rope.theta:.10g}, {rope.rotary_dim(head_dim)} rotary dims of {head_dim}, "
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
    if scaling.get("mscale") and scaling.get("mscale_all_dim") and not is_said:
        value = f"{rope.amplitude:.5f}, from mscale and mscale_all_dim as transformers does"
        remedy = "engines that ignore the two keys use 0.1 ln(factor) + 1: compare the acceptance, "
        remedy += "and set attention_factor if theirs is better"
        yield warning("draft.rope_amplitude", value, remedy)


def _layer(rule: AttentionRule) -> str:
    kind = "full" if rule.window is None else f"window {rule.window}"
    return f"{kind}, {'causal' if rule.causal else 'non-causal'}"


def _weights(
    name: str,
    files: ModelFiles,
    expected: sources.ShapeSource,
    optional: Shapes,
    skipped: tuple[str, ...] = (),
) -> Iterator[Finding]:
    """Missing, unexpected and misshaped tensors, their dtypes and size."""
    if files.headers is None:
        if files.is_preset:
            yield info(name, "none: a preset", "runs with random weights alone (load_format dummy)")
        else:
            problem = files.problems.get("weights", "none")
            value, _, own = problem.rpartition("; ")  # an index may be stale; a long text is cut
            yield error(name, value or problem, own if value else "fetch the weights again")
        return
    shapes = {**optional, **expected.asked}
    skips = [k for k in files.headers if k.endswith("rotary_emb.inv_freq") or k.startswith(skipped)]
    used = {key: header for key, header in files.headers.items() if key not in skips}
    known = {key: used[key] for key in shapes if key in used}
    faults = {
        "missing": [key for key in expected.asked if key not in used],
        "unexpected": [key for key in used if key not in shapes],
        "misshaped": [
            f"{key} {list(header.shape)} instead of {list(shapes[key])}"
            for key, header in known.items()
            if header.shape != shapes[key]
        ],
    }
    remedy = "the files are incomplete or of another model than config.json; fetch both again"
    for what, names in faults.items():
        if names:
            shown = ", ".join(names[:3]) + (", .." if len(names) > 3 else "")
            yield error(name, one_line(f"{len(names)} {what}: {shown}"), remedy)
    yield from _dtypes(f"{name}.dtype", known, expected.integers)
    if not any(faults.values()):
        sizes = _BYTES | _INTEGERS
        size = sum(math.prod(h.shape) * sizes.get(h.dtype, 1) for h in used.values())
        yield ok(name, f"{len(used)} tensors, {format_bytes(size)}, none missing")


def _dtypes(
    name: str, headers: Mapping[str, sources.TensorHeader], integers: Mapping[str, torch.dtype]
) -> Iterator[Finding]:
    for key, kind in sorted(integers.items()):
        fitting = ("U8",) if kind == torch.uint8 else _INTEGERS
        if key in headers and headers[key].dtype not in fitting:
            remedy = "an id map holds integers, MXFP4 bytes (U8); fetch the weights again"
            yield error(name, f"{key} is {headers[key].dtype}", remedy)
    found = sorted({header.dtype for key, header in headers.items() if key not in integers})
    if foreign := [dtype for dtype in found if dtype not in _BYTES]:
        yield error(name, ", ".join(foreign), "only unquantised float weights are supported")
    elif "F16" in found:
        yield info(name, ", ".join(found), "float16 weights are run in bfloat16")
    elif found:
        yield ok(name, ", ".join(found))


def _tokenizer(files: ModelFiles, target: ModelConfig) -> Iterator[Finding]:
    name = "target.tokenizer"
    if files.tokenizer is None:
        why = files.problems.get("tokenizer", "no tokenizer.json")
        remedy = "fetch the whole model directory; without it only token ids can be passed"
        yield (info if files.is_preset else error)(name, why, remedy)
        return
    num_tokens, template = len(files.tokenizer), files.tokenizer.chat_template
    value = f"{num_tokens} tokens for {target.vocab_size} rows of the embedding"
    if outside := files.tokenizer.outside:
        some = ", ".join(f"{text!r} ({token})" for token, text in sorted(outside.items())[:3])
        yield info(name, value, f"a prompt that has one without a row is refused: {some}")
    else:
        yield ok(name, value)
    name, problem = "target.chat_template", files.problems.get("chat_template")
    if problem is not None:
        yield error(name, problem, "fetch the file again, or pass --raw text")
    elif template is None:
        yield warning(name, "none", "pass --raw text, or add the template")
    elif problem := _conversation_problem(files):
        yield warning(name, problem, "fetch the file again, or pass --raw text")
    elif "enable_thinking" in template:
        remedy = (
            "the published Qwen3 drafters are trained without thinking; --chat-template-kwargs "
            "'{\"enable_thinking\": true}' of a run switches it on"
        )
        yield info(name, "knows enable_thinking; it is switched off", remedy)
    else:
        yield ok(name, "present")


def _conversation_problem(files: ModelFiles) -> str | None:
    """Why answers will not be to what was said, though the template takes a prompt."""
    if files.rendered is None:
        return f"takes one turn and no more: {files.problems.get('conversation')}"
    lost = [said["content"] for said in CONVERSATION if said["content"] not in files.rendered]
    return f"leaves out what is said: of a short conversation {lost}" if lost else None


def _stop_tokens(files: ModelFiles, target: ModelConfig) -> Iterator[Finding]:
    name = "target.stop_tokens"
    if files.stop_ids is None:
        if problem := files.problems.get("stop_tokens"):
            yield error(name, problem, "write the ids of the end tokens, or fetch the file again")
        return
    ids, source = files.stop_ids
    outside = [token for token in ids if token >= target.vocab_size]
    if not ids and not files.is_preset:
        yield warning(name, "none", "answers end at --max-new-tokens alone; add eos_token_id")
    elif outside:
        remedy = "they never come up: write the ids of the end tokens"
        yield warning(name, f"{outside} lie outside {target.vocab_size}", remedy)
    elif ids:
        yield ok(name, f"{', '.join(map(str, ids))} from {source}")
