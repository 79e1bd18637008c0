"""A lane: rows of requests that run the same kind of step, and its steps in flight.

Rows are stable: a request keeps its row while it lives, and when one joins or leaves only its own
row is written, on the stream, behind the steps in flight. All rows are written when the batch moves
to a bucket with other blocks; those that lie behind a smaller bucket's end move into its holes.

Where attention reads its lengths on the device, steps are launched before the last one's result is
read (`PIPELINE_DEPTH`): the device never waits for the host. Where the host must plan, it plans
between stages of a step, and `stages` says what the device does meanwhile.

Invariant: `Request.start` on the host equals `start_B` on the device whenever a plan is made or a
running request's row is written: then no step is in flight.
"""

from __future__ import annotations

import statistics
import time
from array import array
from collections import deque
from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

import torch

from graphengine import names
from graphengine.decode.attention import Layout
from graphengine.decode.buckets import Bucket, BucketBuilder
from graphengine.decode.ends import CONSTRAINED_ENDS, choose, end_names
from graphengine.decode.kvcache import NULL_PAGE, pages_for
from graphengine.decode.logprobs import Scores
from graphengine.decode.masks import begin_
from graphengine.decode.proposer import Proposer
from graphengine.decode.recurrence import NULL_SLOT
from graphengine.decode.request import Request
from graphengine.decode.rows import Results, write_rows_
from graphengine.decode.stages import Planned
from graphengine.kernels.accept import NUM_RESULTS

# Steps in flight at most, when nothing must be planned on the host: their results are kept apart.
PIPELINE_DEPTH = NUM_RESULTS
# Steps measured by `time_step`, after one that is not counted.
NUM_PROBES = 5


class InFlight(NamedTuple):
    """A launched step: its requests by row, and their results."""

    rows: list[Request | None]
    results: Results
    scores: Scores | None
    is_constrained: bool = False


class Verified(NamedTuple):
    """What a step says of one request: the target's choice after every row, drafts accepted."""

    request: Request
    target_ids: list[int]
    num_accepted: int
    scores: Scores | None = None  # of its rows


