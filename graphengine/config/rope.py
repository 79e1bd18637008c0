"""Rotary embeddings as checkpoints describe them; theta and scaling are read, never guessed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from graphengine.config.values import RawConfig

RopeKind = Literal["default", "linear", "yarn", "llama3"]

MAX_POSITIONS = 1 << 40  # past it a file is damaged
MIN_ROPE_TURNS = 1e-6  # of yarn's beta_fast and beta_slow, which are around 32 and 1

_ROPE_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset(["factor"]),
    # A base that grows with what is past max_position_embeddings, where no request gets.
    "dynamic": frozenset(["factor"]),
    "yarn": frozenset(
        "factor original_max_position_embeddings beta_fast beta_slow attention_factor mscale "
        "mscale_all_dim truncate".split()
    ),
    "llama3": frozenset(
        "factor original_max_position_embeddings low_freq_factor high_freq_factor".split()
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of a head's beginning, mostly all of it, NeoX (half-split) layout.

    `theta` is the base; `factor` and the rest parametrise the scaling of `kind` and are unused by
    `default`. `amplitude` multiplies cos and sin (yarn's attention factor; 1 otherwise).
    `stretched_positions`: what yarn makes of an original context that the file states, whatever it
    has for max_position_embeddings; 0 otherwise. `partial_rotary_factor`: the share of a head that
    is turned, whose rows `models` then packs in `layers.rotary_order`.
    """

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    amplitude: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    partial_rotary_factor: float = 1.0
    stretched_positions: int = field(default=0, compare=False)

    def rotary_dim(self, head_dim: int) -> int:
        """How much of a head is turned: its beginning."""
        return int(head_dim * self.partial_rotary_factor)

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], source: str, partial_rotary_factor: float | None = None
    ) -> RopeConfig:
        """Reads `rope_parameters` (transformers 5) or flat `rope_theta` + `rope_scaling` (4).

        Of two thetas the one in `rope_parameters` counts, as in transformers. Of two scalings
        transformers takes `rope_scaling` and other engines `rope_parameters`: they must agree.
        The sections of a multimodal rope change nothing for text, whose three positions are equal.

        Args: partial_rotary_factor: of a file without one; None: a file must not have another
            than 1.

        Raises:
            ValueError: theta is missing, the kind is unknown, a key is not understood, or the two
                places disagree.
        """
        raw = RawConfig(config, source)
        scaling = _stated(raw)
        theta = _taken(raw, scaling, "rope_theta").number("rope_theta", minimum=2.0)
        share = _turned_share(raw, scaling, partial_rotary_factor)
        if partial_rotary_factor is not None:
            for key in ("mrope_section", "mrope_interleaved"):
                scaling.pop(key, None)
        old, new = scaling.pop("type", None), scaling.pop("rope_type", None)
        kind = new or old or "default"
        if old and new and old != new:
            raise raw.refusal(
                f"rope type {old!r} and rope_type {new!r} disagree; remove the one that is not "
                "meant"
            )
        if not isinstance(kind, str) or kind not in _ROPE_KEYS:
            raise raw.refusal(
                f"rope type {kind!r} is not supported; supported: {', '.join(_ROPE_KEYS)}"
            )
        unknown = sorted(set(scaling) - _ROPE_KEYS[kind])
        if unknown:
            raise raw.refusal(f"rope keys {unknown} are not understood for type {kind!r}")
        if kind == "default":
            return cls(theta=theta, partial_rotary_factor=share)
        # At the top level it counts before either, as in transformers.
        key = "original_max_position_embeddings"
        fallback = raw.get("max_position_embeddings") if kind == "yarn" else None
        is_stated = kind == "yarn" and (raw.get(key) is not None or key in scaling)
        scaling[key] = raw.over({key: scaling.get(key, fallback)}).get(key)
        keys = RawConfig(scaling, f"{source}: rope type {kind!r}")
        rope = cls._scaled(theta, kind, keys)
        stretched = rope.original_max_position_embeddings * rope.factor if is_stated else 0
        if stretched > MAX_POSITIONS:
            raise keys.refusal(
                f"factor {rope.factor:g} stretches the context past {MAX_POSITIONS}; the file is "
                "damaged"
            )
        return replace(rope, partial_rotary_factor=share, stretched_positions=int(stretched))

    @classmethod
    def _scaled(cls, theta: float, kind: str, rope: RawConfig) -> RopeConfig:
        factor = rope.number("factor", minimum=1.0)
        if kind == "dynamic":
            return cls(theta=theta)
        if kind == "linear":
            return cls(theta=theta, kind="linear", factor=factor)
        original = int(rope.number("original_max_position_embeddings", minimum=1))
        if original > MAX_POSITIONS:
            raise rope.refusal(
                f"original_max_position_embeddings is past {MAX_POSITIONS}; the file is damaged"
            )
        if kind == "llama3":
            low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
            if not high > low:
                raise rope.refusal(f"high_freq_factor {high} must exceed {low}")
            return cls(
                theta=theta,
                kind="llama3",
                factor=factor,
                original_max_position_embeddings=original,
                low_freq_factor=low,
                high_freq_factor=high,
            )
        amplitude = _yarn_mscale(factor, 1.0)
        if rope.get("mscale") and rope.get("mscale_all_dim"):
            amplitude = _yarn_mscale(factor, rope.number("mscale"))
            amplitude /= _yarn_mscale(factor, rope.number("mscale_all_dim"))
        given = rope.get("attention_factor")
        decided = {
            "beta_fast": rope.get("beta_fast") or 32.0,  # also for 0, as in transformers
            "beta_slow": rope.get("beta_slow") or 1.0,
            "attention_factor": amplitude if given is None else given,
        }
        rope = RawConfig({**rope.values, **decided}, rope.source)
        return cls(
            theta=theta,
            kind="yarn",
            factor=factor,
            original_max_position_embeddings=original,
            beta_fast=rope.number("beta_fast", MIN_ROPE_TURNS),
            beta_slow=rope.number("beta_slow", MIN_ROPE_TURNS),
            truncate=rope.flag("truncate", default=True),
            amplitude=rope.number("attention_factor"),
        )


