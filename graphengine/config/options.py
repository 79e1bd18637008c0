"""What a user may ask for, each option declared once: its type, default, range and sentence.

Who reads a declaration: `declaration` says. A new option is a field here, the line that acts on it,
and a test.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from graphengine.config.bytesize import parse_bytes
from graphengine.config.constraint import constraint_of, parse_schema, parse_text
from graphengine.config.declaration import COMMANDS, Checked, declarations, option
from graphengine.config.lists import (
    MAX_BIAS,
    is_integer,
    parse_allowed,
    parse_bias,
    parse_choice,
    parse_template_kwargs,
    parse_texts,
    parse_token_ids,
)

GraphMode = Literal["none", "piecewise", "full"]
AttentionBackend = Literal["flashinfer", "triton", "torch"]
DeviceName = Literal["cpu", "cuda"]
DTypeName = Literal["bfloat16", "float32"]
DraftQuantization = Literal["none", "fp8", "fp8-dynamic"]
LoadFormat = Literal["auto", "dummy", "dummy-uniform"]

_API: frozenset[str] = frozenset()  # of the Python API alone


def _sizes(value: Any) -> Any:
    """Batch sizes as a tuple; the whole of it is shown where one is wrong."""
    sizes = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else ()
    if not sizes or any(not is_integer(size) or size < 1 for size in sizes):
        raise ValueError(f"buckets is {value!r}; expected batch sizes, integers from 1 up")
    return tuple(map(int, sizes))


_RUN, _ASKED = frozenset({"run"}), frozenset({"run", "verify"})
_LOADED = frozenset({"run", "doctor"})
_MEASURED = frozenset({"run", "bench", "profile"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Checked):
    """What a user asks of an engine, with "auto" (or None) where they do not say."""

    buckets: tuple[int, ...] = option(
        (1, 8, 16),
        "Batch sizes to build; more prompts than the largest wait in order.",
        flag="--bucket",
        parse=_sizes,
        commands=COMMANDS - {"profile"},
    )
    graph_mode: GraphMode | Literal["auto"] = option(
        "auto",
        "How steps are launched: captured between attentions (piecewise), captured whole (full), "
        "or called one by one (none).",
        auto="piecewise on a GPU, none on the CPU",
        commands=COMMANDS - {"bench"},
    )
    compile: bool | None = option(
        None,
        "Inductor for the dense segments.",
        auto="on a GPU only",
        commands=COMMANDS - {"compile"},
    )
    attention_backend: AttentionBackend | Literal["auto"] = option(
        "auto",
        "flashinfer, triton (our kernel, which needs no plan) or torch.",
        auto="triton with graph mode full, flashinfer on a GPU in bfloat16, else torch",
        commands=COMMANDS - {"bench"},
    )
    device: DeviceName | Literal["auto"] = option(
        "auto", "Where the models run.", auto="cuda where there is one, else cpu"
    )
    dtype: DTypeName | Literal["auto"] = option(
        "auto", "Of weights, activations and K/V.", auto="bfloat16 on a GPU, float32 on the CPU"
    )
    page_size: int | None = option(
        None, "Tokens per K/V page.", low=1, auto="16, with our own attention (triton) 128"
    )
    max_model_len: int | None = option(
        None,
        "Most tokens of one request, prompt included.",
        low=2,
        auto="what the models allow",
        commands=frozenset({"run", "doctor", "compile", "verify"}),
    )
    load_format: LoadFormat = option(
        "auto",
        "dummy: random weights from a config.json or a preset's name alone; dummy-uniform: drawn "
        "as by vLLM's dummy loader, to compare with it.",
        commands=_MEASURED,
        auto="the checkpoint's weights",
    )
    gpu_memory_utilization: float = option(
        0.9, "Share of the GPU's memory that may be filled.", above=0, high=1
    )
    kv_cache_memory: int | None = option(
        None,
        "Most bytes of the K/V pool, such as 2GiB.",
        auto="what the memory plan leaves",
        metavar="SIZE",
        parse=partial(parse_bytes, "kv_cache_memory"),
    )
    simulate_acceptance: float | None = option(
        None,
        "Draw this mean acceptance length instead of comparing drafts (random weights accept "
        "nothing); the text is meaningless, and results say so. It is the mean of the drafter's "
        "own block: where fewer are drafted, draws are cut off.",
        auto="off",
        metavar="LENGTH",
        commands=_MEASURED | {"doctor"},
        of_drafter=True,
    )
    draft_quantization: DraftQuantization = option(
        "none",
        "fp8: round the drafter's weights, in forwards of up to 64 rows; fp8-dynamic: in all, and "
        "in larger ones its activations too. Verification keeps the output what the target says.",
        of_drafter=True,
    )
    num_speculative_tokens: int | Sequence[int] | None = option(
        None,
        "Tokens drafted and verified a step: one number, or one for each bucket in the order "
        "given. In large batches fewer can be faster.",
        auto="all of the drafter's block; of a target with experts what is measured at the start",
        of_drafter=True,
    )
    lazy_capture: bool = option(
        False,
        "Build the first batch's bucket alone ahead, each other one at its first use.",
        commands=_LOADED,
    )
    first_batch: int = option(
        1, "With lazy_capture: how many requests come first.", low=1, commands=_API
    )
    acceptance_floor: float = option(
        1.5,
        "Warn when fewer tokens a step are accepted (mean acceptance length); 0 turns the warning "
        "off.",
        low=0,
        metavar="LENGTH",
        commands=_LOADED,
    )
    fallback: bool = option(
        True,
        "Decode plainly where speculation is measured to be slower; the text is the same.",
        commands=_LOADED,
    )
    finish_in_plain_decode: bool = option(
        False,
        "Use the target's whole context: the last block of it is decoded without the drafter.",
        commands=_LOADED,
    )
    enable_prefix_caching: bool = option(
        True,
        "Take over the pages of an earlier text that begins alike, with the drafter's context.",
        commands=_LOADED,
    )
    max_num_batched_tokens: int = option(
        512,
        "Rows of prompts that are run between two steps of streams; fewer behind a long text.",
        low=16,
        commands=_LOADED,
    )
    prepare_plain_decode: bool = option(
        False,
        "Build what decodes plainly at start-up instead of when a request first needs it.",
        commands=_API,
    )
    sampling: bool | None = option(
        None,
        "Whether requests may have a temperature, which builds a second verify chain.",
        auto="where nothing is captured",
        commands=_API,
    )
    adjustments: bool | None = option(
        None,
        "Whether requests may have penalties, logit_bias, allowed_token_ids, bad_words and "
        "min_tokens, which builds a verify chain more and takes 8 bytes a token of the vocabulary "
        "for each row of the largest bucket, and its logits in float32.",
        auto="where nothing is captured",
        commands=_API,
    )
    max_logprobs: int | None = option(
        None,
        "Most alternatives of logprobs and prompt_logprobs; above 0 builds a verify chain more.",
        low=0,
        auto="20 where nothing is captured, else 0",
        commands=_API,
    )
    structured_outputs: bool | None = option(
        None,
        "Whether answers may follow a grammar (json_schema, regex, choice, grammar), which builds "
        "a verify chain more; needs the extra `grammar`.",
        auto="where nothing is captured",
        commands=_API,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(Checked):
    """What a user asks of one generation; names and meanings are vLLM's.

    Logits change in this order: allowed_token_ids, bad_words and min_tokens, logit_bias, the
    penalties (repetition, frequency, presence), temperature, min_p, top_k, top_p.
    """

    max_new_tokens: int = option(256, "Most tokens to generate per prompt.", low=1, commands=_ASKED)
    min_tokens: int = option(
        0, "No end, stop token or stop string before so many tokens.", low=0, commands=_RUN
    )
    ignore_eos: bool = option(False, "Do not stop at the model's end tokens.", commands=_RUN)
    stop: tuple[str, ...] = option(
        (),
        "A text that ends the answer where it first appears, left out of it; may be repeated.",
        metavar="TEXT",
        repeated=True,
        parse=partial(parse_texts, "stop"),
        commands=_RUN,
    )
    stop_token_ids: tuple[int, ...] = option(
        (),
        "Tokens that end the answer beside the model's own, such as 7,99.",
        metavar="ID,ID,..",
        parse=partial(parse_token_ids, "stop_token_ids"),
        commands=_RUN,
    )
    include_stop_str_in_output: bool = option(
        False, "Leave the stop string, or the text of the stop token, in the answer.", commands=_RUN
    )
    skip_special_tokens: bool = option(
        True, "Leave special tokens out of the text, even if one begins a tool call.", commands=_RUN
    )
    raw: bool = option(
        False,
        "Continue the text, behind what the tokenizer puts before any, without the chat template.",
        commands=_ASKED,
    )
    chat_template_kwargs: Mapping[str, Any] | None = option(
        None,
        'What the chat template is given: tools, or {"enable_thinking": true}, which is off else.',
        metavar="JSON",
        parse=partial(parse_template_kwargs, "chat_template_kwargs"),
        commands=_RUN,
    )
    temperature: float = option(
        0.0,
        "0 is greedy, above 0 draws a token. What the model's generation_config.json suggests is "
        "not applied; pass it here.",
        low=0,
        high=3e38,  # float32
        commands=_ASKED,
    )
    top_p: float = option(
        1.0,
        "Keep the fewest most likely tokens that hold this share; 1 keeps all.",
        above=0,
        high=1,
        commands=_ASKED,
    )
    top_k: int = option(
        0, "Keep this many most likely tokens; 0 keeps all.", low=0, commands=_ASKED
    )
    min_p: float = option(
        0.0,
        "Keep tokens that are at least this share as likely as the most likely one; 0 keeps all.",
        low=0,
        high=1,
        commands=_ASKED,
    )
    repetition_penalty: float = option(
        1.0,
        "Above 1 makes what the prompt or the answer holds less likely: a positive logit is "
        "divided by it, a negative one multiplied.",
        low=1e-6,  # between these a logit's quotient is finite
        high=1e6,
        commands=_RUN,
    )
    presence_penalty: float = option(
        0.0, "Taken from the logits of what the answer holds.", low=-2, high=2, commands=_RUN
    )
    frequency_penalty: float = option(
        0.0, "The same, for each time that it holds it.", low=-2, high=2, commands=_RUN
    )
    logit_bias: Mapping[int, float] | None = option(
        None,
        f"Added to the logits of tokens, -{MAX_BIAS} to {MAX_BIAS} each, such as 50=-100,7=2.5.",
        metavar="ID=BIAS,..",
        parse=partial(parse_bias, "logit_bias"),
        commands=_RUN,
    )
    allowed_token_ids: tuple[int, ...] | None = option(
        None,
        "The only tokens that may be chosen, such as 15,16,17; name an end token too, or the "
        "answer has none.",
        metavar="ID,ID,..",
        parse=partial(parse_allowed, "allowed_token_ids"),
        commands=_RUN,
    )
    bad_words: tuple[str, ...] = option(
        (),
        "A text that the answer never says: of several tokens, the last one behind the others; may "
        "be repeated.",
        metavar="TEXT",
        repeated=True,
        parse=partial(parse_texts, "bad_words"),
        commands=_RUN,
    )
    json_schema: str | None = option(
        None,
        "A JSON schema that the answer follows: always valid, drafted or not.",
        metavar="SCHEMA",
        parse=partial(parse_schema, "json_schema"),
        commands=_RUN,
    )
    regex: str | None = option(
        None,
        "A regular expression that the whole answer matches.",
        metavar="REGEX",
        parse=partial(parse_text, "regex"),
        commands=_RUN,
    )
    choice: tuple[str, ...] = option(
        (),
        "A text that the answer may be, one of several; may be repeated.",
        metavar="TEXT",
        repeated=True,
        parse=parse_choice,
        commands=_RUN,
    )
    grammar: str | None = option(
        None,
        'A grammar in Lark\'s notation that the answer follows, such as \'start: "yes" | "no"\'.',
        metavar="LARK",
        parse=partial(parse_text, "grammar"),
        commands=_RUN,
    )
    logprobs: int | None = option(
        None,
        "Log-probabilities of each token and of so many most likely ones, the model's own: before "
        "any option here changes them. They are in the result and its JSON.",
        low=0,
        commands=_RUN,
    )
    prompt_logprobs: int | None = option(
        None, "The same of the prompt's tokens, but the first.", low=0, commands=_RUN
    )
    seed: int | None = option(
        None,
        "Makes draws repeatable, with a drafter or without; prompt i draws with seed + i.",
        low=0,
        high=2**63 - 1,
        auto="a new one",
        commands=_ASKED,
    )

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.temperature == 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0):
            raise ValueError(
                f"top_p {self.top_p}, top_k {self.top_k} and min_p {self.min_p} change nothing at "
                "temperature 0; pass a temperature above 0"
            )
        if self.min_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}, max_new_tokens {self.max_new_tokens}; lower the "
                "one or raise the other"
            )
        constraint_of(self)

    @property
    def num_logprobs(self) -> int | None:
        """Most alternatives of a token; None where no log-probabilities are asked for."""
        asked = [n for n in (self.logprobs, self.prompt_logprobs) if n is not None]
        return max(asked, default=None)


def adjusts(asked: Any) -> bool:
    """Whether `SamplingParams`, or a request's sampling, change logits before they are compared or
    drawn from."""
    penalties = asked.presence_penalty, asked.frequency_penalty
    biases = asked.logit_bias, asked.allowed_token_ids
    others = *penalties, *biases, asked.bad_words, asked.min_tokens
    return asked.repetition_penalty != 1 or any(others)


def without_drafter(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that mean something where nothing is drafted."""
    known = declarations(Options)
    return {name: value for name, value in given.items() if not known[name].of_drafter}
