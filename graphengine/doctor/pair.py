"""Whether two models belong together, and whether they fit the machine.

Pure. A wrong drafter does not make the output wrong, it makes it slow: acceptance falls to nothing
without any error. So every difference is named here before anything is loaded: an error where the
engine refuses, a warning where a difference is legal but is what a broken export looks like.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

from graphengine.config.draft import DraftConfig
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
    target_files: ModelFiles,
    target: ModelConfig,
    draft_files: ModelFiles,
    draft: DraftConfig,
) -> Iterator[Finding]:
    """Everything in which a drafter depends on its target."""
    depth, taps = target.num_hidden_layers, draft.target_layer_ids
    errors = 0
    for name, own, theirs in (
        ("pair.num_layers", draft.num_target_layers, depth),
        ("pair.hidden_size", draft.tap_size, target.hidden_size),
        ("pair.vocabulary", draft.model.vocab_size, target.vocab_size),
    ):
        if own is None:
            yield info(name, f"the drafter does not say; the target has {theirs}")
        elif own != theirs:
            errors += 1
            yield error(name, f"the drafter expects {own}, the target has {theirs}", _OTHER)
        else:
            yield ok(name, f"{own} in both")
    if max(taps) >= depth:
        errors += 1
        yield error("pair.taps", f"layer {max(taps)} of a target with {depth} layers", _OTHER)
    if not errors:
        try:
            draft.check_target(target, draft_files.source)
        except ValueError as problem:
            if draft.mask_token_id < target.vocab_size:
                yield error("pair", one_line(problem), _OTHER)
    yield _mask_token(target_files, target, draft)
    yield from _vocabulary(draft_files, target, draft)
    yield from _rope(target, draft)
    yield from _verifier(target_files, draft)


def _mask_token(files: ModelFiles, target: ModelConfig, draft: DraftConfig) -> Finding:
    name, mask = "pair.mask_token", draft.mask_token_id
    if mask >= target.vocab_size:
        return error(name, f"{mask} lies outside {target.vocab_size} rows", _OTHER)
    tokenizer = files.tokenizer
    if tokenizer is None:
        return ok(name, f"{mask} of {target.vocab_size} rows")
    used = "a token of the tokenizer" if mask < tokenizer.num_tokens else "behind the tokenizer"
    return ok(name, f"{mask} of {target.vocab_size} rows, {used}")


def _vocabulary(files: ModelFiles, target: ModelConfig, draft: DraftConfig) -> Iterator[Finding]:
    """A reduced draft vocabulary needs the map back to the target's ids."""
    name, size = "pair.draft_vocabulary", draft.draft_vocab_size
    if size is None:
        yield ok(name, "the target's; nothing to map")
        return
    value = f"{size} of {target.vocab_size} tokens, mapped by d2t"
    if size > target.vocab_size:
        yield error(name, value, _OTHER)
    elif files.headers is not None and "d2t" not in files.headers:
        yield error(name, f"{value}, which is missing", "fetch the drafter's weights again")
    else:
        yield ok(name, value)


def _rope(target: ModelConfig, draft: DraftConfig) -> Iterator[Finding]:
    ours, theirs = draft.model.rope, target.rope
    if ours.theta == theirs.theta:
        yield ok("pair.theta", f"{ours.theta:.10g} in both")
    else:
        value = f"drafter {ours.theta:.10g}, target {theirs.theta:.10g}"
        if ours.theta == _FILLED_IN_THETA:
            remedy = (
                "10000 is what transformers fills in when a config lost its theta; acceptance "
                "collapses silently if so: compare with the published drafter"
            )
        else:
            remedy = "right only if the drafter was trained so: compare with the published file"
        yield warning("pair.theta", value, remedy)
    if replace(ours, theta=theirs.theta) == theirs:
        yield ok("pair.rope_scaling", "the same in both")
    else:
        yield warning(
            "pair.rope_scaling",
            f"drafter {ours.kind} x {ours.factor:g} (amplitude {ours.amplitude:g}), target "
            f"{theirs.kind} x {theirs.factor:g} (amplitude {theirs.amplitude:g})",
            "each model uses its own; right only if the drafter was trained so",
        )
    dims = draft.model.head_dim, target.head_dim
    text = f"{dims[0]} in both" if dims[0] == dims[1] else f"drafter {dims[0]}, target {dims[1]}"
    yield ok("pair.rotary_dims", text)


def _verifier(files: ModelFiles, draft: DraftConfig) -> Iterator[Finding]:
    """Files of the speculators format name their target."""
    if draft.verifier is None:
        return
    theirs, ours = Path(draft.verifier).name, Path(files.name).name
    if theirs == ours:
        yield ok("pair.verifier", one_line(draft.verifier))
    else:
        yield warning(
            "pair.verifier",
            one_line(f"the drafter names {draft.verifier}, the target is {files.name}"),
            "right if it is the same model under another name; the one you pass is used",
        )


def resolve_run(
    options: Options, target: ModelConfig, draft: DraftConfig | None
) -> tuple[EngineConfig | None, list[Finding]]:
    """How a run with these options would be set up, or why it is refused."""
    try:
        config = resolve_options(options, target, draft)
    except ValueError as problem:
        return None, [error("run.options", one_line(problem), "see the message")]
    return config, [
        ok(
            "run.options",
            f"{config.device} {config.dtype}, graph mode {config.graph_mode}, attention "
            f"{config.attention_backend}, {'compiled' if config.compile else 'not compiled'}, "
            f"buckets {','.join(map(str, config.buckets))}",
        )
    ]


def plan_findings(
    config: EngineConfig,
    options: Options,
    target: ModelConfig,
    draft: DraftConfig | None,
    memory: DeviceMemory | None,
    draft_names: Collection[str] = (),
) -> tuple[MemoryPlan | None, list[Finding]]:
    """Context cap and memory plan."""
    models = [target] + ([draft.model] if draft else [])
    window = min(model.max_position_embeddings for model in models)
    rows = draft.num_verify_rows if draft else 0
    value = f"{config.max_model_len} tokens a request; the models allow {window - rows}"
    if draft is not None:
        value += f" with drafting ({window} positions less a block of {rows}), {window} without"
    found = [ok("run.context", value)]
    try:
        plan = plan_memory(
            config,
            target,
            draft,
            memory,
            length_is_explicit=options.max_model_len is not None,
            draft_names=draft_names,
        )
    except ValueError as problem:
        remedy = "use a smaller --max-model-len or --bucket, or a larger GPU"
        return None, [*found, error("run.memory", one_line(problem), remedy)]
    for line in plan.lines():
        found.append(ok("run.memory", line))
    if plan.max_model_len < config.max_model_len:
        found.append(
            warning(
                "run.memory",
                f"K/V for {plan.max_model_len} of {config.max_model_len} tokens a request is left",
                "raise --gpu-memory-utilization or --kv-cache-memory, or accept the limit",
            )
        )
    largest = max(config.buckets)
    if plan.num_full_requests < largest:
        found.append(
            info(
                "run.memory",
                f"{plan.num_full_requests:.1f} requests of full length for a bucket of {largest}",
                "long requests wait for pages, in order",
            )
        )
    return plan, found
