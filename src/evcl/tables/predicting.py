"""The function behind `evcl predict`: every row of a file with its prediction beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from evcl._core.errors import EvclError
from evcl._core.files import write_atomically
from evcl.learner import INFER, Numbers, Predictions
from evcl.tables.asked import Predicting
from evcl.tables.commands import open_source
from evcl.tables.encoding import Encoding, Number
from evcl.tables.model import Model, load_model
from evcl.tables.output_file import STANDARD, Column, check_ending, writing
from evcl.tables.source import Floats, Source, Values, bad, plural


@dataclass
class Predicted:
    """How many rows were predicted, how many of them have a label, and how many of those were predicted correctly."""

    rows: int = 0
    labelled: int = 0
    right: int = 0
    entropy: float = 0.0  # mean
    epistemic: float = 0.0
    unfamiliar: float | None = None  # mean; None if the model cannot tell
    std: float | None = None  # of numbers: the mean standard deviation; None: the model predicts classes
    squares: float = 0.0  # of numbers: the mean squared error
    inside: int = 0  # of numbers: how many are within their 95% interval
    lost: int = 0  # of numbers: how many have an epistemic deviation above that of the target
    read: list[str] = field(default_factory=list)  # how the file was read
    notes: list[str] = field(default_factory=list)  # what the user should know of it

    def add(self, found: Predictions, labels: Sequence[Any], given: Values) -> None:
        """Count some rows. The means are sums until `end`."""
        self.rows += len(given)
        self.labelled += sum(label is not None for label in given)
        self.right += sum(ours == label for ours, label in zip(labels, given, strict=True))
        self.entropy += float(found.entropy.sum(dtype=float))
        self.epistemic += float(found.epistemic.sum(dtype=float))
        if self.unfamiliar is not None and found.unfamiliar is not None:
            self.unfamiliar += float(found.unfamiliar.sum(dtype=float))

    def add_numbers(self, found: Numbers, given: Values, deviation: float) -> None:
        """Count some rows of numbers. NaN and None are missing. `deviation`: of the target, as it was learned."""
        true = np.asarray(given, dtype=float)
        there = ~np.isnan(true)
        low, high = found.interval(0.95)
        self.rows += len(true)
        self.labelled += int(there.sum())
        self.squares += float(np.square(true - found.mean)[there].sum())
        self.inside += int(((low <= true) & (true <= high)).sum())
        self.std = (self.std or 0.0) + float(found.std.sum())
        self.epistemic += float(found.epistemic.sum())
        self.lost += int((found.epistemic > deviation).sum())
        if self.unfamiliar is not None and found.unfamiliar is not None:
            self.unfamiliar += float(found.unfamiliar.sum(dtype=float))

    def end(self) -> None:
        self.entropy, self.epistemic = self.entropy / self.rows, self.epistemic / self.rows
        self.std = None if self.std is None else self.std / self.rows
        self.squares /= max(1, self.labelled)
        self.unfamiliar = None if self.unfamiliar is None else self.unfamiliar / self.rows


def predict(model: Path, data: Path, out: Path, **options: Any) -> Predicted:
    """`predict_file` with the fields of `Predicting` as keywords."""
    return predict_file(model, data, out, Predicting(**options))


def predict_file(model: Path, data: Path, out: Path, asked: Predicting) -> Predicted:
    """Predict every row of a file, piece by piece, and write a CSV or Parquet file. `out` - is standard output.

    The file's own columns come first, in its order; those that hold arrays are left out. A text that a spreadsheet
    would take for a formula gets a quote before it in a CSV file.
    """
    check_ending(out)
    found = load_model(model)
    found.learner.to(asked.device)
    source, task = open_source(data, found, dialect=asked.dialect), asked.task
    *_, notes = found.check(source, asked.drop, asked.unknown)
    known = {*found.encoder.names, found.target}
    source.expect({name: "text" for name in source.shapes if name not in known})  # these are written as they are
    learner, total = found.learner, Predicted()
    if task is None:
        if found.numeric and len(learner.heads) > 1:
            raise EvclError(f"there are {len(learner.heads)} heads: choose one with --task, {', '.join(learner.heads)}")
        task = INFER if len(learner.heads) > 1 else learner.tasks[0]
    total.unfamiliar = 0.0 if learner.knows_unfamiliar else None
    for other in (model, data):
        if out != STANDARD and other.exists() and out.exists() and out.samefile(other):
            raise EvclError(f"--out {out} would overwrite a file that is read")
    beside = _beside(found, source, asked.keys)
    read = {*found.encoder.names, *([found.target] if found.numeric else [])}
    source.expect({name: "text" for name in beside if name not in read})  # 007 stays 007
    deviation = max(float(line.get("deviation", math.inf)) for line in found.history)
    numeric = {column.name for column in found.encoder.columns if isinstance(column, Number)}
    encoding = Encoding(found.encoder, source, asked.unknown)

    def write(into: Path) -> None:
        with writing(out, into, asked.keep_formulas) as writer:
            for predictions, given, piece in found.predict(source, encoding, task, beside):
                ours = prediction_columns(found, predictions, task)
                if twice := [name for name in beside if name in ours]:
                    fix = "--key chooses columns, --only-predictions leaves all out"
                    bad(data, f"it has a column {twice[0]!r}, and so have the predictions; {fix}")
                own = {name: Column(source.written(piece, name), number=name in numeric) for name in beside}
                place = {"file": Column([piece.place(i) for i in range(piece.rows)])} if source.images else {}
                writer.write({**place, **own, **ours})
                if found.numeric:
                    total.add_numbers(predictions, given, deviation)
                else:
                    total.add(predictions, list(ours["prediction"].values), given)

    if out == STANDARD:
        write(out)
    else:
        write_atomically(out, write)
    total.end()
    total.read, total.notes = [] if source.told is None else [source.told], notes + encoding.notes
    if total.lost:
        rows = f"{total.lost:,} of {plural(total.rows, 'row')} {'is' if total.lost == 1 else 'are'}"
        what = f"such predictions mean little (epistemic above {deviation:.4g}, the deviation of {found.target})"
        total.notes.append(f"{rows} unlike the training rows: {what}")
    return total


def prediction_columns(model: Model, found: Any, task: str) -> Mapping[str, Column]:
    """The columns of a prediction, for some rows. What they are depends on what the model predicts."""
    if model.numeric:
        return _number_columns(found)
    labels = [model.labels[code] for code in found.labels.tolist()]
    classes = [model.labels[int(code)] for code in model.learner.classes(task)]
    columns = {"prediction": Column(np.array(labels, dtype=object))}
    columns |= {f"probability_{label}": Column(found.probabilities[:, i], 6) for i, label in enumerate(classes)}
    columns["entropy"] = Column(found.entropy, 6)
    columns["epistemic"] = Column(np.maximum(found.epistemic, 0), 6)
    if found.unfamiliar is not None:
        columns["unfamiliar"] = Column(found.unfamiliar, 3)
    if task == INFER:
        columns["task"] = Column(found.tasks.astype(object))
    return columns


def _number_columns(found: Numbers) -> dict[str, Column]:
    """The columns of predictions of numbers or counts."""
    low, high = found.interval(0.95)
    columns = {"prediction": found.mean, "std": found.std, "low_95": low, "high_95": high, "epistemic": found.epistemic}
    written = {name: Column(_rounded(np.asarray(values, dtype=float), found.std)) for name, values in columns.items()}
    if found.unfamiliar is not None:
        written["unfamiliar"] = Column(found.unfamiliar, 3)
    return written


def _rounded(values: Floats, std: Any) -> Floats:
    """Numbers with 7 significant digits, and at least 3 of those that their standard deviations have."""
    with np.errstate(divide="ignore", invalid="ignore"):
        more = np.ceil(np.log10(np.abs(values) / np.asarray(std, dtype=float))) + 3
    digits = np.clip(np.nan_to_num(more, nan=7, posinf=7, neginf=7), 7, 17).astype(int)
    pairs = zip(values.tolist(), digits.tolist(), strict=True)
    return np.array([float(f"{value:.{count}g}") for value, count in pairs])


def _beside(model: Model, source: Source, keys: Sequence[str] | None) -> list[str]:
    """The file's columns that are written beside the predictions: all, or the keys."""
    if source.images:
        if keys:
            raise EvclError("--key is for tables: predictions of images begin with the name of the file")
        return []
    for name in keys or ():
        if source.shapes.get(name) != ():
            has = ", ".join(repr(one) for one, shape in list(source.shapes.items())[:8] if shape == ())
            bad(source.path, f"there is no column {name!r} to use as a key; it has {has or 'only arrays'}")
    plain = [name for name, shape in source.shapes.items() if shape == ()]
    if keys is not None:
        return [name for name in plain if name in keys]
    read = {*model.encoder.names, model.target}
    return [name for name in plain if name in read or _readable(source, name)]


def _readable(source: Source, name: str) -> bool:
    """Whether a column that the model does not use holds values that can be written, such as text and numbers."""
    if source.untyped:
        return True
    try:
        next(iter(source.pieces([name])), None)
    except EvclError:
        return False
    return True
