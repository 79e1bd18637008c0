"""Bytes of weights that each dense segment reads: the floor under its time.

Counted from the configs alone, so that a stored trace can be judged without loading a model.
Matrices count, norms (under 0.01 %), activations and the embedding's few rows do not.
Segment i of a stack of L layers is `post(i - 1) + pre(i)`; the first has no post, the last has the
head instead of a pre. The drafter's last segment reads a head as well, the target's or its own.
"""

from graphengine import names
from graphengine.config.draft import DraftConfig
from graphengine.config.model import ModelConfig


def segment_bytes(
    target: ModelConfig, draft: DraftConfig | None, itemsize: int, draft_itemsize: int
) -> dict[str, int]:
    """Name of a dense segment -> bytes; a chain's own name stands for the chain as one graph.

    Args:
        itemsize: bytes per weight of the target, 2 for bfloat16.
        draft_itemsize: the same for everything that the drafter reads, the head included.
    """
    head = target.vocab_size * target.hidden_size
    chain = "verify" if draft else "decode"
    found = _stack(chain, target, head)
    found[chain] = sum(found.values())
    found = {name: count * itemsize for name, count in found.items()}
    if draft is not None:
        model = draft.model
        own = _stack("draft", model, draft.num_draft_ids * model.hidden_size)
        whole = sum(own.values())
        # Where there are stages, draft.00 is queued apart from the rest of the chain.
        own["draft"] = whole - own[names.dense_name("draft", 0)]
        fc = model.hidden_size * draft.num_taps * target.hidden_size
        context_kv = 2 * model.num_hidden_layers * model.kv_size * model.hidden_size
        own[names.DRAFT_CONTEXT] = fc + context_kv
        found |= {name: count * draft_itemsize for name, count in own.items()}
        of_drafter = (whole + own[names.DRAFT_CONTEXT]) * draft_itemsize
        found[names.SPECULATE] = found["verify"] + of_drafter
    return found


def _stack(chain: str, model: ModelConfig, head: int) -> dict[str, int]:
    """Parameters of a stack's dense segments."""
    hidden, last = model.hidden_size, model.num_hidden_layers
    pre = hidden * (model.q_size + 2 * model.kv_size)
    post = model.num_layer_parameters - pre
    found = {names.dense_name(chain, 0): pre}
    found |= {names.dense_name(chain, layer): post + pre for layer in range(1, last)}
    return found | {names.dense_name(chain, last): post + head}
