"""Parquet and Arrow files (Feather), and queries of a DuckDB database: their columns have types.

They need packages of the extra `tables`: `pip install 'evcl[tables]'`; DuckDB is the extra `sql`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from evcl._core.bounds import MOST_COLUMNS, MOST_TEXT, ROWS_A_PIECE, rows_a_piece
from evcl._core.errors import extra
from evcl.tables.source import Dialect, Source, Values, bad, line_of, listed

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile as ParquetReader


class ArrowSource(Source):
    """A source that pyarrow reads, in batches of rows."""

    name = "Arrow"

    def __init__(self, path: Path, dialect: Dialect | None = None) -> None:
        with extra("tables", f"{path}: {self.name} needs pyarrow"):
            import pyarrow as pa
        super().__init__(path, dialect)
        self._pa = pa
        schema = self._schema()
        try:
            names = schema.names
        except UnicodeDecodeError:
            bad(path, "the name of a column is not UTF-8")
        if len(names) > MOST_COLUMNS:
            bad(path, f"{len(names)} columns, but the maximum is {MOST_COLUMNS}")
        if len(set(names)) != len(names):
            bad(path, "two columns have the same name")
        self._types = dict(zip(names, schema.types, strict=True))
        self.shapes = dict.fromkeys(names, ())

    def _schema(self) -> pa.Schema:
        raise NotImplementedError

    def _batches(self, names: list[str]) -> Iterator[pa.RecordBatch]:
        """The rows of these columns. An error of pyarrow here means that the file is damaged."""
        raise NotImplementedError

    def blocks(self, names: Collection[str]) -> Iterator[tuple[dict[str, Values], int]]:
        start, batches = 0, self._batches([name for name in self._types if name in names])
        while True:
            try:
                batch = next(batches, None)
            except (self._pa.ArrowException, OSError) as error:
                bad(self.path, f"after row {start}", f"it is damaged ({line_of(error)})")
            if batch is None:
                return
            most = rows_a_piece(len(batch.schema.names))
            for first in range(0, len(batch), most):
                part = batch.slice(first, most)
                yield {n: self._values(n, part.column(i), start) for i, n in enumerate(part.schema.names)}, len(part)
                start += len(part)

    def _values(self, name: str, column: pa.Array, start: int) -> Values:
        """A column's values, from the row `start` on: integers stay integers, other numbers become float64, text and
        booleans become text, dates and times become datetime64.
        """
        pa = self._pa
        types, kind = pa.types, column.type
        if types.is_dictionary(kind):
            if is_text(pa, kind.value_type):
                return self._texts(name, column.dictionary, start, column.indices)
            kind, column = kind.value_type, column.dictionary_decode()
        if types.is_decimal(kind) and kind.scale <= 0:
            try:
                kind, column = pa.int64(), column.cast(pa.int64())
            except pa.ArrowInvalid:
                bad(self.path, f"column {name!r}", "it holds integers of more than 64 bits; save it as text")
        if types.is_integer(kind):
            digits: Values = column.fill_null(0).to_numpy(zero_copy_only=False)
            missing = column.is_null().to_numpy(zero_copy_only=False)
            return np.ma.masked_array(digits, missing) if missing.any() else digits
        if types.is_floating(kind) or types.is_decimal(kind) or types.is_null(kind):
            floats: Values = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
            return floats
        if types.is_duration(kind):
            whole = column.cast(pa.duration("us"), safe=False).cast(pa.int64()).cast(pa.float64(), safe=False)
            return np.asarray(whole.to_numpy(zero_copy_only=False)) / 1e6  # seconds
        if types.is_temporal(kind) and not types.is_interval(kind):
            return self._dates(column, kind)
        if is_text(pa, kind):
            return self._texts(name, column, start)
        if not types.is_boolean(kind):
            bad(self.path, f"column {name!r}", f"it holds {kind}, not numbers, text or dates; --drop leaves it out")
        return np.array([None if value is None else str(value) for value in column.to_pylist()], dtype=object)

    def _texts(self, name: str, texts: pa.Array, start: int, codes: pa.Array | None = None) -> Values:
        """Texts as objects; with `codes`, these are their places among the `texts`, of which each is converted once."""
        pa = self._pa
        import pyarrow.compute as pc

        where = f"column {name!r}"
        if int(pc.max(pc.binary_length(texts.cast(pa.binary()))).as_py() or 0) > 4 * MOST_TEXT:
            bad(self.path, where, f"a text is longer than the maximum of {MOST_TEXT:,} characters")
        objects = np.empty(len(texts), dtype=object)
        try:
            objects[:] = texts.to_pylist()
        except UnicodeDecodeError:
            for i, value in enumerate(texts.cast(pa.binary()).to_pylist()):
                if value is not None and value.decode("utf-8", "ignore").encode() != value:
                    row = i if codes is None else codes.to_pylist().index(i) if i in codes.to_pylist() else 0
                    bad(self.path, f"row {start + row + 1}, {where}", "it holds a text that is not UTF-8")
        if any(value is not None and len(value) > MOST_TEXT for value in objects):
            bad(self.path, where, f"a text is longer than the maximum of {MOST_TEXT:,} characters")
        if codes is None:
            return objects
        places = codes.fill_null(len(objects)).to_numpy(zero_copy_only=False)
        chosen: Values = np.append(objects, np.array([None], dtype=object))[places]
        return chosen

    def _dates(self, column: pa.Array, kind: pa.DataType) -> Values:
        """Dates, times or times of the day. With a time zone they are local times, as in a text."""
        import pyarrow.compute as pc

        pa = self._pa
        if pa.types.is_timestamp(kind) and kind.tz is not None:
            column = pc.local_timestamp(column)
        elif pa.types.is_time(kind):
            column = column.cast(pa.time64("us"), safe=False).cast(pa.int64())
        dates: Values = column.cast(pa.timestamp("us"), safe=False).to_numpy(zero_copy_only=False)
        return dates


class ParquetFile(ArrowSource):
    name = "Parquet"

    def _file(self, texts: Collection[str] = ()) -> ParquetReader:
        """The file. Its `texts` are read as places among the different ones, so that each is in memory once."""
        import pyarrow.parquet as pq

        try:
            return pq.ParquetFile(self.path, read_dictionary=list(texts))
        except (self._pa.ArrowException, OSError) as error:
            bad(self.path, f"it is truncated or not a Parquet file ({line_of(error)})")

    def _schema(self) -> pa.Schema:
        with self._file() as file:
            return file.schema_arrow

    def _batches(self, names: list[str]) -> Iterator[pa.RecordBatch]:
        texts = [name for name in names if is_text(self._pa, self._types[name])]
        with self._file(texts) as file:
            self._check_texts(file, texts)
            yield from file.iter_batches(rows_a_piece(len(names)), columns=names)

    def _check_texts(self, file: ParquetReader, texts: list[str]) -> None:
        """Refuse long texts by what the file says of itself, before they are in memory."""
        about = file.metadata
        places = {about.schema.column(i).path: i for i in range(about.num_columns)}
        for name in (name for name in texts if name in places):
            for group in range(about.num_row_groups):
                chunk = about.row_group(group).column(places[name])
                if chunk.total_uncompressed_size > 5 * MOST_TEXT * max(1, chunk.num_values) + 2**20:
                    bad(self.path, f"column {name!r}", f"a text is longer than the maximum of {MOST_TEXT:,} characters")


class ArrowFile(ArrowSource):
    """An Arrow file or stream, also called Feather or IPC."""

    def _reader(self) -> pa.RecordBatchReader:
        pa = self._pa
        mapped = pa.memory_map(str(self.path))
        try:
            return pa.ipc.open_file(mapped)
        except pa.ArrowInvalid:
            mapped.seek(0)
        try:
            return pa.ipc.open_stream(mapped)
        except (pa.ArrowException, OSError) as error:
            bad(self.path, f"it is truncated or not an Arrow file ({line_of(error)})")

    def _schema(self) -> pa.Schema:
        try:
            return self._reader().schema
        except OSError as error:  # an empty file cannot be mapped
            bad(self.path, f"it is truncated or not an Arrow file ({line_of(error)})")

    def _batches(self, names: list[str]) -> Iterator[pa.RecordBatch]:
        reader = self._reader()
        files = hasattr(reader, "num_record_batches")
        for batch in (reader.get_batch(i) for i in range(reader.num_record_batches)) if files else reader:
            selected = batch.select(names)
            for column in selected.columns:
                self._check(column)
            yield selected

    def _check(self, column: pa.Array) -> None:
        """Raise if a column is damaged: pyarrow trusts a file's offsets, and would read beyond its end. Texts are
        checked as bytes, because `_texts` says which row is not UTF-8.
        """
        pa = self._pa
        if pa.types.is_dictionary(column.type):
            texts = self._bytes(column.dictionary)
            column = pa.DictionaryArray.from_arrays(column.indices, texts, ordered=column.type.ordered, safe=False)
        fixed = pa.types.is_primitive(column.type) or pa.types.is_decimal(column.type)
        self._bytes(column).validate(full=not fixed)

    def _bytes(self, column: pa.Array) -> pa.Array:
        """A column of texts as bytes; another one as it is."""
        pa = self._pa
        bare = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}.get(column.type)
        return column if bare is None else column.view(bare)


# Views and macros of a database do what its author wants, not its user: they see nothing but the database. With one
# thread, a query gives the rows in the same order each time.
ALONE: dict[str, str | bool | int | float | list[str]] = {
    "threads": 1,
    "enable_external_access": False,
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "python_enable_replacements": False,
    "lock_configuration": True,
}
TABLES = (
    "select database_name, schema_name, table_name from system.main.duckdb_tables() where not internal order by all"
)


class DuckDb(ArrowSource):
    """The rows that a query selects from a DuckDB database, or its only table. The database is not changed, and nothing
    beside it is read.
    """

    name = "DuckDB"

    def _reader(self) -> pa.RecordBatchReader:
        with extra("sql", f"{self.path}: a database needs duckdb"):
            import duckdb
        try:
            base = duckdb.connect(str(self.path), read_only=True, config=ALONE)
        except duckdb.Error as error:
            bad(self.path, f"it is not a DuckDB database that can be read ({line_of(error)})")
        query = self.dialect.query
        try:
            if query is None:
                tables = base.execute(TABLES).fetchall()
                if len(tables) != 1:
                    has = f"its tables are {listed([name for _, _, name in tables])}" if tables else "it has no table"
                    bad(self.path, f"--query says which rows to read, as in --query 'select * from sales'; {has}")
                query = "select * from " + ".".join('"{}"'.format(part.replace('"', '""')) for part in tables[0])
            rows = base.sql(query)
            if rows is None:
                bad(self.path, f"--query {query!r}", "it selects no rows")
            if "recursive" not in query.lower():  # who writes the word knows where it ends
                plan = rows.query("evcl rows", 'explain (format json) select * from "evcl rows"')
                if plan is not None and '"name": "REC' in str(plan.fetchall()):
                    fix = "a view or macro of the file is recursive, and may never end: write what it does in the query"
                    bad(self.path, f"--query {query!r}", fix)
            read = getattr(rows, "to_arrow_reader", None) or rows.fetch_arrow_reader  # the name before duckdb 1.4
            return read(ROWS_A_PIECE)  # DuckDB makes batches of its own size: `pieces` cuts them
        except duckdb.Error as error:
            bad(self.path, f"--query {query!r}", line_of(error))

    def _schema(self) -> pa.Schema:
        return self._reader().schema

    def _batches(self, names: list[str]) -> Iterator[pa.RecordBatch]:
        yield from (batch.select(names) for batch in self._reader())


def is_text(pa: ModuleType, kind: pa.DataType) -> bool:
    """Whether a column of this type of pyarrow holds text."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
