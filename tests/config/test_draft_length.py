"""Buckets that draft fewer tokens than the drafter could: what is taken, refused, and the output.

Requests move between buckets of different blocks while the set of running ones changes; only their
lengths and anchors move with them, so the output must stay that of plain decoding.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from graphengine.api import Engine
from graphengine.checkpoints.hub import TINY_DRAFT, TINY_TARGET
from graphengine.cli.main import main
from graphengine.config.draft import DraftConfig
from graphengine.config.draft_length import draft_at, longest_draft, resolve_draft_lengths
from graphengine.config.options import Options
from graphengine.decode.simulate import acceptance_rate, make_simulation
from graphengine.startup.build import read_configs
from graphengine.startup.options import resolve_options
from tests.support.checkpoints import as_deepspec, make_drafter, make_target
from tests.support.command_line import refused
from tests.support.dflash_reference import force_drafts, load_target, plain_generate

QUESTIONS = [
    "Tom has 3 apples and buys 4 more. How many now?",
    "Count from 20 to 146 in steps of 6.",
    "What is 12 plus 30?",
    "Name the days of the week.",
    "Write the alphabet.",
]
LENGTH = 40
OPTIONS: dict[str, Any] = {"device": "cpu", "max_model_len": 256, "fallback": False}
CONFIGS = read_configs(TINY_TARGET, TINY_DRAFT)


@pytest.fixture(scope="module")
def plain() -> dict[str, list[int]]:
    with Engine.from_pretrained(TINY_TARGET, "none", buckets=(1,), **OPTIONS) as engine:
        results = engine.generate(QUESTIONS, max_new_tokens=LENGTH, ignore_eos=True)
    return {text: found.token_ids for text, found in zip(QUESTIONS, results, strict=True)}


# --- what is taken, and what is refused ---


@pytest.mark.parametrize(
    ("asked", "buckets", "expected"),
    [
        (None, (1, 8, 16), (15, 15, 15)),
        (11, (16, 1), (11, 11)),
        ([11], (16, 1), (11, 11)),
        (11, (16, 1, 16), (11, 11)),
        ((11, 15, 7), (16, 1, 8), (15, 7, 11)),  # as typed, not as sorted
        ((3, 5, 3), (4, 1, 4), (5, 3)),
    ],
)
def test_which_bucket_gets_which_number(asked: Any, buckets: Any, expected: Any) -> None:
    """Bug: buckets are sorted and their numbers are not, so that batch 1 gets batch 16's."""
    assert resolve_draft_lengths(asked, buckets, CONFIGS[1]) == expected
    options = Options(device="cpu", buckets=buckets, num_speculative_tokens=asked)
    config = resolve_options(options, *CONFIGS)
    assert config.num_speculative_tokens == expected
    draft = CONFIGS[1]
    assert draft is not None
    for size, number in zip(config.buckets, expected, strict=True):
        assert draft_at(config, draft, size).num_draft_tokens == number
    assert longest_draft(config, draft).num_draft_tokens == max(expected)


BAD: list[tuple[Any, str]] = [
    (0, r"--num-speculative-tokens 0: integers from 1 to 15, .* block of 16 rows; without the"),
    (16, r"--num-speculative-tokens 16: integers from 1 to 15"),
    (-1, "integers from 1 to 15"),
    (True, r"--num-speculative-tokens True: integers"),
    (7.0, "7.0: integers"),
    ("7", "'7': integers"),
    ((15, 7, 0), "15,7,0: integers"),
    ((15, None, 3), "15,None,3: integers"),
    ((15, 7), r"15,7: 2 numbers for 3 buckets; pass one for all, or one for each in the order of"),
    ((), "0 numbers for 3 buckets"),
]


@pytest.mark.parametrize(("asked", "message"), BAD)
def test_bad_numbers(asked: Any, message: str) -> None:
    """Bug: a number that no block can have fails in a kernel, or True is taken for 1."""
    with pytest.raises(ValueError, match=message):
        Engine.from_pretrained(
            TINY_TARGET, TINY_DRAFT, buckets=(1, 2, 4), num_speculative_tokens=asked
        )


