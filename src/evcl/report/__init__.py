"""Results in, tables, figures and a page out."""

from __future__ import annotations

from pathlib import Path

from evcl.files import write_atomically
from evcl.report.figures import accuracy_figure, save_figure
from evcl.report.page import page
from evcl.report.results import COLUMNS, by_benchmark, caption, find_results, percent, rows


def write_report(folder: Path, title: str = "Continual learning with evcl") -> list[Path]:
    """Figures (PNG, SVG, PDF) and `index.html` for every result below `folder`; returns what was written."""
    groups = by_benchmark(find_results(folder))
    written = []
    for name, group in groups.items():
        figure = accuracy_figure(group, name)
        for kind in ("png", "svg", "pdf"):
            path = folder / f"{name}.{kind}"
            save_figure(figure, path)
            written.append(path)
    text = page(groups, title)
    path = folder / "index.html"
    write_atomically(path, lambda temporary: temporary.write_text(text, "utf-8"))
    return [*written, path]


__all__ = [
    "COLUMNS",
    "accuracy_figure",
    "by_benchmark",
    "caption",
    "find_results",
    "page",
    "percent",
    "rows",
    "save_figure",
    "write_report",
]
