"""What "auto" comes to, and what is taken or refused before anything is loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from graphengine.api import Engine
from graphengine.checkpoints.hub import HYBRID_TARGET, TINY_DRAFT, TINY_TARGET
from graphengine.config.draft import DraftConfig
from graphengine.config.options import Options
from graphengine.decode.chunk_sizes import (
    DENSE_SIZES,
    EXPERT_SIZES,
    LONG_SIZES,
    PAIRED_SIZES,
    SIZES,
)
from graphengine.startup import options as module
from graphengine.startup.build import read_configs
from graphengine.startup.options import resolve_options


@pytest.mark.parametrize("quantization", ["fp8", "fp8-dynamic"])
@pytest.mark.parametrize("draft", [None, "ngram"])
def test_nothing_to_quantize(quantization: Any, draft: str | None) -> None:
    """Bug: look-up, which has no weights, is run with FP8 weights in silence."""
    options = Options(device="cpu", draft_quantization=quantization)
    with pytest.raises(ValueError, match=f"--draft-quantization {quantization} needs a drafter"):
        resolve_options(options, *read_configs(TINY_TARGET, draft))


@pytest.mark.parametrize(
    ("options", "has_gpu", "message"),
    [
        ({"device": "cuda"}, False, "--device cuda: torch sees no CUDA device; use --device cpu"),
        ({"graph_mode": "full", "attention_backend": "torch"}, True, "full needs an attention"),
    ],
)
def test_what_this_machine_or_backend_cannot(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], has_gpu: bool, message: str
) -> None:
    """Bug: who asked for the GPU gets the CPU in silence; or a capture fails after a load."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    with pytest.raises(ValueError, match=message):
        resolve_options(Options(**options), *read_configs(TINY_TARGET, None))


def test_what_flashinfer_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: what the run would be is told as what was typed: "auto" as its dtype; or another model's
    heads as those that do not fit."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module, "flashinfer_missing", lambda: False)
    target, draft = read_configs(TINY_TARGET, TINY_DRAFT)
    assert isinstance(draft, DraftConfig)
    narrow = replace(draft, model=replace(draft.model, head_dim=32))
    asked = Options(attention_backend="flashinfer")
    for options, drafter, told in (
        (asked, narrow, r"not bfloat16 with head_dim \[64, 32\]"),
        (replace(asked, dtype="float32"), draft, r"not float32 with head_dim \[64, 64\]"),
    ):
        with pytest.raises(ValueError, match=rf"flashinfer runs bfloat16 and head_dim .*{told}"):
            resolve_options(options, target, drafter)


def test_torch_s_attention_is_also_a_prompt_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: who asks for torch's attention on a GPU, to leave out a kernel, gets FlashInfer's for
    prompts."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module, "flashinfer_missing", lambda: False)
    configs = read_configs(TINY_TARGET, None)
    config = resolve_options(Options(attention_backend="torch"), *configs)
    assert config.prefill_attention_backend == "torch"


@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("qwen3-8b", DENSE_SIZES),
        ("qwen3.5-4b", ()),
        ("qwen3-30b-a3b", EXPERT_SIZES),
        ("qwen3.6-35b-a3b", EXPERT_SIZES),
    ],
)
def test_chunks_are_those_of_every_mode(
    monkeypatch: pytest.MonkeyPatch, model: str, more: tuple[int, ...]
) -> None:
    """Bug: a mode has chunks of its own, so that its K/V rounds otherwise, and `verify --matrix`
    finds other tokens; or a model has those of another kind. Halves, of mode full alone, write the
    bits of whole ones."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(module, "flashinfer_missing", lambda: False)
    configs = read_configs(model, None)
    found = [
        resolve_options(Options(graph_mode=mode, attention_backend="triton"), *configs)
        for mode in ("none", "piecewise", "full")
    ]
    none, piecewise, full = ({*c.prefill_sizes} - {*PAIRED_SIZES} for c in found)
    assert none == piecewise == full == {*SIZES, *LONG_SIZES, *more}
    assert len({config.far_prefill_sizes for config in found}) == 1


@pytest.mark.parametrize("has_gpu", [False, True])
def test_heads_that_no_kernel_takes(monkeypatch: pytest.MonkeyPatch, has_gpu: bool) -> None:
    """Bug: on a GPU a model with heads of 96, as Phi-3-mini's, passes doctor and loads for minutes;
    then its first forward is refused."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    target = replace(read_configs(TINY_TARGET, None)[0], head_dim=96)
    if not has_gpu:
        assert resolve_options(Options(), target, None).device == "cpu"
        return
    with pytest.raises(ValueError, match=r"head_dim 96: .* a power of two from 2 to 256; .* CPU"):
        resolve_options(Options(attention_backend="torch"), target, None)


