"""A table: text cells that know the numbers that they show; for a terminal, Markdown, CSV, LaTeX and the page."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from evcl.experiments import Summary
from evcl.experiments.known import known_method
from evcl.report.published import WORDS
from evcl.report.results import Line

LATEX_ESCAPES = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}


def best_note(lines: Iterable[Line]) -> str:
    """What bold means in a table of these results."""
    joint = any(_jointly(line) for line in lines)
    return f"{WORDS['best']} Joint training is left out: it is an upper bound." if joint else WORDS["best"]


def _jointly(line: Line) -> bool:
    method = known_method(line.result.benchmark, line.result.method)
    return method is not None and method.jointly


class Cell(str):
    """The text of a cell; if it shows a measure, its mean and standard deviation as shown, and whether it is best."""

    mean: float | None
    std: float | None
    best: bool

    def __new__(cls, text: str, mean: float | None = None, std: float | None = None, best: bool = False) -> Self:
        cell = super().__new__(cls, text)
        cell.mean, cell.std, cell.best = mean, std, best
        return cell


def plus_minus(mean: float | None, spread: float | None, places: int, scale: float = 1, best: bool = False) -> Cell:
    """'83.12 ± 2.04'"""
    if mean is None:
        return Cell("-")
    text = f"{round(scale * mean, places) + 0.0:.{places}f}"  # + 0.0: no "-0.0"
    full = text if spread is None else f"{text} ± {scale * spread:.{places}f}"
    return Cell(full, scale * mean, None if spread is None else scale * spread, best)


class Column(NamedTuple):
    """A column: its name, its cells and its unit."""

    name: str
    cells: Sequence[str]
    unit: str = ""

    @property
    def title(self) -> str:
        return f"{self.name} ({self.unit})" if self.unit else self.name


@dataclass(frozen=True)
class Table:
    """Columns and rows; each row has the labels of the results it shows, and its cells."""

    columns: tuple[str, ...]
    rows: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
    units: tuple[str, ...] = ()  # of each column; none if empty

    @staticmethod
    def of(columns: Sequence[Column], labels: Sequence[str]) -> Table:
        """The table of these columns, whose rows show the results with these labels."""
        cells = zip(*(column.cells for column in columns), strict=True)
        rows = tuple(((label,), tuple(row)) for label, row in zip(labels, cells, strict=True))
        return Table(tuple(one.name for one in columns), rows, tuple(one.unit for one in columns))

    @property
    def titles(self) -> tuple[str, ...]:
        """The names of the columns, with their units."""
        units = self.units or ("",) * len(self.columns)
        return tuple(Column(name, (), unit).title for name, unit in zip(self.columns, units, strict=True))

    @property
    def has_best(self) -> bool:
        return any(_best(cell) for _, cells in self.rows for cell in cells)

    def markdown(self, mark: bool = False) -> str:
        """The table as Markdown; with `mark`, units are in the heads and the best values are bold."""
        heads = self.titles if mark else self.columns
        lines = [tuple(map(escaped, heads)), ("---",) + ("---:",) * (len(heads) - 1)]
        texts = [
            tuple(f"**{cell}**" if mark and _best(cell) else escaped(cell) for cell in row) for _, row in self.rows
        ]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in [*lines, *texts]) + "\n"

    def csv(self) -> str:
        """A measure is two columns, its mean and its standard deviation, with all their digits; what was not measured
        is empty.
        """
        measured = [any(_mean(cells[i]) is not None for _, cells in self.rows) for i in range(len(self.columns))]
        spread = [any(_std(cells[i]) is not None for _, cells in self.rows) for i in range(len(self.columns))]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        heads: list[str] = []
        for title, two in zip(self.titles, spread, strict=True):
            name, _, spread_name = title.partition(" ± ")  # as in "difference ± standard error"
            heads += [name, spread_name or f"{name}, standard deviation"] if two else [title]
        writer.writerow(map(_harmless, heads))
        for _, cells in self.rows:
            row: list[str] = []
            for cell, one, two in zip(cells, measured, spread, strict=True):
                row.append(_digits(_mean(cell)) if one else "" if cell == "-" else _harmless(cell))
                row += [_digits(_std(cell))] if two else []
            writer.writerow(row)
        return text.getvalue()

    def latex(self) -> str:
        """A `tabular` with the rules of the package booktabs; the best values are bold."""
        rows = [tuple(map(_tex, self.titles)), *(tuple(map(_tex_cell, cells)) for _, cells in self.rows)]
        lines = [" & ".join(row) + r" \\" for row in rows]
        body = [r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule"]
        return "\n".join([rf"\begin{{tabular}}{{l{'r' * (len(self.columns) - 1)}}}", *body, r"\end{tabular}"]) + "\n"


def _mean(cell: str) -> float | None:
    return cell.mean if isinstance(cell, Cell) else None


def _std(cell: str) -> float | None:
    return cell.std if isinstance(cell, Cell) else None


def _best(cell: str) -> bool:
    return isinstance(cell, Cell) and cell.best


def _digits(value: float | None) -> str:
    return "" if value is None else f"{value:.10g}"


def _harmless(text: str) -> str:
    """The text with a quote before it if a spreadsheet would take it for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) and not _number(text) else text


