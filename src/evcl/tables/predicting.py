"""The function behind `evcl predict`: every row of a file with its prediction beside it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from evcl._core.errors import BadExample, EvclError
from evcl._core.files import write_atomically
from evcl.learner import INFER, Numbers
from evcl.tables.asked import Predicting
from evcl.tables.commands import open_source
from evcl.tables.encoding import Encoding
from evcl.tables.image_folder import FOLDER
from evcl.tables.model import Model, load_model
from evcl.tables.output_file import STANDARD, Column, check_ending, writing
from evcl.tables.rows import present, same_truth, targets_of
from evcl.tables.source import Floats, Kind, Piece, Source, Target, Values, bad, plural


class Batch(NamedTuple):
    """Some rows that are predicted."""

    piece: Piece
    columns: Mapping[str, Column]  # what is written of the predictions
    given: Values  # the targets in the file (see `targets_of`); if it has none, all are missing
    # Of each row entropy or, of numbers, std and the ends of the interval; of some models epistemic and unfamiliar
    measures: Mapping[str, Floats]
    mean: Floats | None = None  # of numbers


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
    read: list[str] = field(default_factory=list)  # how the file was read
    notes: list[str] = field(default_factory=list)  # what the user should know of it

    def add(self, batch: Batch) -> None:
        """Count some rows. The means are sums until `end`."""
        self.rows += batch.piece.rows
        for name in ("entropy", "epistemic", "unfamiliar", "std"):
            if name in batch.measures:
                setattr(self, name, (getattr(self, name) or 0.0) + float(batch.measures[name].sum(dtype=float)))
        if batch.mean is None:
            self.labelled += int(present(batch.given).sum())
            self.right += int((np.asarray(batch.columns["prediction"].values) == batch.given).sum())
            return
        true = np.asarray(batch.given, dtype=float)
        there = present(true)
        self.labelled += int(there.sum())
        self.squares += float(np.square(true - batch.mean)[there].sum())
        self.inside += int(((batch.measures["low_95"] <= true) & (true <= batch.measures["high_95"])).sum())

    def end(self) -> None:
        for name in ("entropy", "epistemic", "unfamiliar", "std"):
            total = getattr(self, name)
            setattr(self, name, None if total is None else total / self.rows)
        self.squares /= max(1, self.labelled)


class Predictor:
    """Predicts the rows of one file: `columns` are those that the model learned from, and `numbers` those of them that
    hold numbers. `notes` say what the user should know.
    """

    def __init__(
        self, source: Source, target: str, kind: Target, kinds: Mapping[str, Kind], drop: Sequence[str]
    ) -> None:
        self.source, self.target, self.kind = source, target, kind
        self.columns = [name for name in kinds if name in source.shapes and name not in drop]
        self.numbers = [name for name in self.columns if kinds[name] == "number"]
        self.notes: list[str] = []

    def batches(self, names: Collection[str]) -> Iterator[Batch]:
        """The predictions, piece by piece. The pieces also have the columns `names`."""
        source = self.source
        there = source.images or self.target in source.shapes
        for piece in source.pieces({*self.columns, *([self.target] if there else []), *names}):
            given = targets_of(source, piece, self.target, self.kind) if there else np.full(piece.rows, None)
            try:
                yield self.predicted(piece, given)
            except BadExample as error:
                bad(source.path, piece.place(error.row), error.what)

    def predicted(self, piece: Piece, given: Values) -> Batch:
        """The predictions of some rows."""
        raise NotImplementedError

    def end(self) -> None:
        """All rows are predicted: complete the notes."""


def predict(model: Path, data: Path, out: Path, **options: Any) -> Predicted:
    """`predict_file` with the fields of `Predicting` as keywords."""
    return predict_file(model, data, out, Predicting(**options))


def predict_file(model: Path, data: Path, out: Path, asked: Predicting) -> Predicted:
    """Predict every row of a file, piece by piece, and write a CSV or Parquet file. `out` - is standard output.

    The file's own columns come first, in its order; those that hold arrays are left out. A text that a spreadsheet
    would take for a formula gets a quote before it in a CSV file.
    """
    check_ending(out)
    tabular = load_model(model)
    tabular.learner.to(asked.device)
    return write_predictions(_OfTasks(tabular, data, asked), model, out, asked)


def write_predictions(predictor: Predictor, model: Path, out: Path, asked: Predicting) -> Predicted:
    """Write the predictions of a file, each row beside its own columns."""
    source, total = predictor.source, Predicted()
    for other in (model, source.path):
        if out != STANDARD and other.exists() and out.exists() and out.samefile(other):
            raise EvclError(f"--out {out} would overwrite a file that is read")
    beside = _beside(predictor, asked.keys)

    def write(into: Path) -> None:
        with writing(out, into, asked.keep_formulas) as writer:
            for batch in predictor.batches(beside):
                if twice := [name for name in beside if name in batch.columns]:
                    fix = "--key chooses columns, --only-predictions leaves all out"
                    bad(source.path, f"it has a column {twice[0]!r}, and so have the predictions; {fix}")
                piece = batch.piece
                own = {name: Column(source.written(piece, name), number=name in predictor.numbers) for name in beside}
                place = {"file": Column([piece.place(i) for i in range(piece.rows)])} if source.images else {}
                writer.write({**place, **own, **batch.columns})
                total.add(batch)
        if not total.rows:
            bad(source.path, "it holds no rows")

    write(out) if out == STANDARD else write_atomically(out, write)
    total.end()
    predictor.end()
    total.read, total.notes = [] if source.told is None else [source.told], predictor.notes
    return total


def _beside(predictor: Predictor, keys: Sequence[str] | None) -> list[str]:
    """The file's columns that are written beside the predictions: all, or the keys."""
    source = predictor.source
    if source.images:
        if keys:
            raise EvclError("--key is for tables: predictions of images begin with the name of the file")
        return []
    plain = [name for name, shape in source.shapes.items() if shape == ()]
    for name in keys or ():
        if name not in plain:
            has = ", ".join(map(repr, [one for one in [*source.shapes][:8] if one in plain]))
            bad(source.path, f"there is no column {name!r} to use as a key; it has {has or 'only arrays'}")
    if keys is not None:
        return [name for name in plain if name in keys]
    read = {*predictor.columns, predictor.target}
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


