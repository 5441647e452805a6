"""`evcl sweep`, `tune` and `reproduce`: many runs, here or on a cluster. `evcl status` shows their state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from evcl import experiments
from evcl._core.errors import EvclError, unknown
from evcl.cli.options import Epochs, ManyRuns, Preset, Usage, first_seeds, one_thread, usage
from evcl.cli.progress import cells_bar, console, forecast_bar, print_line, print_trials, trials_bar, write_report_of

MAX_TABLE_ROWS = 20  # at most this many rows per table, and this many failures


@dataclass(frozen=True, kw_only=True)
class SweepOptions(ManyRuns):
    file: Annotated[Path, typer.Argument(help="A TOML file that defines the sweep: see above.")]
    out: Annotated[Path | None, "Folder for the results [named like the file, beside it]."] = None
    retry_failed: Annotated[bool, "Run cells again that failed before."] = False


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
    folder = _folder(options.out, file, "sweep")
    with usage():
        cells = experiments.read_sweep(file)  # finds mistakes before waiting for a cluster
    engine, device, precision = options.make_engine()
    cells = [replace(cell, device=device, precision=precision) for cell in cells]
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


def _folder(out: Path | None, file: Path, kind: str) -> Path:
    folder = out or file.with_suffix("")
    if folder == file:
        raise Usage(
            f"--out is needed: the default folder is the {kind} file without its suffix, and this file has none"
        )
    return folder


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
    for (name, message), count in failures.most_common(MAX_TABLE_ROWS):
        print_line(f"  failed: {count} of {name}: {message}")
    if len(failures) > MAX_TABLE_ROWS:
        print_line(f"  and {len(failures) - MAX_TABLE_ROWS} other failures")
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
    means = []
    for row, members in rows.items():
        values = [each.score for each in members if each.score is not None]
        if values:
            spread = f" ± {score.scale * stdev(values):.2f}" if len(values) > 1 else ""
            means.append((mean(values), spread, f"{len(values)}/{len(members)}", row))
    if not means:
        return
    table = Table(title=title, title_style="bold", title_justify="left")
    for column in ("method", score.of_task, "seeds", "settings", "device"):
        table.add_column(column, overflow="fold")
    for value, spread, seeds, row in sorted(means, key=lambda each: -each[0])[:MAX_TABLE_ROWS]:
        table.add_row(row[0], f"{score.scale * value:.2f}{spread}", seeds, " ".join(row[1:-2]), " ".join(row[-2:]))
    console().print(table)
    if len(means) > MAX_TABLE_ROWS:
        console().print(f"and {len(means) - MAX_TABLE_ROWS} more")


@dataclass(frozen=True, kw_only=True)
class ReproduceOptions(ManyRuns):
    benchmark: Annotated[list[str] | None, typer.Argument(help="Benchmarks, or all: those of the paper [all].")] = None
    method: Annotated[
        list[str] | None, typer.Option(metavar="METHOD", help="Run only this method. May be repeated.")
    ] = None
    seeds: Annotated[int | None, "Number of seeds, counted from 0 [5]."] = None
    epochs: Epochs = None
    preset: Preset = "tuned"
    quick: Annotated[bool, "Only 5 epochs and 2 seeds, which takes minutes."] = False
    out: Annotated[Path, "Folder for the results, figures and page."] = Path("reproduction")
    overwrite: Annotated[bool, "Train again, replacing earlier results."] = False


def reproduce(options: ReproduceOptions) -> None:
    """Reproduce the paper.

    Runs every method on its benchmarks, then writes tables, figures and a page. Can be stopped at any time.
    """
    from evcl.report import check_installed

    check_installed()
    experiments.load_plugins(options.plugin or [])
    named = options.benchmark or ["all"]
    names = dict.fromkeys(one for name in named for one in (experiments.PAPER_BENCHMARKS if name == "all" else [name]))
    wanted = dict.fromkeys(options.method or experiments.PAPER_METHODS)
    epochs = 5 if options.quick and options.epochs is None else options.epochs
    given = {} if epochs is None else {"epochs": epochs}
    with usage():
        seeds = first_seeds((2 if options.quick else 5) if options.seeds is None else options.seeds)
        configs = [
            experiments.configure(name, method, options.preset, seeds, None, given)
            for name in names
            for method in wanted
        ]
    engine, device, precision = options.make_engine()
    configs = [replace(config, device=device, precision=precision) for config in configs]
    one_thread()
    with forecast_bar(len(configs)) as (on_event, on_result):
        made = experiments.reproduce(configs, options.out, on_event, options.overwrite, engine)
        for done, (i, result) in enumerate(made, 1):
            on_result(done, configs[i], result)
    write_report_of(options.out, "Elastic variational continual learning: the whole paper")


@dataclass(frozen=True, kw_only=True)
class TuneOptions(ManyRuns):
    search: Annotated[Path, typer.Argument(help="A TOML file that defines the search: see above.")]
    out: Annotated[Path | None, "Folder for the results, one file per benchmark [beside the search]."] = None
    benchmark: Annotated[
        list[str] | None, typer.Option(metavar="BENCHMARK", help="Tune only on this benchmark. May be repeated.")
    ] = None
    overwrite: Annotated[bool, "Search again, replacing earlier results."] = False


def tune(options: TuneOptions) -> None:
    """Search for settings on validation data.

    Every method has the same number of trials. Finished benchmarks are not searched again. A search file:

    \b
      benchmarks = ["permuted-digits:3"]       # NAME, or NAME:TASKS
      validation = 0.2                         # held out, to compare the trials
      seeds = [100, 101]                       # of every trial
      trials = 8                               # per method
      preset = "default"                       # for all other settings
      [methods.evcl]
      strength = {low = 0.1, high = 10}        # drawn, log-uniformly
      fisher = {choices = ["exact", "sampled"]}
      epochs = 20                              # the same in every trial
    """
    experiments.load_plugins(options.plugin or [])
    with usage():
        search = experiments.read_search(options.search)
        names = options.benchmark or list(search.benchmarks)
        for name in names:
            if name not in search.benchmarks:
                raise unknown("benchmark of the search", name, search.benchmarks)
    engine, device, precision = options.make_engine()
    folder = _folder(options.out, options.search, "search")
    one_thread()
    for name in names:
        path = folder / experiments.result_name(name)
        if path.exists() and not options.overwrite:
            result = experiments.read_found(path, search)
        else:
            experiments.check_writable(folder)
            seeds = "one seed" if len(search.seeds) == 1 else f"{len(search.seeds)} seeds"
            console().print(f"{name}: {search.trials + search.refine} trials per method, {seeds} each")
            store = experiments.Store(folder / experiments.HIDDEN)
            if options.overwrite:
                store.forget(key for key, cell in store.declared().items() if cell["benchmark"] == name.split(":")[0])
            with trials_bar() as on_event:
                result = experiments.tune(search, name, device, precision, on_event, store, engine)
            if path.exists() and not options.overwrite:  # another process wrote it: raise if it is another search's
                experiments.read_found(path, search)
            experiments.write_found(path, result)
        print_trials(result)
