"""Rows of a table as inputs, while they come: nothing is known of later rows, and what is known fits a fixed size.

A number is an input, which `Stream` standardises; a missing one is the mean of the rows that have come so far. A date
becomes points on circles: the year, the week, the day. Everything that is not known in advance has an input of its own
in a pool of spare inputs: each text of a category, the missing values of a column, a column that comes later. When the
pool is full, further ones share its inputs (the hashing trick), so that the network never has to grow.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evcl._core.bounds import MOST_INPUTS
from evcl._core.errors import EvclError
from evcl.tables.encoding import CYCLES
from evcl.tables.source import Floats, Kind, Piece, Source, Values, bad
from evcl.tables.values import Where, as_text, numbers_of, seconds_of

Inputs = NDArray[np.float64]
SPARE, PER_TEXT = 4, 16  # spare inputs: for anything, and for each column of texts
MOST_SPARE = 512
FARTHEST, KNOWN = 10.0, 30  # a number more deviations than this from the mean counts as far outside, after some rows
LARGEST = 1e30  # a larger number counts as this, so that its square is finite


@dataclass
class Column:
    """A column, the place of its first input, and of a number what its values were so far."""

    kind: Kind
    place: int
    shape: tuple[int, ...] = ()
    count: Floats = field(default_factory=lambda: np.zeros(1))
    mean: Floats = field(default_factory=lambda: np.zeros(1))
    squares: Floats = field(default_factory=lambda: np.zeros(1))  # summed squared deviations

    @property
    def inputs(self) -> int:
        return {"number": math.prod(self.shape), "date": 2 * len(CYCLES), "text": 0}[self.kind]

    def filled(self, numbers: Floats, learn: bool = True) -> Floats:
        """Numbers [n, inputs], where a missing one, NaN, is the mean so far. One that is far outside is brought nearer,
        so that a broken sensor cannot spoil the scale of a column for long.
        """
        if (self.count >= KNOWN).all():
            reach = FARTHEST * np.sqrt(self.squares / self.count)
            numbers = np.where(reach > 0, np.clip(numbers, self.mean - reach, self.mean + reach), numbers)
        numbers = np.clip(numbers, -LARGEST, LARGEST)
        there = ~np.isnan(numbers)
        if not learn:
            return np.where(there, numbers, self.mean)
        count = there.sum(0)
        mean = np.where(there, numbers, 0.0).sum(0) / np.maximum(count, 1)
        squares = (np.where(there, numbers - mean, 0.0) ** 2).sum(0)
        total, apart = self.count + count, mean - self.mean
        self.squares = self.squares + squares + apart**2 * self.count * count / np.maximum(total, 1)
        self.mean, self.count = self.mean + apart * count / np.maximum(total, 1), total
        return np.where(there, numbers, self.mean)


class RowEncoder:
    """Encodes columns of rows as inputs [n, inputs]; the number of inputs is fixed by the first rows.

    `kinds` says what each column holds; `shapes` the shape of its values, () if it is not given.
    """

    def __init__(self, kinds: Mapping[str, Kind], shapes: Mapping[str, tuple[int, ...]] | None = None) -> None:
        self.columns: dict[str, Column] = {}
        start = 0
        for name, kind in kinds.items():
            shape = (shapes or {}).get(name, ())
            if shape and kind != "number":
                raise EvclError(f"column {name!r} holds arrays, but not of numbers")
            column = self._column(kind, start, shape)
            self.columns[name], start = column, start + column.inputs
        texts = sum(kind == "text" for kind in kinds.values())
        self._first, self._spare = start, min(SPARE + PER_TEXT * texts, MOST_SPARE)
        self._slots: dict[tuple[str, str | None], int] = {}  # column and text -> place; None: missing; "": the column
        if not self.columns:
            raise EvclError("there is no column to learn from")
        if self.inputs > MOST_INPUTS:
            raise EvclError(f"{self.inputs:,} inputs to the network, but only 1 to {MOST_INPUTS:,} are possible")

    @staticmethod
    def _column(kind: Kind, place: int, shape: tuple[int, ...] = ()) -> Column:
        size = math.prod(shape)
        return Column(kind, place, shape, np.zeros(size), np.zeros(size), np.zeros(size))

    @property
    def inputs(self) -> int:
        """The number of inputs: those of the columns, and spare ones."""
        return self._first + self._spare

    def names(self) -> list[str]:
        """The column of each input, such as "sky" or, of a category, "sky=clear"; spare ones have an empty name."""
        found = [""] * self.inputs
        for name, column in self.columns.items():
            found[column.place : column.place + column.inputs] = [name] * column.inputs
        for (name, text), place in self._slots.items():
            found[place] = name if text == "" else f"{name} missing" if text is None else f"{name}={text}"
        return found

    def encode(self, columns: Mapping[str, Values], where: Piece, source: Any, learn: bool = True) -> Inputs:
        """The inputs of the rows of these columns. A column that is not there is missing in each of them. If `learn` is
        False, the encoder stays as it is, and what it does not know has no input.
        """
        out = np.zeros((where.rows, self.inputs))
        for name, values in columns.items():
            at = Where(source, where, name)
            column = self.columns.get(name)
            if column is None and learn:
                column = self._later(name, values)
            if column is None:
                continue
            if column.kind == "number":
                numbers = numbers_of(values, at).reshape(where.rows, -1)
                out[:, column.place : column.place + column.inputs] = column.filled(numbers, learn)
                absent = np.isnan(numbers).all(1)
            elif column.kind == "date":
                seconds = seconds_of(values, at)
                absent = np.isnan(seconds)
                for i, length in enumerate(CYCLES.values()):
                    angle = 2 * np.pi * (np.where(absent, 0.0, seconds) % length) / length
                    out[:, column.place + 2 * i] = np.where(absent, 0.0, np.sin(angle))
                    out[:, column.place + 2 * i + 1] = np.where(absent, 0.0, np.cos(angle))
            else:
                absent = np.zeros(where.rows, dtype=bool)
                for row, text in enumerate(as_text(values, at)):
                    out[row, self._slot(name, text, learn)] = 1.0
            if absent.any():
                out[absent, self._slot(name, None, learn)] = 1.0
        for name in [name for name in self.columns if name not in columns]:
            column = self.columns[name]
            if column.kind == "number":
                out[:, column.place : column.place + column.inputs] = column.mean
            out[:, self._slot(name, None, learn)] = 1.0
        return out

    def _slot(self, name: str, text: str | None, learn: bool = True) -> slice:
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
            self.columns[name] = self._column("text", self._first)
        elif values.ndim > 1 or values.dtype.kind == "M" or len(self._slots) >= self._spare:
            return None
        else:
            self.columns[name] = self._column("number", self._slot(name, "").start)
        return self.columns[name]

    # --- saving ------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything it knows, for JSON."""
        columns = [
            [name, one.kind, one.place, list(one.shape), *(a.tolist() for a in (one.count, one.mean, one.squares))]
            for name, one in self.columns.items()
        ]
        slots = [[name, text, place] for (name, text), place in self._slots.items()]
        return {"columns": columns, "first": self._first, "spare": self._spare, "slots": slots}

    @staticmethod
    def restored(state: Mapping[str, Any]) -> RowEncoder:
        """The encoder whose state this is. Raises EvclError if it is none."""
        try:
            found = RowEncoder({"": "number"})
            found.columns = {}
            found._first, found._spare = int(state["first"]), int(state["spare"])
            for name, kind, place, shape, *moments in state["columns"]:
                one = RowEncoder._column(kind, int(place), tuple(int(n) for n in shape))
                arrays = [np.array(values, dtype=np.float64) for values in moments]
                fits = len(arrays) == 3 and all(a.shape == one.mean.shape and np.isfinite(a).all() for a in arrays)
                if (
                    not fits
                    or kind not in ("number", "date", "text")
                    or not 0 <= one.place <= found.inputs - one.inputs
                ):
                    raise ValueError(f"column {name!r}")
                one.count, one.mean, one.squares = arrays
                found.columns[str(name)] = one
            for name, text, place in state["slots"]:
                found._slots[str(name), None if text is None else str(text)] = int(place)
            if list(found._slots.values()) != list(range(found._first, found._first + len(found._slots))):
                raise ValueError("its spare inputs")
            if not (found.columns and 0 <= len(found._slots) <= found._spare <= MOST_SPARE and found._first >= 0):
                raise ValueError("its sizes")
            if found.inputs > MOST_INPUTS:
                raise ValueError("it has too many inputs")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise EvclError(f"the description of its columns is damaged ({error})") from error
        return found


