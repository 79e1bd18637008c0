"""What a user may ask for, each option declared once: its type, default, range and sentence.

Who reads the declaration: the command line (its flags, choices, checks and help), the Python API
(signature, help, refusal of unknown names), doctor, the start (`startup.options` decides what was
left open) and the JSON of results. Why: an option that is written down in seven places differs in
one of them. A new one is a field here, the line that acts on it, and a test.

No torch here: `--help` answers at once.
"""
# ruff: noqa: RUF009  (`option` is dataclasses.field with a declaration)

from __future__ import annotations

import difflib
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from math import inf
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from graphengine.config.bytesize import parse_bytes

GraphMode = Literal["none", "piecewise", "full"]
AttentionBackend = Literal["flashinfer", "triton", "torch"]
DeviceName = Literal["cpu", "cuda"]
DTypeName = Literal["bfloat16", "float32"]
DraftQuantization = Literal["none", "fp8", "fp8-dynamic"]
LoadFormat = Literal["auto", "dummy", "dummy-uniform"]

COMMANDS = frozenset("run bench profile graphs doctor compile verify".split())
_API: frozenset[str] = frozenset()  # of the Python API alone
_Made = TypeVar("_Made")
_KEYWORD, _INDENT = inspect.Parameter.KEYWORD_ONLY, " " * 12


def _sizes(value: Any) -> Any:
    """Batch sizes as a tuple; the whole of it is shown where one is wrong."""
    sizes = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else ()
    if not sizes or any(type(size) is not int or size < 1 for size in sizes):
        raise ValueError(f"buckets is {value!r}; expected batch sizes, integers from 1 up")
    return sizes


@cache
def _kinds(hint: Any) -> tuple[Any, ...]:
    found: list[Any] = []
    parts = [hint]
    while parts:
        part = parts.pop(0)
        if get_origin(part) in (Union, UnionType, Literal):
            parts = [*get_args(part), *parts]
        else:
            found.append(get_origin(part) or part)
    return tuple(found)


