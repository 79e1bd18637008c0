"""Checkpoints -> weight trees. The only file that knows tensor names and the safetensors format.

Why strict both ways: a tensor that is missing, unexpected or misshaped means that the file is not
the model that the config describes; loading it anyway costs acceptance or correctness silently.
Packing (qkv, gate_up, every layer's context K/V) happens here, straight on the device: each tensor
is read once through a memory map and copied into its place.
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
from graphengine.config.model import ModelConfig
from graphengine.models.dflash import DraftVocabulary, DraftWeights
from graphengine.models.layers import dense, quantize_fp8, rope_table
from graphengine.models.qwen3 import LayerWeights, Weights

Progress = Callable[[int, int], None]
"""Called with (bytes loaded, bytes in all) after each tensor."""


_PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class TensorSource(Protocol):
    """Where tensors come from: a checkpoint, or a random generator."""

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor `name`, on the device and in the dtype of the run."""
        ...

    def take_integers(self, name: str, *shape: int) -> Tensor:
        """An integer or boolean tensor, as int64 on the device."""
        ...

    def has(self, name: str) -> bool:
        """Whether `name` exists."""
        ...

    def finish(self) -> None:
        """Called once everything was taken; refuses left-overs."""
        ...


class Checkpoint:
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
        files = _weight_files(directory)
        self._total_bytes = sum(file.stat().st_size for file in files)
        self._handles: dict[str, Any] = {}
        for file in files:
            try:
                handle = safe_open(file, framework="pt", device=str(device))
                names = handle.keys()
            except (SafetensorError, OSError) as error:
                raise ValueError(
                    f"{file}: not a readable safetensors file ({error}); it is truncated or "
                    "damaged, fetch it again"
                ) from error
            for name in names:
                if name in self._handles:
                    raise ValueError(f"{file}: tensor {name!r} is in two files")
                self._handles[name] = handle
        self._left = {name for name in self._handles if not name.endswith("rotary_emb.inv_freq")}

    def has(self, name: str) -> bool:
        return name in self._handles

    def take(self, name: str, *shape: int) -> Tensor:
        tensor = self._read(name, shape)
        if tensor.dtype not in _FLOATS:  # float8 is a float too, but means nothing unscaled
            raise ValueError(
                f"{self._directory}: tensor {name!r} has dtype {tensor.dtype}; only unquantised "
                "float checkpoints are supported"
            )
        return tensor.to(self._dtype)

    def take_integers(self, name: str, *shape: int) -> Tensor:
        tensor = self._read(name, shape)
        if tensor.is_floating_point() or tensor.is_complex():
            raise ValueError(
                f"{self._directory}: tensor {name!r} has dtype {tensor.dtype}; expected integers"
            )
        return tensor.long()

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        handle = self._handles.get(name)
        if handle is None:
            raise ValueError(
                f"{self._directory}: tensor {name!r} is missing; the checkpoint is incomplete or "
                "not the model that its config.json describes"
            )
        found = tuple(handle.get_slice(name).get_shape())
        if found != shape:
            raise ValueError(
                f"{self._directory}: tensor {name!r} has shape {list(found)}, the config implies "
                f"{list(shape)}"
            )
        try:
            tensor = handle.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(
                f"{self._directory}: tensor {name!r} cannot be read ({error}); only unquantised "
                "float checkpoints are supported"
            ) from error
        self._left.discard(name)
        if self._progress is not None:
            self._loaded_bytes += tensor.numel() * tensor.element_size()
            self._progress(self._loaded_bytes, self._total_bytes)
        return tensor

    def finish(self) -> None:
        if self._left:
            names = sorted(self._left)
            shown = ", ".join(names[:5]) + (", .." if len(names) > 5 else "")
            raise ValueError(
                f"{self._directory}: {len(names)} unexpected tensors ({shown}); this is not the "
                "architecture that config.json describes"
            )
        self._handles.clear()


class RandomSource:
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

    def has(self, name: str) -> bool:
        return False

    def take(self, name: str, *shape: int) -> Tensor:
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        if self._is_uniform:
            return tensor.uniform_(-1e-3, 1e-3, generator=self._generator)
        if name.endswith("norm.weight"):
            return tensor.fill_(1.0)
        return tensor.normal_(std=0.02, generator=self._generator)

    def take_integers(self, name: str, *shape: int) -> Tensor:
        """Zeros: a draft vocabulary of the target's first ids."""
        return torch.zeros(shape, dtype=torch.int64, device=self._device)

    def finish(self) -> None:
        pass


