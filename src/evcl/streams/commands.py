"""The function behind `evcl stream`: files are predicted and learned row after row; the model is saved meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from evcl._core.errors import EvclError
from evcl._core.interrupts import deferred
from evcl.streams.evaluation import size_of
from evcl.streams.files import Asked, Files, batches
from evcl.streams.table import NOTE, Raised, TableStream, load
from evcl.tables.commands import claimed
from evcl.tables.saved import notes_of
from evcl.tables.source import Json

SAVE_EVERY = 45.0  # seconds
OnStart = Callable[[TableStream, Files, int], object]
OnRows = Callable[[int, list[Raised]], object]


def learn_files(
    paths: Sequence[Path],
    asked: Asked,
    out: Path | None = None,
    *,
    batch: int = 16,
    delay: int = 0,
    settings: Json | None = None,
    on_start: OnStart = lambda model, files, skipped: None,
    on_rows: OnRows = lambda count, raised: None,
) -> tuple[TableStream, Files]:
    """Predict and learn the rows of files in order, and write the model to `out`. If there is a model already, go on
    from it: with the rows that it has not learned, if these are the same files.

    The model is saved every 45 seconds, at Ctrl-C and at SIGTERM. `settings` are those of a new `Stream`.
    `on_start(model, files, skipped)` is called once, `on_rows(count, raised)` after each batch.
    """
    with nullcontext() if out is None else claimed(out):
        known = None
        if out is not None and out.exists():
            if NOTE.name not in notes_of(out):
                raise EvclError(f"{out} is not a model of evcl stream: name another file with --out")
            known = load(out)
            asked = _same(out, known, asked, settings or {})
        files = Files(paths, asked)
        model = known or TableStream.create(files, **(settings or {}))
        for one in files.files:
            model.encoder.check_shapes(one.source)
        skip = 0 if known is None else known.resume(files)
        on_start(model, files, skip)
        with deferred() as stop:
            saved, start = time.monotonic(), model.scores.rows
            for piece in batches(files.pieces(), lambda rows: size_of(batch, start + rows), skip):
                on_rows(piece.rows, model.learn(files, piece, delay))
                late = time.monotonic() - saved > SAVE_EVERY
                if out is not None and model.stream.rows and (late or stop()):
                    model.save(out)
                    saved = time.monotonic()
                if stop():
                    return model, files  # leaving the context raises the signal
            on_rows(0, model.end())
            if not model.stream.rows:
                raise EvclError(f"no row has a label in the column {model.target!r}: nothing was learned")
            if out is not None:
                model.save(out)
        return model, files


def _same(out: Path, known: TableStream, asked: Asked, settings: Json) -> Asked:
    """What the user says, completed by what the model knows. Raises if they disagree."""
    for name, given, own in (("target", asked.target, known.target), ("time", asked.time, known.time)):
        if given != own:
            raise EvclError(f"{out} was made with --{name} {own}, not {given}" if own else f"{out} has no --{name}")
    fixed = {"kind": known.kind, **dict(known.stream.settings)}
    for name, value in {"kind": asked.kind, **settings}.items():
        if value is not None and fixed[name] != value:
            option = name.replace("_", "-")
            raise EvclError(f"{out} already exists, and --{option} is fixed when a model is created ({fixed[name]})")
    drop, dialect = tuple(dict.fromkeys((*known.drop, *asked.drop))), asked.dialect.also(known.missing)
    return replace(asked, kind=known.kind, drop=drop, dialect=dialect, kinds=known.encoder.kinds())
