"""What a soak holds its loop against: the step on one page, the owners of pages, their contents.

The page (`decode.reference`) is run over whole texts by an engine of its own that shares no memory
with the loop, steps nothing and caches nothing. From one of its forwards come the tokens and
log-probabilities of an answer, the K/V of target and drafter, and the recurrent state.

Invariant: nothing here changes the loop; on a CPU in float32 every difference is a defect, and a
number passes only by a comparison that is true, so NaN fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphengine.api import Engine
from graphengine.decode import reference
from graphengine.decode.fixed_chunk import Piece
from graphengine.decode.grammar import Matcher
from graphengine.decode.kvcache import pages_for
from graphengine.decode.loop import DecodeLoop
from graphengine.decode.prefix_cache import Place, StateSlots
from graphengine.decode.recurrence import States
from graphengine.decode.request import Request

LOGPROB_BOUND_NATS = 1e-3
CONTENT_BOUND = 1e-4  # of the largest number that is compared


class Leak(Exception):
    """What was found."""


def pools_of(loop: DecodeLoop) -> list[Tensor]:
    """K/V of the target, and of the drafter's context: [L, 2, pages, ..]."""
    pair: Any = loop.prefill.pair
    return [pair.target.kv_pool, *([pair.proposer.kv_pool] if pair.proposer.attends else [])]


class Page:
    """Whole texts, one at a time, from nothing."""

    def __init__(self, engine: Engine) -> None:
        """Args: engine: used here alone."""
        self.loop = loop = engine.built.loop
        size = loop.config.page_size
        self.pages = loop.allocator.allocate(pages_for(loop.config.max_model_len, size))
        (self.slot,) = loop.state_slots.allocate(1)

    def logits(self, ids: Sequence[int]) -> Tensor:
        """Behind every token, float32 [n, V] on the host. Mutates: self, which then holds this
        text."""
        piece = Piece(ids, 0, len(ids), self.pages, self.slot)
        return self.loop.prefill.logits([piece], range(len(ids))).float().cpu()

    def state(self) -> States | None:
        """Behind the text, of all layers."""
        states = self.loop.prefill.pair.target.states
        return None if states is None else States(*(x[:, self.slot] for x in states))

    def check(self, request: Request, matcher: Matcher | None) -> str | None:
        """What is wrong with what a request was told; None if nothing.

        Args: matcher: of an answer that begins, where it follows a grammar.
        """
        prompt, said = request.prompt_ids, request.output_ids
        kept: list[Tensor] = []

        def target(ids: Tensor) -> Tensor:
            kept.append(self.logits(ids.tolist()))
            return kept[0]

        choose = reference.chooser(prompt, request.sampling, request.stop_ids, matcher)
        drafts = torch.tensor(said, dtype=torch.int64)
        true = reference.step(torch.tensor(prompt), target, lambda _: drafts, choose).tolist()
        if true[: len(said)] != said:
            return f"after {len(prompt)} tokens {said} was said, not {true}"
        if request.finish_reason == "error" and true[len(said) :] != [-1]:  # no token is left
            return f"after {len(prompt)} tokens and {said} {true} is said, not: {request.error}"
        ends = [i for i, token in enumerate(said) if token in request.stop_ids]
        if ends and (ends != [len(said) - 1] or request.finish_reason == "length"):
            return f"{said} goes on behind {said[ends[0]]}, which ends it"
        logprobs_TV = kept[0].log_softmax(-1)
        first = len(prompt) - 1
        for told, ids, at in (
            (request.output_logprobs, said, first),
            (request.prompt_scores, prompt[1:], 0),
        ):
            for i, (token, found) in enumerate(zip(ids, told, strict=False)):
                row_V = logprobs_TV[at + i]
                off = (abs(float(row_V[k]) - v) for k, v in found.items())
                if next(iter(found)) != token or not all(x <= LOGPROB_BOUND_NATS for x in off):
                    return f"token {at + i + 1} is {token}; its log-probabilities {found} are wrong"
        is_due = request.logprobs is not None
        if len(request.output_logprobs) != len(said) * is_due:
            return f"{len(request.output_logprobs)} log-probabilities of {len(said)} tokens"
        is_due, count = request.prompt_logprobs is not None, len(request.prompt_scores)
        if said and count != (len(prompt) - 1) * is_due:  # without an answer it may not have run
            return f"{count} log-probabilities of a prompt of {len(prompt)} tokens"
        return None

    def state_error(self, loop: DecodeLoop, slot: int, ids: Sequence[int]) -> float:
        """How far a slot's state is from that behind these tokens, of the norm of any layer."""
        self.logits(ids)
        states, true = loop.prefill.pair.target.states, self.state()
        assert states is not None and true is not None
        errors = [
            float(((found[:, slot] - own).flatten(1).norm(dim=1) / norm).max())
            for found, own in zip(states, true, strict=True)
            for norm in [own.flatten(1).norm(dim=1).clamp(min=1e-9)]
        ]
        return float(torch.tensor(errors).max())  # of which NaN is one


