"""CSV files: UTF-8, with a header line. The header decides whether commas, semicolons or tabs separate the columns."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from evcl.tables.source import MISSING, MOST_COLUMNS, MOST_LINE_BYTES, ROWS_A_PIECE, Piece, Values, bad

SEPARATORS = ",;\t"


class CsvFile:
    untyped, images = True, False

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            first = next(_Lines(path, file), "")
        self._separator = max(SEPARATORS, key=first.count)  # a single column has none: then a comma
        with path.open("rb") as file:
            header = next(self._rows(_Lines(path, file)), (1, []))[1]
        if not header:
            bad(path, "line 1", "it is empty; a CSV file begins with a line of column names")
        if len(header) > MOST_COLUMNS:
            bad(path, "line 1", f"{len(header)} columns, but the maximum is {MOST_COLUMNS}")
        self._names = [name.strip() for name in header]
        for i, name in enumerate(self._names):
            if not name:
                bad(path, "line 1", f"column {i + 1} has no name; name it, or for a pandas index write index=False")
            if name in self._names[:i]:
                bad(path, "line 1", f"two columns are called {name!r}")

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return dict.fromkeys(self._names, ())

    def pieces(self, names: Collection[str]) -> Iterator[Piece]:
        with self.path.open("rb") as file:
            lines = _Lines(self.path, file)
            rows = self._rows(lines)
            next(rows, None)
            while True:
                numbers: Sequence[int]
                numbers, columns = lines.read_plain(self._separator, len(self._names)) or self._read(rows)
                if not numbers:
                    return
                found = {name: _values(c) for name, c in zip(self._names, columns, strict=True) if name in names}
                yield Piece(found, lambda i, numbers=numbers: f"line {numbers[i]}", len(numbers))  # type: ignore[misc]

    def _read(self, rows: Iterator[tuple[int, list[str]]]) -> tuple[list[int], Sequence[Sequence[str]]]:
        """Read some rows with `csv`, which handles quotes; returns their line numbers, and their cells by column."""
        numbers, cells = [], []
        for line, row in itertools.islice(rows, ROWS_A_PIECE):
            if len(row) != len(self._names):
                bad(self.path, f"line {line}", f"{len(row)} cells, but the header has {len(self._names)}")
            numbers.append(line)
            cells.append(row)
        return numbers, list(zip(*cells, strict=True))

    def _rows(self, lines: _Lines) -> Iterator[tuple[int, list[str]]]:
        """Yield each row with the number of its first line; blank lines are skipped."""
        reader = csv.reader(lines, delimiter=self._separator, strict=True)
        while True:
            lines.begin()
            try:
                row = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                bad(self.path, f"line {lines.start}", f"{error}; is a quote left open, or the file cut short?")
            if row:
                yield lines.start, row


def _values(cells: Sequence[str]) -> Values:
    found = np.empty(len(cells), dtype=object)
    found[:] = [None if cell in MISSING else cell for cell in map(str.strip, cells)]
    return found


class _Lines:
    """Iterates over the lines of a file as text. Limits the size of each row, because a quote left open joins all later
    lines into one.
    """

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path, self._file, self._number, self._left = path, file, 0, MOST_LINE_BYTES
        self.start = 1

    def begin(self) -> None:
        """Start a new row at the next line."""
        self.start, self._left = self._number + 1, MOST_LINE_BYTES

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._file.readline(self._left + 1)
        if not line:
            raise StopIteration
        self._number += 1
        if len(line) > self._left:
            what = "longer" if self._number == self.start else "a row that begins here is longer"
            bad(self._path, f"line {self.start}", f"{what} than {MOST_LINE_BYTES:,} bytes; is a quote left open?")
        self._left -= len(line)
        try:
            return line.decode("utf-8-sig" if self._number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            bad(self._path, f"line {self._number}", f"byte {error.start + 1} is not UTF-8; save the file as UTF-8")

    def read_plain(self, separator: str, width: int) -> tuple[range, Sequence[Sequence[str]]] | None:
        """Read the next lines fast, without `csv`, if none of them is blank or has quotes: returns their numbers, and
        their cells by column. Otherwise reads nothing and returns None. Most files are like this, and `csv` takes twice
        as long.
        """
        start, most = self._file.tell(), csv.field_size_limit()
        lines = list(itertools.islice(iter(lambda: self._file.readline(most), b""), ROWS_A_PIECE))
        try:
            text = b"".join(lines).decode().replace("\r\n", "\n").removesuffix("\n")
        except UnicodeDecodeError:
            text = ""
        rows = text.split("\n")
        if (
            max(map(len, lines), default=most) == most
            or any(mark in text for mark in '"\r\0')
            or any(not row or row.count(separator) != width - 1 for row in rows)
        ):
            self._file.seek(start)
            return None
        cells = separator.join(rows).split(separator)
        first, self._number = self._number + 1, self._number + len(rows)
        return range(first, self._number + 1), [cells[i::width] for i in range(width)]
