"""Excel files (.xlsx), read with openpyxl: the first sheet, whose first row has the names of the columns."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import date, datetime, time, timedelta
from itertools import islice
from pathlib import Path
from typing import Any

from evcl._core.bounds import rows_a_piece
from evcl._core.errors import EvclError, extra
from evcl.data.formats import BROKEN
from evcl.tables.source import Dialect, Piece, bad, line_of
from evcl.tables.survey import TextSource


class ExcelFile(TextSource):
    """Cells are turned into text, so that words among numbers, such as n/a, are treated as in any file of text."""

    def __init__(self, path: Path, dialect: Dialect | None = None) -> None:
        super().__init__(path, dialect)
        with self._rows() as rows, warnings.catch_warnings(action="ignore"):
            _, header = next(rows, (1, []))
        while header and not header[-1]:
            header.pop()
        if not header:
            bad(path, "its first sheet is empty; the first row should have the names of the columns")
        self._named(header, "row 1", "")

    @property
    def told(self) -> str | None:
        if len(self._sheets) == 1:
            return super().told
        more = (super().told or "").removeprefix("read ")
        first = f"read sheet {self._sheets[0]!r}, the first of {len(self._sheets)}"
        return f"{first}; {more}" if more else first

    @contextmanager
    def _rows(self) -> Iterator[Iterator[tuple[int, list[str]]]]:
        """The rows that have a cell, each with its number."""
        with extra("tables", f"{self.path}: Excel needs openpyxl"):
            from openpyxl import load_workbook
            from openpyxl.utils.exceptions import InvalidFileException
        try:
            with warnings.catch_warnings(action="ignore"):  # of styles and the like that openpyxl does not know
                book = load_workbook(self.path, read_only=True, data_only=True)
            if not book.worksheets:
                bad(self.path, "it has no sheet of cells")
            self._sheets = [sheet.title for sheet in book.worksheets]
            texts = (
                (number, [_text(cell) for cell in row])
                for number, row in enumerate(book.worksheets[0].iter_rows(values_only=True), 1)
            )
            yield ((number, row) for number, row in texts if any(row))
            book.close()
        except EvclError:
            raise
        except (*BROKEN, InvalidFileException, KeyError, AttributeError, TypeError) as error:
            bad(self.path, f"it is truncated or not an Excel file ({line_of(error)})")

    def cells(self, names: Collection[str]) -> Iterator[Piece]:
        wanted = [(i, name) for i, name in enumerate(self._names) if name in names]
        with self._rows() as rows:
            next(rows, None)
            while True:
                with warnings.catch_warnings(action="ignore"):
                    some = list(islice(rows, rows_a_piece(len(self._names))))
                if not some:
                    return
                for number, row in some:
                    if any(row[len(self._names) :]):
                        bad(self.path, f"row {number}", f"it has cells beyond the {len(self._names)} named columns")
                texts = {name: [row[i] if i < len(row) else "" for _, row in some] for i, name in wanted}
                places = [f"row {number}" for number, _ in some]
                yield Piece({}, places.__getitem__, len(some), texts)


def _text(cell: Any) -> str:
    if cell is None:
        return ""
    if isinstance(cell, (datetime, date, time)):
        return cell.isoformat(" ", "seconds") if isinstance(cell, datetime) else cell.isoformat()
    if isinstance(cell, timedelta):
        return repr(cell.total_seconds())
    return str(cell).strip()
