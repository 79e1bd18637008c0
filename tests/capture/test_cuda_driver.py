"""The driver's calls: what it refuses, and that it knows the names that are called."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from graphengine.capture import cuda_driver


def test_a_refusal_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: what the driver refuses is taken for done, arguments are lost, or the message does not
    say which call it was."""
    seen: list[tuple[int, ...]] = []
    driver = SimpleNamespace(good=lambda *given: seen.append(given) or 0, bad=lambda: 709)
    monkeypatch.setattr(cuda_driver, "_driver", lambda: driver)
    cuda_driver.call("good", 1, 2)
    assert seen == [(1, 2)]
    with pytest.raises(RuntimeError, match=r"refused bad \(CUresult 709\)"):
        cuda_driver.call("bad")


@pytest.mark.gpu
def test_the_driver_answers() -> None:
    """Bug: the driver's file has another name, or handles are cut to 32 bits."""
    count = ctypes.c_int()
    cuda_driver.call("cuDeviceGetCount", ctypes.byref(count))
    assert count.value > 0
    with pytest.raises(RuntimeError, match="cuGraphUpload"):
        cuda_driver.call("cuGraphUpload", ctypes.c_void_p(), ctypes.c_void_p())
