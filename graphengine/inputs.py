"""Turns what a caller passes into what the loop takes: prompts into token ids, options into
settings for sampling and a grammar's matcher.

Text is encoded and a grammar compiled in the caller's thread, before anything of the call is queued
and while the loop's thread runs steps; what can never run is refused there too. Invariant: only
`RequestInput.submit` touches what the loop changes, and the thread that runs the loop calls it.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import fields, replace
from functools import lru_cache
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from graphengine.checkpoints.tokenizer import Message, Tokenizer
from graphengine.config.constraint import constraint_of
from graphengine.config.declaration import made
from graphengine.config.options import SamplingParams
from graphengine.decode.adjustments import check_words
from graphengine.decode.grammar import Matcher
from graphengine.decode.request import Request
from graphengine.decode.sampling import Sampling, random_seed
from graphengine.startup.build import Built
from graphengine.startup.options import check_default_device

_NO_PROMPT = (
    "{kind} is no prompt; pass text, a list of token ids (int), or a list of messages "
    '({{"role": "user", "content": ".."}})'
)

NUM_REHEARSALS = 8

Prompt = str | Sequence[Message] | Sequence[int]
"""A user's text, a conversation, or token ids (used as they are)."""


class PromptError(ValueError):
    """A prompt that cannot be run: `index` is its place in the call, `reason` why."""

    def __init__(self, index: int, count: int, reason: str) -> None:
        super().__init__(f"prompt {index + 1} of {count}: {reason}" if count > 1 else reason)
        self.index, self.count, self.reason = index, count, reason

    def __reduce__(self) -> tuple[type[PromptError], tuple[int, int, str]]:
        return PromptError, (self.index, self.count, self.reason)  # pickled in a pool's worker


class RequestInput(NamedTuple):
    """One prompt and what is asked of its answer."""

    ids: list[int]
    asked: SamplingParams
    sampled: Sampling
    matcher: Matcher | None
    arrival_s: float

    def check(self, built: Built) -> None:
        """Raises: ValueError: it can never run."""
        asked = self.asked
        what = self.ids, asked.max_new_tokens, self.sampled, self.matcher
        built.loop.check(*what, asked.logprobs, asked.prompt_logprobs)

    def submit(self, built: Built) -> Request:
        """Queues it into the loop, where it has been checked."""
        asked = self.asked
        stop_ids = frozenset() if asked.ignore_eos else built.stop_ids
        return built.loop.queue(
            *(self.ids, asked.max_new_tokens, stop_ids, self.sampled, self.arrival_s),
            asked_stop_ids=asked.stop_token_ids,
            logprobs=asked.logprobs,
            prompt_logprobs=asked.prompt_logprobs,
            matcher=self.matcher,
        )


def inputs_of(
    built: Built,
    prompts: str | Sequence[Prompt],
    asked: SamplingParams,
    sampled: Sampling,
    arrival_s: float,
) -> list[RequestInput]:
    """One for each prompt of a call: encodes it, and compiles the grammar if one is asked for.

    Raises:
        PromptError: with the first that cannot be run; a ValueError if they are no list.
    """
    inputs: list[RequestInput] = []
    prompts = [prompts] if isinstance(prompts, str) else _items(prompts)
    try:
        for i, prompt in enumerate(prompts):
            ids, own = _encode(built, prompt, asked), sampled.numbered(i)
            entry = RequestInput(ids, asked, own, _matcher(built, asked), arrival_s)
            entry.check(built)
            inputs.append(entry)
    except ValueError as error:
        raise PromptError(len(inputs), len(prompts), str(error)) from error
    return inputs


def rehearse(built: Built) -> None:
    """Pays at start-up what the first calls would pay here before anything is queued: a chat
    template is compiled at its first use, Qwen3's in 33 ms, and Python's own code is faster from
    its eighth call on or so (2-core cloud CPU)."""
    prompts: list[Prompt] = [[0]]
    if built.tokenizer is not None and built.tokenizer.chat_template:
        prompts.append("a")
    with suppress(ValueError):  # a template that wants more or does not end, a context too short
        for _ in range(NUM_REHEARSALS):
            asked, sampled = asked_for(built, None, {"max_new_tokens": 1})
            inputs_of(built, prompts, asked, sampled, time.perf_counter())


# --- options ---


def asked_for(
    built: Built, sampling: SamplingParams | None, params: dict[str, Any]
) -> tuple[SamplingParams, Sampling]:
    """What a call asks for, by name and for the loop; what is named wins.

    Raises:
        ValueError: with the remedy.
        TypeError: `sampling` is something else.
    """
    check_default_device()
    if sampling is not None and not isinstance(sampling, SamplingParams):
        raise TypeError(
            f"sampling is {sampling!r}; pass a SamplingParams, or its values by name "
            "(temperature=0.7)"
        )
    own = {} if sampling is None else {f.name: getattr(sampling, f.name) for f in fields(sampling)}
    given = own | params
    try:
        known = _known(**given)
    except TypeError:  # of an unknown name, or a value that cannot be looked up
        known = None
    asked, sampled = known or _known.__wrapped__(**given)
    if asked.stop_token_ids or asked.logit_bias or asked.allowed_token_ids:
        _check_token_ids(asked, built.target.vocab_size)
    if asked.stop or asked.bad_words:
        sampled = replace(sampled, bad_words=_bad_words(asked, built.tokenizer))
    if asked.seed is None and not sampled.is_greedy:
        sampled = replace(sampled, seed=random_seed())
    return asked, sampled