def _stated(raw: RawConfig) -> dict[str, Any]:
    """What a file says of its rope, in either place."""
    nested, flat = (_there(raw.section(key)) for key in ("rope_parameters", "rope_scaling"))
    if nested and all(isinstance(value, Mapping) for value in nested.values()):
        kinds = sorted(nested)
        if kinds != ["full_attention"]:
            raise raw.refusal(
                f"rope_parameters per layer type {kinds} is not supported; only a model whose "
                "layers are all full_attention is"
            )
        nested = _there(nested["full_attention"])
    if nested and flat and _scaling(nested) != _scaling(flat):
        raise raw.refusal(
            f"rope_parameters {nested} and rope_scaling {flat} disagree, and engines differ in "
            "which one counts; remove the one that is not meant"
        )
    return nested or flat


def _turned_share(raw: RawConfig, rope: dict[str, Any], default: float | None) -> float:
    """`partial_rotary_factor`. Args: default: None: 1, and nothing else is allowed.
    Mutates: rope."""
    key = "partial_rotary_factor"
    file = raw.over({key: 1.0 if default is None else default})
    share = _taken(file, rope, key).number(key)
    if default is None and share != 1.0:
        raise raw.refusal(
            f"{key} {share!r} is not supported: engines disagree on whether this architecture "
            "obeys it"
        )
    if not 0 < share <= 1:
        raise raw.refusal(f"{key} is {share!r}, expected a share of a head")
    return share


def _taken(raw: RawConfig, rope: dict[str, Any], key: str) -> RawConfig:
    """A key alone, as the rope has it, else as the file does. Mutates: rope, which loses it."""
    return RawConfig({key: rope.pop(key, raw.get(key))}, raw.source)


def _there(rope: Mapping[str, Any]) -> dict[str, Any]:
    """A rope's keys that have a value; one that is null is not there."""
    return {key: value for key, value in rope.items() if value is not None}


def _scaling(rope: Mapping[str, Any]) -> dict[str, Any]:
    """A rope's keys but for theta, under one spelling of its type."""
    rest = {key: value for key, value in rope.items() if key not in ("rope_theta", "type")}
    rest["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    return rest


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
