"""What the commands print: progress bars on a terminal, plain lines elsewhere, and tables of results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from evcl import experiments
from evcl._core.shown import shown
from evcl.callbacks import Callback, Epoch

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TextColumn
    from rich.table import Table

    from evcl.experiments import Config, Event, Failure, Result
    from evcl.experiments.paper import Forecast

    OnEvent = Callable[[int, Event], None]
    OnForecast = Callable[[int, Event, Forecast], None]
    OnResult = Callable[[int, Config, Result], None]


@cache
def console() -> Console:
    """The console that all commands print to. rich is imported where it is used, so that evcl --help starts fast."""
    return screen()


def screen(width: int | None = None) -> Console:
    """A console that shows text as it is: names come from files, so markup is off, and control characters are shown."""
    from rich.console import Console
    from rich.text import Text

    class Screen(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(shown(text), **{**options, "markup": False, "emoji": False})

    return Screen(highlight=False, markup=False, emoji=False, width=width)


def echo(text: str, err: bool = False) -> None:
    """Print a line, whatever the width of the screen."""
    typer.echo(shown(text), err=err)


def _column(text: str) -> TextColumn:
    """A column of a progress bar, whose text is shown as it is."""
    from rich.progress import TextColumn

    return TextColumn(text, markup=False)


@contextmanager
def progress(configs: list[Config]) -> Iterator[OnEvent]:
    """Show one bar per run on a terminal, one line per task elsewhere; yields `on_event(index, event)`."""
    from rich.progress import BarColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

    if not console().is_terminal:
        yield lambda index, event: _line(configs[index], event)
        return
    columns = (_column("{task.description}"), BarColumn(), _column("{task.fields[state]}"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console()) as bars:
        ids = [
            bars.add_task(shown(config.name, line=True), total=1, state="waiting", start=False) for config in configs
        ]

        def on_event(index: int, event: Event) -> None:
            _note(event)
            if not bars.tasks[index].started:
                bars.start_task(ids[index])
            state = f"task {event.task + 1}/{event.tasks}"
            if event.accuracy is not None:
                state += f"  {experiments.score_of(configs[index].benchmark).text(event.accuracy)}"
            bars.update(ids[index], completed=event.done, state=state)

        yield on_event


def _note(event: Event) -> None:
    if event.note is not None:
        sys.stderr.write(f"evcl: {shown(event.note, line=True)}\n")


def _line(config: Config, event: Event) -> None:
    _note(event)
    if event.accuracy is not None:
        seen = "on it" if event.task == 0 else f"on average over tasks 1 to {event.task + 1}"
        learned = f"task {event.task + 1} of {event.tasks} learned"
        whose = "" if event.seeds == config.seeds else f" seed {', '.join(map(str, event.seeds))}"
        value = experiments.score_of(config.benchmark).text(event.accuracy)
        console().print(f"{config.name}{whose}: {learned}, {value} {seen}", soft_wrap=True)


@contextmanager
def forecast_bar(total: int) -> Iterator[tuple[OnForecast, OnResult]]:
    """Show one bar for all runs, with the remaining time; yields the callbacks `on_event` and `on_result`."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeElapsedColumn

    def on_result(count: int, config: Config, result: Result) -> None:
        mean = result.measure(result.score).mean
        value = "diverged" if mean is None else experiments.score_of(config.benchmark).text(mean)
        console().print(f"{count} of {total}: {config.name} {value}", soft_wrap=True)

    if not console().is_terminal:
        yield (lambda i, event, forecast: None), on_result
        return
    columns = (_column("{task.description}"), BarColumn(), TaskProgressColumn(), _column("{task.fields[left]}"))
    with Progress(*columns, TimeElapsedColumn(), console=console()) as bars:
        bar = bars.add_task("everything", total=1, left="")

        def on_event(i: int, event: Event, forecast: Forecast) -> None:
            left = forecast.remaining()
            bars.update(bar, completed=forecast.part, left="" if left is None else f"{_duration(left)} left")

        yield on_event, on_result


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{seconds:.0f} s" if seconds < 90 else f"{minutes} min" if minutes < 90 else f"{seconds / 3600:.1f} h"


@contextmanager
def trials_bar() -> Iterator[OnEvent]:
    """Show one bar for all trials; yields the callback that takes their events."""
    from rich.progress import BarColumn, Progress, TimeElapsedColumn

    if not console().is_terminal:
        yield lambda i, event: None
        return
    parts: dict[int, float] = {}
    columns = (_column("trials"), BarColumn(), _column("{task.fields[state]}"), TimeElapsedColumn())
    with Progress(*columns, console=console()) as bars:
        bar = bars.add_task("", total=1, state="")

        def heard(i: int, event: Event) -> None:
            parts[i] = event.done
            ended = sum(done >= 1 for done in parts.values())
            bars.update(bar, completed=sum(parts.values()), total=len(parts), state=f"{ended} done, {len(parts)} begun")

        yield heard


