"""A drafter's config.json, in every format that is known -> one `DraftConfig`.

Why one file: four formats say the same things under other names, at other places and counted from
other numbers (taps), and a reader who knows only one of them loses acceptance without any error.
All differences end here; nothing behind `DraftConfig` asks which format a drafter had, but for
messages. Invariant: what decides the numerics is read or refused by key, value and remedy, never
guessed. draft-formats.md beside it is this file as a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphengine.config.draft import DraftConfig, DraftFormat, SlotConvention
from graphengine.config.draft_attention import Keys, flat_attention, speculators_attention
from graphengine.config.model import ModelConfig
from graphengine.config.values import read_flag, read_integer

ARCHITECTURES = ("DFlashDraftModel", "Qwen3DSparkModel")

# key -> values that mean "without this feature"
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "attention_sink_bias": (None, False),
    "attention_value_scale": (None, 1.0),
    "backbone_rotary_base": (None,),
    "attention_mode": (None,),
    "projector_type": (None, "dflash"),
    "shift_label": (None, False),
    "conv_kernel_size": (None,),
    "selector_rank": (None,),
    "markov_rank": (None, 0),
    "enable_confidence_head": (None, False),
    "output_multiplier": (None, 1.0),
    "input_embedding_scale": (None, 1.0),
    "final_logit_softcapping": (None, 0.0),
    "logit_scale": (None, 1.0),
    "is_neox_style": (None, True),
    "rope_is_neox_style": (None, True),
    "use_aux_hidden_state": (None, True),
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
    if "speculators_model_type" in config:
        return _speculators(config, source)
    architectures = config.get("architectures") or []
    if isinstance(architectures, list) and "DFlashDraftModel" in architectures:
        return _flat(config, False, source)
    if isinstance(architectures, list) and "Qwen3DSparkModel" in architectures:
        return _flat(config, True, source)
    raise ValueError(
        f"{source}: architectures {architectures} is not a DFlash drafter; expected "
        f"{' or '.join(ARCHITECTURES)}, or the speculators format. A target model cannot be its "
        "own drafter"
    )


def _flat(config: Mapping[str, Any], deepspec: bool, source: str) -> DraftConfig:
    """z-lab and DeepSpec files: a Qwen3 config with the DFlash keys beside or inside it."""
    nested = config.get("dflash_config") or {}
    if not isinstance(nested, Mapping):
        raise ValueError(f"{source}: dflash_config is {nested!r}, expected an object")
    keys = Keys(config, nested, source)
    unknown = sorted(map(str, set(nested) - _UNSUPPORTED.keys() - _KNOWN))
    if unknown:
        raise ValueError(
            f"{source}: dflash_config keys {unknown} are not understood; remove them if they are "
            "about training only"
        )
    _refuse_unsupported({key: keys.get(key) for key in _UNSUPPORTED}, source)
    model = _layer_config(config, source)
    taps = keys.get("target_layer_ids") or keys.get("layer_ids")
    if not isinstance(taps, list) or not taps:
        raise ValueError(
            f"{source}: no dflash_config.target_layer_ids; add the list of target layers that "
            "the drafter was trained on, it is never guessed"
        )
    alias = keys.get("layer_ids")
    if alias not in (None, [], taps):
        raise ValueError(
            f"{source}: layer_ids {alias} and target_layer_ids {taps} disagree; remove the one "
            "that the drafter was not trained on"
        )
    taps = _taps(taps, "target_layer_ids", 0, source)
    aux = config.get("eagle_aux_hidden_state_layer_ids")
    if aux not in (None, [tap + 1 for tap in taps]):
        raise ValueError(
            f"{source}: eagle_aux_hidden_state_layer_ids {aux} is not target_layer_ids "
            f"{list(taps)} plus one; remove the one that the drafter was not trained on"
        )
    depth = keys.get("num_target_layers")
    depth = None if depth is None else read_integer(depth, "num_target_layers", source, minimum=1)
    if depth is not None and max(taps) >= depth:
        raise ValueError(
            f"{source}: target_layer_ids {list(taps)} reach past num_target_layers {depth}"
        )
    anchor_first = read_flag(
        {"sample_from_anchor": keys.get("sample_from_anchor")},
        "sample_from_anchor",
        source,
        default=deepspec,
    )
    if deepspec and not anchor_first:
        raise ValueError(
            f"{source}: sample_from_anchor is false, but Qwen3DSparkModel predicts from the "
            "anchor; remove the key, or name the architecture DFlashDraftModel"
        )
    kind: DraftFormat = "z-lab-old" if keys.place("block_size") == "block_size" else "z-lab"
    return DraftConfig(
        model=model,
        block_size=_block_size(keys.required("block_size"), anchor_first, source),
        mask_token_id=read_integer(
            keys.required("mask_token_id"), "mask_token_id", source, minimum=0
        ),
        target_layer_ids=taps,
        num_target_layers=depth,
        slot_convention=_convention(anchor_first),
        layer_attention=flat_attention(keys, model.num_hidden_layers),
        target_hidden_size=_unless(
            keys.get("target_hidden_size"), model.hidden_size, "target_hidden_size", source
        ),
        draft_vocab_size=_unless(
            keys.get("draft_vocab_size"), model.vocab_size, "draft_vocab_size", source
        ),
        format="deepspec" if deepspec else kind,
        block_size_source=keys.place("block_size"),
        notes=tuple(keys.notes()),
    )


def _speculators(config: Mapping[str, Any], source: str) -> DraftConfig:
    """speculators files: the stack in transformer_layer_config, taps counted from the embedding."""
    kind = config["speculators_model_type"]
    if kind not in ("dflash", "dspark"):
        raise ValueError(
            f"{source}: speculators_model_type {kind!r} is not supported; dflash (and dspark "
            "without its Markov and confidence heads) is"
        )
    _refuse_unsupported(config, source)
    layers = config.get("transformer_layer_config")
    if not isinstance(layers, Mapping):
        raise ValueError(
            f"{source}: transformer_layer_config is {layers!r}, expected the drafter's own Qwen3 "
            "config as an object"
        )
    inner = f"{source}: transformer_layer_config"
    if layers.get("model_type", "qwen3") != "qwen3":
        raise ValueError(
            f"{inner}: model_type {layers['model_type']!r} is not supported; a drafter's layers "
            "are qwen3"
        )
    _refuse_unsupported(layers, inner)
    model = _layer_config(layers, inner)
    for key in ("aux_hidden_state_layer_ids", "mask_token_id", "block_size", "draft_vocab_size"):
        if config.get(key) is None:
            raise ValueError(f"{source}: no {key}; it is never guessed")
    ids = config["aux_hidden_state_layer_ids"]
    if not isinstance(ids, list) or not ids:
        raise ValueError(f"{source}: aux_hidden_state_layer_ids is {ids!r}, expected a list")
    anchor_first = read_flag(config, "sample_from_anchor", source, default=kind == "dspark")
    block_size = _block_size(config["block_size"], anchor_first, source)
    verifier, proposed = _speculators_block(config, source)
    num_draft_tokens = block_size - (not anchor_first)
    notes = [f"{len(ids)} aux_hidden_state_layer_ids count from the embedding; taps are one less"]
    if proposed not in (None, num_draft_tokens):
        notes.append(
            f"speculative_tokens {proposed} does not follow from block_size {block_size}: "
            f"{num_draft_tokens} tokens are drafted"
        )
    causal = not read_flag(config, "sliding_window_non_causal", source)
    return DraftConfig(
        model=model,
        block_size=block_size,
        mask_token_id=read_integer(config["mask_token_id"], "mask_token_id", source, minimum=0),
        # Counted from the embedding: 1 is the output of the first layer.
        target_layer_ids=_taps(ids, "aux_hidden_state_layer_ids", 1, source),
        num_target_layers=None,
        slot_convention=_convention(anchor_first),
        layer_attention=speculators_attention(layers, model.num_hidden_layers, causal, inner),
        target_hidden_size=_unless(
            config.get("target_hidden_size"), model.hidden_size, "target_hidden_size", source
        ),
        draft_vocab_size=_unless(
            config["draft_vocab_size"], model.vocab_size, "draft_vocab_size", source
        ),
        verifier=verifier,
        format="speculators",
        block_size_source="block_size",
        notes=tuple(notes),
    )


def _speculators_block(config: Mapping[str, Any], source: str) -> tuple[str | None, int | None]:
    """(verifier's name or path, speculative_tokens) of speculators_config, where they stand."""
    block = config.get("speculators_config") or {}
    verifier = block.get("verifier") if isinstance(block, Mapping) else None
    name = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
    if name is not None and not isinstance(name, str):
        raise ValueError(f"{source}: speculators_config.verifier.name_or_path is {name!r}")
    methods = block.get("proposal_methods") if isinstance(block, Mapping) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    tokens = first.get("speculative_tokens") if isinstance(first, Mapping) else None
    return name or None, tokens if isinstance(tokens, int) else None


def _layer_config(config: Mapping[str, Any], source: str) -> ModelConfig:
    """The drafter's own stack. One rope serves all layers: per-type ropes must agree."""
    rope = config.get("rope_parameters")
    if isinstance(rope, Mapping) and rope and all(isinstance(r, Mapping) for r in rope.values()):
        types = config.get("layer_types") or ["full_attention"]
        types = set(map(str, types)) if isinstance(types, list) else set()
        used = [dict(value) for kind, value in sorted(rope.items()) if kind in types]
        if not used or not used[0] or any(value != used[0] for value in used):
            raise ValueError(
                f"{source}: rope_parameters per layer type {sorted(rope)} is not supported where "
                f"the layers' types {sorted(types)} have other values or none"
            )
        config = {**config, "rope_parameters": used[0]}
    return ModelConfig.from_layer_keys(config, source)


def _taps(ids: list[Any], key: str, first: int, source: str) -> tuple[int, ...]:
    """Target layers, 0-based, from ids that call the first layer's output `first`."""
    taps = tuple(read_integer(tap, key, source, minimum=first) - first for tap in ids)
    if len(set(taps)) != len(taps):
        raise ValueError(f"{source}: {key} {ids} has duplicates")
    return taps


def _block_size(value: Any, anchor_first: bool, source: str) -> int:
    return read_integer(value, "block_size", source, minimum=1 if anchor_first else 2)


def _convention(anchor_first: bool) -> SlotConvention:
    return "anchor-first" if anchor_first else "anchor-dropped"


def _unless(value: Any, own: int, key: str, source: str) -> int | None:
    """A size that may differ from the drafter's own; None where it does not."""
    if value is None:
        return None
    size = read_integer(value, key, source, minimum=1)
    return None if size == own else size


def _refuse_unsupported(values: Mapping[str, Any], source: str) -> None:
    for key, plain in _UNSUPPORTED.items():
        value = values.get(key)
        if value not in plain:
            raise ValueError(
                f"{source}: {key} = {value!r} is not supported; use a drafter without it, such as "
                "the plain DFlash drafter of this target"
            )