def test_numbers_that_contradict() -> None:
    """Bug: a bucket named twice silently gets the last of its numbers."""
    with pytest.raises(ValueError, match="15,7: two numbers for bucket 4; name each bucket once"):
        resolve_draft_lengths((15, 7), (4, 4), CONFIGS[1])


def test_refused_without_a_drafter() -> None:
    """Bug: plain decoding takes the number in silence."""
    with pytest.raises(ValueError, match=r"--num-speculative-tokens 7 needs a drafter; pass --dr"):
        Engine.from_pretrained(TINY_TARGET, "none", num_speculative_tokens=7)


@pytest.mark.parametrize("command", ["run", "bench", "verify", "profile", "compile", "graphs"])
def test_every_command_refuses(command: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Bug: a command drops the option, or shows a traceback; exit code 0 hides a wrong bench."""
    monkeypatch.setenv("GRAPHENGINE_CACHE", str(tmp_path))
    draft, target = str(TINY_DRAFT), str(TINY_TARGET)
    own = {"run": ["--prompt", "x"], "verify": ["--max-new-tokens", "2"]}.get(command, [])
    option = "--num-speculative-tokens"

    def call(*args: str) -> Any:
        where = [command, target, *own, "--bucket", "1", *args]
        return CliRunner().invoke(main, where)

    refused(call("--draft", draft, option, "16"), f"{option} 16", "1 to 15", "16 rows")
    refused(call("--draft", draft, option, "7,7"), f"{option} 7,7", "2 numbers for 1 bucket")
    refused(call("--draft", draft, option, "0"), option, "'0'", "from 1 up")
    refused(call("--draft", draft, option, "1.5"), option, "'1.5'")
    refused(call("--draft", "none", option, "7"), option, "needs a drafter")


def test_doctor_refuses() -> None:
    """Bug: doctor passes options that a run refuses, or plans the drafter's own block."""
    typed = ["doctor", "--device", "cpu", "--json", "--bucket", "4,1", "--num-speculative-tokens"]
    done = CliRunner().invoke(main, [*typed, "16"])
    assert done.exit_code == 1 and "--num-speculative-tokens 16" in done.stdout
    done = CliRunner().invoke(main, [*typed, "3,7"])
    found = {finding["name"]: finding["value"] for finding in json.loads(done.stdout)["findings"]}
    assert done.exit_code == 0 and "less a block of 8" in found["run.context"]


def test_floor_that_a_bucket_cannot_reach() -> None:
    """Bug: in the bucket with the fewest drafts every step is below the floor, and the user is told
    to look for another drafter."""
    options = {"num_speculative_tokens": (15, 3), "buckets": (1, 8), "device": "cpu"}
    with pytest.raises(ValueError, match=r"--acceptance-floor 4\.5: .* at most 4 tokens a step"):
        resolve_options(Options(acceptance_floor=4.5, **options), *CONFIGS)
    assert resolve_options(Options(acceptance_floor=4, **options), *CONFIGS).acceptance_floor == 4


@pytest.mark.parametrize("convention", ["anchor-dropped", "anchor-first"])
def test_shortened(convention: Any) -> None:
    """Bug: the anchor's row is forgotten, or counted where it predicts too."""
    assert isinstance(CONFIGS[1], DraftConfig)
    draft = DraftConfig(
        model=CONFIGS[1].model,
        block_size=8,
        mask_token_id=1,
        target_layer_ids=(0,),
        num_target_layers=None,
        slot_convention=convention,
    )
    short = draft.shortened(3)
    assert (short.num_draft_tokens, short.num_verify_rows) == (3, 4)
    assert short.block_size == (4 if convention == "anchor-dropped" else 3)
    assert draft.shortened(draft.num_draft_tokens) == draft


# --- the output ---


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("number", [1, 7, 15])
def test_tokens_are_plain(plain: dict[str, list[int]], number: int, backend: Any) -> None:
    """Bug: a shorter block leaves rows of the longer one in the verify, or counts them."""
    with Engine.from_pretrained(
        TINY_TARGET,
        TINY_DRAFT,
        buckets=(1,),
        num_speculative_tokens=number,
        attention_backend=backend,
        **OPTIONS,
    ) as engine:
        assert engine.num_draft_tokens == number
        asked = QUESTIONS[: 1 if number == 1 else 3]  # of one draft a step, steps are many
        results = engine.generate(asked, max_new_tokens=LENGTH, ignore_eos=True)
    assert [r.token_ids for r in results] == [plain[text] for text in asked]
    for result in results:
        acceptance = result.metrics.acceptance
        assert len(acceptance.steps_by_accepted) == number + 1
        assert acceptance.num_drafted == number * acceptance.num_steps
        # The last step's tokens may be cut off.
        behind = acceptance.num_accepted + acceptance.num_steps - (LENGTH - 1)
        assert 0 <= behind <= number


@pytest.fixture(scope="module", params=["torch", "triton"])
def mixed(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine.from_pretrained(
        TINY_TARGET,
        TINY_DRAFT,
        buckets=(1, 2, 4),
        num_speculative_tokens=(15, 7, 3),
        attention_backend=request.param,
        page_size=4,
        lazy_capture=True,
        **OPTIONS,
    ) as engine:
        yield engine


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))]
)
def test_requests_move_between_blocks(
    plain: dict[str, list[int]], mixed: Engine, seed: int
) -> None:
    """Bug: a request that comes into a bucket of another block finds its rows where they are not,
    reads results by the other block's stride, or leaks pages; steps are counted with drafts that
    nobody made."""
    rng, loop = random.Random(seed), mixed.built.loop
    assert mixed.tokenizer is not None
    waiting = [QUESTIONS[rng.randrange(len(QUESTIONS))] for _ in range(9)]
    requests: list[tuple[str, int, Any]] = []
    blocks: set[int] = set()
    with torch.no_grad():
        while waiting or loop.has_work:
            for _ in range(min(rng.choice((0, 0, 1, 3)), len(waiting))):
                text, budget = waiting.pop(), rng.randint(1, LENGTH)
                ids = mixed.tokenizer.encode_chat([{"role": "user", "content": text}])
                requests.append((text, budget, loop.submit(ids, budget, ())))
            loop.admit()
            loop.launch()
            blocks |= {step.results.words_BX.shape[1] - 1 for step in loop.first.in_flight}
            if rng.random() < 0.05:
                loop.cancel(rng.choice(requests)[2])
            loop.collect()
    assert len(blocks) > 1
    assert loop.allocator.num_free == loop.allocator.num_usable
    for text, budget, request in requests:
        wanted = plain[text][:budget]
        if request.finish_reason == "abort":
            wanted = wanted[: len(request.output_ids)]
        assert request.output_ids == wanted
        acceptance = request.acceptance
        held = {n for n, steps in enumerate(acceptance.steps_by_drafted) if steps}
        assert held <= {15, 7, 3}
        assert sum(acceptance.steps_by_drafted) == acceptance.num_steps


