"""The decode loop: one speculative step, in the order in which the device sees it.

    launch    draft                 [anchor, MASK..] -> drafts d_1 .. d_{G-1}
              verify, accept        one target forward over the block; counts and takes the bonus,
                                    and stores tokens and counts into the host's memory
              context               the drafter's K/V of the block, while the host reads
    collect   wait for the results  the only wait of a step
              commit                stop tokens, budgets; pages of finished requests return

Draft, verify, acceptance and the next block's inputs stay on the device. The host follows one
result behind and steps in only when the set of running requests changes. Where attention reads its
lengths on the device, a step is one launch, and the next step is launched before the last one's
result is read (`PIPELINE_DEPTH`): the device never waits for the host. Where the host must plan, it
plans between stages of a step, and `stages` says what the device does meanwhile.

Without a drafter a block is one row, and the same loop decodes plainly. Requests for which
speculation cannot or should not go on are `fallback`'s business: a second loop beside this one.

Invariant: `Request.start` on the host equals `start_B` on the device whenever a plan is made;
pages are reserved at admission for everything that a request can write, so no step can fail for
the lack of memory; a finished request's late writes (its results come before its last ones) go to
its own pages or the null page, and are ordered on the stream before any reuse of them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from numbers import Integral
from typing import NamedTuple

import torch

from graphengine import names
from graphengine.config.engine import EngineConfig
from graphengine.decode.attention import Layout
from graphengine.decode.buckets import Bucket
from graphengine.decode.buffers import StepBuffers
from graphengine.decode.kvcache import PageAllocator, pages_for
from graphengine.decode.metrics import Acceptance
from graphengine.decode.prefill import Prefill
from graphengine.decode.request import Request
from graphengine.decode.rows import Results, load_
from graphengine.decode.sampling import GREEDY, Sampling
from graphengine.kernels.accept import NUM_RESULTS

# Steps in flight at most, when nothing must be planned on the host: their results are kept apart.
PIPELINE_DEPTH = NUM_RESULTS


class StepOutput(NamedTuple):
    """New tokens of one request; `request.finish_reason` is set with the last of them."""

    request: Request
    token_ids: list[int]


class InFlight(NamedTuple):
    """A launched step: its requests in the order of the rows, and their results."""

    requests: list[Request]
    results: Results


class DecodeLoop:
    """Runs requests to their end: admit, launch, collect, repeat.

    Guards two invariants: a bucket row belongs to one running request or is padding, and a page
    to one request at most. Not thread-safe; one loop owns its buffers and pools.
    """

    def __init__(
        self,
        config: EngineConfig,
        buckets: dict[int, Bucket],
        buffers: StepBuffers,
        prefill: Prefill,
        allocator: PageAllocator,
        mask_token_id: int,
        build_bucket: Callable[[int], Bucket] | None = None,
    ) -> None:
        """
        Args:
            buckets: those built ahead.
            build_bucket: builds one of the others at its first use, between steps.
        """
        self.config = config
        self.allocator = allocator
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._buckets = dict(sorted(buckets.items()))
        self._buffers, self._prefill, self._mask_token_id = buffers, prefill, mask_token_id
        self._build_bucket = build_bucket
        self.built_late_s: dict[int, float] = {}  # bucket -> seconds that its first use waited
        self.only_bucket: int | None = None  # a built size to run on alone; set while idle
        self._is_sampling = False  # whether a row of the loaded bucket has a temperature
        self._bucket: Bucket | None = None  # holds the running requests' rows; None: stale
        self._in_flight: deque[InFlight] = deque()
        self._next_id = 0
        self._on_gpu = buffers.start_B.is_cuda
        self._depth = 1 if config.plans_attention else PIPELINE_DEPTH
        self._next_step = 1  # its number; never given twice, and cleared results have number 0

    # --- requests ---

    def submit(
        self,
        prompt_ids: list[int],
        max_new_tokens: int,
        stop_ids: Collection[int],
        sampling: Sampling = GREEDY,
    ) -> Request:
        """Queues a prompt.

        Raises:
            ValueError: the prompt is empty, leaves no room for a token, or can never fit the pool.
        """
        limit = self.config.max_model_len
        if not prompt_ids:
            raise ValueError("the prompt has no tokens; pass some text")
        if not isinstance(max_new_tokens, Integral) or max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens}; ask for an integer from 1 up")
        if len(prompt_ids) >= limit:
            raise ValueError(
                f"the prompt has {len(prompt_ids)} tokens, the context holds {limit} and at least "
                "one must be left to generate; shorten the prompt or raise --max-model-len"
            )
        if not sampling.is_greedy and not self.config.sampling:
            why = "draws its acceptance" if self.config.simulate_acceptance else "was built greedy"
            raise ValueError(
                f"temperature is {sampling.temperature:g}, but this engine {why}; load it with "
                "sampling=True and without simulate_acceptance, or use temperature 0"
            )
        total = min(len(prompt_ids) + max_new_tokens, limit)
        needed = pages_for(total + self.block, self.config.page_size)
        if needed > self.allocator.num_usable:
            raise ValueError(
                f"{len(prompt_ids)} prompt and {max_new_tokens} new tokens need {needed} pages of "
                f"{self.config.page_size} tokens, the pool has {self.allocator.num_usable}; lower "
                "max_new_tokens or raise --kv-cache-memory"
            )
        request = Request(
            request_id=self._next_id,
            prompt_ids=prompt_ids,
            max_total_tokens=total,
            stop_ids=stop_ids,
            acceptance=Acceptance(self.block - 1),
            sampling=sampling,
        )
        self._next_id += 1
        self.waiting.append(request)
        return request

    def admit(self) -> list[StepOutput]:
        """Prefills waiting requests, in order, while rows and pages last. Waits for the device."""
        admitted: list[Request] = []
        num_free_rows = self._num_free_rows
        while self.waiting and len(admitted) < num_free_rows:
            request = self.waiting[0]
            needed = pages_for(request.max_total_tokens + self.block, self.config.page_size)
            if needed > self.allocator.num_free:
                break
            request.pages = self.allocator.allocate(needed)
            admitted.append(self.waiting.popleft())
        if not admitted:
            return []
        try:
            with names.range_("prefill"):
                first_tokens = self._prefill.run(admitted)
        except BaseException:
            for request in admitted:
                request.finish_reason = "cancelled"
                self._release(request)
            raise
        outputs = [
            StepOutput(request, request.begin(token))
            for request, token in zip(admitted, first_tokens, strict=True)
        ]
        self.running += admitted
        self._retire()
        self._bucket = None
        return outputs

    def cancel(self, request: Request) -> None:
        """Ends a request early; harmless if it has ended. Its pages return when no step is in
        flight, at the latest with the next `collect`."""
        if request.finish_reason is not None:
            return
        request.finish_reason = "cancelled"
        if request in self.waiting:
            self.waiting.remove(request)
        elif not self._in_flight:
            self._retire()

    # --- one step ---

    def launch(self) -> None:
        """Queues steps for the running requests and returns while the device works.

        Queues nothing while the batch has changed and older steps are still to be collected.
        """
        while self.running and len(self._in_flight) < self._depth:
            if self._bucket is None:
                if self._in_flight:
                    break
                self._bucket = self._load()
            with names.range_(names.STEP):
                self._queue_step(self._bucket)

    def _queue_step(self, bucket: Bucket) -> None:
        """Launches the stages of a step, each behind its plan if it needs one."""
        results = Results.of(bucket.buffers, self._next_step, len(self.running))
        self._next_step += 1
        layouts: dict[int, Layout] = {}  # by rows of a request
        for stage in bucket.stages:
            if stage.attentions:
                with names.range_("plan"):
                    if stage.block not in layouts:
                        layouts[stage.block] = self._layout(bucket.size, stage.block)
                    for attention in stage.attentions:
                        attention.plan(layouts[stage.block])
            with names.range_(stage.name):
                (stage.sampled if self._is_sampling else stage.runner).run()
        self._in_flight.append(InFlight(list(self.running), results))

    def wait(self) -> None:
        """Waits for the results of the oldest step in flight: the only wait of a step."""
        if self._in_flight:
            with names.range_("wait"):
                self._in_flight[0].results.wait()

    def collect(self) -> list[StepOutput]:
        """Waits for the oldest step in flight and commits it; nothing if there is none."""
        self.wait()
        if not self._in_flight:
            return []
        requests, results = self._in_flight.popleft()
        with names.range_("commit"):
            return self._commit(requests, *results.read())

    def _commit(
        self, requests: list[Request], target_ids: list[list[int]], num_accepted: list[int]
    ) -> list[StepOutput]:
        """Gives every request its row; one that ended while the step ran gets nothing.

        Args:
            requests: those that the step ran, in the order of the rows.
            target_ids: [B][G], the target's choice after every row of a block.
            num_accepted: [B], drafts accepted.
        """
        outputs = [
            StepOutput(request, request.advance(target_ids[row], num_accepted[row]))
            for row, request in enumerate(requests)
            if request.finish_reason is None
        ]
        self._retire()
        return outputs

    @property
    def buckets(self) -> dict[int, Bucket]:
        """Batch size -> what runs it, ascending, as far as built; for tools that look into them."""
        return dict(sorted(self._buckets.items()))

    @property
    def block(self) -> int:
        """Rows of a request in the longest block; a bucket's own may be shorter."""
        return self._buffers.block

    @property
    def prefill(self) -> Prefill:
        """The models with their caches; for tools that run the plain target themselves."""
        return self._prefill

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs, or a step is still to be collected."""
        return bool(self.waiting or self.running or self._in_flight)

    def reset(self) -> None:
        """Drops every request and returns all pages; for use after an error or an interrupt.

        An interrupt can come between any two lines, so nothing is undone: everything is made anew,
        and a reset that was itself interrupted is completed by the next one.

        Raises:
            RuntimeError: the device has failed; nothing can run any more.
        """
        for request in [*self.running, *self.waiting]:
            request.finish_reason = request.finish_reason or "cancelled"
            request.pages = []
        if self._on_gpu:
            torch.cuda.synchronize()  # late writes go to pages that nobody owns yet
        self._buffers.results_BX.zero_()  # a bucket's warm-up counts its steps from 0
        self._in_flight.clear()
        self._bucket = None
        self.running = []
        self.waiting.clear()
        self.allocator.reset()

    # --- rows ---

    def _retire(self) -> None:
        """Takes finished requests out of the batch; the rows are reloaded before the next step."""
        finished = [request for request in self.running if request.finish_reason is not None]
        if finished:
            self.running = [r for r in self.running if r.finish_reason is None]
            self._bucket = None
        for request in finished:
            self._release(request)

    def _release(self, request: Request) -> None:
        self.allocator.free(request.pages)
        request.pages = []

    @property
    def _num_free_rows(self) -> int:
        """How many more requests may run."""
        return (self.only_bucket or max(self.config.buckets)) - len(self.running)

    def _size_for(self, count: int) -> int:
        """The smallest bucket that holds `count` requests."""
        return self.only_bucket or next(size for size in self.config.buckets if size >= count)

    def _layout(self, num_requests: int, block: int) -> Layout:
        return Layout.build(
            [block] * len(self.running),
            [request.start + block for request in self.running],
            [request.pages for request in self.running],
            self.config.page_size,
            num_requests,
        )

    def _bucket_of(self, size: int) -> Bucket:
        """The bucket, built now if it was left for later. No step is in flight here."""
        if size not in self._buckets:
            assert self._build_bucket is not None and not self._in_flight
            began = time.perf_counter()
            with names.range_("capture"):
                self._buckets[size] = self._build_bucket(size)
            self.built_late_s[size] = time.perf_counter() - began
        return self._buckets[size]

    def _load(self) -> Bucket:
        """Writes the running requests into the smallest bucket that holds them."""
        bucket = self._bucket_of(self._size_for(len(self.running)))
        page_size, first_step = self.config.page_size, self._next_step
        load_(bucket.buffers, self.running, self._mask_token_id, page_size, first_step)
        self._is_sampling = any(not request.sampling.is_greedy for request in self.running)
        if bucket.ahead is not None:
            bucket.ahead.run()
        return bucket
