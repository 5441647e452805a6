"""Parquet files, read with pyarrow, which is an extra: `pip install 'evcl[tables]'`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from evcl._core.errors import extra
from evcl.tables.source import MOST_COLUMNS, ROWS_A_PIECE, Dialect, Piece, TypedSource, Values, bad


class ParquetFile(TypedSource):
    def __init__(self, path: Path, dialect: Dialect | None = None) -> None:
        with extra("tables", f"{path}: Parquet needs pyarrow"):
            import pyarrow as pa
            import pyarrow.parquet as pq
        self.path, self._pa, self._pq = path, pa, pq
        with self._file() as file:
            schema = file.schema_arrow
            if len(schema.names) > MOST_COLUMNS:
                bad(path, f"{len(schema.names)} columns, but the maximum is {MOST_COLUMNS}")
            if len(set(schema.names)) != len(schema.names):
                bad(path, "two columns have the same name")
            self._types = dict(zip(schema.names, schema.types, strict=True))

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return dict.fromkeys(self._types, ())

    def _file(self) -> Any:
        try:
            return self._pq.ParquetFile(self.path)
        except (self._pa.ArrowException, OSError) as error:
            bad(self.path, f"it is truncated or not a Parquet file ({_line(error)})")

    def pieces(self, names: Collection[str]) -> Iterator[Piece]:
        start = 0
        with self._file() as file:
            batches = file.iter_batches(ROWS_A_PIECE, columns=[name for name in self._types if name in names])
            while True:
                try:
                    batch = next(batches, None)
                except (self._pa.ArrowException, OSError) as error:
                    bad(self.path, f"after row {start}", f"it is damaged ({_line(error)})")
                if batch is None:
                    return
                columns = {name: self._values(name, batch.column(i)) for i, name in enumerate(batch.schema.names)}
                yield Piece(columns, lambda i, first=start: f"row {first + i + 1}", len(batch))  # type: ignore[misc]
                start += len(batch)

    def _values(self, name: str, column: Any) -> Values:
        """A column's values: integers stay integers, other numbers become float64, text and booleans become text."""
        types, kind = self._pa.types, self._types[name]
        if types.is_dictionary(kind):
            kind, column = kind.value_type, column.dictionary_decode()
        if types.is_decimal(kind) and kind.scale <= 0:
            try:
                kind, column = self._pa.int64(), column.cast(self._pa.int64())
            except self._pa.ArrowInvalid:
                bad(self.path, f"column {name!r}", "it holds integers of more than 64 bits; save it as text")
        if types.is_integer(kind):
            whole: Values = column.fill_null(0).to_numpy(zero_copy_only=False)
            missing = column.is_null().to_numpy(zero_copy_only=False)
            return np.ma.masked_array(whole, missing) if missing.any() else whole
        if types.is_floating(kind) or types.is_decimal(kind):
            found: Values = column.cast(self._pa.float64(), safe=False).to_numpy(zero_copy_only=False)
            return found
        if not (types.is_string(kind) or types.is_large_string(kind) or types.is_boolean(kind)):
            bad(self.path, f"column {name!r}", f"it holds {kind}, not numbers or text; --drop leaves it out")
        text = np.empty(len(column), dtype=object)
        text[:] = [None if value is None else str(value) for value in column.to_pylist()]
        return text


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
