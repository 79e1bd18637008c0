"""What stands behind the last layer of a verify: a named list of steps, chosen per launch.

    greedy       last segment with the head's argmax;  accept
    sampled      last segment with logits;             draw, accept
    adjusted     last segment with logits;             adjust, draw, count, accept
    scored       last segment with logits;             adjust and count where that is built; draw,
                                                       score, accept
    constrained  last segment with logits;             the host's masks, adjust, mask, draw, count,
                                                       accept; with scores `constrained_scored`
    simulated    last segment with the head's argmax;  counts drawn ahead, accept (measuring alone)

Every end closes the last dense segment and acceptance, so one step's other parts are the same
whatever its end, and in piecewise mode they are the same graphs. A request has the same tokens
under every end that knows what it asks for: the head's GEMM is the same, to the bit, and so are
logits that nobody adjusts. Of the ends that know what a batch asks for the simplest is launched.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from graphengine import names
from graphengine.capture.steps import Carry, Dense, Host, Step
from graphengine.config.engine import EngineConfig
from graphengine.decode.buffers import GrammarBuffers, StepBuffers
from graphengine.decode.logprobs import score_rows
from graphengine.decode.masks import mask_rows_
from graphengine.decode.proposer import Pair, Proposer
from graphengine.decode.recurrence import advance_, answer_spacing
from graphengine.decode.request import Request
from graphengine.decode.sampling import sample_rows
from graphengine.decode.segments import Segments
from graphengine.decode.stack import Tap, last_step
from graphengine.kernels.accept import accept_and_advance_
from graphengine.kernels.adjust_logits import adjust_logits, advance_tables_
from graphengine.kernels.mask_logits import mask_logits_
from graphengine.kernels.publish_drafts import publish_drafts_

GREEDY, SAMPLED, ADJUSTED, SCORED = "greedy", "sampled", "adjusted", "scored"
SIMULATED = "simulated"
# The two are one but for scores, which cost a step more than the masks do.
CONSTRAINED, CONSTRAINED_SCORED = "constrained", "constrained_scored"
CONSTRAINED_ENDS = frozenset((CONSTRAINED, CONSTRAINED_SCORED))


def end_names(config: EngineConfig) -> tuple[str, ...]:
    """The ends that an engine may choose from, each after those that know less; the first is for
    batches that ask for nothing."""
    if config.simulate_acceptance is not None:
        return (SIMULATED,)
    built = {
        SAMPLED: config.sampling,
        ADJUSTED: config.adjustments,
        SCORED: config.max_logprobs,
        CONSTRAINED: config.structured_outputs,
        CONSTRAINED_SCORED: config.structured_outputs and config.max_logprobs,
    }
    return (GREEDY, *(name for name, is_built in built.items() if is_built))


def choose(ends: Iterable[str], running: Iterable[Request]) -> str:
    """The end for these requests."""
    running = list(running)
    tells = any(request.logprobs is not None for request in running)
    if any(request.matcher is not None for request in running):
        return CONSTRAINED_SCORED if tells else CONSTRAINED
    if tells:
        return SCORED
    if any(request.sampling.adjusts for request in running):
        return ADJUSTED
    draws = any(not request.sampling.is_greedy for request in running)
    return SAMPLED if draws else next(iter(ends))


def make_end(
    name: str, chain: str, pair: Pair, buffers: StepBuffers, tap_: Tap, segments: Segments
) -> list[Step]:
    """The steps of one end, behind the last attention of `chain`."""
    is_constrained = name in CONSTRAINED_ENDS
    takes_logits = is_constrained or name in (SAMPLED, ADJUSTED, SCORED)
    tables = buffers.tables if is_constrained or name in (ADJUSTED, SCORED) else None
    scores = buffers.scores if name in (SCORED, CONSTRAINED_SCORED) else None
    grammar = buffers.grammar if is_constrained else None

    def draw(logits_TV: Tensor) -> Tensor:
        # A draft is kept while it equals the draw at its row, so every emitted token is a draw of
        # the target given the tokens before it: the drafter's proposal is a point mass, and this is
        # rejection sampling for that case. Row i's adjustment counts the drafts in front of it,
        # which are those tokens.
        positions_T, own_TV = buffers.positions_T, logits_TV
        if tables is not None:
            own_TV = adjust_logits(logits_TV, buffers.draft_ids_BG, positions_T, tables)
        if grammar is not None:
            if tables is None and scores is not None:  # scores are of what the model gave
                own_TV = logits_TV.clone()
            mask_logits_(own_TV, grammar.mask_TW, grammar.is_on_B)
        ids_T = sample_rows(own_TV, positions_T, buffers.controls)
        if tables is not None:
            drafts_BG = buffers.draft_ids_BG
            advance_tables_(drafts_BG, ids_T.view_as(drafts_BG), buffers.start_B, tables)
        if scores is not None:
            num_alternatives = scores.top.shape[-1]
            scores.write_(buffers.step_B, score_rows(logits_TV, ids_T, num_alternatives))
        return ids_T

    def accept(carry: Carry) -> Carry:
        found = draw(carry[0]) if takes_logits else carry[0]
        target_ids_BG = found.view_as(buffers.draft_ids_BG)
        if name == SIMULATED:
            segments.simulate(pair.simulation, buffers.draft_ids_BG, target_ids_BG)
        accept_and_advance_(
            buffers.draft_ids_BG,
            target_ids_BG,
            buffers.start_B,
            buffers.page_table_BW,
            buffers.block_ids_BG,
            buffers.positions_T,
            buffers.slots_T,
            buffers.context_positions_T,
            buffers.context_slots_T,
            buffers.step_B,
            buffers.results_BX,
            pair.proposer.mask_token_id,
            pair.config.page_size,
        )
        return ()

    def advance(carry: Carry) -> Carry:
        states, own = pair.target.states, buffers.recurrent
        assert states is not None and own is not None
        first_B = buffers.context_positions_T.view_as(buffers.block_ids_BG)[:, 0]
        spacing = answer_spacing(pair.config.page_size) if pair.config.shares_prefixes else 0
        advance_(states, own, first_B, buffers.start_B, spacing)
        return ()

    last = segments.logits if takes_logits else segments.last
    steps: list[Step] = [last_step(chain, pair.target, tap_, last), Dense(names.ACCEPT, accept)]
    if grammar is not None:

        def work_out_masks(carry: Carry) -> Carry:
            mask_rows_(grammar)
            return carry

        steps.insert(1, Host(names.GRAMMAR, work_out_masks))
    return steps if pair.target.states is None else [*steps, Dense(names.ADVANCE, advance)]


def publish_step(buffers: StepBuffers, grammar: GrammarBuffers, proposer: Proposer) -> Step:
    """The step behind the drafts: tokens that grammars force replace them, the host is told all."""

    def publish(carry: Carry) -> Carry:
        draft_ids_BG, step_B = buffers.draft_ids_BG, buffers.step_B
        publish_drafts_(draft_ids_BG, grammar.forced_BG, grammar.is_on_B, step_B, grammar.words_BG)
        proposer.published_(buffers)
        return carry

    return Dense(names.PUBLISH, publish)
