"""The decode loop: requests come in, steps go out, in the order in which the device sees them.

    admit     prefill            waiting requests get pages, K/V and their first token
    launch    draft              [anchor, MASK..] -> drafts d_1 .. d_{G-1}
              verify, accept     one target forward over the block; counts and takes the bonus,
                                 and stores tokens and counts into the host's memory
              context            the drafter's K/V of the block, while the host reads
    collect   wait               for the results: the only wait of a step
              commit             stop tokens, budgets; pages of finished requests return

`decode.reference` is the same step on one page, without lanes, batches and a device. Requests begin
in the first lane, drafted or not; those for which speculation cannot or should not go on change to
a plain lane between two steps (`fallback`).

Invariant: pages are reserved at admission for everything that a request can write, so no step can
fail for the lack of memory; a finished request's late writes (its results come before its last
ones) go to its own pages or the null page, and are ordered on the stream before any reuse of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sized
from numbers import Integral
from typing import NamedTuple

import torch

from graphengine import names
from graphengine.decode.admission import Admission
from graphengine.decode.fallback import Fallback
from graphengine.decode.grammar import Matcher
from graphengine.decode.holdings import Holdings, forget
from graphengine.decode.kvcache import PageAllocator
from graphengine.decode.lane import Lane
from graphengine.decode.metrics import Acceptance
from graphengine.decode.prefill import Prefill
from graphengine.decode.prefix_cache import PrefixCache
from graphengine.decode.refusals import check_offered, longer_context
from graphengine.decode.request import Request
from graphengine.decode.sampling import GREEDY, Sampling
from graphengine.decode.turns import short_turns


class StepOutput(NamedTuple):
    """New tokens of one request; `request.finish_reason` is set with the last of them."""

    request: Request
    token_ids: list[int]


class Watch:
    """Told where a step is: what tools hang into the loop. Nothing is done here."""

    def launching(self) -> None:
        """The host begins to queue steps."""

    def launched(self) -> None:
        """They are queued."""

    def waited(self) -> None:
        """The oldest step's results are there."""

    def collected(self, outputs: list[StepOutput]) -> None:
        """They are committed."""


