"""Paged K/V: one pool per model, one page table for both; the length is the truth.

Page 0 is the null page: no request owns it and none reads it. Padded rows, and positions
past a request's reservation, write there. Everything a request can ever write is reserved at
admission, so a running request never waits for memory and never fails for the lack of it.
Invariant: what is taken is freed once, and has one owner unless `prefix_cache` shares it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graphengine.config.model import ModelConfig
from graphengine.models.attention import PagedKV
from graphengine.models.decoder import layer_kinds

NULL_PAGE = 0


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens` tokens."""
    return -(-num_tokens // page_size)


def page_bytes(config: ModelConfig, page_size: int, element_bytes: int) -> int:
    """Bytes of one page over all layers, as their mixers' state entries say."""
    return sum(entry.num_token_elements for entry in _entries(config)) * page_size * element_bytes


def _entries(config: ModelConfig) -> list[PagedKV]:
    """State entries of the layers that keep something of each token."""
    entries = [kind.mixer.state(config) for kind in layer_kinds(config)]
    return [entry for entry in entries if isinstance(entry, PagedKV)]


def keyed_layers_in(config: ModelConfig) -> int:
    """One layer in so many has keys: 1 where no layer is recurrent."""
    return config.num_hidden_layers // max(1, len(_entries(config)))


def make_pool(
    config: ModelConfig, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Uninitialised K/V of the layers that attend: [L, 2, num_pages, page_size, K, H], [:, 0] = K,
    [:, 1] = V.

    The null page is zeroed: padded rows must not meet NaN.
    """
    states = _entries(config)
    assert len(set(states)) == 1, "one pool holds layers of one shape"
    shape = (len(states), 2, num_pages, page_size, *states[0])
    pool = torch.empty(shape, dtype=dtype, device=device)
    pool[:, :, NULL_PAGE] = 0
    return pool


def copy_page_(pools: Sequence[Tensor], source: int, page: int) -> None:
    """What one page holds into another. Mutates: the pools."""
    for pool in pools:
        pool[:, :, page] = pool[:, :, source]


class PageAllocator:
    """Hands out pages 1 .. num_pages - 1. Host only; O(pages) per call."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"a pool of {num_pages} pages holds no request; at least 2 are needed")
        self.num_pages = num_pages
        self.reset()

    @property
    def num_free(self) -> int:
        """Pages that can be reserved now."""
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """Pages that one request could own in an empty pool."""
        return self.num_pages - 1

    def reset(self) -> None:
        """Returns every page, whoever held it: after an interrupt in the middle of a call even this
        object's own lists may be half updated."""
        self._free = list(range(self.num_pages - 1, NULL_PAGE, -1))
        self._used: set[int] = set()

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages.

        Raises:
            MemoryError: fewer are free; nothing is taken.
        """
        if count > len(self._free):
            raise MemoryError(f"{count} pages asked, {len(self._free)} of {self.num_usable} free")
        pages = self._free[: -count - 1 : -1]
        del self._free[len(self._free) - count :]
        self._used.update(pages)
        return pages

    def free(self, pages: list[int]) -> None:
        """Returns pages; each must be in use."""
        for page in pages:
            assert page in self._used, f"page {page} freed twice or never allocated"
            self._used.remove(page)
            self._free.append(page)
