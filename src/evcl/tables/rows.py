"""The targets of a file's rows: classes, numbers or counts."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal

import numpy as np
import torch
from torch import Tensor

from evcl._core.bounds import MOST_CLASSES
from evcl._core.errors import EvclError
from evcl._core.inputs import positions
from evcl.tables.fitting import EncoderFitting
from evcl.tables.image_folder import FOLDER
from evcl.tables.outside import Ends
from evcl.tables.source import MAX_EXACT, Bools, Floats, Piece, Source, Target, Values, as_number, bad, plural
from evcl.tables.texts import number_of
from evcl.tables.values import Fraction, Where, as_text, numbers_of

LIKELIHOODS: dict[Target, str] = {"class": "categorical", "number": "gaussian", "count": "poisson"}
TRUTH = {"true": True, "1": True, "false": False, "0": False}
DATES = (
    "the target holds dates, which cannot be predicted: choose another --target, or replace the dates by numbers, such "
    "as days; in a file of text, --kind class takes each date as a class"
)


def check_kind(kind: str) -> Target:
    """The kind of a target, or an error."""
    if kind not in LIKELIHOODS:
        raise EvclError(f"--kind must be {', '.join(list(LIKELIHOODS)[:-1])} or count, not {kind!r}")
    return kind


def check_there(source: Source, name: str, what: str) -> None:
    """Raise if a file has no such column. `what` it is: the target, for example."""
    if name not in source.shapes:
        bad(
            source.path, f"there is no column {name!r}, the {what}; it has {', '.join(map(repr, [*source.shapes][:8]))}"
        )


def check_classes(source: Source, target: str, count: int) -> None:
    """Raise if these are too many different labels."""
    if count > MOST_CLASSES:
        fix = "" if source.images else "; --kind number or --kind count learns a number"
        what = f"more than {MOST_CLASSES:,} different labels are too many classes{fix}"
        bad(source.path, f"column {target!r}", what)


def targets_of(source: Source, piece: Piece, column: str, kind: Target) -> Values:
    """The targets of a piece's rows [n]: labels as texts (None: missing), or numbers in float64 (NaN: missing)."""
    return _labels(source, piece, column) if kind == "class" else _numbers(source, piece, column, kind)


def present(targets: Values) -> Bools:
    """Which of these targets [n] are not missing."""
    if targets.dtype == object:
        return np.array([label is not None for label in targets], dtype=bool)
    return ~np.isnan(targets)


def _numbers(source: Source, piece: Piece, column: str, kind: Target) -> Floats:
    where, values = Where(source.path, piece, column), piece.columns[column]
    if values.dtype.kind in "OM" or values.ndim > 1:
        what = "dates" if values.dtype.kind == "M" else "an array" if values.ndim > 1 else f"{values[0]!r}"
        where.bad(0, f"the target is a number, not {what}")
    targets = numbers_of(values, where)
    wrong = (targets < 0) | (targets != np.round(targets)) if kind == "count" else np.zeros(len(targets), dtype=bool)
    wrong &= ~np.isnan(targets)
    if wrong.any():
        row = int(wrong.argmax())
        where.bad(row, f"{targets[row]:g} is no count: a whole number of at least 0 is expected")
    return targets


def _labels(source: Source, piece: Piece, column: str) -> Values:
    """1.0 is class 1, however a file spells it; a number with a fraction is an error."""
    where = Where(source.path, piece, column)
    if piece.columns[column].dtype.kind == "M":
        bad(source.path, f"column {column!r}", DATES)
    labels = np.empty(piece.rows, dtype=object)
    labels[:] = as_text(piece.columns[column], where)
    decimal = source.decimal(column)
    for row, label in enumerate(labels if source.untyped else ()):
        if label is None or (decimal or ".") not in label:
            continue
        plain = as_number(label)
        number = plain if decimal is None else number_of(label, decimal)  # $1,234.50 among numbers is one, too
        if number is None or math.isinf(number):
            continue
        exact = Decimal(label) if plain is not None and abs(number) >= MAX_EXACT else number
        if exact != int(exact):
            raise Fraction(source.path, piece.place(row), column, str(label))
        labels[row] = str(int(exact))
    return labels


