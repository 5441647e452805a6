"""Write a report: figures, tables and a page in a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from evcl._core.errors import EvclError, extra
from evcl._core.files import locked, remove_leftovers, write_atomically
from evcl.experiments.samples import decoded
from evcl.report.cells import Table
from evcl.report.diagnostics import DIAGNOSTICS
from evcl.report.figures import FIGURE_FORMATS, FIGURES, save_figure
from evcl.report.html_page import page
from evcl.report.results import Group, by_benchmark, file_name, find_results, scenarios
from evcl.report.streams import STREAM_FIGURES, overview, stream_table, streams_markdown
from evcl.report.tables import full_table, main_table, matrix_table, paired_table, scenario_table, tables_markdown

LOCK = ".evcl-report.lock"  # in the folder while a report is written


def check_installed() -> None:
    """Make sure, before hours of training, that figures and the page can be drawn."""
    with extra("report", "figures and the page need matplotlib and Jinja2"):
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401


def write_report(folder: Path, title: str = "Continual learning with evcl", made: str = "") -> list[Path]:
    """Write `figures/` (SVG, PNG, PDF), `tables/` (CSV, LaTeX), `tables.md` and `index.html` for all results below
    `folder`; return their paths. `made`: the date that the page shows.
    """
    check_installed()
    groups = by_benchmark(find_results(folder))
    try:
        for name in ("figures", "tables"):
            (folder / name).mkdir(exist_ok=True)
        with locked(folder / LOCK, f"{folder}: another evcl is writing a report there"):
            return _written(folder, groups, title, made)
    except OSError as error:
        raise EvclError(f"cannot write to {folder}: {error.strerror or error}") from error


def _written(folder: Path, groups: dict[str, Group], title: str, made: str) -> list[Path]:
    """Write the report, while no other process does; what a killed one left is removed."""
    written: list[Path] = []
    for group in groups.values():
        for suffix, draw in {**(STREAM_FIGURES if group.is_stream else FIGURES), **DIAGNOSTICS}.items():
            figure = draw(group, False)
            for kind in FIGURE_FORMATS if figure is not None else ():
                assert figure is not None
                written.append(folder / "figures" / f"{group.slug}{suffix}.{kind}")
                remove_leftovers(written[-1])
                save_figure(figure, written[-1])
        for line in group.lines:
            if line.result.samples is not None:
                place = folder / "figures" / f"{group.slug}-samples-{file_name(line.label)}.png"
                written.append(_put(place, decoded(line.result.samples)))
    texts: dict[str, str] = {}
    for name, table in tables_of(list(groups.values())).items():
        texts |= {f"tables/{name}.csv": table.csv(), f"tables/{name}.tex": table.latex()}
    tasks, streams = ([group for group in groups.values() if group.is_stream is rows] for rows in (False, True))
    parts = [write(some, title) for write, some in ((tables_markdown, tasks), (streams_markdown, streams)) if some]
    texts |= {"tables.md": "\n".join(parts), "index.html": page(groups, title, made)}
    return [*written, *(_put(folder / name, text.encode()) for name, text in texts.items())]


def _put(path: Path, content: bytes) -> Path:
    remove_leftovers(path)
    write_atomically(path, lambda temporary: temporary.write_bytes(content))
    return path


def tables_of(groups: Sequence[Group]) -> dict[str, Table]:
    """Every table of a report, by its name as used in file names."""
    tasks, streams = ([group for group in groups if group.is_stream == is_stream] for is_stream in (False, True))
    tables = {"all-benchmarks": main_table(tasks)} if tasks else {}
    tables |= {f"all-streams-{name}": overview(streams, name) for name in ("accuracy", "nll") if streams}
    tables |= {f"scenarios-{file_name(name)}": scenario_table(some) for name, some in scenarios(groups).items()}
    for group in groups:
        tables[group.slug] = stream_table(group) if group.is_stream else full_table(group, every=True)
        if not group.is_stream:
            tables[f"{group.slug}-matrices"] = matrix_table(group)
            paired = paired_table(group)
            tables |= {} if paired is None else {f"{group.slug}-differences": paired}
    return tables