def test_draws_are_plain(mixed: Engine) -> None:
    """Bug: the sampled end of a verify takes the longest block's rows, so that draws depend on the
    bucket."""
    drawn: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_new_tokens": 24}
    found = mixed.generate(QUESTIONS, **drawn)
    with Engine.from_pretrained(TINY_TARGET, "none", buckets=(1,), **OPTIONS) as engine:
        plain = engine.generate(QUESTIONS, **drawn)
    assert [r.token_ids for r in found] == [r.token_ids for r in plain]


def test_counts_of_a_batch(tmp_path: Path) -> None:
    """Bug: drafts that a bucket does not make count as proposed and lower every rate."""
    target = make_target(tmp_path / "target", tie=False)
    drafter = make_drafter(tmp_path / "drafter", target, block_size=6)
    prompts = [[7, 99, 23], [5], [60, 61, 62]]
    model = load_target(target)
    truth = {tuple(prompt): plain_generate(model, prompt, 40) for prompt in prompts}
    with Engine.from_pretrained(
        target, drafter, buckets=(1, 3), num_speculative_tokens=(5, 2), fallback=False
    ) as engine:
        # Batched, all of two drafts are right; alone, four of five.
        forced = force_drafts(engine, truth, lambda request, step: 4)
        loop = engine.built.loop
        budgets = (7, 7, 17)  # the prefill's, two steps of three; then alone two of five
        requests = [
            loop.submit(prompt, budget, ()) for prompt, budget in zip(prompts, budgets, strict=True)
        ]
        with torch.no_grad():
            while loop.has_work:
                loop.admit()
                loop.launch()
                loop.collect()
    assert forced.drafted
    for request, prompt, budget in zip(requests, prompts, budgets, strict=True):
        assert request.output_ids == truth[tuple(prompt)][:budget]
    short, long = requests[0].acceptance, requests[2].acceptance
    assert short.steps_by_accepted == [0, 0, 2, 0, 0, 0] and short.per_position == [1, 1]
    assert long.steps_by_accepted == [0, 0, 2, 0, 2, 0]
    assert long.per_position == [1, 1, 1, 1, 0]
    assert (long.num_drafted, long.num_accepted) == (2 * 2 + 2 * 5, 2 * 2 + 2 * 4)


