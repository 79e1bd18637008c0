"""The Python API: load a pair once, then generate or stream. One process, no server; threads help
while an engine is built, and none after that.

    with Engine.from_pretrained(TINY_TARGET, draft=TINY_DRAFT) as engine:
        for chunk in engine.stream("Tom has 3 apples and buys 4 more. How many now?"):
            print(chunk.text, end="", flush=True)

Invariant: one generation at a time owns the engine; whatever ends it (completion, an exception,
Ctrl-C, a stream that is dropped half-way), its pages return and the engine can be used again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch

from graphengine import names
from graphengine.checkpoints.tokenizer import Detokenizer, Message, Tokenizer
from graphengine.config.bytesize import parse_bytes
from graphengine.config.engine import (
    AttentionBackend,
    DeviceName,
    DraftQuantization,
    DTypeName,
    EngineConfig,
    GraphMode,
)
from graphengine.decode.acceptance import FinishReason
from graphengine.decode.loop import DecodeLoop, StepOutput
from graphengine.decode.metrics import RequestMetrics, StartupMetrics
from graphengine.decode.ownership import Ownership
from graphengine.decode.request import Request
from graphengine.decode.sampling import Sampling, random_seed
from graphengine.startup.build import Built, build
from graphengine.startup.memory import MemoryPlan
from graphengine.startup.options import LoadFormat, Options

DEFAULT_MAX_NEW_TOKENS = 256

_NO_PROMPT = (
    "{kind} is no prompt; pass text, a list of token ids (int), or a list of messages "
    '({{"role": "user", "content": ".."}})'
)

Prompt = str | Sequence[Message] | Sequence[int]
"""A user's text, a conversation, or token ids (used as they are)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """A finished request.

    `token_ids` are the generated ones, the stop token included; `text` leaves special tokens out.
    `finish_reason`: "stop" (a stop token), "length" (max_new_tokens or the context), "cancelled",
    "error" (this request alone could not go on; `error` says why, the tokens before it are right).
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    metrics: RequestMetrics
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What one step added to one request: 1 .. G tokens, and the text that they complete.

    `index` is the prompt's place in the call; `result` comes with the last chunk, which holds no
    token if the request ended in an error.
    """

    index: int
    text: str
    token_ids: list[int]
    result: GenerationResult | None = None


class PromptError(ValueError):
    """A prompt that cannot be run: `index` is its place in the call, `reason` why."""

    def __init__(self, index: int, count: int, reason: str) -> None:
        super().__init__(f"prompt {index + 1} of {count}: {reason}" if count > 1 else reason)
        self.index, self.reason = index, reason


class Engine:
    """A loaded target, optionally with its DFlash drafter. Build it with `from_pretrained`."""

    def __init__(self, built: Built) -> None:
        self._built: Built | None = built
        self._ownership = Ownership()
        self._failure, self._remedy = "", "make a new one with from_pretrained"

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path,
        draft: str | Path | None = None,
        *,
        buckets: Sequence[int] = (1, 8, 16),
        graph_mode: GraphMode | Literal["auto"] = "auto",
        compile: bool | None = None,
        attention_backend: AttentionBackend | Literal["auto"] = "auto",
        device: DeviceName | Literal["auto"] = "auto",
        dtype: DTypeName | Literal["auto"] = "auto",
        page_size: int | None = None,
        max_model_len: int | None = None,
        load_format: LoadFormat = "auto",
        gpu_memory_utilization: float = 0.9,
        kv_cache_memory: int | str | None = None,
        simulate_acceptance: float | None = None,
        draft_quantization: DraftQuantization = "none",
        num_speculative_tokens: int | Sequence[int] | None = None,
        lazy_capture: bool = False,
        first_batch: int = 1,
        acceptance_floor: float = 1.5,
        fallback: bool = True,
        finish_in_plain_decode: bool = False,
        prepare_plain_decode: bool = False,
        sampling: bool | None = None,
        progress: Callable[[str, float], None] = lambda what, share: None,
    ) -> Engine:
        """Loads, compiles and captures.

        Args:
            target: hub id or directory of a dense Qwen3 model, or of a speculators checkpoint,
                which is its own drafter and names its target.
            draft: hub id or directory of its DFlash drafter, in any format of
                config/draft-formats.md. None decodes plainly, unless the target is a speculators
                checkpoint; "none" always does.
            buckets: batch sizes to build; more prompts than the largest wait in order.
            graph_mode: "piecewise" (default on a GPU), "full" or "none" (default on the CPU).
            compile: Inductor for the dense segments; default on a GPU only.
            attention_backend: "flashinfer" (default on a GPU in bfloat16), "triton" (our kernel,
                which needs no plan; default with graph_mode "full") or "torch".
            device: "cuda" where there is one, else "cpu".
            dtype: "bfloat16" on a GPU, "float32" on the CPU.
            page_size: tokens per K/V page; default 128 with our own attention, else 16.
            max_model_len: most tokens of one request, prompt included; default what the models'
                positions allow, less one block when drafting.
            load_format: "dummy" makes random weights from config.json alone, "dummy-uniform" as
                vLLM's dummy loader draws them (see `weights.RandomSource`).
            gpu_memory_utilization: share of the GPU's memory that the engine may fill.
            kv_cache_memory: most bytes of the K/V pool, as a number or "2GiB"; default what the
                memory plan leaves, at most what all rows need at full length.
            simulate_acceptance: draw this mean acceptance length instead of comparing drafts;
                for measuring speed without a trained drafter, the output is meaningless. The mean
                is that of the drafter's own block; where fewer are drafted, draws are cut off.
            draft_quantization: "fp8" rounds the drafter's weights and its copy of the head, for
                forwards of up to 64 rows; "fp8-dynamic" for all, and in larger ones the
                activations too. The output stays the target's, acceptance may suffer.
            num_speculative_tokens: drafts a step, at most what the drafter's block has (default):
                one number, or one for each of `buckets`. In large batches fewer can be faster.
            lazy_capture: build only the bucket of the first batch ahead, each other one at its
                first use, between steps: an earlier start, paid by a later request.
            first_batch: with lazy_capture, how many requests come first.
            acceptance_floor: warn once, with the likely causes (`guards.AcceptanceWarning`), when
                the mean acceptance length falls below it; 0 never warns.
            fallback: a request that speculation makes slower, by measured step times, goes on in
                plain decoding; `RequestMetrics.fallback_reason` says so. The output is the same.
            finish_in_plain_decode: lets a request use the target's whole context: where a block
                would reach past the last position, it goes on in plain decoding.
            prepare_plain_decode: build what decodes plainly at start-up instead of when a request
                first needs it.
            sampling: whether requests may have a temperature; captures a second verify chain per
                bucket. Default: only where nothing is captured (graph mode none).
            progress: called with (what, share done) while loading and building.

        Raises:
            ValueError: a file, value or combination that cannot work, with the remedy.
        """
        options = Options(
            buckets=tuple(buckets) if isinstance(buckets, Iterable) else buckets,
            graph_mode=graph_mode,
            compile=compile,
            attention_backend=attention_backend,
            device=device,
            dtype=dtype,
            page_size=page_size,
            max_model_len=max_model_len,
            load_format=load_format,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_memory=None if kv_cache_memory is None else parse_bytes(kv_cache_memory),
            simulate_acceptance=simulate_acceptance,
            draft_quantization=draft_quantization,
            num_speculative_tokens=num_speculative_tokens,
            lazy_capture=lazy_capture,
            first_batch=first_batch,
            acceptance_floor=acceptance_floor,
            fallback=fallback,
            finish_in_plain_decode=finish_in_plain_decode,
            prepare_plain_decode=prepare_plain_decode,
            sampling=sampling,
        )
        return cls(build(target, draft, options, progress))

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

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        ignore_eos: bool = False,
        raw: bool = False,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int | None = None,
    ) -> list[GenerationResult]:
        """Continues every prompt and returns when all are done.

        Args:
            prompts: one prompt or several; see `Prompt`.
            max_new_tokens: most tokens to generate per prompt.
            ignore_eos: do not end at the model's end tokens.
            raw: take text as it is instead of as a user's turn in the chat template.
            temperature: 0 is greedy, also where the checkpoint's generation_config.json suggests
                something else; above 0 tokens are drawn from softmax(logits / temperature).
            top_p: keeps the fewest most likely tokens that hold this share of the probability.
            top_k: keeps this many most likely tokens; 0 keeps all.
            seed: makes draws repeatable, with a drafter or without: prompt i of the call draws
                with seed + i. Default: a new one per call.

        Returns:
            One result per prompt, in order.

        Raises:
            PromptError: a prompt that cannot be run, a ValueError; nothing is run then.
            ValueError: a sampling parameter outside its range.
            RuntimeError: the engine is closed, or another generation is active.
        """
        results: dict[int, GenerationResult] = {}
        for chunk in self.stream_many(
            _as_list(prompts),
            max_new_tokens=max_new_tokens,
            ignore_eos=ignore_eos,
            raw=raw,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
        ):
            if chunk.result is not None:
                results[chunk.index] = chunk.result
        return [results[i] for i in range(len(results))]

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        ignore_eos: bool = False,
        raw: bool = False,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int | None = None,
    ) -> Iterator[Chunk]:
        """Continues one prompt, giving out tokens as they are decoded; arguments as `generate`.

        The last chunk carries the result. Dropping the iterator cancels the request.
        """
        return self.stream_many(
            [prompt],
            max_new_tokens=max_new_tokens,
            ignore_eos=ignore_eos,
            raw=raw,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
        )

    def stream_many(
        self,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        ignore_eos: bool = False,
        raw: bool = False,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int | None = None,
    ) -> Iterator[Chunk]:
        """Continues several prompts in one batch; chunks of different prompts interleave."""
        sampling = Sampling(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=random_seed() if seed is None else seed,
        )
        built = self._open
        with self._ownership.claim():
            # Drops what a stream that was never started has queued; completes an interrupted reset.
            self._reset(built.loop)
            built = self._open
            prompts = [prompts] if isinstance(prompts, str) else _items(prompts)
            stop_ids = frozenset() if ignore_eos else built.stop_ids
            loop = built.loop
            requests: list[Request] = []
            try:
                encoded = []  # first, so that no TTFT counts another's tokenization
                for i, prompt in enumerate(prompts):
                    with _named(i, len(prompts)):
                        encoded.append(self._encode(prompt, raw))
                for i, ids in enumerate(encoded):
                    with _named(i, len(prompts)):
                        requests.append(
                            loop.submit(ids, max_new_tokens, stop_ids, sampling.numbered(i))
                        )
            except BaseException:
                loop.reset()
                raise
            return self._run(loop, requests, built.tokenizer)

    def _run(
        self, loop: DecodeLoop, requests: list[Request], tokenizer: Tokenizer | None
    ) -> Iterator[Chunk]:
        with self._ownership.claim():
            yield from self._decode(loop, requests, tokenizer)

    def _decode(
        self, loop: DecodeLoop, requests: list[Request], tokenizer: Tokenizer | None
    ) -> Iterator[Chunk]:
        if self._built is None or any(r.finish_reason is not None for r in requests):
            raise RuntimeError("this stream was superseded or its engine closed before it began")
        indices = {request.request_id: i for i, request in enumerate(requests)}
        writers = [Detokenizer(tokenizer) if tokenizer else None for _ in requests]
        texts = [""] * len(requests)

        def deliver(outputs: list[StepOutput]) -> Iterator[Chunk]:
            for request, new_ids in outputs:
                index = indices[request.request_id]
                with names.range_("detokenize"):
                    writer, reason = writers[index], request.finish_reason
                    text = writer.feed(new_ids, last=reason is not None) if writer else ""
                    texts[index] += text
                result = None
                if reason is not None:
                    result = GenerationResult(
                        text=texts[index],
                        token_ids=list(request.output_ids),
                        finish_reason=reason,
                        metrics=request.metrics(),
                        error=request.error,
                    )
                yield Chunk(index=index, text=text, token_ids=new_ids, result=result)

        try:
            for outputs in loop.run():
                yield from deliver(outputs)  # while the device works
                _ = self._open  # it may have been closed meanwhile
        except BaseException:  # a dropped stream is GeneratorExit
            self._reset(loop)
            raise

    def _encode(self, prompt: Prompt, raw: bool) -> list[int]:
        built = self._open
        if not isinstance(prompt, str):
            prompt = _items(prompt)
            if all(isinstance(token, int) for token in prompt):
                vocab = built.target.vocab_size
                outside = [t for t in prompt if not 0 <= t < vocab]
                if outside:
                    raise ValueError(
                        f"token ids {outside[:5]} lie outside the vocabulary of {vocab}; encode "
                        "the text with this model's tokenizer"
                    )
                return prompt
            if not all(isinstance(message, Mapping) for message in prompt):
                kinds = sorted({type(entry).__name__ for entry in prompt})
                raise ValueError(_NO_PROMPT.format(kind=f"a list of {' and '.join(kinds)}"))
        if built.tokenizer is None:
            raise ValueError("this model has no tokenizer; pass token ids instead of text")
        if isinstance(prompt, str):
            if raw:
                return built.tokenizer.encode(prompt)
            prompt = [{"role": "user", "content": prompt}]
        return built.tokenizer.encode_chat(prompt)  # type: ignore[arg-type]

    # --- lifetime ---

    @property
    def _open(self) -> Built:
        if self._built is None:
            raise RuntimeError(f"this engine is closed{self._failure}; {self._remedy}")
        return self._built

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
        if self._built is None:
            return
        loop, on_gpu = self._built.loop, self._built.config.device == "cuda"
        self._built = None
        self._reset(loop)
        del loop  # the last reference to weights and pools
        if on_gpu and not self._failure:
            torch.cuda.empty_cache()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


@contextmanager
def _named(index: int, count: int) -> Iterator[None]:
    """Says of a ValueError which prompt it is about."""
    try:
        yield
    except ValueError as error:
        raise PromptError(index, count, str(error)) from error


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many -> many: text, a list of messages and a list of ids are one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    items = _items(prompts)
    return [items] if items and isinstance(items[0], int | Mapping) else items


def _items(prompt: Any) -> list[Any]:
    """The entries of a list. What iterates over something else, a message over its keys and bytes
    over numbers, is none."""
    if isinstance(prompt, Mapping | bytes | bytearray) or not isinstance(prompt, Iterable):
        raise ValueError(_NO_PROMPT.format(kind=type(prompt).__name__))
    return list(prompt)
