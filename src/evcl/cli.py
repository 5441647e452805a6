"""The command line: parses, calls, prints."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from evcl import __version__, benchmarks, data_cli, experiments, methods, ranks, sweep_cli, tables_cli
from evcl.errors import Diverged, EvclError, unknown
from evcl.experiments import Config, Event, Result
from evcl.interrupts import Interrupted
from evcl.logs import KINDS as LOGS
from evcl.logs import Log
from evcl.options import Usage, settings, usage
from evcl.sweep_cli import Address, EngineName, Workers

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Bayesian continual learning: EVCL and its peers on streams of tasks.",
)
app.add_typer(data_cli.app, name="data")
for command in (tables_cli.learn, tables_cli.predict, tables_cli.inspect, sweep_cli.sweep, sweep_cli.status):
    app.command()(command)
console = Console(highlight=False)
DEMO_METHODS = ("evcl", "vcl", "ewc", "naive")
DEMO_BENCHMARKS = ("permuted-digits", "split-digits")


def _interrupted(*_: object) -> None:
    raise Interrupted


# What typer raises for wrong usage: click's class, or that of typer's own copy of click, whichever this version has.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def _first_seeds(count: int) -> list[int]:
    if not 1 <= count <= experiments.MOST_SEEDS:
        raise Usage(f"--seeds must be a number from 1 to {experiments.MOST_SEEDS}, not {count}")
    return list(range(count))


def _seeds(count: int | None, listed: str | None) -> list[int]:
    if listed is None:
        return _first_seeds(3 if count is None else count)
    if count is not None:
        raise Usage("--seeds and --seed-list exclude each other")
    try:
        return [int(seed) for seed in listed.split(",")]
    except ValueError:
        raise Usage(f"--seed-list takes whole numbers separated by commas, not {listed!r}") from None


Plugins = Annotated[
    list[str] | None, typer.Option(help="A Python file or module that registers methods or benchmarks.")
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Precision = Annotated[str | None, typer.Option(help="Of the products: fp32 [on a CPU], tf32 [on a GPU] or bf16.")]


@app.command()
def run(
    benchmark: Annotated[str, typer.Argument(help="Which stream of tasks; see evcl list.")],
    method: Annotated[str, typer.Option(help="Which method; see evcl list.")] = "evcl",
    seeds: Annotated[int | None, typer.Option(help="How many seeds: 0, 1, ... (3 if nothing is said).")] = None,
    seed_list: Annotated[str | None, typer.Option(help="These seeds: 0,7,9.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over each task's data.")] = None,
    preset: Annotated[str, typer.Option(help="tuned, default or paper; see evcl list.")] = "tuned",
    set_: Annotated[list[str] | None, typer.Option("--set", help="A setting: strength=0.1. May be repeated.")] = None,
    tasks: Annotated[int | None, typer.Option(help="How many tasks.")] = None,
    validation: Annotated[
        float | None, typer.Option(help="Hold out this part of each training set, and measure on it.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the result [runs/BENCHMARK/METHOD].")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what the folder holds.")] = False,
    plugin: Plugins = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the folder's checkpoint, if it has one.")
    ] = False,
    checkpoint_seconds: Annotated[
        float, typer.Option(help="From one checkpoint to the next; 0: at the ends of tasks only.")
    ] = 60.0,
    device: Device = "auto",
    precision: Precision = None,
    data_dir: Annotated[Path | None, typer.Option(help="A folder that holds data files [EVCL_DATA].")] = None,
    log: Annotated[
        str | None, typer.Option(help="Write each epoch's metrics to the folder's log: csv or tensorboard.")
    ] = None,
) -> None:
    """Train one method on one benchmark; the result is result.json in the folder."""
    if resume and overwrite:
        raise Usage("--resume and --overwrite exclude each other")
    if data_dir is not None:
        if not data_dir.is_dir():
            raise Usage(f"--data-dir: there is no folder {data_dir}")
        os.environ["EVCL_DATA"] = str(data_dir)
    experiments.load_plugins(plugin or [])
    given: dict[str, Any] = settings(set_ or [])
    for name, value in (("epochs", epochs), ("validation", validation)):
        if value is not None:
            if name in given:
                raise Usage(f"--{name} and --set {name} exclude each other")
            given[name] = value
    with usage():
        numbers = _seeds(seeds, seed_list)
        config = experiments.configure(benchmark, method, preset, numbers, tasks, given, device, precision)
        experiments.SECONDS.check("--checkpoint-seconds", checkpoint_seconds)
        ranks.check_batch(config.settings.batch_size, ranks.world())
        if log is not None and log not in LOGS:
            raise Usage(f"--log must be {' or '.join(LOGS)}, not {log!r}")
    folder = out or Path("runs") / benchmark / method
    if log is not None:
        config = replace(config, log=Log(log, folder / "log"))
    torch.set_num_threads(1)
    with ranks.joined(config.device) as group:
        result = _found_or_made(config, folder, overwrite, resume, checkpoint_seconds, group)
    if result is None:
        return
    _print_tables([result])
    console.print(f"result: {folder / experiments.RESULT}", soft_wrap=True)


DONE = "{} holds this run already; nothing to do (--overwrite runs it again)"


def _found_or_made(
    config: Config, folder: Path, overwrite: bool, resume: bool, seconds: float, group: ranks.Ranks | None
) -> Result | None:
    """A run's result: found, or made here. Of several processes that share the run (`group`), the first looks and
    writes, and alone has it.
    """
    first = group is None or group.rank == 0
    with experiments.claimed(folder) if first else contextlib.nullcontext():
        result = None
        if first:
            checkpoints = experiments.open_checkpoints(folder, config, seconds, resume, overwrite)
            replaces = overwrite or (checkpoints.resume and (folder / experiments.RESULT).exists())
            result = experiments.open_folder(folder, config, replaces)
        if result is not None if group is None else group.first(result is not None, config.device):
            if first:
                console.print(DONE.format(folder))
            return result
        if not first:  # now that the first has removed what is to be overwritten
            checkpoints, replaces = experiments.open_checkpoints(folder, config, seconds, resume), False
        elif resume and not checkpoints.resume:
            console.print(f"{folder} holds no checkpoint: the run starts from the beginning", soft_wrap=True)
        if first and config.log is not None and not checkpoints.resume:
            config.log.clear()  # of a run that is made anew
        return _kept(config, folder, checkpoints, replaces, group)


def _kept(
    config: Config, folder: Path, checkpoints: experiments.Checkpoints, replaces: bool, group: ranks.Ranks | None
) -> Result | None:
    """The result of a run, written, if it `replaces` another in its place; until then its checkpoints are kept."""
    again = f"it is kept in {checkpoints.folder}, and the same command with --resume goes on from there"
    try:
        with _progress([config]) as on_event:
            ((_, result),) = experiments.execute_all([config], on_event, checkpoints=checkpoints, ranks=group)
    except (Interrupted, experiments.Stopped):
        raise Interrupted(again if checkpoints.programs() else "there was nothing to keep yet") from None
    except Diverged:  # as it would again
        checkpoints.remove()
        raise
    except experiments.Died as error:
        raise EvclError(f"{error} {again}" if checkpoints.programs() else str(error)) from error
    if group is not None and group.rank > 0:
        return None
    try:
        experiments.write_result(folder, result, overwrite=replaces)
    except EvclError as error:
        _print_tables([result])
        raise EvclError(f"{error}; the run is done: {again}" if checkpoints.programs() else str(error)) from error
    checkpoints.remove()
    return result


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder of the results, figures and page.")] = Path("evcl-demo"),
    epochs: Annotated[int | None, typer.Option(help="Passes over each task's data; fewer is faster.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Train again, whatever the folder holds.")] = False,
) -> None:
    """Four methods learn five tasks on the embedded data, three seeds each: a table, figures and a page."""
    given = {} if epochs is None else {"epochs": epochs}
    with usage():
        configs = [
            experiments.configure(b, m, "tuned", (0, 1, 2), None, given) for b in DEMO_BENCHMARKS for m in DEMO_METHODS
        ]
    folders = [out / config.benchmark / config.method for config in configs]
    results = []
    todo = []
    with contextlib.ExitStack() as claims:
        for config, folder in zip(configs, folders, strict=True):
            claims.enter_context(experiments.claimed(folder))
            found = experiments.open_folder(folder, config, overwrite)
            if found is None:
                todo.append((config, folder))
            else:
                results.append(found)
        if results:
            console.print(f"{len(results)} of {len(configs)} results are in {out} already (--overwrite trains again)")
        if todo:
            with _progress([config for config, _ in todo]) as on_event:
                for index, result in experiments.execute_all([config for config, _ in todo], on_event):
                    experiments.write_result(todo[index][1], result, overwrite=overwrite)
                    results.append(result)
    _print_tables(results)
    _report(out, "Four methods learn five tasks, one after another")


@app.command()
def reproduce(
    benchmark: Annotated[list[str] | None, typer.Argument(help="Some benchmarks, or all of the paper's [all].")] = None,
    method: Annotated[list[str] | None, typer.Option(help="Only this method; may be repeated.")] = None,
    seeds: Annotated[int | None, typer.Option(help="How many seeds, from 0 [5].")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over each task's data.")] = None,
    preset: Annotated[str, typer.Option(help="tuned, default or paper; see evcl list.")] = "tuned",
    quick: Annotated[bool, typer.Option("--quick", help="5 epochs and 2 seeds: all of it in minutes.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of the results, figures and page.")] = Path("reproduction"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Train again what the folder holds.")] = False,
    engine: EngineName = "local",
    address: Address = None,
    workers: Workers = None,
    device: Device = "auto",
    precision: Precision = None,
    plugin: Plugins = None,
) -> None:
    """The whole paper: every method on its benchmarks, then tables, figures and a page; it can be stopped any time."""
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
            experiments.configure(name, one, preset, _first_seeds(count), None, given)
            for name in names
            for one in chosen
        ]
    make, device, precision = sweep_cli.engine(engine, address, workers, device, precision)
    configs = [replace(config, device=device, precision=precision) for config in configs]
    torch.set_num_threads(1)
    with _forecast(len(configs)) as (on_event, on_result):
        for done, (i, result) in enumerate(experiments.reproduce(configs, out, on_event, overwrite, make), 1):
            on_result(done, configs[i], result)
    _report(out, "Elastic variational continual learning: the whole paper")


@contextmanager
def _forecast(total: int) -> Iterator[Any]:
    """One bar for all runs with the time that is left; yields what hears of events and of results."""

    def on_result(count: int, config: Config, result: Result) -> None:
        mean = result.average_accuracy.mean
        accuracy = "lost" if mean is None else f"{100 * mean:.1f}%"
        console.print(f"{count} of {total}: {config.name} {accuracy}", soft_wrap=True)

    if not console.is_terminal:
        yield (lambda i, event, forecast: None), on_result
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[left]}"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as bars:
        bar = bars.add_task("everything", total=1, left="")

        def on_event(i: int, event: Event, forecast: Any) -> None:
            left = forecast.remaining()
            bars.update(bar, completed=forecast.part, left="" if left is None else f"{_duration(left)} left")

        yield on_event, on_result


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{seconds:.0f} s" if seconds < 90 else f"{minutes} min" if minutes < 90 else f"{seconds / 3600:.1f} h"


@app.command()
def tune(
    search: Annotated[
        Path, typer.Argument(help="A TOML file that says what is searched; experiments/paper/search has some.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder of what was found, a file a benchmark [beside the search].")
    ] = None,
    benchmark: Annotated[list[str] | None, typer.Option(help="Only this one of the search's benchmarks.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Search again what the folder holds.")] = False,
    engine: EngineName = "local",
    address: Address = None,
    workers: Workers = None,
    device: Device = "auto",
    precision: Precision = None,
    plugin: Plugins = None,
) -> None:
    """Choose settings on validation data: the same number of trials for every method; benchmarks done are kept."""
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
        raise Usage("--out: a search without a suffix needs a folder of another name")
    found = []
    torch.set_num_threads(1)
    for name in names:
        path = folder / experiments.result_name(name)
        if path.exists() and not overwrite:
            found.append(experiments.read_found(path, wanted))
        else:
            experiments.check_writable(folder)
            console.print(f"{name}: {wanted.trials + wanted.refine} trials a method, {len(wanted.seeds)} seeds each")
            store = experiments.Store(folder / experiments.HIDDEN)
            if overwrite:
                store.forget(key for key, cell in store.declared().items() if cell["benchmark"] == name.split(":")[0])
            with _bar() as on_part:
                found.append(experiments.tune(wanted, name, device, precision, on_part, store, make))
            if path.exists() and not overwrite:  # it came meanwhile: of this search it is as good, another's stays
                experiments.read_found(path, wanted)
            experiments.write_found(path, found[-1])
        _print_trials(found[-1])
    for method in wanted.spaces if len(found) > 1 else ():
        settings, means = experiments.recipe(found, method)
        each = ", ".join(f"{name} {100 * mean:.1f}" for name, mean in zip(names, means, strict=True))
        console.print(f"one recipe for all, {method}: {_one_line(settings)}\n  {each}", soft_wrap=True)


@contextmanager
def _bar() -> Iterator[Any]:
    """One bar for many trials; yields what hears of their events."""
    if not console.is_terminal:
        yield lambda i, event: None
        return
    parts: dict[int, float] = {}
    columns = (TextColumn("trials"), BarColumn(), TextColumn("{task.fields[state]}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as bars:
        bar = bars.add_task("", total=1, state="")

        def heard(i: int, event: Event) -> None:
            parts[i] = event.done
            ended = sum(done >= 1 for done in parts.values())
            bars.update(bar, completed=sum(parts.values()), total=len(parts), state=f"{ended} done, {len(parts)} begun")

        yield heard


def _print_trials(found: dict[str, Any], count: int = 3) -> None:
    again = ", measured again" if "confirmed" in found else ""
    table = Table(title=f"{found['benchmark']}, validation{again}", title_style="bold", title_justify="left")
    for column in ("method", "accuracy", "settings"):
        table.add_column(column, overflow="fold")
    for method, tried in found.get("confirmed", found["tried"]).items():
        for trial in tried[:count]:
            accuracy = (
                "lost" if trial["mean"] is None else f"{100 * trial['mean']:.2f} ± {100 * (trial['std'] or 0):.2f}"
            )
            table.add_row(method, accuracy, _one_line(trial["settings"]))
    console.print(table)


def _one_line(settings: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in settings.items())


@app.command()
def report(folder: Annotated[Path, typer.Argument(help="A folder that holds results, at any depth.")]) -> None:
    """Tables, figures and a page from every result below a folder."""
    from evcl.report import find_results

    _print_tables(find_results(folder))
    _report(folder, "Continual learning with evcl")


@app.command("list")
def list_(
    plugin: Plugins = None,
) -> None:
    """Methods, benchmarks and presets, a line each."""
    experiments.load_plugins(plugin or [])
    for kind, entries in (
        ("methods", {m.name: m.summary for m in methods.METHODS.values()}),
        ("benchmarks", {b.name: b.summary for b in benchmarks.BENCHMARKS.values()}),
        ("presets", experiments.SUMMARIES),
    ):
        console.print(kind)
        for name, summary in entries.items():
            console.print(f"  {name:<20} {summary}", soft_wrap=True)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback when something fails.")] = False,
) -> None:
    context.obj = {"debug": debug}
    if version:
        console.print(f"evcl {__version__}")
        raise typer.Exit
    console.quiet = ranks.own() > 0
    if ranks.world() > 1 and context.invoked_subcommand != "run":
        raise Usage(f"torchrun is for evcl run: start evcl {context.invoked_subcommand or ''} by itself")
    if context.invoked_subcommand is None:
        console.print(context.get_help())
        raise typer.Exit(2)


@contextmanager
def _progress(configs: list[Config]) -> Iterator[Any]:
    """A bar a run on a terminal, a line a task elsewhere; yields `on_event(index, event)`."""
    if not console.is_terminal:
        yield lambda index, event: _line(configs[index], event)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as bars:
        ids = [bars.add_task(config.name, total=1, state="waiting", start=False) for config in configs]

        def on_event(index: int, event: Event) -> None:
            _note(event)
            if not bars.tasks[index].started:
                bars.start_task(ids[index])
            state = f"task {event.task + 1}/{event.tasks}"
            if event.accuracy is not None:
                state += f"  {100 * event.accuracy:.1f}%"
            bars.update(ids[index], completed=event.done, state=state)

        yield on_event


def _note(event: Event) -> None:
    if event.note is not None:
        sys.stderr.write(f"evcl: {event.note}\n")


def _line(config: Config, event: Event) -> None:
    _note(event)
    if event.accuracy is not None:
        seen = "on it" if event.task == 0 else f"on average over tasks 1 to {event.task + 1}"
        learned = f"task {event.task + 1} of {event.tasks} learned"
        whose = "" if event.seeds == config.seeds else f" seed {', '.join(map(str, event.seeds))}"
        console.print(f"{config.name}{whose}: {learned}, {100 * event.accuracy:.1f}% {seen}", soft_wrap=True)


def _print_tables(results: list[Result]) -> None:
    from evcl.report import COLUMNS, by_benchmark, caption, rows

    for name, group in by_benchmark(results).items():
        table = Table(
            title=name, title_style="bold", title_justify="left", caption=caption(group), caption_justify="left"
        )
        for column in COLUMNS:
            first = column == COLUMNS[0]
            table.add_column(column, justify="left" if first else "right", no_wrap=first, overflow="fold")
        for row in rows(group):
            table.add_row(*row)
        console.print(table)


def _report(folder: Path, title: str) -> None:
    from evcl.report import write_report

    written = write_report(folder, title)
    drawn = sum(path.suffix == ".svg" for path in written)
    console.print(f"figures: {folder / 'figures'} ({drawn}, each as SVG, PNG and PDF)", soft_wrap=True)
    for name, path in zip(("tables:", "page:"), written[-2:], strict=True):
        console.print(f"{name:<8} {path}", soft_wrap=True)


def main() -> None:
    """Run the command line: exit status 0, 1 (it failed) or 2 (wrong usage), with one line saying why."""
    debug = "--debug" in sys.argv[1:]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without "±" prints a "?"
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupted)
    try:
        status = app(standalone_mode=False)
        sys.exit(status if isinstance(status, int) else 0)
    except UsageError as error:
        _fail(f"{error} (see evcl --help)".replace("\n", " "), 2, debug)
    except EvclError as error:
        _fail(str(error), 2 if isinstance(error, Usage) else 1, debug)
    except (Interrupted, typer.Abort) as error:
        _fail(f"interrupted; {str(error) or 'finished runs are kept'}", 1, debug, wait=0)
    except Exception as error:
        where = "" if debug else "; evcl --debug shows where"
        _fail(f"{type(error).__name__}: {error}{where}".replace("\n", " "), 1, debug)


PATIENCE = 30.0  # seconds


def _fail(message: str, status: int, debug: bool, wait: float = PATIENCE) -> None:
    """One line. What is wrong in all processes of a run is said by the first: torchrun ends the others when it ends, so
    that one which is still there after a while is the only one that failed.
    """
    rank = 0
    with contextlib.suppress(EvclError):
        rank = ranks.own()
    with contextlib.suppress(Interrupted):
        if rank > 0:
            time.sleep(wait)
            message = f"process {rank}: {message}"
        if rank == 0 or wait:
            if debug:
                traceback.print_exc()
            sys.stderr.write(f"evcl: {message}\n")
    sys.exit(status)


if __name__ == "__main__":
    main()
