"""The interface of readers: they list a file's columns, then read their values, a few thousand rows at a time.

A reader knows nothing about the model. Every error names the file and the place in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from evcl._core.errors import EvclError

MAX_EXACT = 2**53  # float64 represents every integer up to this exactly
INEXACT = "is an integer that float64 cannot represent exactly; --drop leaves the column out, --category reads text"

# Numbers [n, ...], kept as integers if they are whole (NaN or masked: missing); text [n] as objects (None: missing);
# or dates [n] as datetime64 (NaT: missing).
Values = NDArray[Any]
Json = dict[str, Any]  # what a file holds as text
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Kind = Literal["number", "date", "text"]  # what a column holds
Target = Literal["class", "number", "count"]  # what a target is
Unknown = Literal["learn", "missing", "error"]  # what becomes of columns and categories that a model does not know


@dataclass(frozen=True)
class Dialect:
    """What the user says of a file. None: decided from the file itself."""

    separator: str | None = None
    decimal: str | None = None  # "." or ","
    missing: tuple[str, ...] = ()  # texts or numbers that mean a missing value, beside the usual ones
    query: str | None = None  # SQL, for a database
    # How earlier files were read, where this one could be read in two ways: decimal sign, day first
    usual: tuple[str | None, bool | None] = (None, None)

    def also(self, missing: Sequence[str]) -> Dialect:
        """With more texts that mean a missing value: those that a model has learned."""
        return replace(self, missing=tuple(dict.fromkeys((*missing, *self.missing))))


@dataclass(frozen=True)
class Piece:
    """Some rows of a file. `place(i)` says where in the file row i of the piece is: "line 7"."""

    columns: Mapping[str, Values]
    place: Callable[[int], str]
    rows: int
    cells: Mapping[str, Sequence[str]] = field(default_factory=dict)  # the texts that they were read from, if any

    def select(self, rows: Bools) -> Piece:
        """Only these rows, bool [rows]."""
        return self if rows.all() else self.take(np.flatnonzero(rows))

    def take(self, places: NDArray[np.int64]) -> Piece:
        """The rows at these places, in this order."""
        columns = {name: values[places] for name, values in self.columns.items()}
        cells = {name: [texts[i] for i in places.tolist()] for name, texts in self.cells.items()}
        return Piece(columns, lambda i: self.place(int(places[i])), len(places), cells)


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


class Source:
    """A file that can be read from the beginning any number of times. What is here is for columns that have types; what
    cells of text mean is decided from the file: see survey.py.
    """

    untyped = False  # whether its cells are text
    images = False  # whether it is an image folder; the target is then the name of an image's subfolder
    shapes: Mapping[str, tuple[int, ...]]  # each column -> the shape of its values: () for a number or text

    def __init__(self, path: Path, dialect: Dialect | None = None) -> None:
        self.path, self.dialect = path, dialect or Dialect()

    @property
    def told(self) -> str | None:
        """One line that says how the file was read; None if there is nothing to say."""
        return None

    @property
    def usual(self) -> tuple[str | None, bool | None]:
        """Its decimal sign, and whether the day comes first in its dates, as far as it tells: see `Dialect`."""
        return None, None

    def expect(self, kinds: Mapping[str, Kind], target: str | None = None) -> None:
        """Read these columns as numbers, dates or text, whatever their cells look like. `target` is predicted."""

    def decimal(self, name: str) -> str | None:
        """The decimal sign of a column of text whose cells are numbers, whatever they are read as; None for others."""
        return None

    def written(self, piece: Piece, name: str) -> Values | Sequence[str | None]:
        """A column as it is written beside predictions: as in the file, except for decimal commas and the like."""
        return piece.columns[name]

    def pieces(self, names: Collection[str]) -> Iterator[Piece]:
        """Yield the rows of these columns, in order."""
        done = 0
        for columns, rows in self.blocks(names):
            marked = {name: with_missing(values, self.dialect.missing) for name, values in columns.items()}
            yield Piece(marked, lambda i, first=done: f"row {first + i + 1}", rows)  # type: ignore[misc]
            done += rows

    def blocks(self, names: Collection[str]) -> Iterator[tuple[dict[str, Values], int]]:
        """The values of these columns, some rows at a time, and how many rows these are."""
        raise NotImplementedError


def with_missing(values: Values, missing: Sequence[str]) -> Values:
    """Typed values, where those that the user calls missing are."""
    if not missing or values.dtype.kind == "M":
        return values
    if values.dtype == object:
        marked = values.copy()
        marked[[value in missing for value in values]] = None
        return marked
    never = [number for number in map(as_number, missing) if number is not None]
    there = np.isin(np.ma.getdata(values), never)
    if not there.any():
        return values
    if values.dtype.kind == "f":
        return np.where(there, np.nan, values)
    return np.ma.masked_array(np.ma.getdata(values), there | np.ma.getmaskarray(values))


def bad(path: Path, *what: str) -> NoReturn:
    """Raise an error about a file: the place in it, then what is wrong."""
    raise EvclError(f"{path}: {': '.join(what)}")


def line_of(error: Exception) -> str:
    """The first line of what an error says."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def plural(count: int, what: str) -> str:
    """The number of things, in words: 1 row, 2 rows, 3 classes, 4 categories."""
    if count != 1:
        what = f"{what}es" if what.endswith("s") else f"{what[:-1]}ies" if what.endswith("y") else f"{what}s"
    return f"{count:,} {what}"


def listed(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def absent(gone: Sequence[str], new: Sequence[str] = ()) -> list[str]:
    """What to say of the model's columns that a file lacks. `new`: those that the model does not know."""
    none, their = ("there is no column", "its") if len(gone) == 1 else ("there are no columns", "their")
    more = f" (new: {listed(new)})" if new else ""
    bare = {"".join(name.split()).lower(): name for name in new}  # without case and blanks
    alike = [(bare[key], name) for name in gone if (key := "".join(name.split()).lower()) in bare]
    notes = [f"{none} {listed(gone)}{more}: {their} values count as missing"]
    if alike:
        pairs = listed([f"{one!r} is not {name!r}" for one, name in alike])
        notes.append(f"{pairs}, although only case or blanks differ: if it should be, rename it in the file")
    return notes


def as_number(text: str) -> float | None:
    """The number that a text represents, or None if it is not one; "1_000" and spellings of NaN count as none."""
    try:
        number = float(text)
    except ValueError:
        return None
    return None if math.isnan(number) or "_" in text else number
