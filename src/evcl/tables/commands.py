"""The functions behind `evcl learn` and `evcl export`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evcl._core.errors import EvclError
from evcl._core.files import check_regular, locked, remove_leftovers
from evcl.learner import INFER, NEW, load
from evcl.learner.export import export as export_learner
from evcl.tables.arrow_file import ArrowFile, DuckDb, ParquetFile
from evcl.tables.asked import Learning
from evcl.tables.creating import create, later_doubts
from evcl.tables.csv_file import CsvFile
from evcl.tables.excel_file import ExcelFile
from evcl.tables.image_folder import PIXELS, ImageFolder
from evcl.tables.model import Model, is_table, load_model
from evcl.tables.numpy_file import NpyFile, NpzFile
from evcl.tables.parts import Number
from evcl.tables.rows import Rows
from evcl.tables.source import Dialect, Json, Source, bad
from evcl.tables.values import Fraction

READERS: dict[str, Callable[[Path, Dialect], Source]] = {
    **dict.fromkeys((".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz"), CsvFile),
    ".xlsx": ExcelFile,
    ".parquet": ParquetFile,
    **dict.fromkeys((".feather", ".arrow"), ArrowFile),
    ".npz": NpzFile,
    ".npy": NpyFile,
    ".duckdb": DuckDb,
}


def open_source(
    path: Path, model: Model | None = None, side: int | None = None, dialect: Dialect | None = None
) -> Source:
    """The reader for a file or an image folder. Images are scaled to the size of the model's first task."""
    dialect = dialect or Dialect()
    if model is not None:
        dialect = replace(dialect.also(model.missing), usual=model.usual)
    try:
        if path.is_dir():
            size = None
            for column in () if model is None else model.encoder.columns:
                if isinstance(column, Number) and column.name == PIXELS and len(column.shape) == 3:
                    size = (column.shape[0], column.shape[1], column.shape[2])
            return ImageFolder(path, size, **({} if side is None else {"side": side}))
        if not path.exists():
            raise EvclError(f"there is no file {'' if path.suffix else 'or folder '}{path}")
        ends = [end for end in READERS if path.name.lower().endswith(end)]
        if not ends:
            bad(path, f"its name should end in {', '.join(READERS)}, or it should be a folder of images")
        check_regular(path)
        reader = READERS[max(ends, key=len)]
        if dialect.query is not None and reader is not DuckDb:
            raise EvclError(f"--query is for a DuckDB database, and {path} is none")
        source = reader(path, dialect)
        if not source.untyped and (dialect.separator or dialect.decimal):
            raise EvclError(f"--separator and --decimal are for files of text, and {path} is none")
        return source
    except OSError as error:
        raise EvclError(f"cannot read {path}: {error.strerror or error}") from error


@dataclass(frozen=True)
class Learned:
    """What learning a file has done, and what the user should know of it."""

    model: Model
    line: Json  # its entry in the model's history
    read: list[str]  # how the file was read
    doubts: list[str]  # what was said before it was learned
    notes: list[str]


def learn(model: Path, data: Path, target: str | None = None, **options: Any) -> Learned:
    """`learn_file` with the fields of `Learning` as keywords."""
    return learn_file(model, data, Learning(target, **options))


def learn_file(model: Path, data: Path, asked: Learning) -> Learned:
    """Learn a file as one more task, and write the model.

    If learning fails or is interrupted, the model file is left unchanged. A long task is saved regularly to a folder
    beside the model, and the same call resumes from there.
    """
    with claimed(model):
        before = _fingerprint(model)
        if before is None:
            tabular, source, rows = _created(model, data, asked)
        else:
            tabular = load_model(model)
            asked.check_later(model)
            if asked.target not in (None, tabular.target):
                known = tabular.target or "the folder of an image"
                raise EvclError(f"{model} learns {known!r}, not --target {asked.target}")
            source = open_source(data, tabular, dialect=asked.dialect)
            rows = tabular.see(source, asked.drop, asked.unknown)
            rows.doubts = later_doubts(tabular, source, rows)
            tabular.missing = asked.dialect.also(tabular.missing).missing
        tabular.learner.to(asked.device)
        if asked.keep is not None:
            if tabular.numeric:
                raise EvclError("--keep keeps equally many rows of each class, but this model learns a number")
            tabular.learner.keep(asked.keep)
        for doubt in rows.doubts:
            asked.warn(doubt)
        name = asked.task or (data.name if data.stem in (NEW, INFER) else data.stem)
        line, notes = tabular.learn(source, rows, name, asked, checkpoint_folder(model))
        decimal, day_first = source.usual
        tabular.usual = decimal or tabular.usual[0], tabular.usual[1] if day_first is None else day_first
        if _fingerprint(model) != before:
            raise EvclError(f"{model} was changed by another process meanwhile: nothing is written; learn it again")
        tabular.save(model)
        return Learned(tabular, line, [] if source.told is None else [source.told], rows.doubts, [*rows.notes, *notes])


def _created(model: Path, data: Path, asked: Learning) -> tuple[Model, Source, Rows]:
    """A new model for a file, which has learned nothing yet."""
    source = open_source(data, side=asked.side, dialect=asked.dialect)
    if asked.target is None and not source.images:
        raise EvclError(f"there is no model {model} yet: to create one, name its label column with --target")
    for option, value in {"target": asked.target, "kind": asked.kind}.items():
        if value is not None and source.images:
            raise EvclError(f"--{option} is for tables: the class of an image is the name of its folder")
    try:
        tabular, rows = create(source, asked)
        return tabular, source, rows
    except Fraction:
        if asked.kind is not None or source.images:
            raise
    source = open_source(data, dialect=asked.dialect)
    tabular, rows = create(source, replace(asked, kind="number"))
    rows.notes.append(f"{asked.target} has numbers with fractions, so it is learned as a number, not as classes")
    return tabular, source, rows


def checkpoint_folder(model: Path) -> Path:
    """The folder for checkpoints of the task that a model is learning."""
    real = Path(os.path.realpath(model))
    return real.with_name(f"{real.name}.checkpoint")


def export(
    model: Path, out: Path, *, task: str | None = None, what: str = "predictive", samples: int | None = None
) -> None:
    """Export a model: see `Learner.export`. The network takes encoded rows; how to encode them is in the file's
    metadata, as `evcl.columns`, in the order of the inputs.
    """
    if not is_table(model):
        export_learner(load(model), out, task=task, what=what, samples=samples)
        return
    tabular = load_model(model)
    if tabular.numeric:
        raise EvclError(f"{model} predicts numbers: only models of classes can be exported")
    classes = [tabular.labels[int(code)] for code in tabular.learner.classes(task)]
    notes = {"evcl.columns": json.dumps(tabular.encoder.described())}
    export_learner(tabular.learner, out, task=task, what=what, samples=samples, classes=classes, notes=notes)


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Lock a model for one `learn` at a time. A second one raises, so that neither result is overwritten.

    The lock is beside the real file, so a model has only one, whatever links lead to it.
    """
    if not path.parent.is_dir():
        raise EvclError(f"cannot write {path}: there is no folder {path.parent}")
    with ExitStack() as stack:
        try:
            if path.exists():
                check_regular(path)
            real = Path(os.path.realpath(path))
            lock = real.with_name(f".{real.name}.lock")
            stack.enter_context(locked(lock, f"{path}: another evcl learn is at work on it"))
            remove_leftovers(real)
        except OSError as error:
            raise EvclError(f"cannot write {path}: {error.strerror or error}") from None
        yield


def _fingerprint(path: Path) -> tuple[int, ...] | None:
    """Values that change when the file is written; None if there is no file."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
