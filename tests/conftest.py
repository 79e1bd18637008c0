"""What all tests share: a test marked `gpu` is skipped, with its reason, where there is no GPU.

Why here: a GPU test that silently passes or disappears on a CPU host would be counted as evidence.
The summary therefore names how many did not run. torch is imported only if a GPU test was chosen.
"""

import pytest

NO_GPU = "needs a CUDA device: torch.cuda.is_available() is False"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not gpu_items:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in gpu_items:
        item.add_marker(pytest.mark.skip(reason=NO_GPU))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    num_gpu = sum(NO_GPU in str(report.longrepr) for report in skipped)
    if num_gpu:
        terminalreporter.write_line(f"not covered here: {num_gpu} GPU test(s); {NO_GPU}")
