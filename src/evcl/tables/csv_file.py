"""CSV files: UTF-8, with a header line, perhaps compressed (.gz). The first lines decide what separates the columns."""

from __future__ import annotations

import csv
import gzip
import itertools
import re
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from evcl._core.bounds import BYTES_A_PIECE, MOST_LINE_BYTES, ROWS_A_PIECE, rows_a_piece
from evcl.tables.arrow_csv import column_pieces
from evcl.tables.source import Dialect, Piece, bad
from evcl.tables.survey import TextSource

SEPARATORS = ",;\t|"
LARGE_BYTES = 300_000  # from which on pyarrow reads a file, if it is installed
SEPARATOR_ROWS = 20  # the rows after the header that decide on the separator


class CsvFile(TextSource):
    def __init__(self, path: Path, dialect: Dialect | None = None) -> None:
        super().__init__(path, dialect)
        with self._lines() as lines:
            first = list(itertools.islice(lines.alone(), 1 + SEPARATOR_ROWS))
        line = first[0].strip('\r\n"') if first else ""
        self._above = int(line.lower().startswith("sep=") and len(line) == 5)  # Excel writes it above the header
        self.separator = self.dialect.separator or (line[4] if self._above else _separator(first))
        with self._lines() as lines:
            header = next(self._rows(lines), (1, []))[1]
            self._header_lines = lines.number
        large = path.stat().st_size >= LARGE_BYTES and self.separator != " " and find_spec("pyarrow") is not None
        self._with_arrow = large and self._regular()
        if not header:
            bad(path, "line 1", "it is empty; a CSV file begins with a line of column names")
        self._named(header, "line 1", ", or for a pandas index write index=False")

    @property
    def _count(self) -> int:
        """How many rows are read at a time."""
        return min(ROWS_A_PIECE, rows_a_piece(len(self._names)))

    @contextmanager
    def _lines(self) -> Iterator[_Lines]:
        packed = self.path.suffix.lower() == ".gz"
        with gzip.open(self.path, "rb") if packed else self.path.open("rb") as file:
            try:
                yield _Lines(self.path, file)  # type: ignore[arg-type]
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                bad(self.path, f"it is truncated or not a gzip file ({str(error) or type(error).__name__})")

    def _regular(self) -> bool:
        """Whether there are none of the things that pyarrow reads in another way: quotes inside a cell, and odd ends of
        lines.
        """
        mark = re.escape(self.separator.encode())
        inside = re.compile(rb'[^\r\n"' + mark + rb']"[^\r\n"' + mark + rb"]")
        with self._lines() as lines:
            while block := lines.block():
                if b"\0" in block or block.count(b"\r") != block.count(b"\r\n"):
                    return False
                if b'"' in block and inside.search(block):
                    return False
        return True

    def cells(self, names: Collection[str]) -> Iterator[Piece]:
        done, own = 0, [name for name in self._names if name in names]
        if self._with_arrow and own:
            reader = column_pieces(self.path, self._names, own, self.separator, self._header_lines)
            while isinstance(columns := next(reader), dict):
                rows = len(columns[own[0]])
                yield Piece({}, lambda i, first=done: self._line(first + i), rows, columns)  # type: ignore[misc]
                done += rows
            if columns:  # that was all
                return
        for piece in self._plain_cells(names):
            if done == 0:
                yield piece
            done = max(0, done - piece.rows)

    def _line(self, row: int) -> str:
        """The place of a row that pyarrow has read, which does not count lines."""
        for piece in self._plain_cells(self._names[:1]):
            if row < piece.rows:
                return piece.place(row)
            row -= piece.rows
        return f"row {row + 1}"

    def _plain_cells(self, names: Collection[str]) -> Iterator[Piece]:
        with self._lines() as lines:
            rows = self._rows(lines)
            next(rows, None)
            while some := self._read(rows):
                columns = zip(self._names, zip(*(cells for _, cells in some), strict=True), strict=True)
                texts = {name: list(map(str.strip, cells)) for name, cells in columns if name in names}
                yield Piece({}, lambda i, some=some: f"line {some[i][0]}", len(some), texts)  # type: ignore[misc]

    def _read(self, rows: Iterator[tuple[int, list[str]]]) -> list[tuple[int, list[str]]]:
        """Some rows, each with its line number; none at the end."""
        numbered, taken = [], 0
        for line, row in itertools.islice(rows, self._count):
            if len(row) != len(self._names):
                bad(self.path, f"line {line}", f"{len(row)} cells, but the header has {len(self._names)}")
            numbered.append((line, row))
            taken += sum(map(len, row))
            if taken > BYTES_A_PIECE:
                break
        return numbered

    def _rows(self, lines: _Lines) -> Iterator[tuple[int, list[str]]]:
        """Yield each row with the number of its first line; blank lines are skipped."""
        for _ in range(self._above):
            next(lines, None)
        reader = _reader(lines, self.separator)
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


def _reader(lines: Iterator[str], separator: str) -> Iterator[list[str]]:
    if separator == " ":  # any number of spaces or tabs
        lines = (" ".join(line.split()) for line in lines)
    return csv.reader(lines, delimiter=separator, strict=True)


def _separator(lines: Sequence[str]) -> str:
    """The separator with which most of the lines have as many cells as the header; a single column has none."""

    def fit(separator: str) -> tuple[float, int]:
        try:
            header, *rows = [len(row) for row in _reader(iter(lines), separator) if row]
        except (csv.Error, ValueError):  # a quote that ends below these lines; no line at all
            return (0.5, lines[0].count(separator)) if lines else (0, 0)
        same = sum(width == header for width in rows) / len(rows) if rows else 1.0
        return (same, header) if header > 1 else (0, 0)

    best = max(SEPARATORS, key=fit)
    return " " if fit(best) == (0, 0) and fit(" ")[0] == 1 and len(lines) > 1 else best


class _Lines:
    """Iterates over the lines of a file as text. Limits the size of each row, because a quote left open joins all later
    lines into one.
    """

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path, self._file, self.number, self._left = path, file, 0, MOST_LINE_BYTES
        self.start = 1

    def begin(self) -> None:
        """Start a new row at the next line."""
        self.start, self._left = self.number + 1, MOST_LINE_BYTES

    def block(self) -> bytes:
        """The next lines, about a million bytes."""
        return self._file.read(MOST_LINE_BYTES) + self._file.readline(MOST_LINE_BYTES)

    def alone(self) -> Iterator[str]:
        """The lines, each as a row of its own."""
        for line in self:
            yield line
            self.begin()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line, part = b"", b" "
        while part and not line.endswith(b"\n") and len(line) <= self._left:
            part = self._file.readline(self._left + 1 - len(line))
            line += part
        if not line:
            raise StopIteration
        self.number += 1
        if len(line) > self._left:
            what = "longer" if self.number == self.start else "a row that begins here is longer"
            bad(self._path, f"line {self.start}", f"{what} than {MOST_LINE_BYTES:,} bytes; is a quote left open?")
        self._left -= len(line)
        if self.number == 1 and line.startswith((b"\xff\xfe", b"\xfe\xff")):
            bad(self._path, "it is UTF-16; save it as UTF-8, in Excel as CSV UTF-8")
        if b"\0" in line:
            bad(self._path, f"line {self.number}", "it has the character NUL; the file is damaged, or not UTF-8")
        try:
            return line.decode("utf-8-sig" if self.number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            bad(self._path, f"line {self.number}", f"byte {error.start + 1} is not UTF-8; save the file as UTF-8")
