"""`evcl demo`, `reproduce`, `tune` and `report`: commands that make many runs or report on them."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from evcl import experiments
from evcl._core.errors import unknown
from evcl.cli import sweep as sweep_cli
from evcl.cli.options import (
    Address,
    Device,
    EngineName,
    Epochs,
    Plugins,
    Precision,
    Preset,
    Usage,
    Workers,
    first_seeds,
    one_thread,
    usage,
)
from evcl.cli.progress import (
    console,
    forecast_bar,
    print_tables,
    print_trials,
    progress,
    trials_bar,
    write_report_of,
)

DEMO_METHODS = ("evcl", "vcl", "ewc", "naive")
DEMO_BENCHMARKS = ("permuted-digits", "split-digits")


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the results, figures and page.")] = Path("evcl-demo"),
    epochs: Annotated[int | None, typer.Option(help="Passes over each task's data; fewer is faster.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Train again, ignoring earlier results.")] = False,
) -> None:
    """Train four methods on the built-in data.

    Two streams of five tasks, three seeds each: a table, figures and a page.
    """
    from evcl.report import check_installed

    check_installed()
    given = {} if epochs is None else {"epochs": epochs}
    with usage():
        configs = [
            experiments.configure(b, m, "tuned", (0, 1, 2), None, given) for b in DEMO_BENCHMARKS for m in DEMO_METHODS
        ]
    folders = [out / config.benchmark / config.method for config in configs]
    with contextlib.ExitStack() as claims:
        for folder in folders:
            claims.enter_context(experiments.claimed(folder))
        there = 0 if overwrite else sum((folder / experiments.RESULT).exists() for folder in folders)
        if there:
            console().print(f"{there} of {len(configs)} results are already in {out} (--overwrite trains again)")
        with progress(configs) as on_event:
            made = experiments.reproduce(configs, out, lambda i, event, _: on_event(i, event), overwrite)
            results = [result for _, result in made]
    print_tables(results)
    write_report_of(out, "Four methods learn five tasks, one after another")


def reproduce(
    benchmark: Annotated[list[str] | None, typer.Argument(help="Benchmarks, or all: those of the paper [all].")] = None,
    method: Annotated[
        list[str] | None, typer.Option(metavar="METHOD", help="Run only this method. May be repeated.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Number of seeds, counted from 0 [5].")] = None,
    epochs: Epochs = None,
    preset: Preset = "tuned",
    quick: Annotated[bool, typer.Option("--quick", help="Only 5 epochs and 2 seeds, which takes minutes.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the results, figures and page.")] = Path("reproduction"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Train again, replacing earlier results.")] = False,
    engine: EngineName = "local",
    address: Address = None,
    workers: Workers = None,
    device: Device = "auto",
    precision: Precision = None,
    plugin: Plugins = None,
) -> None:
    """Reproduce the paper.

    Runs every method on its benchmarks, then writes tables, figures and a page. Can be stopped at any time.
    """
    from evcl.report import check_installed

    check_installed()
    experiments.load_plugins(plugin or [])
    asked = [
        one for name in benchmark or ["all"] for one in (experiments.PAPER_BENCHMARKS if name == "all" else [name])
    ]
    names, chosen = list(dict.fromkeys(asked)), list(dict.fromkeys(method or experiments.PAPER_METHODS))
    count = (2 if quick else 5) if seeds is None else seeds
    if quick and epochs is None:
        epochs = 5
    given = {} if epochs is None else {"epochs": epochs}
    with usage():
        configs = [
            experiments.configure(name, one, preset, first_seeds(count), None, given)
            for name in names
            for one in chosen
        ]
    make, device, precision = sweep_cli.engine(engine, address, workers, device, precision)
    configs = [replace(config, device=device, precision=precision) for config in configs]
    one_thread()
    with forecast_bar(len(configs)) as (on_event, on_result):
        for done, (i, result) in enumerate(experiments.reproduce(configs, out, on_event, overwrite, make), 1):
            on_result(done, configs[i], result)
    write_report_of(out, "Elastic variational continual learning: the whole paper")


def tune(
    search: Annotated[Path, typer.Argument(help="A TOML file that defines the search: see above.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results, one file per benchmark [beside the search].")
    ] = None,
    benchmark: Annotated[
        list[str] | None, typer.Option(metavar="BENCHMARK", help="Tune only on this benchmark. May be repeated.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Search again, replacing earlier results.")] = False,
    engine: EngineName = "local",
    address: Address = None,
    workers: Workers = None,
    device: Device = "auto",
    precision: Precision = None,
    plugin: Plugins = None,
) -> None:
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
    experiments.load_plugins(plugin or [])
    with usage():
        wanted = experiments.read_search(search)
        names = benchmark or list(wanted.benchmarks)
        for name in names:
            if name not in wanted.benchmarks:
                raise unknown("benchmark of the search", name, wanted.benchmarks)
    make, device, precision = sweep_cli.engine(engine, address, workers, device, precision)
    folder = out or search.parent / search.stem
    if folder == search:
        raise Usage("--out is needed: the default folder is the search file without its suffix, and this file has none")
    one_thread()
    for name in names:
        path = folder / experiments.result_name(name)
        if path.exists() and not overwrite:
            found = experiments.read_found(path, wanted)
        else:
            experiments.check_writable(folder)
            seeds = "one seed" if len(wanted.seeds) == 1 else f"{len(wanted.seeds)} seeds"
            console().print(f"{name}: {wanted.trials + wanted.refine} trials per method, {seeds} each")
            store = experiments.Store(folder / experiments.HIDDEN)
            if overwrite:
                store.forget(key for key, cell in store.declared().items() if cell["benchmark"] == name.split(":")[0])
            with trials_bar() as on_part:
                found = experiments.tune(wanted, name, device, precision, on_part, store, make)
            if path.exists() and not overwrite:  # another process wrote it meanwhile: raise if it is another search's
                experiments.read_found(path, wanted)
            experiments.write_found(path, found)
        print_trials(found)


def report(folder: Annotated[Path, typer.Argument(help="A folder with results in it, at any depth.")]) -> None:
    """Write tables, figures and a page of a folder's results."""
    from evcl.report import find_results

    print_tables(find_results(folder))
    write_report_of(folder, "Continual learning with evcl")
