"""The Python API: what goes in as a prompt, what chunks and results say, who owns the engine."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from graphengine.api import Chunk, Engine
from graphengine.checkpoints import stops
from graphengine.checkpoints.hub import HYBRID_TARGET
from tests.support.checkpoints import edit_config, make_drafter, make_target

TEXTS = ["Tom has 3 apples", "how many apples?", "def add"]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    target = make_target(tmp_path_factory.mktemp("target"), tie=False, likely_tokens=40)
    return target, make_drafter(tmp_path_factory.mktemp("drafter"), target)


@pytest.fixture(scope="module")
def engine(directories: tuple[Path, Path]) -> Iterator[Engine]:
    with Engine.from_pretrained(*directories, buckets=(1, 3), max_model_len=200) as engine:
        yield engine


def test_results_come_in_the_order_of_prompts(engine: Engine) -> None:
    """Bug: results are ordered by when requests ended."""
    many = [*TEXTS, *reversed(TEXTS), TEXTS[0]]
    results = engine.generate(many, max_new_tokens=30)
    alone = {text: engine.generate(text, max_new_tokens=30)[0].token_ids for text in TEXTS}
    assert [r.token_ids for r in results] == [alone[text] for text in many]


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_chunks_add_up(engine: Engine, ignore_eos: bool) -> None:
    """Bug: streamed tokens or text differ from the result's, or a result comes twice or early."""
    chunks: dict[int, list[Chunk]] = {0: [], 1: [], 2: []}
    for chunk in engine.stream_many(TEXTS, max_new_tokens=25, ignore_eos=ignore_eos):
        chunks[chunk.index].append(chunk)
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    for own in chunks.values():
        assert [chunk.result is not None for chunk in own] == [False] * (len(own) - 1) + [True]
        result = own[-1].result
        assert result is not None
        assert [t for chunk in own for t in chunk.token_ids] == result.token_ids
        assert "".join(chunk.text for chunk in own) == result.text
        assert result.text == tokenizer.decode(result.token_ids)
        assert all(1 <= len(chunk.token_ids) <= 4 for chunk in own)


def test_metrics_add_up(engine: Engine) -> None:
    """Bug: steps, tokens and times of a request do not describe the same run, or the time that its
    text took to encode is nowhere."""
    for result in engine.generate(TEXTS, max_new_tokens=25, ignore_eos=True):
        metrics = result.metrics
        assert metrics.num_output_tokens == len(result.token_ids) == 25
        produced = metrics.num_steps * metrics.acceptance.mean_acceptance_length
        # The first token is the prefill's; the last block may be cut by the budget.
        assert 24 <= round(produced) <= 24 + 3
        assert metrics.ttft_ms > metrics.tokenize_ms > 0 and metrics.decode_ms > 0
        parts = (metrics.tokenize_ms, metrics.queue_ms, metrics.prefill_ms, metrics.first_token_ms)
        assert sum(parts) == pytest.approx(metrics.ttft_ms)
        assert 0 < metrics.launch_ms <= metrics.prefill_ms
        assert metrics.ms_per_token == pytest.approx(metrics.decode_ms / 24)
        assert metrics.tokens_per_s == pytest.approx(24e3 / metrics.decode_ms)


def test_startup_says_what_was_built(engine: Engine, directories: tuple[Path, Path]) -> None:
    """Bug: bytes or counts are reported for something else than what was loaded."""
    sizes = [(path / "model.safetensors").stat().st_size for path in directories]
    # Headers are a few kB; the rope tables and the packed context weights come on top.
    assert engine.startup.weight_bytes == pytest.approx(sum(sizes), rel=0.35)
    assert engine.num_draft_tokens == 3
    assert engine.startup.num_graphs == 0
    config = engine.config
    assert (config.device, config.dtype, config.graph_mode) == ("cpu", "float32", "none")
    assert config.buckets == (1, 3)


def test_one_generation_at_a_time(engine: Engine) -> None:
    """Bug: a second generation in the middle of a stream corrupts the first, or both."""
    arguments: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True}
    expected = [engine.generate(text, **arguments)[0].token_ids for text in TEXTS[:2]]
    stream = engine.stream(TEXTS[0], **arguments)
    first = next(stream)
    found: list[BaseException] = []

    def elsewhere() -> None:
        try:
            engine.generate(TEXTS[1])
        except RuntimeError as error:
            found.append(error)

    async def task() -> None:
        elsewhere()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    asyncio.run(task())
    assert len(found) == 2 and all("another generation" in str(error) for error in found)
    assert first.token_ids + [t for chunk in stream for t in chunk.token_ids] == expected[0]


