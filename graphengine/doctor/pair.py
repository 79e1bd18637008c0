"""Whether two models belong together, and whether they fit the machine.

Pure. A wrong drafter does not make the output wrong, it makes it slow: acceptance falls to nothing
without any error. So every difference is named here before anything is loaded: an error where the
engine refuses, a warning where a difference is legal but is what a broken export looks like.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

from graphengine.config.draft import DraftConfig, DraftSpec
from graphengine.config.engine import EngineConfig
from graphengine.config.model import ModelConfig
from graphengine.config.options import Options
from graphengine.doctor.files import ModelFiles
from graphengine.doctor.findings import Finding, error, info, ok, one_line, warning
from graphengine.startup.memory import DeviceMemory, MemoryPlan, plan_memory
from graphengine.startup.options import resolve_options

_OTHER = "pass the drafter of this target"
# What transformers fills in where a config has no theta.
_FILLED_IN_THETA = 10000.0


def pair_findings(
    target_files: ModelFiles, target: ModelConfig, draft_files: ModelFiles, draft: DraftConfig
) -> Iterator[Finding]:
    """Everything in which a drafter depends on its target; errors are what a start refuses
    (`DraftConfig.check_target`)."""
    depth, taps = target.num_hidden_layers, draft.target_layer_ids
    for name, own, theirs in (
        ("pair.num_layers", draft.num_target_layers, depth),
        ("pair.hidden_size", draft.tap_size, target.hidden_size),
        ("pair.vocabulary", draft.model.vocab_size, target.vocab_size),
    ):
        if own is None:
            yield info(name, f"the drafter does not say; the target has {theirs}")
        elif own != theirs:
            yield error(name, f"the drafter expects {own}, the target has {theirs}", _OTHER)
        else:
            yield ok(name, f"{own} in both")
    if max(taps) >= depth:
        yield error("pair.taps", f"layer {max(taps)} of a target with {depth} layers", _OTHER)
    mask, num_rows = draft.mask_token_id, target.vocab_size
    if mask >= num_rows:
        yield error("pair.mask_token", f"{mask} lies outside {num_rows} rows", _OTHER)
    else:
        used, tokenizer = "", target_files.tokenizer
        if tokenizer is not None:
            is_token = mask < len(tokenizer)
            used = ", a token of the tokenizer" if is_token else ", behind the tokenizer"
        yield ok("pair.mask_token", f"{mask} of {num_rows} rows{used}")
    yield _vocabulary(draft_files, target, draft)
    yield from _rope(target, draft)
    if draft.verifier is not None:  # files of the speculators format name their target
        yield _verifier(target_files, draft.verifier)


def _vocabulary(files: ModelFiles, target: ModelConfig, draft: DraftConfig) -> Finding:
    """A reduced draft vocabulary needs the map back to the target's ids."""
    name, size = "pair.draft_vocabulary", draft.draft_vocab_size
    if size is None:
        return ok(name, "the target's; nothing to map")
    value = f"{size} of {target.vocab_size} tokens, mapped by d2t"
    if size > target.vocab_size:
        return error(name, value, _OTHER)
    if files.headers is not None and "d2t" not in files.headers:
        return error(name, f"{value}, which is missing", "fetch the drafter's weights again")
    return ok(name, value)


def _rope(target: ModelConfig, draft: DraftConfig) -> Iterator[Finding]:
    ours, theirs = draft.model.rope, target.rope
    if ours.theta == theirs.theta:
        yield ok("pair.theta", f"{ours.theta:.10g} in both")
    else:
        remedy = "right only if the drafter was trained so: compare with the published file"
        if ours.theta == _FILLED_IN_THETA:
            remedy = (
                "10000 is what transformers fills in when a config lost its theta; acceptance "
                "collapses silently if so: compare with the published drafter"
            )
        value = f"drafter {ours.theta:.10g}, target {theirs.theta:.10g}"
        yield warning("pair.theta", value, remedy)
    turned = {"theta": theirs.theta, "partial_rotary_factor": theirs.partial_rotary_factor}
    if replace(ours, **turned) == theirs:
        yield ok("pair.rope_scaling", "the same in both")
    else:
        told = [f"{r.kind} x {r.factor:g} (amplitude {r.amplitude:g})" for r in (ours, theirs)]
        remedy = "each model uses its own; right only if the drafter was trained so"
        yield warning("pair.rope_scaling", f"drafter {told[0]}, target {told[1]}", remedy)
    dims = [model.rope.rotary_dim(model.head_dim) for model in (draft.model, target)]
    text = f"{dims[0]} in both" if dims[0] == dims[1] else f"drafter {dims[0]}, target {dims[1]}"
    yield ok("pair.rotary_dims", text)


def _verifier(files: ModelFiles, verifier: str) -> Finding:
    if Path(verifier).name == Path(files.name).name:
        return ok("pair.verifier", one_line(verifier))
    value = one_line(f"the drafter names {verifier}, the target is {files.name}")
    remedy = "right if it is the same model under another name; the one you pass is used"
    return warning("pair.verifier", value, remedy)


def resolve_run(
    options: Options, target: ModelConfig, draft: DraftSpec | None
) -> tuple[EngineConfig | None, list[Finding]]:
    """How a run with these options would be set up, or why it is refused."""
    try:
        config = resolve_options(options, target, draft)
    except ValueError as problem:
        return None, [error("run.options", one_line(problem), "see the message")]
    value = (
        f"{config.device} {config.dtype}, graph mode {config.graph_mode}, attention "
        f"{config.attention_backend}, {'compiled' if config.compile else 'not compiled'}, "
        f"buckets {','.join(map(str, config.buckets))}"
    )
    return config, [ok("run.options", value)]


def plan_findings(
    config: EngineConfig,
    options: Options,
    target: ModelConfig,
    draft: DraftSpec | None,
    memory: DeviceMemory | None,
    draft_names: Collection[str] = (),
) -> tuple[MemoryPlan | None, list[Finding]]:
    """Context cap and memory plan."""
    models = (target, *(draft.models if draft else ()))
    window = min(model.max_position_embeddings for model in models)
    rows = draft.num_verify_rows if draft else 0
    value = f"{config.max_model_len} tokens a request; the models allow {window - rows}"
    if draft is not None:
        value += f" with drafting ({window} positions less a block of {rows}), "
        value += f"{target.max_position_embeddings} without"
    found = [ok("run.context", value)]
    name, chosen = "run.memory", options.max_model_len is not None
    try:
        plan = plan_memory(
            config, target, draft, memory, length_is_explicit=chosen, draft_names=draft_names
        )
    except ValueError as problem:
        remedy = "use a smaller --max-model-len or --bucket, or a larger GPU"
        return None, [*found, error(name, one_line(problem), remedy)]
    found += [ok(name, line) for line in plan.lines()]
    if plan.max_model_len < config.max_model_len:
        value = f"K/V for {plan.max_model_len} of {config.max_model_len} tokens a request is left"
        remedy = "raise --gpu-memory-utilization or --kv-cache-memory, or accept the limit"
        found.append(warning(name, value, remedy))
    largest, fitting = max(config.buckets), plan.num_full_requests
    if fitting < largest:
        value = f"{fitting:.1f} requests of full length for a bucket of {largest}"
        found.append(info(name, value, "long requests wait for pages, in order"))
    return plan, found
