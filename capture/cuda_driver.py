"""Calls of the CUDA driver that torch has no name for.

The driver's file has one name whatever the CUDA version; that of the runtime library changes.
"""

import ctypes
from functools import cache
from typing import Any


def call(name: str, *arguments: Any) -> None:
    """Calls a function of the driver's API; handles are passed as `ctypes.c_void_p`.

    Raises:
        RuntimeError: the driver refused.
    """
    if result := getattr(_driver(), name)(*arguments):
        raise RuntimeError(f"the CUDA driver refused {name} (CUresult {result})")


@cache
def _driver() -> Any:
    """torch has loaded it already."""
    return ctypes.CDLL("libcuda.so.1")
