"""A decoder-only transformer as layers (mixer, ffn), cut where a mixer touches its state.

Between two cuts sits everything that Inductor compiles and a CUDA graph captures. A kind of layer
is a value that points to pure functions; a layer's weights tell its kind, so that a compiled
segment is a function of tensors alone and equal shapes share one compilation.

To add a kind: a file with its weights and functions, and a row in `MIXERS` or `FFNS`. To add an
architecture of known kinds: a row in `config.model.ARCHITECTURES`, and tests as in
`tests/models/test_phi3_golden.py`; nothing else names architectures, and what loads, is drawn as a
dummy, planned and found by doctor follows from the row. No row can say: factors of embeddings,
logits or residuals, soft caps, norms behind a mixer or ffn, another activation than SiLU's and
gpt-oss's, values of another width than keys.

Legend: T rows, V vocabulary, D hidden, P positions, H head dim.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from graphengine.config.model import ModelConfig
from graphengine.models import attention, gated_attention, gated_delta, moe, swiglu
from graphengine.models.attention import AttentionWeights, PagedKV
from graphengine.models.gated_attention import GatedAttentionWeights
from graphengine.models.gated_delta import GatedDeltaWeights, RecurrentState
from graphengine.models.moe import MoeWeights
from graphengine.models.swiglu import SwigluWeights
from graphengine.models.weight import Fields, Weight, behind, norm, num_matrix_elements


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixer:
    """What mixes rows of a request: its weights, its steps and its state.

    A dense segment ends in `project`. Behind the compiled code come `write_state_`, if it is an
    attention's (None: the next step takes what was projected), and the step that reads the state,
    which is given the projection as well where the mixer `gates`. The next segment begins with
    `output`, which reads the weights named in `output_fields`.
    """

    tree: type[Any]
    weights: Callable[[ModelConfig], Fields]
    output_fields: tuple[str, ...]
    state: Callable[[ModelConfig], PagedKV | RecurrentState]
    row_bytes: Callable[[ModelConfig, int], int]
    project: Callable[..., tuple[Tensor, Tensor]]
    write_state_: Callable[..., Tensor] | None
    output: Callable[..., Tensor]
    gates: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ffn:
    """What acts on each row alone, all within a dense segment.

    `constants`: the fields of its tree that are no tensors. `num_read_elements`: weights of these
    fields that a forward of so many rows reads; for one row of a `widened` config, also those that
    it is multiplied by.
    """

    tree: type[Any]
    weights: Callable[[ModelConfig], Fields]
    num_read_elements: Callable[[ModelConfig, Fields, int], int]
    row_bytes: Callable[[ModelConfig, int], int]
    run: Callable[..., tuple[Tensor, Tensor]]
    constants: Callable[[ModelConfig], dict[str, Any]] = lambda config: {}


class LayerKind(NamedTuple):
    """A layer: `h += ffn(h += mixer(h))`."""

    mixer: Mixer
    ffn: Ffn


MIXERS = {
    "attention": Mixer(
        tree=AttentionWeights,
        weights=attention.weights,
        output_fields=("o_DF", "o_bias_D"),
        state=attention.state,
        row_bytes=attention.row_bytes,
        project=attention.project,
        write_state_=attention.write_state_,
        output=attention.output,
    ),
    "gated_attention": Mixer(
        tree=GatedAttentionWeights,
        weights=gated_attention.weights,
        output_fields=("o_DF",),
        state=attention.state,
        row_bytes=gated_attention.row_bytes,
        project=gated_attention.project,
        write_state_=gated_attention.write_state_,
        output=gated_attention.output,
        gates=True,
    ),
    "gated_delta": Mixer(
        tree=GatedDeltaWeights,
        weights=gated_delta.weights,
        output_fields=("out_DF",),
        state=gated_delta.state,
        row_bytes=gated_delta.row_bytes,
        project=gated_delta.project,
        write_state_=None,
        output=gated_delta.output,
    ),
}
FFNS = {
    "swiglu": Ffn(
        tree=SwigluWeights,
        weights=swiglu.weights,
        num_read_elements=swiglu.num_read_elements,
        row_bytes=swiglu.row_bytes,
        run=swiglu.run,
    ),
    "moe": Ffn(
        tree=MoeWeights,
        weights=moe.weights,
        num_read_elements=moe.num_read_elements,
        row_bytes=moe.row_bytes,
        run=moe.run,
        constants=moe.constants,
    ),
}
_MIXER_OF = {mixer.tree: mixer for mixer in MIXERS.values()}
_FFN_OF = {ffn.tree: ffn for ffn in FFNS.values()}


class LayerWeights(NamedTuple):
    """One layer; the types of its parts are its kind."""

    mixer: AttentionWeights | GatedAttentionWeights | GatedDeltaWeights
    ffn: SwigluWeights | MoeWeights


class Weights(NamedTuple):
    """A whole target. `lm_head_VD` is `embed_VD` itself when the checkpoint ties them."""

    embed_VD: Tensor
    layers: tuple[LayerWeights, ...]
    norm_D: Tensor
    lm_head_VD: Tensor
    rope_PH: Tensor  # float32, see layers.rope_table


def layer_kinds(config: ModelConfig) -> tuple[LayerKind, ...]:
    """The kind of every layer."""
    return tuple(LayerKind(MIXERS[mixer], FFNS[ffn]) for mixer, ffn in config.layer_kinds)


def read_over_one_row(config: ModelConfig, num_rows: int) -> float:
    """Weights of the layers that so many rows read over those that one does; 1 without experts."""
    of_rows = of_one = 0
    for kind, count in Counter(layer_kinds(config)).items():
        of_mixer = sum(map(num_matrix_elements, kind.mixer.weights(config).values()))
        fields, num_read = kind.ffn.weights(config), kind.ffn.num_read_elements
        of_rows += count * (of_mixer + num_read(config, fields, num_rows))
        of_one += count * (of_mixer + num_read(config, fields, 1))
    return of_rows / of_one


class LayerFields(NamedTuple):
    """The declarations of one layer's weights."""

    mixer: Fields
    ffn: Fields


