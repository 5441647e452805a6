"""Results of streams of rows: windowed measures over the rows, alarms, and a table of measures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evcl.experiments.result import StreamMeasures
from evcl.report.cells import BEST, Cell, Column, Table, escaped, plus_minus
from evcl.report.figures import SOFT, WIDTH, _settled, _style, _text
from evcl.report.results import Group, Line
from evcl.report.runs import command, machine, seeds
from evcl.report.tables import _cells, _sentence, megabytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]
DEFINITIONS = (
    "Streams are evaluated prequentially: every row is predicted before it is learned, and every prediction counts. "
    "Log-loss is the mean negative log-likelihood in nats; the Brier score is the squared distance of the "
    "probabilities from the label, from 0 to 2; Cohen's kappa is the accuracy above that of guessing by frequency, 0 "
    "to 1. A label that never came before counts with a probability of 1e-15. Curves show the mean over windows of "
    "equally many rows, which do not overlap."
)


class Measure(NamedTuple):
    """How a measure is shown: its name, its factor and its decimal places; and which values are better: 1 the larger,
    -1 the smaller, 0 neither.
    """

    name: str
    scale: float = 1.0
    places: int = 3
    better: int = -1


SHOWN = {
    "accuracy": Measure("accuracy (%)", 100.0, 2, 1),
    "rmse": Measure("RMSE", places=4),
    "nll": Measure("log-loss (nats)"),
    "brier": Measure("Brier score"),
    "ece": Measure("ECE (%)", 100.0, 2),
    "kappa": Measure("kappa", better=1),
    "coverage": Measure("coverage (%)", 100.0, 1, 0),
}
DRAWN = ("accuracy", "rmse", "nll")  # in this order, as far as they were measured


def block(line: Line) -> StreamMeasures:
    """What a line of a stream's group was measured."""
    found = line.result.prequential
    if found is None:
        raise ValueError(f"{line.label} is no result of a stream")
    return found


def measured(group: Group) -> list[str]:
    """The measures that a line of the group has, in the order of SHOWN."""
    return [name for name in SHOWN if any(name in block(line).measures for line in group.lines)]


def drawn(group: Group) -> list[str]:
    """The measures that have curves."""
    return [name for name in DRAWN if any(name in block(line).curves for line in group.lines)]


