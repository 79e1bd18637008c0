"""How wide each layer of a target sees: what its family says of layers that slide -> windows.

A layer with window w sees, from position p, keys at k with `p - w < k <= p`. Families differ in who
says so: a key that every layer obeys, a switch, `layer_types`, or the number of a layer. A window
that is ignored, or one too many, changes every long answer without any error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from graphengine.config.values import RawConfig

SLIDING = "sliding_attention"


class Sliding(NamedTuple):
    """Who says that a layer slides, as transformers' code of a family reads it.

    default: sliding_window where the file lacks that key; one that is null is none.
    is_switched: only where use_sliding_window is true.
    by_type: layer_types say which layers. A file without them: every other layer, from the first
        on, where it `alternates`; layers from max_window_layers (28 where the file lacks it) on
        where it `is_switched`; else all.
    """

    default: int | None
    is_switched: bool = False
    by_type: bool = False
    alternates: bool = False


def read_windows(
    raw: RawConfig, sliding: Sliding | None, layer_types: Sequence[str], num_layers: int
) -> tuple[int | None, ...]:
    """A window or None for every layer; () where none slides.

    Raises:
        ValueError: layers of another kind, or keys that contradict each other or mean nothing here.
    """
    by_type = sliding is not None and sliding.by_type
    other = sorted(set(layer_types) - {"full_attention", *([SLIDING] if by_type else [])})
    if sliding is None and not layer_types and raw.flag("use_sliding_window"):
        other = ["use_sliding_window"]
    if other:
        raise raw.refusal(
            f"sliding or mixed attention ({', '.join(other)}) is not what a model_type "
            f"{raw.get('model_type')!r} has, or not supported; name it as its own family does"
        )
    if sliding is None:
        return ()
    is_off = sliding.is_switched and not raw.flag("use_sliding_window")
    width = None if is_off else raw.values.get("sliding_window", sliding.default)
    if width is None:
        if SLIDING in layer_types or (sliding.alternates and not layer_types):
            who = f"layer_types has {SLIDING}" if layer_types else "every other layer slides"
            why = "use_sliding_window is not true" if is_off else "there is no sliding_window"
            raise raw.refusal(f"{who}, but {why}; add the window's width")
        return ()
    width = raw.over({"sliding_window": sliding.default}).integer("sliding_window")
    slides = [True] * num_layers
    if layer_types and by_type:
        slides = [kind == SLIDING for kind in layer_types]
    elif sliding.alternates:
        slides = [layer % 2 == 0 for layer in range(num_layers)]
    elif by_type and sliding.is_switched:
        first = raw.over({"max_window_layers": 28}).integer("max_window_layers", minimum=0)
        slides = [layer >= first for layer in range(num_layers)]
    return tuple(width if slides_here else None for slides_here in slides) if any(slides) else ()
