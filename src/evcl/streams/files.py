"""Files of a table as one stream of rows, in the order of time, read in pieces."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from evcl._core.errors import EvclError
from evcl.streams.evaluation import cut
from evcl.tables.commands import open_source
from evcl.tables.creating import like_numbers
from evcl.tables.rows import check_classes, check_there, present, targets_of
from evcl.tables.source import Dialect, Floats, Kind, Piece, Source, Target, Values, bad, kind_of
from evcl.tables.values import Fraction, Where, measured

TARGET, TIME = "\0target", "\0time"  # names of columns that no file has


class RowDigest:
    """A digest of rows for each column, whatever pieces they come in: it tells if they are the same rows again.

    The digests of columns are apart, so that a file may have more columns, or fewer, when it has grown. `known`: those
    of rows that were read by an earlier command.
    """

    def __init__(self, known: Mapping[str, str] = {}) -> None:
        self._known, self._columns = known, dict[str, Any]()

    def add(self, piece: Piece, rows: int | None = None) -> None:
        """The next rows: those of a piece, or its first ones."""
        for name, values in piece.columns.items():
            self._columns.setdefault(name, hashlib.sha256()).update(_bytes(values[:rows]))

    @property
    def digests(self) -> dict[str, str]:
        return {name: column.hexdigest()[:16] for name, column in self._columns.items()} or dict(self._known)

    def differing(self, other: RowDigest) -> list[str]:
        """The columns of both whose values differ; the target also if only one has any."""
        mine, its = self.digests, other.digests
        return [name for name in mine if its.get(name, "" if name == TARGET else mine[name]) != mine[name]]


def _bytes(values: Values) -> bytes:
    """The same for the same values, also if a later row makes numbers of integers."""
    if values.dtype == object:
        return "".join("-" if text is None else f"{len(text)}:{text}" for text in values).encode()
    if values.dtype.kind == "M":
        return values.astype("datetime64[us]").tobytes()
    numbers = np.where(np.ma.getmaskarray(values), np.nan, np.ma.getdata(values))
    return np.where(np.isnan(numbers), np.nan, numbers + 0.0).tobytes()  # one NaN, one zero


@dataclass
class Asked:
    """What the user says of the files: the target, and what it is (None: decided from the files), the column of time,
    columns to leave out, and what a model has learned each column as.
    """

    target: str
    kind: Target | None = None
    time: str | None = None
    drop: Sequence[str] = ()
    dialect: Dialect = field(default_factory=Dialect)
    kinds: Mapping[str, Kind] = field(default_factory=dict)


class Files:
    """Some files as one stream of rows. `kind` is what the target is; `notes` what the user should know."""

    def __init__(self, paths: Sequence[Path], asked: Asked) -> None:
        self.asked, self.notes, self._kinds = asked, list[str](), dict(asked.kinds)
        try:
            self.kind: Target = asked.kind or "class"
            files = [self._look(path) for path in paths]
        except Fraction:
            if asked.kind is not None:
                raise
            self.kind, self._kinds = "number", dict(asked.kinds)
            files = [self._look(path) for path in paths]
            self.notes.append(f"{asked.target} has numbers with fractions, so it is learned as a number")
        if asked.time is not None:
            files.sort(key=lambda one: one.times[0] if len(one.times) else 0.0)
        self.files = files
        self.rows = sum(one.rows for one in files)
        if not self.rows:
            bad(paths[0], "it holds no rows")
        times = np.concatenate([one.times for one in files])
        self._sorted = asked.time is None or bool((np.diff(times) >= 0).all())
        if not self._sorted:
            self.notes.append(f"the rows are not in the order of {asked.time}: they are all read, and sorted")
        if self.kind == "class" and asked.kind is None:
            names = set().union(*(one.labels for one in files))
            self.notes += like_numbers(files[0].source, asked.target, names, self.rows)
        self.told = [one.source.told for one in files if one.source.told is not None]

    @property
    def identity(self) -> list[list[str]]:
        """What tells these files from others: name and first row of each. A file may grow."""
        return [[one.source.path.name, one.digest] for one in self.files]

    def digest(self, rows: int) -> RowDigest:
        """Of the first rows."""
        digest = RowDigest()
        for piece in self.pieces():
            digest.add(piece, rows)
            rows -= piece.rows
            if rows <= 0:
                break
        return digest

    def kinds(self) -> dict[str, Kind]:
        """What each column holds, as far as the files say."""
        kinds: dict[str, Kind] = {}
        for one in self.files:
            for name, kind in one.kinds.items():
                kinds.setdefault(name, kind)
        return kinds

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: one.source.shapes[name] for one in reversed(self.files) for name in one.kinds}  # the first says

    def pieces(self) -> Iterator[Piece]:
        """All rows in order: the columns that are learned from, and TARGET and TIME."""
        whole = (piece for one in self.files for piece in self._pieces(one))
        if self._sorted:
            yield from whole
            return
        together = _joined([(piece, 0, piece.rows) for piece in whole])
        yield together.take(np.argsort(together.columns[TIME], kind="stable"))

    def _pieces(self, one: _File) -> Iterator[Piece]:
        many = len(self.files) > 1
        for piece in one.source.pieces(self._read(one.kinds)):
            columns = {name: piece.columns[name] for name in one.kinds}
            columns[TARGET] = targets_of(one.source, piece, self.asked.target, self.kind)
            columns[TIME] = self._times(one.source, piece)
            place = (lambda i, p=piece: f"{one.source.path.name}, {p.place(i)}") if many else piece.place
            yield Piece(columns, place, piece.rows)

    def _read(self, names: Iterable[str]) -> list[str]:
        return list(dict.fromkeys([*names, self.asked.target, *([self.asked.time] if self.asked.time else [])]))

    def _times(self, source: Source, piece: Piece) -> Floats:
        """When each row of a piece was: seconds since 1970, or a number; NaN without --time."""
        if self.asked.time is None:
            return np.full(piece.rows, np.nan)
        name = self.asked.time
        values, where = piece.columns[name], Where(source.path, piece, name)
        if values.dtype == object or values.ndim > 1:
            where.bad(0, "--time should be a column of dates or numbers, but this is neither")
        times = measured(values, where)
        if np.isnan(times).any():
            fix = "fill it in, or leave out --time to take the rows in the order of the files"
            where.bad(int(np.isnan(times).argmax()), f"the time is missing: {fix}")
        return times

    def _look(self, path: Path) -> _File:
        """Read the target and the time of a file, to know what they are and how many rows there are."""
        asked = self.asked
        if path.is_dir():
            bad(path, "it is a folder, but evcl stream learns rows of tables: name files")
        source = open_source(path, dialect=asked.dialect)
        check_there(source, asked.target, "target")
        if asked.time is not None:
            check_there(source, asked.time, "time")
        for name in (name for name in asked.drop if name not in source.shapes):
            bad(path, f"there is no column {name!r} to drop")
        names = [name for name in source.shapes if name != asked.target and name not in asked.drop]
        own: dict[str, Kind] = {asked.target: "text" if self.kind == "class" else "number"}
        source.expect({**self._kinds, **own}, asked.target)
        file, times = _File(source), []
        for piece in source.pieces(self._read([])):
            file.rows += piece.rows
            targets = targets_of(source, piece, asked.target, self.kind)
            if self.kind == "class":
                file.labels.update(targets[present(targets)])
                check_classes(source, asked.target, len(file.labels))
            times.append(self._times(source, piece))
        file.times = np.concatenate([np.zeros(0), *times])
        first = next(source.pieces(self._read(names)), None)
        if first is not None:
            if asked.time is not None and first.columns[asked.time].dtype.kind != "M":
                names = [name for name in names if name != asked.time]  # a number that grows tells nothing
            file.kinds = {name: kind_of(first.columns[name]) for name in names}
            self._kinds = {**file.kinds, **self._kinds}  # later files are read alike
            row = [(name, str(first.columns[name][0])) for name in sorted(first.columns)]
            file.digest = hashlib.sha256(repr(row).encode()).hexdigest()[:16]
        if not names:
            raise EvclError(f"{path}: beside {asked.target!r} there is no column to learn from")
        return file


@dataclass
class _File:
    source: Source
    rows: int = 0
    times: Floats = field(default_factory=lambda: np.zeros(0))
    kinds: dict[str, Kind] = field(default_factory=dict)  # of the columns that are learned from
    digest: str = ""
    labels: set[str] = field(default_factory=set)


def batches(pieces: Iterator[Piece], size: Callable[[int], int], skip: int = 0) -> Iterator[Piece]:
    """The rows of files in batches (see `cut`). One ends where the next file has other columns."""
    parts = cut(pieces, lambda one: one.rows, size, skip, lambda one, other: one.columns.keys() == other.columns.keys())
    return map(_joined, parts)


def _joined(parts: Sequence[tuple[Piece, int, int]]) -> Piece:
    """The rows of these parts of pieces, which need to have the same columns."""
    names = dict.fromkeys(name for piece, _, _ in parts for name in piece.columns)
    for name in (name for name in names for piece, _, _ in parts if name not in piece.columns):
        raise EvclError(f"the files are to be sorted by time, so they need the same columns, but one has no {name!r}")
    columns = {name: _concatenated([piece.columns[name][start:end] for piece, start, end in parts]) for name in names}
    places = [(piece, row) for piece, start, end in parts for row in range(start, end)]
    return Piece(columns, lambda i: places[i][0].place(places[i][1]), len(places))


def _concatenated(arrays: Sequence[Values]) -> Values:
    """The arrays in one; masked values stay so."""
    if any(np.ma.isMaskedArray(a) for a in arrays):
        joined: Values = np.ma.concatenate(arrays)  # type: ignore[no-untyped-call]
        return joined
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