@cache
def _choices(hint: Any) -> tuple[str, ...]:
    words = [kind for kind in _kinds(hint) if isinstance(kind, str)]
    return tuple(sorted(words, key=lambda word: word != "auto"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """One option. `auto`: what its default amounts to, where that is decided later.

    `low` and `high` are allowed values, `above` is not. `of_drafter`: it means nothing without one.
    `commands` offer it. `parse`: from what a user may write to the value.
    """

    text: str
    auto: str = ""
    low: float = -inf
    above: float = -inf
    high: float = inf
    flag: str = ""
    metavar: str | None = None
    of_drafter: bool = False
    commands: frozenset[str] = COMMANDS
    parse: Callable[[Any], Any] | None = None
    name: str = ""
    default: Any = None
    hint: Any = None

    @property
    def kinds(self) -> tuple[Any, ...]:
        """Types that a value may have, a Literal's values among them."""
        return _kinds(self.hint)

    @property
    def choices(self) -> tuple[str, ...]:
        """Its values, "auto" first, where they are words."""
        return _choices(self.hint)

    def checked(self, value: Any) -> Any:
        """The value, as this option keeps it. Raises: ValueError: with the value and a remedy."""
        kinds = self.kinds
        if value is None and type(None) in kinds:
            return value
        if self.parse is not None:
            return self.parse(value)
        if self.choices:
            if value in self.choices:
                return value
            raise self._refusal(value, f"one of {', '.join(self.choices)}")
        if bool in kinds:
            if isinstance(value, bool):
                return value
            raise self._refusal(value, "True or False")
        if Sequence in kinds:  # looked at together with the buckets and the drafter
            return value
        is_int = int in kinds
        if isinstance(value, Integral if is_int else Real) and not isinstance(value, bool):
            with suppress(OverflowError):  # an integer past any float
                given: Any = value
                number = int(given) if is_int else float(given)
                if self.low <= number <= self.high and number > self.above:  # NaN is in no range
                    return number
        what = "an integer" if is_int else "a number"
        if self.high < inf:
            low = f"{self.low:g} <=" if self.above == -inf else f"{self.above:g} <"
            what += f" {low} x <= {self.high:g}"
        elif self.low > -inf:
            what += f" from {self.low:g} up"
        raise self._refusal(value, what)

    def _refusal(self, value: Any, expected: str) -> ValueError:
        hint = f" (default: {self.auto})" if self.auto else ""
        return ValueError(f"{self.name} is {value!r}; expected {expected}{hint}")

    def arguments(self, value: Any) -> list[str]:
        """The value as a command line has it."""
        if value is None:
            return []
        if isinstance(value, bool):
            return [self.flag if value else f"--no-{self.flag[2:]}"]
        items = value if isinstance(value, tuple) else (value,)
        return [self.flag, ",".join(map(str, items))]


def option(default: Any, text: str, **rest: Any) -> Any:
    """A field with its declaration."""
    return field(default=default, metadata={"declaration": (text, rest)})


@cache
def declarations(cls: type) -> Mapping[str, Declaration]:
    """The options of a class by their name in Python."""
    hints, found = get_type_hints(cls), {}
    for each in fields(cls):
        if each.default is MISSING or "declaration" not in each.metadata:
            continue
        text, rest = each.metadata["declaration"]
        rest = {"flag": f"--{each.name.replace('_', '-')}"} | rest
        found[each.name] = Declaration(
            text=text, name=each.name, default=each.default, hint=hints[each.name], **rest
        )
    return found


class _Checked:
    """A value whose options are in their ranges, or that does not come into being."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for name, declared in declarations(type(self)).items():
            object.__setattr__(self, name, declared.checked(getattr(self, name)))


_DRAFTING = {"of_drafter": True}
_RUN, _ASKED = frozenset({"run"}), frozenset({"run", "verify"})
_MEASURED = frozenset({"run", "bench", "profile"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(_Checked):
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
        parse=parse_bytes,
    )
    simulate_acceptance: float | None = option(
        None,
        "Draw this mean acceptance length instead of comparing drafts (random weights accept "
        "nothing); the text is meaningless, and results say so. It is the mean of the drafter's "
        "own block: where fewer are drafted, draws are cut off.",
        auto="off",
        metavar="LENGTH",
        commands=_MEASURED,
        **_DRAFTING,
    )
    draft_quantization: DraftQuantization = option(
        "none",
        "fp8: round the drafter's weights, in forwards of up to 64 rows; fp8-dynamic: in all, and "
        "in larger ones its activations too. Verification keeps the output what the target says.",
        **_DRAFTING,
    )
    num_speculative_tokens: int | Sequence[int] | None = option(
        None,
        "Tokens drafted and verified a step: one number, or one for each bucket in the order "
        "given. In large batches fewer can be faster.",
        auto="all of the drafter's block",
        **_DRAFTING,
    )
    lazy_capture: bool = option(
        False,
        "Build the first batch's bucket alone ahead, each other one at its first use.",
        commands=_RUN,
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
        commands=_RUN,
    )
    fallback: bool = option(
        True,
        "Decode plainly where speculation is measured to be slower; the text is the same.",
        commands=_RUN,
    )
    finish_in_plain_decode: bool = option(
        False,
        "Use the target's whole context: the last block of it is decoded without the drafter.",
        commands=frozenset({"run", "doctor"}),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(_Checked):
    """What a user asks of one generation."""

    max_new_tokens: int = option(256, "Most tokens to generate per prompt.", low=1, commands=_ASKED)
    ignore_eos: bool = option(False, "Do not stop at the model's end tokens.", commands=_RUN)
    raw: bool = option(
        False, "Continue the text as it is, without the chat template.", commands=_ASKED
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
    seed: int | None = option(
        None,
        "Makes draws repeatable, with a drafter or without; prompt i draws with seed + i.",
        low=0,
        high=2**63 - 1,
        auto="a new one",
        commands=_ASKED,
    )

    def __post_init__(self) -> None:
        _Checked.__post_init__(self)
        if self.temperature == 0 and (self.top_p < 1 or self.top_k > 0):
            raise ValueError(
                f"top_p {self.top_p} and top_k {self.top_k} change nothing at temperature 0; "
                "pass a temperature above 0"
            )


def made(cls: type[_Made], given: Mapping[str, Any]) -> _Made:
    """A value of `cls` from options by name.

    Raises:
        TypeError: an unknown name.
        ValueError: a value out of its range.
    """
    known = declarations(cls)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.4)
            remedy = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise TypeError(f"{name} is no option; {remedy}")
    return cls(**given)


def without_drafter(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that mean something where nothing is drafted."""
    known = declarations(Options)
    return {name: value for name, value in given.items() if not known[name].of_drafter}


def spelled_out(cls: type) -> Callable[[Callable[..., _Made]], Callable[..., _Made]]:
    """Decorates a function that takes a class's options as `**keywords`: its signature and help
    show each of them; the line {options} of its docstring is where."""

    def decorate(function: Any) -> Any:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind != p.VAR_KEYWORD]
        lines = []
        for name, declared in declarations(cls).items():
            own.append(
                inspect.Parameter(
                    name, _KEYWORD, default=declared.default, annotation=declared.hint
                )
            )
            text = f"{name}: {declared.text} Default: {declared.auto or repr(declared.default)}."
            lines += textwrap.wrap(text, 88, initial_indent=_INDENT, subsequent_indent=_INDENT * 2)
        function.__signature__ = signature.replace(parameters=own)
        if function.__doc__ is not None:  # python -OO leaves them out
            function.__doc__ = function.__doc__.replace(f"{_INDENT}{{options}}", "\n".join(lines))
        return function

    return decorate