class ShapeSource:
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

    def take(self, name: str, *shape: int) -> Tensor:
        self.asked[name] = shape
        return torch.empty(shape, dtype=self._dtype, device="meta")

    def take_integers(self, name: str, *shape: int) -> Tensor:
        self.asked[name] = shape
        return torch.empty(shape, dtype=torch.int64, device="meta")

    def finish(self) -> None:
        pass


class TensorHeader(NamedTuple):
    """What a safetensors file says about a tensor before its bytes."""

    shape: tuple[int, ...]
    dtype: str  # the file's name for it: "BF16", "F32", ..


def read_headers(directory: Path) -> dict[str, TensorHeader]:
    """Names, shapes and dtypes of a checkpoint's tensors; no tensor is read.

    Raises:
        ValueError: no weight files, or one that is not readable.
    """
    headers: dict[str, TensorHeader] = {}
    for file in _weight_files(directory):
        try:
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118 - a handle is no dict
                    part = handle.get_slice(name)
                    header = TensorHeader(tuple(part.get_shape()), str(part.get_dtype()))
                    if name in headers:
                        raise ValueError(f"{file}: tensor {name!r} is in two files")
                    headers[name] = header
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{file}: not a readable safetensors file ({error}); it is truncated or damaged, "
                "fetch it again"
            ) from error
    return headers


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
    """Builds the target's tree from Hugging Face Qwen3 names.

    Args:
        num_positions: rows of the rope table.

    Raises:
        ValueError: a tensor is missing, unexpected or misshaped.
    """
    vocab, hidden = config.vocab_size, config.hidden_size
    embed = source.take("model.embed_tokens.weight", vocab, hidden)
    layers = tuple(
        _layer(source, f"model.layers.{i}.", config) for i in range(config.num_hidden_layers)
    )
    norm = source.take("model.norm.weight", hidden)
    head = embed
    if not config.tie_word_embeddings:
        head = source.take("lm_head.weight", vocab, hidden)
    elif source.has("lm_head.weight"):  # some tied checkpoints store the table twice
        duplicate = source.take("lm_head.weight", vocab, hidden)
        if not torch.equal(duplicate, embed):
            raise ValueError(
                "lm_head.weight differs from the embedding although config.json says "
                "tie_word_embeddings; set it to false if the head is its own"
            )
    source.finish()
    rope = rope_table(config.rope, config.head_dim, num_positions, device)
    return Weights(embed, layers, norm, head, rope)


def draft_vocabulary(source: TensorSource, config: DraftConfig, target: Weights) -> DraftVocabulary:
    """The drafter's embedding, head and id map: its own, or the target's tensors themselves.

    Shared iff the checkpoint has none, or one that equals the target's. What decides is the tensor,
    never `tie_word_embeddings` (z-lab writes either) nor the mere presence of an id map.
    `d2t` holds offsets: target id = i + d2t[i]; `t2d` marks the same ids and must agree.

    Raises:
        ValueError: a tensor is missing or misshaped, the ids leave the vocabulary, or t2d and d2t
            disagree.
    """
    vocab, hidden, num_ids = config.model.vocab_size, config.model.hidden_size, config.num_draft_ids
    prefix, fits = _draft_prefix(source), target.embed_VD.shape[1] == hidden
    embed, head = target.embed_VD, target.lm_head_VD
    name = f"{prefix}embed_tokens.weight"
    if source.has(name) or not fits:
        own = source.take(name, vocab, hidden)
        embed = embed if torch.equal(own, embed) else own
    if source.has("lm_head.weight") or not fits or num_ids != vocab:
        own = source.take("lm_head.weight", num_ids, hidden)
        head = head if torch.equal(own, head) else own
    if num_ids == vocab and not source.has("d2t") and not source.has("t2d"):
        return DraftVocabulary(embed, head, None)
    order = torch.arange(num_ids, device=embed.device)
    target_ids = order + source.take_integers("d2t", num_ids)
    if target_ids.min() < 0 or target_ids.max() >= vocab:
        raise ValueError(
            f"d2t maps to ids {target_ids.min()} .. {target_ids.max()}, outside the target's "
            f"vocabulary of {vocab}; it holds offsets (target id = i + d2t[i]), not ids"
        )
    if source.has("t2d"):
        kept = source.take_integers("t2d", vocab).nonzero()[:, 0]
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
    vocab, hidden, num_ids = config.model.vocab_size, config.model.hidden_size, config.num_draft_ids
    fits = config.tap_size == hidden
    embed = head = target_ids = None
    name = f"{_draft_prefix(source)}embed_tokens.weight"
    if source.has(name) or not fits:
        embed = source.take(name, vocab, hidden)
    if source.has("lm_head.weight") or not fits or num_ids != vocab:
        head = source.take("lm_head.weight", num_ids, hidden)
    if num_ids != vocab or source.has("d2t") or source.has("t2d"):
        target_ids = source.take_integers("d2t", num_ids)
    if source.has("t2d"):
        source.take_integers("t2d", vocab)
    return embed, head, target_ids


