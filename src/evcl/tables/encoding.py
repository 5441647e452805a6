"""The encoding of a table's columns as network inputs: fitted on the first task, and fixed from then on.

A numeric column is standardised with the mean and standard deviation of the first task. A missing value becomes the
mean; if the first task had missing values, an extra input marks them. A categorical column becomes one input per
category (one-hot), all 0 for a missing value. Images, and arrays of more than two axes, are scaled with one mean and
standard deviation for all their values.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from evcl._core.errors import EvclError
from evcl.tables.source import MOST_CATEGORIES, MOST_INPUTS, Piece, Source, Values, as_number, bad

Floats = NDArray[np.float64]
WHOLE = 2**53  # float64 represents every integer up to this exactly
INEXACT = "is an integer that float64 cannot represent exactly; --drop leaves the column out, --category reads text"


@dataclass(frozen=True)
class Number:
    name: str
    shape: tuple[int, ...]
    mean: tuple[float, ...]  # one per value, or one for all
    std: tuple[float, ...]
    missing: bool  # whether the first task had missing values

    @property
    def inputs(self) -> int:
        return math.prod(self.shape) + self.missing

    def encode(self, values: Values, out: NDArray[np.float32], where: _Where) -> None:
        numbers = _numbers(values, where).reshape(len(values), -1)
        absent = np.isnan(numbers)
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = ((numbers - np.array(self.mean)) / np.array(self.std)).astype(np.float32)
        scaled[absent] = 0.0
        if not np.isfinite(scaled).all():
            row = int((~np.isfinite(scaled)).any(1).argmax())
            where.bad(row, f"{values[row] if values.ndim == 1 else 'a number'} is too large")
        out[:, : scaled.shape[1]] = scaled
        if self.missing:
            out[:, -1] = absent[:, 0]


@dataclass(frozen=True)
class Category:
    name: str
    texts: tuple[str, ...]

    @property
    def inputs(self) -> int:
        return len(self.texts)

    def encode(self, values: Values, out: NDArray[np.float32], where: _Where) -> None:
        place = {text: k for k, text in enumerate(self.texts)}
        out[:] = 0.0
        for row, text in enumerate(as_text(values, where)):
            if text is None:
                continue
            if text in place:
                out[row, place[text]] = 1.0
            elif not where.lenient:
                known = ", ".join(self.texts[:5]) + (", ..." if len(self.texts) > 5 else "")
                where.bad(row, f"{text!r} was not in the first task ({known}); --unknown missing treats it as missing")


@dataclass(frozen=True)
class _Where:
    """Where a column's values are, for error messages; `lenient`: treat an unknown category as missing."""

    path: Path
    piece: Piece
    column: str
    lenient: bool = False

    def bad(self, row: int, what: str) -> NoReturn:
        bad(self.path, f"{self.piece.place(row)}, column {self.column!r}", what)


def _numbers(values: Values, where: _Where) -> Floats:
    """The numbers as float64 (NaN: missing). Raises for an integer that float64 would change, such as a long id."""
    if values.dtype == object and (plain := _plain_numbers(values)) is not None:
        found = plain
    elif values.dtype == object:
        found = np.empty(len(values))
        for row, text in enumerate(values):
            number = np.nan if text is None else as_number(text)
            if number is None:
                where.bad(row, f"{text!r} is not a number, but the column is numeric")
            if WHOLE <= abs(number) < math.inf and text.lstrip("+-").isdecimal() and int(text) != number:
                where.bad(row, f"{text} {INEXACT}")
            found[row] = number
    else:
        given = np.ma.getdata(values)
        found = given.astype(np.float64, copy=False)
        if given.dtype.kind in "iu" and given.dtype.itemsize == 8:
            with np.errstate(invalid="ignore"):  # the largest become 2^63 or 2^64, too large to convert back
                other = (found.astype(given.dtype) != given) | (found >= float(np.iinfo(given.dtype).max))
            if other.any():
                place = tuple(np.argwhere(other)[0])
                where.bad(int(place[0]), f"{given[place]} {INEXACT}")
        if np.ma.isMaskedArray(values):
            found = np.where(np.ma.getmaskarray(values), np.nan, found)
    if np.isinf(found).any():
        where.bad(
            int(np.isinf(found.reshape(len(found), -1)).any(1).argmax()), "infinity is not a number that can be learned"
        )
    return found


