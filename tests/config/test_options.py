"""One declaration of an option: what the command line, the API and a run's record say is one."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass, fields
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner

from graphengine.api import Engine
from graphengine.checkpoints.hub import TINY_DRAFT, TINY_TARGET
from graphengine.cli import options as shared
from graphengine.cli.main import main
from graphengine.config import options as module
from graphengine.config.bytesize import format_bytes
from graphengine.config.constraint import parse_schema
from graphengine.config.declaration import COMMANDS, declarations, made, option, spelled_out
from graphengine.config.engine import EngineConfig
from graphengine.config.options import Options, SamplingParams, adjusts
from graphengine.startup.build import read_configs
from graphengine.startup.options import resolve_options


def test_help_and_signature_show_every_option() -> None:
    """Bug: `help(Engine.from_pretrained)` ends in **options, shows {options} (Python 3.13 takes the
    indent of docstrings away), or a default there is not the real, or the None that stands for one
    that is decided later."""
    for function, kind in (
        (Engine.from_pretrained, Options),
        *((f, SamplingParams) for f in (Engine.generate, Engine.stream, Engine.stream_many)),
    ):
        shown = inspect.signature(function).parameters
        assert not any(p.kind is p.VAR_KEYWORD for p in shown.values())
        for name, declared in declarations(kind).items():
            assert shown[name].default == declared.default == getattr(kind(), name)
    for name, declared in declarations(Options).items():
        line = f"{name}: {declared.text} Default: {declared.auto or repr(declared.default)}."
        assert line in " ".join((Engine.from_pretrained.__doc__ or "").split())
    assert "{options}" not in f"{Engine.from_pretrained.__doc__}{Engine.generate.__doc__}"


@pytest.mark.parametrize("kind", [Options, SamplingParams])
def test_defaults_are_what_a_check_makes_of_them(kind: type) -> None:
    """Bug: a default that is kept in another form than the same value from a user, since defaults
    are not looked at."""
    for declared in declarations(kind).values():
        kept = declared.checked(declared.default)
        assert (kept, type(kept)) == (declared.default, type(declared.default))


def test_every_option_is_in_a_result() -> None:
    """Bug: an option is asked for and the JSON of a run does not say what it was."""
    assert {f.name for f in fields(Options)} <= {f.name for f in fields(EngineConfig)}


def test_unknown_names() -> None:
    """Bug: a misspelt option is ignored, or refused without the right name; or of one that is
    called otherwise here (tools, system_prompt) `stop` and `temperature` are said to be meant."""
    with pytest.raises(TypeError, match="bucket is no option; did you mean buckets"):
        made(Options, {"bucket": (1,)})
    with pytest.raises(TypeError, match="there are buckets, graph_mode"):
        made(Options, {"zzz": 1})
    for name in ("tools", "enable_thinking", "system_prompt", "timeout"):
        with pytest.raises(TypeError, match=f"{name} is no option; there are .*chat_template_k"):
            made(SamplingParams, {name: 1})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"page_size": True}, "page_size is True; expected an integer from 1 up"),
        ({"gpu_memory_utilization": float("nan")}, "is nan; expected a number 0 < x <= 1"),
        ({"max_num_batched_tokens": 15}, "is 15; expected an integer from 16 up"),
        ({"device": "tpu"}, "device is 'tpu'; expected one of auto, cpu, cuda"),
        ({"kv_cache_memory": "lots"}, "kv_cache_memory is 'lots'; expected a size in bytes"),
        ({"kv_cache_memory": 0}, "kv_cache_memory is 0; expected a size in bytes"),
        ({"first_batch": True}, "first_batch is True; expected an integer from 1 up"),
        ({"buckets": (0, 1)}, "buckets is .0, 1.; expected batch sizes, integers from 1 up"),
    ],
)
def test_ranges(given: dict[str, Any], message: str) -> None:
    """Bug: a value out of its range passes, since NaN is in every range and True an integer, also
    where it equals the default, 1; or nobody learns which option's value is wrong."""
    with pytest.raises(ValueError, match=message):
        Options(**given)
    assert Options(kv_cache_memory="2GiB").kv_cache_memory == 2 << 30  # type: ignore[arg-type]
    assert Options(buckets=[4, 2]).buckets == (4, 2)  # type: ignore[arg-type]


