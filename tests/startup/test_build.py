"""What a start makes of its options: random weights, a context that the pool holds, grammars."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphengine.api import Engine
from graphengine.capture import compile as compiling
from graphengine.checkpoints.hub import TINY_DRAFT, TINY_TARGET
from graphengine.decode import buckets
from graphengine.decode.chunk_sizes import LONG_SIZES
from graphengine.decode.proposer import Pair
from graphengine.startup import build, decoding
from tests.support.checkpoints import make_drafter, make_target


@pytest.mark.parametrize(("load_format", "is_uniform"), [("dummy", False), ("dummy-uniform", True)])
def test_which_random_weights(tmp_path: Path, load_format: str, is_uniform: bool) -> None:
    """Bug: the two kinds are swapped, and what is compared with vLLM's dummy weights is not like
    them."""
    target = make_target(tmp_path / "target", tokenizer=False)
    with Engine.from_pretrained(
        target, buckets=(1,), max_model_len=64, device="cpu", load_format=load_format
    ) as engine:
        weights = engine.built.loop.prefill.pair.target.weights
        assert (weights.embed_VD.abs().max() <= 1e-3).item() is is_uniform
        assert torch.equal(weights.norm_D, torch.ones_like(weights.norm_D)) is not is_uniform


def test_a_random_drafter_is_drawn_for_itself(tmp_path: Path) -> None:
    """Bug: target and drafter are drawn alike: the drafter's first matrix is the beginning of the
    target's embedding, and acceptance by luck is another than with weights that differ."""
    target = make_target(tmp_path / "target", tokenizer=False)
    draft = make_drafter(tmp_path / "draft", target)
    with Engine.from_pretrained(
        target, draft, buckets=(1,), max_model_len=64, device="cpu", load_format="dummy"
    ) as engine:
        pair = engine.built.loop.prefill.pair
        own = pair.proposer.tensors[0].fc_DC.flatten()[:64]
        assert not torch.equal(own, pair.target.weights.embed_VD.flatten()[:64])


def test_the_bar_of_loading(tmp_path: Path) -> None:
    """Bug: it goes backwards, ends before its end, or says another model's name."""
    target = make_target(tmp_path / "target", layers=1)
    seen: list[tuple[str, float]] = []
    options: dict[str, Any] = {"buckets": (1,), "max_model_len": 64, "device": "cpu"}
    Engine.from_pretrained(
        target, progress=lambda what, share: seen.append((what, share)), **options
    ).close()
    shares = [share for what, share in seen if what == "loading target"]
    assert len(shares) > 5 and shares == sorted(shares) and 0.9 < shares[-1] <= 1


def test_a_bar_that_is_none(tmp_path: Path) -> None:
    """Bug: `progress=None`, for no bar, or what is no function is "object is not callable", once
    weights are read and without the option's name."""
    target = make_target(tmp_path / "target", layers=1)
    options: dict[str, Any] = {"buckets": (1,), "max_model_len": 64, "device": "cpu"}
    Engine.from_pretrained(target, progress=None, **options).close()
    with pytest.raises(TypeError, match=r"progress is True; pass a function of"):
        Engine.from_pretrained("no-model", progress=True, **options)


def test_a_context_that_the_pool_does_not_hold(tmp_path: Path) -> None:
    """Bug: where nobody asks for a length the models' own is refused, although a shorter one fits;
    or a length that was asked for is shortened in silence."""
    target = make_target(tmp_path / "target", max_positions=512)
    page = 2 * 2 * (2 * 16) * 4 * 16  # layers, keys and values, heads, float32, tokens
    asked = {"buckets": (1,), "device": "cpu", "page_size": 16, "kv_cache_memory": 9 * page}
    with Engine.from_pretrained(target, **asked) as engine:
        assert engine.memory_plan.num_pages == 9
        # A page is the null page, and a position behind the last token is the next step's.
        assert engine.config.max_model_len == engine.memory_plan.max_model_len == 8 * 16 - 1
    with pytest.raises(ValueError, match=r"a context of 512 tokens .* fits is 127 tokens"):
        Engine.from_pretrained(target, max_model_len=512, **asked)


@pytest.mark.parametrize("asked", [True, False])
def test_what_grammars_share_is_built_by_a_start(asked: bool) -> None:
    """Bug: the first request with a grammar waits for it, a second with 150k tokens; or a start
    that offers none builds it too."""
    options = {"buckets": (1,), "max_model_len": 64, "device": "cpu", "structured_outputs": asked}
    with Engine.from_pretrained(TINY_TARGET, **options) as engine:
        grammars = engine.built.grammars
        assert grammars is not None and (grammars._tokenizer is not None) is asked


