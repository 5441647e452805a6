"""Results of streams of rows: windowed measures over the rows, alarms, and a table of measures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evcl.experiments.result import StreamMeasures
from evcl.report.cells import Cell, Column, Table, escaped, plus_minus
from evcl.report.figures import GREY, TEXT_WIDTH, Axes, Draw, Panel, Sheet, said, settled, side_by_side, style
from evcl.report.published import WORDS
from evcl.report.results import Group, Line
from evcl.report.runs import command, machine, seeds
from evcl.report.tables import _cells, _sentence, megabytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]


class Measure(NamedTuple):
    """How a measure is shown: its name, its factor and its decimal places; and which values are better: 1 the larger,
    -1 the smaller, 0 neither.
    """

    name: str
    scale: float = 1.0
    places: int = 3
    better: int = -1


MEASURES = {
    "accuracy": Measure("accuracy (%)", 100.0, 2, 1),
    "rmse": Measure("RMSE", places=4),
    "nll": Measure("log-loss (nats)"),
    "brier": Measure("Brier score"),
    "ece": Measure("ECE (%)", 100.0, 2),
    "kappa": Measure("kappa", better=1),
    "coverage": Measure("coverage (%)", 100.0, 1, 0),
}
DRAWN_MEASURES = ("accuracy", "rmse", "nll")  # in this order, as far as they were measured


def block(line: Line) -> StreamMeasures:
    """What a line of a stream's group was measured."""
    measures = line.result.prequential
    if measures is None:
        raise ValueError(f"{line.label} is no result of a stream")
    return measures


def measured(group: Group) -> list[str]:
    """The measures that a line of the group has, in the order of MEASURES."""
    return [name for name in MEASURES if any(name in block(line).measures for line in group.lines)]


def drawn(group: Group) -> list[str]:
    """The measures that have curves."""
    return [name for name in DRAWN_MEASURES if any(name in block(line).curves for line in group.lines)]


