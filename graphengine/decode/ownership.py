"""Who may use an engine: one generation at a time, whichever thread begins it.

Why no lock that is held for a generation's length: Ctrl-C between taking it and the block that
gives it back would leave the engine taken for ever. A claim lasts until it is given back or its
holder's frame is gone.
"""

from __future__ import annotations

import threading
import weakref


class Claim:
    """The right to use an engine, for a `with` block."""

    __slots__ = ("__weakref__", "is_held")

    def __init__(self) -> None:
        self.is_held = True

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *error: object) -> None:
        self.is_held = False


class Ownership:
    """Gives out one claim at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # for the moment of taking alone
        self._last: weakref.ref[Claim] | None = None

    def claim(self) -> Claim:
        """Raises: RuntimeError: another one is held."""
        new = Claim()
        with self._lock:
            last = self._last() if self._last is not None else None
            if last is not None and last.is_held:
                raise RuntimeError(
                    "another generation of this engine is active; finish or close its stream first"
                )
            self._last = weakref.ref(new)
        return new
