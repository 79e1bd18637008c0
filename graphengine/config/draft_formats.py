"""A drafter's config.json, in every format that is known -> one `DraftConfig`.

Why one file: four formats say the same things under other names, at other places and counted from
other numbers (taps), and a reader who knows only one of them loses acceptance without any error.
All differences end here; nothing behind `DraftConfig` asks which format a drafter had, but for
messages. Invariant: what decides the numerics is read or refused by key, value and remedy, never
guessed. draft-formats.md beside it is this file as a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from graphengine.config.draft import DraftConfig
from graphengine.config.draft_attention import flat_attention, speculators_attention
from graphengine.config.model import ModelConfig
from graphengine.config.values import RawConfig

ARCHITECTURES = ("DFlashDraftModel", "Qwen3DSparkModel")

# key -> what means "without this feature", beside null
_UNSUPPORTED: dict[str, Any] = {
    **dict.fromkeys("backbone_rotary_base attention_mode conv_kernel_size selector_rank".split()),
    **dict.fromkeys("attention_sink_bias shift_label enable_confidence_head".split(), False),
    **dict.fromkeys("is_neox_style rope_is_neox_style use_aux_hidden_state".split(), True),
    **dict.fromkeys("attention_value_scale output_multiplier logit_scale".split(), 1.0),
    "input_embedding_scale": 1.0,
    "final_logit_softcapping": 0.0,
    "projector_type": "dflash",
    "markov_rank": 0,
}

# Keys of dflash_config that are read here, or are about training only.
_KNOWN = frozenset(
    "target_layer_ids layer_ids block_size mask_token_id mask_token num_target_layers causal "
    "is_causal use_swa swa_window_size sliding_window sample_from_anchor draft_vocab_size "
    "target_hidden_size num_anchors loss_decay_gamma".split()
)


def parse_draft(config: Mapping[str, Any], source: str = "config.json") -> DraftConfig:
    """Detects the format and reads it: `speculators_model_type`, else the architecture's name.

    Raises:
        ValueError: naming the file, the key, its value and the remedy.
    """
    raw = RawConfig(config, source)
    if "speculators_model_type" in config:
        return _speculators(raw)
    architectures = raw.get("architectures") or []
    for name in ARCHITECTURES:
        if isinstance(architectures, list) and name in architectures:
            return _flat(raw, deepspec=name == "Qwen3DSparkModel")
    raise raw.refusal(
        f"architectures {architectures} is not a DFlash drafter; expected "
        f"{' or '.join(ARCHITECTURES)}, or the speculators format. A target model cannot be its "
        "own drafter"
    )


def _flat(outer: RawConfig, deepspec: bool) -> DraftConfig:
    """z-lab and DeepSpec files: a Qwen3 config with the DFlash keys beside or inside it."""
    nested = outer.section("dflash_config")
    unknown = sorted(map(str, set(nested) - _UNSUPPORTED.keys() - _KNOWN))
    if unknown:
        raise outer.refusal(
            f"dflash_config keys {unknown} are not understood; remove them if they are about "
            "training only"
        )
    nested = {key: value for key, value in nested.items() if value is not None}
    keys = RawConfig({**outer.values, **nested}, outer.source)
    _refuse_unsupported(keys)
    model, taps, depth = _layer_config(outer), _flat_taps(keys), None
    if keys.get("num_target_layers") is not None:
        depth = keys.integer("num_target_layers")
        if max(taps) >= depth:
            raise outer.refusal(
                f"target_layer_ids {list(taps)} reach past num_target_layers {depth}"
            )
    anchor_first = keys.flag("sample_from_anchor", default=deepspec)
    if deepspec and not anchor_first:
        raise outer.refusal(
            "sample_from_anchor is false, but Qwen3DSparkModel predicts from the anchor; remove "
            "the key, or name the architecture DFlashDraftModel"
        )
    is_nested = "block_size" in nested
    twice = [key for key in sorted(nested) if outer.get(key) not in (None, nested[key])]
    return _drafter(
        keys,
        model,
        anchor_first,
        target_layer_ids=taps,
        num_target_layers=depth,
        layer_attention=flat_attention(keys, outer, model.num_hidden_layers),
        format="deepspec" if deepspec else "z-lab" if is_nested else "z-lab-old",
        block_size_source="dflash_config.block_size" if is_nested else "block_size",
        notes=tuple(
            f"{key} is {outer.get(key)!r} at the top level and {nested[key]!r} in dflash_config; "
            f"{'the top level' if key == 'is_causal' else 'dflash_config'} counts"
            for key in twice
        ),
    )


def _flat_taps(keys: RawConfig) -> tuple[int, ...]:
    """`target_layer_ids`, with which other spellings must agree."""
    alias = keys.get("layer_ids")
    ids = keys.get("target_layer_ids") or alias
    if not isinstance(ids, list) or not ids:
        raise keys.refusal(
            "no dflash_config.target_layer_ids; add the list of target layers that the drafter "
            "was trained on, it is never guessed"
        )
    disagree = "disagree; remove the one that the drafter was not trained on"
    if alias not in (None, [], ids):
        raise keys.refusal(f"layer_ids {alias} and target_layer_ids {ids} {disagree}")
    taps = _taps(RawConfig({"target_layer_ids": ids}, keys.source), "target_layer_ids", 0)
    aux = keys.get("eagle_aux_hidden_state_layer_ids")
    if aux not in (None, [tap + 1 for tap in taps]):
        raise keys.refusal(
            f"eagle_aux_hidden_state_layer_ids {aux} and target_layer_ids {list(taps)} plus one "
            f"{disagree}"
        )
    return taps


def _speculators(raw: RawConfig) -> DraftConfig:
    """speculators files: the stack in transformer_layer_config, taps counted from the embedding."""
    kind = raw.values["speculators_model_type"]
    if kind not in ("dflash", "dspark"):
        raise raw.refusal(
            f"speculators_model_type {kind!r} is not supported; dflash (and dspark without its "
            "Markov and confidence heads) is"
        )
    _refuse_unsupported(raw)
    raw.required("transformer_layer_config")
    values = raw.section("transformer_layer_config")
    layers = RawConfig(values, f"{raw.source}: transformer_layer_config")
    model_type = values.get("model_type", "qwen3")
    if model_type != "qwen3":
        raise layers.refusal(
            f"model_type {model_type!r} is not supported; a drafter's layers are qwen3"
        )
    _refuse_unsupported(layers)
    model = _layer_config(layers)
    ids = raw.required("aux_hidden_state_layer_ids")
    raw.required("draft_vocab_size")
    if not isinstance(ids, list) or not ids:
        raise raw.refusal(f"aux_hidden_state_layer_ids is {ids!r}, expected a list")
    verifier, proposed = _speculators_block(raw)
    causal = not raw.flag("sliding_window_non_causal")
    notes = [f"{len(ids)} aux_hidden_state_layer_ids count from the embedding; taps are one less"]
    draft = _drafter(
        raw,
        model,
        anchor_first=raw.flag("sample_from_anchor", default=kind == "dspark"),
        # Counted from the embedding: 1 is the output of the first layer.
        target_layer_ids=_taps(raw, "aux_hidden_state_layer_ids", 1),
        num_target_layers=None,
        layer_attention=speculators_attention(layers, model.num_hidden_layers, causal),
        verifier=verifier,
        format="speculators",
        block_size_source="block_size",
    )
    if proposed not in (None, draft.num_draft_tokens):
        notes.append(
            f"speculative_tokens {proposed} does not follow from block_size {draft.block_size}: "
            f"{draft.num_draft_tokens} tokens are drafted"
        )
    return replace(draft, notes=tuple(notes))


def _drafter(keys: RawConfig, model: ModelConfig, anchor_first: bool, **rest: Any) -> DraftConfig:
    """What all formats call by one name, and the rest."""
    return DraftConfig(
        model=model,
        block_size=keys.integer("block_size", minimum=1 if anchor_first else 2),
        mask_token_id=keys.integer("mask_token_id", minimum=0),
        slot_convention="anchor-first" if anchor_first else "anchor-dropped",
        target_hidden_size=_unless(keys, "target_hidden_size", model.hidden_size),
        draft_vocab_size=_unless(keys, "draft_vocab_size", model.vocab_size),
        **rest,
    )


def _speculators_block(raw: RawConfig) -> tuple[str | None, int | None]:
    """(verifier's name or path, speculative_tokens) of speculators_config, where they stand."""

    def inside(values: Any, key: Any) -> Any:
        return values.get(key) if isinstance(values, Mapping) else None

    block = raw.get("speculators_config")
    name = inside(inside(block, "verifier"), "name_or_path")
    if name is not None and not isinstance(name, str):
        raise raw.refusal(
            f"speculators_config.verifier.name_or_path is {name!r}, expected a hub id or a path"
        )
    methods = inside(block, "proposal_methods")
    tokens = (
        inside(methods[0], "speculative_tokens") if isinstance(methods, list) and methods else None
    )
    return name or None, tokens if isinstance(tokens, int) else None


def _layer_config(raw: RawConfig) -> ModelConfig:
    """The drafter's own stack. One rope serves all layers: per-type ropes must agree."""
    rope = raw.get("rope_parameters")
    if isinstance(rope, Mapping) and rope and all(isinstance(r, Mapping) for r in rope.values()):
        types = raw.get("layer_types") or ["full_attention"]
        types = set(map(str, types)) if isinstance(types, list) else set()
        used = [dict(value) for kind, value in sorted(rope.items()) if kind in types]
        if not used or not used[0] or any(value != used[0] for value in used):
            raise raw.refusal(
                f"rope_parameters per layer type {sorted(rope)} is not supported where the layers' "
                f"types {sorted(types)} have other values or none"
            )
        raw = RawConfig({**raw.values, "rope_parameters": used[0]}, raw.source)
    return ModelConfig.from_layer_keys(raw)


def _taps(raw: RawConfig, key: str, first: int) -> tuple[int, ...]:
    """Target layers, 0-based, from ids that call the first layer's output `first`."""
    taps = tuple(tap - first for tap in raw.integers(key, minimum=first))
    if len(set(taps)) != len(taps):
        raise raw.refusal(f"{key} {raw.get(key)} has duplicates; name each layer once")
    return taps


def _unless(raw: RawConfig, key: str, own: int) -> int | None:
    """A size that may differ from the drafter's own; None where it does not."""
    return None if raw.get(key) is None or raw.integer(key) == own else raw.integer(key)


def _refuse_unsupported(raw: RawConfig) -> None:
    for key, plain in _UNSUPPORTED.items():
        if raw.get(key) not in (None, plain):
            raise raw.refusal(
                f"{key} = {raw.get(key)!r} is not supported; use a drafter without it, such as the "
                "plain DFlash drafter of this target"
            )
