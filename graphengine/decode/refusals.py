"""What an engine does not do for a request, by its settings alone, and what would help."""

from __future__ import annotations

from graphengine.config.engine import EngineConfig
from graphengine.decode.grammar import Matcher
from graphengine.decode.sampling import Sampling


def longer_context(config: EngineConfig, num_positions: int, num_tokens: int) -> str:
    """The end of a sentence: what else helps where a prompt is past the context.

    Args: num_positions: of the target. num_tokens: of the prompt.
    """
    limit = config.max_model_len
    if limit >= num_positions or num_tokens >= num_positions:
        return ""
    if limit == config.speculation_limit and not config.finish_in_plain_decode:
        return " or pass --finish-in-plain-decode"
    is_rest = config.device == "cuda" and config.kv_cache_memory is None
    pool = "--gpu-memory-utilization" if is_rest else "--kv-cache-memory"
    return f", or raise --max-model-len, or where that is not given {pool}"


def check_offered(
    config: EngineConfig, sampling: Sampling, matcher: Matcher | None, *alternatives: int | None
) -> None:
    """Refuses what no verify chain was built for.

    Args: alternatives: the numbers of log-probabilities that are asked for; None: none.
    Raises: ValueError: with the remedy.
    """
    why, remedy = "this engine was built without it", ""
    if config.simulate_acceptance:
        why, remedy = "this engine draws its acceptance", " and without simulate_acceptance"
    if not sampling.is_greedy and not config.sampling:
        raise ValueError(
            f"temperature is {sampling.temperature:g}, but {why}; load it with "
            f"sampling=True{remedy}, or use temperature 0"
        )
    if sampling.adjusts and not config.adjustments:
        raise ValueError(
            "penalties, logit_bias, allowed_token_ids, bad_words or min_tokens are asked for, but "
            f"{why}; load it with adjustments=True{remedy}"
        )
    if matcher is not None and not config.structured_outputs:
        raise ValueError(
            f"a grammar is asked for, but {why}; load it with structured_outputs=True{remedy}"
        )
    most = max((n for n in alternatives if n is not None), default=None)
    offered = config.max_logprobs
    if most is not None and (most > offered or not offered):
        raise ValueError(
            f"logprobs of {most} alternatives are asked for, this engine has "
            f"{offered or 'none'}; load it with max_logprobs={max(most, 1)}{remedy}"
        )