def test_json_counts_what_was_drafted() -> None:
    """Bug: vLLM's keys are filled with the drafter's own block, whatever a step drafted."""
    typed = ["run", "--bucket", "2,1", "--num-speculative-tokens", "3,7", "--device", "cpu"]
    typed += ["--prompt", QUESTIONS[1], "--max-new-tokens", "40", "--ignore-eos", "--json", "-q"]
    done = CliRunner().invoke(main, typed)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    totals = found["totals"]
    assert found["config"]["num_speculative_tokens"] == [7, 3]
    steps = totals["spec_decode_num_drafts"]
    assert totals["spec_decode_draft_tokens"] == 7 * steps
    assert len(totals["spec_decode_per_position_acceptance_rates"]) == 7
    rate = 100 * totals["spec_decode_accepted_tokens"] / (7 * steps)
    assert totals["spec_decode_acceptance_rate"] == pytest.approx(rate)


def test_anchor_first_runs_to_the_end_of_the_context(tmp_path: Path) -> None:
    """Bug: the cap keeps the drafter's own block free, or the last blocks leave the positions; or
    the anchor's row is dropped where it predicts too."""
    target = make_target(tmp_path / "target", tie=False, layers=3, max_positions=40)
    z_lab = make_drafter(tmp_path / "z-lab", target, block_size=6, max_positions=40)
    drafter = as_deepspec(tmp_path / "deepspec", z_lab, target)
    prompt = [7, 99, 23]
    truth = {(7, 99, 23): plain_generate(load_target(target), prompt, 45)}
    own: dict[str, Any] = {"buckets": (1, 2), "num_speculative_tokens": (3, 1), "page_size": 4}
    for backend in ("torch", "triton"):
        with Engine.from_pretrained(target, drafter, attention_backend=backend, **own) as engine:
            assert engine.config.max_model_len == engine.config.speculation_limit == 40 - 4
            for count in (1, 2):
                force_drafts(engine, truth, lambda request, step: 3 - step % 2)
                results = engine.generate([prompt] * count, max_new_tokens=99, ignore_eos=True)
                for result in results:
                    assert result.token_ids == truth[7, 99, 23][: 36 - 3]
                    held = result.metrics.acceptance.steps_by_drafted
                    assert held[3 if count == 1 else 1] == sum(held) > 0
    with pytest.raises(ValueError, match="--max-model-len 37: between 2 and 36"):
        Engine.from_pretrained(target, drafter, max_model_len=37, **own)


