"""The kernel tests once more, with the Triton kernels interpreted on the CPU."""

import os
import pathlib
import subprocess
import sys
from importlib import metadata

import pytest

HERE = pathlib.Path(__file__).parent
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def version(package: str) -> tuple[int, int]:
    major, minor, *_ = metadata.version(package).split(".")
    return int(major), int(minor)


# Triton 3.6's interpreter calls int() on an array of one element, which numpy 2.4 refuses;
# triton 3.7 squeezes it first. Delete with torch 2.11, which pins triton 3.6.
BROKEN = version("triton") < (3, 7) and version("numpy") >= (2, 4)


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreted run")
@pytest.mark.skipif(BROKEN, reason="triton < 3.7 interprets only with numpy < 2.4")
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_kernels_under_the_interpreter(which: str) -> None:
    """Bug: a kernel that is wrong where its torch reference is right, found only on a GPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, "-m", f"not gpu and {which}", HERE],
        cwd=HERE.parents[1],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    print(done.stdout[-600:])
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.skipif(not INTERPRETED, reason="checked inside the interpreted run")
def test_the_interpreted_run_is_interpreted() -> None:
    """Bug: the subprocess silently tests the references again."""
    from graphengine.kernels.interpreter import INTERPRET

    assert INTERPRET
    # One flag for all: a module that asked on its own could answer otherwise.
    for path in (HERE.parents[1] / "kernels").glob("*.py"):
        asks = "runtime.interpret" in path.read_text()
        assert asks == (path.name == "interpreter.py"), path.name