def test_a_stream_that_stands_still_gives_way(engine: Engine) -> None:
    """Bug: after Ctrl-C in the loop over a stream the engine stays taken while the stream's
    variable lives; or the old stream, asked to go on, ends as if all had been said, or takes the
    new one's requests with it."""
    arguments: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True}
    expected = [engine.generate(text, **arguments)[0].token_ids for text in TEXTS[:2]]
    old = engine.stream(TEXTS[0], **arguments)
    next(old)
    new = engine.stream(TEXTS[1], **arguments)
    found = list(next(new).token_ids)
    with pytest.raises(RuntimeError, match="superseded by a later"):
        list(old)
    assert found + [t for chunk in new for t in chunk.token_ids] == expected[1]
    assert engine.generate(TEXTS[0], **arguments)[0].token_ids == expected[0]


@pytest.mark.parametrize("looks", [False, True])
def test_another_thread_closes_the_engine_within_a_step(
    directories: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, looks: bool
) -> None:
    """Bug: the step finds nothing to do, and all that was asked for is answered by an empty list;
    or it misses its results, and calls that a defect."""
    engine = Engine.from_pretrained(*directories, buckets=(1,), max_model_len=200)
    loop: Any = engine.built.loop

    def wait() -> None:
        results = loop.first.in_flight[0].results
        thread = threading.Thread(target=engine.close)
        thread.start()
        thread.join()
        if looks:
            results.wait()

    monkeypatch.setattr(loop, "wait", wait)
    with pytest.raises(RuntimeError, match=r"closed; make a new one with from_pretrained$"):
        engine.generate(TEXTS[0], max_new_tokens=20, ignore_eos=True)