def _plain_numbers(values: Values) -> Floats | None:
    """Convert texts to numbers, all at once. None if a text is not a number, or must be checked on its own."""
    texts = ["nan" if text is None else text for text in values]
    try:
        found = np.fromiter(map(float, texts), np.float64, len(texts))
    except ValueError:
        return None
    odd = "_" in "".join(texts) or np.isnan(found).sum() > texts.count("nan") or (np.abs(found) >= WHOLE).any()
    return None if odd else found


def as_text(values: Values, where: _Where) -> Sequence[str | None]:
    """Categories and labels as text: text stays unchanged, integers become their digits."""
    if values.dtype == object:
        return values  # type: ignore[return-value]
    if values.ndim > 1:
        where.bad(0, f"text or a whole number is expected, not an array of shape {values.shape[1:]}")
    found: list[str | None] = []
    for row, value in enumerate(values.tolist()):
        if value is None or math.isnan(value):
            found.append(None)
        elif math.isfinite(value) and value == int(value):
            found.append(str(int(value)))
        else:
            where.bad(row, f"{value} is not text or a whole number, but the column holds classes")
    return found


def labels_of(source: Source, piece: Piece, column: str) -> Sequence[str | None]:
    """A piece's labels as text. 1.0 is class 1, however a file spells it; a number with a fraction is an error."""
    where = _Where(source.path, piece, column)
    found = list(as_text(piece.columns[column], where))
    for row, label in enumerate(found if source.untyped else ()):
        number = None if label is None or "." not in label else as_number(label)
        if number is None or math.isinf(number):
            continue
        exact = number if abs(number) < WHOLE else Decimal(str(label))
        if exact != int(exact):
            where.bad(row, f"{label} is a number with a fraction, but classes are expected: there is no regression")
        found[row] = str(int(exact))
    return found


class Encoder:
    """Encodes columns as inputs, in order."""

    def __init__(self, columns: Sequence[Number | Category]) -> None:
        self.columns = tuple(columns)
        self.inputs = sum(column.inputs for column in self.columns)
        if not 0 < self.inputs <= MOST_INPUTS:
            raise EvclError(f"{self.inputs:,} inputs to the network, but only 1 to {MOST_INPUTS:,} are possible")

    @property
    def names(self) -> list[str]:
        return [column.name for column in self.columns]

    def check(self, source: Source, extra: Collection[str]) -> None:
        """Raise if a file's columns differ from the model's; it may also have the columns in `extra`."""
        shapes = source.shapes
        missing = [name for name in self.names if name not in shapes]
        unknown = [name for name in shapes if name not in self.names and name not in extra]
        if missing:
            more = f" (it has {_listed(unknown)} instead)" if unknown else ""
            bad(source.path, f"there is no column {_listed(missing)}, which the model learned from{more}")
        if unknown:
            bad(source.path, f"the model does not know column {_listed(unknown)}; --drop leaves one out")
        for column in self.columns:
            wanted = column.shape if isinstance(column, Number) else ()
            if shapes[column.name] != wanted:
                bad(
                    source.path, f"column {column.name!r}", f"its values have shape {shapes[column.name]}, not {wanted}"
                )

    def encode(self, piece: Piece, source: Source, out: NDArray[np.float32], lenient: bool = False) -> None:
        """Encode the rows of a piece as inputs, into `out` [rows, inputs]."""
        start = 0
        for column in self.columns:
            values, where = piece.columns[column.name], _Where(source.path, piece, column.name, lenient)
            if isinstance(column, Number) and values.dtype == object and not source.untyped:
                where.bad(0, "it holds text, but the model learned it as numbers")
            column.encode(values, out[:, start : start + column.inputs], where)
            start += column.inputs

    def described(self) -> list[dict[str, Any]]:
        return [{"kind": "number" if isinstance(c, Number) else "category", **asdict(c)} for c in self.columns]

    @staticmethod
    def rebuilt(saved: Sequence[Mapping[str, Any]]) -> Encoder:
        """The encoder from its description. Raises EvclError, KeyError or TypeError if the description is invalid."""
        columns: list[Number | Category] = []
        for one in saved:
            if one["kind"] == "category":
                columns.append(Category(str(one["name"]), tuple(map(str, one["texts"]))))
                continue
            shape = tuple(int(n) for n in one["shape"])
            mean, std = (tuple(float(v) for v in one[key]) for key in ("mean", "std"))
            number = Number(str(one["name"]), shape, mean, std, bool(one["missing"]))
            sizes = {1, math.prod(shape)}
            if len(mean) not in sizes or len(std) not in sizes or not all(0 < v < math.inf for v in std):
                raise EvclError(f"the scale of column {number.name!r} does not fit it")
            columns.append(number)
        return Encoder(columns)


