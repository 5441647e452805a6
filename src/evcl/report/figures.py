"""Figures for print: the score (such as accuracy) against tasks seen, its matrices, forgetting and calibration."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from evcl._core.files import write_atomically
from evcl.experiments.result import SCORES, Score, Summary
from evcl.report.cells import plus_minus
from evcl.report.results import Group, Line
from evcl.report.styles import INK

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

Axes = Any  # matplotlib's own types ask for more than it does
GRID_COLOUR, GREY = "#dfe3e8", "#57606a"
TEXT_WIDTH = 6.75  # inches: the text width of a conference paper
PAGE_WIDTH, PAGE_POINTS = 10.5, 1.5  # inches of 96 pixels, on a wide screen; points are this much larger there
FIGURE_FORMATS = ("svg", "png", "pdf")
MOST_POINTS = 10  # seeds whose points are drawn
LONGEST_DRAWN = 48  # characters of a name in a figure
# The fonts come with matplotlib, so figures look the same everywhere; they are embedded, or drawn as outlines.
RC: dict[Any, Any] = {
    "font.family": "STIXGeneral", "font.size": 9, "axes.titlesize": 9, "legend.fontsize": 8.5, "text.parse_math": False,
    "axes.linewidth": 0.6, "axes.edgecolor": INK["light"], "axes.labelcolor": INK["light"], "text.color": INK["light"],
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.grid.axis": "y",
    "axes.axisbelow": True, "grid.color": GRID_COLOUR, "grid.linewidth": 0.6, "lines.linewidth": 1.3,
    "xtick.color": INK["light"], "xtick.major.width": 0.6, "xtick.major.size": 2.5,
    "ytick.color": INK["light"], "ytick.major.width": 0.6, "ytick.major.size": 2.5,
    "savefig.dpi": 300, "pdf.fonttype": 42, "svg.fonttype": "path", "svg.hashsalt": "evcl",
    "figure.autolayout": False, "figure.constrained_layout.use": False,
}  # fmt: skip
# On the page, texts are texts, in a font of the reader's that is narrower than this one, and colours are the theme's.
PAGE_RC: dict[Any, Any] = {
    "font.family": "DejaVu Sans", "svg.fonttype": "none", "savefig.facecolor": "none", "axes.facecolor": "none",
}  # fmt: skip


class Sheet:
    """The panels of a figure, for print or for the page.

    The page shows which methods it draws, and lets them be switched off and pointed at: there, every artist is marked
    with its method and with what it says about each of its points.
    """

    def __init__(self, size: tuple[float, float], rows: int = 1, columns: int = 1, page: bool = False) -> None:
        """`size`: width and height in inches, in print."""
        from matplotlib.figure import Figure

        self.page = page
        scale = PAGE_WIDTH / TEXT_WIDTH if page else 1.0
        self.figure = Figure(figsize=(scale * size[0], (1.2 if page else 1.0) * size[1]), layout="constrained")
        self.panels: list[Axes] = list(self.figure.subplots(rows, columns, squeeze=False, sharex=rows > 1).flat)

    def mark(self, artist: Artist, line: Line, texts: Sequence[str] = (), extra: bool = False) -> None:
        """Mark what shows a method. `extra`: it is left out of a figure of many methods, in which this one is grey."""
        if self.page:
            artist.set_gid(json.dumps([line.label, extra, list(texts)]))

    def look(self, line: Line, size: float) -> dict[str, Any]:
        """How the points of a method look."""
        scale = PAGE_POINTS if self.page else 1.0
        return {"color": line.style.light, "marker": line.style.marker, "markersize": scale * size * line.style.size,
                "markeredgecolor": "white", "markeredgewidth": scale * 0.5}  # fmt: skip

    def title(self, group: Group) -> None:
        """The name of the benchmark, which is the page's own heading."""
        if not self.page:
            self.panels[0].set_title(_text(group.name), loc="left", fontweight="bold")

    def legend(self, handles: Sequence[tuple[Line2D, str]], **place: Any) -> None:
        """The page has a list of methods in place of it."""
        if not self.page:
            lines, labels = zip(*handles, strict=True)
            self.figure.legend(lines, list(map(_text, labels)), frameon=False, **place)