def test_an_engine_needs_a_model(directories: tuple[Path, Path]) -> None:
    """Bug: `Engine(path)` is made and fails later with an AttributeError; a name that is None loads
    the bundled pair."""
    with pytest.raises(TypeError, match=r"use Engine\.from_pretrained"):
        Engine(directories[0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the target is None"):
        Engine.from_pretrained(None)  # type: ignore[arg-type]


def test_threads_take_turns_or_are_refused(engine: Engine) -> None:
    """Bug: two threads pass the check before either begins, and each decodes the other's rows: text
    that is wrong without a word, or a page that is freed twice."""
    expected = {text: engine.generate(text, max_new_tokens=6)[0].token_ids for text in TEXTS}
    found: list[bool | BaseException] = []

    def run(text: str) -> None:
        for _ in range(20):
            try:
                found.append(engine.generate(text, max_new_tokens=6)[0].token_ids == expected[text])
            except BaseException as error:
                found.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=run, args=(text,)) for text in [*TEXTS, *TEXTS][:4]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert len(found) == 80
    assert True in found and False not in found
    for error in found:
        if isinstance(error, BaseException):
            assert isinstance(error, RuntimeError)
            assert "another generation" in str(error) or "superseded" in str(error), error
    assert engine.generate(TEXTS[0], max_new_tokens=6)[0].token_ids == expected[TEXTS[0]]


def test_inference_mode_of_the_caller(directories: tuple[Path, Path]) -> None:
    """Bug: an engine that was built inside `torch.inference_mode`, or whose late buckets and plain
    decoding were, cannot be used outside of it, and says that the device has failed."""
    prompts = [[5, 6, 7], [8, 9]]
    options: dict[str, Any] = {"buckets": (1, 2), "device": "cpu", "lazy_capture": True}
    arguments: dict[str, Any] = {"max_new_tokens": 6, "ignore_eos": True}
    with torch.inference_mode():
        engine = Engine.from_pretrained(*directories, **options)
        inside = [engine.generate(prompts[:1], **arguments), engine.generate(prompts, **arguments)]
        loop: Any = engine.built.loop
        loop.fallback.prepare()
    with engine:
        outside = [engine.generate(prompts[:1], **arguments), engine.generate(prompts, **arguments)]
        for one, other in zip(inside, outside, strict=True):
            assert [r.token_ids for r in one] == [r.token_ids for r in other]
        assert not next(
            iter(loop.fallback.plain.buckets.values())
        ).buffers.block_ids_BG.is_inference()


@pytest.mark.parametrize("ends", [lambda e: e.generate([3], max_new_tokens=1), Engine.close])
def test_a_stream_that_is_over_gives_no_more(
    directories: tuple[Path, Path], ends: Callable[[Engine], Any]
) -> None:
    """Bug: of a step that several prompts share, a stream that was superseded or whose engine was
    closed gives the other prompts' chunks, as results that were aborted."""
    with Engine.from_pretrained(*directories, buckets=(1, 3), max_model_len=200) as engine:
        stream = engine.stream_many(TEXTS, max_new_tokens=9, ignore_eos=True)
        assert next(stream).result is None
        ends(engine)
        with pytest.raises(RuntimeError, match=r"superseded|closed"):
            next(stream)


def test_superseded_stream_says_so(engine: Engine) -> None:
    """Bug: a stream that was never started runs later with requests that are gone, or hangs."""
    never = engine.stream(TEXTS[0])
    assert len(engine.generate(TEXTS[1], max_new_tokens=3)) == 1
    with pytest.raises(RuntimeError, match="superseded"):
        next(never)


def test_exception_in_the_consumer(engine: Engine) -> None:
    """Bug: Ctrl-C in the loop over a stream leaves the engine busy for ever."""

    def consume() -> None:
        for _ in engine.stream(TEXTS[0], max_new_tokens=40, ignore_eos=True):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        consume()
    assert len(engine.generate(TEXTS[0], max_new_tokens=3, ignore_eos=True)[0].token_ids) == 3


@pytest.mark.parametrize("is_hybrid", [False, True])
def test_autocast_around_a_generation(directories: tuple[Path, Path], is_hybrid: bool) -> None:
    """Bug: a caller's torch.autocast is refused by a kernel's dtypes, without a word of it."""
    target = HYBRID_TARGET if is_hybrid else directories[0]
    with Engine.from_pretrained(target, device="cpu", dtype="float32", buckets=(1,)) as engine:
        with (
            torch.autocast("cpu", dtype=torch.bfloat16),
            pytest.raises(ValueError, match=r"outside of torch\.autocast"),
        ):
            engine.generate(TEXTS[0], max_new_tokens=3)
        assert engine.generate(TEXTS[0], max_new_tokens=3)[0].token_ids


def test_end_tokens_come_from_the_generation_config(tmp_path: Path) -> None:
    """Bug: config.json's single end token hides <|im_end|>, and answers never end."""
    target = make_target(tmp_path, tie=False)
    options: dict[str, Any] = {"buckets": (1,), "max_model_len": 100}
    with Engine.from_pretrained(target, **options) as engine:
        plain = engine.generate(TEXTS[0], max_new_tokens=20, ignore_eos=True)[0].token_ids
    place = next(i for i in range(3, 20) if plain[i] not in plain[:i])
    for ids in ([plain[place], 65], plain[place]):
        edit_config(target, lambda values, ids=ids: {"eos_token_id": ids}, "generation_config.json")
        with Engine.from_pretrained(target, **options) as engine:
            (result,) = engine.generate(TEXTS[0], max_new_tokens=20)
        assert result.token_ids == plain[: place + 1] and result.finish_reason == "stop"
    (tmp_path / "generation_config.json").unlink()
    edit_config(target, lambda values: values | {"eos_token_id": plain[place]})
    with Engine.from_pretrained(target, **options) as engine:
        assert len(engine.generate(TEXTS[0], max_new_tokens=20)[0].token_ids) == place + 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buckets": ()}, "expected batch sizes, integers from 1 up"),
        ({"buckets": (0, 1)}, "expected batch sizes, integers from 1 up"),
        ({"graph_mode": "full"}, "captures CUDA graphs; on the CPU use --graph-mode none"),
        ({"graph_mode": "piecewise"}, "on the CPU use --graph-mode none"),
        ({"attention_backend": "flashinfer"}, "--attention-backend flashinfer needs a CUDA device"),
        ({"buckets": (1.5,)}, "expected batch sizes, integers from 1 up"),
        ({"buckets": "1,8"}, "expected batch sizes, integers from 1 up"),
        ({"page_size": 0}, "page_size is 0"),
        ({"page_size": 16.0}, "page_size is 16.0; expected an integer"),
        ({"max_model_len": 99.5}, "max_model_len is 99.5; expected an integer"),
        ({"max_model_len": 509}, "--max-model-len 509: between 2 and 508"),
        ({"max_model_len": 1}, "max_model_len is 1; expected an integer from 2 up"),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization is 0.0"),
        ({"buckets": 5}, "buckets is 5; expected batch sizes"),
        ({"buckets": None}, "buckets is None"),
        ({"gpu_memory_utilization": "a"}, "gpu_memory_utilization is 'a'; expected a number"),
        ({"acceptance_floor": None}, "acceptance_floor is None; expected a number"),
        ({"simulate_acceptance": "6"}, "simulate_acceptance is '6'; expected a number"),
        ({"compile": "no"}, "compile is 'no'; expected True or False"),
        ({"fallback": None}, "fallback is None; expected True or False"),
    ],
)
def test_options_that_cannot_work(
    directories: tuple[Path, Path], options: dict[str, Any], message: str
) -> None:
    """Bug: a bad option fails late, with a traceback, instead of naming value and remedy."""
    with pytest.raises(ValueError, match=message):
        Engine.from_pretrained(*directories, device="cpu", **options)


