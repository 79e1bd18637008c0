"""The decode loop: one speculative step, in the order in which the device sees it.

    launch    plan draft            host: exact lengths -> attention metadata
              draft                 [anchor, MASK..] -> drafts d_1 .. d_{G-1}
              plan verify
              verify, accept        one target forward over the block; counts and takes the bonus
              results -> host       asynchronous copy, one event
              context, draft head   of the NEXT block: keep the GPU busy while the host works
    collect   wait for the event    the only wait of a step
              commit                stop tokens, budgets; pages of finished requests return

Draft, verify, acceptance and the next block's inputs stay on the device. The host follows one copy
behind and steps in only when the set of running requests changes. Where attention reads its
lengths on the device there is nothing to plan, and the next step is launched before the last one's
result is read (`PIPELINE_DEPTH`): the device never waits for the host.

Where speculation cannot or should not go on (`guards`, the last block of the context), a request is
handed over to a second loop of the same kind, whose blocks are one row: plain decoding on the same
weights and pages, built when it is first needed. `launch` and `collect` then queue and commit one
step of each, the drafted requests' first. There is no way back: the drafter's context is not kept.

Invariant: `Request.start` on the host equals `start_B` on the device whenever a plan is made;
pages are reserved at admission for everything that a request can write, so no step can fail for
the lack of memory; a finished request's late writes go to its own pages or the null page, and
are ordered on the stream before any reuse of them.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections import deque
from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from torch import Tensor

from graphengine.attention import Layout
from graphengine.buckets import Bucket
from graphengine.buffers import StepBuffers
from graphengine.config import EngineConfig
from graphengine.guards import WINDOW, AcceptanceWarning, FallbackWarning, SpeculationGuard
from graphengine.kernels.accept import next_block
from graphengine.kvcache import NULL_PAGE, PageAllocator, pages_for
from graphengine.metrics import Acceptance
from graphengine.prefill import Prefill
from graphengine.profiles import ranges
from graphengine.request import Request
from graphengine.sampling import GREEDY, Controls, Sampling

# Steps in flight at most, when nothing must be planned on the host.
PIPELINE_DEPTH = 2
# Plain steps measured to judge speculation, after one that is not counted.
NUM_PROBES = 5
LAST_BLOCK = "a block would reach past the models' last position"


class StepOutput(NamedTuple):
    """New tokens of one request; `request.finish_reason` is set with the last of them."""

    request: Request
    token_ids: list[int]


class _Results(NamedTuple):
    """Where one step's results land on the host, and when they are there."""

    target_ids_cpu: Tensor  # int64 [B, G], pinned
    num_accepted_cpu: Tensor  # int32 [B], pinned
    ready: torch.cuda.Event | None


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
        num_pages: int,
        mask_token_id: int,
        build_bucket: Callable[[int], Bucket] | None = None,
        build_plain: Callable[[], tuple[dict[int, Bucket], StepBuffers]] | None = None,
    ) -> None:
        """
        Args:
            buckets: those built ahead.
            build_bucket: builds one of the others at its first use, between steps.
            build_plain: builds what requests that leave speculation run on; None without a drafter.
        """
        self.config = config
        self.block = buffers.block_ids_BG.shape[1]
        self._draft_block = buffers.draft_block_ids_BG.shape[1]
        self.allocator = PageAllocator(num_pages)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._buckets = dict(sorted(buckets.items()))
        self._buffers, self._prefill, self._mask_token_id = buffers, prefill, mask_token_id
        self._build_bucket = build_bucket
        self.built_late_s: dict[int, float] = {}  # bucket -> seconds that its first use waited
        self.only_bucket: int | None = None  # a built size to run on alone; set while idle
        self._is_sampling = False  # whether a row of the loaded bucket has a temperature
        self._bucket: Bucket | None = None  # holds the running requests' rows; None: stale
        self._in_flight: deque[tuple[list[Request], _Results]] = deque()
        self._next_id = 0
        self._on_gpu = buffers.start_B.is_cuda
        self._depth = 1 if config.plans_attention else PIPELINE_DEPTH
        self._results = [self._make_results() for _ in range(self._depth)]
        self._free_results = list(self._results)
        self._build_plain = build_plain  # None: this loop decodes plainly itself
        self._plain: DecodeLoop | None = None
        self._guard: SpeculationGuard | None = None
        if build_plain is not None and (config.acceptance_floor > 0 or config.fallback):
            self._guard = SpeculationGuard(
                acceptance_floor=config.acceptance_floor, may_fall_back=config.fallback
            )
        self._failed: list[StepOutput] = []  # ended between two steps, still to be given out
        self._is_judging = False  # a plain step is to be measured before the next step
        self._launch_s: float | None = None  # of the last step, if nothing but it was launched

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
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens}; ask for at least 1")
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
        num_plain = len(self._plain.running) if self._plain else 0
        max_rows = self.only_bucket or max(self.config.buckets)
        while self.waiting and num_plain + len(self.running) + len(admitted) < max_rows:
            request = self.waiting[0]
            needed = pages_for(request.max_total_tokens + self.block, self.config.page_size)
            if needed > self.allocator.num_free:
                break
            request.pages = self.allocator.allocate(needed)
            admitted.append(self.waiting.popleft())
        if not admitted:
            return []
        try:
            with ranges.range_("prefill"):
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
        self._leave_at_the_limit(admitted)
        return outputs

    def cancel(self, request: Request) -> None:
        """Ends a request early; harmless if it has ended. Its pages return when no step is in
        flight, at the latest with the next `collect`."""
        if request.finish_reason is not None:
            return
        request.finish_reason = "cancelled"
        if request in self.waiting:
            self.waiting.remove(request)
        else:
            for loop in filter(None, (self, self._plain)):
                if not loop._in_flight:
                    loop._retire()

    # --- one step ---

    def launch(self) -> None:
        """Queues steps for the running requests and returns while the device works.

        Queues nothing while the batch has changed and older steps are still to be collected.
        """
        began = time.perf_counter()
        num_queued, is_steady = 0, True
        while self.running and len(self._in_flight) < self._depth:
            if self._bucket is None:
                is_steady = False
                if self._in_flight or not self._settle():
                    break
                self._bucket = self._load()
            with ranges.range_(ranges.STEP):
                self._queue_step(self._bucket)
            num_queued += 1
        steady = is_steady and num_queued == 1
        self._launch_s = time.perf_counter() - began if steady else None
        if self._plain is not None:
            self._plain.launch()

    def _queue_step(self, bucket: Bucket) -> None:
        layout = self._layout(bucket.size, self.block) if self.config.plans_attention else None
        if bucket.draft is not None:
            if layout is not None:
                with ranges.range_("plan"):
                    drafted = layout
                    if self._draft_block != self.block:
                        drafted = self._layout(bucket.size, self._draft_block)
                    for attention in bucket.draft_attentions:
                        attention.plan(drafted)
            with ranges.range_("draft"):
                bucket.draft.run()
        if layout is not None:
            with ranges.range_("plan"):
                bucket.verify_attention.plan(layout)
        verify = bucket.verify
        if self._is_sampling and bucket.verify_sampled is not None:
            verify = bucket.verify_sampled
        with ranges.range_("verify" if bucket.draft else "decode"):
            verify.run()
        with ranges.range_("accept"):
            results = self._free_results.pop()
            results.target_ids_cpu.copy_(self._buffers.target_ids_BG, non_blocking=True)
            results.num_accepted_cpu.copy_(self._buffers.num_accepted_B, non_blocking=True)
            if results.ready is not None:
                results.ready.record()
            self._in_flight.append((list(self.running), results))
        if bucket.context is not None and bucket.draft_head is not None:
            with ranges.range_("draft"):
                bucket.context.run()
                bucket.draft_head.run()

    def wait(self) -> None:
        """Waits for the oldest step in flight: the only wait of a step."""
        if self._in_flight:
            ready = self._in_flight[0][1].ready
            if ready is not None:
                with ranges.range_("accept"):
                    ready.synchronize()

    def collect(self) -> list[StepOutput]:
        """Waits for the oldest step in flight and commits it; nothing if there is none."""
        outputs, self._failed = self._failed + self._collect_own(), []
        return outputs + self._plain.collect() if self._plain is not None else outputs

    def _collect_own(self) -> list[StepOutput]:
        began = time.perf_counter()
        self.wait()
        wait_s = time.perf_counter() - began
        if not self._in_flight:
            return []
        rows, results = self._in_flight.popleft()
        with ranges.range_("commit"):
            target_ids = results.target_ids_cpu.tolist()
            num_accepted = results.num_accepted_cpu.tolist()
            self._free_results.append(results)
            live = [row for row, request in enumerate(rows) if request.finish_reason is None]
            outputs = [
                StepOutput(rows[row], rows[row].advance(target_ids[row], num_accepted[row]))
                for row in live
            ]
            self._retire()
            if self._build_plain is not None:
                self._leave_at_the_limit(self.running)
            if self._guard is not None:
                seconds = None if self._launch_s is None else self._launch_s + wait_s
                if self._plain is not None and self._plain.running:
                    seconds = None  # a plain step may have run in between
                self._judge(self._guard, len(rows), [num_accepted[row] for row in live], seconds)
        return outputs

    @property
    def buckets(self) -> dict[int, Bucket]:
        """Batch size -> what runs it, ascending, as far as built; for tools that look into them."""
        return dict(sorted(self._buckets.items()))

    @property
    def prefill(self) -> Prefill:
        """The models with their caches; for tools that run the plain target themselves."""
        return self._prefill

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs, or a step is still to be collected."""
        own = bool(self.waiting or self.running or self._in_flight or self._failed)
        return own or (self._plain is not None and self._plain.has_work)

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
        if self._plain is not None:
            self._plain.reset()
        self._is_judging, self._failed = False, []
        self._in_flight.clear()
        self._free_results = list(self._results)
        self._bucket = None
        self.running = []
        self.waiting.clear()
        self.allocator.reset()

    # --- leaving speculation ---

    def prepare_plain_decode(self) -> None:
        """Builds what decodes plainly, if it is not there yet: compiles and captures on a GPU."""
        if self._plain is None and self._build_plain is not None:
            buckets, buffers = self._build_plain()
            self._plain = DecodeLoop(self.config, buckets, buffers, self._prefill, 2, 0)
            self._plain.allocator = self.allocator

    def _plain_loop(self) -> DecodeLoop | None:
        """What decodes plainly, built at its first use; None, with a warning, if memory lacks."""
        try:
            self.prepare_plain_decode()
        except (MemoryError, torch.OutOfMemoryError) as error:
            if self._guard is not None:
                self._guard.may_fall_back = False
            text = f"no memory to build plain decoding ({str(error).partition('.')[0]}); "
            text += "lower --gpu-memory-utilization, or build it at start-up (prepare_plain_decode)"
            warnings.warn(text, FallbackWarning, stacklevel=2)
        return self._plain

    def time_step(self, requests: list[Request]) -> float:
        """Median seconds of a step of these requests, without effect on them: what it writes lies
        behind their lengths, and nothing is committed. Waits for the device; the loop is idle."""
        assert not self.has_work
        self.running, seconds = list(requests), []
        for _ in range(1 + NUM_PROBES):
            bucket = self._load()
            began = time.perf_counter()
            self._queue_step(bucket)
            self.wait()
            seconds.append(time.perf_counter() - began)
            self._free_results.append(self._in_flight.popleft()[1])
        self.running, self._bucket = [], None
        return statistics.median(seconds[1:])

    def _leave_at_the_limit(self, requests: list[Request]) -> None:
        """Marks requests whose next block would not fit the models' positions."""
        limit = self.config.speculation_limit
        if limit is not None:
            self.leave_speculation([r for r in requests if r.start > limit], LAST_BLOCK)

    def leave_speculation(self, requests: list[Request], reason: str) -> None:
        """Lets running requests go on plainly, for good, once no step of theirs is in flight."""
        for request in requests:
            if request.fallback_reason is None and request.finish_reason is None:
                request.fallback_reason = reason
                self._bucket = None  # handed over when nothing is in flight

    def _judge(
        self,
        guard: SpeculationGuard,
        num_rows: int,
        num_accepted: list[int],
        seconds: float | None,
    ) -> None:
        size = self._size_for(num_rows)
        if not guard.observe(num_accepted, size, seconds):
            return
        if (text := guard.warning()) is not None:
            warnings.warn(text, AcceptanceWarning, stacklevel=4)
        if guard.needs_plain_time(size):
            if self._plain is None or not self._plain.has_work:
                self._is_judging, self._bucket = True, None
        else:
            self._fall_back(guard, size)

    def _fall_back(self, guard: SpeculationGuard, size: int) -> None:
        reason = guard.verdict(size)
        if reason is not None:
            judged = [r for r in self.running if r.acceptance.num_steps >= WINDOW]
            self.leave_speculation(judged, reason)

    def _settle(self) -> bool:
        """Between two batches, with nothing in flight: measures and hands over what is due.

        Returns:
            Whether requests are left to run here.
        """
        assert not self._in_flight
        if self._is_judging and self._guard is not None:
            self._is_judging = False
            size = self._size_for(len(self.running))
            plain = self._plain_loop() if self._guard.needs_plain_time(size) else None
            if plain is not None:
                self._guard.plain_step_s[size] = plain.time_step(self.running)
            self._fall_back(self._guard, size)
        leaving = [r for r in self.running if r.fallback_reason is not None]
        if leaving and self._build_plain is not None:
            plain = self._plain_loop()
            if plain is not None:
                self.running = [r for r in self.running if r.fallback_reason is None]
                plain.running += leaving
                plain._bucket = None
            else:
                for request in leaving:
                    request.fail(f"{request.fallback_reason}, and memory lacks to decode plainly")
                    self._failed.append(StepOutput(request, []))
                self._retire()
        return bool(self.running)

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

    def _make_results(self) -> _Results:
        def pinned(like: Tensor) -> Tensor:
            return torch.empty(like.shape, dtype=like.dtype, pin_memory=self._on_gpu)

        return _Results(
            pinned(self._buffers.target_ids_BG),
            pinned(self._buffers.num_accepted_B),
            torch.cuda.Event() if self._on_gpu else None,
        )

    def _bucket_of(self, size: int) -> Bucket:
        """The bucket, built now if it was left for later. No step is in flight here."""
        if size not in self._buckets:
            assert self._build_bucket is not None and not self._in_flight
            began = time.perf_counter()
            with ranges.range_("capture"):
                self._buckets[size] = self._build_bucket(size)
            self.built_late_s[size] = time.perf_counter() - began
        return self._buckets[size]

    def _load(self) -> Bucket:
        """Writes the running requests into the smallest bucket that holds them."""
        count = len(self.running)
        bucket = self._bucket_of(self._size_for(count))
        views, device = bucket.buffers, self._buffers.start_B.device
        width = views.page_table_BW.shape[1]
        padding = bucket.size - count
        table = [r.pages + [NULL_PAGE] * (width - len(r.pages)) for r in self.running]
        table += [[NULL_PAGE] * width] * padding

        def upload(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32).to(device)

        views.page_table_BW.copy_(torch.tensor(table, dtype=torch.int32))
        views.start_B.copy_(upload([r.start for r in self.running] + [0] * padding))
        anchors = upload([r.anchor for r in self.running] + [0] * padding)
        block_ids, positions, slots = next_block(
            views.start_B,
            anchors,
            views.page_table_BW,
            self.block,
            self._mask_token_id,
            self.config.page_size,
        )
        views.block_ids_BG.copy_(block_ids)
        views.positions_T.copy_(positions)
        views.slots_T.copy_(slots)
        self._is_sampling = any(not r.sampling.is_greedy for r in self.running)
        if self._is_sampling:
            controls = Controls.upload(
                [r.sampling for r in self.running] + [GREEDY] * padding, device
            )
            views.temperature_B.copy_(controls.temperature_B)
            views.top_p_B.copy_(controls.top_p_B)
            views.top_k_B.copy_(controls.top_k_B)
            views.seed_B.copy_(controls.seed_B)
        if bucket.draft_head is not None:
            bucket.draft_head.run()
        return bucket