def test_what_a_start_has_compiled_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a process's second engine counts what the first has compiled, and a start that found all
    of its code is told as a cold one."""
    monkeypatch.setattr(buckets, "compile_segments", tuple)  # nothing is compiled
    monkeypatch.setattr(compiling, "_COUNTS", Counter(hits=3, misses=5))  # by an earlier engine
    options = {"buckets": (1,), "max_model_len": 64, "device": "cpu", "compile": True}
    with Engine.from_pretrained(TINY_TARGET, **options) as engine:
        assert (engine.startup.num_cache_hits, engine.startup.num_compiled) == (0, 0)


@pytest.mark.parametrize(("is_prepared", "num_lanes"), [(False, 1), (True, 2)])
def test_seconds_of_every_lane(
    monkeypatch: pytest.MonkeyPatch, is_prepared: bool, num_lanes: int
) -> None:
    """Bug: what a start compiles and captures to decode plainly is in no phase's seconds, or what
    it captures is told as compiling."""
    real = buckets.BucketBuilder.build_ahead

    def build_ahead(builder: Any, *args: Any) -> Any:
        found = real(builder, *args)
        builder.compile_s, builder.capture_s = 100.0, 1000.0
        return found

    monkeypatch.setattr(buckets.BucketBuilder, "build_ahead", build_ahead)
    options = {"buckets": (1,), "max_model_len": 64, "prepare_plain_decode": is_prepared}
    with Engine.from_pretrained(TINY_TARGET, TINY_DRAFT, device="cpu", **options) as engine:
        startup = engine.startup
    compile_s = startup.compile_s - startup.compiler_wait_s
    assert (compile_s, startup.capture_s) == pytest.approx((num_lanes * 100, num_lanes * 1000))


@pytest.mark.parametrize("is_kept", [False, True])
def test_processes_begin_where_nothing_is_compiled(
    is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a start that finds all kernels has processes begun to compile them; or one that finds
    none waits for them, seconds behind its weights."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    if is_kept:
        (tmp_path / "cache" / "a kernel").mkdir(parents=True)
    steps: list[str] = []
    names = "import_dynamo name_compilers_ use_own_folder_ settle_cache_keys load_driver".split()
    for name in names:
        monkeypatch.setattr(build, name, lambda: None)
    for name in ("import_inductor", "begin_workers"):
        monkeypatch.setattr(build, name, partial(steps.append, name))
    triton = dict.fromkeys(("attention_backend", "prefill_attention_backend"), "triton")
    config: Any = SimpleNamespace(compile=True, device="cuda", **triton)
    for thread in build._prepare_compilers(config, config, None):
        thread.join()
    assert steps == ["import_inductor", "begin_workers"][: 2 - is_kept]


@pytest.mark.parametrize(("num_made", "num_collections"), [(1_000, 0), (400_000, 1)])
def test_garbage_is_collected_behind_a_start(
    monkeypatch: pytest.MonkeyPatch, num_made: int, num_collections: int
) -> None:
    """Bug: the collector goes through all that torch's compiler has made seven times in a start,
    1.1 s of a warm one (2-core cloud CPU); or the first request waits until it has."""
    collections = list[bool]()
    monkeypatch.setattr(gc, "collect", lambda: collections.append(gc.isenabled()))

    @build.collected_behind()
    def start() -> list[Any]:
        made: list[Any] = [[] for _ in range(num_made)]
        assert not gc.isenabled()
        return made

    for is_enabled in (True, False):
        (gc.enable if is_enabled else gc.disable)()
        try:
            kept = start()
            assert gc.isenabled() is is_enabled and len(kept) == num_made
        finally:
            gc.enable()
    assert collections == [True] * num_collections


def test_which_chunks_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the shortest of the long chunks, whose attention is of one prompt, is shared."""

    def made_chunk(pair: Pair, size: int, is_long: bool, *_: bool) -> SimpleNamespace:
        return SimpleNamespace(size=size, is_long=is_long)

    options = {"buckets": (1,), "max_model_len": 64, "device": "cpu"}
    with Engine.from_pretrained(TINY_TARGET, **options) as engine:
        monkeypatch.setattr(decoding, "FixedChunk", made_chunk)
        pair = engine.built.loop.prefill.pair
        config = replace(pair.config, prefill_sizes=(512, *LONG_SIZES), far_prefill_sizes=())
        made = decoding._prefill(replace(pair, config=config))
    assert [chunk.is_long for chunk in made.fixed] == [False, *[True] * len(LONG_SIZES)]


def test_float16_is_refused_and_converted(tmp_path: Path) -> None:
    """Bug T35: an fp16 checkpoint makes the engine run in fp16, where the drafter's fusion of taps
    overflows: a few percent of the acceptance are left, without an error."""
    target = make_target(tmp_path / "target", dtype="float16")
    drafter = make_drafter(tmp_path / "drafter", target, dtype="float16")
    for dtype in ("bfloat16", "float32"):
        with Engine.from_pretrained(target, drafter, dtype=dtype, buckets=(1,)) as engine:
            target_weights = engine.built.loop.prefill.pair.target.weights
            proposer: Any = engine.built.loop.prefill.pair.proposer
            kind = getattr(torch, dtype)
            assert proposer.weights.fc_DC.dtype == proposer.kv_pool.dtype == kind
            assert target_weights.embed_VD.dtype == kind
    with pytest.raises(ValueError, match=r"dtype is 'float16'.*bfloat16, float32"):
        Engine.from_pretrained(target, drafter, dtype="float16")


def test_how_long_plain_decode_takes_to_build(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug: the log tells milliseconds as seconds, so a fall back to plain decode seems to cost
    half an hour."""
    caplog.set_level("INFO", logger=decoding.__name__)
    clock = SimpleNamespace(perf_counter=iter([3.0, 5.25]).__next__)
    monkeypatch.setattr(decoding, "time", clock)
    asked = {"buckets": (1,), "max_model_len": 64, "device": "cpu", "prepare_plain_decode": True}
    Engine.from_pretrained(TINY_TARGET, "ngram", **asked).close()
    told = [record.getMessage() for record in caplog.records if record.name == decoding.__name__]
    assert told == ["plain decode built in 2.25 s"]
