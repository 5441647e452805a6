"""Files whose cells are text: what each column holds is decided on all its values, before the first one is used.

A column holds numbers if all its values are numbers or missing, dates if all are dates or missing, and otherwise text.
If most are numbers and some are words, the first word is an error. Each file is surveyed by itself, so a later one may
use another decimal sign, another form of dates and other marks for missing values. What a model's columns are stays:
`expect` says so.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import NoReturn

import numpy as np

from evcl._core.bounds import MOST_COLUMNS, MOST_TEXT
from evcl.tables.arrow_csv import ArrowCells
from evcl.tables.source import INEXACT, MAX_EXACT, Dialect, Floats, Kind, Piece, Source, Values, as_number, bad, listed
from evcl.tables.texts import (
    ABSENT,
    COMMA,
    DATE,
    DAY_FIRST,
    IS_ABSENT,
    IS_MARK,
    IS_WORD,
    MARKS,
    MISSING,
    MONTH_FIRST,
    NUMBER,
    POINT,
    date_of,
    grouped,
    meanings,
    number_of,
)

SEPARATORS = {";": "semicolons", "\t": "tabs", " ": "spaces"}  # their names, where they have one
MAX_TEXTS = 1000  # at most this many different texts of a column are remembered, as examples
POINT_ALONE = r"\.(\d{0,2}($|\D)|\d{4})|(^|\D)0\d*\.|\d{4}\."  # a point that groups no thousands: .5, 0.125, 1234.125


@dataclass(frozen=True)
class Reading:
    """How the texts of one column are read."""

    kind: Kind
    decimal: str = "."
    day_first: bool = False
    missing: frozenset[str] = ABSENT  # texts that mean a missing value in this column
    never: tuple[float, ...] = ()  # numbers that do, however they are written
    target: bool = False

    def values(self, cells: Sequence[str], path: Path, piece: Piece, column: str) -> Values:
        if self.kind == "text":
            values = np.empty(len(cells), dtype=object)
            values[:] = [None if cell in self.missing else cell for cell in cells]
            return values
        if self.kind == "number":
            plain = plain_numbers(cells, self.missing) if self.decimal == "." else None
            values = self._numbers(cells, path, piece, column) if plain is None else plain
            if self.never:
                values[np.isin(values, self.never)] = np.nan
            return values
        dates = [None if c in self.missing else date_of(c, self.day_first) for c in cells]
        for row, (cell, date) in enumerate(zip(cells, dates, strict=True)):
            if date is None and cell not in self.missing:
                self._wrong(cell, "a date", "holds dates", path, piece.place(row), column)
        return np.array(["NaT" if date is None else date for date in dates], dtype="datetime64[s]")

    def _numbers(self, cells: Sequence[str], path: Path, piece: Piece, column: str) -> Floats:
        numbers = np.empty(len(cells))
        for row, text in enumerate(cells):
            number = np.nan if text in self.missing else number_of(text, self.decimal)
            if number is None:
                self._wrong(text, "a number", "is numeric", path, piece.place(row), column)
            if MAX_EXACT <= abs(number) < np.inf and text.lstrip("+-").isdecimal() and int(text) != number:
                bad(path, f"{piece.place(row)}, column {column!r}", f"{text} {INEXACT}")
            numbers[row] = number
        return numbers

    def _wrong(self, text: str, what: str, kind: str, path: Path, place: str, column: str) -> NoReturn:
        if self.target:
            which, fix = "the target", "leave the row out, or create the model with --kind class"
        else:
            which, fix = "the column", f"create the model with --category {quote(column)}"
            if self.kind != "date" or not any(c.isdigit() for c in text):  # 2024-13-45 means no missing value
                fix = f"use --missing {text!r}, or {fix}"
        bad(path, f"{place}, column {column!r}", f"{text!r} is not {what}, but {which} {kind}: correct it, or {fix}")


def plain_numbers(cells: Sequence[str], missing: frozenset[str]) -> Floats | None:
    """Convert texts to numbers, all at once. None if a text is not a number, or must be checked on its own."""
    if isinstance(cells, ArrowCells):
        return cells.numbers(missing)
    texts = cells if missing.isdisjoint(cells) else ["nan" if cell in missing else cell for cell in cells]
    try:
        numbers = np.fromiter(map(float, texts), np.float64, len(texts))
    except ValueError:
        return None
    odd = "_" in "".join(texts) or np.isnan(numbers).sum() > texts.count("nan") or (np.abs(numbers) >= MAX_EXACT).any()
    return None if odd else numbers


def _has(cells: Sequence[str], pattern: str) -> bool:
    """Whether a cell matches a pattern."""
    if isinstance(cells, ArrowCells):
        return cells.has(pattern)
    return re.search(pattern, "\n".join(cells), re.MULTILINE) is not None


class _Column:
    """What the values of one column were so far."""

    def __init__(self, missing: Collection[str]) -> None:
        self._given = frozenset(missing)
        self._known = ABSENT | MARKS | self._given  # texts that may mean a missing value, as far as they have come
        self.counts: Counter[int] = Counter()  # number of values, by what they can mean
        self.tokens: dict[str, None] = {}  # those of `_known` that are in the column
        self.shown: dict[str, None] = {}  # some of the other texts

    def see(self, cells: Sequence[str]) -> None:
        numbers = plain_numbers(cells, self._known)
        if numbers is not None and not (absent := np.isnan(numbers)).all():
            empty = int(absent.sum())
            points = self.counts[POINT] > 0 or _has(cells, POINT_ALONE)  # one piece that tells is enough
            self.counts[POINT if points else NUMBER] += len(cells) - empty
            if empty:
                self.counts[IS_ABSENT] += empty
                self.tokens.update(dict.fromkeys(sorted(self._known.intersection(cells))))
            if not points:
                self.shown.update(dict.fromkeys(cell for cell in cells[:MAX_TEXTS] if "." in cell))
            return
        for text, count in Counter(cells).items():
            means = IS_ABSENT if text in self._given else meanings(text)
            self.counts[means] += count
            if means & MISSING:
                self.tokens[text] = None
                self._known |= {text}
            elif len(self.shown) < MAX_TEXTS:
                self.shown[text] = None

    def total(self, bits: int) -> int:
        return sum(count for means, count in self.counts.items() if means & bits)

    @property
    def values(self) -> int:
        """The number of values that are not missing, if words such as None mean a missing value."""
        return sum(count for means, count in self.counts.items() if not means & MISSING)

    def kind(self, decimal: str | None) -> Kind:
        """What the column holds; `decimal` is the decimal sign, if the user says it."""
        numbers = max(self.total(bit) for bit, sign in ((POINT, "."), (COMMA, ",")) if decimal in (None, sign))
        dates = max(self.total(DAY_FIRST), self.total(MONTH_FIRST))
        if not self.values:
            return "text" if self.total(IS_WORD) else "number"
        if 2 * max(numbers, dates) <= self.values:
            return "text"
        return "number" if numbers >= dates else "date"

    def missing(self, kind: Kind) -> frozenset[str]:
        tokens = {text for text in self.tokens if text in self._given or meanings(text) & (IS_ABSENT | IS_MARK)}
        if kind != "text":
            tokens |= {text for text in self.tokens if meanings(text) & IS_WORD}
        elif "+" in self.shown:
            tokens -= {"-"} - self._given  # a result, positive or negative
        return frozenset(tokens | self._given | {""})


class TextSource(Source):
    """A source whose cells are text. A subclass has `cells`, which yields pieces of stripped texts."""

    untyped = True
    separator = ","

    def __init__(self, path: Path, dialect: Dialect | None = None) -> None:
        super().__init__(path, dialect)
        self._expected: dict[str, Kind] = {}
        self._target: str | None = None
        self._readings: dict[str, Reading] = {}
        self._columns: dict[str, _Column] = {}

    def cells(self, names: Collection[str]) -> Iterator[Piece]:
        raise NotImplementedError

    def _named(self, header: Sequence[str], place: str, fix: str) -> None:
        """Take the names of the columns, which stand at this place. `fix`: what to do where one is missing."""
        if len(header) > MOST_COLUMNS:
            bad(self.path, place, f"{len(header)} columns, but the maximum is {MOST_COLUMNS}")
        self._names = [name.strip() for name in header]
        for i, name in enumerate(self._names):
            if not name:
                bad(self.path, place, f"column {i + 1} has no name; name it{fix}")
            if len(name) > MOST_TEXT:
                bad(self.path, place, f"the name of column {i + 1} has more than {MOST_TEXT:,} characters")
            if name in self._names[:i]:
                bad(self.path, place, f"two columns are called {name!r}")
        self.shapes = dict.fromkeys(self._names, ())

    def expect(self, kinds: Mapping[str, Kind], target: str | None = None) -> None:
        self._expected.update(kinds)
        self._target = target or self._target

    def pieces(self, names: Collection[str]) -> Iterator[Piece]:
        if any(name not in self._readings for name in names):
            self._survey(names)
        readings = {name: self._readings[name] for name in names if name in self._readings}
        for piece in self.cells(names):
            columns = {n: readings[n].values(c, self.path, piece, n) for n, c in piece.cells.items()}
            yield Piece(columns, piece.place, piece.rows, piece.cells)

    def decimal(self, name: str) -> str | None:
        kind = self._columns[name].kind(self.dialect.decimal)
        return self._readings[name].decimal if kind == "number" else None

    def written(self, piece: Piece, name: str) -> Values | Sequence[str | None]:
        reading, cells, values = self._readings[name], piece.cells[name], piece.columns[name]
        if reading.kind == "number":
            plain = plain_numbers(cells, reading.missing)
            if plain is None or not np.array_equal(plain, values, equal_nan=True):
                return values
        return [None if cell in reading.missing else cell for cell in cells]

    def _survey(self, names: Collection[str]) -> None:
        self._columns |= {name: _Column(self.dialect.missing) for name in names}
        for piece in self.cells(names):
            for name, cells in piece.cells.items():
                self._check_texts(piece, name, cells)
                self._columns[name].see(cells)
        kinds = {
            name: self._expected.get(name, column.kind(self.dialect.decimal)) for name, column in self._columns.items()
        }
        decimal = self.dialect.decimal or self._usual_decimal(kinds) or self.dialect.usual[0]
        never = tuple(n for n in map(as_number, self.dialect.missing) if n is not None)
        for name, column in self._columns.items():
            point, comma = column.total(POINT), column.total(COMMA)
            own = self.dialect.decimal or ("." if point > comma else "," if comma > point else decimal)
            if own is None:  # nothing in the file tells
                own = "," if self.separator == ";" and self._has_mark(name, ",") else "."
            day, month = column.total(DAY_FIRST), column.total(MONTH_FIRST)
            first, usual = day > month, self.dialect.usual[1]
            if day == month:
                first = (decimal == "," or not self._has_mark(name, "/")) if usual is None else usual
            missing = column.missing(kinds[name])
            self._readings[name] = Reading(kinds[name], own, first, missing, never, name == self._target)

    def _check_texts(self, piece: Piece, name: str, cells: Sequence[str]) -> None:
        """Raise if a cell is too long."""
        if (cells.longest() if isinstance(cells, ArrowCells) else max(map(len, cells), default=0)) > MOST_TEXT:
            row = next(i for i, cell in enumerate(cells) if len(cell) > MOST_TEXT)
            what = f"a text of {len(cells[row]):,} characters, but the maximum is {MOST_TEXT:,} characters"
            bad(self.path, f"{piece.place(row)}, column {name!r}", what)

    def _usual_decimal(self, kinds: Mapping[str, Kind]) -> str | None:
        """The decimal sign of most columns that tell."""
        points = commas = 0
        for name, column in self._columns.items():
            if kinds[name] == "number":
                points += column.total(POINT) > column.total(COMMA)
                commas += column.total(COMMA) > column.total(POINT)
        return None if points == commas else "," if commas > points else "."

    @property
    def usual(self) -> tuple[str | None, bool | None]:
        decimal = self._usual_decimal({name: reading.kind for name, reading in self._readings.items()})
        orders = [c.total(DAY_FIRST) - c.total(MONTH_FIRST) for c in self._columns.values()]
        return decimal, next((order > 0 for order in orders if order), None)

    @property
    def told(self) -> str | None:
        parts = [f"with {SEPARATORS.get(self.separator, self.separator)}"] if self.separator != "," else []
        of = {kind: [n for n, r in self._readings.items() if r.kind == kind] for kind in ("number", "date", "text")}
        commas = [name for name in of["number"] if self._readings[name].decimal == "," and self._has_mark(name, ",")]
        groups = [n for n in of["number"] if any(grouped(t, self._readings[n].decimal) for t in self._columns[n].shown)]
        if commas:
            parts.append(f"decimal commas: {listed(commas)}")
        if groups:
            parts.append(f"grouped thousands: {listed(groups)}")
        if cents := [name for name in of["number"] if self._has_mark(name, "%")]:
            parts.append(f"per cent: {listed(cents)}")
        if of["date"]:
            parts.append(f"dates: {listed([name + self._order(name) for name in of['date']])}")
        tokens = {t: None for n, r in self._readings.items() for t in self._columns[n].tokens if t and t in r.missing}
        tokens |= dict.fromkeys(self.dialect.missing)
        if tokens:
            parts.append(f"missing: {listed(list(tokens))}")
        words = [n for n in of["text"] if n not in self._expected and self._columns[n].total(IS_WORD)]
        if words:
            word = next(t for n in words for t in self._columns[n].tokens if meanings(t) & IS_WORD)
            parts.append(f"{word} is a category of {listed(words)} (--missing {word} if it means missing)")
        return f"read {'; '.join(parts)}" if parts else None

    def _has_mark(self, name: str, mark: str) -> bool:
        return any(mark in text for text in self._columns[name].shown)

    def _order(self, name: str) -> str:
        """How a date was read that could mean two: 03/04/2024."""
        column = self._columns[name]
        unsure = any(date_of(t, True) != date_of(t, False) for t in column.shown if meanings(t) & DATE)
        return "" if not unsure else " (day first)" if self._readings[name].day_first else " (month first)"
