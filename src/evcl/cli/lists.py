"""`evcl list`: the methods, benchmarks and presets, without torch. `evcl data`: list, fetch and verify data sets."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Annotated

import typer

from evcl import experiments
from evcl._core.catalogue import (
    AGENT_FACTS,
    AGENT_SUMMARIES,
    BENCHMARK_SUMMARIES,
    EXAMPLE_NETWORK,
    METHOD_FACTS,
    METHOD_SUMMARIES,
    ROW_SUMMARIES,
    measured,
)
from evcl._core.errors import EvclError, unknown
from evcl.cli.options import HELP, DataDir, Once, Plugins, Usage, as_command, usage
from evcl.cli.progress import console, echo, screen

LISTS = ("methods", "benchmarks", "presets")
SETTINGS, CONSTANTS = "settings", "constants"
MIN_TABLE_COLUMNS = 120  # in a narrower terminal, the table of settings does not fit
PLAIN_TABLE_COLUMNS = 200  # of the table of methods where there is no terminal: a line per method


def list_(
    what: Annotated[
        str | None,
        typer.Argument(
            help="methods (with year, authors, memory and cost), benchmarks, presets, settings (of METHOD), constants "
            "(of METHOD), or the name of one of them [all]."
        ),
    ] = None,
    method: Annotated[str | None, typer.Argument(help="After settings or constants: the method [evcl].")] = None,
    plugin: Plugins = None,
) -> None:
    """List methods, benchmarks, presets, settings and constants."""
    of_methods, of_benchmarks = METHOD_SUMMARIES | AGENT_SUMMARIES | ROW_SUMMARIES, BENCHMARK_SUMMARIES
    if experiments.load_plugins(plugin or []):
        from evcl import benchmarks, methods

        of_methods = {m.name: m.summary for m in methods.METHODS.values()} | AGENT_SUMMARIES | ROW_SUMMARIES
        of_benchmarks = of_benchmarks | {b.name: b.summary for b in benchmarks.BENCHMARKS.values()}
    if method is not None and what not in (SETTINGS, CONSTANTS):
        raise Usage(f"evcl list {what} takes nothing more, not {method!r}; evcl list settings {method} may be meant")
    if what in (SETTINGS, CONSTANTS) or what in of_methods:
        name = str(what) if what in of_methods else method or "evcl"
        if name not in of_methods:
            with usage():
                raise unknown("method", name, of_methods)
        (_constants if what == CONSTANTS else _settings)(name)
        return
    if what not in (None, *LISTS):
        raise Usage(
            f"evcl list takes methods, benchmarks, presets, settings, constants or the name of a method, not {what!r}"
        )
    if what == "methods":
        _methods(list(of_methods))
        return
    for kind, entries in zip(LISTS, (of_methods, of_benchmarks, experiments.SUMMARIES), strict=True):
        if what in (None, kind):
            echo(kind)
            column = max(20, *map(len, entries))
            for name, summary in entries.items():
                _wrapped(f"  {name:<{column}} ", summary)


def _wrapped(start: str, text: str) -> None:
    """Print a line; on a terminal that is narrower, several, of which the others begin where the text does."""
    width = max(20, console().width - len(start)) if console().is_terminal else sys.maxsize
    echo(start + f"\n{' ' * len(start)}".join(textwrap.wrap(text, width)))


def _settings(name: str) -> None:
    """A method's settings, what --set takes: a table or, on a narrow terminal, one below the other."""
    from rich.table import Table

    from evcl import methods, rl
    from evcl.experiments import streams

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in ("setting", "default", "values", "meaning"):
        table.add_column(column, no_wrap=column in ("setting", "default"))
    own = streams.METHODS if name in ROW_SUMMARIES else methods.METHODS
    method = rl.method(name) if name in AGENT_SUMMARIES else own[name]
    known = dict(method.known_settings)
    if name not in AGENT_SUMMARIES | ROW_SUMMARIES:
        with suppress(EvclError):  # the settings of --keep, which keeps nothing unless it is given
            kept = methods.known_settings(method, {"memory": 0})
            known = {**kept, **known} if "memory" in known else {**kept, "memory": replace(kept["memory"], default=0)}
    narrow = console().is_terminal and console().width < MIN_TABLE_COLUMNS
    echo(f"{name}: {method.summary}")
    for key, setting in known.items():
        default = str(setting.default).lower() if isinstance(setting.default, bool) else f"{setting.default}"
        table.add_row(key, default, setting.values, setting.help)
        if narrow:
            _wrapped("", f"{key} [{default}]: {setting.values}")
            _wrapped("    ", setting.help)
    if narrow:
        return
    out = console() if console().is_terminal else screen(PLAIN_TABLE_COLUMNS)
    out.print(table, highlight=False)