def settled(figure: Figure) -> Figure:
    """Compute the layout once, not for each file format: it takes longer than drawing."""
    layout = figure.get_layout_engine()
    assert layout is not None
    layout.execute(figure)
    figure.set_layout_engine(None)  # "none" would leave one for which matplotlib draws a figure twice per file
    return figure


@contextmanager
def style(page: bool = False) -> Iterator[None]:
    """Within this, figures are drawn and written in the style of print or of the page."""
    import matplotlib

    with matplotlib.rc_context(RC | PAGE_RC if page else RC), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Glyph .* missing from font"
        )  # show a box for a missing glyph, without a warning
        yield


def said(mean: float, spread: float | None, places: int) -> str:
    """'83.12 ± 2.04', and without a deviation '83.12'."""
    return plus_minus(mean, None if spread is None or math.isnan(spread) else spread, places)


def score_figure(group: Group, page: bool = False) -> Figure:
    """The average score over the tasks seen so far, after each task, one line per method; published curves are dashed.

    Bands are one standard deviation, small points single seeds. If the better half of the methods lie too close
    together to be distinguished, a second panel enlarges them.
    """
    with style(page):
        zoom = enlarged(group)
        rows = math.ceil((len(group.lines) + group.has_published) / 4)
        print_size = (TEXT_WIDTH, 2.4 + 0.17 * rows) if zoom else (0.75 * TEXT_WIDTH, 2.6)
        sheet = Sheet((print_size[0], 2.6) if page else print_size, columns=2 if zoom else 1, page=page)
        _curves(sheet, sheet.panels[0], group, published=True)
        sheet.panels[0].set_ylabel(group.score.title)
        sheet.panels[0].set_ylim(*whole(group))
        sheet.title(group)
        if zoom:
            _curves(sheet, sheet.panels[1], group, published=False)
            sheet.panels[1].set_ylim(*zoom)
            sheet.panels[1].set_title("enlarged: the better half of the methods", loc="left", color=GREY)
        key(sheet, group, below=zoom is not None)
        return settled(sheet.figure)


