"""Reports: tables, figures and an HTML page from results."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from evcl._core.errors import EvclError, extra
from evcl._core.files import locked, remove_leftovers, write_atomically
from evcl.experiments.samples import decoded
from evcl.report.figures import FIGURES, KINDS, save_figure
from evcl.report.page import page
from evcl.report.results import Group, Line, by_benchmark, file_name, find_results
from evcl.report.streams import STREAM_FIGURES, streams_markdown
from evcl.report.tables import (
    Table,
    caption,
    full_table,
    main_table,
    paired_difference,
    paired_table,
    percent,
    rows,
    short_columns,
    tables_markdown,
)

LOCK = ".evcl-report.lock"  # in the folder while a report is written


def check_installed() -> None:
    """Make sure, before hours of training, that figures and the page can be drawn."""
    with extra("report", "figures and the page need matplotlib and plotly"):
        import matplotlib  # noqa: F401
        import plotly  # noqa: F401


def write_report(folder: Path, title: str = "Continual learning with evcl") -> list[Path]:
    """Write `figures/` (SVG, PNG, PDF), `tables.md` and `index.html` for all results below `folder`; return paths."""
    check_installed()
    groups = by_benchmark(find_results(folder))
    try:
        (folder / "figures").mkdir(exist_ok=True)
        with locked(folder / LOCK, f"{folder}: another evcl is writing a report there"):
            return _written(folder, groups, title)
    except OSError as error:
        raise EvclError(f"cannot write to {folder}: {error.strerror or error}") from error


def _written(folder: Path, groups: dict[str, Group], title: str) -> list[Path]:
    """Write the report, while no other process does; what a killed one left is removed."""
    written: list[Path] = []
    for group in groups.values():
        for suffix, draw in (STREAM_FIGURES if group.is_stream else FIGURES).items():
            figure = draw(group)
            for kind in KINDS:
                written.append(folder / "figures" / f"{group.slug}{suffix}.{kind}")
                remove_leftovers(written[-1])
                save_figure(figure, written[-1])
        for line in group.lines:
            if line.result.samples is not None:
                written.append(folder / "figures" / f"{group.slug}-samples-{file_name(line.label)}.png")
                write_atomically(written[-1], partial(_write_bytes, content=decoded(line.result.samples)))
    for name, text in (("tables.md", _markdown(list(groups.values()), title)), ("index.html", page(groups, title))):
        written.append(folder / name)
        remove_leftovers(written[-1])
        write_atomically(written[-1], partial(_write, text=text))
    return written


def _markdown(groups: list[Group], title: str) -> str:
    """The tables of tasks, and below them those of streams."""
    tasks, streams = ([group for group in groups if group.is_stream == is_stream] for is_stream in (False, True))
    parts = [tables_markdown(tasks, title)] if tasks else []
    return "\n".join([*parts, *([streams_markdown(streams, title)] if streams else [])])


def _write_bytes(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _write(path: Path, text: str) -> None:
    path.write_text(text, "utf-8", newline="\n")


__all__ = [
    "Group",
    "Line",
    "Table",
    "by_benchmark",
    "caption",
    "check_installed",
    "find_results",
    "full_table",
    "main_table",
    "page",
    "paired_difference",
    "paired_table",
    "percent",
    "rows",
    "short_columns",
    "tables_markdown",
    "write_report",
]