class _OfTasks(Predictor):
    """Predictions of a model of `evcl learn`."""

    def __init__(self, model: Model, data: Path, asked: Predicting) -> None:
        source = open_source(data, model, dialect=asked.dialect)
        *_, notes = model.check(source, asked.drop, asked.unknown)
        target = FOLDER if source.images else str(model.target)
        super().__init__(source, target, model.kind, model.encoder.kinds(), ())
        self.model, self.notes = model, notes
        known = {*model.encoder.names, target}
        source.expect({name: "text" for name in source.shapes if name not in known})  # these are written as they are
        heads = model.learner.heads
        if asked.task is None and model.numeric and len(heads) > 1:
            raise EvclError(f"there are {len(heads)} heads: choose one with --task, {', '.join(heads)}")
        self.task = asked.task or (INFER if len(heads) > 1 else model.learner.tasks[0])
        self.encoding = Encoding(model.encoder, source, asked.unknown)
        self.deviation = max(float(line.get("deviation", math.inf)) for line in model.history)
        self.rows = self.lost = 0  # rows whose epistemic deviation is above that of the target

    def predicted(self, piece: Piece, given: Values) -> Batch:
        learner, encoded = self.model.learner, self.encoding(piece)
        answer = learner.predictions(encoded, self.task)
        if (near := self.encoding.near(encoded, piece)) is not encoded:
            answer = learner.predictions(near, self.task)._replace(unfamiliar=answer.unfamiliar)
        if self.model.numeric:
            return self._numbers(answer, given, piece)
        same = same_truth([label for label in set(given) if label is not None], self.model.labels)
        given[:] = [same.get(label, label) for label in given]
        return self._classes(answer, given, piece)

    def _classes(self, found: Any, given: Values, piece: Piece) -> Batch:
        model = self.model
        labels = [model.labels[code] for code in found.labels.tolist()]
        classes = [model.labels[int(code)] for code in model.learner.classes(self.task)]
        columns = {"prediction": Column(np.array(labels, dtype=object))}
        columns |= {f"probability_{label}": Column(found.probabilities[:, i], 6) for i, label in enumerate(classes)}
        columns["entropy"] = Column(found.entropy, 6)
        columns["epistemic"] = Column(np.maximum(found.epistemic, 0), 6)
        measures = {"entropy": found.entropy, "epistemic": found.epistemic}
        if found.unfamiliar is not None:
            columns["unfamiliar"], measures["unfamiliar"] = Column(found.unfamiliar, 3), found.unfamiliar
        if self.task == INFER:
            columns["task"] = Column(found.tasks.astype(object))
        return Batch(piece, columns, given, measures)

    def _numbers(self, found: Numbers, given: Values, piece: Piece) -> Batch:
        low, high = found.interval(0.95)
        measures = {"std": found.std, "low_95": low, "high_95": high, "epistemic": found.epistemic}
        values = {"prediction": found.mean, **measures}
        columns = {name: Column(_rounded(np.asarray(some, dtype=float), found.std)) for name, some in values.items()}
        if found.unfamiliar is not None:
            columns["unfamiliar"], measures["unfamiliar"] = Column(found.unfamiliar, 3), found.unfamiliar
        self.rows += piece.rows
        self.lost += int((found.epistemic > self.deviation).sum())
        return Batch(piece, columns, given, measures, found.mean)

    def end(self) -> None:
        self.notes += self.encoding.notes
        if self.lost:
            rows = f"{self.lost:,} of {plural(self.rows, 'row')} {'is' if self.lost == 1 else 'are'}"
            above = f"epistemic above {self.deviation:.4g}, the deviation of {self.target}"
            self.notes.append(f"{rows} unlike the training rows: such predictions mean little ({above})")


def _rounded(values: Floats, std: Any) -> Floats:
    """Numbers with 7 significant digits, and at least 3 of those that their standard deviations have."""
    with np.errstate(divide="ignore", invalid="ignore"):
        more = np.ceil(np.log10(np.abs(values) / np.asarray(std, dtype=float))) + 3
    digits = np.clip(np.nan_to_num(more, nan=7, posinf=7, neginf=7), 7, 17).astype(int)
    pairs = zip(values.tolist(), digits.tolist(), strict=True)
    return np.array([float(f"{value:.{count}g}") for value, count in pairs])
