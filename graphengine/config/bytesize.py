"""Sizes in bytes as people write and read them: `2GiB`, `512 MiB`, `1.5G`, `4096`.

Decimal (`GB` = 10^9) and binary (`GiB` = 2^30) units are kept apart; a bare letter is binary, as in
the tools that allocate memory. No torch here: the command line parses before anything is imported.
"""

from __future__ import annotations

import re

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_PATTERN = re.compile(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([kmgt]?)(ib|b)?\s*", re.IGNORECASE)


def parse_bytes(name: str, text: int | str) -> int:
    """`2GiB` -> 2147483648; an integer stays as it is.

    Raises:
        ValueError: not a positive size, with the option's name and value.
    """
    wrong = f"{name} is {text!r}; expected a size in bytes, such as 2GiB, 512MiB or 4096"
    if isinstance(text, int) and not isinstance(text, bool):
        size = text
    else:
        match = _PATTERN.fullmatch(str(text))
        if match is None:
            raise ValueError(wrong)
        number, unit, suffix = match[1], match[2].lower(), (match[3] or "").lower()
        base = 1000 if unit and suffix == "b" else 1024
        size = int(float(number) * base ** _POWERS[unit])
    if size < 1:
        raise ValueError(wrong)
    return size


def format_bytes(size: float) -> str:
    """`3.21 GiB`, `45.0 MiB`, `512 B`: three digits, binary units."""
    for unit, power in (("TiB", 4), ("GiB", 3), ("MiB", 2), ("KiB", 1)):
        value = size / 1024**power
        if abs(value) >= 1:
            return f"{value:.{2 if abs(value) < 10 else 1 if abs(value) < 100 else 0}f} {unit}"
    return f"{size:.0f} B"