def curve(line: Line, name: str) -> tuple[Floats, Floats, Floats]:
    """The last row of each window, and the mean and standard deviation over the seeds of a measure, as it is shown. A
    last window of less than half the size is left out: it says little.
    """
    stream, scale = block(line), MEASURES[name].scale
    values = scale * np.array(stream.curves.get(name, [[None] * -(-stream.rows // stream.window)]), dtype=np.float64)
    ends = np.minimum(stream.window * np.arange(1, values.shape[1] + 1), stream.rows)
    if values.shape[1] > 1 and 2 * (stream.rows % stream.window or stream.window) < stream.window:
        values, ends = values[:, :-1], ends[:-1]
    spread = values.std(0, ddof=1) if len(values) > 1 else np.full(values.shape[1], np.nan)
    return ends.astype(np.float64), values.mean(0), spread


def changes(group: Group) -> list[int]:
    """The rows at which the stream is known to change."""
    return sorted({row for line in group.lines for row in block(line).changes})


def caption(group: Group) -> str:
    """The caption of a stream's table: rows, seeds and machine."""
    every = list(dict.fromkeys(seeds(line.result) for line in group.lines))
    one = max(len(line.result.seeds) for line in group.lines) == 1
    over = f"seed{'s' * (not one)} {every[0]}" if len(every) == 1 else "differing seeds"
    machines = "; ".join(dict.fromkeys(machine(line.result) for line in group.lines))
    rows = f"{block(group.lines[0]).rows:,} rows, each predicted before it was learned"
    return f"{rows}; {'' if one else 'mean ± standard deviation over '}{over}; {machines}"


# --- tables ----------------------------------------------------------------------------------------------------------


def short_table(group: Group) -> Table:
    """The measures of a stream for a terminal: without the deviations, except for the first measure."""
    names = measured(group)
    short = {"nll": "log-loss", "brier": "Brier", "rmse": "RMSE"}
    made = []
    for line in group.lines:
        stream, cells = block(line), [line.name]
        for i, one in enumerate(names):
            summary, how = stream.measures.get(one), MEASURES[one]
            mean, std = (None, None) if summary is None else (summary.mean, None if i else summary.std)
            cells.append(plus_minus(mean, std, max(1, how.places - 1) if how.scale > 1 else how.places, how.scale))
        made.append(((line.label,), (*cells, *_counts(line)[:2])))
    columns = (short.get(one) or MEASURES[one].name.replace(" (%)", " %") for one in names)
    return Table(("method", *columns, "alarms", "rows/s"), tuple(made))


def _counts(line: Line) -> tuple[str, str, str]:
    """Alarms, rows per second and seconds, of one seed."""
    stream, count = block(line), len(line.result.seeds)
    seconds, alarms = line.result.seconds / count, sum(map(len, stream.alarms)) / count
    rate = "-" if not seconds else f"{stream.rows / seconds:,.0f}"
    return f"{alarms:g}" if count == 1 else f"{alarms:.1f}", rate, f"{seconds:.1f}"


def stream_table(group: Group) -> Table:
    """All measures of a stream; alarms and seconds are per seed."""
    lines = group.lines
    columns = [Column("method", [x.label for x in lines]), Column("seeds", [seeds(x.result) for x in lines])]
    columns += [Column(MEASURES[name].name, _column(lines, name)) for name in measured(group)]
    counts = [_counts(line) for line in lines]
    columns += [Column(name, [one[i] for one in counts]) for i, name in enumerate(("alarms", "rows/s", "seconds"))]
    if any(line.result.memory_bytes is not None for line in lines):
        columns.insert(-2, Column("MB", [megabytes(line.result) for line in lines]))
    return Table.of(columns, [line.label for line in lines])


def _column(lines: Sequence[Line], name: str) -> list[Cell]:
    """A measure of each line, the best marked."""
    how = MEASURES[name]
    return _cells(lines, lambda line: block(line).measures.get(name), how.better, how.places, how.scale)


def overview(groups: list[Group], name: str) -> Table:
    """One measure over all streams: a row per method, a column per stream."""
    labels = list(dict.fromkeys(line.label for group in groups for line in group.lines))
    columns = [Column("method", labels)]
    for group in groups:
        cells = dict(zip((line.label for line in group.lines), _column(group.lines, name), strict=True))
        columns.append(Column(group.name, [cells.get(label, Cell("-")) for label in labels]))
    return Table.of(columns, labels)


def streams_markdown(groups: list[Group], title: str) -> str:
    """The tables of streams as Markdown, with definitions of the measures and the command for each run."""
    parts = [f"# {escaped(title)}", WORDS["streams"], WORDS["best"]]
    for group in groups:
        parts += [f"## {escaped(group.name)}", stream_table(group).markdown(mark=True), _sentence(caption(group))]
        parts += ["```\n" + "\n".join(" ".join(command(line.result).split()) for line in group.lines) + "\n```"]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


# --- figures ---------------------------------------------------------------------------------------------------------


def stream_figure(group: Group, page: bool = False) -> Figure:
    """Windowed accuracy and log-loss (of numbers, RMSE and NLL) over the rows, a line per method.

    Bands are one standard deviation over the seeds. Ticks below are alarms, those of a method in its colour; dashed
    lines are rows at which the stream is known to change. On the page, the axes fit the better half of the methods.
    """
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter

    with style(page):
        names = drawn(group)
        sheet = Sheet((TEXT_WIDTH, 0.6 + 1.5 * max(1, len(names))), rows=max(1, len(names)), page=page)
        panels = sheet.panels
        for panel, name in zip(panels, names, strict=False):
            for depth, line in enumerate(group.lines):
                _course(sheet, panel, line, name, 4 - depth / len(group.lines))
            for row in changes(group):
                panel.axvline(row, color=GREY, linewidth=0.8, linestyle=(0, (3, 2)), zorder=1)
            panel.set_ylabel(MEASURES[name].name)
            panel.margins(x=0.01)
            if page:
                panel.set_ylim(*fitted(group, name))
        warned = [line for line in group.lines if any(block(line).alarms)]
        low, high = panels[0].get_ylim()
        room = 0.02 + 0.07 * len(warned)  # for the ticks, as a fraction of the panel
        panels[0].set_ylim(low - (high - low) * room / (1 - room) if warned else low, high)
        for place, line in enumerate(warned):
            columns: dict[int, str] = {}
            for alarm in sorted((one for alarms in block(line).alarms for one in alarms), key=lambda one: one.row):
                columns[alarm.row] = ", ".join(alarm.columns[:3])
            height = 0.02 + 0.07 * place
            ticks = panels[0].vlines(list(columns), height, height + 0.06, line.style.light, linewidth=1.4, zorder=5,
                                     transform=panels[0].get_xaxis_transform())  # fmt: skip
            sheet.mark(ticks, line, [f"{line.label}: alarm\nrow {row:,}\n{why}" for row, why in columns.items()])
        panels[-1].set_xlabel("rows")
        panels[-1].xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        sheet.title(group)
        handles = [(Line2D([], [], color=line.style.light), line.label) for line in group.lines]
        if warned:
            tick = Line2D([], [], color=GREY, marker="|", markersize=6, markeredgewidth=1.4, linestyle="")
            handles.append((tick, "alarm"))
        if changes(group):
            handles.append((Line2D([], [], color=GREY, linewidth=0.8, linestyle=(0, (3, 2))), "known change"))
        sheet.legend(handles, loc="outside lower center", ncols=6, handlelength=1.8)
        return settled(sheet.figure)


def _course(sheet: Sheet, panel: Axes, line: Line, name: str, order: float) -> None:
    """A measure of one method over the rows."""
    ends, mean, spread = curve(line, name)
    (drawn_line,) = panel.plot(ends, mean, color=line.style.light, linewidth=1.2, zorder=order)
    sheet.mark(drawn_line, line)
    if np.isfinite(spread).all():
        band = panel.fill_between(ends, mean - spread, mean + spread, color=line.style.light, alpha=0.13, lw=0)
        sheet.mark(band, line, extra=True)
    if sheet.page:  # what is said where a line is pointed at
        each = zip(ends, mean, spread, strict=True)
        texts = [f"{line.label}\nup to row {row:,.0f}: {said(value, sd, 3)}" for row, value, sd in each]
        sheet.mark(panel.plot(ends, mean, "o", markersize=7, alpha=0, zorder=6)[0], line, texts)


def fitted(group: Group, name: str) -> tuple[float, float]:
    """The range of the better half of the lines, and as much again on either side if there is something there."""
    means = [values[np.isfinite(values)] for values in (curve(line, name)[1] for line in group.lines)]
    known = sorted((values for values in means if len(values)), key=lambda v: -MEASURES[name].better * v.mean())
    if not known:
        return 0.0, 1.0
    half, every = np.concatenate(known[: (len(known) + 2) // 2]), np.concatenate(known)
    low, high = half.min(), half.max()
    low, high = max(every.min(), 2 * low - high), min(every.max(), 2 * high - low)
    margin = 0.05 * (high - low) or 0.5
    return float(low - margin), float(high + margin)


def stream_measures_figure(group: Group, page: bool = False) -> Figure:
    """The measures over all rows that have no curve of their own: mean, standard deviation, and each seed."""
    names = [name for name in measured(group) if name not in ("rmse", "accuracy")]
    panels = [
        Panel(MEASURES[name].name, MEASURES[name].scale, [block(line).measures.get(name) for line in group.lines])
        for name in names
    ]
    return side_by_side(group, group.lines, panels, page)


STREAM_FIGURES: dict[str, Draw] = {"": stream_figure, "-measures": stream_measures_figure}