def curve(line: Line, name: str) -> tuple[Floats, Floats, Floats]:
    """The last row of each window, and the mean and standard deviation over the seeds of a measure, as it is shown. A
    last window of less than half the size is left out: it says little.
    """
    found, scale = block(line), SHOWN[name].scale
    values = scale * np.array(found.curves.get(name, [[None] * -(-found.rows // found.window)]), dtype=np.float64)
    ends = np.minimum(found.window * np.arange(1, values.shape[1] + 1), found.rows)
    if values.shape[1] > 1 and 2 * (found.rows % found.window or found.window) < found.window:
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
        found, cells = block(line), [line.name]
        for i, one in enumerate(names):
            summary, how = found.measures.get(one), SHOWN[one]
            mean, std = (None, None) if summary is None else (summary.mean, None if i else summary.std)
            cells.append(plus_minus(mean, std, max(1, how.places - 1) if how.scale > 1 else how.places, how.scale))
        made.append(((line.label,), (*cells, *_counts(line)[:2])))
    columns = (short.get(one) or SHOWN[one].name.replace(" (%)", " %") for one in names)
    return Table(("method", *columns, "alarms", "rows/s"), tuple(made))


def _counts(line: Line) -> tuple[str, str, str]:
    """Alarms, rows per second and seconds, of one seed."""
    found, count = block(line), len(line.result.seeds)
    seconds, alarms = line.result.seconds / count, sum(map(len, found.alarms)) / count
    rate = "-" if not seconds else f"{found.rows / seconds:,.0f}"
    return f"{alarms:g}" if count == 1 else f"{alarms:.1f}", rate, f"{seconds:.1f}"


def stream_table(group: Group) -> Table:
    """All measures of a stream; alarms and seconds are per seed."""
    lines = group.lines
    columns = [Column("method", [x.label for x in lines]), Column("seeds", [seeds(x.result) for x in lines])]
    columns += [Column(SHOWN[name].name, _column(lines, name)) for name in measured(group)]
    counts = [_counts(line) for line in lines]
    columns += [Column(name, [one[i] for one in counts]) for i, name in enumerate(("alarms", "rows/s", "seconds"))]
    if any(line.result.memory_bytes is not None for line in lines):
        columns.insert(-2, Column("MB", [megabytes(line.result) for line in lines]))
    return Table.of(columns, [line.label for line in lines])


def _column(lines: Sequence[Line], name: str) -> list[Cell]:
    """A measure of each line, the best marked."""
    how = SHOWN[name]
    return _cells(lines, lambda line: block(line).measures.get(name), how.better, how.places, how.scale)


def overview(groups: list[Group], name: str) -> Table:
    """One measure over all streams: a row per method, a column per stream."""
    labels = list(dict.fromkeys(line.label for group in groups for line in group.lines))
    columns = [Column("method", labels)]
    for group in groups:
        found = dict(zip((line.label for line in group.lines), _column(group.lines, name), strict=True))
        columns.append(Column(group.name, [found.get(label, Cell("-")) for label in labels]))
    return Table.of(columns, labels)


def streams_markdown(groups: list[Group], title: str) -> str:
    """The tables of streams as Markdown, with definitions of the measures and the command for each run."""
    parts = [f"# {escaped(title)}", DEFINITIONS, BEST]
    for group in groups:
        parts += [f"## {escaped(group.name)}", stream_table(group).markdown(mark=True), _sentence(caption(group))]
        parts += ["```\n" + "\n".join(" ".join(command(line.result).split()) for line in group.lines) + "\n```"]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


# --- the figure for print --------------------------------------------------------------------------------------------


def stream_figure(group: Group) -> Figure:
    """Windowed accuracy and log-loss (of numbers, RMSE and NLL) over the rows, a line per method.

    Bands are one standard deviation over the seeds. Ticks below are alarms, those of a method in its colour; dashed
    lines are rows at which the stream is known to change.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter

    with _style():
        names = drawn(group)
        figure = Figure(figsize=(WIDTH, 0.6 + 1.5 * max(1, len(names))), layout="constrained")
        panels = figure.subplots(max(1, len(names)), 1, sharex=True, squeeze=False)[:, 0]
        for panel, name in zip(panels, names, strict=False):
            for depth, line in enumerate(group.lines):
                ends, mean, spread = curve(line, name)
                panel.plot(ends, mean, color=line.style.light, linewidth=1.2, zorder=4 - depth / len(group.lines))
                if np.isfinite(spread).all():
                    panel.fill_between(ends, mean - spread, mean + spread, color=line.style.light, alpha=0.13, lw=0)
            for row in changes(group):
                panel.axvline(row, color=SOFT, linewidth=0.8, linestyle=(0, (3, 2)), zorder=1)
            panel.set_ylabel(SHOWN[name].name)
            panel.margins(x=0.01)
        warned = [line for line in group.lines if any(block(line).alarms)]
        low, high = panels[0].get_ylim()
        room = 0.02 + 0.07 * len(warned)  # for the ticks, as a fraction of the panel
        panels[0].set_ylim(low - (high - low) * room / (1 - room) if warned else low, high)
        for place, line in enumerate(warned):
            rows = sorted({alarm.row for alarms in block(line).alarms for alarm in alarms})
            height = 0.02 + 0.07 * place
            panels[0].vlines(rows, height, height + 0.06, transform=panels[0].get_xaxis_transform(),
                             color=line.style.light, linewidth=1.4, zorder=5)  # fmt: skip
        panels[-1].set_xlabel("rows")
        panels[-1].xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        panels[0].set_title(_text(group.name), loc="left", fontweight="bold")
        handles = [Line2D([], [], color=line.style.light) for line in group.lines]
        labels = [_text(line.label) for line in group.lines]
        if warned:
            handles.append(Line2D([], [], color=SOFT, marker="|", markersize=6, markeredgewidth=1.4, linestyle=""))
            labels.append("alarm")
        if changes(group):
            handles.append(Line2D([], [], color=SOFT, linewidth=0.8, linestyle=(0, (3, 2))))
            labels.append("known change")
        figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=6, handlelength=1.8)
        return _settled(figure)


STREAM_FIGURES = {"": stream_figure}


# --- the data of the page's figures ----------------------------------------------------------------------------------


def page_figures(group: Group, numbers: Mapping[str, int]) -> list[dict[str, Any]]:
    """The two figures of a stream: measures over the rows, with alarms, and the measures over all rows."""
    lines = []
    for line in group.lines:
        curves = [curve(line, name) for name in drawn(group)]
        lines.append(
            {
                "series": numbers[line.label],
                "rows": [int(row) for row in (curves[0][0] if curves else ())],
                "mean": [_numbers(mean) for _, mean, _ in curves],
                "sd": [_numbers(spread) for _, _, spread in curves],
                "alarms": [
                    {"row": alarm.row, "columns": alarm.columns[:3]}
                    for alarms in block(line).alarms
                    for alarm in alarms
                ],
            }
        )
    names = [name for name in measured(group) if name not in ("rmse", "accuracy")]
    measures = [
        {"series": numbers[line.label], "values": [_measure(block(line), name) for name in names]}
        for line in group.lines
    ]
    shown, better = [SHOWN[name].name for name in drawn(group)], [SHOWN[name].better for name in drawn(group)]
    return [
        {"kind": "stream", "lines": lines, "measures": shown, "changes": changes(group), "better": better},
        {"kind": "measures", "lines": measures, "measures": [SHOWN[name].name for name in names]},
    ]


def _measure(found: StreamMeasures, name: str) -> dict[str, Any] | None:
    summary, scale = found.measures.get(name), SHOWN[name].scale
    if summary is None or summary.mean is None:
        return None
    spread = None if summary.std is None else round(scale * summary.std, 5)
    return {"mean": round(scale * summary.mean, 5), "sd": spread, "seeds": _numbers(scale * np.array(summary.measured))}


def _numbers(values: Any) -> list[float | None]:
    return [round(float(v), 5) if math.isfinite(v) else None for v in values]
