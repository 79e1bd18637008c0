"""Values of a checkpoint's raw JSON, read or refused with the file's and the key's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_NUMBER = 1e300  # past it a file is damaged


def required(config: Mapping[str, Any], key: str, source: str) -> Any:
    """`config[key]`, which the file must have."""
    if config.get(key) is None:
        raise ValueError(f"{source}: no {key}; the file is incomplete, fetch it again")
    return config[key]


def read_number(value: Any, key: str, source: str, minimum: float = 0.0) -> float:
    """A finite number of at least `minimum`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= MAX_NUMBER:  # also NaN, and integers past any float
        raise ValueError(f"{source}: {key} is {value!r}, expected a number")
    if value < minimum:
        raise ValueError(f"{source}: {key} is {value!r}, expected at least {minimum:g}")
    return float(value)


def read_flag(config: Mapping[str, Any], key: str, source: str, default: bool = False) -> bool:
    """`config[key]`, true or false; `default` where the file has none."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{source}: {key} is {value!r}, expected true or false")
    return default if value is None else value


def read_integer(value: Any, key: str, source: str, minimum: int, maximum: int = 1 << 40) -> int:
    """An integer from `minimum` to `maximum`; true and 1.0 are none."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{source}: {key} holds {value!r}, expected an integer >= {minimum}")
    if value > maximum:
        raise ValueError(f"{source}: {key} holds a number past {maximum}; the file is damaged")
    return value


def read_positive(config: Mapping[str, Any], key: str, source: str, maximum: int = 1 << 40) -> int:
    """`config[key]`, an integer from 1 to `maximum`."""
    return read_integer(required(config, key, source), key, source, minimum=1, maximum=maximum)


def token_ids(value: Any, key: str, source: str) -> tuple[int, ...]:
    """One id, a list of ids or None -> a tuple of ids."""
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    return tuple(read_integer(token, key, source, minimum=0) for token in ids)
