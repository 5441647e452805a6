"""Figures: average accuracy against tasks seen, a line a method."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from evcl.files import write_atomically
from evcl.report.results import Result, curves, label

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart by colour-blind readers; each method keeps its own, and a marker with it.
STYLES: dict[str, tuple[str, str]] = {
    "evcl": ("#0072B2", "o"),
    "vcl": ("#E69F00", "s"),
    "ewc": ("#009E73", "^"),
    "naive": ("#CC79A7", "v"),
    "joint": ("#7F7F7F", "D"),
}
SPARE = [("#D55E00", "P"), ("#56B4E9", "X"), ("#A05D00", "*"), ("#6A4FA3", "h")]
THEMES = {"light": ("#1b1f24", "#d8dee4"), "dark": ("#e6edf3", "#30363d")}  # ink, grid
LIGHTER = {"#0072B2": "#4DA9E8"}  # what is too dark for the dark theme


def accuracy_figure(group: Sequence[Result], title: str = "", theme: str = "light") -> Figure:
    """Average accuracy over the tasks seen so far, after each task; bands are one standard deviation."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    ink, grid = THEMES[theme]
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    spare = iter(SPARE * len(group))
    ends: list[tuple[float, float, str, str]] = []
    for depth, result in enumerate(group):
        color, marker = STYLES.get(result["method"]) or next(spare)
        color = LIGHTER.get(color, color) if theme == "dark" else color
        mean, spread = (100 * v for v in curves(result))
        tasks = np.arange(1, len(mean) + 1)
        low, high = mean - spread, np.minimum(mean + spread, 100)
        axes.fill_between(tasks, low, high, color=color, alpha=0.15, linewidth=0)
        axes.plot(tasks, mean, color=color, marker=marker, markersize=5, linewidth=1.8, zorder=3 - depth / len(group))
        ends.append((float(mean[-1]), float(tasks[-1]), label(result, group), color))
    _label_ends(axes, ends)
    axes.set_title(title, loc="left", color=ink, fontsize=12, fontweight="bold")
    axes.set_xlabel("tasks seen", color=ink)
    axes.set_ylabel("average accuracy (%)", color=ink)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(colors=ink)
    axes.grid(axis="y", color=grid, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(ink)
    figure.patch.set_alpha(0)
    axes.patch.set_alpha(0)
    if theme == "light":
        figure.patch.set(alpha=1, facecolor="white")
    return figure


def _label_ends(axes: Any, ends: list[tuple[float, float, str, str]]) -> None:
    """Write each method's name at the end of its line, moved apart where lines end close together."""
    low, high = axes.get_ylim()
    gap = 0.06 * (high - low)
    places: list[float] = []
    for y, x, text, color in sorted(ends):
        place = max(y, places[-1] + gap) if places else y
        places.append(place)
        axes.annotate(
            text,
            (x, y),
            (x + 0.03 * max(1.0, x - 1), place),
            textcoords="data",
            color=color,
            fontsize=10,
            fontweight="bold",
            va="center",
            annotation_clip=False,
        )
    axes.set_ylim(low, max(high, places[-1] + gap / 2))


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the path's ending; the same figure gives the same bytes."""
    import matplotlib

    kind = path.suffix[1:]
    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with matplotlib.rc_context({"svg.hashsalt": "evcl", "svg.fonttype": "none"}):
        write_atomically(
            path, lambda temporary: figure.savefig(temporary, format=kind, dpi=160, metadata=dates.get(kind))
        )