class Lane:
    """Guards: a row belongs to one running request or is padding, and a step runs the rows that
    the host has. Not thread-safe."""

    def __init__(self, builder: BucketBuilder, ahead: dict[int, Bucket]):
        """Args: ahead: the buckets built already; others are built at their first use."""
        self.builder, self.config = builder, builder.pair.config
        self.depth = 1 if self.config.plans_attention else PIPELINE_DEPTH
        self.only_bucket: int | None = None  # a built size to run on alone; set while idle
        self.built_late_s: dict[int, float] = {}  # bucket -> seconds that its first use waited
        self.must_drain = False
        """Launches nothing until somebody has looked at a state without steps in flight."""
        self.step_s: float | None = None  # of the last step collected; None where not known
        self._buckets = ahead
        self._ends = end_names(self.config)
        self._fetching = None
        if self.config.max_logprobs and self.config.device == "cuda":
            self._fetching = torch.cuda.Stream()
        self._next_step = 1  # its number; never given twice, and cleared results have number 0
        self.reset()

    # --- rows ---

    @property
    def running(self) -> list[Request]:
        """The requests, by row."""
        return [request for request in self.rows if request is not None]

    @property
    def has_work(self) -> bool:
        """Whether a request runs, or a step is still to be collected."""
        return any(self.rows) or bool(self.in_flight)

    def join(self, requests: Collection[Request]) -> None:
        """Gives each a row; written before the next step. No step of theirs is in flight."""
        for request in requests:
            row = next((i for i, held in enumerate(self.rows) if held is None), len(self.rows))
            self.rows[row : row + 1] = [request]
            self._stale.add(row)

    def leave(self, requests: Collection[Request]) -> None:
        """Frees their rows, whatever is in flight."""
        for row, request in enumerate(self.rows):
            if request in requests:
                self.rows[row] = None
                self._stale.add(row)
        while self.rows and self.rows[-1] is None:
            self.rows.pop()

    def forget_spare_steps(self) -> None:
        """Once there are no requests, forgets steps that were launched ahead: nobody waits for
        them, and whatever comes next is behind them on the stream. Not those that the host has
        planned or masked, since it writes the same memory again for the next step."""
        if not self.rows and self.depth > 1:
            while self.in_flight and not self.in_flight[-1].is_constrained:
                self.in_flight.pop()

    def reset(self) -> None:
        """Makes everything anew; the device is idle."""
        self.rows: list[Request | None] = []
        self.in_flight: deque[InFlight] = deque()
        self.bucket: Bucket | None = None
        self._stale: set[int] = set()  # rows that the device does not have as the host has them
        self._pages: dict[int, array[int]] = {}  # of requests, by row, as plans take them
        self._end, self._is_drafted = self._ends[0], False
        self._launch_s: float | None = None
        self._waited_s = 0.0
        self.must_drain = False

    # --- steps ---

    def launch(self) -> None:
        """Queues steps for the rows and returns while the device works; none while the rows cannot
        be brought up to date, or `must_drain`."""
        began, num_before = time.perf_counter(), len(self.in_flight)
        is_steady = not self._stale and self.bucket is not None
        while self.rows and not self.must_drain and self._may_queue:
            if self._stale and not self._bring_up_to_date():
                break
            with names.range_(names.STEP):
                self._queue_step()
        is_steady = is_steady and len(self.in_flight) == num_before + 1
        self._launch_s = time.perf_counter() - began if is_steady else None

    @property
    def _may_queue(self) -> bool:
        """Not behind a step with a grammar, whose tokens decide the next masks, nor where the steps
        in flight, each of which commits a token at least, may be all that the budgets allow."""
        num_ahead = len(self.in_flight)
        waits = any(step.is_constrained for step in self.in_flight)
        is_of_use = any(request.budget > num_ahead for request in self.running)
        return num_ahead < self.depth and not waits and is_of_use

    def _queue_step(self) -> None:
        """Launches the stages of a step, each behind its plan if it needs one. Where a row has a
        grammar, its drafts are waited for in between."""
        bucket, is_constrained = self.bucket, self._end in CONSTRAINED_ENDS
        assert bucket is not None
        results = Results.of(bucket.buffers, self._next_step, len(self.rows))
        if is_constrained and bucket.buffers.grammar is not None:
            if bucket.drafting is not None and not self._is_drafted:
                bucket.drafting.run()
            begin_(bucket.buffers.grammar, self.rows, self._next_step)
        self._next_step, self._is_drafted = self._next_step + 1, is_constrained
        for stage in bucket.stages:
            if stage.planned.attentions:
                with names.range_("plan"):
                    self._plan(stage.planned, bucket.size)
            with names.range_(stage.name):
                stage.runners[self._end].run()
        tells = any(request.logprobs is not None for request in self.running)
        scores = bucket.buffers.scores if tells else None
        scores = scores.of_step(results.number) if scores is not None else None
        self.in_flight.append(InFlight(list(self.rows), results, scores, is_constrained))

    def _plan(self, planned: Planned, size: int) -> None:
        """Plans for the rows as they are; one without a request reads the null page."""
        block, page_size = planned.rows, self.config.page_size
        nothing = array("i", [NULL_PAGE] * pages_for(block, page_size))
        layout = Layout.build(
            [block] * len(self.rows),
            [block + (r.start if r is not None else 0) for r in self.rows],
            [nothing if r is None else self._pages[row] for row, r in enumerate(self.rows)],
            page_size,
            size,
        )
        for attention in planned.attentions:
            attention.plan(layout)

    def wait(self) -> None:
        """Waits for the results of the oldest step in flight: the only wait of a step, which may be
        asked for again until it is collected."""
        if self.in_flight:
            began = time.perf_counter()
            with names.range_("wait"):
                self.in_flight[0].results.wait()
            self._waited_s += time.perf_counter() - began
            self.step_s = None if self._launch_s is None else self._launch_s + self._waited_s

    def collect(self) -> list[Verified]:
        """Waits for the oldest step in flight and tells what came of it; requests that ended while
        it ran are left out."""
        if not self.in_flight:
            return []
        self.wait()
        rows, results, scores, _ = self.in_flight.popleft()
        self._waited_s = 0.0  # for the next one
        ids, counts = results.read()
        if scores is not None:
            scores = scores.fetch(self._fetching)
        return [
            Verified(request, ids[row], counts[row], scores and scores.of_row(row))
            for row, request in enumerate(rows)
            if request is not None and request.finish_reason is None
        ]

    def time_step(self, requests: list[Request]) -> float:
        """Median seconds of a step of these requests, without effect on them: what it writes lies
        behind their lengths, nothing is committed, and recurrent states are the null slot's. Waits
        for the device; the lane is idle."""
        assert not self.has_work
        seconds, slots = [], [request.state_slot for request in requests]
        try:
            for request in requests:
                request.state_slot = NULL_SLOT
            for _ in range(1 + NUM_PROBES):
                self.join(requests)
                is_ready = self._bring_up_to_date()
                assert is_ready
                began = time.perf_counter()
                self._queue_step()
                self.wait()
                seconds.append(time.perf_counter() - began)
                self.in_flight.clear()
                self._waited_s = 0.0
                self.leave(requests)
        finally:
            for request, slot in zip(requests, slots, strict=True):
                request.state_slot = slot
        return statistics.median(seconds[1:])

    # --- buckets ---

    @property
    def buckets(self) -> dict[int, Bucket]:
        """Batch size -> what runs it, ascending, as far as built; for tools that look into them."""
        return dict(sorted(self._buckets.items()))

    def size_for(self, count: int) -> int:
        """The smallest bucket that holds `count` requests."""
        return self.only_bucket or next(size for size in self.config.buckets if size >= count)

    def rebuild(self, proposer: Proposer | None = None) -> None:
        """Builds the same buckets anew, for tools and tests: what is compiled has changed, or who
        proposes. The lane is idle."""
        assert not self.has_work
        if self.config.device == "cuda":
            torch.cuda.synchronize()  # a step that nobody waited for
        self.reset()
        sizes, self._buckets = list(self._buckets), {}  # their graphs first make room
        if proposer is not None:
            pair = replace(self.builder.pair, proposer=proposer)
            self.builder = BucketBuilder(pair, self.builder.workspace)
        self._buckets = self.builder.build_ahead(sizes)

    def _bring_up_to_date(self) -> bool:
        """Writes rows that joined or left, in the smallest bucket that holds the requests.

        Returns:
            False while steps in flight stand against it: another bucket is due.
        """
        size, before = self.size_for(len(self.running)), self.bucket
        if before is None or before.size != size or len(self.rows) > size:
            if self.in_flight:
                return False
            self.bucket = self._bucket_of(size)
            homeless = [request for request in self.rows[size:] if request is not None]
            self.leave(homeless)
            self.join(homeless)
            kept = 0
            if before is not None and before.buffers.block == self.bucket.buffers.block:
                kept = before.size
            self._stale |= set(range(kept, size))
        assert self.bucket is not None
        self._write(self.bucket, sorted(row for row in self._stale if row < size))
        if self.bucket.ahead is not None:
            self.bucket.ahead.run()
        self._stale.clear()
        self._is_drafted = False
        self._end = choose(self._ends, self.running)
        return True

    def draft_again(self) -> None:
        """Runs `ahead` again behind rows of a prompt, of a bucket built late: what it has left for
        the next step lies in a graph's memory, which a chunk captured before it may share."""
        bucket = self.bucket
        if bucket is not None and bucket.ahead is not None and bucket.size in self.built_late_s:
            bucket.ahead.run()

    def _write(self, bucket: Bucket, rows: list[int]) -> None:
        if not rows:
            return
        held = {row: self.rows[row] if row < len(self.rows) else None for row in rows}
        if self.config.plans_attention:
            self._pages |= {row: array("i", r.pages) for row, r in held.items() if r is not None}
        proposer, page_size = self.builder.pair.proposer, self.config.page_size
        write_rows_(bucket.buffers, held, proposer.mask_token_id, page_size, self._next_step)
        proposer.write_rows_(bucket.buffers, held)

    def _bucket_of(self, size: int) -> Bucket:
        """The bucket, built now if it was left for later. No step is in flight here."""
        if size not in self._buckets:
            began = time.perf_counter()
            with names.range_("capture"):
                self._buckets[size] = self.builder.build(size)
            self._stale |= set(range(size))  # building has cleared the buffers
            self.built_late_s[size] = time.perf_counter() - began
        return self._buckets[size]
