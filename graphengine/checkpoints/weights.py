"""Checkpoints -> weight trees. The only file that knows the safetensors format.

Why strict both ways: a tensor that is missing, unexpected or misshaped means that the file is not
the model that the config describes; loading it anyway costs acceptance or correctness silently.
Packing (qkv, gate_up, every layer's context K/V) happens here, straight on the device: each tensor
is read once through a memory map and copied into its place. Names and shapes are not known here:
models/ declares them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from graphengine.config.draft import DraftConfig
from graphengine.config.model import ARCHITECTURES, ModelConfig
from graphengine.models import decoder, dflash
from graphengine.models.attention import AttentionWeights
from graphengine.models.decoder import LayerFields, LayerWeights, Weights
from graphengine.models.dflash import DraftVocabulary, DraftWeights
from graphengine.models.layers import dense, quantize_fp8, rope_table
from graphengine.models.weight import Fields, Weight, behind

Progress = Callable[[int, int], None]
"""Called with (bytes loaded, bytes in all) after each tensor."""


_PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_ONLY_FLOATS = "only unquantised float checkpoints are supported"


class TensorSource(Protocol):
    """Where tensors come from: a checkpoint, or a random generator."""

    def take(self, weight: Weight) -> Tensor:
        """The tensor, on the device and in its dtype or the run's."""
        ...

    def has(self, name: str) -> bool:
        """Whether `name` exists."""
        return False

    def finish(self, skipped: tuple[str, ...] = ()) -> None:
        """Called once everything was taken; refuses left-overs whose names do not begin so."""


class Checkpoint(TensorSource):
    """A directory of safetensors files, single or sharded, read strictly."""

    def __init__(
        self,
        directory: Path,
        device: torch.device,
        dtype: torch.dtype,
        progress: Progress | None = None,
    ) -> None:
        self._directory, self._device, self._dtype = directory, device, dtype
        self._progress, self._loaded_bytes = progress, 0
        self._total_bytes = sum(file.stat().st_size for file in _weight_files(directory))
        self._handles = _open(directory, device)
        self._left = {name for name in self._handles if not name.endswith("rotary_emb.inv_freq")}

    def has(self, name: str) -> bool:
        return name in self._handles

    def take(self, weight: Weight) -> Tensor:
        tensor = self._read(weight.name, weight.shape)
        dtype = weight.dtype or self._dtype
        if dtype.is_floating_point and tensor.dtype not in _FLOATS:  # float8 means nothing unscaled
            raise self._refusal(weight.name, f"has dtype {tensor.dtype}; {_ONLY_FLOATS}")
        if not dtype.is_floating_point and (tensor.is_floating_point() or tensor.is_complex()):
            raise self._refusal(weight.name, f"has dtype {tensor.dtype}; expected integers")
        # On the CPU it still lies in the file's memory map.
        return weight.made_of(tensor.to(dtype, copy=self._device.type == "cpu"))

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        handle = self._handles.get(name)
        if handle is None:
            raise self._refusal(
                name,
                "is missing; the checkpoint is incomplete or not the model that its config.json "
                "describes",
            )
        found = tuple(handle.get_slice(name).get_shape())
        if found != shape:
            raise self._refusal(name, f"has shape {list(found)}, the config implies {list(shape)}")
        try:
            tensor = handle.get_tensor(name)
        except SafetensorError as error:
            raise self._refusal(name, f"cannot be read ({error}); {_ONLY_FLOATS}") from error
        self._left.discard(name)
        if self._progress is not None:
            self._loaded_bytes += tensor.numel() * tensor.element_size()
            self._progress(self._loaded_bytes, self._total_bytes)
        return tensor

    def _refusal(self, name: str, text: str) -> ValueError:
        return ValueError(f"{self._directory}: tensor {name!r} {text}")

    def finish(self, skipped: tuple[str, ...] = ()) -> None:
        names = sorted(name for name in self._left if not name.startswith(skipped))
        if names:
            shown = ", ".join(names[:5]) + (", .." if len(names) > 5 else "")
            raise ValueError(
                f"{self._directory}: {len(names)} unexpected tensors ({shown}); this is not the "
                "architecture that config.json describes"
            )
        self._handles.clear()


