"""The encoding of a table's columns as network inputs. It is fitted on the first task, and only ever extended.

A number is standardised with the mean and standard deviation of the first task. A missing one becomes the mean; if
there were missing values, an extra input marks them. A category becomes one input per text (one-hot), all 0 for a
missing value. A date becomes its distance from the first task's mean date, and points on circles: the year, the week,
the day. Images, and arrays of more than two axes, have one mean and standard deviation for all their values.

An encoder is a list of parts, in the order of the inputs. Each part encodes one column, and a column may have several:
what a later file brings (texts, columns, missing values, numbers far outside) is a part at the end. Its inputs are 0
for every row learned before, so it changes no prediction for those rows.

A row is encoded in the same way whenever it comes, and whether it has no value in a column or its file has no such
column. So rows that lack a column which comes later, or whose missing values were not marked, fix what a missing value
is from then on: all inputs of the column are 0 (`lacked`). An input of a column that comes later marks its values, and
not those that are missing.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evcl._core.bounds import MOST_INPUTS
from evcl._core.errors import EvclError
from evcl.tables.outside import Ends
from evcl.tables.source import Floats, Json, Kind, Piece, Source, Unknown, Values, bad, listed, plural
from evcl.tables.values import CYCLES, Where, as_text, circles, measured, numbers_of, seconds_of, spelt

Inputs = NDArray[np.float32]
DEVIATIONS = 1e6  # from the known mean: beside a number farther out, float32 loses all else of its row
BEYOND = f"more than {DEVIATIONS:,.0f} standard deviations from what was learned"


@dataclass(frozen=True)
class Number:
    name: str
    shape: tuple[int, ...]
    mean: tuple[float, ...]  # one per value, or one for all
    std: tuple[float, ...]
    missing: bool  # whether its first file had missing values: the last input marks them
    seen: tuple[float, float] | None = None  # range of the values learned; None: arrays, and files of earlier versions
    limits: tuple[float | None, float | None] = (None, None)  # values beyond are those of another part
    apart: bool = False  # these are the mean here, as those of another unit say nothing on this scale; not the limit
    lacked: bool = False  # whether rows without a value were learned as zeros: the last input then marks values

    kind = "number"

    @property
    def inputs(self) -> int:
        return math.prod(self.shape) + self.missing

    def encode(self, values: Values, out: Inputs, where: Where) -> None:
        numbers = numbers_of(values, where).reshape(len(values), -1)
        absent = np.isnan(numbers)
        mean, std = np.array(self.mean), np.array(self.std)
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = ((numbers - mean) / std).astype(np.float32)
        scaled[absent] = 0.0
        _check_finite(scaled, values, where)
        if self.limits != (None, None):
            within = _within(numbers, self.limits)
            if self.apart:
                within = np.where(within == numbers, within, mean)
            scaled = np.where(absent, 0.0, (within - mean) / std).astype(np.float32)
        out[:, : scaled.shape[1]] = scaled
        if self.missing:
            out[:, -1] = absent[:, 0] != self.lacked


@dataclass(frozen=True)
class Beyond:
    """Numbers of a column that are far above, or below, all that were learned before: max(0, (x - start) / std)."""

    name: str
    start: float
    std: float  # below 0 for numbers below
    limit: float | None = None

    kind, inputs = "beyond", 1

    def encode(self, values: Values, out: Inputs, where: Where) -> None:
        numbers = numbers_of(values, where)
        limits = (None, self.limit) if self.std > 0 else (self.limit, None)
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = np.maximum(0.0, (_within(numbers, limits) - self.start) / self.std).astype(np.float32)
        scaled[np.isnan(numbers)] = 0.0
        _check_finite(scaled[:, None], values, where)
        out[:, 0] = scaled


@dataclass(frozen=True)
class Category:
    name: str
    texts: tuple[str, ...]

    kind = "category"

    @property
    def inputs(self) -> int:
        return len(self.texts)

    def encode(self, values: Values, out: Inputs, where: Where) -> None:
        place = {text: k for k, text in enumerate(self.texts)}
        out[:] = 0.0
        for row, text in enumerate(as_text(values, where)):
            if text is None:
                continue
            text = spelt(text, where.known)
            if text in place:
                out[row, place[text]] = 1.0
            elif text not in where.known:
                if where.unseen is None:
                    known = listed(list(self.texts))
                    fix = "--unknown learn learns it, --unknown missing treats it as missing"
                    where.bad(row, f"{text!r} was not in any earlier task ({known}); {fix}")
                where.unseen[text] += 1


@dataclass(frozen=True)
class Time:
    name: str
    mean: float  # seconds since 1970
    std: float
    cycles: tuple[str, ...]  # those of CYCLES in which the first task's dates vary; each is a sine and a cosine
    missing: bool
    lacked: bool = False

    kind = "time"

    @property
    def inputs(self) -> int:
        return 1 + 2 * len(self.cycles) + self.missing

    def encode(self, values: Values, out: Inputs, where: Where) -> None:
        seconds = seconds_of(values, where)
        absent = np.isnan(seconds)
        out[:, 0] = (seconds - self.mean) / self.std
        for i, points in enumerate(circles(seconds, self.cycles), 1):
            out[:, i] = points
        out[absent] = 0.0
        if self.missing:
            out[:, -1] = absent != self.lacked


@dataclass(frozen=True)
class Missing:
    """Marks the missing values of a column that no row lacked before."""

    name: str

    kind, inputs = "missing", 1

    def encode(self, values: Values, out: Inputs, where: Where) -> None:
        texts = values.dtype == object
        out[:, 0] = [text is None for text in values] if texts else np.isnan(measured(values, where))


Part = Number | Category | Time | Missing | Beyond
PARTS: dict[str, type[Part]] = {part.kind: part for part in (Number, Category, Time, Missing, Beyond)}


def _within(numbers: Floats, limits: tuple[float | None, float | None]) -> Floats:
    if limits == (None, None):
        return numbers
    return np.clip(numbers, *limits)


def _check_finite(scaled: Inputs, values: Values, where: Where) -> None:
    if not np.isfinite(scaled).all():
        row = int((~np.isfinite(scaled)).any(1).argmax())
        where.bad(row, f"{values[row] if values.ndim == 1 else 'a number'} is too large")


class Encoder:
    """Encodes columns as inputs, in the order of its parts."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.columns = tuple(parts)
        self.inputs = sum(part.inputs for part in self.columns)
        if not 0 < self.inputs <= MOST_INPUTS:
            raise EvclError(f"{self.inputs:,} inputs to the network, but only 1 to {MOST_INPUTS:,} are possible")
        self._known: dict[str, set[str]] = {}
        for part in self.columns:
            if isinstance(part, Category):
                self._known.setdefault(part.name, set()).update(part.texts)

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(part.name for part in self.columns))

    @property
    def inputs_of(self) -> list[str]:
        """The column of each input."""
        return [part.name for part in self.columns for _ in range(part.inputs)]

    def parts(self, name: str) -> list[Part]:
        """The parts of a column; the first one is what the column was when it came."""
        return [part for part in self.columns if part.name == name]

    def texts(self, name: str) -> set[str]:
        """All texts of a category that have an input."""
        return self._known.get(name, set())

    def kinds(self) -> dict[str, Kind]:
        """What each column holds."""
        named: dict[str, Kind] = {"number": "number", "category": "text", "time": "date"}
        return {name: named[self.parts(name)[0].kind] for name in self.names}

    def check(self, source: Source, extra: Collection[str]) -> tuple[list[str], list[str]]:
        """The model's columns that a file lacks, and the file's columns that the model does not know; those in `extra`
        do not count. Raises if a column has another shape, or if the file has none of the model's columns.
        """
        shapes = source.shapes
        gone = [name for name in self.names if name not in shapes]
        new = [name for name in shapes if name not in self.names and name not in extra]
        if len(gone) == len(self.names):
            bad(source.path, f"there is no column {lacking(gone, new)}")
        for name in self.names:
            first = self.parts(name)[0]
            wanted = first.shape if isinstance(first, Number) else ()
            if name in shapes and shapes[name] != wanted:
                bad(source.path, f"column {name!r}", f"its values have shape {shapes[name]}, not {wanted}")
        return gone, new

    def encode(
        self,
        piece: Piece,
        source: Source,
        out: Inputs,
        unseen: defaultdict[str, Counter[str]] | None = None,
        ends: Mapping[str, Ends] | None = None,
    ) -> None:
        """Encode the rows of a piece as inputs, into `out` [rows, inputs]. A column that the piece lacks is missing;
        `unseen` counts unknown categories, which are missing too; without it, they are errors. `ends`: of columns whose
        numbers far outside are limited.
        """
        start, done = 0, set[str]()
        for part in self.columns:
            counted = None if unseen is None else Counter() if part.name in done else unseen[part.name]
            done.add(part.name)
            where = Where(source.path, piece, part.name, self.texts(part.name), counted, (ends or {}).get(part.name))
            into = out[:, start : start + part.inputs]
            values = piece.columns.get(part.name)
            if values is None:
                into[:] = 0.0
                if isinstance(part, (Number, Time)) and part.missing:
                    into[:, -1] = not part.lacked
                elif isinstance(part, Missing):
                    into[:] = 1.0
            else:
                part.encode(values, into, where)
            start += part.inputs

    def described(self) -> list[Json]:
        """Its parts as JSON. Fields without a value are left out, so that a part is written as it always was."""
        return [
            {"kind": part.kind, **{f.name: v for f in fields(part) if (v := getattr(part, f.name)) != f.default}}
            for part in self.columns
        ]

    @staticmethod
    def rebuilt(saved: Sequence[Json]) -> Encoder:
        """The encoder from its description. Raises EvclError, KeyError or TypeError if the description is invalid."""
        return Encoder([_rebuilt(one) for one in saved])


