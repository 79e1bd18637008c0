"""Prompts under way: their forwards, queued all at once or a few between two steps.

While nobody decodes, everything is queued before the first token is waited for, so that the device
never waits for the host between two chunks, and each prompt's token is given out when its own last
chunk is done. While streams run, each step is followed by as many rows as these may wait for, and a
first token is taken once it is there, never waited for. So who runs together depends on the
device's pace; `in_turn` it does not: the next call takes it, and waits.

Invariant: forwards are queued in the order of arrival, and of a prompt that was cancelled no more.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from graphengine.decode.chunk_sizes import FAR_SIZES
from graphengine.decode.prefill import FirstTokens, Prefill
from graphengine.decode.request import Request

# Keys whose attention costs a row about as much as its weights do: 10 us of 8B shapes on an H200,
# where each row more, from 16 up to 128 or 512, adds 8 to 15 us to a first token, and 1,000 keys
# add 1.2 us to a row at 500 TFLOP/s.
DEPTH = 8192


@dataclass(slots=True)
class Budget:
    """How long the next forward may take: as so many rows of a short prompt; None: any time.

    `keyed_in`: one layer in so many has keys, so keys weigh as much less.
    """

    rows: int | None = None
    keyed_in: int = 1

    def rows_at(self, position: int) -> int | None:
        """Rows from a position on that take as long as all of them do at DEPTH keys: half of them
        at 3 * DEPTH, a quarter at 7 * DEPTH. Of 512 these are chunks of 256 up to 24,576 keys and
        of 128 behind: with a step of 8B shapes 19 ms at most, by arithmetic, up to 57,344 keys.
        Less than 128 gain nothing, since the weights cost as much for 16: from there on a gap grows
        with the text."""
        rows, depth = self.rows, DEPTH * self.keyed_in
        if rows is None:
            return None
        least = min(rows, FAR_SIZES[0])
        return max(least, min(rows, 2 * rows * depth // (depth + position)))


class Admission:
    """Requests with pages whose prompts are not done. Not thread-safe."""

    def __init__(
        self, prefill: Prefill, requests: Sequence[Request], in_turn: bool = False
    ) -> None:
        self.requests = list(requests)
        self._prefill, self._budget = prefill, Budget(keyed_in=prefill.keyed_in)
        self._work = prefill.split(requests, self._budget.rows_at)
        self._queued: deque[FirstTokens] = deque()
        self._in_turn, self._num_due = in_turn, 0
        self.is_alone = False
        """Whether all was queued at once: then first tokens are waited for."""

    def queue(self, budget: int | None) -> list[Request]:
        """Queues one forward of so many rows at most, or everything: None.

        Returns: the requests whose last rows are queued now.
        """
        self._budget.rows, self._num_due, found = budget, len(self._queued), []
        self.is_alone = self.is_alone or budget is None
        for work in self._work:
            tokens = self._prefill.queue(work)
            if tokens is not None:
                self._queued.append(tokens)
            for request, piece in work:
                if piece.end == len(request.prompt_ids):
                    request.queued_s = time.perf_counter()
                    found.append(request)
            if budget is not None:
                break
        return found

    def take(self) -> list[tuple[Request, int]]:
        """First tokens that have come since, in order; or, where all was queued at once, the next
        ones, which are waited for. Mutates: requests."""
        done: list[tuple[Request, int]] = []
        while self._queued and not done and (self.is_alone or self._is_due):
            done += self._queued.popleft().wait()
            self._num_due -= 1
        for request, _ in done:
            self.requests.remove(request)
        return done

    @property
    def _is_due(self) -> bool:
        return self._num_due > 0 if self._in_turn else self._queued[0].is_there

    def drop(self) -> list[Request]:
        """Takes out those that were cancelled before their last rows were queued."""
        ended = [r for r in self.requests if r.finish_reason is not None and not r.queued_s]
        self.requests = [request for request in self.requests if request not in ended]
        return ended