@contextmanager
def cells_bar(cells: Sequence[Config]) -> Iterator[tuple[Callable[..., None], Callable[..., None]]]:
    """Show one bar for all cells and one line per failure on a terminal, one line per cell elsewhere.

    Yields two callbacks: for the events of running cells, and for cells that have ended.
    """
    from rich.progress import BarColumn, Progress, TimeElapsedColumn

    ended, total = 0, len(cells)
    alike: dict[str, list[Config]] = {}
    for each in cells:
        alike.setdefault(each.name, []).append(each)
    varied = {name: experiments.varied([{"settings": one.settings} for one in some]) for name, some in alike.items()}

    def line(cell: Config, outcome: Result | Failure) -> None:
        if isinstance(outcome, experiments.Failure):
            how = f"failed: {outcome.message}"
        else:
            mean = outcome.measure(outcome.score).mean
            how = "done" if mean is None else experiments.score_of(cell.benchmark).text(mean)
        chosen = "".join(f" {name}={cell.settings[name]}" for name in varied[cell.name])
        console().print(f"{ended} of {total}: {cell.name}{chosen} seed {cell.seed}: {how}", soft_wrap=True)

    if not console().is_terminal:

        def told(i: int, cell: Config, outcome: Result | Failure) -> None:
            nonlocal ended
            ended += 1
            line(cell, outcome)

        yield (lambda some, event: None), told
        return
    parts: dict[int, float] = {}
    columns = (_column("cells"), BarColumn(), _column("{task.fields[state]}"), TimeElapsedColumn())
    with Progress(*columns, console=console()) as bars:
        bar = bars.add_task("", total=total, state="")

        def heard(some: Sequence[int], event: Event) -> None:
            parts.update(dict.fromkeys(some, event.done))
            bars.update(bar, completed=ended + sum(parts.values()), state=f"{ended} of {total}")

        def end(i: int, cell: Config, outcome: Result | Failure) -> None:
            nonlocal ended
            ended += 1
            parts.pop(i, None)
            bars.update(bar, completed=ended + sum(parts.values()), state=f"{ended} of {total}")
            if isinstance(outcome, experiments.Failure):
                line(cell, outcome)

        yield heard, end


@contextmanager
def epochs_bar(task: str, silent: bool = False) -> Iterator[list[Callback]]:
    """Show a bar over the epochs of a task on a terminal, and nothing elsewhere: the result is printed anyway. Yields
    the callbacks for `learn`.
    """
    from rich.progress import BarColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

    if silent or not console().is_terminal:
        yield []
        return
    columns = (_column("{task.description}"), BarColumn(), _column("{task.fields[state]}"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console(), transient=True) as bars:
        bar = bars.add_task(shown(task, line=True), total=None, state="reading")

        class Bar(Callback):
            def end_epoch(self, epoch: Epoch) -> None:
                state = f"epoch {epoch.epoch}/{epoch.epochs}"
                bars.update(bar, completed=epoch.epoch, total=epoch.epochs, state=state)

        yield [Bar()]


def print_tables(results: list[Result]) -> None:
    from rich.table import Table

    from evcl.report import by_benchmark, caption, rows, short_columns

    for name, group in by_benchmark(results).items():
        if group.is_stream:
            from evcl.report import streams

            stream = streams.short_table(group)
            below, columns, lines = streams.caption(group), stream.columns, [cells for _, cells in stream.rows]
        else:
            below, columns, lines = caption(group), short_columns(group), rows(group)
        table = Table(title=name, title_style="bold", title_justify="left", caption=below, caption_justify="left")
        for place, column in enumerate(columns):
            first = place == 0
            table.add_column(column, justify="left" if first else "right", no_wrap=first, overflow="fold")
        for line in lines:
            table.add_row(*line)
        _print_fitted(table)


def _print_fitted(table: Table) -> None:
    """Print a table; without the space around its cells if that keeps their numbers on one line."""
    measured = console().options.update(max_width=1000)
    if console().measure(table, options=measured).maximum > console().width:
        table.padding = 0
    console().print(table)


def write_report_of(folder: Path, title: str) -> None:
    """Write tables, figures and a page from every result below a folder, and print where they are."""
    from evcl.report import write_report

    written = write_report(folder, title, date.today().isoformat())
    drawn, tables = (sum(path.suffix == ending for path in written) for ending in (".svg", ".csv"))
    console().print(f"figures: {folder / 'figures'} ({drawn}, each as SVG, PNG and PDF)", soft_wrap=True)
    beside = f"; {tables} as CSV and LaTeX in {folder / 'tables'}"
    console().print(f"tables:  {written[-2]}{beside}", soft_wrap=True)
    console().print(f"page:    {written[-1]}", soft_wrap=True)


def print_trials(found: Mapping[str, Any], count: int = 3) -> None:
    from rich.table import Table

    again = ", measured again" if "confirmed" in found else ""
    table = Table(title=f"{found['benchmark']}, validation{again}", title_style="bold", title_justify="left")
    score = experiments.score_of(found["benchmark"])
    for column in ("method", score.of_task, "settings"):
        table.add_column(column, overflow="fold")
    for method, tried in found.get("confirmed", found["tried"]).items():
        for trial in tried[:count]:
            mean, std = trial["mean"], trial["std"]
            value = "diverged" if mean is None else f"{score.scale * mean:.2f}"
            value += "" if std is None else f" ± {score.scale * std:.2f}"
            table.add_row(method, value, " ".join(f"{name}={value}" for name, value in trial["settings"].items()))
    console().print(table)
