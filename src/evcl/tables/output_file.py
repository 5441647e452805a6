"""Files of predictions: CSV, always with commas and decimal points, or Parquet. Rows are written piece by piece."""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from evcl._core.errors import EvclError, extra
from evcl.tables.source import Values, as_number

STANDARD = Path("-")  # standard output, as CSV
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what a spreadsheet takes for the beginning of a formula
ENDINGS = (".csv", ".parquet")
EXPONENT_FROM = 1e9  # from here on, numbers are written with an exponent


class Column(NamedTuple):
    """Some rows of an output column: numbers, or text as objects (None or masked: missing)."""

    values: Values | Sequence[Any]
    decimals: int | None = None  # a CSV file has this many; None: as many as the number needs
    number: bool = False  # whether text stands for numbers: a CSV file has it as it is, a Parquet file has the numbers


def check_ending(path: Path) -> None:
    """Raise unless the name of a file says in which format to write it."""
    if path != STANDARD and path.suffix.lower() not in ENDINGS:
        raise EvclError(f"--out {path}: its name should end in .csv or .parquet; - writes CSV to standard output")


@contextmanager
def writing(path: Path, into: Path, keep_formulas: bool = False) -> Iterator[_Csv | _Parquet]:
    """A writer of the format that the name of `path` asks for, which is given rows of the same columns each time. It
    writes to the file `into`, or to standard output.
    """
    if path.suffix.lower() == ".parquet":
        with closing(_Parquet(into)) as writer:
            yield writer
        return
    with nullcontext(sys.stdout) if path == STANDARD else into.open("w", encoding="utf-8", newline="") as file:
        yield _Csv(file, keep_formulas)


class _Csv:
    def __init__(self, file: Any, keep_formulas: bool = False) -> None:
        self._writer, self._began = csv.writer(file, lineterminator="\n"), False
        self._safe = (lambda text: text) if keep_formulas else _no_formula

    def write(self, columns: Mapping[str, Column]) -> None:
        if not self._began:
            self._writer.writerow([self._safe(name) for name in columns])
            self._began = True
        cells = (_cells(column) for column in columns.values())
        self._writer.writerows(zip(*(map(self._safe, column) for column in cells), strict=True))


def _no_formula(text: str) -> str:
    """A text that a spreadsheet shows as it is. What it would take for a formula gets a quote; numbers are none."""
    if not text.startswith(FORMULA) or as_number(text) is not None:
        return text
    return f"'{text}"


def fixed(value: float, decimals: int) -> str:
    """A number with this many decimals; a very large one as 1.546e+29."""
    return f"{value:.{decimals}{'f' if abs(value) < EXPONENT_FROM else 'e'}}"


def _cells(column: Column) -> Iterable[str]:
    values, decimals, _ = column
    if not isinstance(values, np.ndarray):
        values = np.array(values, dtype=object)
    if decimals is not None:
        return [fixed(value, decimals) for value in values.tolist()]
    missing = np.ma.getmaskarray(values) | (np.isnan(values) if values.dtype.kind == "f" else False)
    pairs = zip(values.tolist(), missing.tolist(), strict=True)
    return ["" if absent or value is None else str(value) for value, absent in pairs]


class _Parquet:
    """Opened with the first rows, which determine the types of the columns."""

    def __init__(self, path: Path) -> None:
        with extra("tables", "Parquet needs pyarrow"):
            import pyarrow as pa
            import pyarrow.parquet as pq
        self._path, self._pa, self._pq = path, pa, pq
        self._writer: Any = None

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def write(self, columns: Mapping[str, Column]) -> None:
        table = self._pa.table({name: self._array(column) for name, column in columns.items()})
        if self._writer is None:
            self._writer = self._pq.ParquetWriter(self._path, table.schema)
        self._writer.write_table(table)

    def _array(self, column: Column) -> Any:
        values, decimals, number = column
        text = not isinstance(values, np.ndarray) or values.dtype == object
        if text and number:
            values = np.array([math.nan if v is None else as_number(v) for v in values], dtype=np.float64)
        elif text:
            return self._pa.array([None if v is None else str(v) for v in values], self._pa.string())
        mask = np.ma.getmaskarray(values) if np.ma.isMaskedArray(values) else None
        data: Values = np.ma.getdata(values)
        if data.dtype.kind == "f":
            mask = np.isnan(data) if mask is None else mask | np.isnan(data)
            data = data.astype(np.float64) if decimals is None else data.astype(np.float64).round(decimals)
        return self._pa.array(data, mask=mask)
