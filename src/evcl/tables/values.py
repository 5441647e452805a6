"""The values of a column: as numbers, dates or texts; an error names the row."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from evcl._core.errors import EvclError
from evcl.tables.outside import Ends
from evcl.tables.source import INEXACT, MAX_EXACT, Bools, Floats, Piece, Values, as_number, bad

DAY, YEAR = 86_400.0, 365.2425 * 86_400.0  # in seconds
CYCLES = {"year": YEAR, "week": 7 * DAY, "day": DAY}


@dataclass(frozen=True)
class Where:
    """Where a column's values are, for error messages. `known`: all texts that the column's parts encode; `unseen`
    counts the others, as missing values; None: they are errors. `ends`: numbers far outside are limited to them.
    `learn`: a part that is updated by rows learns them.
    """

    path: Path
    piece: Piece
    column: str
    known: Collection[str] = ()
    unseen: Counter[str] | None = None
    ends: Ends | None = None
    learn: bool = True

    def bad(self, row: int, what: str) -> NoReturn:
        bad(self.path, f"{self.piece.place(row)}, column {self.column!r}", what)


def numbers_of(values: Values, where: Where) -> Floats:
    """The numbers as float64 (NaN: missing). Raises for an integer that float64 would change, such as a long id."""
    if values.dtype.kind in "OM":
        came = "text" if values.dtype == object else "dates"
        where.bad(0, f"it holds {came}, but the model learned it as numbers")
    given = np.ma.getdata(values)
    numbers: Floats = given.astype(np.float64, copy=False)
    if given.dtype.kind in "iu" and given.dtype.itemsize == 8:
        with np.errstate(invalid="ignore"):  # the largest become 2^63 or 2^64, too large to convert back
            other = (numbers.astype(given.dtype) != given) | (numbers >= float(np.iinfo(given.dtype).max))
        if other.any():
            place = tuple(np.argwhere(other)[0])
            where.bad(int(place[0]), f"{given[place]} {INEXACT}")
    if np.ma.isMaskedArray(values):
        numbers = np.where(np.ma.getmaskarray(values), np.nan, numbers)
    if np.isinf(numbers).any():
        row = int(np.isinf(numbers.reshape(len(numbers), -1)).any(1).argmax())
        where.bad(row, "infinity is not a number that can be learned")
    return numbers if where.ends is None else where.ends.limited(numbers)


def seconds_of(values: Values, where: Where) -> Floats:
    """Dates as seconds since 1970 (NaN: missing)."""
    if values.dtype.kind != "M":
        came = "text" if values.dtype == object else "numbers"
        where.bad(0, f"it holds {came}, but the model learned it as dates")
    absent = np.isnat(values)
    whole = np.where(absent, np.datetime64(0, "us"), values).astype("datetime64[us]").astype(np.int64)
    seconds: Floats = np.where(absent, np.nan, whole / 1e6)
    return seconds if where.ends is None else where.ends.limited(seconds)


def measured(values: Values, where: Where) -> Floats:
    """Numbers as they are, and dates as seconds since 1970 (NaN: missing)."""
    return seconds_of(values, where) if values.dtype.kind == "M" else numbers_of(values, where)


def circles(seconds: Floats, cycles: Iterable[str]) -> Iterator[Floats]:
    """A sine and a cosine for each of these cycles."""
    for cycle in cycles:
        angle = 2 * np.pi * (seconds % CYCLES[cycle]) / CYCLES[cycle]
        yield np.sin(angle)
        yield np.cos(angle)


class Moments:
    """The mean and the sum of squared deviations of numbers so far (Chan, Golub and LeVeque), without missing ones."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.count, self.mean, self.squares = np.zeros(shape), np.zeros(shape), np.zeros(shape)

    def see(self, numbers: Floats) -> Bools:
        """The next numbers [n, *shape]; returns which of them are there."""
        there = ~np.isnan(numbers)
        count = there.sum(0)
        mean = np.where(there, numbers, 0.0).sum(0) / np.maximum(count, 1)
        squares = (np.where(there, numbers - mean, 0.0) ** 2).sum(0)
        total, apart = self.count + count, mean - self.mean
        self.squares = self.squares + squares + apart**2 * self.count * count / np.maximum(total, 1)
        self.mean, self.count = self.mean + apart * count / np.maximum(total, 1), total
        return there


class Fraction(EvclError):
    """A number with a fraction where classes are expected."""

    def __init__(self, path: Path, place: str, column: str, value: str) -> None:
        what = f"{value} is a number with a fraction, but classes are expected"
        super().__init__(f"{path}: {place}, column {column!r}: {what}")


def as_text(values: Values, where: Where) -> Sequence[str | None]:
    """Categories and labels as text: text stays unchanged, integers become their digits."""
    if values.dtype == object:
        return values  # type: ignore[return-value]
    if values.ndim > 1 or values.dtype.kind == "M":
        came = "dates" if values.dtype.kind == "M" else f"an array of shape {values.shape[1:]}"
        where.bad(0, f"text or a whole number is expected, not {came}")
    texts: list[str | None] = []
    for row, value in enumerate(values.tolist()):
        if value is None or math.isnan(value):
            texts.append(None)
        elif math.isfinite(value) and value == int(value):
            texts.append(str(int(value)))
        else:
            raise Fraction(where.path, where.piece.place(row), where.column, str(value))
    return texts


def spelt(text: str, known: Collection[str]) -> str:
    """A text as it is known: a whole number is one category, whether a file spells it 1 or 1.0."""
    if text in known:
        return text
    number = as_number(text)
    if number is None or abs(number) >= MAX_EXACT or number != int(number):
        return text
    forms = (str(int(number)), f"{int(number)}.0")
    return next((form for form in forms if form in known), text)
