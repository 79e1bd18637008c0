"""A checkpoint's raw JSON: what counts as there, and what as a number."""

from __future__ import annotations

import pytest

from graphengine.config.values import MAX_INTEGER, RawConfig


def test_a_null_is_not_there() -> None:
    """Bug: a key that the file has as null, as transformers writes one at its default, hides the
    default, and a model that runs elsewhere is refused."""
    raw = RawConfig({"head_dim": None, "bias": False, "layers": 0}, "config.json")
    whole = raw.over({"head_dim": 64, "bias": True, "layers": 2, "heads": 4})
    assert whole.values == {"head_dim": 64, "bias": False, "layers": 0, "heads": 4}
    assert whole.integer("head_dim") == 64 and whole.source == "config.json"


def test_integers_at_their_bounds() -> None:
    """Bug: the least or the largest integer that a key may hold is refused, or the next one is
    taken; or another bound is told."""
    for value in (3, 7, MAX_INTEGER):
        assert RawConfig({"n": value}, "x").integer("n", 3) == value
        assert RawConfig({"n": [value]}, "x").integers("n", 3) == (value,)
    assert RawConfig({"n": 9}, "x").integer("n", maximum=9) == 9
    for value, most in ((2, 9), (10, 9), (MAX_INTEGER + 1, MAX_INTEGER)):
        told = "2, expected an integer >= 3" if value == 2 else f"a number past {most}"
        with pytest.raises(ValueError, match=f"x: n holds {told}"):
            RawConfig({"n": value}, "x").integer("n", 3, most)


def test_a_number_at_its_minimum() -> None:
    """Bug: a file that scales its positions by exactly 1 is refused."""
    assert RawConfig({"factor": 1}, "x").number("factor", 1.0) == 1.0
    with pytest.raises(ValueError, match="expected at least 1"):
        RawConfig({"factor": 0.5}, "x").number("factor", 1.0)