def _listed(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(map(repr, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


class EncoderFitting:
    """Fits an encoder on the first task, piece by piece."""

    def __init__(self, source: Source, names: Sequence[str], categories: Collection[str]) -> None:
        self._source, self.names = source, tuple(names)
        self._fits = {name: _Fit(source.shapes[name], name in categories) for name in names}

    def see(self, piece: Piece) -> None:
        for name, fit in self._fits.items():
            fit.see(piece.columns[name], _Where(self._source.path, piece, name), self._source.untyped)

    def encoder(self) -> Encoder:
        return Encoder([fit.column(name, self._source.path) for name, fit in self._fits.items()])


class _Fit:
    """Fits one column: numeric if all its values are numbers, categorical if none is; a mix is an error."""

    def __init__(self, shape: tuple[int, ...], category: bool) -> None:
        self._shape, self._category = shape, category
        self._number: bool | None = None  # whether text values are numbers; None until known
        self._texts: dict[str, None] = {}
        self._count, self._mean, self._squares = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self._missing = False

    def see(self, values: Values, where: _Where, untyped: bool) -> None:
        if values.dtype == object and not self._category:
            numbers = _plain_numbers(values) if untyped and self._number is not False else None
            if numbers is not None and not np.isnan(numbers).all():
                self._number = True
                self._add(numbers)
                return
            self._decide(values, where, untyped)
        if self._category or self._number is False:
            for row, text in enumerate(as_text(values, where)):
                if text is not None:
                    self._texts[text] = None
                if len(self._texts) > MOST_CATEGORIES:
                    where.bad(
                        row, f"more than {MOST_CATEGORIES:,} distinct categories are too many; --drop leaves it out"
                    )
        elif values.dtype != object or self._number:
            self._add(_numbers(values, where))
        else:
            self._missing = True  # no value so far

    def _decide(self, values: Values, where: _Where, untyped: bool) -> None:
        """Decide whether text is numeric: the first value that is not missing decides, and the others must agree."""
        if not untyped:
            self._category = True
            return
        for value in dict.fromkeys(values):
            if value is None:
                continue
            number = as_number(value) is not None
            if self._number is None:
                self._number = number
            elif number != self._number:
                this, others = ("a number", "text") if number else ("text", "numbers")
                fix = f"correct it, or use --category {where.column}"
                where.bad(list(values).index(value), f"{value!r} is {this} where the column began with {others}; {fix}")

    def _add(self, numbers: Floats) -> None:
        """Update the mean and the sum of squared deviations (Chan, Golub and LeVeque), without missing values."""
        with np.errstate(over="ignore", invalid="ignore"):  # `column` raises if the result is not finite
            self._update(numbers)

    def _update(self, numbers: Floats) -> None:
        there = ~np.isnan(numbers)
        self._missing |= not there.all()
        count = there.sum(0)
        mean = np.where(there, numbers, 0.0).sum(0) / np.maximum(count, 1)
        squares = (np.where(there, numbers - mean, 0.0) ** 2).sum(0)
        total = self._count + count
        apart = mean - self._mean
        self._mean = self._mean + apart * count / np.maximum(total, 1)
        self._squares = self._squares + squares + apart**2 * self._count * count / np.maximum(total, 1)
        self._count = total

    def column(self, name: str, path: Path) -> Number | Category:
        if self._texts:
            return Category(name, tuple(sorted(self._texts)))
        if not self._count.any():
            bad(path, f"column {name!r}", "all its values are missing; --drop leaves it out")
        count, mean, squares = (np.atleast_1d(a).reshape(-1) for a in (self._count, self._mean, self._squares))
        if len(self._shape) > 1:  # one scale for all values
            middle = np.array([(count * mean).sum() / count.sum()])
            squares = np.array([(squares + count * (mean - middle) ** 2).sum()])
            count, mean = np.array([count.sum()]), middle
        std = np.sqrt(squares / np.maximum(count, 1))
        if not np.isfinite(std).all() or not np.isfinite(mean).all():
            bad(path, f"column {name!r}", "it holds infinity, or numbers too large to scale")
        std = np.where(std > 1e-12 * np.maximum(np.abs(mean), 1e-300), std, 1.0)  # a constant
        return Number(name, self._shape, tuple(mean.tolist()), tuple(std.tolist()), self._missing and not self._shape)
