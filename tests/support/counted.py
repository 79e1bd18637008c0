"""A list that tells how much of it was read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class Counted(list[Any]):
    """Counts the entries that are taken out of it."""

    num_read = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.num_read += len(found) if isinstance(at, slice) else 1
        return found

    def __iter__(self) -> Iterator[Any]:
        self.num_read += len(self)
        return super().__iter__()
