"""The parts of an encoder: each encodes one column, or what came to it later, as inputs of its own.

A part of a model of tasks is fitted to a file at once, and stays as it is (`fitting.py`). A part of a stream is updated
by each row: a number is an input as it is, which `Stream` standardises, and a missing one is the mean of the rows that
have come so far. What has no input of its own there, such as a text, is returned as a mark, for the spare inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from evcl._core.errors import EvclError
from evcl.tables.source import Bools, Floats, Json, Kind, Values, listed
from evcl.tables.values import CYCLES, Moments, Where, as_text, circles, measured, numbers_of, seconds_of, spelt

Inputs = NDArray[np.floating]  # in float32; those of streams in float64
Marks = Sequence[tuple[int | slice | Bools, str | None]]  # rows, and the text that they have; None: a missing value
FARTHEST, KNOWN = 10.0, 30  # a number more deviations than this from the mean counts as far outside, after some rows
LARGEST = 1e30  # a larger number counts as this, so that its square is finite


@dataclass(frozen=True)
class Part:
    """`kind` is its name in a file, `holds` what its column holds."""

    name: str

    kind: ClassVar[str]
    holds: ClassVar[Kind] = "number"

    @property
    def inputs(self) -> int:
        raise NotImplementedError

    def encode(self, values: Values, out: Inputs, where: Where) -> Marks | None:
        """Write the inputs of some values to `out` [rows, inputs], where all are 0."""
        raise NotImplementedError

    def absent(self, out: Inputs) -> Marks | None:
        """The same for rows of a file that has no such column."""
        return None


@dataclass(frozen=True)
class Number(Part):
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

    def absent(self, out: Inputs) -> None:
        if self.missing:
            out[:, -1] = not self.lacked


@dataclass(frozen=True)
class Beyond(Part):
    """Numbers of a column that are far above, or below, all that were learned before: max(0, (x - start) / std)."""

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
class Category(Part):
    texts: tuple[str, ...]

    kind, holds = "category", "text"

    @property
    def inputs(self) -> int:
        return len(self.texts)

    def encode(self, values: Values, out: Inputs, where: Where) -> None:
        place = {text: k for k, text in enumerate(self.texts)}
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
class Time(Part):
    mean: float  # seconds since 1970
    std: float
    cycles: tuple[str, ...]  # those of CYCLES in which the first task's dates vary; each is a sine and a cosine
    missing: bool
    lacked: bool = False

    kind, holds = "time", "date"

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

    def absent(self, out: Inputs) -> None:
        if self.missing:
            out[:, -1] = not self.lacked


@dataclass(frozen=True)
class Missing(Part):
    """Marks the missing values of a column that no row lacked before."""

    kind, inputs = "missing", 1

    def encode(self, values: Values, out: Inputs, where: Where) -> None:
        texts = values.dtype == object
        out[:, 0] = [text is None for text in values] if texts else np.isnan(measured(values, where))

    def absent(self, out: Inputs) -> None:
        out[:] = 1.0


@dataclass(frozen=True)
class Updated(Part):
    """A column of a stream. `so_far`: of a number, what its values were."""

    shape: tuple[int, ...]
    so_far: Moments

    @property
    def inputs(self) -> int:
        return math.prod(self.shape)

    def absent(self, out: Inputs) -> Marks:
        return [(slice(None), None)]

    def described(self, place: int) -> list[Any]:
        """The column, whose first input is at this place, for JSON."""
        moments = (self.so_far.count, self.so_far.mean, self.so_far.squares)
        return [self.name, self.kind, place, list(self.shape), *(a.tolist() for a in moments)]

    @staticmethod
    def rebuilt(name: str, kind: str, place: int, shape: Sequence[int], *moments: Sequence[float]) -> Updated:
        """The inverse of `described`. Raises ValueError, KeyError or TypeError if this is none."""
        arrays = [np.array(values, dtype=np.float64) for values in moments]
        if not all(a.shape == (math.prod(shape),) and np.isfinite(a).all() for a in arrays):
            raise ValueError(f"column {name!r}")
        part = updated(kind, str(name), tuple(map(int, shape)))
        part.so_far.count, part.so_far.mean, part.so_far.squares = arrays
        return part


class Running(Updated):
    kind = "number"

    def encode(self, values: Values, out: Inputs, where: Where) -> Marks:
        numbers = numbers_of(values, where).reshape(len(values), -1)
        out[:] = self._filled(numbers, where.learn)
        return _missing(np.asarray(np.isnan(numbers).all(1)))

    def absent(self, out: Inputs) -> Marks:
        out[:] = self.so_far.mean
        return super().absent(out)

    def _filled(self, numbers: Floats, learn: bool) -> Floats:
        """Numbers [n, inputs], where a missing one, NaN, is the mean so far. One that is far outside is brought nearer,
        so that a broken sensor cannot spoil the scale of a column for long.
        """
        known = self.so_far
        if (known.count >= KNOWN).all():
            reach = FARTHEST * np.sqrt(known.squares / known.count)
            numbers = np.where(reach > 0, np.clip(numbers, known.mean - reach, known.mean + reach), numbers)
        numbers = np.clip(numbers, -LARGEST, LARGEST)
        there = known.see(numbers) if learn else ~np.isnan(numbers)
        return np.where(there, numbers, known.mean)


class Circles(Updated):
    """Dates as points on circles: the year, the week, the day."""

    kind, holds, inputs = "date", "date", 2 * len(CYCLES)

    def encode(self, values: Values, out: Inputs, where: Where) -> Marks:
        seconds = seconds_of(values, where)
        absent = np.isnan(seconds)
        for i, points in enumerate(circles(np.where(absent, 0.0, seconds), CYCLES)):
            out[:, i] = np.where(absent, 0.0, points)
        return _missing(absent)


class Texts(Updated):
    kind, holds, inputs = "text", "text", 0

    def encode(self, values: Values, out: Inputs, where: Where) -> Marks:
        return list(enumerate(as_text(values, where)))


PARTS: dict[str, type[Part]] = {part.kind: part for part in (Number, Category, Time, Missing, Beyond)}
UPDATED: dict[str, type[Updated]] = {part.kind: part for part in (Running, Circles, Texts)}


def updated(holds: str, name: str, shape: tuple[int, ...] = ()) -> Updated:
    """The part of a stream's column of which no row has come."""
    return UPDATED[holds](name, shape, Moments((math.prod(shape),)))


def _missing(absent: Bools) -> Marks:
    return [(absent, None)] if absent.any() else []


def _within(numbers: Floats, limits: tuple[float | None, float | None]) -> Floats:
    if limits == (None, None):
        return numbers
    return np.clip(numbers, *limits)


def _check_finite(scaled: Inputs, values: Values, where: Where) -> None:
    if not np.isfinite(scaled).all():
        row = int((~np.isfinite(scaled)).any(1).argmax())
        where.bad(row, f"{values[row] if values.ndim == 1 else 'a number'} is too large")


def described(part: Part) -> Json:
    """A part as JSON. Fields without a value are left out, so that it is written as it always was."""
    return {"kind": part.kind, **{f.name: v for f in fields(part) if (v := getattr(part, f.name)) != f.default}}


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


def rebuilt(one: Json) -> Part:
    """The part with this description."""
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
