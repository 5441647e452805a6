"""CSV: UTF-8, a header line, then a line a row; separated by commas, semicolons or tabs, as the header shows."""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import IO

import numpy as np

from evcl.tables.source import MISSING, MOST_COLUMNS, MOST_LINE_BYTES, ROWS_A_PIECE, Piece, bad

SEPARATORS = ",;\t"


class CsvFile:
    untyped, images = True, False

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            first = next(_Lines(path, file), "")
        self._separator = max(SEPARATORS, key=first.count)  # the comma where there is none
        with path.open("rb") as file:
            header = next(self._rows(file), (1, []))[1]
        if not header:
            bad(path, "line 1", "it is empty; a CSV file begins with a line of column names")
        if len(header) > MOST_COLUMNS:
            bad(path, "line 1", f"{len(header)} columns, and the most is {MOST_COLUMNS}")
        self._names = [name.strip() for name in header]
        for i, name in enumerate(self._names):
            if not name:
                bad(path, "line 1", f"column {i + 1} has no name; name it (pandas: to_csv(index=False) leaves one out)")
            if name in self._names[:i]:
                bad(path, "line 1", f"two columns are called {name!r}")

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return dict.fromkeys(self._names, ())

    def pieces(self, names: Collection[str]) -> Iterator[Piece]:
        with self.path.open("rb") as file:
            rows = self._rows(file)
            next(rows, None)
            numbers: list[int] = []
            cells: list[list[str]] = []
            for line, row in rows:
                if len(row) != len(self._names):
                    bad(self.path, f"line {line}", f"{len(row)} cells, and the header has {len(self._names)}")
                numbers.append(line)
                cells.append(row)
                if len(cells) == ROWS_A_PIECE:
                    yield self._piece(numbers, cells, names)
                    numbers, cells = [], []
            if cells:
                yield self._piece(numbers, cells, names)

    def _piece(self, numbers: list[int], cells: list[list[str]], names: Collection[str]) -> Piece:
        columns = {}
        for name, column in zip(self._names, zip(*cells, strict=True), strict=True):
            if name not in names:
                continue
            values = np.empty(len(column), dtype=object)
            values[:] = [None if (text := cell.strip()) in MISSING else text for cell in column]
            columns[name] = values
        return Piece(columns, lambda i: f"line {numbers[i]}", len(cells))

    def _rows(self, file: IO[bytes]) -> Iterator[tuple[int, list[str]]]:
        """Each row with the number of its first line. Blank lines are no rows."""
        lines = _Lines(self.path, file)
        reader = csv.reader(lines, delimiter=self._separator, strict=True)
        while True:
            lines.begin()
            try:
                row = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                bad(self.path, f"line {lines.start}", f"{error}; is a quote left open, or a line without its end?")
            if row:
                yield lines.start, row


class _Lines:
    """The lines of a file as text, none longer than the limit, nor all the lines of a row (its quotes left open)."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path, self._file, self._number, self._left = path, file, 0, MOST_LINE_BYTES
        self.start = 1

    def begin(self) -> None:
        """A row begins with the next line."""
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