# --- rows that are no file -------------------------------------------------------------------------------------------


def columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Values]:
    """Rows that are dicts, as columns: numbers, dates (datetime) or texts. A key that a row lacks, or that is None, is
    missing.
    """
    names = dict.fromkeys(name for row in rows for name, value in row.items() if value is not None)
    return {str(name): _values([row.get(name) for row in rows]) for name in names}


def kind_of(values: Values) -> Kind:
    """What the values of a column are."""
    return "text" if values.dtype == object else "date" if values.dtype.kind == "M" else "number"


def _values(found: Sequence[Any]) -> Values:
    there = [value for value in found if value is not None]
    if all(isinstance(value, (bool, int, float, np.number, np.bool_)) for value in there):
        return np.array([math.nan if value is None else float(value) for value in found])
    if all(hasattr(value, "isoformat") for value in there):
        return np.array(["NaT" if value is None else value.isoformat()[:19] for value in found], dtype="datetime64[s]")
    made = np.empty(len(found), dtype=object)
    made[:] = [None if value is None else str(value) for value in found]
    return made


def dict_piece(rows: int) -> Piece:
    """Where rows are that come from no file, for error messages."""
    return Piece({}, lambda i: f"row {i + 1}", rows)


# --- rows of files ---------------------------------------------------------------------------------------------------


