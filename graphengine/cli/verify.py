"""`graphengine verify`: the options, the table and the verdict.

What it does is in the room verify: check.py judges, run.py runs, two_sample.py compares draws,
report.py shows. stdout carries the verdict (or one JSON object), tables go to stderr.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from click.core import ParameterSource

from graphengine.cli import options as shared
from graphengine.config.declaration import declarations, made
from graphengine.config.options import Options, SamplingParams, without_drafter
from graphengine.prompts import Turn, read_prompt_file

if TYPE_CHECKING:
    from rich.console import Console

    from graphengine.api import Engine
    from graphengine.checkpoints.tokenizer import Tokenizer
    from graphengine.verify.check import Limits, Mix
    from graphengine.verify.option_cases import OptionCase
    from graphengine.verify.run import CellResult, Draws, Mode

PROMPTS = Path(__file__).parents[1] / "assets" / "verify_prompts.jsonl"
# On these the bundled target is unsure, so that a small fault changes its choice: with K/V one slot
# too late it still said every token of the others. They do not count for the bundled floor.
PROBES = PROMPTS.with_name("verify_probes.jsonl")
# Mean acceptance length of the bundled pair on PROMPTS; measured 14.4 in float32 and in bfloat16,
# 128 new tokens.
BUNDLED_MIN_ACCEPTANCE = 13.5
BUNDLED_MIN_NEW_TOKENS = 64
MAX_SAMPLED_PROMPTS = 4
SAMPLED_NEW_TOKENS = 12
FORCED_NEW_TOKENS = 48  # three whole blocks of 16

_EPILOG = """\b
Examples:
  graphengine verify
  graphengine verify --matrix --output-json verify.json
  graphengine verify tiny-hybrid --forced-acceptance
  graphengine verify --all-options --forced-acceptance
  graphengine verify Qwen/Qwen3-8B --draft z-lab/Qwen3-8B-DFlash-b16 --min-acceptance 4
  graphengine verify --temperature 1 --num-samples 400

