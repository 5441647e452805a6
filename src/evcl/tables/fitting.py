"""Fitting an encoder: on the first task, and on what is new in a later one."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote

import numpy as np

from evcl._core.bounds import MOST_CATEGORIES, MOST_INPUTS
from evcl.tables.encoding import Encoder
from evcl.tables.outside import MOST_FAR, Ends, Sample
from evcl.tables.parts import Beyond, Category, Missing, Number, Part, Time
from evcl.tables.source import Floats, Piece, Source, Values, bad, listed
from evcl.tables.values import CYCLES, DAY, YEAR, Moments, Where, as_text, measured, spelt

DIGITS = re.compile(r"[\d\s./:,;+-]*\d[\d\s./:,;+-]*")  # with separators, or they would be a number
HARDLY = 20  # a column of at least this many different texts should have two rows for each of them
FAR = 10.0  # a file whose mean is this many standard deviations from the known one gets a scale of its own,
ALIKE = 3.0  # if it is outside the known range, or varies at most this many times as much;
NARROW = 0.1  # or if it is wholly outside, and varies so little that the known scale would not tell its values apart;
# or if it varies more than FAR times as much, and most of its values are beyond the known range
EDGE = 3.0  # The scale begins this many standard deviations below the file's mean
A_SEASON = 45 * DAY  # dates within less time than this do not show a year's cycle
LEAST_SCALE = 1e-3  # of the standard deviation before


class EncoderFitting:
    """Looks at the columns of a file, piece by piece. `known`: the encoder so far, if there is one."""

    def __init__(
        self, source: Source, names: Sequence[str], categories: Collection[str] = (), known: Encoder | None = None
    ) -> None:
        self._source, self._encoder, self.names = source, known, tuple(names)
        kinds = {} if known is None else known.kinds()
        self._fits = {
            name: _Fit(
                source.shapes[name],
                name in categories or kinds.get(name) == "text",
                None if known is None or name not in kinds else known.texts(name),
            )
            for name in names
        }
        self.notes: list[str] = []  # what the user should know of the columns
        self.ends: dict[str, Ends] = {}  # of columns with a few numbers far outside the others, which are limited,
        self.limited: list[str] = []  # and what the user should know of these

    def see(self, piece: Piece) -> None:
        for name, fit in self._fits.items():
            fit.see(piece.columns[name], Where(self._source.path, piece, name))

    def encoder(self) -> Encoder:
        """The encoder for these columns; or the known one, extended by what is new in them."""
        self._limit()
        if self._encoder is None:
            for name, fit in self._fits.items():
                if not fit.values:
                    bad(self._source.path, f"column {name!r}", "all its values are missing; --drop leaves it out")
            return Encoder([self._new(name) for name in self.names])
        parts, known = list(self._encoder.columns), self._encoder
        if empty := [name for name in known.names if name in self._fits and not self._fits[name].values]:
            self.notes.append(f"there is nothing in column {listed(empty)}: its values count as missing")
        for name in known.names:
            if name in self._fits and self._fits[name].values:
                parts = self._extended(parts, name, known.parts(name))
            else:
                parts = _lacking(parts, known.parts(name))
        columns = [name for name in self.names if name not in known.names and self._fits[name].values]
        for name in columns:
            new = self._new(name)
            late = replace(new, lacked=True) if isinstance(new, (Number, Time)) else new
            parts = self._with(parts, late, f"column {name!r} is new")
        if added := [name for name in columns if any(part.name == name for part in parts)]:
            self.notes.append(f"new column{'' if len(added) == 1 else 's'}: {listed(added)}")
        return Encoder(parts)

    def _limit(self) -> None:
        """Read again the columns with numbers far outside the others. If these decide the scale alone, which would then
        not tell the others apart, they are limited.
        """
        path = self._source.path
        asked = {name: ends for name, fit in self._fits.items() if (ends := fit.outside()) is not None}
        again = {name: _Fit((), False, None) for name in asked}
        counts, first = dict.fromkeys(asked, 0), dict[str, str]()
        for piece in self._source.pieces(list(asked)) if asked else ():
            for name, ends in asked.items():
                values, where = piece.columns[name], Where(path, piece, name)
                far = np.flatnonzero(ends.far(measured(values, where)))
                counts[name] += len(far)
                if len(far):
                    value = f"{values[far[0]]:g}" if values.dtype.kind != "M" else values[far[0]]
                    first.setdefault(name, f"{piece.place(int(far[0]))} has {value}")
                again[name].see(values, replace(where, ends=ends))
        for name, fit in again.items():
            (std,), (wide,) = fit.moments()[1], self._fits[name].moments()[1]
            if MOST_FAR * counts[name] > fit.values or std >= NARROW * wide:
                continue
            self._fits[name], self.ends[name] = fit, asked[name]
            counted = "1 value is" if counts[name] == 1 else f"{counts[name]:,} values are"
            fix = "learned as the largest or smallest of these"
            self.limited.append(f"column {name!r}: {counted} far outside the others, {fix}: {first[name]}")

    def unextended(self) -> Encoder:
        """The known encoder, with the same inputs, for a file that is learned without what is new in it."""
        assert self._encoder is not None
        parts = list(self._encoder.columns)
        for name in self._encoder.names:
            if name not in self._fits or self._fits[name].missing:
                parts = _lacking(parts, self._encoder.parts(name))
        return Encoder(parts)

    def _with(self, parts: list[Part], more: Part, what: str, told: str | None = None) -> list[Part]:
        """These parts with one more, if there is room. The notes say `what` has none or, once, what is `told`."""
        if sum(part.inputs for part in (*parts, more)) > MOST_INPUTS:
            most = f"the network has {MOST_INPUTS:,} inputs at most; it counts as missing"
            self.notes.append(f"{what}, but there is no room left: {most}")
            return parts
        if told is not None and told not in self.notes:
            self.notes.append(told)
        return [*parts, more]

    def _new(self, name: str) -> Part:
        fit = self._fits[name]
        if told := fit.warning():
            self.notes.append(f"column {name!r} {told}: --drop {quote(name)} leaves it out")
        return fit.column(name, self._source.path)

    def _extended(self, parts: list[Part], name: str, own: list[Part]) -> list[Part]:
        """These parts with what is new in a column that has the parts `own`."""
        fit, first = self._fits[name], own[0]
        if isinstance(first, Category):
            if fit.texts:
                texts = sorted(fit.texts)
                told, what = f"new categories of {name}: {listed(texts)}", f"column {name!r} has new categories"
                parts = self._with(parts, Category(name, tuple(texts)), what, told)
            if fit.full:
                most = f"{MOST_CATEGORIES:,} categories, the maximum"
                self.notes.append(f"column {name!r} has {most}; others count as missing")
            return parts
        if fit.missing and not _marked(own) and isinstance(first, (Number, Time)) and not first.lacked:
            told = f"missing values are new in {name}: an input marks them"
            parts = self._with(parts, Missing(name), f"column {name!r} has missing values now", told)
        if isinstance(first, Number) and first.seen is not None:
            parts = self._rescaled(parts, first, [part for part in own if isinstance(part, Beyond)])
        return parts

    def _rescaled(self, parts: list[Part], first: Number, beyond: list[Beyond]) -> list[Part]:
        """These parts with the range of a numeric column widened. If the file is far outside it, its values get an
        input of their own, with their own scale, that begins where the known values end.
        """
        fit, (low, high) = self._fits[first.name], first.seen or (0.0, 0.0)
        (mean,), (std,) = fit.moments()
        wider = replace(first, seen=(min(low, fit.low), max(high, fit.high)))
        told = f"column {first.name!r} moved far from what was learned before: it gets a new scale there"
        count = len(parts)
        mostly = fit.numbers.outside(low, high) > 0.5  # fewer may be mistyped, or the column hardly varied before
        for side, edge, end in ((1.0, high, fit.high), (-1.0, low, fit.low)):
            last = next((part for part in reversed(beyond) if part.std * side > 0), None)
            centre, scale = (first.mean[0], first.std[0]) if last is None else (last.start + EDGE * last.std, last.std)
            away, outside, wide = side * (mean - centre) / abs(scale), side * (mean - edge), std / abs(scale)
            far = away > FAR and (outside > std or wide <= ALIKE)
            narrow = away > EDGE and outside > EDGE * std and wide < NARROW
            unit = wide > FAR and mostly and side * (end - edge) > FAR * abs(scale)
            if not far and not narrow and not unit:
                continue
            own = abs(scale) if fit.low == fit.high else max(std, LEAST_SCALE * abs(scale))
            start = side * max(side * edge, side * mean - EDGE * own)
            if not far and not narrow:
                more = f"varies {_often(wide)} times as much as before, as in another unit"
                told = f"column {first.name!r} {more}: it gets a new scale"
            before = len(parts)
            new = Beyond(first.name, start, side * own)
            parts = self._with(parts, new, f"column {first.name!r} moved far", told)
            if len(parts) == before:
                continue
            if last is None:
                limits = (wider.limits[0], edge) if side > 0 else (edge, wider.limits[1])
                wider = replace(wider, limits=limits)
            else:
                parts = [replace(last, limit=edge) if part is last else part for part in parts]
            if not far and not narrow:
                wider = replace(wider, apart=first.apart or first.limits == (None, None))
        finest = min(first.std[0], *(abs(part.std) for part in beyond), np.inf)
        if len(parts) == count and 0 < fit.high - fit.low < NARROW * finest:
            less = f"varies {_often(finest / std)} times less than before: if it has another unit, convert it"
            self.notes.append(f"column {first.name!r} {less}")
        return [wider if part is first else part for part in parts]


def _often(times: float) -> str:
    return f"{times:,.0f}" if times < 1e6 else f"{times:.1e}"


def _marked(own: list[Part]) -> bool:
    """Whether one of a column's inputs tells a missing value from the mean."""
    return any(isinstance(part, Missing) or (isinstance(part, (Number, Time)) and part.missing) for part in own)