def test_integers_of_numpy() -> None:
    """Bug: of an array's sizes, and of its 3 drafts, it is said that integers from 1 up are
    expected; or they reach the JSON of a run, which has no such numbers."""
    asked = {"buckets": np.array([4, 2]), "num_speculative_tokens": np.int64(3)}
    options = made(Options, asked)
    config = resolve_options(options, *read_configs(TINY_TARGET, TINY_DRAFT))
    assert json.dumps([config.buckets, config.num_speculative_tokens]) == "[[2, 4], [3, 3]]"


def test_the_next_option_is_declared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: an option needs its name, range, help and default written down in a second place."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class More(Options):
        depth: int = option(3, "How deep.", low=1, high=9, auto="three", commands=COMMANDS)

    @click.command()
    @shared.declared("verify", More)
    def command(**asked: Any) -> None:
        click.echo(made(More, shared.taken(asked, More)).depth)

    @spelled_out(More)
    def load(**asked: Any) -> int:
        """Loads.

        {options}
        """
        return made(More, asked).depth

    run = CliRunner().invoke
    assert run(command, ["--depth", "5"]).output == "5\n"
    assert run(command, []).output == "3\n"
    assert "depth is 12; expected a number" not in run(command, ["--depth", "12"]).output
    assert "depth is 12; expected an integer 1 <= x <= 9" in run(command, ["--depth", "12"]).output
    assert "How deep.  [default: three]" in run(command, ["--help"]).output
    assert inspect.signature(load).parameters["depth"].default == load() == 3
    assert declarations(More)["depth"].arguments(4) == ["--depth", "4"]


def test_numbers_are_kept_as_python_s_own() -> None:
    """Bug: a number from numpy stays one, and a run's JSON cannot be written."""
    given: dict[str, Any] = {"top_k": np.int64(5), "temperature": np.float32(0.5)}
    asked = SamplingParams(**given)
    assert json.dumps([asked.top_k, asked.temperature]) == "[5, 0.5]"


def test_a_schema_s_order_is_kept() -> None:
    """Bug: an answer's properties come in another order than its schema says."""
    schema = {"properties": {"name": {}, "age": {}}}
    assert json.loads(parse_schema("json_schema", schema), object_pairs_hook=list) == [
        ("properties", [("name", []), ("age", [])])
    ]


def test_what_is_just_allowed() -> None:
    """Bug: an answer of exactly so many tokens, or a token's largest bias, cannot be asked for."""
    biases = {3: -100.0, 7: 100.0}
    asked = SamplingParams(min_tokens=5, max_new_tokens=5, logit_bias=biases)
    assert (asked.min_tokens, asked.max_new_tokens, asked.logit_bias) == (5, 5, biases)


@pytest.mark.parametrize(
    ("asked", "most"),
    [
        ({}, None),
        ({"logprobs": 0}, 0),
        ({"prompt_logprobs": 3}, 3),
        ({"logprobs": 1, "prompt_logprobs": 2}, 2),
    ],
)
def test_most_alternatives_of_either_kind(asked: dict[str, Any], most: int | None) -> None:
    """Bug: a command that asks for its prompts' log-probabilities alone loads an engine that has
    none to give."""
    assert SamplingParams(**asked).num_logprobs == most


