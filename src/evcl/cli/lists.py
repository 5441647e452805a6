"""`evcl list`: the methods, benchmarks and presets. It starts without torch."""

from __future__ import annotations

import sys
import textwrap
from contextlib import suppress
from dataclasses import replace
from typing import Annotated

import typer

from evcl import experiments
from evcl._core.catalogue import (
    AGENT_FACTS,
    AGENT_SUMMARIES,
    BENCHMARK_SUMMARIES,
    METHOD_FACTS,
    METHOD_SUMMARIES,
    ROW_SUMMARIES,
    SHOWN,
    measured,
)
from evcl._core.errors import EvclError, unknown
from evcl.cli.options import Plugins, Usage, usage
from evcl.cli.progress import console, echo, screen

KINDS = ("methods", "benchmarks", "presets")
SETTINGS = "settings"
NARROW = 120  # columns of a terminal in which the table of settings does not fit
WIDE = 200  # columns of the table of methods where there is no terminal: a line per method


def list_(
    what: Annotated[
        str | None,
        typer.Argument(
            help="methods (with year, authors, memory and cost), benchmarks, presets, settings (of METHOD), or the "
            "name of one of them [all]."
        ),
    ] = None,
    method: Annotated[str | None, typer.Argument(help="After settings: the method [evcl].")] = None,
    plugin: Plugins = None,
) -> None:
    """List methods, benchmarks, presets and settings."""
    of_methods, of_benchmarks = METHOD_SUMMARIES | AGENT_SUMMARIES | ROW_SUMMARIES, BENCHMARK_SUMMARIES
    if experiments.load_plugins(plugin or []):
        from evcl import benchmarks, methods

        of_methods = {m.name: m.summary for m in methods.METHODS.values()} | AGENT_SUMMARIES | ROW_SUMMARIES
        of_benchmarks = of_benchmarks | {b.name: b.summary for b in benchmarks.BENCHMARKS.values()}
    if method is not None and what != SETTINGS:
        raise Usage(f"evcl list {what} takes nothing more, not {method!r}; evcl list settings {method} may be meant")
    if what == SETTINGS or what in of_methods:
        name = (method or "evcl") if what == SETTINGS else str(what)
        if name not in of_methods:
            with usage():
                raise unknown("method", name, of_methods)
        _settings(name)
        return
    if what not in (None, *KINDS):
        raise Usage(f"evcl list takes methods, benchmarks, presets, settings or the name of a method, not {what!r}")
    if what == "methods":
        _methods(list(of_methods))
        return
    for kind, entries in zip(KINDS, (of_methods, of_benchmarks, experiments.SUMMARIES), strict=True):
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
    found = rl.method(name) if name in AGENT_SUMMARIES else own[name]
    known = dict(found.known_settings)
    if name not in AGENT_SUMMARIES | ROW_SUMMARIES:
        with suppress(EvclError):  # the settings of --keep, which keeps nothing unless it is given
            kept = methods.known_settings(found, {"memory": 0})
            known = {**kept, **known} if "memory" in known else {**kept, "memory": replace(kept["memory"], default=0)}
    narrow = console().is_terminal and console().width < NARROW
    echo(f"{name}: {found.summary}")
    for key, setting in known.items():
        default = str(setting.default).lower() if isinstance(setting.default, bool) else f"{setting.default}"
        table.add_row(key, default, setting.values, setting.help)
        if narrow:
            _wrapped("", f"{key} [{default}]: {setting.values}")
            _wrapped("    ", setting.help)
    if narrow:
        return
    out = console() if console().is_terminal else screen(WIDE)
    out.print(table, highlight=False)


def _methods(names: list[str]) -> None:
    """A table of the methods; what is not known of a user's own method is a dash."""
    from rich.table import Table

    costs, where = measured()
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for i, column in enumerate(("method", "year", "authors", "keeps", "step", "task")):
        table.add_column(column, justify="right" if i > 3 else "left", no_wrap=column != "keeps")
    for name in names:
        facts, cost = (METHOD_FACTS | AGENT_FACTS).get(name), costs[SHOWN].get(name)
        about = ("-", "-", "-") if facts is None else (str(facts.year or "-"), facts.authors, facts.keeps)
        table.add_row(name, *about, *("--" if cost is None else (f"{cost['step']:.1f}", f"{cost['task']:.1f}")))
    out = console() if console().is_terminal else screen(WIDE)
    out.print(table, highlight=False)
    for line in (
        "keeps: numbers stored besides the plain weights, and examples of earlier tasks",
        "       (class statistics: a vector per class, and a matrix)",
        "step:  time of a training step; naive takes 1",
        "task:  time of a task besides its steps; a naive epoch of 10,000 rows takes 1",
        f"Measured on the network {SHOWN} with batches of 64 rows:",
        where,
    ):
        echo(line)
