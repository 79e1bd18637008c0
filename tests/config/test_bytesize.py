"""Sizes as users write them."""

from __future__ import annotations

from typing import Any

import pytest

from graphengine.config.bytesize import parse_bytes

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2GiB", 2 * GIB),
        ("2 gib", 2 * GIB),
        ("1.5G", 3 * GIB // 2),
        ("2GB", 2 * 10**9),
        ("512MiB", 512 << 20),
        ("4096", 4096),
        (4096, 4096),
        ("100B", 100),
        ("1T", 1 << 40),
        ("1", 1),
    ],
)
def test_sizes(text: int | str, expected: int) -> None:
    """Bug: 2GB and 2GiB are confused, or a plain number is taken for something else."""
    assert parse_bytes("size", text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0", "2 X", "1e9", "inf", "nan", "9" * 40, True])
def test_bad_sizes(text: Any) -> None:
    """Bug: nonsense becomes a pool of zero or of infinite size."""
    with pytest.raises(ValueError, match=r"size is .*2GiB"):
        parse_bytes("size", text)