@lru_cache(maxsize=64, typed=True)
def _known(**given: Any) -> tuple[SamplingParams, Sampling]:
    """Checked options by name, and for the loop (but for bad words). Callers repeat theirs."""
    asked = made(SamplingParams, given)
    return asked, Sampling.of(asked)


def _check_token_ids(asked: SamplingParams, vocab_size: int) -> None:
    """Raises: ValueError: an option names a token that the model does not have."""
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        outside = [token for token in getattr(asked, name) or () if token >= vocab_size]
        if outside:
            raise ValueError(
                f"{name} has {outside[:5]}, which lie outside the vocabulary of "
                f"{vocab_size}; take ids of this model's tokenizer"
            )


def _bad_words(asked: SamplingParams, tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """Tokens of the bad words.

    Raises:
        ValueError: there is no tokenizer for them or for stop strings, or they cannot be banned.
    """
    if tokenizer is None:
        raise ValueError(
            "this model has no tokenizer, so stop and bad_words have no tokens; pass "
            "stop_token_ids, or logit_bias"
        )
    nothing = [word for word in asked.bad_words if not word.strip()]
    if nothing:
        raise ValueError(f"bad_words has {nothing[0]!r}; to ban white space, pass logit_bias")
    words = [ids for word in asked.bad_words for ids in tokenizer.encode_word(word)]
    check_words(words)
    return tuple(map(tuple, words))


def _matcher(built: Built, asked: SamplingParams) -> Matcher | None:
    """The matcher of the grammar that is asked for, if one is. Raises: ValueError."""
    constraint = constraint_of(asked)
    if constraint is None:
        return None
    if built.grammars is None:
        raise ValueError(f"{constraint.kind} needs this model's tokenizer, and there is none")
    return built.grammars.matcher(constraint)


# --- prompts ---


def as_list(prompts: Any) -> list[Any]:
    """One prompt or many -> many: text, a list of messages and a list of ids are one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    entries = _items(prompts)
    if not entries or isinstance(entries[0], (str, list)):
        return entries
    return [entries] if isinstance(entries[0], (int, Integral, Mapping)) else entries


def _items(prompt: Any) -> list[Any]:
    """The entries of a list, or the numbers of an array or tensor. A message, which iterates over
    its keys, bytes, over numbers, and a set, which has no order, are none. Raises: ValueError."""
    if type(prompt) is list:
        return prompt
    if not isinstance(prompt, Mapping) and callable(getattr(prompt, "tolist", None)):
        prompt = prompt.tolist()
    if isinstance(prompt, Mapping | Set | bytes | bytearray) or not isinstance(prompt, Iterable):
        raise ValueError(_NO_PROMPT.format(kind=type(prompt).__name__))
    return list(prompt)


def _ids_within(vocab: int, prompt: Sequence[Any]) -> list[int]:
    """These ids as Python's integers; loops in C, since a later turn brings all of a long text.
    Raises: TypeError: one is no integer; ValueError: one is out of range."""
    try:
        packed = array("q", prompt)
        is_within = not packed or np.maximum.reduce(np.frombuffer(packed, np.uint64)) < vocab
    except OverflowError:
        is_within = False
    if not is_within:
        outside = [int(token) for token in prompt if not 0 <= token < vocab]
        raise ValueError(
            f"token ids {outside[:5]} lie outside the vocabulary of {vocab}; encode the text with "
            "this model's tokenizer"
        )
    return packed.tolist()


def _encode(built: Built, prompt: Any, asked: SamplingParams) -> list[int]:
    """Token ids of any `Prompt`. Raises: ValueError."""
    if not isinstance(prompt, str):
        prompt = _items(prompt)
        try:
            ids = _ids_within(built.target.vocab_size, prompt)
        except TypeError:  # entries that are no integers
            pass
        else:
            _check_template(asked, "token ids have")
            return ids
        if not all(isinstance(message, Mapping) for message in prompt):
            kinds = sorted({type(entry).__name__ for entry in prompt})
            raise ValueError(_NO_PROMPT.format(kind=f"a list of {' and '.join(kinds)}"))
        if any(not isinstance(message.get("role"), str) for message in prompt):
            raise ValueError(_NO_PROMPT.format(kind="a message without a role"))
        if asked.raw:
            raise ValueError("raw: messages have a chat template; pass text, or leave out raw")
    if built.tokenizer is None:
        raise ValueError("this model has no tokenizer; pass token ids instead of text")
    if isinstance(prompt, str):
        if asked.raw:
            _check_template(asked, "raw text has")
            return built.tokenizer.encode_prompt(prompt)
        prompt = [{"role": "user", "content": prompt}]
    return built.tokenizer.encode_chat(prompt, asked.chat_template_kwargs)


def _check_template(asked: SamplingParams, whose: str) -> None:
    """Refuses arguments of a chat template that is not used. Raises: ValueError."""
    if asked.chat_template_kwargs is not None:
        raise ValueError(
            f"chat_template_kwargs: {whose} no chat template; leave out one of the two"
        )