\b
Exit codes: 0 PASS, 1 FAIL, 2 refused input or no room for the result file.
What each check means: graphengine/verify/lossless.md."""


@click.command("verify", epilog=_EPILOG)
@shared.MODEL
@shared.DRAFT
@shared.prompt_file(text="Single prompts as for `graphengine run`.  [default: 30 bundled ones]")
@click.option("--matrix", is_flag=True, help="Every graph mode of the device x bucket x batch mix.")
@click.option(
    "--forced-acceptance",
    is_flag=True,
    help="Replace the drafts by plain decoding's tokens, so that every step accepts exactly 0, "
    "then 1, .. then all: proves what is committed for every length, whatever the drafter.",
)
@click.option(
    "--all-options",
    is_flag=True,
    help="Every prompt asks for something else (penalties, biases, bad words, draws with filters, "
    "grammars, log-probabilities, stops, several at once), in the same batches.",
)
@click.option(
    "--tolerance",
    type=shared.Finite(min=0),
    help="Nats that a token may lie below the plain model's first choice.  [default: 0.20 float32, "
    "0.30 bfloat16]",
)
@click.option(
    "--min-identical",
    type=shared.Finite(0, 1),
    help="Share of tokens that must be its first choice.  [default: 0.999 float32, 0.95 bfloat16]",
)
@click.option(
    "--min-acceptance",
    type=shared.Finite(min=1),
    help="Least mean acceptance length: the only check of the drafter.  [default: 13.5 for the "
    "bundled pair and prompts with all drafts, else none]",
)
@shared.declared("verify", buckets=(1, 8))
@shared.declared(
    "verify",
    SamplingParams,
    max_new_tokens=shared.Default(None, "128, with --temperature 12, forced 48"),
    seed=0,
)
@shared.count(
    "--num-samples",
    100,
    "Draws of each prompt with --temperature, speculative and plain each.",
    low=2,
)
@shared.RESULT_FILE
@shared.as_json("The verdict as one JSON object on stdout.")
@click.option("-q", "--quiet", is_flag=True, help="No tables and notes.")
@click.pass_context
def verify(ctx: click.Context, model: str | None, draft: str | None, **options: Any) -> None:
    """Check that MODEL with its drafter says what MODEL alone would say.

    Decodes prompts speculatively, then feeds the output to the plain model and compares every
    token with its first choice. Without MODEL the bundled pair.
    """
    from graphengine.checkpoints.hub import resolve
    from graphengine.checkpoints.pairs import named_pair
    from graphengine.checkpoints.tokenizer import load_tokenizer
    from graphengine.decode.grammar import llguidance_missing
    from graphengine.report import stderr_console
    from graphengine.startup.build import read_configs
    from graphengine.verify.run import Mode, encode

    mode = Mode(options["graph_mode"], options["attention_backend"])
    shared.check_places(options)
    model, draft = named_pair(model, draft)
    is_sampled, is_forced = options["temperature"] > 0, options["forced_acceptance"]
    default = SAMPLED_NEW_TOKENS if is_sampled else FORCED_NEW_TOKENS if is_forced else 128
    options["max_new_tokens"] = options["max_new_tokens"] or default
    names = declarations(SamplingParams)
    SamplingParams(**{name: options[name] for name in names if name in options})  # may refuse
    _check(options, mode, model, draft)
    _refuse_idle(ctx, is_sampled, options["all_options"])
    prompts, num_counted = _prompts(options, (model, draft) == named_pair(None, None))
    tokenizer = load_tokenizer(resolve(model), read_configs(model, draft)[0], ())
    has_grammars = options["all_options"] and tokenizer is not None and not llguidance_missing()
    options["grammars"], options["texts"] = has_grammars, tokenizer is not None
    ids = _settle_lengths(encode(tokenizer, prompts, options["raw"]), options, model, draft)
    console = stderr_console(options["quiet"] or options["as_json"])
    run = _Run(model, draft, mode, tokenizer, ids, options, console)
    if not (run.compare_draws() if is_sampled else run.compare_tokens(num_counted)):
        ctx.exit(1)


def _prompts(options: dict[str, Any], bundled: bool) -> tuple[list[Turn], int | None]:
    """(the prompts, of how many of them acceptance is counted; None: of all). Sets the least
    acceptance of the bundled pair. Mutates: options.

    Raises: ValueError: a conversation.
    """
    is_sampled, file = options["temperature"] > 0, options["prompt_file"]
    files = (file,) if file else (PROMPTS, PROBES)
    conversations = [turns for path in files for turns in read_prompt_file(path)]
    if any(len(turns) != 1 for turns in conversations):
        raise ValueError("--prompt-file: verify takes single prompts, not conversations")
    prompts = [turns[0] for turns in conversations]
    if is_sampled:  # the last ones: the bundled probes, on which draws differ most
        return prompts[-MAX_SAMPLED_PROMPTS:], None
    own = file or options["raw"] or options["forced_acceptance"] or options["all_options"]
    if own or not bundled:
        return prompts, None
    in_full = options["num_speculative_tokens"] is None
    if in_full and options["max_new_tokens"] >= BUNDLED_MIN_NEW_TOKENS:
        options["min_acceptance"] = options["min_acceptance"] or BUNDLED_MIN_ACCEPTANCE
    return prompts, len(read_prompt_file(PROMPTS))


def _settle_lengths(
    ids: list[list[int]], options: dict[str, Any], model: str, draft: str | None
) -> list[list[int]]:
    """The prompts, with those that a run adds. Sets a context no larger than they need.
    Mutates: options.

    Raises: ValueError: a prompt that leaves no room for a token, or none that does for a step.
    """
    from graphengine.verify.option_cases import NUM_CASES
    from graphengine.verify.run import RETURNING, returning

    if options["all_options"]:  # each of them once at least
        ids = [ids[i % len(ids)] for i in range(max(len(ids), NUM_CASES))]
    elif not (options["prompt_file"] or options["temperature"] > 0):
        room = options["max_model_len"] or shared.longest_context(model, draft, max(RETURNING) + 1)
        ids = ids + returning(ids[-1], room)
    longest = max(map(len, ids))
    wanted = longest + options["max_new_tokens"]
    limit = options["max_model_len"] or shared.longest_context(model, draft, wanted)
    options["max_model_len"] = limit
    if longest >= limit or min(map(len, ids)) == limit - 1:
        raise ValueError(
            f"a prompt has {longest} tokens, the context holds {limit}: one must be left to "
            "generate, and two behind some prompt, or no step would be checked; pass --prompt-file "
            "with shorter ones, or a larger --max-model-len if the models allow it"
        )
    return ids


def _check(options: dict[str, Any], mode: Mode, model: str, draft: str | None) -> None:
    """Refuses what cannot go together, and what would check nothing."""
    from graphengine.startup.build import read_configs

    is_sampled, least = options["temperature"] > 0, options["min_acceptance"]
    if options["matrix"] and mode != ("auto", "auto"):
        raise ValueError(
            "--matrix runs every graph mode; leave out --graph-mode and --attention-backend"
        )
    if options["max_new_tokens"] == 1:
        raise ValueError(
            "--max-new-tokens 1: a prompt's own rows say its first token, so no step would be "
            "checked; pass 2 or more"
        )
    if draft is None and least is not None:
        raise ValueError("--min-acceptance needs a drafter; pass --draft")
    if options["forced_acceptance"] and (draft is None or is_sampled or least is not None):
        raise ValueError(
            "--forced-acceptance replaces a drafter's drafts, greedily; pass --draft, and leave "
            "out --temperature and --min-acceptance"
        )
    if least:
        _, drafter = read_configs(model, draft)
        drafted = options["num_speculative_tokens"] or [drafter.num_draft_tokens if drafter else 0]
        if least > (most := 1 + max(drafted)):
            raise ValueError(
                f"--min-acceptance {least:g}: a step commits at most {most} tokens; pass less"
            )
    if options["all_options"] and is_sampled:
        raise ValueError("--all-options has temperatures of its own; leave out --temperature")
    if is_sampled and draft is None:
        raise ValueError("--temperature compares speculative with plain draws; pass --draft")
    if is_sampled and options["matrix"]:
        raise ValueError("--matrix is greedy; leave out --temperature, or pass --graph-mode")


def _refuse_idle(ctx: click.Context, is_sampled: bool, all_options: bool) -> None:
    """Refuses options that were typed and mean nothing to this kind of run."""
    of_draws, of_tokens = ["num_samples"], ["tolerance", "min_identical"]
    if not all_options:  # some of which draw
        of_draws.append("seed")
    for name in of_tokens if is_sampled else of_draws:
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            flag = f"--{name.replace('_', '-')}"
            if is_sampled:
                raise ValueError(f"{flag} is of greedy tokens; leave it out, or --temperature")
            raise ValueError(f"{flag} is of draws; pass a --temperature above 0, or leave it out")


class _Run(NamedTuple):
    """A pair, its encoded prompts and what was asked."""

    model: str
    draft: str | None
    mode: Mode
    tokenizer: Tokenizer | None
    ids: list[list[int]]
    options: dict[str, Any]
    console: Console

    def compare_draws(self) -> bool:
        """Draws with and without the drafter, with different seeds; compares the distributions."""
        from graphengine.decode.sampling import Sampling
        from graphengine.verify.check import stopped
        from graphengine.verify.report import finish
        from graphengine.verify.run import draw
        from graphengine.verify.two_sample import judge_draws

        options, count = self.options, self.options["num_samples"]
        names = ("temperature", "top_p", "top_k", "min_p", "seed")
        sampling = Sampling(**{name: options[name] for name in names})
        draws: list[Draws] = []
        for drafter in (self.draft, None):
            what = f"drawing {count} x {len(self.ids)} with drafter {drafter}"
            self.console.print(what, style="dim", markup=False)
            with self.engine(self.mode, drafter) as engine:
                length = options["max_new_tokens"]
                draws.append(draw(engine.built, self.ids, count, length, sampling))
            if draws[-1].errors:
                break
            sampling = sampling.numbered(count * len(self.ids))
        errors = draws[-1].errors
        if errors:
            passed, text = False, f"finite: {stopped(errors)}"
            numbers: dict[str, Any] = {"num_stopped": len(errors)}
        else:
            passed, text, numbers = judge_draws(draws[0], draws[1], options)
        measured = {"sampled": {"num_samples": count} | numbers}
        failures = [] if passed else [text]
        told = f"{'PASS' if passed else 'FAIL'}: {text}"
        finish(self.model, self.draft, failures, [], measured, told, options, self.console)
        return passed

    def compare_tokens(self, num_counted: int | None) -> bool:
        """Every token of every cell with the plain model's first choice."""
        from graphengine.verify import run
        from graphengine.verify.forced import ForcedLength
        from graphengine.verify.option_cases import cases_for
        from graphengine.verify.report import describe, report_cells

        options, buckets = self.options, sorted(self.options["buckets"])
        modes = [self.mode]
        cells: list[tuple[int, Mix]] = [(b, "alone" if b == 1 else "together") for b in buckets]
        if options["matrix"]:
            modes, without = run.matrix_modes(options["device"], self.refusal)
            if without is not None:
                self.console.print(f"left out: {without}", style="dim", markup=False)
            cells = [(bucket, mix) for bucket in buckets for mix in run.mixes_of(bucket)]
        texts: list[str] = []
        cases: list[OptionCase] = []

        def judged(
            mode: Mode,
            drafter: str | None,
            before: list[CellResult],
            forced: ForcedLength | None = None,
        ) -> list[CellResult]:
            with self.engine(mode, drafter) as engine:
                config = engine.config
                name = f"{config.graph_mode} {config.attention_backend}"
                if options["all_options"] and not cases:
                    count, seed = options["max_new_tokens"], options["seed"]
                    has_grammars = options["grammars"]
                    cases.extend(cases_for(engine.built, self.ids, count, seed, has_grammars))
                found = run.verify_mode(
                    engine.built,
                    name if drafter == self.draft else run.PLAIN,
                    self.ids,
                    cells,
                    max_new_tokens=options["max_new_tokens"],
                    limits=self.limits(config.dtype, drafter),
                    num_counted=num_counted,
                    first=before,
                    forced=forced,
                    cases=cases,
                    progress=lambda cell: self.console.print(
                        f"{cell.mode}: bucket {cell.bucket}, {cell.mix}", style="dim"
                    ),
                )
            for result in found:
                place = result.report.first_true or next(iter(result.report.ties), None)
                if place is not None:
                    asked = f" (asked for: {cases[place.request]})" if cases else ""
                    texts.append(describe(result, place, self.tokenizer) + asked)
            return found

        is_forced = options["forced_acceptance"]
        plain: list[CellResult] = []
        if self.draft is not None and (options["matrix"] or is_forced):
            # In graphs where there are any: a token a step, called one by one, is most of the
            # matrix.
            captured = [mode for mode in modes if mode.graph_mode != "none"]
            plain = judged((captured or modes)[0], None, [])
        forced = ForcedLength.of(plain[0].transcripts) if is_forced else None
        results: list[CellResult] = []
        for mode in modes:
            results += judged(mode, self.draft, results, forced)
        if plain:
            results = plain + run.compare_with_plain(results, plain)
        return report_cells(self.model, self.draft, results, texts, options, self.console)

    def limits(self, dtype: str, drafter: str | None) -> Limits:
        from graphengine.verify import check

        asked = self.options
        tolerance, identical = asked["tolerance"], asked["min_identical"]
        return check.Limits(
            tolerance_nats=check.TOLERANCE_NATS[dtype] if tolerance is None else tolerance,
            min_identical=check.MIN_IDENTICAL[dtype] if identical is None else identical,
            min_acceptance=asked["min_acceptance"] if drafter else None,
            max_logprob_error_nats=check.MAX_LOGPROB_ERROR[dtype],
        )

    def engine(self, mode: Mode, drafter: str | None) -> Engine:
        from graphengine.api import Engine

        return Engine.from_pretrained(self.model, drafter, **self.asked(mode, drafter))

    def refusal(self, mode: Mode) -> str | None:
        """Why the pair cannot run in this mode; None if it can."""
        from graphengine.startup.build import read_configs
        from graphengine.startup.options import resolve_options

        asked = made(Options, self.asked(mode, self.draft))
        try:
            resolve_options(asked, *read_configs(self.model, self.draft))
        except ValueError as error:
            return str(error)
        return None

    def asked(self, mode: Mode, drafter: str | None) -> dict[str, Any]:
        """The options of an engine."""
        from graphengine.verify.option_cases import MAX_LOGPROBS

        mixed = self.options["all_options"]
        asked = {name: self.options[name] for name in declarations(Options) if name in self.options}
        if drafter != self.draft:
            asked = without_drafter(asked)
        return asked | {
            **mode._asdict(),
            "sampling": mixed or self.options["temperature"] > 0 or None,
            "adjustments": mixed or None,
            "max_logprobs": MAX_LOGPROBS if mixed else None,
            "structured_outputs": self.options["grammars"] or None,
            # Judged is what speculation decodes, however slow or badly drafted.
            "acceptance_floor": 0.0,
            "fallback": False,
        }