# --- measuring ---


@pytest.mark.slow
def test_simulated_acceptance_is_cut_off(tmp_path: Path) -> None:
    """Bug: the mean of a shorter block is drawn anew or scaled, so that two numbers of drafts are
    compared at acceptances that no drafter has; or the second run of a measurement finds the
    first one's pages."""
    target = make_target(tmp_path / "target", max_positions=2048)
    drafter = make_drafter(tmp_path / "drafter", target, block_size=8)
    mean, number = 4.0, 3
    drawn = make_simulation(mean, 1, 7, torch.device("cpu")).accepted_RB[:, 0].clamp(max=number)
    rate = acceptance_rate(mean, 7)
    expected = 1 + sum(rate**j for j in range(1, number + 1))
    assert 1 + drawn.double().mean() == pytest.approx(expected, abs=0.05)
    with Engine.from_pretrained(
        target, drafter, buckets=(1,), simulate_acceptance=mean, num_speculative_tokens=number
    ) as engine:
        (result,) = engine.generate([5], max_new_tokens=1500, ignore_eos=True)
        (again,) = engine.generate([5, *result.token_ids[:99]], max_new_tokens=1)
    assert again.metrics.num_cached_tokens == 0
    acceptance = result.metrics.acceptance
    assert acceptance.steps_by_accepted == drawn[: acceptance.num_steps].bincount().tolist()
    assert acceptance.mean_acceptance_length == pytest.approx(expected, abs=0.1)
    with pytest.raises(ValueError, match="between 1 and 8 tokens"):
        Engine.from_pretrained(
            target, drafter, simulate_acceptance=8.5, num_speculative_tokens=number
        )


@pytest.mark.slow
def test_bundled_floor_is_that_of_all_drafts() -> None:
    """Bug: `verify` fails a shorter block for an acceptance that it cannot reach."""
    typed = ["verify", "--device", "cpu", "--bucket", "8", "--max-new-tokens", "64", "--json"]
    done = CliRunner().invoke(main, [*typed, "--num-speculative-tokens", "7"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["config"]["num_speculative_tokens"] == [7]
    cell = found["numbers"]["none_torch"]["bucket_8_together"]
    assert 7 < cell["mean_acceptance_length"] <= 8


@pytest.mark.slow
def test_matrix_of_blocks_of_their_own(tmp_path: Path) -> None:
    """Bug: the plain run of a matrix is refused for the number, or a cell runs another bucket's."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(2 * (json.dumps({"prompt": QUESTIONS[1]}) + "\n"))
    typed = ["verify", "--device", "cpu", "--matrix", "--prompt-file", str(file), "--json"]
    typed += ["--bucket", "2,1", "--num-speculative-tokens", "3,7", "--max-new-tokens", "32"]
    done = CliRunner().invoke(main, typed)
    assert done.exit_code == 0, done.output
    numbers = json.loads(done.stdout)["numbers"]
    for mode in ("none_torch", "none_triton"):
        found = {name: cell["mean_acceptance_length"] for name, cell in numbers[mode].items()}
        assert 4 < found["bucket_1_alone"] <= 8 and 3 < found["bucket_2_together"] <= 4
        assert {cell["num_same_as_plain"] for cell in numbers[mode].values()} == {2}


def test_bench_records_the_numbers() -> None:
    """Bug: a stored result does not say how many tokens were drafted; the baseline without a
    drafter is refused; steps are counted at the drafter's own block."""
    typed = ["bench", "--device", "cpu", "--bucket", "2,1", "--num-speculative-tokens", "3,7"]
    typed += ["--output-len", "8", "--num-iters", "1", "--warmup", "0", "--baseline", "--json"]
    done = CliRunner().invoke(main, typed)
    assert done.exit_code == 0, done.output
    modes = json.loads(done.stdout)["config"]["modes"]
    assert modes["none_torch"]["num_speculative_tokens"] == [7, 3]
    assert modes["none_torch_plain"]["num_speculative_tokens"] == []
