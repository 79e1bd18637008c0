"""Pictures of measurements as SVG text, without a plotting library.

A panel is a list of SVG elements and its height; `document` stacks panels. Numbers are written
next to what is drawn, so that a picture can be quoted without its table.

Invariant: output is a pure function of the values (no dates, no random ids), so a stored picture
changes only when its numbers do.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

WIDTH = 900
MARGIN = 16
_LABEL_WIDTH = 150
_BAR_HEIGHT = 26
_PLOT_HEIGHT = 150

COLORS: dict[str, str] = {
    "dense": "#3b8132",
    "attention": "#e08a1e",
    "chain": "#2f6f9f",
    "other": "#8a6fae",
    "idle dense": "#a8d5a2",
    "idle attention": "#f6d29b",
    "idle seam": "#d9534f",
    "idle host": "#9a9a9a",
}
_OTHERS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#9d755d", "#72b7b2")


class Panel(NamedTuple):
    """Elements drawn from y = 0 downwards."""

    elements: list[str]
    height: float


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 12) -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f"<text {where}>{escape(text)}</text>"


def _rect(x: float, y: float, width: float, height: float, color: str, title: str = "") -> str:
    where = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
    return f'<rect {where} fill="{color}"><title>{escape(title)}</title></rect>'


def _color(part: str, index: int) -> str:
    return COLORS.get(part, _OTHERS[index % len(_OTHERS)])


def bars_panel(bars: Mapping[str, Mapping[str, float]], title: str, unit: str) -> Panel:
    """One stacked bar per label, all to one scale, and a legend.

    Args:
        bars: label -> part -> value; a part has one colour in all bars.
    """
    elements = [_text(MARGIN, 16, title, size=14)]
    scale = max((sum(parts.values()) for parts in bars.values()), default=0.0) or 1.0
    width = WIDTH - 2 * MARGIN - _LABEL_WIDTH - 90
    seen: dict[str, str] = {}
    y = 28.0
    for label, parts in bars.items():
        x = float(MARGIN + _LABEL_WIDTH)
        elements.append(_text(x - 8, y + 17, label, "end"))
        for part, value in parts.items():
            color = seen.setdefault(part, _color(part, len(seen)))
            if value > 0:
                length = value / scale * width
                note = f"{part}: {value:.1f} {unit}"
                elements.append(_rect(x, y, length, _BAR_HEIGHT, color, note))
                x += length
        elements.append(_text(x + 6, y + 17, f"{sum(parts.values()):.1f} {unit}"))
        y += _BAR_HEIGHT + 8
    x = float(MARGIN + _LABEL_WIDTH)
    for part, color in seen.items():
        width_needed = 26 + 7.0 * len(part)
        if x + width_needed > WIDTH - MARGIN:
            x, y = float(MARGIN + _LABEL_WIDTH), y + 18
        elements += [_rect(x, y, 11, 11, color), _text(x + 15, y + 10, part)]
        x += width_needed
    return Panel(elements, y + 26)


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of the sorted values lie, between its neighbours in proportion:
    `statistics.median` at 0.5, and what vLLM's bench (numpy) reports."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def histogram_panel(values: Sequence[float], title: str, unit: str, num_bins: int = 60) -> Panel:
    """Counts over the values' range, with the median and the 99th percentile marked."""
    elements = [_text(MARGIN, 16, title, size=14)]
    if not values:
        return Panel([*elements, _text(MARGIN, 40, "no values")], 56)
    ordered = sorted(values)
    low, high = ordered[0], ordered[-1]
    span = (high - low) or max(abs(low) * 1e-3, 1e-9)
    counts = [0] * num_bins
    for value in ordered:
        counts[min(int((value - low) / span * num_bins), num_bins - 1)] += 1
    left, bottom = MARGIN + 40.0, 30.0 + _PLOT_HEIGHT
    width = WIDTH - MARGIN - left
    step = width / num_bins
    for index, count in enumerate(counts):
        if count:
            height = count / max(counts) * _PLOT_HEIGHT
            begin = low + index * span / num_bins
            note = f"{count} from {begin:.3f} to {begin + span / num_bins:.3f} {unit}"
            x = left + index * step
            elements.append(_rect(x, bottom - height, step - 1, height, _OTHERS[0], note))
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        value = percentile(ordered, share)
        x = left + (value - low) / span * width
        elements.append(_rect(x, 30, 1, _PLOT_HEIGHT, "#c00000", f"{name} {value:.3f} {unit}"))
        anchor = "end" if x > left + width / 2 else "start"
        elements.append(
            _text(x + (-4 if anchor == "end" else 4), 40, f"{name} {value:.3f}", anchor)
        )
    elements += [
        _text(left - 6, 40, str(max(counts)), "end"),
        _text(left, bottom + 16, f"{low:.3f} {unit}"),
        _text(left + width, bottom + 16, f"{high:.3f} {unit}", "end"),
    ]
    return Panel(elements, bottom + 28)


def timeline_panel(
    spans: Sequence[tuple[float, float, str]], total: float, title: str, unit: str
) -> Panel:
    """Activities of one step on a line; white is idle.

    Args:
        spans: (start, end, class), in the order of their start; neighbours of one class that are
            nearer than a tenth of a pixel are drawn as one.
        total: the end of the axis.
    """
    elements = [_text(MARGIN, 16, title, size=14)]
    scale = (WIDTH - 2 * MARGIN) / (total or 1.0)
    elements.append(_rect(MARGIN, 28, total * scale, 40, "#f2f2f2", "idle"))
    merged: list[tuple[float, float, str]] = []
    for start, end, kind in spans:
        last = merged[-1] if merged else None
        if last is not None and last[2] == kind and (start - last[1]) * scale < 0.1:
            merged[-1] = (last[0], max(end, last[1]), kind)
        else:
            merged.append((start, end, kind))
    for start, end, kind in merged:
        note = f"{kind} {start:.1f} .. {end:.1f} {unit}"
        x, width = MARGIN + start * scale, (end - start) * scale
        elements.append(_rect(x, 28, width, 40, COLORS.get(kind, "#444444"), note))
    elements += [
        _text(MARGIN, 84, f"0 {unit}"),
        _text(WIDTH - MARGIN, 84, f"{total:.1f} {unit}", "end"),
    ]
    return Panel(elements, 98)


def document(panels: Sequence[Panel]) -> str:
    """Panels below each other as one SVG file."""
    parts: list[str] = []
    y = float(MARGIN)
    for panel in panels:
        parts.append(f'<g transform="translate(0 {y:.1f})">' + "".join(panel.elements) + "</g>")
        y += panel.height + 10
    size = f'width="{WIDTH}" height="{y:.0f}" viewBox="0 0 {WIDTH} {y:.0f}"'
    background = f'<rect width="{WIDTH}" height="{y:.0f}" fill="white"/>'
    style = 'font-family="sans-serif" fill="#222222"'
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{background}\n{body}\n</svg>\n'
