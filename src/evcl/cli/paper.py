"""`evcl demo`, `reproduce`, `tune` and `report`: commands that make many runs or report on them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from evcl import experiments
from evcl._core.errors import unknown
from evcl.cli.options import Epochs, ManyRuns, Preset, Usage, first_seeds, one_thread, takes_options, usage
from evcl.cli.progress import console, forecast_bar, print_tables, print_trials, progress, trials_bar, write_report_of

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


@dataclass(frozen=True, kw_only=True)
class ReproduceOptions(ManyRuns):
    benchmark: Annotated[list[str] | None, typer.Argument(help="Benchmarks, or all: those of the paper [all].")] = None
    method: Annotated[
        list[str] | None, typer.Option(metavar="METHOD", help="Run only this method. May be repeated.")
    ] = None
    seeds: Annotated[int | None, typer.Option(help="Number of seeds, counted from 0 [5].")] = None
    epochs: Epochs = None
    preset: Preset = "tuned"
    quick: Annotated[bool, typer.Option("--quick", help="Only 5 epochs and 2 seeds, which takes minutes.")] = False
    out: Annotated[Path, typer.Option(help="Folder for the results, figures and page.")] = Path("reproduction")
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Train again, replacing earlier results.")] = False


@takes_options
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
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results, one file per benchmark [beside the search].")
    ] = None
    benchmark: Annotated[
        list[str] | None, typer.Option(metavar="BENCHMARK", help="Tune only on this benchmark. May be repeated.")
    ] = None
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Search again, replacing earlier results.")] = False


@takes_options
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
    folder = options.out or options.search.parent / options.search.stem
    if folder == options.search:
        raise Usage("--out is needed: the default folder is the search file without its suffix, and this file has none")
    one_thread()
    for name in names:
        path = folder / experiments.result_name(name)
        if path.exists() and not options.overwrite:
            found = experiments.read_found(path, search)
        else:
            experiments.check_writable(folder)
            seeds = "one seed" if len(search.seeds) == 1 else f"{len(search.seeds)} seeds"
            console().print(f"{name}: {search.trials + search.refine} trials per method, {seeds} each")
            store = experiments.Store(folder / experiments.HIDDEN)
            if options.overwrite:
                store.forget(key for key, cell in store.declared().items() if cell["benchmark"] == name.split(":")[0])
            with trials_bar() as on_event:
                found = experiments.tune(search, name, device, precision, on_event, store, engine)
            if path.exists() and not options.overwrite:  # another process wrote it: raise if it is another search's
                experiments.read_found(path, search)
            experiments.write_found(path, found)
        print_trials(found)


def report(folder: Annotated[Path, typer.Argument(help="A folder with results in it, at any depth.")]) -> None:
    """Write tables, figures and a page of a folder's results."""
    from evcl.report import find_results

    print_tables(find_results(folder))
    write_report_of(folder, "Continual learning with evcl")
