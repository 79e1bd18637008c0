"""tools/soak_checks.py: what is counted of shared pages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import soak_checks
import torch

from graphengine.decode.prefix_cache import PrefixCache, StateSlots


def test_pages_that_were_evicted_are_counted() -> None:
    """Bug: the count is that of pages which are new, and a soak says that it has evicted what it
    has not."""
    cache = PrefixCache(4, 4, StateSlots(2))
    pool, proposer = torch.zeros(1, 2, 4, 1, 4), SimpleNamespace(attends=False)
    pair = SimpleNamespace(target=SimpleNamespace(kv_pool=pool), proposer=proposer)
    loop: Any = SimpleNamespace(allocator=cache, prefill=SimpleNamespace(pair=pair))
    published = soak_checks.Published(loop)
    pages, counts = cache.allocate(2), list[int]()
    for first in (1, 5):  # the second text is behind the first
        cache.publish(list(range(1, first + 4)), pages[: 1 + first // 4])
        published.check()
        counts.append(published.num_evicted)
    cache.free(pages)
    cache.allocate(3)  # takes both
    published.check()
    assert [*counts, published.num_evicted] == [0, 0, 2]