class DecodeLoop:
    """Runs requests to their end; owns its lanes and pools. Not thread-safe."""

    def __init__(
        self,
        lane: Lane,
        prefill: Prefill,
        allocator: PrefixCache,
        build_plain: Callable[[], Lane] | None = None,
    ) -> None:
        """Args: lane: where requests begin. build_plain: builds a plain one beside it."""
        self.config, self.prefill = lane.config, prefill
        self.holdings = Holdings(lane, allocator)
        self.waiting: deque[Request] = deque()
        self.first = lane
        self.fallback = Fallback(lane, build_plain) if build_plain is not None else None
        self.admission = Admission(prefill, [])
        self._failed: list[StepOutput] = []  # ended between two steps, still to be given out
        self._next_id = 0
        self._num_behind = 0  # steps to be collected that may have waited for rows of a prompt
        self.is_clean = True
        """Whether a reset would find nothing: all that was submitted has been run to its end."""
        self.is_waiting = False
        """Whether nothing is half done: `run` waits for a step, was stopped so, or is to begin."""
        self.is_repeatable = False
        """Whether what runs together must not depend on the device's pace; set while idle."""

    @property
    def lanes(self) -> list[Lane]:
        """The drafting lane, and the plain one where it was built."""
        plain = self.fallback.plain if self.fallback is not None else None
        return [self.first] if plain is None else [self.first, plain]

    @property
    def prefilling(self) -> list[Request]:
        """Requests with pages whose prompts are not done."""
        return self.admission.requests

    @property
    def running(self) -> list[Request]:
        """Requests with a row, of all lanes."""
        return [request for lane in self.lanes for request in lane.running]

    @property
    def block(self) -> int:
        """Rows of a request in the longest block."""
        return self.holdings.block

    @property
    def allocator(self) -> PrefixCache:
        """The pages of target and drafter."""
        return self.holdings.allocator

    @property
    def state_slots(self) -> PageAllocator:
        """The slots of recurrent states."""
        return self.holdings.state_slots

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs, or anything is still to be collected."""
        return bool(self.waiting or self.prefilling or self._failed) or any(
            lane.has_work for lane in self.lanes
        )

    # --- requests ---

    def submit(
        self,
        prompt_ids: list[int],
        max_new_tokens: int,
        stop_ids: Collection[int],
        sampling: Sampling = GREEDY,
        *,
        asked_stop_ids: Collection[int] = (),
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        matcher: Matcher | None = None,
    ) -> Request:
        """`queue` of what `check` does not refuse. Raises: ValueError."""
        self.check(prompt_ids, max_new_tokens, sampling, matcher, logprobs, prompt_logprobs)
        what = prompt_ids, max_new_tokens, stop_ids, sampling, None
        scores = {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
        return self.queue(*what, asked_stop_ids=asked_stop_ids, matcher=matcher, **scores)

    def queue(
        self,
        prompt_ids: list[int],
        max_new_tokens: int,
        stop_ids: Collection[int],
        sampling: Sampling,
        arrival_s: float | None,
        *,
        asked_stop_ids: Collection[int],
        logprobs: int | None,
        prompt_logprobs: int | None,
        matcher: Matcher | None,
    ) -> Request:
        """Queues a prompt that has been checked.

        Args:
            arrival_s: when it was asked for (`time.perf_counter`), if that was before now.
            asked_stop_ids: tokens that end it too, and are told as the reason.
            logprobs, prompt_logprobs: alternatives of each token; None: nothing is told.
            matcher: of the grammar that the answer follows.
        """
        self.is_waiting |= self.is_clean
        self.is_clean = False
        request = Request(
            request_id=self._next_id,
            prompt_ids=prompt_ids,
            max_total_tokens=min(len(prompt_ids) + max_new_tokens, self.config.max_model_len),
            stop_ids=frozenset(stop_ids) | frozenset(asked_stop_ids),
            asked_stop_ids=asked_stop_ids,
            acceptance=Acceptance(self.holdings.block - 1),
            sampling=sampling,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            matcher=matcher,
        )
        request.arrival_s = request.submitted_s if arrival_s is None else arrival_s
        self._next_id += 1
        self.waiting.append(request)
        return request

    def check(
        self,
        prompt_ids: Sized,
        max_new_tokens: int,
        sampling: Sampling,
        matcher: Matcher | None,
        *alternatives: int | None,
    ) -> None:
        """Refuses what can never run. Looks at nothing that changes, so any thread may ask.

        Args: alternatives: the two numbers of log-probabilities.
        Raises:
            ValueError: the prompt is empty, leaves no room for a token, or can never fit the pool;
                or something is asked for that this engine was built without.
        """
        limit = self.config.max_model_len
        if not prompt_ids:
            raise ValueError("the prompt has no tokens; pass some text")
        if not isinstance(max_new_tokens, (int, Integral)) or max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens}; ask for an integer from 1 up")
        if len(prompt_ids) >= limit:
            num_positions = self.first.builder.pair.target.config.max_position_embeddings
            raise ValueError(
                f"the prompt has {len(prompt_ids)} tokens, the context holds {limit} and at least "
                "one must be left to generate; shorten the prompt"
                + longer_context(self.config, num_positions, len(prompt_ids))
            )
        check_offered(self.config, sampling, matcher, *alternatives)
        total = min(len(prompt_ids) + max_new_tokens, limit)
        needed = self.holdings.pages_of(total)
        if needed > self.allocator.num_usable:
            raise ValueError(
                f"{len(prompt_ids)} prompt and {max_new_tokens} new tokens need {needed} pages of "
                f"{self.config.page_size} tokens, the pool has {self.allocator.num_usable}; lower "
                "max_new_tokens or raise --kv-cache-memory"
            )

    def admit(self) -> list[StepOutput]:
        """Prefills waiting requests, in order, while rows and pages last. Waits for the device."""
        outputs = self.admit_next()
        while self.prefilling:
            outputs += self.admit_next()
        return outputs

    def admit_next(self, budget: int | None = None) -> list[StepOutput]:
        """Queues rows of prompts, and begins the requests whose first tokens are there. Where no
        prompt is under way, first admits waiting requests, in order, while rows and pages last.

        Args: budget: rows of prompts to queue; None: all, and the next first token is waited for.
        """
        if not self.prefilling:
            self.admission = Admission(self.prefill, self._reserve(), self.is_repeatable)
        if not self.prefilling:
            return []
        try:
            with names.range_("prefill"):
                queued, self._num_behind = self.admission.queue(budget), self.first.depth
                self.first.draft_again()
                for request in queued:
                    self.holdings.share_prompt(request)
                tokens = self.admission.take()
        except BaseException:
            for request in self.prefilling:
                request.finish_reason = request.finish_reason or "abort"
                self.holdings.give_back(request)
            self.admission = Admission(self.prefill, [])
            raise
        for request in self.admission.drop():
            self.holdings.give_back(request)
        outputs = []
        for request, token in tokens:
            if request.finish_reason is None:
                outputs.append(StepOutput(request, request.begin(token)))
            else:
                self.holdings.give_back(request)  # cancelled meanwhile
        self.first.join([output.request for output in outputs])
        self._retire()
        if self.fallback is not None:
            self.fallback.leave_at_the_limit()
        return outputs

    def _reserve(self) -> list[Request]:
        """Takes requests out of the queue, and pages for all that they can write."""
        admitted: list[Request] = []
        most = self.first.only_bucket or max(self.config.buckets)
        num_free_rows = most - len(self.running)
        while self.waiting and len(admitted) < num_free_rows:
            if not self.holdings.take(self.waiting[0], num_free_rows - len(admitted)):
                break
            admitted.append(self.waiting.popleft())
        return admitted

    def cancel(self, request: Request) -> None:
        """Ends a request early; harmless if it has ended."""
        if request.finish_reason is not None:
            return
        request.finish_reason = "abort"
        if request in self.waiting:
            self.waiting.remove(request)
        self._retire()

    def end_at(self, request: Request, text: str, num_dropped: int) -> None:
        """Ends a request at a stop string, behind which its newest tokens lie."""
        request.end_at(text, num_dropped)
        self._retire()

    def _retire(self) -> None:
        """Takes finished requests out of their rows. Steps in flight may still write to their
        pages: whoever gets these is behind them on the stream."""
        for lane in self.lanes:
            finished = [r for r in lane.running if r.finish_reason is not None]
            if finished:
                lane.leave(finished)
            for request in finished:
                self.holdings.give_back(request)
            lane.forget_spare_steps()

    # --- steps ---

    def run(self, watch: Watch | None = None) -> Iterator[list[StepOutput]]:
        """Runs everything to its end; gives out each step's tokens while the device works on the
        next one, and each first token while it works on other prompts."""
        with short_turns():
            yield from self._run(watch or Watch())

    def _run(self, watch: Watch) -> Iterator[list[StepOutput]]:
        outputs: list[StepOutput] = []
        self.is_waiting = False
        while self.has_work or outputs:
            budget = self.config.max_num_batched_tokens if self.running else None
            with torch.no_grad():
                outputs += self.admit_next(budget)
            if self.prefilling and self.admission.is_alone:
                yield outputs
                outputs = []
                continue
            with torch.no_grad():
                watch.launching()
                self.launch()
                watch.launched()
            yield outputs
            self.is_waiting = True
            self.wait()
            self.is_waiting = False
            watch.waited()
            outputs = self.collect()
            watch.collected(outputs)
        if self.first.must_drain and self.fallback is not None:
            self.fallback.hand_over()  # of nobody: nothing is due any more
        self.is_clean = True

    def launch(self) -> None:
        """Queues steps of every lane and returns while the device works; hands requests over
        first, where that is due and no step stands against it."""
        if self.first.must_drain and not self.first.in_flight and self.fallback is not None:
            self._failed += [StepOutput(request, []) for request in self.fallback.hand_over()]
            for output in self._failed:
                self.holdings.give_back(output.request)
        for lane in self.lanes:
            lane.launch()

    def wait(self) -> None:
        """Waits for the oldest step in flight of the first lane."""
        self.first.wait()

    def collect(self) -> list[StepOutput]:
        """Waits for the oldest step in flight of each lane and commits it."""
        outputs, self._failed = self._failed, []
        for lane in self.lanes:
            rows = lane.in_flight[0].rows if lane.in_flight else []
            verified = lane.collect()
            with names.range_("commit"):
                for request, target_ids, num_accepted, scores in verified:
                    outputs.append(StepOutput(request, request.advance(target_ids, num_accepted)))
                    if scores is not None:
                        request.tell(scores, len(outputs[-1].token_ids))
                self._retire()
                if rows and lane is self.first:
                    is_alone, self._num_behind = not self._num_behind, max(0, self._num_behind - 1)
                    if self.fallback is not None:
                        num_rows = sum(r is not None for r in rows)
                        self.fallback.judge(verified, num_rows, is_alone)
        return outputs

    def reset(self) -> None:
        """Drops every request and returns all pages, after an error or an interrupt, which can come
        between any two lines: so nothing is undone, everything is made anew, and a reset that was
        itself interrupted is completed by the next one.

        Raises:
            RuntimeError: the device has failed; nothing can run any more.
        """
        self.is_waiting = False
        for request in [*self.running, *self.prefilling, *self.waiting]:
            request.finish_reason = request.finish_reason or "abort"
            forget(request)
        if self.config.device == "cuda":
            torch.cuda.synchronize()  # late writes go to pages that nobody owns yet
        for lane in self.lanes:
            lane.builder.clear_results_()  # a bucket's warm-up counts its steps from 0
            lane.reset()
        if self.fallback is not None:
            self.fallback.reset()
        self._failed, self.admission = [], Admission(self.prefill, [])
        self.waiting.clear()
        self.holdings.reset()
        self.is_clean = True
