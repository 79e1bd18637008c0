"""Rotary embeddings as checkpoints describe them; theta and scaling are read, never guessed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from graphengine.config.values import read_flag, read_number

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
    """Rotary embedding over the whole head, NeoX (half-split) layout.

    `theta` is the base; `factor` and the rest parametrise the scaling of `kind` and are unused by
    `default`. `amplitude` multiplies cos and sin (yarn's attention factor; 1 otherwise).
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

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], source: str) -> RopeConfig:
        """Reads `rope_parameters` (transformers 5) or flat `rope_theta` + `rope_scaling` (4).

        Of two thetas the one in `rope_parameters` counts, as in transformers. Of two scalings
        transformers takes `rope_scaling` and other engines `rope_parameters`: they must agree.

        Raises:
            ValueError: theta is missing, the kind is unknown, a key is not understood, or the two
                places disagree.
        """
        nested = config.get("rope_parameters")
        if nested is not None and not isinstance(nested, Mapping):
            raise ValueError(f"{source}: rope_parameters is {nested!r}, expected an object")
        if nested and all(isinstance(value, Mapping) for value in nested.values()):
            kinds = sorted(nested)
            if kinds != ["full_attention"]:
                raise ValueError(
                    f"{source}: rope_parameters per layer type {kinds} is not supported; only a "
                    "model whose layers are all full_attention is"
                )
            nested = nested["full_attention"]
        flat = config.get("rope_scaling") or {}
        if not isinstance(flat, Mapping):
            raise ValueError(f"{source}: rope_scaling is {flat!r}, expected an object")
        scaling = dict(nested or flat)
        if nested and flat and _scaling(nested) != _scaling(flat):
            raise ValueError(
                f"{source}: rope_parameters {dict(nested)} and rope_scaling {dict(flat)} disagree, "
                "and engines differ in which one counts; remove the one that is not meant"
            )
        theta = scaling.pop("rope_theta", None)
        theta = config.get("rope_theta") if theta is None else theta
        if theta is None:
            raise ValueError(
                f"{source}: no rope_theta (neither in rope_parameters nor at the top level); add "
                "the base that the model was trained with, it is never guessed"
            )
        theta = read_number(theta, "rope_theta", source, minimum=2.0)
        if "partial_rotary_factor" in config or "partial_rotary_factor" in scaling:
            value = scaling.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
            if value != 1.0:
                raise ValueError(
                    f"{source}: partial_rotary_factor {value!r} is not supported: engines disagree "
                    "on whether this architecture obeys it"
                )
        old, new = scaling.pop("type", None), scaling.pop("rope_type", None)
        kind = new or old or "default"
        if old and new and old != new:
            raise ValueError(f"{source}: rope type {old!r} and rope_type {new!r} disagree")
        if not isinstance(kind, str) or kind not in _ROPE_KEYS:
            raise ValueError(
                f"{source}: rope type {kind!r} is not supported; supported: {', '.join(_ROPE_KEYS)}"
            )
        unknown = sorted(set(scaling) - _ROPE_KEYS[kind])
        if unknown:
            raise ValueError(f"{source}: rope keys {unknown} are not understood for type {kind!r}")
        if kind == "default":
            return cls(theta=theta)
        return cls._scaled(theta, kind, scaling, config, source)

    @classmethod
    def _scaled(
        cls,
        theta: float,
        kind: str,
        scaling: Mapping[str, Any],
        config: Mapping[str, Any],
        source: str,
    ) -> RopeConfig:
        if "factor" not in scaling:
            raise ValueError(f"{source}: rope type {kind!r} without a factor")
        factor = read_number(scaling["factor"], "rope factor", source, minimum=1.0)
        if kind == "dynamic":
            return cls(theta=theta)
        if kind == "linear":
            return cls(theta=theta, kind="linear", factor=factor)
        fallback = config.get("max_position_embeddings") if kind == "yarn" else None
        original = scaling.get("original_max_position_embeddings", fallback)
        # At the top level it counts before either, as in transformers.
        original = config.get("original_max_position_embeddings", original)
        if original is None:
            raise ValueError(
                f"{source}: rope type {kind!r} without original_max_position_embeddings"
            )
        original = int(read_number(original, "original_max_position_embeddings", source, minimum=1))
        if original > MAX_POSITIONS:
            raise ValueError(
                f"{source}: original_max_position_embeddings is past {MAX_POSITIONS}; the file is "
                "damaged"
            )
        if kind == "llama3":
            for key in ("low_freq_factor", "high_freq_factor"):
                if key not in scaling:
                    raise ValueError(f"{source}: rope type 'llama3' without {key}")
            low = read_number(scaling["low_freq_factor"], "low_freq_factor", source)
            high = read_number(scaling["high_freq_factor"], "high_freq_factor", source)
            if not high > low:
                raise ValueError(f"{source}: high_freq_factor {high} must exceed {low}")
            return cls(
                theta=theta,
                kind="llama3",
                factor=factor,
                original_max_position_embeddings=original,
                low_freq_factor=low,
                high_freq_factor=high,
            )
        amplitude = scaling.get("attention_factor")
        if amplitude is None:
            mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
            if mscale and mscale_all:
                mscale = read_number(mscale, "mscale", source)
                mscale_all = read_number(mscale_all, "mscale_all_dim", source)
                amplitude = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all)
            else:
                amplitude = _yarn_mscale(factor, 1.0)
        return cls(
            theta=theta,
            kind="yarn",
            factor=factor,
            original_max_position_embeddings=original,
            beta_fast=_turns(scaling, "beta_fast", 32, source),
            beta_slow=_turns(scaling, "beta_slow", 1, source),
            truncate=read_flag(scaling, "truncate", source, default=True),
            amplitude=read_number(amplitude, "attention_factor", source),
        )


def _turns(scaling: Mapping[str, Any], key: str, default: float, source: str) -> float:
    """Turns over the original context; 0 and null are the default, as in transformers."""
    return read_number(scaling.get(key) or default, key, source, minimum=MIN_ROPE_TURNS)


def _scaling(rope: Mapping[str, Any]) -> dict[str, Any]:
    """A rope's keys but for theta, under one spelling of its type."""
    rest = {key: value for key, value in rope.items() if key not in ("rope_theta", "type")}
    rest["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    return rest


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