def same_truth(labels: Sequence[str], known: Sequence[str]) -> dict[str, str]:
    """Where all labels so far are truth values (those of the first file, if none are known), maps each spelling of one
    among `labels` to the known one: true, TRUE and 1 are the class True.
    """
    so_far = known or labels
    if not all(label.lower() in TRUTH for label in so_far):
        return {}
    first = {TRUTH[label.lower()]: label for label in reversed(so_far)}
    return {label: first.get(TRUTH[label.lower()], label) for label in labels if label.lower() in TRUTH}


class Labelled:
    """Which rows of a file have a target. The others are left out."""

    def __init__(self) -> None:
        self._parts: list[Bools] = []
        self._why = ""  # what stands in the place of the first missing label

    def see(self, piece: Piece, there: Bools, target: str) -> Piece:
        """The rows of the next piece that have a label: those for which `there` [rows] is True."""
        self._parts.append(there)
        if not self._why and not there.all() and target in piece.cells:
            row = int(np.argmin(there))
            if text := piece.cells[target][row]:
                fix = "means a missing value; if it is a class here, write it in another way"
                self._why = f" ({piece.place(row)}: {text!r} {fix})"
        return piece.select(there)

    def pieces(self, source: Source, names: Collection[str]) -> Iterator[Piece]:
        """The file once more, without the rows that are left out."""
        there, start = np.concatenate(self._parts), 0
        for piece in source.pieces(names):
            mine = there[start : start + piece.rows]
            if len(mine) != piece.rows:
                bad(source.path, "it grew while it was being read")
            start += piece.rows
            if mine.any():
                yield piece.select(mine)
        if start != len(there):
            bad(source.path, "it shrank while it was being read")

    @property
    def note(self) -> str:
        """What to say of the rows that are left out; empty if there are none."""
        count = sum(int((~part).sum()) for part in self._parts)
        verb = "is" if count == 1 else "are"
        return f"{plural(count, 'row')} without a label {verb} left out{self._why}" if count else ""

    def check(self, source: Source, target: str) -> None:
        """Raise if no row is left."""
        if not sum(map(len, self._parts)):
            bad(source.path, "it holds no rows")
        if not any(part.any() for part in self._parts):
            bad(source.path, f"column {target!r}", f"every label is missing{self._why}; choose another --target")


@dataclass
class Rows:
    """The targets of a file's rows that have one, and what was found out about its columns meanwhile."""

    values: Tensor  # [N]: numbers in float64; of classes, the index of each label in `names`
    names: list[str]  # the distinct labels; none of numbers
    labelled: Labelled
    notes: list[str] = field(default_factory=list)  # what the user should know of the file,
    doubts: list[str] = field(default_factory=list)  # and should be told before it is learned
    ends: Mapping[str, Ends] = field(default_factory=dict)  # of columns whose numbers far outside are limited

    def targets(self, labels: Sequence[str]) -> Tensor:
        """[N]: numbers, or the index of each row's label in `labels`."""
        return positions(self.names, labels)[self.values] if self.names else self.values


def read_rows(
    source: Source, target: str | None, kind: Target, fitting: EncoderFitting | None = None, known: Sequence[str] = ()
) -> Rows:
    """Read a file's targets in one pass, and fit the encoder in the same pass. `known`: the labels learned so far."""
    own = FOLDER if source.images else str(target)
    if not source.images:
        check_there(source, own, "target")
    place: dict[str, int] = {}
    values: list[Values] = []
    labelled = Labelled()
    for piece in source.pieces([own] if fitting is None else [*fitting.names, own]):
        targets = targets_of(source, piece, own, kind)
        there = present(targets)
        if source.images and not there.all():
            bad(source.path, piece.place(int(np.argmin(there))), "the image is not in the folder of a class")
        kept = labelled.see(piece, there, own)
        if fitting is not None and kept.rows:
            fitting.see(kept)
        targets = targets[there]
        if kind == "class":
            targets = np.array([place.setdefault(label, len(place)) for label in targets], dtype=np.int64)
        values.append(targets)
        check_classes(source, own, len(place))
    labelled.check(source, own)
    y = torch.from_numpy(np.concatenate(values))
    same = same_truth(list(place), known)
    names = list(dict.fromkeys(same.get(name, name) for name in place))
    if len(names) < len(place):
        y = torch.tensor([names.index(same.get(name, name)) for name in place])[y]
    return Rows(y, names, labelled)