@pytest.mark.parametrize("asked", [None, False, True])
@pytest.mark.parametrize("option", ["sampling", "adjustments", "structured_outputs"])
def test_what_requests_may_ask(option: str, asked: bool | None) -> None:
    """Bug: where nothing is captured an engine offers, and takes memory for, what it was asked to
    be built without."""
    options: dict[str, Any] = {"device": "cpu", option: asked}
    config = resolve_options(Options(**options), *read_configs(TINY_TARGET, None))
    assert getattr(config, option) is (asked is not False)


@pytest.mark.parametrize(("asked", "most"), [(None, 20), (0, 0), (3, 3)])
def test_most_alternatives_that_requests_may_ask(asked: int | None, most: int) -> None:
    """Bug: where nothing is captured an engine has log-probabilities, and plans memory for them,
    that it was asked to be built without."""
    options = Options(device="cpu", max_logprobs=asked)
    config = resolve_options(options, *read_configs(TINY_TARGET, None))
    assert config.max_logprobs == most


def test_drawn_acceptance_offers_nothing() -> None:
    """Bug: an engine whose acceptance is drawn says that it has log-probabilities, and who asks for
    some gets a KeyError; or it falls back to plain decoding by what was drawn."""
    options = Options(device="cpu", simulate_acceptance=2.0)
    config = resolve_options(options, *read_configs(TINY_TARGET, TINY_DRAFT))
    names = ("sampling", "adjustments", "max_logprobs", "structured_outputs", "fallback")
    assert not any(getattr(config, name) for name in names)


@pytest.mark.parametrize(
    ("draft", "simulated", "floor"),
    [(TINY_DRAFT, None, 1.5), (TINY_DRAFT, 2.0, 0.0), ("ngram", None, 0.0), (None, None, 1.5)],
)
def test_whose_acceptance_is_watched(draft: Any, simulated: float | None, floor: float) -> None:
    """Bug: users are warned about look-up, which is often wrong by nature, or about acceptance that
    was drawn; or about no drafter at all."""
    options = Options(device="cpu", acceptance_floor=1.5, simulate_acceptance=simulated)
    config = resolve_options(options, *read_configs(TINY_TARGET, draft))
    assert config.acceptance_floor == floor


def test_of_whom_halves_run_beside_each_other() -> None:
    """Bug: the halves of a hybrid's chunk both advance one state, or the drafter's context of the
    first half is without the last layer, which the half does not run."""
    target, draft = read_configs(TINY_TARGET, TINY_DRAFT)
    assert isinstance(draft, DraftConfig)
    for drafter in (draft, None):
        assert module._halves_pay(target, drafter)
    last = (*draft.target_layer_ids[:-1], target.num_hidden_layers - 1)
    assert not module._halves_pay(target, replace(draft, target_layer_ids=last))
    assert not module._halves_pay(read_configs(HYBRID_TARGET, None)[0], None)


@pytest.mark.parametrize(("convention", "rows"), [("anchor-dropped", 16), ("anchor-first", 17)])
def test_a_context_past_the_drafted_one(convention: Any, rows: int) -> None:
    """Bug: the block that is taken off the positions is told as the drafter's forward, which has a
    row less where the anchor drafts too, or the limit is another than the sum."""
    target, draft = read_configs(TINY_TARGET, TINY_DRAFT)
    assert isinstance(draft, DraftConfig)
    pair, most = (target, replace(draft, slot_convention=convention)), 4096 - rows
    asked = Options(device="cpu", max_model_len=most)
    assert resolve_options(asked, *pair).max_model_len == most
    with pytest.raises(ValueError, match="--max-model-len") as refused:
        resolve_options(replace(asked, max_model_len=most + 1), *pair)
    assert str(refused.value) == (
        f"--max-model-len {most + 1}: between 2 and {most} for this model (its positions less a "
        f"block of {rows}; with --finish-in-plain-decode all of them)"
    )
    asked = replace(asked, finish_in_plain_decode=True, max_model_len=4097)
    with pytest.raises(ValueError, match=r"4097: between 2 and 4096 for this model$"):
        resolve_options(asked, *pair)


