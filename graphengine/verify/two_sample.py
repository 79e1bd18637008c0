"""Do two sets of sampled outputs come from one distribution? An exact test, place by place.

At output position i the tokens of the speculative and of the plain runs are two samples of one
unknown distribution; Pearson's chi-square of their 2 x K table is compared with tables whose runs
were shuffled. Why shuffling: most tokens come up rarely, where the chi-square approximation is
wrong; a permutation test has the stated level whatever the counts.

Invariant: a run contributes one token to each position's table, so its entries are independent.
Positions of one prompt are not independent of each other; Bonferroni holds regardless.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from graphengine.verify.run import Draws

LEVEL = 0.01  # chance that a right engine fails, over all tests together
RESOLUTION = 10  # most shuffles per test: p-values this many times below its level can be told
ENOUGH = 50  # shuffles as uneven as the observation; the p-value is known well enough then
_ENDED = -1
SAMPLED_POSITIONS = (0, 1, 2, 3, 5, 8, 11, 15, 20, 30)


class PlaceTest(NamedTuple):
    """One test: prompt, output position, p-value, and how many different tokens were seen."""

    prompt: int
    position: int
    pvalue: float
    num_tokens: int


class Comparison(NamedTuple):
    """All tests of a comparison; it passes if no p-value lies below `threshold`."""

    tests: list[PlaceTest]
    threshold: float

    @property
    def smallest(self) -> PlaceTest:
        """The test with the smallest p-value."""
        return min(self.tests, key=lambda test: test.pvalue)

    @property
    def passed(self) -> bool:
        """Whether no test rejects."""
        return self.smallest.pvalue >= self.threshold


def compare(
    first: Sequence[Sequence[Sequence[int]]],
    other: Sequence[Sequence[Sequence[int]]],
    positions: Sequence[int],
    seed: int = 0,
) -> Comparison:
    """Tests every (prompt, position) at a total level of LEVEL, by Bonferroni.

    Args:
        first, other: outputs [prompt][run][position]; a run that has ended counts as a token of
            its own.
        positions: 0-based places in the output.

    Raises:
        ValueError: fewer than two runs of a prompt.
    """
    rng = np.random.default_rng(seed)
    threshold = LEVEL / (len(first) * len(positions))
    num_shuffles = int(RESOLUTION / threshold)
    tests = []
    for prompt, (a, b) in enumerate(zip(first, other, strict=True)):
        if min(len(a), len(b)) < 2:
            raise ValueError(f"{min(len(a), len(b))} samples of a prompt; at least 2 are needed")
        for position in positions:
            pvalue, count = _test(_column(a, position), _column(b, position), num_shuffles, rng)
            tests.append(PlaceTest(prompt, position, pvalue, count))
    return Comparison(tests, threshold)


def _column(runs: Sequence[Sequence[int]], position: int) -> list[int]:
    return [run[position] if position < len(run) else _ENDED for run in runs]


def _test(
    first: list[int], other: list[int], num_shuffles: int, rng: np.random.Generator
) -> tuple[float, int]:
    """(p-value, number of different tokens). The smallest p-value is 1 / (num_shuffles + 1).

    Source: Besag and Clifford, "Sequential Monte Carlo p-values" (1991), for stopping early.
    """
    tokens, where = np.unique(first + other, return_inverse=True)
    total = np.bincount(where, minlength=len(tokens))
    if len(tokens) == 1:
        return 1.0, 1
    observed = np.bincount(where[: len(first)], minlength=len(tokens))
    # With fixed margins chi-square is, up to a factor, the weighted distance from the mean count.
    mean = total * (len(first) / total.sum())

    def statistic(counts: np.ndarray) -> np.ndarray:
        return ((counts - mean) ** 2 / mean).sum(-1)

    limit = statistic(observed) * (1 - 1e-9)
    at_least = done = 0
    while done < num_shuffles and at_least < ENOUGH:
        batch = min(2_000, num_shuffles - done)
        shuffled = rng.multivariate_hypergeometric(total, len(first), size=batch)
        at_least += int((statistic(shuffled) >= limit).sum())
        done += batch
    return (1 + at_least) / (1 + done), len(tokens)


def judge_draws(
    speculative: Draws, plain: Draws, options: dict[str, Any]
) -> tuple[bool, str, dict[str, Any]]:
    """What `verify` says of them: (whether all checks passed, the verdict's text, its numbers)."""
    positions = [p for p in SAMPLED_POSITIONS if p < options["max_new_tokens"]]
    compared = compare(speculative.outputs, plain.outputs, positions, options["seed"])
    worst = compared.smallest
    told = sum(test.num_tokens > 1 for test in compared.tests)
    text = (
        f"smallest p-value {worst.pvalue:.2g} (prompt {worst.prompt}, token {worst.position}, "
        f"{worst.num_tokens} different tokens); less than {compared.threshold:.2g} would fail: "
        f"{LEVEL:g} over {len(compared.tests)} tests, {told} of them with more than one token"
    )
    mean, minimum = speculative.mean_acceptance_length, options["min_acceptance"]
    passed = compared.passed
    # The p-value of draws that have no token in common, the least that there is.
    count = options["num_samples"]
    if 2 / math.comb(2 * count, count) >= compared.threshold:
        passed, text = False, f"--num-samples {count}: no difference could fail, pass more ({text})"
    elif told == 0:
        passed, text = False, f"only one token was ever drawn, raise --temperature ({text})"
    elif not passed:
        text = f"speculative and plain draws differ: {text}"
    elif minimum is not None and not mean >= minimum:
        passed, text = False, f"acceptance: {mean:.2f} tokens a step, {minimum:g} expected"
    numbers = {
        "num_tests": len(compared.tests),
        "num_tests_with_choice": told,
        "smallest_pvalue_fraction": worst.pvalue,
        "threshold_pvalue_fraction": compared.threshold,
        "mean_acceptance_length": mean,
    }
    return passed, text, numbers
