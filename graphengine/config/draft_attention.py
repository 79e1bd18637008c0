"""Which keys each drafter layer sees: layer types, windows and causality of a config -> rules.

The rule of a row at position p (`AttentionRule`): context rows and block rows count alike, a key at
k is seen if `k <= p` or the layer is not causal, and if `|p - k| < window` in a sliding layer. Full
layers are non-causal and sliding layers causal unless the file says otherwise, so one drafter may
mix both: two attentions a step. A window or a causality that is ignored costs acceptance alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from graphengine.config.draft import FULL_NON_CAUSAL, AttentionRule
from graphengine.config.model import read_layer_types
from graphengine.config.values import read_flag, read_integer

SLIDING = "sliding_attention"


class Keys(NamedTuple):
    """A flat file: a DFlash key stands in dflash_config, which wins, or at the top level."""

    outer: Mapping[str, Any]
    nested: Mapping[str, Any]
    source: str

    def get(self, key: str) -> Any:
        value = self.nested.get(key)
        return self.outer.get(key) if value is None else value

    def place(self, key: str) -> str:
        return f"dflash_config.{key}" if self.nested.get(key) is not None else key

    def required(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ValueError(
                f"{self.source}: no {key} (neither in dflash_config nor at the top level); it is "
                "never guessed"
            )
        return value

    def notes(self) -> list[str]:
        """Keys that stand at both places with different values."""
        return [
            f"{key} is {self.outer[key]!r} at the top level and {value!r} in dflash_config; "
            "dflash_config counts"
            for key, value in sorted(self.nested.items())
            if value is not None and self.outer.get(key) not in (None, value)
        ]


def flat_attention(keys: Keys, num_layers: int) -> tuple[AttentionRule, ...]:
    """The layers' rules: `is_causal`, else `dflash_config.causal`, else causal if sliding."""
    outer, source = keys.outer, keys.source
    causal: bool | None = None
    for key, home in (("is_causal", outer), ("is_causal", keys.nested), ("causal", keys)):
        if causal is None and home.get(key) is not None:
            causal = read_flag({key: home.get(key)}, key, source)
    own, other = keys.get("swa_window_size"), keys.get("sliding_window")
    window = other if own is None else own
    use_swa = read_flag({"use_swa": keys.get("use_swa")}, "use_swa", source)
    full = AttentionRule(causal=bool(causal))
    if use_swa and not outer.get("layer_types"):
        if window is None:
            raise ValueError(f"{source}: use_swa without a sliding_window; add its width")
        width = read_integer(window, "sliding_window", source, minimum=1)
        return (AttentionRule(causal=bool(causal), window=width),) * num_layers
    sliding = AttentionRule(
        causal=True if causal is None else causal, window=_window(window, outer, source)
    )
    rules = _rules(outer, num_layers, full, sliding, source)
    if own != other and None not in (own, other) and any(rule.window for rule in rules):
        raise ValueError(
            f"{source}: swa_window_size {own!r} and sliding_window {other!r} disagree; remove the "
            "one that the drafter was not trained with"
        )
    if use_swa and all(rule.window is None for rule in rules or [full]):
        raise ValueError(f"{source}: use_swa is true, but no layer of layer_types is {SLIDING}")
    return rules


def speculators_attention(
    layers: Mapping[str, Any], num_layers: int, sliding_causal: bool, source: str
) -> tuple[AttentionRule, ...]:
    """The layers' rules: full ones are non-causal, sliding ones causal unless the file says no."""
    window = _window(layers.get("sliding_window"), layers, source)
    sliding = AttentionRule(causal=sliding_causal, window=window)
    return _rules(layers, num_layers, FULL_NON_CAUSAL, sliding, source)


def _rules(
    layers: Mapping[str, Any],
    num_layers: int,
    full: AttentionRule,
    sliding: AttentionRule,
    source: str,
) -> tuple[AttentionRule, ...]:
    """layer_types -> rules; () where every layer is full and non-causal."""
    types = read_layer_types(layers, num_layers, source) or ["full_attention"] * num_layers
    other = sorted(set(types) - {"full_attention", SLIDING})
    if other:
        raise ValueError(
            f"{source}: layer_types {other} are not supported; full_attention and {SLIDING} are"
        )
    if not layers.get("layer_types") and layers.get("use_sliding_window"):
        raise ValueError(
            f"{source}: use_sliding_window is true, but there are no layer_types; name the sliding "
            "layers there, or set it to false"
        )
    if SLIDING in types and sliding.window is None:
        raise ValueError(
            f"{source}: layer_types has {SLIDING}, but sliding_window is "
            f"{layers.get('sliding_window')!r} and use_sliding_window "
            f"{layers.get('use_sliding_window')!r}; add the width of the window and remove the flag"
        )
    rules = tuple(sliding if kind == SLIDING else full for kind in types)
    return () if all(rule == FULL_NON_CAUSAL for rule in rules) else rules


def _window(width: Any, layers: Mapping[str, Any], source: str) -> int | None:
    """The width of sliding layers; None where there is none or the file switches it off."""
    if width is None or layers.get("use_sliding_window") is False:
        return None
    return read_integer(width, "sliding_window", source, minimum=1)