def test_missing_files_are_named(tmp_path: Path) -> None:
    """Bug: a wrong path or an incomplete directory is a FileNotFoundError of some library."""
    with pytest.raises(ValueError, match="no such model directory"):
        Engine.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"no config\.json in this directory"):
        Engine.from_pretrained(tmp_path)
    target = make_target(tmp_path / "target", tokenizer=False)
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        Engine.from_pretrained(target)
    (target / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="holds list, expected a JSON object"):
        Engine.from_pretrained(target)
    (target / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not readable JSON"):
        Engine.from_pretrained(target)


@pytest.mark.parametrize("load_format", ["dummy", "dummy-uniform"])
def test_dummy_weights_need_a_config_only(tmp_path: Path, load_format: Any) -> None:
    """Bug: load_format dummy still wants weights or a tokenizer."""
    target = make_target(tmp_path / "target", tokenizer=False)
    drafter = make_drafter(tmp_path / "drafter", target)
    for directory in (target, drafter):
        (directory / "model.safetensors").unlink()
    with Engine.from_pretrained(target, drafter, load_format=load_format, buckets=(1,)) as engine:
        assert engine.tokenizer is None
        with pytest.raises(ValueError, match="no tokenizer; pass token ids"):
            engine.generate("text")
        (result,) = engine.generate([1, 2, 3], max_new_tokens=7, ignore_eos=True)
        assert len(result.token_ids) == 7 and result.text == ""
    with pytest.raises(ValueError, match="no tokenizer"):
        Engine.from_pretrained(target, drafter)


def test_text_that_is_held_back_comes_with_the_last_chunk(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: an answer that ends inside a character loses what the detokenizer still holds; or it is
    not told of the prompt that it goes on from."""
    prompts = list[list[int]]()

    class Holding:
        def __init__(self, tokenizer: object, behind: list[int], *_: object) -> None:
            self.held = ""
            prompts.append(behind)

        def feed(self, token_ids: list[int], last: bool = False) -> str:
            self.held += "x" * len(token_ids)
            return self.held if last else ""

    monkeypatch.setattr(stops, "Detokenizer", Holding)
    chunks = list(engine.stream(TEXTS[0], max_new_tokens=9, ignore_eos=True))
    assert [chunk.text for chunk in chunks] == [""] * (len(chunks) - 1) + ["x" * 9]
    assert chunks[-1].result is not None and chunks[-1].result.text == "x" * 9
    assert engine.tokenizer is not None
    assert prompts == [engine.tokenizer.encode_chat([{"role": "user", "content": TEXTS[0]}])]


def test_a_second_generation_inside_a_step(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a call from another thread, or from a handler, while a stream is between two of its own
    lines drops the requests of that stream."""
    real, refused = engine.built.loop.collect, []

    def collect() -> Any:
        with pytest.raises(RuntimeError, match="another generation of this engine is active"):
            engine.generate(TEXTS[1], max_new_tokens=2)
        refused.append(1)
        return real()

    expected = engine.generate(TEXTS[0], max_new_tokens=9, ignore_eos=True)[0].token_ids
    with monkeypatch.context() as patch:
        patch.setattr(engine.built.loop, "collect", collect)
        (result,) = engine.generate(TEXTS[0], max_new_tokens=9, ignore_eos=True)
    assert refused and result.token_ids == expected
