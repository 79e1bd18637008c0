"""The Python API: load a pair once, then generate or stream. One process, no server. Threads help
to build an engine and render a chat's template; the first `submit` starts one that runs the loop.

    with Engine.from_pretrained(TINY_TARGET, draft=TINY_DRAFT) as engine:
        for chunk in engine.stream("Count from 20 to 146 in steps of 6."):
            print(chunk.text, end="", flush=True)

Invariant: one generation at a time owns the engine; whatever ends it (completion, an exception,
Ctrl-C, a stream that is dropped half-way), its pages return and the engine can be used again.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from asyncio import get_running_loop
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from graphengine.checkpoints.tokenizer import Tokenizer
from graphengine.config.declaration import made, spelled_out
from graphengine.config.engine import EngineConfig
from graphengine.config.options import Options, SamplingParams
from graphengine.decode.loop import DecodeLoop
from graphengine.decode.metrics import StartupMetrics
from graphengine.decode.request import Request
from graphengine.handles import AutoResetEvent, Handle, Serving, Submit, check_process, collect
from graphengine.inputs import Prompt, RequestInput, as_list, asked_for, inputs_of, rehearse
from graphengine.inputs import PromptError as PromptError
from graphengine.results import Chunk, GenerationResult, Teller
from graphengine.startup.build import Built, build
from graphengine.startup.memory import MemoryPlan


class Engine:
    """A loaded target, optionally with its DFlash drafter. Build it with `from_pretrained`."""

    def __init__(self, built: Built) -> None:
        if not isinstance(built, Built):
            raise TypeError(f"Engine({built!r}): use Engine.from_pretrained to load a model")
        self._built: Built | None = built
        self._lock = threading.Lock()  # held while a claim is made, no longer
        self._last: weakref.ref[_Claim] | None = None
        self._starting = threading.RLock()  # a signal handler may call close() inside
        self._serving: Serving | None = None
        self._serving_claim: _Claim | None = None
        self._pid = os.getpid()
        self._failure, self._remedy = "", "make a new one with from_pretrained"

    @classmethod
    @spelled_out(Options)
    def from_pretrained(
        cls,
        target: str | Path,
        draft: str | Path | None = None,
        *,
        progress: Callable[[str, float], None] | None = None,
        **options: Any,
    ) -> Engine:
        """Loads, compiles and captures.

        Args:
            target: hub id or directory of the target, or of a speculators checkpoint, which is its
                own drafter and names its target.
            draft: hub id or directory of its drafter, in any format of
                config/draft-formats.md. None decodes plainly, unless the target is a speculators
                checkpoint; "none" always does.
            progress: called with (what, share done) while loading and building.
            {options}

        Raises:
            TypeError: an unknown option, or what cannot be called for `progress`.
            ValueError: a file, value or combination that cannot work, with the remedy.
        """
        if target is None:
            raise ValueError("the target is None; pass a directory or a hub id (owner/name)")
        if not callable(progress := progress or (lambda what, share: None)):
            raise TypeError(f"progress is {progress!r}; pass a function of (what, share done)")
        built = build(target, draft, made(Options, options), progress)
        rehearse(built)
        return cls(built)

    # --- what was built ---

    @property
    def config(self) -> EngineConfig:
        """The resolved configuration."""
        return self._open.config

    @property
    def built(self) -> Built:
        """The loaded models and the decode loop, for tools that drive steps themselves."""
        return self._open

    @property
    def startup(self) -> StartupMetrics:
        """Where start-up time and memory went."""
        return self._open.startup

    @property
    def memory_plan(self) -> MemoryPlan:
        """What each part of the engine takes, and what that leaves for K/V."""
        return self._open.memory_plan

    @property
    def num_draft_tokens(self) -> int:
        """Tokens proposed per step, in the bucket that has most; 0 without a drafter."""
        return self._open.loop.block - 1

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The target's tokenizer; None for a dummy model without one."""
        return self._open.tokenizer

    # --- generation ---

    @spelled_out(SamplingParams)
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | None = None,
        **params: Any,
    ) -> list[GenerationResult]:
        """Continues every prompt and returns when all are done.

        Args:
            prompts: one prompt or several; see `Prompt`.
            sampling: the values below as one; what is named beside it wins.
            {options}

        Returns:
            One result per prompt, in order.

        Raises:
            PromptError: a prompt that cannot be run, a ValueError; nothing is run then.
            ValueError: a sampling parameter outside its range.
            RuntimeError: the engine is closed, or another generation is active.
        """
        chunks = self.stream_many(as_list(prompts), sampling, **params)
        results = {chunk.index: chunk.result for chunk in chunks if chunk.result is not None}
        return [results[i] for i in range(len(results))]

    @spelled_out(SamplingParams)
    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **params: Any
    ) -> Iterator[Chunk]:
        """Continues one prompt, giving out tokens as they are decoded; arguments as `generate`.

        The last chunk carries the result. Dropping the iterator cancels the request.
        """
        return self.stream_many([prompt], sampling, **params)

    @spelled_out(SamplingParams)
    def stream_many(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | None = None, **params: Any
    ) -> Iterator[Chunk]:
        """Continues several prompts in one batch; chunks of different prompts interleave.

        A stream is over once its thread begins another generation while it stands still; asked to
        go on, it raises RuntimeError.
        """
        arrival_s = time.perf_counter()
        asked, sampled = asked_for(self._open, sampling, params)
        inputs = inputs_of(self._open, prompts, asked, sampled, arrival_s)
        serving = self._serving
        if serving is not None:
            changed, told = AutoResetEvent(), deque[int]()

            def note(index: int) -> None:
                told.append(index)
                changed.set()

            queued = enumerate(map(self._submission, inputs))
            handles = [serving.submit(one, partial(note, index)) for index, one in queued]
            return collect(handles, changed, told)
        with self._claim() as claim:
            self._clear(self._open.loop, claim.takes_over or self._open.loop.is_waiting)
            built = self._open
            try:
                requests = [entry.submit(built) for entry in inputs]
            except BaseException:
                built.loop.reset()
                raise
            tell = Teller(built.loop, requests, built.tokenizer, asked)
            return self._run(built.loop, requests, tell)

    @spelled_out(SamplingParams)
    def submit(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **params: Any
    ) -> Handle:
        """Queues a prompt and returns at once; arguments as `generate`. It runs beside whatever
        runs, and several threads may submit and wait at the same time.

        From the first call on a thread of the engine's own runs the steps, also those of `generate`
        and `stream`. Dropping the handle cancels the request.

        Raises:
            ValueError: a prompt that cannot be run, or a sampling parameter outside its range.
            RuntimeError: the engine is closed, or a stream from before the first call is active.
        """
        return self.queue(prompt, sampling, params)

    def queue(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None,
        params: dict[str, Any],
        told: Callable[[], object] | None = None,
    ) -> Handle:
        """`submit` for a caller that waits in its own way: the engine's thread calls `told` after
        each chunk."""
        arrival_s = time.perf_counter()
        asked, sampled = asked_for(self._open, sampling, params)
        (entry,) = inputs_of(self._open, [prompt], asked, sampled, arrival_s)
        queued = self._submission(entry)
        with self._starting:
            if self._serving is None:
                claim = self._claim()
                self._clear(self._open.loop, claim.takes_over or self._open.loop.is_waiting)
                # Its thread holds no engine, so one whose variable gets another value is freed.
                reset = weakref.WeakMethod(self._reset)
                self._serving = Serving(self._open.loop, lambda loop: (reset() or _dropped)(loop))
                self._serving_claim = claim  # which lasts as long as it is referred to
                weakref.finalize(self, self._serving.leave)
            serving = self._serving
        return serving.submit(queued, told)

    def _submission(self, entry: RequestInput) -> Submit:
        """What the loop's thread is to call to queue it."""
        built, submitted_s = self._open, time.perf_counter()

        def submit() -> tuple[Request, Teller]:
            request = entry.submit(built)
            request.submitted_s = submitted_s  # what it waited for that thread is the queue's
            return request, Teller(built.loop, [request], built.tokenizer, entry.asked)

        return submit

    def _run(self, loop: DecodeLoop, requests: list[Request], tell: Teller) -> Iterator[Chunk]:
        def check() -> None:
            if self._built is None or any(r.finish_reason is not None for r in requests):
                raise RuntimeError(
                    "this stream was superseded or its engine closed before it began"
                )

        check()  # before another gives way
        with self._claim() as claim:
            check()
            try:
                for outputs in loop.run():
                    for request, new_ids in outputs:
                        chunk = tell.chunk(request, new_ids)
                        claim.stands_still = True
                        yield chunk  # while the device works
                        claim.stands_still = False
                        _ = self._open  # it may have been closed meanwhile
                        if not claim.is_held:  # the loop is another's, and its thread's
                            raise RuntimeError("this stream was superseded by a later generation")
                    _ = self._open
                _ = self._open  # or in the middle of a step, which then finds nothing to do
            except BaseException as error:  # a dropped stream is GeneratorExit
                if self._built is None and isinstance(error, Exception):
                    _ = self._open  # which is why, whatever a step has missed then
                is_stopped = isinstance(error, KeyboardInterrupt) and loop.is_waiting
                if claim.is_held:
                    self._clear(loop, is_stopped or isinstance(error, GeneratorExit))
                raise

    # --- lifetime ---

    def _claim(self) -> _Claim:
        """The right to use the engine, for a `with` block.

        Raises:
            RuntimeError: another generation has it. A stream of this thread that stands still gives
                way: Ctrl-C may have ended the loop over it while its variable lives. In an event
                loop, where another task may own that stream, it does not.
        """
        new = _Claim()
        with self._lock:
            last = self._last() if self._last is not None else None
            if last is not None and last.is_held:
                if not last.stands_still or last.thread != new.thread or _in_event_loop():
                    raise RuntimeError(
                        "another generation of this engine is active; finish or close its stream "
                        "first"
                    )
                last.is_held, new.takes_over = False, True
            self._last = weakref.ref(new)
        return new

    @property
    def _open(self) -> Built:
        check_process(self._pid)
        if self._built is None:
            raise RuntimeError(f"this engine is closed{self._failure}; {self._remedy}")
        return self._built

    def _clear(self, loop: DecodeLoop, stands_still: bool) -> None:
        """Makes the loop idle.

        Args: stands_still: its stream was dropped between two steps, was stopped while it waited,
            or never began. Its requests are then cancelled one by one, and cached pages stay.
        """
        if os.getpid() != self._pid:  # a fork, in which no step ends
            return
        try:
            if stands_still:
                with suppress(Exception):  # nobody asks for it, and a reset helps or tells
                    for request in [*loop.running, *loop.prefilling, *loop.waiting]:
                        loop.cancel(request)
                    for _ in loop.run():
                        pass
        finally:
            # After a stream that queued requests and never began, or an interrupted reset.
            if not loop.is_clean:  # a reset waits for the device
                self._reset(loop)

    def _reset(self, loop: DecodeLoop) -> None:
        """Makes the loop idle; where the device itself has failed, closes the engine instead."""
        try:
            loop.reset()
        except RuntimeError as error:  # a CUDA error stays: every later call would fail as well
            if "CUDA" not in str(error):
                raise
            reason = str(error).partition("\n")[0]
            self._failure = f" because the device failed ({reason})"
            self._remedy = "start a new process"
            self._built = None

    def close(self) -> None:
        """Frees weights, K/V pools and graphs; an active stream ends with an error. Calling it
        again does nothing."""
        with self._starting:  # whose thread would begin on a closed engine
            if self._built is None:
                return
            loop, on_gpu = self._built.loop, self._built.config.device == "cuda"
            serving, self._serving = self._serving, None
            self._built = self._serving_claim = None
        if serving is not None:
            serving.close()
        self._reset(loop)
        del loop  # the last reference to weights and pools
        if on_gpu and not self._failure:
            torch.cuda.empty_cache()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Claim:
    """The right to use an engine. No lock is held for a generation's length: Ctrl-C between taking
    it and the block that gives it back would leave the engine taken for ever. A claim lasts until
    it is given back or its holder's frame is gone."""

    __slots__ = ("__weakref__", "is_held", "stands_still", "takes_over", "thread")

    def __init__(self) -> None:
        self.is_held, self.stands_still, self.thread = True, False, threading.get_ident()
        self.takes_over = False  # from one that stood still

    def __enter__(self) -> _Claim:
        return self

    def __exit__(self, *error: object) -> None:
        self.is_held = False


def _dropped(loop: DecodeLoop) -> None:
    """Resets the loop of an engine that is gone; nobody is left to hear that the device failed."""
    with suppress(RuntimeError):
        loop.reset()


def _in_event_loop() -> bool:
    try:
        get_running_loop()
    except RuntimeError:
        return False
    return True
