"""Masks of the rows of a block whose request has a grammar, and tokens that it forces.

    forced    tokens that a grammar leaves no choice about take the place of the drafter's
    masks     the drafts come to the host as the verify begins; while its layers run, host threads
              work out what the grammar leaves behind each of them
    end       a graph of its own: masked logits, then what any other end does

A step waits for the host in one place, behind the target's last layer, and the next one with such a
row is launched when this one's tokens are known: forced tokens and masks follow from them.

Invariant: row i's mask is that of plain decoding whenever drafts 1 .. i are accepted. A draft that
the grammar rules out ends the block in front of it, so later rows' masks are nobody's.

Legend: B requests, R prompts, G rows of a block, T = B * G, V vocabulary, W = ceil(V / 32) words.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graphengine.decode.buffers import Arena, GrammarBuffers, Launched
from graphengine.decode.grammar import fill_masks
from graphengine.decode.request import Request
from graphengine.decode.rows import Results
from graphengine.kernels.mask_logits import mask_logits_

NOTHING = -1  # no token is forced


def take_grammar(arena: Arena, num_requests: int, block: int, vocab_size: int) -> GrammarBuffers:
    """Memory for that many requests; none of them has a grammar."""
    rows, words = num_requests * block, (vocab_size + 31) // 32
    host, i32 = arena.take_on_host, torch.int32
    return GrammarBuffers(
        is_on_B=arena.take("has_grammar", num_requests, dtype=i32),
        forced_BG=arena.take("forced_by_grammar", num_requests, block),
        mask_TW=arena.take("mask", rows, words, dtype=i32),
        words_BG=host("draft_words", num_requests, block),
        host_forced_BG=host("host_forced_by_grammar", num_requests, block),
        host_mask_TW=host("host_mask", rows, words, dtype=i32),
        launched=Launched(),
    )


def begin_(buffers: GrammarBuffers, requests: Sequence[Request | None], step: int) -> None:
    """In front of a step: what the grammars of its rows force. Mutates: buffers. No earlier step of
    these requests is in flight."""
    held = enumerate(requests)
    matchers = {row: r.matcher for row, r in held if r is not None and r.matcher is not None}
    buffers.launched.matchers, buffers.launched.step = matchers, step
    host_BG, block = buffers.host_forced_BG, buffers.forced_BG.shape[1]
    if block == 1:
        return
    forced = {row: matcher.forced(block - 1) for row, matcher in matchers.items()}
    # Most steps force nothing, and neither did the one before, in whichever bucket it ran.
    if any(forced.values()) or bool((host_BG.numpy() != NOTHING).any()):
        host_BG.fill_(NOTHING)
        for row, ids in forced.items():
            host_BG[row, 1 : 1 + len(ids)] = torch.tensor(ids, dtype=torch.int64)
        buffers.forced_BG.copy_(host_BG, non_blocking=True)


def mask_rows_(buffers: GrammarBuffers) -> None:
    """While the verify runs: waits for its drafts, works out the masks and queues their copy behind
    it. Mutates: buffers."""
    matchers, block = buffers.launched.matchers, buffers.forced_BG.shape[1]
    if not matchers:
        return
    drafts: list[list[int]] = [[]] * len(buffers.words_BG)
    if block > 1:
        words = Results.numbered(buffers.words_BG[: max(matchers) + 1], buffers.launched.step)
        words.wait()
        drafts = [_tokens(row[1:]) for row in words.values()]
    host_TW = buffers.host_mask_TW
    fill_masks([(row * block, m, drafts[row]) for row, m in matchers.items()], host_TW)
    for row in matchers:
        own = slice(row * block, (row + 1) * block)
        buffers.mask_TW[own].copy_(host_TW[own], non_blocking=True)


def _tokens(drafts: list[int]) -> list[int]:
    """Drafts up to the first that is no token, which nothing can accept."""
    return next((drafts[:i] for i, token in enumerate(drafts) if token < 0), drafts)


def mask_first(logits_RV: Tensor, requests: Sequence[Request]) -> Tensor:
    """The logits behind prompts, with what their grammars rule out at -inf; a copy."""
    (R, V), logits_RV = logits_RV.shape, logits_RV.clone()
    mask_RW = torch.zeros(R, (V + 31) // 32, dtype=torch.int32)
    matchers = [(row, r.matcher) for row, r in enumerate(requests) if r.matcher is not None]
    fill_masks([(row, matcher, []) for row, matcher in matchers], mask_RW)
    is_on_R = torch.tensor([r.matcher is not None for r in requests], dtype=torch.int32)
    device = logits_RV.device
    mask_logits_(logits_RV, mask_RW.to(device), is_on_R.to(device))
    return logits_RV
