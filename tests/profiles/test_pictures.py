"""What stands in pictures: every number that is drawn, where it is drawn."""

from __future__ import annotations

import re
from unittest.mock import MagicMock, call

import pytest

from graphengine.measure.report import profile_picture
from graphengine.profiles.launch_gaps import Report
from graphengine.profiles.pictures import Panel, bars_panel, histogram_panel, timeline_panel
from graphengine.profiles.trace import BusyClass


def drawn(panel: Panel) -> MagicMock:
    axes = MagicMock()
    panel.draw(axes)
    return axes


def test_every_bar_has_its_own_numbers() -> None:
    """Bug: a bar's end tells the longest one's sum, a part stands in another one's place, or a part
    has another colour in the next bar; or bars stand from below."""
    bars = {"host": {"working": 1.0, "waiting": 19.0}, "GPU": {"waiting": 5.0, "busy": 3.0}}
    axes = drawn(bars_panel(bars, "a step", "us"))
    texts = [(*c.args[:3:2], c.args[1]) for c in axes.text.call_args_list]
    assert [(text, label) for _, text, label in texts] == [
        *(("19.0", "host"), ("20.0 us", "host")),  # 1.0 has no room
        *(("5.0", "GPU"), ("3.0", "GPU"), ("8.0 us", "GPU")),
    ]
    assert [place for place, *_ in texts] == pytest.approx([10.5, 20.2, 2.5, 6.5, 8.2])
    parts = [(*c.args, c.kwargs["left"], c.kwargs["label"]) for c in axes.barh.call_args_list]
    assert parts == [
        ("host", 1.0, 0.0, "working"),
        ("host", 19.0, 1.0, "waiting"),
        ("GPU", 5.0, 0.0, None),  # the legend has it
        ("GPU", 3.0, 5.0, "busy"),
    ]
    colors = [c.kwargs["color"] for c in axes.barh.call_args_list]
    assert colors[1] == colors[2] and len(set(colors)) == 3
    axes.invert_yaxis.assert_called_once_with()


def test_percentiles_are_marked_where_they_are() -> None:
    """Bug: the line of the median says p99, or stands elsewhere than its number says."""
    axes = drawn(histogram_panel([1.0, 2.0, 6.0], "steps", "ms"))
    assert [c.args[0] for c in axes.axvline.call_args_list] == pytest.approx([2.0, 5.92])
    marks = [(c.args[0], c.args[2]) for c in axes.text.call_args_list]
    assert marks == [(2.0, " p50 2.000"), (pytest.approx(5.92), " p99 5.920")]
    assert drawn(histogram_panel([], "steps", "ms")).text.call_args.args[2] == "no values"


def test_a_timeline_ends_with_its_last_activity() -> None:
    """Bug: an activity is as long as its end is late, or the line's length is another's."""
    spans = [(0.0, 2.0, "dense"), (3.0, 4.5, "attention"), (6.0, 7.0, "dense")]
    axes = drawn(timeline_panel(spans, "a step", "us"))
    assert [c.args[0] for c in axes.broken_barh.call_args_list] == [
        [(0.0, 2.0), (6.0, 1.0)],
        [(3.0, 1.5)],
    ]
    said = call(title="a step", xlim=(0, 7.0), yticks=[], xlabel="us of 7.0")
    assert axes.set.call_args == said


def test_a_profile_is_drawn_in_one_unit() -> None:
    """Bug: the bars of a profile are in microseconds and its timeline in another unit, under one
    name; or the bar is the sum of all steps."""
    spans: list[tuple[int, int, BusyClass]] = [(500, 1500, "dense"), (2000, 4000, "attention")]
    found = Report(walls_ns=[4000, 4000], timeline=spans)
    found.busy_ns |= {"dense": 2200, "attention": 4400}
    found.idle_ns |= {"host": 1400}
    text = profile_picture({"node": found}, "", ".svg").decode()
    said = re.findall(r"<text[^>]*>([^<]+)</text>", text)
    assert [line for line in said if " of " in line] == ["us of 4.0"]
    assert {"1.1", "2.2", "0.7", "4.0 us"} <= {*said}
