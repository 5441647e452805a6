"""Figures for print: the score (such as accuracy) against tasks seen, its matrices, forgetting and calibration."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from evcl._core.files import write_atomically
from evcl.experiments.result import SCORES, Score, Summary
from evcl.report.results import Group, Line
from evcl.report.styles import INK

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GRID, SOFT = "#dfe3e8", "#57606a"
WIDTH = 6.75  # inches: the text width of a conference paper
KINDS = ("svg", "png", "pdf")
MOST_POINTS = 10  # seeds whose points are drawn
LONGEST_DRAWN = 48  # characters of a name in a figure
# The fonts come with matplotlib, so figures look the same everywhere; they are embedded, or drawn as outlines.
RC: dict[Any, Any] = {
    "font.family": "STIXGeneral", "font.size": 9, "axes.titlesize": 9, "legend.fontsize": 8.5, "text.parse_math": False,
    "axes.linewidth": 0.6, "axes.edgecolor": INK["light"], "axes.labelcolor": INK["light"], "text.color": INK["light"],
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.grid.axis": "y",
    "axes.axisbelow": True, "grid.color": GRID, "grid.linewidth": 0.6, "lines.linewidth": 1.3,
    "xtick.color": INK["light"], "xtick.major.width": 0.6, "xtick.major.size": 2.5,
    "ytick.color": INK["light"], "ytick.major.width": 0.6, "ytick.major.size": 2.5,
    "savefig.dpi": 300, "pdf.fonttype": 42, "svg.fonttype": "path", "svg.hashsalt": "evcl",
    "figure.autolayout": False, "figure.constrained_layout.use": False,
}  # fmt: skip


class Pictures(NamedTuple):
    """What the page says about the pictures in some results."""

    heading: str
    note: str
    alt: str


SAMPLES = Pictures(
    "What each model generates",
    "A row after each task; in it, a few samples of each task so far, by the first seed. Further down, the same task "
    "later: what has become of it. Grey: not learned yet. Joint training has the last row only.",
    "Samples after each task, by",
)
EPISODES = Pictures(
    "An episode of each task",
    "After the last task, by the first seed: a row for each task, in their order, with pictures from the first state "
    "of an episode to its last, equally far apart. With one agent per task, the last task alone.",
    "Pictures of an episode of each task, by",
)


@contextmanager
def _style() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context(RC), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Glyph .* missing from font"
        )  # show a box for a missing glyph, without a warning
        yield


class Measure(NamedTuple):
    """A column of `measures_figure`."""

    name: str  # of the field of a result
    title: str
    scale: float


def measures(group: Group) -> list[Measure]:
    """What is shown of the results beside their score: forgetting and, of classes, likelihood and calibration."""
    unit = f" ({group.score.unit})" if group.score.unit else ""
    found = [Measure("forgetting", f"forgetting{unit}", group.score.scale)]
    every = [*found, Measure("nll", "NLL (nats)", 1.0), Measure("ece", "ECE (%)", 100.0)]
    return every if group.classified else found


def score_figure(group: Group) -> Figure:
    """The average score over the tasks seen so far, after each task, one line per method; published curves are dashed.

    Bands are one standard deviation, small points single seeds. If the better half of the methods lie too close
    together to be distinguished, a second panel enlarges them.
    """
    from matplotlib.figure import Figure

    with _style():
        zoom = enlarged(group)
        rows = math.ceil((len(group.lines) + group.has_published) / 4)
        size = (WIDTH, 2.4 + 0.17 * rows) if zoom else (0.75 * WIDTH, 2.6)
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(1, 2 if zoom else 1, squeeze=False)[0]
        _curves(panels[0], group, published=True)
        panels[0].set_ylabel(group.score.title)
        panels[0].set_ylim(*whole(group))
        panels[0].set_title(_text(group.name), loc="left", fontweight="bold")
        if zoom:
            _curves(panels[1], group, published=False)
            panels[1].set_ylim(*zoom)
            panels[1].set_title("enlarged: the better half of the methods", loc="left", color=SOFT)
        _legend(figure, group, below=zoom is not None)
        return _settled(figure)


def _curves(axes: Any, group: Group, published: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    tasks = np.arange(1, group.tasks + 1)
    drawn: set[str] = set()
    for depth, line in enumerate(group.lines):
        order = 4 - depth / len(group.lines)
        mean, spread = (group.score.scale * values for values in line.curve)
        known = np.isfinite(mean)
        alone = known.sum() == 1
        axes.plot(
            tasks[known], mean[known], color=line.style.light, marker=line.style.marker, markersize=4 * line.style.size,
            markeredgewidth=0.5, markeredgecolor="white", linewidth=1.8 if depth == 0 else 1.3, zorder=order,
        )  # fmt: skip
        if len(line.curves) <= MOST_POINTS:
            for seed in group.score.scale * line.curves if len(line.curves) > 1 else ():
                axes.plot(tasks[known], seed[known], ".", color=line.style.light, markersize=2, alpha=0.5, zorder=1)
        if np.isfinite(spread[known]).all():
            if alone:
                bar = {"color": line.style.light, "linewidth": 1, "capsize": 2, "zorder": order}
                axes.errorbar(tasks[known], mean[known], spread[known], **bar)
            else:
                top = np.minimum(mean + spread, group.score.most)
                axes.fill_between(tasks, mean - spread, top, color=line.style.light, alpha=0.11, linewidth=0, zorder=1)
        if published and line.published and line.result.method not in drawn:
            drawn.add(line.result.method)
            axes.plot(
                tasks, 100 * np.array(line.published), color=line.style.light, linestyle=(0, (3, 2)), linewidth=0.9,
                marker=line.style.marker, markersize=2.5 * line.style.size, markerfacecolor="white",
                markeredgewidth=0.6, zorder=2,
            )  # fmt: skip
    axes.set_xlabel("tasks seen")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
    axes.margins(x=0.04)


def _legend(figure: Figure, group: Group, below: bool) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D(
            [], [], color=line.style.light, marker=line.style.marker, markersize=4 * line.style.size,
            markeredgecolor="white", markeredgewidth=0.5,
            linestyle="-" if group.is_stream or np.isfinite(line.curve[0]).sum() > 1 else "",
        )
        for line in group.lines
    ]  # fmt: skip
    labels = [_text(line.label) for line in group.lines]
    if group.has_published:
        handles.append(Line2D([], [], color=SOFT, linestyle=(0, (3, 2)), linewidth=0.9))
        labels.append("published")
    place = {"loc": "outside lower center", "ncols": 4} if below else {"loc": "outside right center"}
    figure.legend(handles, labels, frameon=False, handlelength=2.2, columnspacing=1.4, **place)


def whole(group: Group) -> tuple[float, float]:
    """The range of all curves, in the unit of the score, including published ones."""
    return _range([*_published(group), *(_extent(line, group.score) for line in group.lines)])


def enlarged(group: Group) -> tuple[float, float] | None:
    """The range of the better half of the curves if it is less than 40% of the range of all curves; else None."""
    if len(group.lines) < 3:
        return None

    def place(line: Line) -> float:
        mean = line.result.measure(line.result.score).mean
        return math.inf if mean is None else -mean

    best = sorted(group.lines, key=place)
    curves = [group.score.scale * line.curve[0] for line in best]
    low, high = _range([*_published(group), *curves])
    found = _range(curves[: math.ceil(len(best) / 2)])
    return found if found[1] - found[0] < 0.4 * (high - low) else None


def _published(group: Group) -> list[np.ndarray]:
    return [100 * np.array(line.published) for line in group.lines if line.published]


def _extent(line: Line, score: Score) -> np.ndarray:
    mean, spread = (score.scale * values for values in line.curve)
    spread = np.nan_to_num(spread)
    return np.concatenate([mean - spread, np.minimum(mean + spread, score.most)])


def _range(values: Sequence[np.ndarray]) -> tuple[float, float]:
    joined = np.concatenate(values)
    low, high = float(np.nanmin(joined)), float(np.nanmax(joined))
    margin = max(0.05 * (high - low), 0.05)
    return low - margin, high + margin


def matrix_figure(group: Group) -> Figure:
    """The score matrices, one panel per method: on each task (columns) after each task (rows), mean over seeds."""
    from matplotlib.figure import Figure

    with _style():
        count = len(group.lines)
        columns = min(count, 4 if count <= 8 else 5)
        rows = math.ceil(count / columns)
        side = (WIDTH - 0.5) / max(columns, 4)
        figure = Figure(figsize=(columns * side + 0.5, rows * (side + 0.25) + 0.4))
        figure.set_layout_engine("constrained", h_pad=0.055, w_pad=0.025)
        panels = figure.subplots(rows, columns, squeeze=False)
        low, high = matrix_range(group)
        for panel, line in zip(panels.flat, group.lines, strict=False):
            image = _matrix(panel, line, low, high, 7 if columns < 5 else 6)
        for panel in list(panels.flat)[count:]:
            panel.axis("off")
        unit = f" ({group.score.unit})" if group.score.unit else ""
        figure.supxlabel(f"{group.score.of_task}{unit} on task", fontsize=9)
        figure.supylabel("after task", fontsize=9)
        bar = figure.colorbar(image, ax=panels, shrink=0.8, aspect=30, pad=0.02)
        bar.outline.set_visible(False)
        bar.ax.grid(False)
        figure.suptitle(_text(group.name), x=0.02, ha="left", fontweight="bold", fontsize=9)
        return _settled(figure)


def matrix_range(group: Group) -> tuple[float, float]:
    """The range of the colour scale, in the unit of the score: from the lower quartile of all numbers to the largest.
    So a few bad methods do not make all others one colour.
    """
    values = np.concatenate([matrix(line).ravel() for line in group.lines])
    low, high = float(np.nanpercentile(values, 25)), float(np.nanmax(values))
    return low, max(high, low + 1e-3)


def matrix(line: Line) -> np.ndarray:
    """The score [after task t, on task k] in its unit, mean over seeds; NaN above the diagonal and if not measured."""
    found: np.ndarray = SCORES[line.result.score].scale * line.matrices.mean(0)
    found[np.triu_indices(len(found), 1)] = np.nan
    return found


def only_last(line: Line) -> bool:
    """Whether the scores were measured after the last task only, as those of `joint`, which learns all at once."""
    return len(line.matrices[0]) > 1 and not np.isfinite(matrix(line)[:-1]).any()


def task_names(line: Line) -> list[str]:
    """The names of the tasks if they are short, such as 0/1; otherwise their numbers from 1."""
    names, tasks = line.result.task_names, line.result.tasks
    short = len(names) == tasks and max(map(len, names)) <= 5
    return list(names) if short else [str(k + 1) for k in range(tasks)]


def _matrix(panel: Any, line: Line, low: float, high: float, size: float) -> Any:
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    values = matrix(line)
    tasks = len(values)
    blues = ListedColormap(colormaps["Blues"](np.linspace(0.05, 0.6, 256)))  # light enough for black numbers on top
    image = panel.imshow(values, cmap=blues, vmin=low, vmax=high)
    panel.set_title(_text(line.label), loc="left", fontsize=8, pad=4)
    places = range(0, tasks, max(1, tasks // 5))
    names = task_names(line)
    panel.set_xticks(places, [names[k] for k in places])
    panel.set_yticks(places, [names[k] for k in places])
    panel.tick_params(length=0, labelsize=7.5)
    panel.grid(False)
    panel.spines[:].set_visible(False)
    if tasks <= 6:
        for t, k in zip(*np.nonzero(np.isfinite(values)), strict=True):
            text = f"{values[t, k]:.1f}".replace("100.0", "100")
            panel.text(k, t, text, ha="center", va="center", fontsize=size)
    if only_last(line):
        place = {"ha": "center", "va": "center", "fontsize": size, "color": SOFT, "transform": panel.transAxes}
        panel.text(0.5, 0.6, "measured after\nthe last task only", **place)
    return image


def measures_figure(group: Group) -> Figure:
    """Forgetting and, of classes, NLL and calibration after the last task: mean, standard deviation, and each seed."""
    from matplotlib.figure import Figure

    with _style():
        figure = Figure(figsize=(WIDTH, 0.75 + 0.2 * len(group.lines)), layout="constrained")
        shown = measures(group)
        panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
        for panel, (name, title, scale) in zip(panels, shown, strict=True):
            for place, line in enumerate(group.lines):
                summary = line.result.measure(name)
                if summary.mean is None:
                    continue
                seeds = scale * np.array(summary.measured)
                panel.plot(seeds, np.full(len(seeds), place), "|", color=line.style.light, markersize=5, alpha=0.6)
                panel.errorbar(
                    scale * summary.mean, place, xerr=scale * (summary.std or 0), color=line.style.light,
                    marker=line.style.marker, markersize=4.5 * line.style.size, linewidth=1.2,
                    markeredgecolor="white", markeredgewidth=0.5,
                )  # fmt: skip
            panel.set_xlabel(title)
            panel.set_xlim(left=min(0, panel.get_xlim()[0]))
            _cut(panel, [line.result.measure(name) for line in group.lines], scale)
            panel.grid(axis="x")
            panel.spines["left"].set_visible(False)
            panel.tick_params(axis="y", length=0)
        panels[0].set_yticks(range(len(group.lines)), [_text(line.label) for line in group.lines])
        panels[0].set_ylim(len(group.lines) - 0.5, -0.5)
        panels[0].set_title(_text(group.name), loc="left", fontweight="bold")
        return _settled(figure)


def limits(means: Sequence[float]) -> tuple[float | None, float | None]:
    """Where an axis through 0 begins and ends: at three times the median on each side, so that one method does not rule
    it; None on a side where no mean is beyond that.
    """
    end = 3 * float(np.median(means)) if means else 0.0
    if end <= 0:
        return None, None
    return (-end if min(means) < -end else None), (end if max(means) > end else None)


def _cut(panel: Any, summaries: Sequence[Summary], scale: float) -> None:
    """End the axis at the limits; an arrow and a number stand for each mean beyond them."""
    low, high = limits([scale * one.mean for one in summaries if one.mean is not None])
    left, right = panel.get_xlim()
    left, right = left if low is None else low, right if high is None else high
    panel.set_xlim(left - 0.04 * (right - left) * (low is not None), right + 0.04 * (right - left) * (high is not None))
    for place, one in enumerate(summaries):
        if one.mean is None:
            continue
        mean, style = scale * one.mean, {"va": "center", "fontsize": 7.5}
        if high is not None and mean > high:
            panel.annotate(f"{mean:.3g} →", (high, place), ha="right", **style)
        elif low is not None and mean < low:
            panel.annotate(f"← \N{MINUS SIGN}{-mean:.3g}", (low, place), ha="left", **style)


FIGURES = {"": score_figure, "-matrices": matrix_figure, "-measures": measures_figure}


def _settled(figure: Figure) -> Figure:
    """Compute the layout once, not for each file format: it takes longer than drawing."""
    figure.draw_without_rendering()
    figure.set_layout_engine(None)  # "none" would leave one for which matplotlib draws a figure twice per file
    return figure


def _text(name: str) -> str:
    """The name as it is drawn: cut if there is no room for it, and with a space before a leading "_", because
    matplotlib's legend hides names that start with one.
    """
    name = name if len(name) <= LONGEST_DRAWN else f"{name[: LONGEST_DRAWN - 3]}..."
    return f" {name}" if name.startswith("_") else name


def save_figure(figure: Figure, path: Path, description: str | None = None) -> None:
    """Write a figure in the format given by the path's suffix; the same figure always gives the same bytes.

    An SVG file may hold a description, which is not drawn.
    """
    kind = path.suffix[1:]
    metadata = {"svg": {"Date": None, "Description": description}, "pdf": {"CreationDate": None}}.get(kind)
    with _style():
        write_atomically(path, lambda temporary: figure.savefig(temporary, format=kind, metadata=metadata))
