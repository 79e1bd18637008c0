"""graphengine/names.py: names, push/pop pairs, and the cost while NVTX is off."""

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from graphengine import TINY_DRAFT, TINY_TARGET, Engine, names
from tests.support.chains import chain_names


class Recorder:
    """A domain that records instead of emitting."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.colors: dict[str, str] = {}

    def get_event_attributes(self, message: str, color: str) -> str:
        self.colors[message] = color
        return message

    def push_range(self, attributes: Any) -> None:
        self.events.append(f"push {attributes}")

    def pop_range(self) -> None:
        self.events.append("pop")


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    domain = Recorder()
    assert names.enable(domain)
    yield domain
    names.disable()


def test_names_of_all_chains_are_distinct() -> None:
    """Bug: two steps share a name, and a profile adds their times up."""
    found = [name for chain in names.CHAINS for name in chain_names(chain, 40)]
    found += [names.DRAFT_CONTEXT, names.PREFILL_CONTEXT, names.ACCEPT]
    assert len(set(found)) == len(found)


def test_dense_names_sort_in_order_of_execution() -> None:
    """Bug: unpadded numbers, so that 10 sorts before 2 in a report."""
    dense = [names.dense_name("verify", index) for index in range(65)]
    assert dense == sorted(dense)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("verify.L3.attn", "attention"),
        ("verify.03", "dense"),
        ("draft.context", "dense"),
        ("plan", "host"),
        ("verify", "host"),
    ],
)
def test_step_class(name: str, kind: str) -> None:
    """Bug: attention coloured and summed as dense time, or the reverse."""
    assert names.step_class(name) == kind


def test_pairs_and_nesting(recorder: Recorder) -> None:
    """Bug: a push without a pop, or popped in the wrong order; or attention has another colour than
    in the project's own pictures."""
    with names.range_("verify"), names.range_("verify.00"):
        recorder.events.append("body")
    assert recorder.events == ["push verify", "push verify.00", "body", "pop", "pop"]
    with names.range_("verify.L0.attn"):
        pass
    assert recorder.colors == {"verify": "gray", "verify.00": "green", "verify.L0.attn": "orange"}


def test_a_run_has_these_names(recorder: Recorder) -> None:
    """Bug: a step goes by another's name, as the context of a prompt by that of a block, and a
    profile adds their times up; or by one that no reader knows."""
    with Engine.from_pretrained(TINY_TARGET, TINY_DRAFT, device="cpu") as engine:
        recorder.events.clear()
        engine.generate([[1, 2, 3]], max_new_tokens=20, ignore_eos=True)
    seen = [event.removeprefix("push ") for event in recorder.events if event != "pop"]
    assert seen.count(names.PREFILL_CONTEXT) == 1
    assert seen.count(names.DRAFT_CONTEXT) > 1
    steps = {name for name in seen if "." in name or name == names.ACCEPT}
    assert all(names.is_name(name) for name in steps), steps


def test_every_constant_follows_the_rule() -> None:
    """Bug: a trace that has lost the domain loses the steps of one name, such as `advance`."""
    constants = {name: text for name, text in vars(names).items() if name.isupper()}
    texts = [text for name, text in constants.items() if isinstance(text, str) and name != "DOMAIN"]
    assert len(texts) > 7 and {"advance", "publish", "step"} < set(texts)
    assert [text for text in texts if not names.is_name(text)] == []


def test_pops_when_the_body_raises(recorder: Recorder) -> None:
    """Bug: after an exception the range stays open, and nsys nests all later ranges below it."""
    with pytest.raises(RuntimeError, match="boom"), names.range_("plan"):
        raise RuntimeError("boom")
    assert recorder.events == ["push plan", "pop"]


def test_open_range_pops_after_disable(recorder: Recorder) -> None:
    """Bug: switching off inside a range loses its pop."""
    with names.range_("plan"):
        names.disable()
    assert recorder.events == ["push plan", "pop"]


def test_a_name_is_registered_once(recorder: Recorder) -> None:
    """Bug: every step builds new event attributes, which costs microseconds in the hot loop."""
    assert names.range_("plan") is names.range_("plan")


def test_another_domain_gets_the_names_that_are_known(recorder: Recorder) -> None:
    """Bug: a recorder that takes over, as from --nvtx, misses every name that was used before."""
    other = Recorder()
    for domain in (recorder, other):
        names.enable(domain)
        with names.range_("plan"):
            pass
    assert other.events == recorder.events == ["push plan", "pop"]


def test_off_by_default_and_after_disable(recorder: Recorder) -> None:
    """Bug: ranges go on being emitted to a domain that was switched off."""
    names.disable()
    with names.range_("plan"):
        pass
    assert recorder.events == []
    assert not names.is_enabled()


def test_enable_uses_the_nvtx_package() -> None:
    """Bug: the real domain lacks a method that a range calls (the recorder would hide it)."""
    assert names.enable()
    try:
        with names.range_("verify.L0.attn"):
            pass
    finally:
        names.disable()


def test_enable_without_nvtx_stays_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: `--nvtx` ends a run because the package is missing."""
    monkeypatch.setitem(sys.modules, "nvtx", None)
    assert names.enable() is False
    assert not names.is_enabled()


def test_off_costs_next_to_nothing() -> None:
    """Bug: ranges that are off slow the hot loop, with an object made anew or a name looked up; a
    36-layer forward pass has 73 steps.

    Counted, for times on a busy machine say little: one call into this module, and the two that
    `with` makes. On idle 2-core cloud CPUs that took 0.14 to 0.22 us.
    """
    assert names.range_("plan") is names.range_("verify")
    called: list[str] = []

    def note(frame: FrameType, event: str, called_c: object) -> None:
        if event == "call":
            called.append(frame.f_code.co_name)
        elif event == "c_call":
            called.append(getattr(called_c, "__name__", repr(called_c)))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        with names.range_("plan"):
            pass
    finally:
        sys.setprofile(before)
    assert called == ["range_", "__enter__", "__exit__", "setprofile"]
