"""What requests ask of their logits, and what their answers hold so far, as tables on the device.

kernels/adjust_logits.py applies them and keeps them current; here they are written, when a request
joins, from what the host knows of it then. A first token obeys the same tables, made for its
prefill alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from graphengine.decode.buffers import Arena
from graphengine.decode.request import Request
from graphengine.kernels.adjust_logits import (
    MAX_WORD_TOKENS,
    MAX_WORDS,
    NOTHING,
    PROMPT,
    STOP,
    Tables,
    adjust_logits,
)


def take_tables(arena: Arena, num_requests: int, vocab_size: int) -> Tables:
    """Memory of that many rows; nobody asks for anything until one is written."""
    take = partial(arena.take, dtype=torch.int32)
    take_float = partial(arena.take, dtype=torch.float32)
    return Tables(
        is_on_B=take("is_adjusted", num_requests),
        repetition_B=take_float("repetition", num_requests),
        presence_B=take_float("presence", num_requests),
        frequency_B=take_float("frequency", num_requests),
        until_B=arena.take("until", num_requests),
        seen_BV=take("seen", num_requests, vocab_size),
        bias_BV=take_float("bias", num_requests, vocab_size),
        words_BKL=take("bad_words", num_requests, MAX_WORDS, MAX_WORD_TOKENS),
        recent_BL=take("recent", num_requests, MAX_WORD_TOKENS - 1),
    )


def make_tables(requests: Sequence[Request], vocab_size: int, device: torch.device) -> Tables:
    """Tables of these alone, current up to each one's newest token."""
    tables = take_tables(Arena(device, torch.float32), len(requests), vocab_size)
    write_tables_(tables, dict(enumerate(requests)))
    return tables


def write_tables_(tables: Tables, rows: Mapping[int, Request | None]) -> None:
    """Begins these rows anew with their requests. Mutates: tables; of a row that asks for nothing
    `is_on_B` alone."""
    device = tables.is_on_B.device

    def upload(values: Iterable[float], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(list(values), dtype=dtype).to(device)

    asking = {row: r for row, r in rows.items() if r is not None and r.sampling.adjusts}
    is_on = [int(row in asking) for row in rows]
    tables.is_on_B.index_copy_(0, upload(rows), upload(is_on, torch.int32))
    if not asking:
        return
    at_R, samplings = upload(asking), [request.sampling for request in asking.values()]
    f32 = torch.float32
    for column_B, values in (
        (tables.repetition_B, upload([s.repetition_penalty for s in samplings], f32)),
        (tables.presence_B, upload([s.presence_penalty for s in samplings], f32)),
        (tables.frequency_B, upload([s.frequency_penalty for s in samplings], f32)),
        (tables.until_B, upload(_until(request) for request in asking.values())),
    ):
        column_B.index_copy_(0, at_R, values)
    words_RKL = torch.full((len(asking), *tables.words_BKL.shape[1:]), NOTHING, dtype=torch.int32)
    recent_RL = torch.full((len(asking), tables.recent_BL.shape[1]), NOTHING, dtype=torch.int32)
    vocab_size = tables.seen_BV.shape[1]
    for i, (row, request) in enumerate(asking.items()):
        seen_V, bias_V, sampling = tables.seen_BV[row], tables.bias_BV[row], request.sampling
        seen_V.zero_()
        bias_V.zero_()
        stops = upload({token for token in request.stop_ids if 0 <= token < vocab_size})
        seen_V.index_fill_(0, upload(set(request.prompt_ids)), PROMPT)
        seen_V.index_add_(0, stops, torch.full_like(stops, STOP, dtype=torch.int32))
        said = upload(request.output_ids)
        seen_V.index_add_(0, said, torch.ones_like(said, dtype=torch.int32))
        bias = sampling.logit_bias or {}
        bias_V.index_copy_(0, upload(bias), upload(bias.values(), f32))
        if sampling.allowed_token_ids is not None:
            is_banned_V = torch.ones_like(bias_V, dtype=torch.bool)
            is_banned_V[upload(sampling.allowed_token_ids)] = False
            bias_V.masked_fill_(is_banned_V, -torch.inf)
        short = [word[0] for word in sampling.bad_words if len(word) == 1]
        bias_V.index_fill_(0, upload(short), -torch.inf)
        long = [word for word in sampling.bad_words if len(word) > 1]
        for k, word in enumerate(long):
            words_RKL[i, k, -len(word) :] = torch.tensor(word)
        before = request.output_ids[:-1][-recent_RL.shape[1] :]
        if before:
            recent_RL[i, -len(before) :] = torch.tensor(before)
    tables.words_BKL.index_copy_(0, at_R, words_RKL.to(device))
    tables.recent_BL.index_copy_(0, at_R, recent_RL.to(device))


def _until(request: Request) -> int:
    """The first position whose row may choose a token that ends the answer, if it is reached."""
    least = min(request.sampling.min_tokens, request.max_total_tokens)  # any integer may be asked
    return len(request.prompt_ids) - 1 + least


def adjust_first(logits_RV: Tensor, position_R: Tensor, requests: Sequence[Request]) -> Tensor:
    """The logits behind prompts, float32, as these requests want them."""
    tables = make_tables(requests, logits_RV.shape[1], logits_RV.device)
    nothing_R1 = torch.full_like(position_R, NOTHING)[:, None]
    return adjust_logits(logits_RV, nothing_R1, position_R, tables)


def check_words(bad_words: Sequence[Sequence[int]]) -> None:
    """Refuses more than the tables hold.

    Raises:
        ValueError: with the numbers.
    """
    num_long = sum(len(word) > 1 for word in bad_words)
    longest = max(map(len, bad_words), default=0)
    if num_long > MAX_WORDS or longest > MAX_WORD_TOKENS:
        raise ValueError(
            f"bad_words are {num_long} sequences of several tokens (with and without a space in "
            f"front), the longest of {longest} tokens; there is room for {MAX_WORDS} of "
            f"{MAX_WORD_TOKENS} tokens, and for any number of single tokens"
        )