class Encoding:
    """Encodes the rows of one file, and notes what the user should know of them. With `unknown` "error", a category
    that the encoder does not know is an error, and so is a number too far from all others; else they are missing.
    """

    def __init__(
        self, encoder: Encoder, source: Source, unknown: Unknown, ends: Mapping[str, Ends] | None = None
    ) -> None:
        self._encoder, self._source, self._ends, self._strict = encoder, source, ends, unknown == "error"
        self._unseen = None if self._strict else defaultdict[str, Counter[str]](Counter)
        self._far, self._first = 0, ""  # how many numbers are too far away, and where the first one is

    def __call__(self, piece: Piece) -> Inputs:
        """The rows of a piece [rows, inputs]."""
        found = np.empty((piece.rows, self._encoder.inputs), dtype=np.float32)
        self._encoder.encode(piece, self._source, found, self._unseen, self._ends)
        return found

    def near(self, inputs: Inputs, piece: Piece) -> Inputs:
        """The encoded rows, where inputs that are too far away are 0, as if missing; the same array if none is."""
        far = np.abs(inputs) > DEVIATIONS
        if not far.any():
            return inputs
        row, i = np.argwhere(far)[0].tolist()
        name = self._encoder.inputs_of[i]
        value, place = piece.columns[name][row], f"{piece.place(row)}, column {name!r}"
        what = "a number" if np.ndim(value) else str(value)
        if self._strict:
            bad(self._source.path, place, f"{what} is {BEYOND}; --unknown learn or missing accepts it")
        self._first = self._first or f"{place} has {what}"
        self._far += int(far.sum())
        return np.where(far, np.float32(0), inputs)

    @property
    def notes(self) -> list[str]:
        unseen = [
            f"{listed([repr(text) for text in found])} of {name}: not known, and counted as missing in "
            f"{plural(sum(found.values()), 'row')}"
            for name, found in (self._unseen or {}).items()
            if found
        ]
        if not self._far:
            return unseen
        verb = "is" if self._far == 1 else "are"
        return [*unseen, f"{plural(self._far, 'value')} {verb} {BEYOND}, and counted as missing: {self._first}"]


