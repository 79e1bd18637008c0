"""Sizes as users write them."""

from __future__ import annotations

from typing import Any

import pytest

from graphengine.config.bytesize import format_bytes, parse_bytes

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


def test_shown_sizes() -> None:
    """Bug: sizes in tables have two digits or four, or a unit too small or too large."""
    sizes = [0, 512, 1023, 1024, 45 << 20, 1.5 * GIB, 10 * GIB, 99 * GIB, 100 * GIB, 2 << 40, -GIB]
    assert [format_bytes(size) for size in sizes] == [
        "0 B",
        "512 B",
        "1023 B",
        "1.00 KiB",
        "45.0 MiB",
        "1.50 GiB",
        "10.0 GiB",
        "99.0 GiB",
        "100 GiB",
        "2.00 TiB",
        "-1.00 GiB",
    ]
