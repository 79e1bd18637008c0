"""Names of Triton that changed between versions: the same kernels, keys and instructions of all."""

import subprocess
import sys

import pytest

from graphengine.kernels.interpreter import INTERPRET
from tests.kernels.test_interpreted import version

KEYS = """
import sys
from graphengine.kernels import skinny_kernels, wide_linear
from graphengine.kernels.triton_internals import settle_cache_keys
kernels = [skinny_kernels.skinny_tma_kernel, wide_linear.wide_linear_kernel]
if "settled" in sys.argv:
    settle_cache_keys()
if "turned" in sys.argv:
    kernels.reverse()
keys = {kernel.__name__: kernel.cache_key for kernel in kernels}
print(sorted(keys.items()))
"""


def keys(*how: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", KEYS, *how], capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.mark.skipif(INTERPRET, reason="interpreted kernels have no keys")
def test_keys_do_not_depend_on_the_order() -> None:
    """Bug: a start compiles kernels again that the one before has compiled, because another kernel
    came first."""
    assert keys("settled") == keys("settled", "turned")
    # Triton 3.8 and later need no settling: delete it with 3.7.
    is_settled = version("triton") >= (3, 8)
    assert (keys() == keys("turned")) == is_settled