class RandomSource(TensorSource):
    """Normal weights of standard deviation 0.02, norms of one: speed without a checkpoint.

    Args:
        is_uniform: everything uniform in +-1e-3 instead, norms too, as vLLM's dummy loader draws
            it. Then a row is little but its token's embedding and the rows of a block are alike,
            which takes less power: at its power limit a GPU is faster than with real weights.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, seed: int = 0, is_uniform: bool = False
    ) -> None:
        self._device, self._dtype, self._is_uniform = device, dtype, is_uniform
        self._generator = torch.Generator(device).manual_seed(seed)

    def take(self, weight: Weight) -> Tensor:
        dtype = weight.dtype or self._dtype
        tensor = torch.empty(weight.shape, dtype=dtype, device=self._device)
        if not dtype.is_floating_point:  # a draft vocabulary of the target's first ids
            return tensor.zero_()
        if self._is_uniform:
            return weight.made_of(tensor.uniform_(-1e-3, 1e-3, generator=self._generator))
        if weight.initialiser == "normal":
            return weight.made_of(tensor.normal_(std=0.02, generator=self._generator))
        return weight.made_of(tensor.fill_(float(weight.initialiser == "ones")))


class ShapeSource(TensorSource):
    """Tensors without bytes (device meta), and a record of what a builder asked for.

    A plan or a check made with it cannot disagree with the loader: it is the loader.

    Args:
        names: tensors that a checkpoint has beyond what every one must have.
    """

    def __init__(self, dtype: torch.dtype, names: Collection[str] = ()) -> None:
        self._dtype, self._names = dtype, names
        self.asked: dict[str, tuple[int, ...]] = {}

    def has(self, name: str) -> bool:
        return name in self._names

    def take(self, weight: Weight) -> Tensor:
        self.asked[weight.name] = weight.shape
        return torch.empty(weight.meant_shape, dtype=weight.dtype or self._dtype, device="meta")


class TensorHeader(NamedTuple):
    """What a safetensors file says about a tensor before its bytes."""

    shape: tuple[int, ...]
    dtype: str  # the file's name for it: "BF16", "F32", ..


def read_headers(directory: Path) -> dict[str, TensorHeader]:
    """Names, shapes and dtypes of a checkpoint's tensors; no tensor is read.

    Raises:
        ValueError: no weight files, or one that is not readable.
    """
    parts = {name: handle.get_slice(name) for name, handle in _open(directory).items()}
    return {n: TensorHeader(tuple(p.get_shape()), str(p.get_dtype())) for n, p in parts.items()}


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


def _packed(source: TensorSource, parts: tuple[Weight, ...]) -> Tensor | None:
    stack = parts[0].stack if parts else None
    if stack is not None and source.has(stack.name):
        rows, columns = sum(part.shape[0] for part in parts), parts[0].shape[1]
        return source.take(Weight(stack.name, (stack.size, rows // stack.size, columns)))
    if len(parts) < 2 and stack is None:
        return source.take(*parts) if parts else None
    out: Tensor | None = None
    sizes = [part.meant_shape[0] for part in parts]
    row = 0
    for part, size in zip(parts, sizes, strict=True):
        taken = source.take(part)
        out = taken.new_empty(sum(sizes), *part.shape[1:]) if out is None else out
        out[row : row + size] = taken
        row += size
    return out if stack is None or out is None else out.unflatten(0, (stack.size, -1))


def _open(directory: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Each tensor's open file, by the tensor's name."""
    handles: dict[str, Any] = {}
    for file in _weight_files(directory):
        try:
            handle = safe_open(file, framework="pt", device=str(device))
            names = handle.keys()
        except (SafetensorError, OSError) as error:
            why = f"not a readable safetensors file ({error}); truncated or damaged, fetch it again"
            if not os.access(file, os.R_OK):  # which safetensors calls missing
                why = "cannot be read (no permission); make it readable"
            raise ValueError(f"{file}: {why}") from error
        for name in names:
            if name in handles:
                raise ValueError(f"{file}: tensor {name!r} is in two files; fetch them again")
            handles[name] = handle
    return handles


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ValueError(
                f"{index}: not a safetensors index ({error}); fetch the file again"
            ) from error
        outside = [name for name in names if not isinstance(name, str) or Path(name).name != name]
        if outside:
            raise ValueError(f"{index}: {outside[:3]} lie outside the directory; not read")
        files = [directory / name for name in names]
    else:
        files = sorted(directory.glob("*.safetensors"))
    pickles = sorted(f.name for f in directory.iterdir() if f.suffix in _PICKLES)
    if pickles and not files:
        raise ValueError(
            f"{directory}: only {', '.join(pickles[:3])}, no safetensors; a pickle can run any "
            "code and is never read: convert it to safetensors, or fetch a revision that has them"
        )
    # os.path, not Path, which raises for a name that is too long
    missing = [file.name for file in files if not os.path.isfile(file)]
    if missing or not files:
        what = f"weight files {missing}" if missing else "model.safetensors"
        raise ValueError(
            f"{directory}: no {what}; fetch the checkpoint again (only safetensors are read), or "
            "pass --load-format dummy for random weights"
        )
    return files
