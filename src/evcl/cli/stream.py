"""`evcl stream`: rows of files in the order of time, each predicted before it is learned."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evcl._core.errors import EvclError
from evcl._core.interrupts import Interrupted
from evcl.cli.options import FileOptions, one_thread, usage
from evcl.cli.progress import Voice, bars, console, many, percent, plain_table, shortened, size_of

if TYPE_CHECKING:
    from rich.table import Table

    from evcl.cli.progress import Show
    from evcl.streams.files import Files
    from evcl.streams.table import Raised, TableStream

MEASURE_NAMES = {"nll": "log-loss", "brier": "Brier", "ece": "ECE", "rmse": "RMSE"}
PROGRESS_LINES = 10  # this many lines of progress where there is no terminal


@dataclass(frozen=True, kw_only=True)
class StreamOptions(FileOptions):
    data: Annotated[list[Path], typer.Argument(help="Files (CSV, Excel, Parquet, Arrow, NumPy, DuckDB).")]
    target: Annotated[str, "The column to predict."]
    time: Annotated[str | None, "The column of dates or numbers that orders the rows."] = None
    out: Annotated[Path | None, "The model file to write, or to continue (.safetensors)."] = None
    delay: Annotated[int, "How many rows later the label of a row arrives."] = 0
    batch: Annotated[int, "Rows per step: all are predicted, then learned."] = 16
    false_alarms: Annotated[float | None, "Highest rate of false alarms, per row [0.0001]."] = None
    kind: Annotated[str | None, "What the target is: class, number or count [number if it has fractions]."] = None
    seed: Annotated[int | None, "Random seed [0]."] = None


def stream(options: StreamOptions) -> None:
    """Learn rows in order, each predicted first, with alarms.

    There are no tasks and no epochs: the learner forgets as fast as the data changes, and says when it does. The same
    command continues where it stopped.
    """
    from evcl import streams
    from evcl.streams.commands import learn_files
    from evcl.streams.evaluation import BATCH_SETTING, DELAY_SETTING
    from evcl.streams.files import Asked
    from evcl.tables.rows import check_kind

    target, time, out = options.target, options.time, options.out
    voice = Voice(options.as_json, options.quiet)
    dialect = options.dialect()
    with usage():
        BATCH_SETTING.check("--batch", options.batch)
        DELAY_SETTING.check("--delay", options.delay)
        given = {"false_alarms": options.false_alarms, "seed": options.seed}
        checked = {
            name: streams.SETTINGS[name].check(f"--{name.replace('_', '-')}", value)
            for name, value in given.items()
            if value is not None
        }
        kind = None if options.kind is None else check_kind(options.kind)
        if time == target:
            raise EvclError("--time and --target name the same column")
    one_thread()
    request, telling = Asked(target, kind, time, options.drop or [], dialect), _Telling(voice)
    steps = {"batch": options.batch, "delay": options.delay}
    try:
        with bars("rows", state="reading", transient=True, silent=voice.silent) as telling.show:
            table, files = learn_files(
                options.data, request, out, **steps, settings=checked, on_start=telling.start, on_rows=telling.rows
            )
    except Interrupted:
        kept = out is not None and telling.model is not None and telling.model.stream.rows
        again = f"{telling.done:,} rows are learned and saved in {out}, and the same command goes on from there"
        raise Interrupted(again if kept else "nothing was written") from None
    _report(table, files, out, telling, voice)


class _Telling:
    """Says what happens: a bar on a terminal, plain lines elsewhere, and each alarm as one line."""

    def __init__(self, voice: Voice) -> None:
        self._voice = voice
        self.model: TableStream | None = None
        self.show: Show = lambda *_: None
        self.total = self.done = self._said = self.skipped = self.unlabelled = 0

    def start(self, model: TableStream, files: Files, skipped: int) -> None:
        self.model, self.total, self.done, self.skipped = model, files.rows, skipped, skipped
        self.unlabelled = model.unlabelled
        self._said = PROGRESS_LINES * skipped // files.rows
        for text in (*files.told, *(f"note: {note}" for note in files.notes)):
            self._voice.say(text)
        columns = [f"{name} ({kind})" if kind != "number" else name for name, kind in files.kinds().items()]
        self._voice.fact("columns", shortened(columns))
        if skipped:
            self._voice.say(f"{skipped:,} of {files.rows:,} rows were learned already")

    def rows(self, count: int, raised: list[Raised]) -> None:
        assert self.model is not None
        self.done += count
        for one in raised:
            self._voice.say(alarm_line(self.model, one))
        if not self.model.scores.rows:
            return
        first = self.model.scores.measures[0]
        now = [f"{MEASURE_NAMES.get(n, n)} {_shown(n, self.model.scores.decayed[n])}" for n in (first, "nll")]
        self.show(self.done, f"{self.done:,} of {self.total:,}, {now[0]} lately", self.total)
        if not console().is_terminal and count and (line := PROGRESS_LINES * self.done // self.total) > self._said:
            self._said = line
            self._voice.say(f"{self.done:,} of {self.total:,} rows: {', '.join(now)} lately")


def alarm_line(model: TableStream, one: Raised) -> str:
    """One line about an alarm."""
    when = "" if one.when is None else f" ({when_of(model, one.when)})"
    reasons = dict(zip(one.columns, one.reasons, strict=False))
    inputs, related = ([name for name in one.columns if reasons[name] == why] for why in ("inputs", "relation"))
    parts = [f"{shortened(inputs, 5)} moved"] if inputs else []
    parts += [f"the relation of {shortened(related, 5)} to {model.target} changed"] if related else []
    row = "labelled row" if model.unlabelled else "row"
    return f"alarm at {row} {one.row:,}{when}: {'; '.join([*parts, one.action])}"


def when_of(model: TableStream, when: float) -> str:
    """A time as the table has it."""
    import numpy as np

    if not model.dated:
        return f"{model.time} {when:.10g}"
    return str(np.datetime64(round(when), "s")).replace("T", " ").removesuffix(":00").removesuffix(" 00:00")


def _shown(name: str, value: float) -> str:
    return percent(value) if name in ("accuracy", "ece", "coverage") else f"{value:.4g}"


def measures_table(model: TableStream) -> Table:
    """A table of the measures so far."""
    table = plain_table("measure", "all rows", "lately")
    overall, decayed = model.scores.overall, model.scores.decayed
    for name in model.scores.measures:
        table.add_row(MEASURE_NAMES.get(name, name), _shown(name, overall[name]), _shown(name, decayed[name]))
    return table


def _report(found: TableStream, files: Files, out: Path | None, telling: _Telling, voice: Voice) -> None:
    unlabelled = found.unlabelled - telling.unlabelled
    new = telling.done - telling.skipped - unlabelled
    passed = f", {unlabelled:,} without a label passed over" if unlabelled else ""
    summary = f"{many(new, 'row')} predicted, then learned{passed}"
    voice.say(summary if new or unlabelled else "there are no new rows")
    if not voice.silent:
        console().print(measures_table(found))
        console().print("lately: earlier rows weigh less; about the last 1,000 count.")
    voice.say(f"{many(len(found.raised), 'alarm')} in {many(found.scores.rows, 'row')}")
    if out is not None:
        voice.say(f"model: {out} ({size_of(out)})")
    voice.end({"model": out, "new_rows": new, **facts(found), "read": files.told, "notes": files.notes})


def facts(model: TableStream) -> dict[str, object]:
    """What is known of a stream, for JSON."""
    return {
        "rows": model.scores.rows,
        "unlabelled": model.unlabelled,
        "target": model.target,
        "kind": model.kind,
        "time": model.time,
        "columns": model.encoder.names,
        "classes": model.labels,
        "overall": model.scores.overall,
        "lately": model.scores.decayed,
        "window": model.scores.window,
        "curves": model.scores.curves,
        "alarms": [
            {
                "row": one.row,
                "when": None if one.when is None else when_of(model, one.when),
                "surprise": one.surprise,
                "columns": one.columns,
                "reasons": one.reasons,
                "action": one.action,
            }
            for one in model.raised
        ],
    }


def inspect_stream(path: Path, voice: Voice, as_json: bool) -> None:
    """What `evcl inspect` shows of a stream's file."""
    from evcl import streams
    from evcl.streams.table import NOTE, load
    from evcl.tables.saved import notes_of

    if NOTE.name not in notes_of(path):
        plain = streams.Stream.load(path)
        voice.say(f"{path}: {size_of(path)}, a stream of {many(plain.rows, 'row')}, saved from Python")
        voice.fact("learns", f"{len(plain.classes)} classes" if plain.classes else plain.likelihood)
        voice.fact("alarms", f"{len(plain.alarms):,}")
        alarms = [alarm._asdict() for alarm in plain.alarms]
        voice.end({"model": path, "rows": plain.rows, "classes": plain.classes, "alarms": alarms})
        return
    table = load(path)
    voice.say(f"{path}: {size_of(path)}, a stream of {many(table.scores.rows, 'row')}")
    voice.fact("columns", shortened(table.encoder.names))
    voice.fact("target", table.target)
    voice.fact(*(("classes", shortened(table.labels)) if table.kind == "class" else ("learns", f"a {table.kind}")))
    if table.latest is not None:
        voice.fact("up to", when_of(table, table.latest))
    remembers = ", ".join(
        f"{'everything' if rows == float('inf') else f'{rows:,.0f} rows'} {percent(share)}"
        for rows, share in table.stream.shares.items()
    )
    voice.fact("memory", remembers)
    for one in table.raised[-12:]:
        voice.say(alarm_line(table, one))
    if not as_json:
        console().print(measures_table(table))
        console().print("Each row was predicted before it was learned; lately: earlier rows weigh less.")
    voice.end({"model": path, **facts(table)})