def lacking(gone: Sequence[str], new: Sequence[str]) -> str:
    """The names of columns that a file lacks, and what it has in their place."""
    more = f" (it has {listed([repr(name) for name in new])} instead)" if new else ""
    return f"{listed([repr(name) for name in gone])}, which the model learned from{more}"


def _optional(value: Any) -> float | None:
    return None if value is None else float(value)


def _pair(values: Iterable[Any]) -> tuple[float | None, float | None]:
    low, high = map(_optional, values)
    return low, high


def _range(values: Iterable[Any]) -> tuple[float, float]:
    low, high = map(float, values)
    return low, high


READERS: dict[str, Callable[[Any], object]] = {  # by the type of a field
    "str": str,
    "bool": bool,
    "float": float,
    "float | None": _optional,
    "tuple[str, ...]": lambda values: tuple(map(str, values)),
    "tuple[int, ...]": lambda values: tuple(map(int, values)),
    "tuple[float, ...]": lambda values: tuple(map(float, values)),
    "tuple[float | None, float | None]": _pair,
    "tuple[float, float] | None": lambda values: None if values is None else _range(values),
}


def _rebuilt(one: Json) -> Part:
    if one["kind"] not in PARTS:
        raise EvclError(f"column {one['name']!r} has the unknown kind {one['kind']!r}")
    made = PARTS[one["kind"]]
    given = {field.name: READERS[str(field.type)](one[field.name]) for field in fields(made) if field.name in one}
    part = made(**given)  # type: ignore[arg-type]
    fits = True
    if isinstance(part, Number):
        sizes = {1, math.prod(part.shape)}
        fits = len(part.mean) in sizes and len(part.std) in sizes and all(0 < v < math.inf for v in part.std)
    elif isinstance(part, Beyond):
        fits = math.isfinite(part.start) and 0 < abs(part.std) < math.inf
    elif isinstance(part, Time):
        fits = set(part.cycles) <= set(CYCLES) and 0 < part.std < math.inf and math.isfinite(part.mean)
    if not fits:
        raise EvclError(f"the scale of column {part.name!r} does not fit it")
    return part