@pytest.mark.parametrize(("convention", "rows"), [("anchor-dropped", 16), ("anchor-first", 17)])
@pytest.mark.parametrize("length", [1, 2])
def test_the_fewest_positions_that_hold_a_request(length: int, convention: Any, rows: int) -> None:
    """Bug: a drafter whose block leaves just room for a prompt's token and an answer's is refused;
    or one that leaves less is taken, or told with other positions than the models have."""
    target, draft = read_configs(TINY_TARGET, TINY_DRAFT)
    assert isinstance(draft, DraftConfig)
    draft = replace(draft, slot_convention=convention)
    small = replace(target, max_position_embeddings=length + rows)
    if length == 2:
        assert resolve_options(Options(device="cpu"), small, draft).max_model_len == length
        return
    with pytest.raises(ValueError, match="no request fits") as refused:
        resolve_options(Options(device="cpu"), small, draft)
    assert str(refused.value) == (
        f"the drafter's block of 16 verifies {rows} rows, and the models have {rows + 1} "
        "positions: no request fits; check block_size and max_position_embeddings of the drafter's "
        "config.json, or pass --finish-in-plain-decode or --draft none"
    )


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "half"},
        {"device": "tpu"},
        {"graph_mode": "partial"},
        {"attention_backend": "sdpa"},
        {"draft_quantization": "int4"},
        {"load_format": "pickle"},
    ],
)
def test_unknown_choices_are_refused(options: dict[str, Any]) -> None:
    """Bug: a choice that nobody knows is taken from Python as if it were another one."""
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name} is {value!r}; expected one of"):
        Engine.from_pretrained(TINY_TARGET, **options)


def test_what_drawn_acceptance_leaves_out() -> None:
    """Bug: who loads an engine with an option that needs real acceptance is told to leave out the
    flag of another one."""
    pair, told = read_configs(TINY_TARGET, TINY_DRAFT), list[str]()
    asked: list[dict[str, Any]] = [
        {"sampling": True},
        {"adjustments": True},
        {"max_logprobs": 1},
        {"structured_outputs": True},
    ]
    for options in asked:
        with pytest.raises(ValueError, match="acceptance") as refused:
            resolve_options(Options(device="cpu", simulate_acceptance=2.0, **options), *pair)
        told.append(str(refused.value))
    begin = "needs real acceptance; leave out --simulate-acceptance or"
    assert told == [
        f"sampling {begin} --temperature",
        f"adjustments {begin} penalties, --logit-bias, --bad-words and --min-tokens",
        f"max_logprobs {begin} --logprobs and --prompt-logprobs",
        f"structured_outputs {begin} --json-schema, --regex, --choice and --grammar",
    ]


def test_numbers_for_buckets_that_repeat() -> None:
    """Bug: who names a bucket twice and two numbers is told that there are two buckets."""
    asked = Options(device="cpu", buckets=(4, 4, 8), num_speculative_tokens=(7, 3))
    with pytest.raises(ValueError, match="num-speculative-tokens") as refused:
        resolve_options(asked, *read_configs(TINY_TARGET, TINY_DRAFT))
    assert str(refused.value) == (
        "--num-speculative-tokens 7,3: 2 numbers for 3 buckets; pass one for all, or one for each "
        "in the order of --bucket"
    )


@pytest.mark.parametrize(("backend", "size"), [("torch", 16), ("triton", 128)])
def test_tokens_of_a_page(backend: Any, size: int) -> None:
    """Bug: pages have the size that fits the attention of prefills, and help says another one."""
    pair = read_configs(TINY_TARGET, TINY_DRAFT)
    assert (
        resolve_options(Options(device="cpu", attention_backend=backend), *pair).page_size == size
    )
    asked = Options(device="cpu", attention_backend=backend, page_size=32)
    assert resolve_options(asked, *pair).page_size == 32
