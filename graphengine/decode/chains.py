"""A step's chains over a bucket's buffers: propose, verify with its ends, context; and a prefill's.

Legend: T rows, R prompts, N / H query heads / head dim, V vocabulary.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from graphengine.capture.steps import Step
from graphengine.decode.attention import LayerAttentions
from graphengine.decode.buffers import StepBuffers
from graphengine.decode.ends import end_names, make_end, publish_step
from graphengine.decode.proposer import Attentions, Pair
from graphengine.decode.recurrence import VerifyRecurrence, prefill_recurrence
from graphengine.decode.segments import Segments, row_logits_segment
from graphengine.decode.stack import Rows, last_step, target_chain
from graphengine.decode.stages import Chains
from graphengine.kernels.gated_delta_prefill import Pieces


def step_chains(
    pair: Pair,
    buffers: StepBuffers,
    attention: LayerAttentions,
    draft_attentions: Attentions,
    segments: Segments,
) -> Chains:
    """Propose, target forward over the block, acceptance and the next block's inputs, context;
    without a drafter, with one row a request, plain decoding."""
    proposer = pair.proposer
    chain = "verify" if proposer.num_draft_tokens else "decode"
    tap_ = proposer.tap(buffers)
    rows = Rows(buffers.draft_ids_BG.view(-1), buffers.positions_T, buffers.slots_T)
    recurrence, states = None, pair.target.states
    if states is not None and buffers.recurrent is not None:
        recurrence = VerifyRecurrence(states, buffers.recurrent)
    verify = target_chain(
        chain, pair.target, rows, attention, buffers.attn_TNH, segments, tap_, recurrence
    )
    grammar, drafts = buffers.grammar, proposer.num_draft_tokens
    return Chains(
        propose=proposer.propose(buffers, draft_attentions, segments),
        verify=verify,
        ends={
            name: make_end(name, chain, pair, buffers, tap_, segments)
            for name in end_names(pair.config)
        },
        context=proposer.context(buffers, segments),
        publish=(publish_step(buffers, grammar, proposer),) if grammar and drafts else (),
    )


def prefill_chains(
    pair: Pair,
    rows: Rows,
    logit_rows_R: Tensor,
    attention: LayerAttentions,
    attn_TNH: Tensor,
    pieces: Pieces | None = None,
) -> tuple[list[Step], list[Step]]:
    """The target over a prompt's rows, which leaves (logits_RV,) of the rows with these indices,
    and the drafter's context of them; uncompiled.

    Args: pieces: of a target with recurrent layers.
    """
    tap_, context = pair.proposer.prefill(rows)
    is_tapped = pair.target.config.num_hidden_layers - 1 in pair.proposer.taps
    end = partial(row_logits_segment, logit_rows_R, is_tapped)
    recurrence = prefill_recurrence(pair.target.states, pieces, len(attn_TNH))
    steps = target_chain(
        "prefill", pair.target, rows, attention, attn_TNH, Segments(), tap_, recurrence
    )
    return [*steps, last_step("prefill", pair.target, tap_, end)], context
