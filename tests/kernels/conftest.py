"""Where the kernel tests run.

On the CPU every test but those of a Gluon kernel alone (`IN_GLUON`) runs twice: here against the
torch references, and in the subprocess of `test_interpreted.py`, which sets TRITON_INTERPRET=1
before triton is imported, against the Triton kernels. A subprocess, because triton reads the
variable when a kernel is decorated: setting it in this process would turn every other test module's
kernels into interpreted ones. On a GPU the compiled kernels run.
"""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from graphengine.kernels.interpreter import INTERPRET
from tests.support.fake_hopper import Launched, noted
from tests.support.races import watched

CPU_AND_GPU = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


# Of nothing but a Gluon kernel, which no interpreter runs: the plain run has all that they can say.
IN_GLUON = ("test_chunk_attention.py", "test_chunk_linear.py", "test_specialized_attention.py")


@pytest.hookimpl(tryfirst=True)  # before those with a mark are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen: set[str] = set()  # interpreted, all but a test's first combination are long ones
    for item in items if INTERPRET else []:
        if item.path.name in IN_GLUON:
            item.add_marker(pytest.mark.skip(reason="Gluon: nothing to interpret"))
        if item.get_closest_marker("gpu") is None:
            name = item.nodeid.partition("[")[0]
            if name in seen:
                item.add_marker(pytest.mark.slow)
            seen.add(name)


@pytest.fixture(params=CPU_AND_GPU)
def device(request: pytest.FixtureRequest) -> str:
    torch.manual_seed(0)
    return request.param


@pytest.fixture
def poisoned_outputs() -> Iterator[None]:
    """torch.empty returns NaN, so an element that a kernel does not write is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launched]]:
    """What is launched with fake CUDA tensors, noted and not run."""
    with noted(monkeypatch) as found:
        yield found


@pytest.fixture(autouse=True)
def gives_memory_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """Of a GPU that processes share: one that has tested a whole head would keep 10 GiB."""
    yield
    if request.node.get_closest_marker("gpu") is not None:
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def no_races() -> Iterator[None]:
    """Interpreted kernels are watched."""
    with watched() if INTERPRET else nullcontext():
        yield