def usable(source: Source, target: str, drop: Collection[str] = ()) -> list[str]:
    """The columns of a file that are learned from: all, except the target and those that are dropped."""
    if target not in source.shapes:
        has = ", ".join(map(repr, list(source.shapes)[:8]))
        bad(source.path, f"there is no column {target!r}, the target; it has {has}")
    for name in drop:
        if name not in source.shapes:
            bad(source.path, f"there is no column {name!r} to drop")
    return [name for name in source.shapes if name != target and name not in drop]


def batches(pieces: Iterator[Piece], size: Callable[[int], int], skip: int = 0) -> Iterator[Piece]:
    """The same rows from the row `skip` on, in batches whose sizes do not depend on those of the pieces: `size(rows)`
    is that of the next one, after this many rows. The last batch of a file with the same columns may be smaller.
    """
    kept: list[tuple[Piece, int, int]] = []  # parts of the next batch: piece, first row, end
    count, done = 0, 0
    for piece in pieces:
        start = min(skip, piece.rows)
        skip -= start
        if kept and kept[0][0].columns.keys() != piece.columns.keys():  # a file with other columns
            yield _joined(kept)
            kept, count, done = [], 0, done + count
        while start < piece.rows:
            wanted = size(done)
            end = min(piece.rows, start + wanted - count)
            kept.append((piece, start, end))
            count, start = count + end - start, end
            if count == wanted:
                yield _joined(kept)
                kept, count, done = [], 0, done + count
    if kept:
        yield _joined(kept)


def _joined(parts: Sequence[tuple[Piece, int, int]]) -> Piece:
    names = parts[0][0].columns
    columns = {name: _concatenated([piece.columns[name][start:end] for piece, start, end in parts]) for name in names}
    places = [(piece, row) for piece, start, end in parts for row in range(start, end)]

    def place(i: int) -> str:
        piece, row = places[i]
        return piece.place(row)

    return Piece(columns, place, len(places))


def _concatenated(arrays: Sequence[Values]) -> Values:
    if len(arrays) == 1:
        return arrays[0]
    if any(np.ma.isMaskedArray(a) for a in arrays):
        joined: Values = np.ma.concatenate(arrays)  # type: ignore[no-untyped-call]
        return joined
    return np.concatenate(arrays)
