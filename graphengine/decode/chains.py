"""A step's chains over a bucket's buffers: propose, verify with its ends, context.

Legend: B requests, G block length.
"""

from __future__ import annotations

from collections.abc import Mapping

from graphengine.config.draft import AttentionRule
from graphengine.config.engine import EngineConfig
from graphengine.decode.attention import Attention
from graphengine.decode.buffers import StepBuffers
from graphengine.decode.ends import end_names, make_end
from graphengine.decode.proposer import Proposer
from graphengine.decode.segments import Segments
from graphengine.decode.simulate import Simulation
from graphengine.decode.stack import Rows, Target, target_chain
from graphengine.decode.stages import Chains


def step_chains(
    config: EngineConfig,
    target: Target,
    proposer: Proposer,
    buffers: StepBuffers,
    attention: Attention,
    draft_attention: Mapping[AttentionRule, Attention],
    segments: Segments,
    simulation: Simulation | None = None,
) -> Chains:
    """Propose, target forward over the block, acceptance and the next block's inputs, context.

    Without a drafter the same chains with one row per request are plain decoding.
    """
    chain = "verify" if proposer.num_draft_tokens else "decode"
    tap_ = proposer.tap(buffers)
    rows = Rows(buffers.draft_ids_BG.view(-1), buffers.positions_T, buffers.slots_T)
    *verify, _ = target_chain(
        chain, target, rows, attention, buffers.attn_TNH, segments, tap_, segments.last
    )
    mask, size = proposer.mask_token_id, config.page_size
    return Chains(
        propose=proposer.propose(buffers, draft_attention, segments),
        verify=verify,
        ends={
            name: make_end(name, chain, target, buffers, tap_, mask, size, segments, simulation)
            for name in end_names(config)
        },
        context=proposer.context(buffers, segments),
    )