def _draft_prefix(source: TensorSource) -> str:
    return "model." if source.has("model.fc.weight") else ""


def draft_weights(
    source: TensorSource, config: DraftConfig, num_positions: int, device: torch.device
) -> DraftWeights:
    """Builds the drafter's tree; names may stand behind `model.`.

    Comes after `draft_vocabulary`, since nothing may be left in the file.

    Raises:
        ValueError: a tensor is missing, unexpected or misshaped.
    """
    model = config.model
    hidden, prefix = model.hidden_size, _draft_prefix(source)
    fc = source.take(f"{prefix}fc.weight", hidden, config.num_taps * config.tap_size)
    hidden_norm = source.take(f"{prefix}hidden_norm.weight", hidden)
    layers = tuple(
        _layer(source, f"{prefix}layers.{i}.", model) for i in range(model.num_hidden_layers)
    )
    norm = source.take(f"{prefix}norm.weight", hidden)
    source.finish()
    context_kv = torch.cat([dense(layer.qkv_ED, fc.dtype)[model.q_size :] for layer in layers])
    bias = None
    if model.attention_bias:
        biases = [layer.qkv_bias_E for layer in layers if layer.qkv_bias_E is not None]
        bias = torch.cat([b[model.q_size :] for b in biases])
    k_norms = torch.stack([layer.k_norm_H for layer in layers])
    rope = rope_table(model.rope, model.head_dim, num_positions, device)
    return DraftWeights(fc, hidden_norm, context_kv, bias, k_norms, layers, norm, rope)


def quantized_draft_weights(weights: DraftWeights) -> DraftWeights:
    """The drafter with every matrix in FP8, rounded row by row; norms and biases are shared.

    Lossless for the output: the target verifies every draft. Only acceptance can suffer.
    """
    layers = tuple(
        layer._replace(
            **{
                name: quantize_fp8(dense(getattr(layer, name), torch.bfloat16))
                for name in ("qkv_ED", "o_DF", "gate_up_JD", "down_DI")
            }
        )
        for layer in weights.layers
    )
    return weights._replace(
        fc_DC=quantize_fp8(dense(weights.fc_DC, torch.bfloat16)),
        context_kv_XD=quantize_fp8(dense(weights.context_kv_XD, torch.bfloat16)),
        layers=layers,
    )


def _layer(source: TensorSource, prefix: str, config: ModelConfig) -> LayerWeights:
    hidden, inter, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.q_size, config.kv_size
    attention = prefix + "self_attn."

    def packed(shapes: dict[str, tuple[int, ...]]) -> Tensor:
        rows = sum(shape[0] for shape in shapes.values())
        out: Tensor | None = None
        row = 0
        for name, shape in shapes.items():
            part = source.take(name, *shape)
            if out is None:
                out = torch.empty(rows, *shape[1:], dtype=part.dtype, device=part.device)
            out[row : row + shape[0]] = part
            row += shape[0]
        assert out is not None
        return out

    def projections(suffix: str, *columns: int) -> dict[str, tuple[int, ...]]:
        sizes = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        return {f"{attention}{name}.{suffix}": (n, *columns) for name, n in sizes.items()}

    bias = config.attention_bias
    return LayerWeights(
        input_norm_D=source.take(prefix + "input_layernorm.weight", hidden),
        qkv_ED=packed(projections("weight", hidden)),
        qkv_bias_E=packed(projections("bias")) if bias else None,
        q_norm_H=source.take(attention + "q_norm.weight", head_dim),
        k_norm_H=source.take(attention + "k_norm.weight", head_dim),
        o_DF=source.take(attention + "o_proj.weight", hidden, q_size),
        o_bias_D=source.take(attention + "o_proj.bias", hidden) if bias else None,
        post_norm_D=source.take(prefix + "post_attention_layernorm.weight", hidden),
        gate_up_JD=packed(
            {f"{prefix}mlp.{name}_proj.weight": (inter, hidden) for name in ("gate", "up")}
        ),
        down_DI=source.take(prefix + "mlp.down_proj.weight", hidden, inter),
    )


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ValueError(f"{index}: not a safetensors index ({error})") from error
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
