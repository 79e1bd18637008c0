"""What requests hold: pages for all that they can write, a recurrent state, and what is kept of
both for whoever comes with the same text.

Invariant: everything is taken at once, before a prompt's first row is queued, and given back at
once; what a request keeps for others on its way is among it. Nothing here runs on the device but
copies of what a newcomer continues from, and whoever gets a page or slot that was given back is
behind its last writer on the stream.
"""

from __future__ import annotations

from graphengine.decode.kvcache import PageAllocator, copy_page_, pages_for
from graphengine.decode.lane import Lane
from graphengine.decode.prefix_cache import PrefixCache
from graphengine.decode.proposer import Pair
from graphengine.decode.recurrence import (
    KEPT_SPACING,
    KEPT_STATES,
    answer_spacing,
    copy_state_,
    num_slots,
)
from graphengine.decode.request import Request


class Holdings:
    """Pages and slots of states, and who has them. Not thread-safe."""

    def __init__(self, lane: Lane, allocator: PrefixCache) -> None:
        """Args: lane: where requests begin, and leave something for others."""
        self._lane, self.config, self.allocator = lane, lane.config, allocator
        # Of states of a fixed size, for every row that there can be; slot 0 is nobody's.
        own = allocator.state_slots
        self.state_slots = PageAllocator(num_slots(self.config)) if own is None else own
        self._lacking = -1, 0  # who found too few pages last, and behind how many changes

    @property
    def pair(self) -> Pair:
        """Whose K/V and states they are."""
        return self._lane.builder.pair

    @property
    def block(self) -> int:
        """Rows of a request in the longest block; a bucket's own may be shorter."""
        return self.pair.proposer.num_draft_tokens + 1

    def pages_of(self, num_tokens: int) -> int:
        """For all that a request of so many tokens can write."""
        return pages_for(num_tokens + self.block, self.config.page_size)

    def take(self, request: Request, num_free_rows: int) -> bool:
        """Whether there is enough, which the request has then.

        Args: num_free_rows: of requests that can still come, this one included.
        Mutates: request, and its first own page or state where it continues another's.
        """
        if self._lacking == (request.request_id, self.allocator.num_changes):
            return False
        # The last token is run whatever is known: its logits are the first new token's. Where
        # the prompt's own are wanted, all of its rows are run.
        asks = self._caches_prefixes and request.prompt_logprobs is None
        wanted = request.prompt_ids[:-1] if asks else []
        shared = self.allocator.share(wanted)
        needed = self.pages_of(request.max_total_tokens) - len(shared)
        if needed > self.allocator.num_free:
            self.allocator.free(shared)
            self._lacking = request.request_id, self.allocator.num_changes
            return False
        source, count = self.allocator.begun(wanted, shared)
        state = self.allocator.state_behind(shared, (source, count))
        own = self.allocator.allocate(needed)
        if count:  # whoever gets that page now writes to it behind this
            copy_page_(self.pair.kv_pools, source, own[0])
        request.pages = shared + own
        request.num_cached_tokens = len(shared) * self.config.page_size + count
        self._take_states(request, state, num_free_rows)
        return True

    def _take_states(self, request: Request, source: int | None, num_rows: int) -> None:
        """Takes a slot for the request, with a copy of the state in slot `source`, whose owner now
        writes to it behind this; and slots for what is kept of its prompt and answer, but for those
        that `num_rows` requests, this one among them, may need. Answers leave half of those that
        are kept to prompts."""
        slots, states = self.state_slots, self.pair.target.states
        (request.state_slot,) = slots.allocate(1)
        if source is not None and states is not None:
            copy_state_(states, source, request.state_slot)
        if states is not None and self._caches_prefixes and request.prompt_logprobs is None:
            wanted = 1 + (len(request.prompt_ids) - request.num_cached_tokens) // KEPT_SPACING
            room = slots.num_free - num_rows + 1
            request.spare_slots = slots.allocate(max(0, min(wanted, KEPT_STATES // 4, room)))
            spacing, room = answer_spacing(self.config.page_size), room - len(request.spare_slots)
            leaves_any = len(request.prompt_ids) // spacing < request.max_total_tokens // spacing
            if leaves_any and spacing >= self.block and room >= KEPT_STATES // 2:
                request.answer_slots = slots.allocate(2)

    def share_prompt(self, request: Request) -> None:
        """Gives away what its prefill leaves for others, once its last rows are queued: others come
        behind on the stream. Mutates: request."""
        if not self._caches_prefixes:
            return
        self.allocator.publish(request.prompt_ids, request.pages)
        while request.kept_slots:
            num_tokens, slot = request.kept_slots.popitem()
            self.allocator.keep_state(request.prompt_ids[:num_tokens], slot)
        self.state_slots.free(request.spare_slots)
        request.spare_slots = []

    def give_back(self, request: Request) -> None:
        """Returns its pages; the next turn of a chat finds those that are full and committed. Steps
        that were decoded plainly have left no context for the drafter. Mutates: request."""
        is_whole = request.finish_reason != "error" and request.fallback_reason is None
        if self._caches_prefixes and is_whole:
            committed = request.token_ids[: request.start]
            self.allocator.publish(committed, request.pages)
            self._keep_last_state(request, committed)
        self.allocator.free(request.pages)
        if request.state_slot:
            left = [request.state_slot, *request.spare_slots, *request.kept_slots.values()]
            self.state_slots.free(left + request.answer_slots)
        forget(request)

    def _keep_last_state(self, request: Request, committed: list[int]) -> None:
        """Gives away the last state that its answer has left, unless tokens that were dropped, or
        are in flight, may have left two more, the second in its slot. A step leaves one at most.
        Mutates: request."""
        spacing = answer_spacing(self.config.page_size)
        number = len(committed) // spacing
        reached = request.start + len(self._lane.in_flight) * self.block
        is_there = number * spacing > len(request.prompt_ids) and reached < (number + 2) * spacing
        if request.answer_slots and is_there:
            slot = request.answer_slots.pop(number % 2)
            self.allocator.keep_state(committed[: number * spacing], slot)

    @property
    def _caches_prefixes(self) -> bool:
        """Whether pages are shared, and with them what is kept of recurrent states."""
        recurs, keeps = self.pair.target.states, self.allocator.state_slots
        return self.config.shares_prefixes and (recurs is None or keeps is not None)

    def reset(self) -> None:
        """Nobody has anything, and nothing is kept."""
        self.allocator.reset()
        self.state_slots.reset()


def forget(request: Request) -> None:
    """Leaves a request without what it held. Mutates: request."""
    request.pages, request.state_slot = [], 0
    request.spare_slots, request.kept_slots, request.answer_slots = [], {}, []