def test_arguments_are_read_back() -> None:
    """Bug: what a command hands to its child is not what it was given."""
    command = main.commands["doctor"]
    given = {"buckets": (1, 2), "compile": False, "page_size": 4, "graph_mode": "none"}
    typed = [
        part
        for name, value in given.items()
        for part in declarations(Options)[name].arguments(value)
    ]
    values, rest, _ = command.make_parser(click.Context(command)).parse_args(typed)
    context = click.Context(command)
    for name, value in given.items():
        (param,) = [p for p in command.params if p.name == name]
        assert param.type_cast_value(context, values[name]) == value
    assert rest == [] and module.without_drafter({"simulate_acceptance": 3, "dtype": "auto"}) == {
        "dtype": "auto"
    }


def test_what_a_command_lacks_is_not_handed_on() -> None:
    """Bug: a child is told `None` for an option that its command does not have, and refuses it."""
    assert declarations(Options)["max_model_len"].arguments(None) == []


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1 << 30, "1.00 GiB"),
        (15 << 29, "7.50 GiB"),
        (10 << 30, "10.0 GiB"),
        (100 << 30, "100 GiB"),
    ],
)
def test_sizes_at_a_unit_s_edge(size: int, text: str) -> None:
    """Bug: one GiB is shown as 1024 MiB, or ten with four digits."""
    assert format_bytes(size) == text


def test_a_mapping_that_changes_later() -> None:
    """Bug: what a caller does to a mapping of theirs, once it was checked, is asked for as well."""
    asked, biases = {"enable_thinking": True}, {5: 1.0}
    sampling = SamplingParams(chat_template_kwargs=asked, logit_bias=biases)
    asked["messages"], biases[7] = False, 1e9
    assert sampling.chat_template_kwargs == {"enable_thinking": True}
    assert sampling.logit_bias == {5: 1.0}


@pytest.mark.parametrize(
    ("kind", "name", "value", "told"),
    [
        (Options, "compile", 1, "True or False (default: on a GPU only)"),
        (
            Options,
            "dtype",
            "float16",
            "one of auto, bfloat16, float32 (default: bfloat16 on a GPU, float32 on the CPU)",
        ),
        (
            Options,
            "page_size",
            0,
            "an integer from 1 up (default: 16, with our own attention (triton) 128)",
        ),
        (Options, "gpu_memory_utilization", 1.5, "a number 0 < x <= 1"),
        (Options, "acceptance_floor", -1, "a number from 0 up"),
        (Options, "simulate_acceptance", "2", "a number (default: off)"),
        (SamplingParams, "logprobs", -1, "an integer from 0 up (default: none)"),
        (SamplingParams, "presence_penalty", 3, "a number -2 <= x <= 2"),
    ],
)
def test_what_was_expected(kind: type, name: str, value: object, told: str) -> None:
    """Bug: a refusal names None or auto as the default, another range than what is allowed, or a
    limit that is out of the range itself as in it."""
    with pytest.raises(ValueError, match=name) as refused:
        kind(**{name: value})
    assert str(refused.value) == f"{name} is {value!r}; expected {told}"


def test_what_changes_logits() -> None:
    """Bug: a penalty that rewards (below 1, or below 0) is taken for none: the answer is as if
    nobody had asked, without a word."""
    asked: list[dict[str, Any]] = [
        {"repetition_penalty": 0.5},
        {"repetition_penalty": 1.5},
        {"presence_penalty": -0.5},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"frequency_penalty": 0.5},
        {"logit_bias": {0: -1.0}},
        {"allowed_token_ids": (0,)},
        {"bad_words": ("a",)},
        {"min_tokens": 1},
    ]
    assert [one for one in asked if not adjusts(SamplingParams(**one))] == []
    nothing: list[dict[str, Any]] = [
        {},
        {"logit_bias": {}},
        {"temperature": 1.0, "top_k": 3, "min_p": 0.1, "seed": 1},
        {"stop_token_ids": (7,), "ignore_eos": True, "logprobs": 1},
    ]
    assert [one for one in nothing if adjusts(SamplingParams(**one))] == []
