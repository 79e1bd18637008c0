"""Which keys each drafter layer sees: layer types, windows and causality of a config -> rules.

The rule of a row at position p (`AttentionRule`): context rows and block rows count alike, a key at
k is seen if `k <= p` or the layer is not causal, and if `|p - k| < window` in a sliding layer. Full
layers are non-causal and sliding layers causal unless the file says otherwise, so one drafter may
mix both: two attentions a step. A window or a causality that is ignored costs acceptance alone.
"""

from __future__ import annotations

from graphengine.config.draft import FULL_NON_CAUSAL, AttentionRule
from graphengine.config.model import read_layer_types
from graphengine.config.values import RawConfig
from graphengine.config.windows import SLIDING


def flat_attention(keys: RawConfig, outer: RawConfig, num_layers: int) -> tuple[AttentionRule, ...]:
    """The layers' rules: `is_causal`, else `dflash_config.causal`, else causal if sliding.

    Args:
        keys: the file, its dflash_config over it; `outer` the file alone.
    """
    causal: bool | None = None
    for raw, key in ((outer, "is_causal"), (keys, "is_causal"), (keys, "causal")):
        if causal is None and raw.get(key) is not None:
            causal = raw.flag(key)
    own, other = keys.get("swa_window_size"), keys.get("sliding_window")
    window = RawConfig({"sliding_window": other if own is None else own}, keys.source)
    use_swa, full = keys.flag("use_swa"), AttentionRule(causal=bool(causal))
    if use_swa and not keys.get("layer_types"):
        if window.get("sliding_window") is None:
            raise keys.refusal("use_swa without a sliding_window; add its width")
        width = window.integer("sliding_window")
        return (AttentionRule(causal=bool(causal), window=width),) * num_layers
    sliding = AttentionRule(causal=causal is not False, window=_window(window, outer))
    rules = _rules(outer, num_layers, full, sliding)
    if own != other and None not in (own, other) and any(rule.window for rule in rules):
        raise keys.refusal(
            f"swa_window_size {own!r} and sliding_window {other!r} disagree; remove the one that "
            "the drafter was not trained with"
        )
    if use_swa and all(rule.window is None for rule in rules or [full]):
        raise keys.refusal(f"use_swa is true, but no layer of layer_types is {SLIDING}")
    return rules


def speculators_attention(
    layers: RawConfig, num_layers: int, sliding_causal: bool
) -> tuple[AttentionRule, ...]:
    """The layers' rules: full ones are non-causal, sliding ones causal unless the file says no."""
    sliding = AttentionRule(causal=sliding_causal, window=_window(layers, layers))
    return _rules(layers, num_layers, FULL_NON_CAUSAL, sliding)


def _rules(
    layers: RawConfig, num_layers: int, full: AttentionRule, sliding: AttentionRule
) -> tuple[AttentionRule, ...]:
    """layer_types -> rules; () where every layer is full and non-causal."""
    types = read_layer_types(layers, num_layers) or ["full_attention"] * num_layers
    other = sorted(set(types) - {"full_attention", SLIDING})
    if other:
        raise layers.refusal(
            f"layer_types {other} are not supported; full_attention and {SLIDING} are"
        )
    switch = layers.get("use_sliding_window")
    if not layers.get("layer_types") and switch:
        raise layers.refusal(
            "use_sliding_window is true, but there are no layer_types; name the sliding layers "
            "there, or set it to false"
        )
    if SLIDING in types and sliding.window is None:
        raise layers.refusal(
            f"layer_types has {SLIDING}, but sliding_window is {layers.get('sliding_window')!r} "
            f"and use_sliding_window {switch!r}; add the window's width and remove the flag"
        )
    rules = tuple(sliding if kind == SLIDING else full for kind in types)
    return () if all(rule == FULL_NON_CAUSAL for rule in rules) else rules


def _window(raw: RawConfig, layers: RawConfig) -> int | None:
    """The width of sliding layers; None where there is none or the file switches it off."""
    if raw.get("sliding_window") is None or layers.get("use_sliding_window") is False:
        return None
    return raw.integer("sliding_window")