def _curves(sheet: Sheet, axes: Axes, group: Group, published: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    tasks = np.arange(1, group.tasks + 1)
    drawn: set[str] = set()
    for depth, line in enumerate(group.lines):
        order = 4 - depth / len(group.lines)
        mean, spread = (group.score.scale * values for values in line.curve)
        known = np.isfinite(mean)
        texts = [f"{line.label}\nafter task {t}: {said(mean[t - 1], spread[t - 1], 2)}" for t in tasks[known]]
        width = 1.8 if depth == 0 else 1.3
        (curve,) = axes.plot(tasks[known], mean[known], linewidth=width, zorder=order, **sheet.look(line, 4))
        sheet.mark(curve, line, texts)
        if 1 < len(line.curves) <= MOST_POINTS:
            each, x = group.score.scale * line.curves[:, known], np.tile(tasks[known], len(line.curves))
            (dots,) = axes.plot(x, each.ravel(), ".", color=line.style.light, markersize=2, alpha=0.5, zorder=1)
            sheet.mark(dots, line, extra=True)
        if np.isfinite(spread[known]).all():
            if known.sum() == 1:
                bar = {"color": line.style.light, "linewidth": 1, "capsize": 2, "zorder": order}
                for part in axes.errorbar(tasks[known], mean[known], spread[known], **bar).get_children():
                    sheet.mark(part, line, extra=True)
            else:
                top = np.minimum(mean + spread, group.score.most)
                band = axes.fill_between(tasks, mean - spread, top, color=line.style.light, alpha=0.11, lw=0, zorder=1)
                sheet.mark(band, line, extra=True)
        if published and line.published and line.result.method not in drawn:
            drawn.add(line.result.method)
            values = 100 * np.array(line.published)
            (dashed,) = axes.plot(
                tasks, values, color=line.style.light, linestyle=(0, (3, 2)), linewidth=0.9, marker=line.style.marker,
                markersize=2.5 * line.style.size, markerfacecolor="white", markeredgewidth=0.6, zorder=2,
            )  # fmt: skip
            texts = [f"{line.label}, published\nafter task {t}: {values[t - 1]:.1f}" for t in tasks]
            sheet.mark(dashed, line, texts, extra=True)
    axes.set_xlabel("tasks seen")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
    axes.margins(x=0.04)


def key(sheet: Sheet, group: Group, below: bool) -> None:
    """The names of the methods."""
    from matplotlib.lines import Line2D

    handles = [
        (Line2D([], [], ls="-" if np.isfinite(line.curve[0]).sum() > 1 else "", **sheet.look(line, 4)), line.label)
        for line in group.lines
    ]
    if group.has_published:
        handles.append((Line2D([], [], color=GREY, linestyle=(0, (3, 2)), linewidth=0.9), "published"))
    place = {"loc": "outside lower center", "ncols": 4} if below else {"loc": "outside right center"}
    sheet.legend(handles, handlelength=2.2, columnspacing=1.4, **place)


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
    better = _range(curves[: math.ceil(len(best) / 2)])
    return better if better[1] - better[0] < 0.4 * (high - low) else None


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


def matrix_figure(group: Group, page: bool = False) -> Figure:
    """The score matrices, one panel per method: on each task (columns) after each task (rows), mean over seeds."""
    with style(page):
        from matplotlib.figure import Figure

        count = len(group.lines)
        columns = min(count, 4 if count <= 8 else 5)
        rows = math.ceil(count / columns)
        side = (TEXT_WIDTH - 0.5) / max(columns, 4)
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
        return settled(figure)


def matrix_range(group: Group) -> tuple[float, float]:
    """The range of the colour scale, in the unit of the score: from the lower quartile of all numbers to the largest.
    So a few bad methods do not make all others one colour.
    """
    values = np.concatenate([matrix(line).ravel() for line in group.lines])
    low, high = float(np.nanpercentile(values, 25)), float(np.nanmax(values))
    return low, max(high, low + 1e-3)


def matrix(line: Line) -> np.ndarray:
    """The score [after task t, on task k] in its unit, mean over seeds; NaN above the diagonal and if not measured."""
    values: np.ndarray = SCORES[line.result.score].scale * line.matrices.mean(0)
    values[np.triu_indices(len(values), 1)] = np.nan
    return values


def only_last(line: Line) -> bool:
    """Whether the scores were measured after the last task only, as those of `joint`, which learns all at once."""
    return len(line.matrices[0]) > 1 and not np.isfinite(matrix(line)[:-1]).any()


def task_names(line: Line) -> list[str]:
    """The names of the tasks if they are short, such as 0/1; otherwise their numbers from 1."""
    names, tasks = line.result.task_names, line.result.tasks
    short = len(names) == tasks and max(map(len, names)) <= 5
    return list(names) if short else [str(k + 1) for k in range(tasks)]


def _matrix(panel: Axes, line: Line, low: float, high: float, size: float) -> Any:
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
        place = {"ha": "center", "va": "center", "fontsize": size, "color": GREY, "transform": panel.transAxes}
        panel.text(0.5, 0.6, "measured after\nthe last task only", **place)
    return image


class Panel(NamedTuple):
    """A panel of `measures_figure`: one measure of each line; None if it has none."""

    title: str
    scale: float
    summaries: Sequence[Summary | None]
    is_score: bool = False  # larger is better


def task_panels(group: Group) -> list[Panel]:
    """What is shown of the results beside their score: forgetting and, of classes, likelihood and calibration."""
    unit = f" ({group.score.unit})" if group.score.unit else ""
    measures = [("forgetting", f"forgetting{unit}", group.score.scale)]
    if group.classified:
        measures += [("nll", "NLL (nats)", 1.0), ("ece", "ECE (%)", 100.0)]
    return [Panel(title, scale, [line.result.measure(name) for line in group.lines]) for name, title, scale in measures]


def measures_figure(group: Group, page: bool = False) -> Figure:
    """Forgetting and, of classes, NLL and calibration after the last task: mean, standard deviation, and each seed."""
    return side_by_side(group, group.lines, task_panels(group), page)


def scenario_figure(groups: Sequence[Group]) -> Figure:
    """The score in each scenario of a benchmark, for the page."""
    lines = {line.label: line for group in groups for line in group.lines}
    panels = []
    for group in groups:
        scores = {line.label: line.result.measure(line.result.score) for line in group.lines}
        unit = f" ({group.score.unit})" if group.score.unit else ""
        summaries = [scores.get(label) for label in lines]
        panels.append(Panel(f"{group.scenario_name}{unit}", group.score.scale, summaries, is_score=True))
    return side_by_side(groups[0], list(lines.values()), panels, page=True)


def side_by_side(group: Group, lines: Sequence[Line], panels: Sequence[Panel], page: bool) -> Figure:
    """Measures side by side, a row per method; what nobody was measured for is left out."""
    measured = [one for one in panels if any(s is not None and s.mean is not None for s in one.summaries)] or panels[:1]
    with style(page):
        sheet = Sheet((TEXT_WIDTH, 0.75 + 0.2 * len(lines)), columns=len(measured), page=page)
        for panel, one in zip(sheet.panels, measured, strict=True):
            for place, (line, summary) in enumerate(zip(lines, one.summaries, strict=True)):
                if summary is not None and summary.mean is not None:
                    _row(sheet, panel, place, line, one)
            panel.set_xlabel(one.title)
            if not one.is_score:
                panel.set_xlim(left=min(0, panel.get_xlim()[0]))
            _cut(sheet, panel, lines, one)
            panel.grid(axis="x")
            panel.spines["left"].set_visible(False)
            panel.tick_params(axis="y", length=0, labelleft=panel is sheet.panels[0])
            panel.set_yticks(range(len(lines)), [_text(line.label) for line in lines])
            panel.set_ylim(len(lines) - 0.5, -0.5)
        for line, label in zip(lines, sheet.panels[0].get_yticklabels(), strict=True):
            sheet.mark(label, line, extra=True)
        sheet.title(group)
        return settled(sheet.figure)


def _row(sheet: Sheet, panel: Axes, place: int, line: Line, one: Panel) -> None:
    """The mean, the standard deviation and each seed of a method."""
    summary = one.summaries[place]
    assert summary is not None
    assert summary.mean is not None
    mean, spread = one.scale * summary.mean, one.scale * (summary.std or 0)
    seeds = one.scale * np.array(summary.measured)
    strokes = panel.plot(seeds, np.full(len(seeds), place), "|", color=line.style.light, markersize=5, alpha=0.6)
    bar = [mean - spread, mean, mean + spread]
    drawn = panel.plot(bar, [place] * 3, linewidth=1.2, markevery=[1], **sheet.look(line, 4.5))
    text = f"{line.label}\n{one.title}: {said(mean, None if summary.std is None else spread, 3)}"
    for artist in (*strokes, *drawn):
        sheet.mark(artist, line, [text])


def limits(means: Sequence[float], is_score: bool = False) -> tuple[float | None, float | None]:
    """Where an axis begins and ends, so that one method does not rule it; None on a side where no mean is beyond that.

    That of a measure, through 0, ends at three times the median on each side; that of a score, of which more is better,
    begins where the distance from the best is four times the median of these distances.
    """
    if is_score and means:
        best = max(means)
        far = 4 * float(np.median([best - mean for mean in means]))
        return (best - far if far > 0 and min(means) < best - far else None), None
    end = 3 * float(np.median(means)) if means else 0.0
    if end <= 0:
        return None, None
    return (-end if min(means) < -end else None), (end if max(means) > end else None)


def _cut(sheet: Sheet, panel: Axes, lines: Sequence[Line], one: Panel) -> None:
    """End the axis at the limits; an arrow and a number stand for each mean beyond them."""
    means = [None if s is None or s.mean is None else one.scale * s.mean for s in one.summaries]
    low, high = limits([mean for mean in means if mean is not None], one.is_score)
    left, right = panel.get_xlim()
    left, right = left if low is None else low, right if high is None else high
    panel.set_xlim(left - 0.04 * (right - left) * (low is not None), right + 0.04 * (right - left) * (high is not None))
    for place, (mean, line) in enumerate(zip(means, lines, strict=True)):
        if mean is not None and high is not None and mean > high:
            text, at, side = f"{mean:.3g} →", high, "right"
        elif mean is not None and low is not None and mean < low:
            text, at, side = f"← {mean:.3g}".replace("-", "\N{MINUS SIGN}"), low, "left"
        else:
            continue
        patch = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # a bar may end there
        sheet.mark(panel.annotate(text, (at, place), ha=side, va="center", fontsize=7.5, bbox=patch), line)


Draw = Callable[[Group, bool], "Figure | None"]
"""Draws a group, for print or for the page."""
FIGURES: dict[str, Draw] = {"": score_figure, "-matrices": matrix_figure, "-measures": measures_figure}


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
    with style():
        write_atomically(path, lambda temporary: figure.savefig(temporary, format=kind, metadata=metadata))