def layer_weights(config: ModelConfig, prefix: str = "layers.") -> list[LayerFields]:
    """The weights of every layer, under the names that it has in the file."""
    return [
        LayerFields(*(behind(f"{prefix}{i}.", part.weights(config)) for part in kind))
        for i, kind in enumerate(layer_kinds(config))
    ]


def outer_weights(config: ModelConfig, prefix: str = "model.") -> Fields:
    """A target's weights around its layers; a tied head is the embedding."""
    vocab, hidden = config.vocab_size, config.hidden_size
    return {
        "embed_VD": (Weight(f"{prefix}embed_tokens.weight", (vocab, hidden), 0),),
        "norm_D": norm(f"{prefix}norm.weight", hidden, config.has_offset_norms),
        "lm_head_VD": (Weight("lm_head.weight", (vocab, hidden), 0),),
    }


def mixer_of(layer: LayerWeights) -> Mixer:
    """The kind of a layer's mixer."""
    return _MIXER_OF[type(layer.mixer)]


def before_mixing(
    layer: LayerWeights, h_TD: Tensor, update: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """The end of a dense segment: `h += update`, and what the mixer takes -> (h_TD, x).

    `update` is what the layer before left to add; None for the embedding.
    """
    return mixer_of(layer).project(layer.mixer, h_TD, update, eps)


def after_mixing(
    layer: LayerWeights, h_TD: Tensor, mixed: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The begin of a dense segment, from what the mixer gave: -> (h_TD, update).

    The update, [T, D] or partial sums [Z, T, D], is added by whatever norm comes next.
    """
    update = mixer_of(layer).output(layer.mixer, mixed)
    return _FFN_OF[type(layer.ffn)].run(layer.ffn, h_TD, update, eps)