def _lacking(parts: list[Part], own: list[Part]) -> list[Part]:
    """These parts after a file with rows that have no value in a column of parts `own`, if nothing marks them."""
    first = own[0]
    if not isinstance(first, (Number, Time)) or _marked(own):
        return parts
    return [replace(first, lacked=True) if part is first else part for part in parts]


class _Fit:
    """Looks at one column. `known`: the texts that have an input already; None: the column is new."""

    def __init__(self, shape: tuple[int, ...], category: bool, known: Collection[str] | None) -> None:
        self._shape, self._category, self._asked = shape, category, category
        self._known: Collection[str] = known or ()
        self._old = known is not None
        self.texts: dict[str, None] = {}
        self.values, self.missing, self.full = 0, False, False  # rows with a value; whether some have none
        self.low, self.high = np.inf, -np.inf
        self._moments = Moments(shape)
        self._dates: tuple[set[int], set[int]] | None = None  # for dates, some of their weekdays and times of the day
        self._next: float | None = None  # what follows in a column that counts rows
        self._counts = True  # whether it does so far
        self.numbers = Sample()  # of numbers and dates

    def see(self, values: Values, where: Where) -> None:
        if self._category or values.dtype == object:
            self._see_texts(values, where)
            return
        numbers = measured(values, where)
        if values.dtype.kind == "M":
            self._see_dates(numbers[~np.isnan(numbers)])
        elif not self._shape:
            self._see_range(numbers)
        if not self._shape:
            self.numbers.see(numbers[~np.isnan(numbers)])
        with np.errstate(over="ignore", invalid="ignore"):  # `column` raises if the result is not finite
            there = self._moments.see(numbers)
        self.missing |= not there.all()
        self.values += int(there.reshape(len(there), -1).any(1).sum())

    def _see_texts(self, values: Values, where: Where) -> None:
        self._category = True
        for row, text in enumerate(as_text(values, where)):
            if text is None:
                self.missing = True
                continue
            self.values += 1
            if text in self._known or text in self.texts or spelt(text, self._known or self.texts) != text:
                continue
            if len(self._known) + len(self.texts) < MOST_CATEGORIES:
                self.texts[text] = None
            elif self._old:
                self.full = True
            else:
                where.bad(row, f"more than {MOST_CATEGORIES:,} distinct categories are too many; --drop leaves it out")

    def _see_dates(self, seconds: Floats) -> None:
        self._dates = self._dates or (set(), set())
        if len(seconds):
            self.low, self.high = min(self.low, seconds.min()), max(self.high, seconds.max())
            for found, of_cycle in zip(self._dates, (seconds // DAY % 7, seconds % DAY), strict=True):
                found.update(np.unique(of_cycle)[:2].astype(int).tolist())

    def _see_range(self, numbers: Floats) -> None:
        there = numbers[~np.isnan(numbers)]
        if len(there):
            self.low, self.high = min(self.low, float(there.min())), max(self.high, float(there.max()))
        if self._counts:
            first = numbers[0] if self._next is None else self._next
            self._counts = len(there) == len(numbers) and bool((numbers == first + np.arange(len(numbers))).all())
            self._next = first + len(numbers)

    def moments(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The means and standard deviations; 1 for a constant."""
        of = self._moments
        count, mean, squares = (np.atleast_1d(a).reshape(-1) for a in (of.count, of.mean, of.squares))
        if len(self._shape) > 1:  # one scale for all values
            middle = np.array([(count * mean).sum() / count.sum()])
            squares = np.array([(squares + count * (mean - middle) ** 2).sum()])
            count, mean = np.array([count.sum()]), middle
        std = np.sqrt(squares / np.maximum(count, 1))
        std = np.where(std > 1e-12 * np.maximum(np.abs(mean), 1e-300), std, np.where(np.isfinite(std), 1.0, std))
        return tuple(mean.tolist()), tuple(std.tolist())

    def outside(self) -> Ends | None:
        """The usual range of its numbers, if some are far outside it; None: there are none, or too few to tell."""
        ends = None if self._category or self._shape else self.numbers.ends()
        return ends if ends is not None and ends.far(np.array([self.low, self.high])).any() else None

    def warning(self) -> str | None:
        """What is strange about the column, such as an id's; None: nothing."""
        if self._category and len(self.texts) >= HARDLY and 2 * len(self.texts) > self.values:
            return f"has {len(self.texts):,} different texts in {self.values:,} rows, which hardly repeat"
        digits = [text for text in self.texts if DIGITS.fullmatch(text)]
        if not self._asked and len(self.texts) >= HARDLY and 2 * len(digits) > len(self.texts):
            shown = f"{len(self.texts):,} different texts such as {digits[0]!r}"
            return f"has {shown}, which are read as neither numbers nor dates"
        if not self._category and self._dates is None and not self._shape and self._counts and self.values >= HARDLY:
            return "only counts the rows"
        return None

    def column(self, name: str, path: Path) -> Part:
        if self._category:
            return Category(name, tuple(sorted(self.texts)))
        mean, std = self.moments()
        if not np.isfinite([*mean, *std]).all():
            bad(path, f"column {name!r}", "it holds infinity, or numbers too large to scale")
        if self._dates is not None:
            varies = (self.high - self.low > A_SEASON, *(len(found) > 1 for found in self._dates))
            cycles = tuple(cycle for cycle, does in zip(CYCLES, varies, strict=True) if does)
            return Time(name, mean[0], max(std[0], YEAR), cycles, self.missing)
        seen = None if self._shape else (self.low, self.high)
        return Number(name, self._shape, mean, std, self.missing and not self._shape, seen)
