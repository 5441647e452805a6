"""Rows of a table as inputs, while they come: nothing is known of later rows, and what is known fits a fixed size.

A number is an input, which `Stream` standardises; a missing one is the mean of the rows that have come so far. A date
becomes points on circles: the year, the week, the day. Everything that is not known in advance has an input of its own
in a pool of spare inputs: each text of a category, the missing values of a column, a column that comes later. When the
pool is full, further ones share its inputs (the hashing trick), so that the network never has to grow.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evcl._core.bounds import MOST_INPUTS
from evcl._core.errors import EvclError
from evcl.tables.source import Floats, Json, Kind, Piece, Values
from evcl.tables.values import CYCLES, Moments, Where, as_text, circles, numbers_of, seconds_of

SPARE, PER_TEXT = 4, 16  # spare inputs: for anything, and for each column of texts
MOST_SPARE = 512
FARTHEST, KNOWN = 10.0, 30  # a number more deviations than this from the mean counts as far outside, after some rows
LARGEST = 1e30  # a larger number counts as this, so that its square is finite


class Column(Moments):
    """A column, the place of its first input, and of a number what its values were so far."""

    def __init__(self, kind: Kind, place: int, shape: tuple[int, ...] = ()) -> None:
        super().__init__((math.prod(shape),))
        self.kind, self.place, self.shape = kind, place, shape
        self.inputs = {"number": math.prod(shape), "date": 2 * len(CYCLES), "text": 0}[kind]

    def filled(self, numbers: Floats, learn: bool = True) -> Floats:
        """Numbers [n, inputs], where a missing one, NaN, is the mean so far. One that is far outside is brought nearer,
        so that a broken sensor cannot spoil the scale of a column for long.
        """
        if (self.count >= KNOWN).all():
            reach = FARTHEST * np.sqrt(self.squares / self.count)
            numbers = np.where(reach > 0, np.clip(numbers, self.mean - reach, self.mean + reach), numbers)
        numbers = np.clip(numbers, -LARGEST, LARGEST)
        there = self.see(numbers) if learn else ~np.isnan(numbers)
        return np.where(there, numbers, self.mean)


class RowEncoder:
    """Encodes columns of rows as inputs [n, inputs]; the number of inputs is fixed by the first rows.

    `kinds` says what each column holds; `shapes` the shape of its values, () if it is not given.
    """

    def __init__(self, kinds: Mapping[str, Kind], shapes: Mapping[str, tuple[int, ...]] = {}) -> None:
        self.columns: dict[str, Column] = {}
        self._first = 0  # of the spare inputs
        for name, kind in kinds.items():
            if (shape := shapes.get(name, ())) and kind != "number":
                raise EvclError(f"column {name!r} holds arrays, but not of numbers")
            self.columns[name] = Column(kind, self._first, shape)
            self._first += self.columns[name].inputs
        self._spare = min(SPARE + PER_TEXT * sum(kind == "text" for kind in kinds.values()), MOST_SPARE)
        self._slots: dict[tuple[str, str | None], int] = {}  # column and text -> place; None: missing; "": the column
        if not self.columns:
            raise EvclError("there is no column to learn from")
        if self.inputs > MOST_INPUTS:
            raise EvclError(f"{self.inputs:,} inputs to the network, but only 1 to {MOST_INPUTS:,} are possible")

    @property
    def inputs(self) -> int:
        """The number of inputs: those of the columns, and spare ones."""
        return self._first + self._spare

    @property
    def inputs_of(self) -> list[str]:
        """The column of each input, such as "sky" or, of a category, "sky=clear"; spare ones have an empty name."""
        found = [""] * self.inputs
        for name, column in self.columns.items():
            found[column.place : column.place + column.inputs] = [name] * column.inputs
        for (name, text), place in self._slots.items():
            found[place] = name if text == "" else f"{name} missing" if text is None else f"{name}={text}"
        return found

    def kinds(self) -> dict[str, Kind]:
        """What each column holds."""
        return {name: column.kind for name, column in self.columns.items()}

    def encode(self, piece: Piece, path: Path, learn: bool = True) -> Floats:
        """The inputs of the rows of a piece. A column that is not there is missing in each of them. If `learn` is
        False, the encoder stays as it is, and what it does not know has no input.
        """
        out = np.zeros((piece.rows, self.inputs))
        for name, values in piece.columns.items():
            column = self.columns.get(name) or (self._later(name, values) if learn else None)
            if column is None:
                continue
            where, into = Where(path, piece, name), out[:, column.place : column.place + column.inputs]
            if column.kind == "text":
                for row, text in enumerate(as_text(values, where)):
                    out[row, self._slot(name, text, learn)] = 1.0
                continue
            numbers = numbers_of(values, where) if column.kind == "number" else seconds_of(values, where)
            numbers = numbers.reshape(piece.rows, -1)
            absent = np.isnan(numbers).all(1)
            if column.kind == "number":
                into[:] = column.filled(numbers, learn)
            else:
                for i, points in enumerate(circles(np.where(absent, 0.0, numbers[:, 0]), CYCLES)):
                    into[:, i] = np.where(absent, 0.0, points)
            if absent.any():
                out[absent, self._slot(name, None, learn)] = 1.0
        for name, column in self.columns.items():
            if name not in piece.columns:
                if column.kind == "number":
                    out[:, column.place : column.place + column.inputs] = column.mean
                out[:, self._slot(name, None, learn)] = 1.0
        return out

    def _slot(self, name: str, text: str | None, learn: bool) -> slice:
        """The input of something that was not known in advance: its own, or a shared one if all are taken. No input if
        `learn` is False, and there is none yet.
        """
        place = self._slots.get((name, text))
        if place is None and len(self._slots) >= self._spare:
            place = self._first + zlib.crc32(f"{name}={text}".encode()) % self._spare
        elif place is None and not learn:
            return slice(0)
        elif place is None:
            place = self._slots[name, text] = self._first + len(self._slots)
        return slice(place, place + 1)

    def _later(self, name: str, values: Values) -> Column | None:
        """A column that comes later: its own input if one is left. Dates, and numbers without an input, are ignored."""
        if values.dtype == object:
            self.columns[name] = Column("text", self._first)
        elif values.ndim > 1 or values.dtype.kind == "M" or len(self._slots) >= self._spare:
            return None
        else:
            self.columns[name] = Column("number", self._slot(name, "", True).start)
        return self.columns[name]

    def described(self) -> Json:
        """Everything it knows, for JSON."""
        columns = [
            [name, one.kind, one.place, list(one.shape), *(a.tolist() for a in (one.count, one.mean, one.squares))]
            for name, one in self.columns.items()
        ]
        slots = [[name, text, place] for (name, text), place in self._slots.items()]
        return {"columns": columns, "first": self._first, "spare": self._spare, "slots": slots}

    @classmethod
    def rebuilt(cls, saved: Json) -> RowEncoder:
        """The encoder from its description. Raises EvclError if this is none."""
        try:
            found = cls({"": "number"})
            found.restore(saved)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise EvclError(f"the description of its columns is damaged ({error})") from error
        return found

    def restore(self, saved: Json) -> None:
        """Take over a description."""
        self.columns, self._first, self._spare = {}, int(saved["first"]), int(saved["spare"])
        for name, kind, place, shape, *moments in saved["columns"]:
            one = Column(kind, int(place), tuple(map(int, shape)))
            arrays = [np.array(values, dtype=np.float64) for values in moments]
            if not all(a.shape == one.mean.shape and np.isfinite(a).all() for a in arrays):
                raise ValueError(f"column {name!r}")
            one.count, one.mean, one.squares = arrays
            if not 0 <= one.place <= self.inputs - one.inputs:
                raise ValueError(f"column {name!r}")
            self.columns[str(name)] = one
        self._slots = {
            (str(name), None if text is None else str(text)): int(place) for name, text, place in saved["slots"]
        }
        if list(self._slots.values()) != list(range(self._first, self._first + len(self._slots))):
            raise ValueError("its spare inputs")
        if not (self.columns and len(self._slots) <= self._spare <= MOST_SPARE and self._first >= 0):
            raise ValueError("its sizes")
        if self.inputs > MOST_INPUTS:
            raise ValueError("it has too many inputs")


def kind_of(values: Values) -> Kind:
    """What the values of a column are."""
    return "text" if values.dtype == object else "date" if values.dtype.kind == "M" else "number"


def piece_of(rows: Sequence[Json]) -> Piece:
    """Rows that are dicts, as columns: numbers, dates (datetime) or texts. A key that a row lacks, or that is None, is
    missing.
    """
    names = dict.fromkeys(name for row in rows for name, value in row.items() if value is not None)
    columns = {str(name): _values([row.get(name) for row in rows]) for name in names}
    return Piece(columns, lambda i: f"row {i + 1}", len(rows))


def _values(found: Sequence[Any]) -> Values:
    there = [value for value in found if value is not None]
    if all(isinstance(value, (bool, int, float, np.number, np.bool_)) for value in there):
        return np.array([math.nan if value is None else float(value) for value in found])
    if all(hasattr(value, "isoformat") for value in there):
        return np.array(["NaT" if value is None else value.isoformat()[:19] for value in found], dtype="datetime64[s]")
    made = np.empty(len(found), dtype=object)
    made[:] = [None if value is None else str(value) for value in found]
    return made