def _constants(name: str) -> None:
    """The numbers of a method beside its settings, and its parts with their equations."""
    from rich.table import Table

    from evcl import methods
    from evcl.methods.parts import constants

    if name not in methods.METHODS:
        raise Usage(f"{name} learns no tasks: its numbers are its settings, in evcl list settings {name}")
    method = methods.METHODS[name]
    echo(f"{name}: {method.summary}")
    for part in method.parts:
        _wrapped(f"  {part.name:<16}", part.equation)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in ("part", "constant", "value", "meaning", "why"):
        table.add_column(column, no_wrap=column in ("part", "constant"))
    found = constants(method)
    for one in found:
        several = isinstance(one.value, tuple)
        value = f"{one.value[0]:g} to {one.value[-1]:g}" if several else f"{one.value:g}"
        table.add_row(one.part, one.name, value, one.meaning, one.why)
    out = console() if console().is_terminal else screen(PLAIN_TABLE_COLUMNS)
    out.print(table, highlight=False)
    echo(
        f"{len(found)} constants, beside the settings: evcl list settings {name}. A name with a dot is a setting, too."
    )


def _methods(names: list[str]) -> None:
    """A table of the methods; what is not known of a user's own method is a dash."""
    from rich.table import Table

    costs, where = measured()
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for i, column in enumerate(("method", "year", "authors", "keeps", "step", "task")):
        table.add_column(column, justify="right" if i > 3 else "left", no_wrap=column != "keeps")
    for name in names:
        facts, cost = (METHOD_FACTS | AGENT_FACTS).get(name), costs[EXAMPLE_NETWORK].get(name)
        about = ("-", "-", "-") if facts is None else (str(facts.year or "-"), facts.authors, facts.keeps)
        table.add_row(name, *about, *("--" if cost is None else (f"{cost['step']:.1f}", f"{cost['task']:.1f}")))
    out = console() if console().is_terminal else screen(PLAIN_TABLE_COLUMNS)
    out.print(table, highlight=False)
    for line in (
        "keeps: numbers stored besides the plain weights, and examples of earlier tasks",
        "       (class statistics: a vector per class, and a matrix)",
        "step:  time of a training step; naive takes 1",
        "task:  time of a task besides its steps; a naive epoch of 10,000 rows takes 1",
        f"Measured on the network {EXAMPLE_NETWORK} with batches of 64 rows:",
        where,
    ):
        echo(line)


data = typer.Typer(name="data", rich_markup_mode=None, context_settings=HELP, help="List, fetch and verify data sets.")


@data.command("list", cls=Once)
def list_data() -> None:
    """List every data set.

    What the cache holds, where it was fetched from, and its licence.
    """
    from evcl import data as sets
    from evcl.data.progress import megabytes

    for name, entry in sets.CATALOG.items():
        here = sets.status(name)
        state = f"{megabytes(here.bytes)} in {here.folder}, from {here.source}" if here.fetched else "not fetched"
        if here.fetched and here.problem:
            state = f"{here.problem}; run evcl data fetch {name}"
        echo(f"{name:<14} {entry.summary}")
        echo(f"{'':<14} {state}")
        echo(f"{'':<14} licence: {entry.licence}; cite: {entry.citation}")


@data.command(cls=Once)
@as_command
def fetch(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="Data sets to fetch; see evcl data list.")],
    data_dir: DataDir = None,
    offline: Annotated[bool, "Use only --data-dir and the cache [EVCL_OFFLINE=1]."] = False,
) -> None:
    """Fetch data sets into the cache.

    From the first source whose files have the right checksums.
    """
    from evcl import data as sets
    from evcl.data.progress import megabytes

    _known(names)
    if data_dir is not None and not data_dir.is_dir():
        raise typer.BadParameter(f"--data-dir: there is no folder {data_dir}")

    def one(name: str) -> str:
        here = sets.fetch(name, data_dir, offline or None)
        return f"{name}: verified, {megabytes(here.bytes)} in {here.folder}, from {here.source}"

    _each(names, one)


@data.command(cls=Once)
@as_command
def verify(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Data sets to verify [all that were fetched].")
    ] = None,
) -> None:
    """Check every byte in the cache, and count duplicate images."""
    from evcl import data as sets
    from evcl.data.progress import megabytes

    _known(names or [])
    wanted = names or [name for name in sets.CATALOG if sets.status(name).fetched]
    if not wanted:
        echo("nothing has been fetched yet; see evcl data fetch")

    def one(name: str) -> str:
        checked = sets.verify(name)
        entry = sets.CATALOG[name]
        if not entry.images:
            twice = f"{checked.copies} texts are duplicates" if "texts" in entry.arrays else "files, byte by byte"
        elif checked.test_images:
            twice = f"{checked.shared} of {checked.test_images} test images are also training images"
        else:
            twice = f"no published train/test split; {checked.copies} images are duplicates"
        return f"{name}: intact, {megabytes(checked.bytes)}, from {checked.source}; {twice}"

    _each(wanted, one)


def _known(names: list[str]) -> None:
    from evcl import data as sets

    try:
        for name in names:
            sets.CATALOG[name]
    except EvclError as error:
        raise typer.BadParameter(str(error)) from error


def _each(names: list[str], one: Callable[[str], str]) -> None:
    """Print one line per data set. If one fails, still process the others, then raise."""
    failed = []
    for name in names:
        try:
            echo(one(name))
        except EvclError as error:
            failed.append(str(error))
    if failed:
        raise EvclError("; ".join(failed))