class Published:
    """The K/V of shared pages, bit by bit, as it was when they were first seen."""

    def __init__(self, loop: DecodeLoop) -> None:
        self.loop, self.pools = loop, pools_of(loop)
        self.copies = [torch.zeros_like(pool) for pool in self.pools]
        self.serials: dict[int, int] = {}  # page -> the number of what it holds
        self.num_evicted = 0

    def check(self) -> None:
        """Raises: Leak: somebody has written to one."""
        now = dict(self.loop.allocator._serials)
        same = [page for page, serial in now.items() if self.serials.get(page) == serial]
        new = [page for page in now if page not in same]
        for pool, copy in zip(self.pools, self.copies, strict=True):
            if not torch.equal(pool[:, :, same], copy[:, :, same]):
                raise Leak("a published page was written")
            copy[:, :, new] = pool[:, :, new]
        self.num_evicted += len(self.serials) - len(same)
        self.serials = now

    def text_of(self, place: Place) -> list[int]:
        """All tokens up to a place; none where it is found no more."""
        cache, (page, count) = self.loop.allocator, place
        before, tokens = cache._behind.get(page, 0), ()
        if page in cache._keys:
            before, tokens = cache._keys[page]
        elif page in cache._behind:
            tokens = cache._parts[before][page]
        ids, pages = list(tokens[:count]), {n: page for page, n in cache._serials.items()}
        while before and ids:
            if before not in pages:
                return []  # its beginning is evicted
            before, tokens = cache._keys[pages[before]]
            ids = [*tokens, *ids]
        return ids

    def compare(self, place: Place, true: Page) -> float:
        """How far what a published page holds up to a place, and a state kept there, are from a
        computation of the whole text. Returns the state's error; 0 without one. Raises: Leak: too
        far."""
        ids, (page, count) = self.text_of(place), place
        if not ids:
            return 0.0
        true.logits(ids)
        own = true.pages[(len(ids) - 1) // self.loop.config.page_size]
        for pool, known in zip(self.pools, pools_of(true.loop), strict=True):
            found, wanted = pool[:, :, page, :count], known[:, :, own, :count]
            if not (found - wanted).abs().max() <= CONTENT_BOUND * wanted.abs().max():
                raise Leak(f"the K/V of a page behind {len(ids)} tokens is another text's")
        slots = self.loop.state_slots
        slot = slots._kept.get(place) if isinstance(slots, StateSlots) else None
        return 0.0 if slot is None else true.state_error(self.loop, slot, ids)


def check_balance(loop: DecodeLoop) -> None:
    """Every page and state slot is held by requests that run, kept for later ones, or free.

    Raises:
        Leak: one is lost, in two hands, or has other holders than are counted.
    """
    cache, slots = loop.allocator, loop.state_slots
    running = [*loop.running, *loop.prefilling]
    held = Counter(page for request in running for page in request.pages)
    idle, free = list(cache._idle), cache._free
    claims = {
        "counts other users": all(cache.num_users(page) == n for page, n in held.items()),
        "lost a page": sorted([*held, *idle, *free]) == list(range(1, cache.num_pages)),
        "uses others": cache._used == set(held),
        "keeps unpublished ones": set(idle) <= {*cache._keys, *cache._behind},
        "finds others": {key: page for page, key in cache._keys.items()} == cache._pages,
    }
    for claim, holds in claims.items():
        if not holds:
            state = f"{len(held)} pages held, {len(idle)} kept, {len(free)} free"
            raise Leak(f"the cache {claim}: {state}")
    own: list[int] = []
    for request in running:
        own += [request.state_slot, *request.spare_slots, *request.kept_slots.values()]
        own += request.answer_slots
    kept = slots._kept if isinstance(slots, StateSlots) else {}
    everywhere = sorted([*own, *kept.values(), *slots._free])
    strays = {page for page, _ in kept} & set(free)
    if everywhere != list(range(1, slots.num_pages)) or strays:
        raise Leak(f"{len(own)} states held, {len(kept)} kept, {len(slots._free)} free")


def kept_places(loop: DecodeLoop) -> list[Place]:
    """Those behind which a recurrent state is kept."""
    slots = loop.state_slots
    return list(slots._kept) if isinstance(slots, StateSlots) else []
