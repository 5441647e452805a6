"""Large CSV files, read with pyarrow: the same cells as `csv_file.py` reads, several times as fast."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, overload

import numpy as np

from evcl._core.bounds import ROWS_A_PIECE, rows_a_piece
from evcl.tables.source import MAX_EXACT, Floats

if TYPE_CHECKING:
    import pyarrow as pa

BYTES_AT_ONCE = 1 << 20  # that pyarrow reads


class ArrowCells(Sequence[str]):
    """The cells of a column. They become Python's texts only if that is necessary."""

    def __init__(self, array: pa.Array) -> None:
        self._array = array
        self._texts: list[str] | None = None

    def __len__(self) -> int:
        return len(self._array)

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> list[str]: ...
    def __getitem__(self, place: int | slice) -> str | list[str]:
        return self.texts[place]

    def __iter__(self) -> Iterator[str]:
        return iter(self.texts)

    @property
    def texts(self) -> list[str]:
        if self._texts is None:
            self._texts = [text.strip() for text in self._array.to_pylist()]
        return self._texts

    def numbers(self, missing: Collection[str]) -> Floats | None:
        """The cells as numbers; None if one is none for pyarrow, or has to be checked on its own."""
        import pyarrow as pa
        import pyarrow.compute as pc

        array = self._array
        try:
            floats = array.cast(pa.float64())
        except pa.ArrowInvalid:
            plain = pc.utf8_trim_whitespace(array)
            array = pc.if_else(pc.is_in(plain, pa.array(sorted(missing), pa.string())), None, plain)
            try:
                floats = array.cast(pa.float64())
            except pa.ArrowInvalid:
                return None
        numbers: Floats = floats.to_numpy(zero_copy_only=False)
        absent = np.isnan(numbers)
        if int(absent.sum()) > array.null_count or (np.abs(numbers[~absent]) >= MAX_EXACT).any():
            return None
        return numbers

    def longest(self) -> int:
        """The number of characters of the longest cell."""
        import pyarrow.compute as pc

        return int(pc.max(pc.utf8_length(self._array)).as_py() or 0)

    def has(self, pattern: str) -> bool:
        """Whether a cell matches a regular expression of RE2."""
        import pyarrow.compute as pc

        return bool(pc.any(pc.match_substring_regex(self._array, pattern)).as_py())


def column_pieces(
    path: Path, names: Sequence[str], wanted: Collection[str], separator: str, skip: int
) -> Iterator[dict[str, ArrowCells] | bool]:
    """The cells of the columns that are wanted, by name, a few thousand rows at a time; at last, whether that was the
    whole file, or pyarrow cannot read on.
    """
    import pyarrow as pa
    from pyarrow import csv

    columns = [name for name in names if name in wanted]
    options = (
        csv.ReadOptions(use_threads=False, block_size=BYTES_AT_ONCE, column_names=list(names), skip_rows=skip),
        csv.ParseOptions(delimiter=separator, newlines_in_values=True),
        csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()), include_columns=columns, strings_can_be_null=False
        ),
    )
    most = min(ROWS_A_PIECE, rows_a_piece(len(names)))
    waiting: list[pa.RecordBatch] = []
    rows = 0
    try:
        with pa.input_stream(str(path)) as stream, csv.open_csv(stream, *options) as batches:
            for batch in batches:
                waiting.append(batch)
                rows += len(batch)
                while rows >= most:
                    table = pa.Table.from_batches(waiting)
                    yield _cells(table.slice(0, most))
                    waiting, rows = table.slice(most).to_batches(), rows - most
    except (pa.ArrowException, OSError, EOFError):
        yield False
        return
    if rows:
        yield _cells(pa.Table.from_batches(waiting))
    yield True


def _cells(table: pa.RecordBatch) -> dict[str, ArrowCells]:
    whole = table.combine_chunks()
    return {name: ArrowCells(whole.column(name).chunk(0)) for name in whole.column_names}