def _number(text: str) -> bool:
    return re.fullmatch(r"[+-]?[\d.,]+( ± [\d.]+)?", text) is not None


def escaped(text: str) -> str:
    """The text with Markdown's special characters escaped."""
    return re.sub(r"([\\`*\[\]<>|])", r"\\\1", " ".join(text.split()))


def _tex(text: str) -> str:
    text = re.sub(r"[\\~^]|[&%$#_{}]", lambda m: LATEX_ESCAPES.get(m[0], f"\\{m[0]}"), " ".join(text.split()))
    return text.replace("±", r"$\pm$")


def _tex_cell(cell: str) -> str:
    text = "--" if cell == "-" else _tex(cell)
    text = re.sub(r"(?<![\w.])-(?=\d)", "$-$", text)
    return rf"\textbf{{{text}}}" if _best(cell) else text


# --- which value is best ---------------------------------------------------------------------------------------------

Find = Callable[[Line], Summary | None]


def paired(a: Line, b: Line, find: Find) -> tuple[list[int], float, float | None]:
    """(common seeds, mean difference, its standard error) of a measure, a minus b.

    The error is sd / sqrt(n) of the seeds' differences (n - 1 in the deviation); None for a single seed.
    """
    values = []
    for line in (a, b):
        summary = find(line)
        each = zip(line.result.seeds, summary.per_seed, strict=True) if summary else ()
        values.append({seed: value for seed, value in each if value is not None})
    common = sorted(values[0].keys() & values[1].keys())
    differences = np.array([values[0][seed] - values[1][seed] for seed in common])
    if not common:
        return common, float("nan"), None
    error = float(differences.std(ddof=1) / np.sqrt(len(common))) if len(common) > 1 else None
    return common, float(differences.mean()), error


def best(lines: Sequence[Line], find: Find, better: int) -> set[str]:
    """The labels of the best mean (the largest if `better` is 1, the smallest if it is -1) and of those within one
    standard error of their paired difference from it. Nothing is best with a single seed, which has no error, or
    without another method. Joint training does not take part: it is a ceiling.
    """
    means = {}
    for line in lines:
        summary = find(line)
        if summary is not None and summary.mean is not None and not _jointly(line):
            means[line.label] = (better * summary.mean, line)
    if not better or len(means) < 2:
        return set()
    _, first = max(means.values(), key=lambda one: one[0])
    if len(first.result.seeds) < 2:
        return set()
    level = {first.label}
    for label, (_, line) in means.items():
        _, difference, error = paired(first, line, find)
        if error is not None and abs(difference) <= error:
            level.add(label)
    return level
