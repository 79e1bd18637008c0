"""What a generation gives: chunks while it runs, a result at its end; from steps' tokens to both.

Where an answer's text ends, its request ends: a stop string is found here, in the text, and the
loop is told. What was decoded behind it is dropped, so that a result is plain decoding's whatever
a step commits at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphengine import names
from graphengine.checkpoints.stops import Writer, Written
from graphengine.checkpoints.tokenizer import Tokenizer
from graphengine.config.options import SamplingParams
from graphengine.decode.acceptance import FinishReason
from graphengine.decode.logprobs import Logprobs
from graphengine.decode.loop import DecodeLoop
from graphengine.decode.metrics import RequestMetrics
from graphengine.decode.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """A finished request.

    `token_ids` are the generated ones, the stop token included, or the one that completes a stop
    string; `text` leaves special tokens out, and what ended it unless that is to be included.
    `finish_reason`: "stop" (`stop_reason`: the stop string or the token of `stop_token_ids`; None:
    the model's own end), "length" (max_new_tokens or the context), "abort" (dropped), "error" (this
    request alone could not go on; `error` says why, the tokens before it are right). `logprobs`
    has an entry a token of `token_ids`, `prompt_logprobs` one a token of the prompt, None for its
    first; each tells the token's own first, then the most likely ones.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    metrics: RequestMetrics
    error: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[Logprobs] | None = None
    prompt_logprobs: list[Logprobs | None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What one step added to one request: 1 .. G tokens, and the text that they complete; with
    `logprobs` an entry for each.

    `index` is the prompt's place in the call; `result` comes with the last chunk, which holds no
    token if the request ended in an error.
    """

    index: int
    text: str
    token_ids: list[int]
    result: GenerationResult | None = None
    logprobs: list[Logprobs] | None = None


class Teller:
    """Makes chunks of what steps commit; keeps each answer's text and what of it is held back."""

    def __init__(
        self,
        loop: DecodeLoop,
        requests: Sequence[Request],
        tokenizer: Tokenizer | None,
        asked: SamplingParams,
    ) -> None:
        """Args: requests: of the loop, by their prompts' places. asked: for all of them."""
        self._loop, self._asked = loop, asked
        self._indices = {request.request_id: i for i, request in enumerate(requests)}
        how = asked.stop, asked.include_stop_str_in_output, asked.min_tokens
        self._writers = [
            Writer(tokenizer, *how, request.prompt_ids, asked.skip_special_tokens)
            if tokenizer is not None
            else None
            for request in requests
        ]
        self._texts: list[list[str]] = [[] for _ in requests]  # in pieces: each is copied once

    def chunk(self, request: Request, new_ids: list[int]) -> Chunk:
        """The chunk of new tokens. Ends their request where they complete a stop string."""
        index = self._indices[request.request_id]
        with names.range_("detokenize"):
            written, num_dropped = self._write(index, request, new_ids)
        self._texts[index].append(written.text)
        if written.stop is not None:
            self._loop.end_at(request, written.stop, num_dropped)
        new_ids = new_ids[: len(new_ids) - num_dropped]
        logprobs, result = None, None
        count = len(request.output_ids)
        if self._asked.logprobs is not None:
            logprobs = request.output_logprobs[count - len(new_ids) : count]
        if request.finish_reason is not None:
            asked = self._asked
            result = GenerationResult(
                text="".join(self._texts[index]),
                token_ids=list(request.output_ids),
                finish_reason=request.finish_reason,
                metrics=request.metrics(),
                error=request.error,
                stop_reason=request.stop_reason,
                logprobs=None if logprobs is None else request.output_logprobs[:count],
                prompt_logprobs=(
                    None if asked.prompt_logprobs is None else [None, *request.prompt_scores]
                ),
            )
        return Chunk(
            index=index,
            text=written.text,
            token_ids=new_ids,
            result=result,
            logprobs=logprobs,
        )

    def _write(self, index: int, request: Request, new_ids: list[int]) -> tuple[Written, int]:
        """The new text, and how many of the tokens lie behind a stop string."""
        writer, reason = self._writers[index], request.finish_reason
        if writer is None:
            return Written(""), 0
        said = new_ids
        if reason == "stop" and not self._asked.include_stop_str_in_output:
            said = new_ids[:-1]  # a stop token says nothing
        written = writer.feed(said, last=reason is not None)
        if written.stop is None:
            return written, 0
        return written, written.num_dropped + len(new_ids) - len(said)
