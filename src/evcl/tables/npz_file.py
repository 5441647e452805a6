"""NPZ files: each array is a column, and its first axis is the examples. Pickled objects are never read."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np

from evcl._core.bounds import BYTES_A_PIECE, MOST_AXES, MOST_COLUMNS, MOST_INPUTS, MOST_TEXT, rows_a_piece
from evcl._core.errors import brief
from evcl.data.formats import BROKEN
from evcl.tables.npy_file import is_valid_text
from evcl.tables.source import Dialect, Piece, TypedSource, Values, bad, with_missing


class NpzFile(TypedSource):
    def __init__(self, path: Path, dialect: Dialect | None = None) -> None:
        self.path, self._missing = path, (dialect or Dialect()).missing
        try:
            with zipfile.ZipFile(path) as archive:
                members = [name for name in archive.namelist() if name.endswith(".npy")]
                if not 0 < len(members) <= MOST_COLUMNS:
                    bad(path, f"{len(members)} arrays, but 1 to {MOST_COLUMNS} are expected")
                self._headers = {}
                for member in members:
                    with archive.open(member) as stream:
                        self._headers[member.removesuffix(".npy")] = self._header(stream, member)
        except BROKEN as error:
            self._broken(error)
        rows = {name: shape[0] for name, (shape, _) in self._headers.items()}
        if len(set(rows.values())) != 1:
            counts = ", ".join(f"{name!r} {count}" for name, count in rows.items())
            bad(path, f"its arrays have different numbers of rows ({counts})")
        self._rows = next(iter(rows.values()))

    def _broken(self, error: Exception) -> None:
        if isinstance(error, ValueError) and str(error).startswith(str(self.path)):
            raise error
        bad(self.path, f"it is truncated or not an NPZ file ({str(error) or type(error).__name__})")

    def _header(self, stream: IO[bytes], member: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        where = f"array {member.removesuffix('.npy')!r}"
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        try:
            shape, fortran, dtype = read(stream)
        except BROKEN as error:
            bad(self.path, where, f"its header cannot be read ({brief(str(error) or type(error).__name__, 100)})")
        if len(shape) > MOST_AXES or not all(type(size) is int and 0 <= size < 2**40 for size in shape):
            bad(
                self.path,
                where,
                f"its shape is {brief(shape, 100)}, but at most {MOST_AXES} whole numbers are expected",
            )
        if dtype.itemsize == 0:
            bad(self.path, where, f"it holds {dtype}, which has no size")
        if dtype.kind not in "biufUM":
            bad(self.path, where, f"it holds {dtype}; numbers, text or dates are expected")
        if not shape:
            bad(self.path, where, "it is a single number; its first axis should be the examples")
        if not 0 < math.prod(shape[1:]) <= MOST_INPUTS or (dtype.kind == "U" and dtype.itemsize > 4 * MOST_TEXT):
            limits = f"only 1 to {MOST_INPUTS:,} numbers, or text of at most {MOST_TEXT:,} characters, are possible"
            bad(self.path, where, f"an example of it is {dtype} of shape {shape[1:]}, but {limits}")
        if fortran and len(shape) > 1:
            bad(self.path, where, "it is stored in column-major order; save numpy.ascontiguousarray of it")
        return shape, dtype

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: shape[1:] for name, (shape, _) in self._headers.items()}

    def pieces(self, names: Collection[str]) -> Iterator[Piece]:
        wanted = [one for name, one in self._headers.items() if name in names]
        numbers = sum(math.prod(shape[1:]) for shape, _ in wanted)
        row = sum(math.prod(shape[1:]) * dtype.itemsize for shape, dtype in wanted)
        count = max(1, min(rows_a_piece(numbers), BYTES_A_PIECE // max(1, row)))
        with ExitStack() as stack:
            streams = {}
            try:
                archive = stack.enter_context(zipfile.ZipFile(self.path))
                for name in (name for name in self._headers if name in names):
                    streams[name] = stack.enter_context(archive.open(f"{name}.npy"))
                    if self._header(streams[name], name) != self._headers[name]:
                        bad(self.path, "it changed while it was being read")
            except BROKEN as error:
                self._broken(error)
            for start in range(0, self._rows, count):
                rows = min(count, self._rows - start)
                read = {name: self._read(stream, name, rows) for name, stream in streams.items()}
                columns = {name: with_missing(values, self._missing) for name, values in read.items()}
                yield Piece(columns, lambda i, first=start: f"row {first + i + 1}", rows)  # type: ignore[misc]

    def _read(self, stream: IO[bytes], name: str, rows: int) -> Values:
        shape, dtype = self._headers[name]
        wanted = rows * math.prod(shape[1:]) * dtype.itemsize
        try:
            content = stream.read(wanted)
            if len(content) != wanted:
                raise EOFError("it ends too soon")
        except BROKEN as error:
            self._broken(error)
        found = np.frombuffer(content, dtype).reshape(rows, *shape[1:])
        if dtype.kind in "iu":
            return found.astype(dtype.newbyteorder("="), copy=False)
        if dtype.kind == "M":
            return found
        if dtype.kind != "U":
            return found.astype(np.float64)
        if not is_valid_text(found):
            bad(self.path, f"array {name!r}", "it holds invalid text")
        return found.astype(object)
