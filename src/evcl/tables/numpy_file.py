"""NumPy files, of which pickled objects are never read.

NPY: an array [rows, columns], whose columns are called 0, 1, 2, ..., or one with named fields. NPZ: each array is a
column, and its first axis is the examples.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, NoReturn

import numpy as np

from evcl._core.bounds import BYTES_A_PIECE, MOST_AXES, MOST_COLUMNS, MOST_INPUTS, MOST_TEXT, rows_a_piece
from evcl._core.errors import brief
from evcl.data.formats import BROKEN
from evcl.tables.source import Dialect, Source, Values, bad


class NumpyFile(Source):
    column = "column"  # what one is called

    def _plain(self, name: str, values: Values) -> Values:
        """Integers in this machine's byte order, other numbers as float64, text as objects."""
        kind = values.dtype.kind
        if kind in "iu":
            return values.astype(values.dtype.newbyteorder("="), copy=False)
        if kind == "M":
            return np.array(values)
        if kind == "U" and not is_valid_text(values):
            bad(self.path, f"{self.column} {name!r}", "it holds invalid text")
        return values.astype(object if kind == "U" else np.float64)


def is_valid_text(values: Values) -> bool:
    """Whether an array of numpy's texts holds only numbers that are letters: the conversion of others would fail."""
    letters = np.ascontiguousarray(values).reshape(-1).view(np.dtype(np.uint32).newbyteorder(values.dtype.byteorder))
    return not bool(((letters > 0x10FFFF) | ((letters >= 0xD800) & (letters < 0xE000))).any())


class NpyFile(NumpyFile):
    """The file is mapped into memory: only the rows that are read take space."""

    def __init__(self, path: Path, dialect: Dialect | None = None) -> None:
        super().__init__(path, dialect)
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except BROKEN as error:
            bad(path, f"it is truncated or not an NPY file ({str(error) or type(error).__name__})")
        if not isinstance(array, np.ndarray):
            bad(path, "it is no array; rename it to .npz")
        fields = array.dtype.names
        if array.ndim == 1 and fields is None:
            array = array[:, None]
        if array.ndim != (2 if fields is None else 1):
            wanted = "an array [rows, columns], one of which is the label, is expected"
            bad(path, f"its shape is {array.shape}, but {wanted}; an .npz file holds arrays of any shape")
        self._array = array
        self._names = [str(i) for i in range(array.shape[1])] if fields is None else list(fields)
        if not 0 < len(self._names) <= MOST_COLUMNS:
            bad(path, f"{len(self._names)} columns, but 1 to {MOST_COLUMNS} are possible")
        for name in self._names:
            dtype = array.dtype if fields is None else array.dtype[name]
            if dtype.kind not in "biufUM" or dtype.shape:
                bad(path, f"column {name!r}", f"it holds {dtype}; numbers, text or dates are expected")
            if dtype.kind == "U" and dtype.itemsize > 4 * MOST_TEXT:
                bad(path, f"column {name!r}", f"a text may have at most {MOST_TEXT:,} characters")

        self.shapes = dict.fromkeys(self._names, ())

    def blocks(self, names: Collection[str]) -> Iterator[tuple[dict[str, Values], int]]:
        named = self._array.dtype.names is not None
        width = max(len(self._names), self._array.dtype.itemsize * (1 if named else len(self._names)) // 16)
        count = rows_a_piece(width)
        for start in range(0, len(self._array), count):
            rows = self._array[start : start + count]
            every = {name: rows[name] if named else rows[:, i] for i, name in enumerate(self._names)}
            yield {name: self._plain(name, values) for name, values in every.items() if name in names}, len(rows)


class NpzFile(NumpyFile):
    column = "array"

    def __init__(self, path: Path, dialect: Dialect | None = None) -> None:
        super().__init__(path, dialect)
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
        self.shapes = {name: shape[1:] for name, (shape, _) in self._headers.items()}

    def _broken(self, error: Exception) -> NoReturn:
        if isinstance(error, ValueError) and str(error).startswith(str(self.path)):
            raise error
        bad(self.path, f"it is truncated or not an NPZ file ({str(error) or type(error).__name__})")

    def _header(self, stream: IO[bytes], member: str) -> tuple[tuple[int, ...], np.dtype[np.generic]]:
        where = f"array {member.removesuffix('.npy')!r}"
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        try:
            shape, fortran, dtype = read(stream)
        except BROKEN as error:
            bad(self.path, where, f"its header cannot be read ({brief(str(error) or type(error).__name__, 100)})")
        if len(shape) > MOST_AXES or not all(type(size) is int and 0 <= size < 2**40 for size in shape):
            expected = f"at most {MOST_AXES} whole numbers are expected"
            bad(self.path, where, f"its shape is {brief(shape, 100)}, but {expected}")
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

    def blocks(self, names: Collection[str]) -> Iterator[tuple[dict[str, Values], int]]:
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
                yield {name: self._read(stream, name, rows) for name, stream in streams.items()}, rows

    def _read(self, stream: IO[bytes], name: str, rows: int) -> Values:
        shape, dtype = self._headers[name]
        wanted = rows * math.prod(shape[1:]) * dtype.itemsize
        try:
            content = stream.read(wanted)
            if len(content) != wanted:
                raise EOFError("it ends too soon")
        except BROKEN as error:
            self._broken(error)
        return self._plain(name, np.frombuffer(content, dtype).reshape(rows, *shape[1:]))
