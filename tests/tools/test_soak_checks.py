"""tools/soak_checks.py: what is counted of shared pages, and told of a wrong answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import soak_checks
import torch

from graphengine.decode.prefix_cache import PrefixCache, StateSlots
from tests.tools.test_soak import ended, page_of


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


def test_what_was_said_is_told_beside_what_is_right() -> None:
    """Bug: the wrong tokens are told as the right ones, and one looks for the fault elsewhere."""
    request = ended("stop")  # says 3 and 5 behind 1 and 2
    told = page_of([1, 2, 4, 5]).check(request, None)
    assert told == "after 2 tokens [3, 5] was said, not [4]"
