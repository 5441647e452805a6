"""`evcl sweep` and `evcl status`: run many cells, here or on a cluster, and show their state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from evcl import experiments
from evcl._core.errors import EvclError
from evcl.cli.options import ManyRuns, Usage, one_thread, takes_options, usage
from evcl.cli.progress import cells_bar, console, print_line

SHOWN = 20  # at most this many rows per table, and this many failures


@dataclass(frozen=True, kw_only=True)
class SweepOptions(ManyRuns):
    file: Annotated[Path, typer.Argument(help="A TOML file that defines the sweep: see above.")]
    out: Annotated[Path | None, typer.Option(help="Folder for the results [named like the file, beside it].")] = None
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Run cells again that failed before.")] = False


@takes_options
def sweep(options: SweepOptions) -> None:
    """Run every method, setting and seed of a sweep file, once.

    Any number of processes may work on one folder. A sweep file:

    \b
      benchmarks = ["permuted-digits:3"]       # NAME, or NAME:TASKS
      seeds = 5                                # 0 to 4; or a list
      draws = 20                               # how often to draw from ranges
      [settings]                               # for every method
      epochs = 10
      [methods.ewc]
      strength = [0.1, 1, 10]                  # a grid: every value
      [methods.evcl]
      lr = {low = 1e-4, high = 1e-2}           # a range: drawn, log-uniformly
    """
    file = options.file
    experiments.load_plugins(options.plugin or [])
    folder = options.out or file.parent / file.stem
    if folder == file:
        raise Usage("--out is needed: the default folder is the sweep file without its suffix, and this file has none")
    with usage():
        experiments.read_sweep(file)  # find mistakes before waiting for a cluster
    engine, device, precision = options.make_engine()
    with usage():
        cells = experiments.read_sweep(file, device, precision)
    one_thread()
    store = experiments.Store(folder)
    store.declare(cells)
    print_line(f"{len(cells)} cells: {folder}")
    failed = 0
    with cells_bar(cells) as (on_event, on_end):
        for i, outcome in experiments.work(cells, store, engine, on_event, options.retry_failed):
            failed += isinstance(outcome, experiments.Failure)
            on_end(i, cells[i], outcome)
    _print(experiments.standing(folder))
    if failed:
        raise EvclError(f"{failed} of {len(cells)} cells failed: see evcl status {folder}; --retry-failed retries them")


def status(folder: Annotated[Path, typer.Argument(help="A folder that evcl sweep, reproduce or tune made.")]) -> None:
    """Show which runs of a folder are done, running or failed.

    Where they run, why they failed, which are stale, and which are still to do.
    """
    _print(experiments.standing(folder))


def _print(cells: Sequence[experiments.Standing]) -> None:
    kinds = Counter(each.state.kind for each in cells)
    words = {"done": "done", "running": "running", "stale": "stale (their owner is gone)", "failed": "failed"}
    parts = [f"{kinds[kind]} {word}" for kind, word in words.items() if kinds[kind]]
    print_line(", ".join([f"{len(cells)} cells", *parts, f"{kinds['todo']} to do"]))
    for kind in ("running", "stale"):
        for owner, count in Counter(each.state.owner for each in cells if each.state.kind == kind).most_common():
            print_line(f"  {kind}: {count} by {owner}")
    failures = Counter((_name(each.cell), each.message) for each in cells if each.state.kind == "failed")
    for (name, message), count in failures.most_common(SHOWN):
        print_line(f"  failed: {count} of {name}: {message}")
    if len(failures) > SHOWN:
        console().print(f"  and {len(failures) - SHOWN} other failures")
    groups: dict[str, list[experiments.Standing]] = {}
    for each in cells:
        groups.setdefault(f"{each.cell['benchmark']}, {each.cell['tasks']} tasks", []).append(each)
    for title, group in groups.items():
        _print_means(title, group)


def _name(cell: Mapping[str, object]) -> str:
    return f"{cell['benchmark']} {cell['method']}"


def _print_means(title: str, cells: Sequence[experiments.Standing]) -> None:
    """Print the average score over seeds for each choice of settings, best first."""
    from statistics import mean, stdev

    from rich.table import Table

    score = experiments.SCORES[next((each.judged_by for each in cells if each.score is not None), "average_accuracy")]
    names = experiments.varied([each.cell for each in cells])
    rows: dict[tuple[str, ...], list[experiments.Standing]] = {}
    for each in cells:
        of = each.cell["settings"]
        chosen = [each.cell["method"], *(f"{name}={of[name]}" for name in names if name in of)]
        on = (each.cell["device"], each.cell["precision"])
        rows.setdefault((*chosen, *on), []).append(each)
    found = []
    for row, members in rows.items():
        values = [each.score for each in members if each.score is not None]
        if values:
            spread = f" ± {score.scale * stdev(values):.2f}" if len(values) > 1 else ""
            found.append((mean(values), spread, f"{len(values)}/{len(members)}", row))
    if not found:
        return
    table = Table(title=title, title_style="bold", title_justify="left")
    for column in ("method", score.of_task, "seeds", "settings", "device"):
        table.add_column(column, overflow="fold")
    for value, spread, seeds, row in sorted(found, key=lambda each: -each[0])[:SHOWN]:
        table.add_row(row[0], f"{score.scale * value:.2f}{spread}", seeds, " ".join(row[1:-2]), " ".join(row[-2:]))
    console().print(table)
    if len(found) > SHOWN:
        console().print(f"and {len(found) - SHOWN} more")
