"""Bytes of weights that each dense segment reads: the floor under its time.

Counted from what the layers declare, so that a stored trace can be judged without loading a model.
Matrices count, norms (under 0.01 %), activations and the embedding's few rows do not. Of a mixture
of experts those count that the rows of a step are expected to choose (`MoeConfig.num_distinct`).
Segment i of a stack of L layers is `post(i - 1) + pre(i)`; the first has no post, the last has the
head instead of a pre. The drafter's last segment reads a head as well, the target's or its own.
"""

from graphengine import names
from graphengine.config.draft import DraftConfig, DraftSpec
from graphengine.config.model import ModelConfig
from graphengine.config.options import DraftQuantization
from graphengine.drafters.dflash import MAX_QUANTIZED_ROWS
from graphengine.models import decoder, dflash
from graphengine.models.decoder import LayerKind
from graphengine.models.weight import Weight, num_matrix_elements


def segment_bytes(
    target: ModelConfig,
    draft: DraftSpec | None,
    itemsize: int,
    draft_itemsize: int,
    num_rows: int | None = None,
    context_itemsize: int | None = None,
) -> dict[str, int]:
    """Name of a dense segment -> bytes; a chain's own name stands for the chain as one graph.

    Args:
        itemsize: bytes per weight of the target, 2 for bfloat16; a run in another dtype has widened
            what files hold in MXFP4.
        draft_itemsize: the same for everything that the drafter reads, the head included.
        num_rows: of the target's forward; None is one request's.
        context_itemsize: of the drafter's context, which has the target's rows; None is the rest's.
    """
    if num_rows is None:
        num_rows = draft.num_verify_rows if draft else 1
    target = target if itemsize == 2 else target.widened()
    chain = "verify" if draft else "decode"
    found = _stack(chain, target, decoder.outer_weights(target)["lm_head_VD"], num_rows)
    found[chain] = sum(found.values())
    found = {name: count * itemsize for name, count in found.items()}
    if draft is not None and not isinstance(draft, DraftConfig):
        found[names.SPECULATE] = found[chain]
    elif draft is not None:
        # A head that is the target's is as large as one of its own.
        head = dflash.vocabulary_weights(draft, lambda name: True)["lm_head_VD"]
        own = _stack("draft", draft.model, head, draft.block_size)
        whole = sum(own.values())
        # Where there are stages, draft.00 is queued apart from the rest of the chain.
        own["draft"] = whole - own[names.dense_name("draft", 0)]
        layers = decoder.layer_weights(draft.model)
        context = [dflash.outer_weights(draft)["fc_DC"], *map(dflash.context_parts, layers)]
        of_context = sum(map(num_matrix_elements, context)) * (context_itemsize or draft_itemsize)
        found |= {name: count * draft_itemsize for name, count in own.items()}
        found[names.DRAFT_CONTEXT] = of_context
        found[names.SPECULATE] = found["verify"] + whole * draft_itemsize + of_context
    return found


def bucket_bytes(
    target: ModelConfig,
    draft: DraftSpec | None,
    itemsize: int,
    quantization: DraftQuantization,
    num_requests: int,
) -> dict[str, int]:
    """`segment_bytes` of a step of a bucket; its drafter's weights are a byte each where it runs
    the rounded ones. An anchor-first drafter's context has a row a request more than its forward.

    Args: draft: as the bucket runs it.
    """
    if draft is None:
        return segment_bytes(target, None, itemsize, itemsize, num_requests)
    most, num_rows = MAX_QUANTIZED_ROWS[quantization], num_requests * draft.num_verify_rows
    of_forward, of_context = (
        1 if rows <= most else itemsize for rows in (num_requests * draft.block_size, num_rows)
    )
    return segment_bytes(target, draft, itemsize, of_forward, num_rows, of_context)


def _stack(
    chain: str, model: ModelConfig, head: tuple[Weight, ...], num_rows: int
) -> dict[str, int]:
    """Weights of a stack's dense segments."""
    pre, post = [], [0]
    kinds = decoder.layer_kinds(model)
    sizes = {kind: _layer(model, kind, num_rows) for kind in set(kinds)}
    for kind in kinds:
        pre.append(sizes[kind][0])
        post.append(sizes[kind][1])
    pre.append(num_matrix_elements(head))
    both = zip(pre, post, strict=True)
    return {names.dense_name(chain, i): sum(size) for i, size in enumerate(both)}


def _layer(model: ModelConfig, kind: LayerKind, num_rows: int) -> tuple[int, int]:
    """Weights of a layer before and after its mixer's own step."""
    of_mixer, of_ffn = kind.mixer.weights(model), kind.ffn.weights(model)
    after = [parts for field, parts in of_mixer.items() if field in kind.mixer.output_fields]
    output = sum(map(num_matrix_elements, after))
    before = sum(map(num_matrix_elements, of_mixer.values())) - output
    return before, output + kind.ffn.num_read_elements(model, of_ffn, num_rows)
