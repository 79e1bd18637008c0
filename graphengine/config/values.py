"""A checkpoint's raw JSON: what is read from it is right, or refused with the file and the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

MAX_NUMBER, MAX_INTEGER = 1e300, 1 << 40  # past them a file is damaged


class RawConfig(NamedTuple):
    """A JSON object and its name in messages; a key that is null is not there."""

    values: Mapping[str, Any]
    source: str

    def refusal(self, text: str) -> ValueError:
        """An error about this file."""
        return ValueError(f"{self.source}: {text}")

    def get(self, key: str) -> Any:
        """The key's value; None where there is none."""
        return self.values.get(key)

    def over(self, defaults: Mapping[str, Any]) -> RawConfig:
        """The same with defaults for what is not there."""
        known = {key: value for key, value in self.values.items() if value is not None}
        return RawConfig({**defaults, **known}, self.source)

    def required(self, key: str) -> Any:
        """The key's value, which the file must have."""
        if self.get(key) is None:
            raise self.refusal(f"no {key}, which is never guessed; add it, or fetch the file again")
        return self.get(key)

    def section(self, key: str) -> dict[str, Any]:
        """The object at a key; empty where there is none."""
        value = {} if self.get(key) is None else self.get(key)
        if not isinstance(value, Mapping):
            raise self.refusal(f"{key} is {value!r}, expected an object")
        return dict(value)

    def number(self, key: str, minimum: float = 0.0) -> float:
        """A finite number of at least `minimum`."""
        value = self.required(key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not abs(value) <= MAX_NUMBER:  # also NaN, and integers past any float
            raise self.refusal(f"{key} is {value!r}, expected a number")
        if value < minimum:
            raise self.refusal(f"{key} is {value!r}, expected at least {minimum:g}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false; `default` where the file has neither."""
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.refusal(f"{key} is {value!r}, expected true or false")
        return default if value is None else value

    def integer(self, key: str, minimum: int = 1, maximum: int = MAX_INTEGER) -> int:
        """An integer from `minimum` to `maximum`; true and 1.0 are none."""
        return self._integer(self.required(key), key, minimum, maximum)

    def integers(self, key: str, minimum: int = 0) -> tuple[int, ...]:
        """One integer, a list of them or none, each from `minimum` up."""
        value = self.get(key)
        values = value if isinstance(value, list) else [] if value is None else [value]
        return tuple(self._integer(each, key, minimum) for each in values)

    def _integer(self, value: Any, key: str, minimum: int, maximum: int = MAX_INTEGER) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.refusal(f"{key} holds {value!r}, expected an integer >= {minimum}")
        if value > maximum:
            raise self.refusal(f"{key} holds a number past {maximum}; the file is damaged")
        return value
