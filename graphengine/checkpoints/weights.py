"""Checkpoints -> weight trees: who asks a source for what, and packs it.

Packing (qkv, gate_up, every layer's context K/V) happens here, straight on the device: each tensor
is copied into its place as it is read. Names and shapes are not known here: models/ declares them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphengine.checkpoints import mxfp4
from graphengine.checkpoints.sources import TensorSource
from graphengine.config.draft import DraftConfig
from graphengine.config.model import ARCHITECTURES, ModelConfig
from graphengine.kernels.mxfp4 import Mxfp4
from graphengine.models import decoder, dflash
from graphengine.models.attention import AttentionWeights
from graphengine.models.decoder import LayerFields, LayerWeights, Weights
from graphengine.models.dflash import DraftVocabulary, DraftWeights
from graphengine.models.layers import dense, quantize_fp8, rope_table
from graphengine.models.weight import Fields, Weight, behind


def distinct_tensors(tree: Any) -> list[Tensor]:
    """The tensors of a weight tree, in order; one that is shared (a tied head) counts once."""
    found: dict[int, Tensor] = {}

    def walk(node: Any) -> None:
        if isinstance(node, Tensor):
            found.setdefault(id(node), node)
        elif isinstance(node, tuple):
            for child in node:
                walk(child)

    walk(tree)
    return list(found.values())


def tree_bytes(tree: Any) -> int:
    """Bytes of a tree's distinct tensors, those without bytes (device meta) included."""
    return sum(t.numel() * t.element_size() for t in distinct_tensors((tree,)))


def target_weights(
    source: TensorSource, config: ModelConfig, num_positions: int, device: torch.device
) -> Weights:
    """Builds the target's tree.

    Args:
        num_positions: rows of the rope table.

    Raises:
        ValueError: a tensor is missing, unexpected or misshaped.
    """
    # Where a checkpoint has a vision part too, and in some re-saves without it.
    prefix = "model.language_model."
    if not source.has(f"{prefix}embed_tokens.weight"):
        prefix = "model."
    (embed,), (norm,), (head,) = decoder.outer_weights(config, prefix).values()
    embed_VD = source.take(embed)
    layers = _layers(source, decoder.layer_weights(config, f"{prefix}layers."), config)
    norm_D, lm_head_VD = source.take(norm), embed_VD
    if not config.tie_word_embeddings:
        lm_head_VD = source.take(head)
    # Some tied checkpoints store the table twice.
    elif source.has(head.name) and not torch.equal(source.take(head), embed_VD):
        raise ValueError(
            "lm_head.weight differs from the embedding although config.json says "
            "tie_word_embeddings; set it to false if the head is its own"
        )
    source.finish(ARCHITECTURES[config.model_type].skipped)
    rope = rope_table(config.rope, config.head_dim, num_positions, device)
    return Weights(embed_VD, layers, norm_D, lm_head_VD, rope)


def draft_vocabulary(source: TensorSource, config: DraftConfig, target: Weights) -> DraftVocabulary:
    """The drafter's embedding, head and id map: its own, or the target's tensors themselves.

    Shared iff the checkpoint has none, or one that equals the target's. What decides is the tensor,
    never `tie_word_embeddings` (z-lab writes either) nor the mere presence of an id map.

    Raises:
        ValueError: a tensor is missing or misshaped, the ids leave the vocabulary, or t2d and d2t
            disagree.
    """
    vocab, num_ids = config.model.vocab_size, config.num_draft_ids
    own = _own_tables(source, config)
    embed, head = target.embed_VD, target.lm_head_VD
    if (table := own["embed_VD"]) is not None and not torch.equal(table, embed):
        embed = table
    if (table := own["lm_head_VD"]) is not None and not torch.equal(table, head):
        head = table
    if own["offsets_V"] is None:
        return DraftVocabulary(embed, head, None)
    order = torch.arange(num_ids, device=embed.device)
    target_ids = order + own["offsets_V"]
    if target_ids.min() < 0 or target_ids.max() >= vocab:
        raise ValueError(
            f"d2t maps to ids {target_ids.min()} .. {target_ids.max()}, outside the target's "
            f"vocabulary of {vocab}; it holds offsets (target id = i + d2t[i]), not ids"
        )
    if (marks := own["marks_V"]) is not None:
        kept = marks.nonzero()[:, 0]
        if not torch.equal(kept, target_ids.sort().values):
            raise ValueError(
                f"t2d marks {len(kept)} ids, which are not the {num_ids} of d2t; the checkpoint's "
                "vocabulary maps belong to different drafters"
            )
    return DraftVocabulary(embed, head, None if torch.equal(target_ids, order) else target_ids)


