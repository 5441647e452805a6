"""What the commands print: progress bars on a terminal, plain lines elsewhere, and tables of results."""

from __future__ import annotations

import json
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
from evcl.cli.options import Usage

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from evcl import tables
    from evcl.callbacks import Callback, Epoch
    from evcl.experiments import Config, Event, Failure, Result
    from evcl.experiments.paper import Forecast
    from evcl.experiments.search import Found

    OnEvent = Callable[[int, Event], None]
    Show = Callable[..., None]


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


def print_line(text: str) -> None:
    """Print a line to the console, not folded to its width."""
    console().print(text, soft_wrap=True)


def plain_table(*columns: str, left: int = 1, wide: bool = True) -> Table:
    """A table without lines. All columns but the first `left` are of numbers."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2 if wide else 1, 0, 0), pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i >= left else "left", overflow="fold")
    return table


@contextmanager
def bars(*names: str, state: str = "", transient: bool = False, silent: bool = False) -> Iterator[Show]:
    """Show bars with these names on a terminal, and nothing elsewhere. Yields `show(done, state, total=1, bar=0)`."""
    if silent or not console().is_terminal:
        yield lambda *_, **__: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    texts = (TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[state]}"))
    columns = (next(texts), BarColumn(), next(texts), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(), transient=transient) as shown_bars:
        ids = [shown_bars.add_task(shown(name, line=True), total=None, state=state, start=False) for name in names]

        def show(done: float, state: str, total: float = 1, bar: int = 0) -> None:
            if not shown_bars.tasks[bar].started:
                shown_bars.start_task(ids[bar])
            shown_bars.update(ids[bar], completed=done, total=total, state=state)

        yield show


@contextmanager
def progress(configs: list[Config]) -> Iterator[OnEvent]:
    """Show one bar per run on a terminal, one line per task elsewhere; yields `on_event(index, event)`."""
    with bars(*(config.name for config in configs), state="waiting") as show:

        def on_event(index: int, event: Event) -> None:
            config = configs[index]
            if event.note is not None:
                sys.stderr.write(f"evcl: {shown(event.note, line=True)}\n")
            value = "" if event.accuracy is None else experiments.score_of(config.benchmark).text(event.accuracy)
            show(event.done, f"task {event.task + 1}/{event.tasks}  {value}", bar=index)
            if value and not console().is_terminal:
                seen = "on it" if event.task == 0 else f"on average over tasks 1 to {event.task + 1}"
                whose = "" if event.seeds == config.seeds else f" seed {', '.join(map(str, event.seeds))}"
                print_line(f"{config.name}{whose}: task {event.task + 1} of {event.tasks} learned, {value} {seen}")

        yield on_event


@contextmanager
def forecast_bar(total: int) -> Iterator[tuple[Callable[[int, Event, Forecast], None], Callable[..., None]]]:
    """Show one bar for all runs, with the remaining time; yields the callbacks `on_event` and `on_result`."""
    with bars("everything") as show:

        def on_event(i: int, event: Event, forecast: Forecast) -> None:
            left = forecast.remaining()
            show(forecast.part, f"{forecast.part:.0%}{'' if left is None else f', {_duration(left)} left'}")

        def on_result(count: int, config: Config, result: Result) -> None:
            mean = result.measure(result.score).mean
            value = "diverged" if mean is None else experiments.score_of(config.benchmark).text(mean)
            print_line(f"{count} of {total}: {config.name} {value}")

        yield on_event, on_result


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{seconds:.0f} s" if seconds < 90 else f"{minutes} min" if minutes < 90 else f"{seconds / 3600:.1f} h"


@contextmanager
def trials_bar() -> Iterator[OnEvent]:
    """Show one bar for all trials; yields the callback that takes their events."""
    parts: dict[int, float] = {}
    with bars("trials") as show:

        def heard(i: int, event: Event) -> None:
            parts[i] = event.done
            ended = sum(done >= 1 for done in parts.values())
            show(sum(parts.values()), f"{ended} done, {len(parts)} begun", len(parts))

        yield heard


@contextmanager
def cells_bar(cells: Sequence[Config]) -> Iterator[tuple[Callable[..., None], Callable[..., None]]]:
    """Show one bar for all cells and one line per failure on a terminal, one line per cell elsewhere.

    Yields two callbacks: for the events of running cells, and for cells that have ended.
    """
    ended, total = 0, len(cells)
    parts: dict[int, float] = {}
    alike: dict[str, list[Config]] = {}
    for each in cells:
        alike.setdefault(each.name, []).append(each)
    varied = {name: experiments.varied([{"settings": one.settings} for one in some]) for name, some in alike.items()}
    with bars("cells") as show:

        def heard(some: Sequence[int], event: Event | None) -> None:
            if event is not None:
                parts.update(dict.fromkeys(some, event.done))
            show(ended + sum(parts.values()), f"{ended} of {total}", total)

        def end(i: int, cell: Config, outcome: Result | Failure) -> None:
            nonlocal ended
            ended += 1
            parts.pop(i, None)
            heard([], None)
            failed = isinstance(outcome, experiments.Failure)
            if console().is_terminal and not failed:
                return
            if isinstance(outcome, experiments.Failure):
                how = f"failed: {outcome.message}"
            else:
                mean = outcome.measure(outcome.score).mean
                how = "done" if mean is None else experiments.score_of(cell.benchmark).text(mean)
            chosen = "".join(f" {name}={cell.settings[name]}" for name in varied[cell.name])
            print_line(f"{ended} of {total}: {cell.name}{chosen} seed {cell.seed}: {how}")

        yield heard, end


@contextmanager
def epochs_bar(task: str, silent: bool = False) -> Iterator[list[Callback]]:
    """Show a bar over the epochs of a task on a terminal, and nothing elsewhere: the result is printed anyway. Yields
    the callbacks for `learn`.
    """
    from evcl.callbacks import Callback

    with bars(task, state="reading", transient=True, silent=silent) as show:

        class Bar(Callback):
            def end_epoch(self, epoch: Epoch) -> None:
                show(epoch.epoch, f"epoch {epoch.epoch}/{epoch.epochs}", epoch.epochs)

        yield [Bar()]


def print_tables(results: list[Result]) -> None:
    from rich.table import Table

    from evcl.report import by_benchmark, caption, rows, short_columns

    for name, group in by_benchmark(results).items():
        if group.is_stream:
            from evcl.report import streams

            stream = streams.short_table(group)
            footer, columns, lines = streams.caption(group), stream.columns, [cells for _, cells in stream.rows]
        else:
            footer, columns, lines = caption(group), short_columns(group), rows(group)
        table = Table(title=name, title_style="bold", title_justify="left", caption=footer, caption_justify="left")
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
    print_line(f"figures: {folder / 'figures'} ({drawn}, each as SVG, PNG and PDF)")
    print_line(f"tables:  {written[-2]}; {tables} as CSV and LaTeX in {folder / 'tables'}")
    print_line(f"page:    {written[-1]}")


def print_trials(found: Found, count: int = 3) -> None:
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


class Voice:
    """Prints facts as text; with `as_json`, nothing but one JSON object at the end; with `quiet`, nothing at all."""

    def __init__(self, as_json: bool = False, quiet: bool = False, to_stderr: bool = False) -> None:
        if as_json and quiet:
            raise Usage("--json and --quiet cannot be used together")
        self.silent, self._as_json, self._to_stderr = as_json or quiet, as_json, to_stderr

    def say(self, text: str) -> None:
        if self.silent:
            return
        if self._to_stderr:
            echo(text, err=True)
        else:
            print_line(text)

    def fact(self, name: str, text: str) -> None:
        self.say(f"{name:<8} {text}")

    def end(self, facts: Mapping[str, object]) -> None:
        if self._as_json:
            echo(json.dumps(facts, default=str))


def columns_of(model: tables.Model) -> str:
    """How each column was read; for example, a code that is text shows up as a category."""
    from evcl.tables.parts import Number

    encoder, names = model.encoder, []
    for name in encoder.names:
        part, texts = encoder.parts(name)[0], len(encoder.texts(name))
        if isinstance(part, Number):
            kind = f" ({' x '.join(map(str, part.shape))} numbers)" if part.shape else ""
        else:
            kind = " (dates)" if part.holds == "date" else f" ({many(texts, 'category', 'categories')})"
        names.append(name + kind)
    return shortened(names)


def shortened(names: list[str], most: int = 12) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def many(count: int, one: str, several: str | None = None) -> str:
    """The number with the noun: 1 class, 2 classes."""
    return f"{count:,} {one if count == 1 else several or one + 's'}"


def percent(part: float) -> str:
    return f"{100 * part:.1f}%"


def size_of(path: Path) -> str:
    return f"{path.stat().st_size / 1000:,.0f} kB"
