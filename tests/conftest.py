"""What all tests share: a test marked `gpu` is skipped, with its reason, where there is no GPU, and
the others see none where there is one.

Why here: a GPU test that silently passes or disappears on a CPU host would be counted as evidence.
The summary therefore names how many did not run. torch is imported only if a GPU test was chosen.
The other way round, "auto" in a test without the mark means the CPU on every host.
"""

import gc
import os
import sys
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

from tests.support.examples import examples

# Inductor would compile six programs to see which of the CPU's vector instructions the compiler
# knows, 20 s in every new folder.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# A busy machine makes inputs slowly; that says nothing about a test. The rest is as it was found:
# hypothesis draws the same examples every time where the variable CI is set.
settings.register_profile(
    "patient",
    settings(),
    deadline=None,
    max_examples=examples(100),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("patient")

NO_GPU = "needs a CUDA device: torch.cuda.is_available() is False"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects no garbage while all is imported, and never looks through what that has made."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "torch" in sys.modules:  # tests compare numbers that no engine has had a hand in, too
        from graphengine.startup.warmup import settle_vector_math

        settle_vector_math()
    gpu_items = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not gpu_items:
        return
    import torch
    from torch.utils._triton import has_triton

    if torch.cuda.is_available():
        has_triton()  # Inductor remembers the answer, which a test that sees no GPU must not give
        return
    for item in gpu_items:
        item.add_marker(pytest.mark.skip(reason=NO_GPU))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if item.get_closest_marker("gpu") is not None:
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")  # for processes that the test starts
        if (torch := sys.modules.get("torch")) is not None:
            patch.setattr(torch.cuda, "is_available", lambda: False)
        return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    num_gpu = sum(NO_GPU in str(report.longrepr) for report in skipped)
    if num_gpu:
        terminalreporter.write_line(f"not covered here: {num_gpu} GPU test(s); {NO_GPU}")