def draft_vocabulary_shapes(
    source: TensorSource, config: DraftConfig
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """What `draft_vocabulary` takes for the drafter's own at most: embedding, head, id map.

    No value is compared: what stands in the file counts as the drafter's own.
    """
    own = _own_tables(source, config)
    return own["embed_VD"], own["lm_head_VD"], own["offsets_V"]


def _own_tables(source: TensorSource, config: DraftConfig) -> dict[str, Tensor | None]:
    return _take(source, dflash.vocabulary_weights(config, source.has, _draft_prefix(source)))


def _draft_prefix(source: TensorSource) -> str:
    return "model." if source.has("model.fc.weight") else ""


def _joined(tensors: list[Tensor]) -> Tensor:
    """torch.cat; of mere shapes without torch's, which imports its compiler (0.8 s) for them."""
    first = tensors[0]
    if first.is_meta:
        return first.new_empty(sum(map(len, tensors)), *first.shape[1:])
    return torch.cat(tensors)


def draft_weights(
    source: TensorSource, config: DraftConfig, num_positions: int, device: torch.device
) -> DraftWeights:
    """Builds the drafter's tree; names may stand behind `model.`.

    Comes after `draft_vocabulary`, since nothing may be left in the file.

    Raises:
        ValueError: a tensor is missing, unexpected or misshaped.
    """
    model, prefix = config.model, _draft_prefix(source)
    (fc,), (hidden_norm,), (norm,) = behind(prefix, dflash.outer_weights(config)).values()
    fc_DC, hidden_norm_D = source.take(fc), source.take(hidden_norm)
    layers = _layers(source, decoder.layer_weights(model, f"{prefix}layers."), model)
    norm_D = source.take(norm)
    source.finish()
    mixers = [layer.mixer for layer in layers if isinstance(layer.mixer, AttentionWeights)]
    context_kv = _joined([dense(mixer.qkv_ED, fc_DC.dtype)[model.q_size :] for mixer in mixers])
    biases = [mixer.qkv_bias_E for mixer in mixers if mixer.qkv_bias_E is not None]
    bias = _joined([b[model.q_size :] for b in biases]) if biases else None
    k_norms = _joined([mixer.k_norm_H[None] for mixer in mixers if mixer.k_norm_H is not None])
    rope = rope_table(model.rope, model.head_dim, num_positions, device)
    return DraftWeights(fc_DC, hidden_norm_D, context_kv, bias, k_norms, layers, norm_D, rope)


def quantized_draft_weights(weights: DraftWeights) -> DraftWeights:
    """The drafter with every matrix in FP8, rounded row by row; norms and biases are shared.

    Lossless for the output: the target verifies every draft. Only acceptance can suffer.
    """

    def rounded(tree: Any) -> Any:
        if isinstance(tree, tuple):
            return type(tree)(*map(rounded, tree))
        return quantize_fp8(tree) if tree is not None and tree.dim() == 2 else tree

    return weights._replace(
        fc_DC=rounded(weights.fc_DC),
        context_kv_XD=rounded(weights.context_kv_XD),
        layers=tuple(map(rounded, weights.layers)),
    )


def _layers(
    source: TensorSource, declared: list[LayerFields], config: ModelConfig
) -> tuple[LayerWeights, ...]:
    layers = []
    for kind, fields in zip(decoder.layer_kinds(config), declared, strict=True):
        mixer = kind.mixer.tree(**_take(source, fields.mixer))
        ffn = kind.ffn.tree(**_take(source, fields.ffn), **kind.ffn.constants(config))
        layers.append(LayerWeights(mixer, ffn))
    return tuple(layers)


def _take(source: TensorSource, fields: Fields) -> dict[str, Any]:
    """Field -> its tensor, packed from all of its parts, or the one that the source has for them;
    None where it has none."""
    return {field: _packed(source, parts) for field, parts in fields.items()}


def _packed(source: TensorSource, parts: tuple[Weight, ...]) -> Tensor | Mxfp4 | None:
    if not parts:
        return None
    stack = parts[0].stack
    if stack is not None and (source.is_made or source.has(stack.name)):
        rows, columns = sum(part.shape[0] for part in parts), parts[0].shape[1]
        return source.take(Weight(stack.name, (stack.size, rows // stack.size, columns)))
    if len(parts) == 1 and stack is None:
        in_mxfp4 = mxfp4.taken(source, *parts)
        return source.take(*parts) if in_mxfp4 is None else in_mxfp4
    out: Tensor | None = None
    sizes = [part.meant_shape[0] for part in parts]
    row = 0
    for part, size in zip(parts, sizes, strict=True):
        taken = source.take(part)
        out = taken.new_empty(sum(sizes), *part.shape[1:]) if out is None else out
        out[row : row + size] = taken
        row += size
    return out if stack is None or out is None else out.unflatten(0, (stack.size, -1))
