"""When speculation is not worth its cost: the judgement alone, without a device or a clock.

Why: a drafter that does not fit its target costs time and nothing else, so nobody notices. Two
things are judged from what the loop has seen. Few drafts accepted: warn once, with what is likely
to be wrong. Slower than decoding plainly: with a tokens committed per block,

    gain = a * t_plain / t_block        tokens per second with speculation, over those without

and below 1 the requests go on plainly. `t_plain` is measured only when `a` makes a loss possible,
so a drafter that works never pays for the question. Invariant: the output does not depend on any
judgement made here; only its speed does.
"""

from __future__ import annotations

import inspect
import os
import statistics
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

WINDOW = 64  # steps looked back on; also a request's fewest before it is judged
FEWEST_TO_WARN = 32
FEWEST_TIMES = 8
JUDGE_EVERY = 16  # steps between two judgements
# A block costs 1.2 to 1.7 plain steps on an H200 (4B and 8B, 1 to 16 requests): at two tokens a
# block no loss is possible, and no plain step is measured.
WORTH_MEASURING = 2.0

LIKELY_CAUSES = (
    "the drafter belongs to another target (or to another fine-tune of it)",
    "the prompts lack the chat template or the thinking mode that it was trained with (raw text)",
    "rope theta or rope scaling of the drafter's config.json is not what it was trained with",
    "target_layer_ids are off (another index convention), or the slot convention is",
    "the drafter or the target is quantised (try draft_quantization none)",
    "the context is far longer than the drafter's training",
    "the requests ask for what no draft says (a grammar, a penalty, a bias, a high temperature)",
)


class EngineWarning(UserWarning):
    """Something that the user should know while a generation runs."""


class AcceptanceWarning(EngineWarning):
    """Drafts are rarely accepted: the output is right, the speed is not."""


class FallbackWarning(EngineWarning):
    """Requests had to end or go on differently than asked, because plain decoding was not there."""


PACKAGE = str(Path(__file__).parents[1]) + os.sep


def warn_caller(text: str, category: type[Warning]) -> None:
    """Warns at the line that called the package, however deep inside of it this is."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, level)


@dataclass(slots=True, kw_only=True)
class SpeculationGuard:
    """What the last blocks committed and took.

    Args:
        acceptance_floor: mean acceptance length below which is warned; 0 never warns.
        may_fall_back: whether a loss has consequences.
    """

    acceptance_floor: float
    may_fall_back: bool
    has_warned: bool = False
    plain_step_s: dict[int, float] = field(default_factory=dict)  # bucket size -> measured
    _steps: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Tokens and blocks of each."""
    _num_seen: int = 0
    _size: int = 0  # the bucket that the times belong to
    _times_s: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens committed per block over the window, the bonus included; 0 before the first."""
        num_blocks = sum(blocks for _, blocks in self._steps)
        return sum(tokens for tokens, _ in self._steps) / num_blocks if num_blocks else 0.0

    def observe(self, num_accepted: Sequence[int], size: int, seconds: float | None) -> bool:
        """Counts one step. Mutates: self. Returns whether it is time to judge.

        Args:
            num_accepted: accepted drafts of each request that the step ran.
            size: the bucket's.
            seconds: what the step took; None where that is not known.
        """
        if not num_accepted:
            return False
        self._steps.append((sum(num_accepted) + len(num_accepted), len(num_accepted)))
        if size != self._size:
            self._size = size
            self._times_s.clear()
        if seconds is not None:
            self._times_s.append(seconds)
        self._num_seen += 1
        return self._num_seen % JUDGE_EVERY == 0

    def warning(self) -> str | None:
        """What to tell the user, once. Mutates: self."""
        length, count = self.mean_acceptance_length, len(self._steps)
        if self.has_warned or count < FEWEST_TO_WARN or length >= self.acceptance_floor:
            return None
        self.has_warned = True
        causes = "; ".join(f"({i}) {cause}" for i, cause in enumerate(LIKELY_CAUSES, start=1))
        return (
            f"drafts are rarely accepted: {length:.2f} tokens a step (mean acceptance length, 1 is "
            f"useless) over the last {count} steps, the floor is {self.acceptance_floor:g}. The "
            f"output is right, the speed is not. Likely causes: {causes}. `graphengine doctor` "
            "checks the pair; --acceptance-floor 0 (in Python acceptance_floor=0) turns this "
            "warning off"
        )

    def needs_plain_time(self, size: int) -> bool:
        """Whether a plain step of this bucket must be measured to judge."""
        return self._may_lose(size) and size not in self.plain_step_s

    def verdict(self, size: int) -> str | None:
        """Why to go on plainly; None: speculation wins, or nothing can be said yet."""
        plain_s = self.plain_step_s.get(size)
        if plain_s is None or not self._may_lose(size):
            return None
        length, step_s = self.mean_acceptance_length, statistics.median(self._times_s)
        gain = length * plain_s / step_s
        if gain >= 1:
            return None
        return (
            f"speculation lost: {length:.2f} tokens in a step of {step_s * 1e3:.2f} ms against "
            f"one in {plain_s * 1e3:.2f} ms (gain {gain:.2f})"
        )

    def _may_lose(self, size: int) -> bool:
        return (
            self.may_fall_back
            and size == self._size
            and len(self._steps) == WINDOW
            and len(self._times_s) >= FEWEST_TIMES
            and self.mean_acceptance_length < WORTH_MEASURING
        )
