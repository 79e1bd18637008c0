"""The examination of a pair before anything is loaded: every check, in the order of a start-up.

Why: the complaints about speculative decoding are about acceptance that is lost silently (a theta,
a tap, a slot convention) and about memory that runs out later. Both show in the config files and
the headers of the weights, which take a second to read.
Pure but for `examine`'s reading; whatever a file holds ends as a finding (`findings.guarded`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from graphengine.checkpoints.pairs import NGRAM, NO_DRAFT, verifier_of
from graphengine.config.draft import DraftSpec, NgramConfig
from graphengine.config.draft_length import longest_draft
from graphengine.config.options import Options
from graphengine.doctor.experts import block_findings
from graphengine.doctor.files import ModelFiles, read_model_files
from graphengine.doctor.findings import LEVELS, Finding, guarded, info, one_line
from graphengine.doctor.host import Host, host_findings, read_host, speed_findings
from graphengine.doctor.models import draft_findings, parse_draft, parse_target, target_findings
from graphengine.doctor.pair import pair_findings, plan_findings, resolve_run
from graphengine.startup.memory import MemoryPlan

SCHEMA_VERSION = 1


class Examination(NamedTuple):
    """All findings, in order, and the memory plan if one could be made."""

    target: str
    draft: str | None
    findings: tuple[Finding, ...]
    memory_plan: MemoryPlan | None

    @property
    def num_by_level(self) -> dict[str, int]:
        """How many findings of each level."""
        counts = Counter(finding.level for finding in self.findings)
        return {level: counts[level] for level in LEVELS}

    @property
    def has_errors(self) -> bool:
        """Whether a run would be refused, or the drafter is not this target's."""
        return self.num_by_level["error"] > 0

    def to_json(self) -> dict[str, Any]:
        """Findings with `name`, `value`, `level`, `remedy`; counts; the plan's bytes."""
        return {
            "schema_version": SCHEMA_VERSION,
            "target": self.target,
            "draft": self.draft,
            "findings": [finding._asdict() for finding in self.findings],
            "num_by_level": self.num_by_level,
            "memory_plan": self.memory_plan.to_json() if self.memory_plan else None,
        }


def examine(
    target_name: str | Path,
    draft_name: str | Path | None,
    options: Options,
    host: Host | None = None,
) -> Examination:
    """Reads both models' files and checks them; never raises for what a file holds.

    Args:
        target_name: a drafter that names its target (speculators) may stand here for both.
        draft_name: "none" decodes plainly and "ngram" has no files, whatever the target's say.
        host: default: the current machine.
    """
    target = read_model_files(target_name, with_tokenizer=True)
    draft: ModelFiles | NgramConfig | None = None
    if draft_name == NGRAM:
        draft = NgramConfig()
    elif draft_name not in (None, NO_DRAFT):
        draft = read_model_files(str(draft_name), with_tokenizer=False)
    found: list[Finding] = []
    if target.directory is not None and "speculators_model_type" in (target.config or {}):
        alone, _ = parse_draft(target)
        if alone is not None and alone.verifier is not None:
            text = one_line(f"{target.name} is a drafter of {alone.verifier}")
            found.append(info("draft.verifier", text))
            draft = None if draft_name == NO_DRAFT else draft or target
            name = verifier_of(target.directory, alone.verifier)
            target = read_model_files(name, with_tokenizer=True)
    findings, plan = diagnose(target, draft, options, host or read_host())
    name = draft.name if isinstance(draft, ModelFiles) else draft and NGRAM
    return Examination(target.name, name, (*found, *findings), plan)


def diagnose(
    target_files: ModelFiles,
    drafter: ModelFiles | NgramConfig | None,
    options: Options,
    host: Host,
) -> tuple[list[Finding], MemoryPlan | None]:
    """Every finding about these files on this machine. Pure."""
    target, found = parse_target(target_files)
    if target is not None:
        found += guarded("target", target_findings(target_files, target))
    draft: DraftSpec | None = None
    draft_names: Collection[str] = ()
    plan = None
    if isinstance(drafter, NgramConfig):
        draft = drafter
    elif drafter is not None:
        draft_names = drafter.headers or ()
        draft, parsed = parse_draft(drafter)
        found += parsed
        if draft is not None:
            found += guarded("draft", draft_findings(drafter, draft))
            if target is not None:
                found += guarded("pair", pair_findings(target_files, target, drafter, draft))
    if target is not None and target.moe is not None:
        told = block_findings(target, target.moe, draft, options.simulate_acceptance)
        found += guarded("experts", told)
    found += host_findings(host)
    if target is None or (drafter is not None and draft is None):
        return found, None

    def run() -> Iterator[Finding]:
        nonlocal plan
        config, resolved = resolve_run(options, target, draft)
        yield from resolved
        if config is not None:
            memory = host.memory if config.device == "cuda" else None
            longest = longest_draft(config, draft) if draft else None
            plan, planned = plan_findings(config, options, target, longest, memory, draft_names)
            yield from planned
            yield from speed_findings(host, config, target, draft)

    found += guarded("run", run())
    return found, plan
