"""Pictures of measurements: bars, histograms and timelines below each other in one file.

Drawn by matplotlib, which is imported here alone and only where a picture is asked for (extra
`plot`). Numbers are written next to what is drawn, so that a picture can be quoted without its
table. Invariant: a picture is a pure function of its values (no dates, no random ids), so a stored
one changes only when its numbers do.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

FORMATS = (".svg", ".png", ".pdf")
WIDTH_IN = 9.5
_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "graphengine",
    "svg.fonttype": "none",
    "text.parse_math": False,  # a kernel's name may hold a $
    "axes.spines.top": False,
    "axes.spines.right": False,
}
COLORS = {
    "dense": "#3b8132",
    "attention": "#e08a1e",
    "chain": "#2f6f9f",
    "other": "#8a6fae",
    "idle dense": "#a8d5a2",
    "idle attention": "#f6d29b",
    "idle seam": "#d9534f",
    "idle host": "#9a9a9a",
}


class Panel(NamedTuple):
    """What draws itself on matplotlib's axes, and how many inches it takes."""

    draw: Callable[[Any], None]
    height_in: float


def check_picture(option: str, path: Path | None) -> None:
    """Asked before anything is measured.

    Raises:
        ValueError: a picture of this name cannot be drawn here.
    """
    if path is None:
        return
    if path.suffix not in FORMATS:
        raise ValueError(f"{option} {path}: name it as one of {', '.join(FORMATS)}")
    try:
        import_module("matplotlib")
    except ImportError as error:
        raise ValueError(
            f"{option}: pictures need matplotlib ({error}); pip install graphengine[plot]"
        ) from error


def render(panels: Sequence[Panel], suffix: str) -> bytes:
    """Panels below each other as one file of the format that `suffix` names."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        heights = [panel.height_in for panel in panels]
        figure = Figure(figsize=(WIDTH_IN, sum(heights)), layout="constrained")
        grid = figure.subplots(len(panels), squeeze=False, height_ratios=heights)
        for panel, axes in zip(panels, grid[:, 0], strict=True):
            panel.draw(axes)
        found = io.BytesIO()
        metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(suffix)
        figure.savefig(found, format=suffix[1:], dpi=150, metadata=metadata)
    return found.getvalue()


def bars_panel(bars: Mapping[str, Mapping[str, float]], title: str, unit: str) -> Panel:
    """One stacked bar per label (label -> part -> value), to one scale, and a legend; a part has
    one colour in all bars."""
    return Panel(partial(_draw_bars, bars, title, unit), 1.3 + 0.35 * len(bars))


def _draw_bars(bars: Mapping[str, Mapping[str, float]], title: str, unit: str, axes: Any) -> None:
    scale = max((sum(parts.values()) for parts in bars.values()), default=0.0) or 1.0
    seen: dict[str, str] = {}
    for label, parts in bars.items():
        left = 0.0
        for part, value in parts.items():
            name = part if part not in seen else None
            color = seen.setdefault(part, COLORS.get(part, f"C{len(seen) % 10}"))
            axes.barh(label, value, left=left, color=color, label=name)
            if value > 0.06 * scale:
                axes.text(left + value / 2, label, f"{value:.1f}", ha="center", va="center")
            left += value
        axes.text(left + 0.01 * scale, label, f"{left:.1f} {unit}", va="center")
    axes.set(title=title, xlim=(0, 1.12 * scale), xlabel=unit)
    axes.invert_yaxis()
    if seen:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small", frameon=False)


def histogram_panel(values: Sequence[float], title: str, unit: str) -> Panel:
    """Counts over the values' range, with the median and the 99th percentile marked."""
    return Panel(partial(_draw_histogram, values, title, unit), 2.3)


def _draw_histogram(values: Sequence[float], title: str, unit: str, axes: Any) -> None:
    import numpy as np

    axes.set(title=title, xlabel=unit, ylabel="steps")
    if not values:
        axes.text(0.5, 0.5, "no values", transform=axes.transAxes)
        return
    axes.hist(values, bins=60)
    for name, share, height in (("p50", 50, 0.95), ("p99", 99, 0.82)):
        value = float(np.percentile(values, share))
        axes.axvline(value, color="#c00000", linewidth=1)
        where = axes.get_xaxis_transform()
        axes.text(value, height, f" {name} {value:.3f}", transform=where)


def timeline_panel(spans: Sequence[tuple[float, float, str]], title: str, unit: str) -> Panel:
    """Activities (start, end, class) of one step on a line; white is idle."""
    return Panel(partial(_draw_timeline, spans, title, unit), 1.3)


def _draw_timeline(
    spans: Sequence[tuple[float, float, str]], title: str, unit: str, axes: Any
) -> None:
    total = max((end for _, end, _ in spans), default=0.0) or 1.0
    for kind in dict.fromkeys(kind for _, _, kind in spans):
        of_kind = [(start, end - start) for start, end, name in spans if name == kind]
        axes.broken_barh(of_kind, (0, 1), color=COLORS.get(kind, "#444444"), linewidth=0)
    axes.set(title=title, xlim=(0, total), yticks=[], xlabel=f"{unit} of {total:.1f}")
