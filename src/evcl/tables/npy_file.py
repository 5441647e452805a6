"""NPY files: an array [rows, columns], whose columns are called 0, 1, 2, ..., or one with named fields."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import numpy as np

from evcl._core.bounds import MOST_COLUMNS, MOST_TEXT, rows_a_piece
from evcl.data.formats import BROKEN
from evcl.tables.source import Dialect, Piece, TypedSource, Values, bad, with_missing


class NpyFile(TypedSource):
    """The file is mapped into memory: only the rows that are read take space. Pickled objects are never read."""

    def __init__(self, path: Path, dialect: Dialect | None = None) -> None:
        self.path, self._missing = path, (dialect or Dialect()).missing
        try:
            found = np.load(path, mmap_mode="r", allow_pickle=False)
        except BROKEN as error:
            bad(path, f"it is truncated or not an NPY file ({str(error) or type(error).__name__})")
        if not isinstance(found, np.ndarray):
            bad(path, "it is no array; rename it to .npz")
        fields = found.dtype.names
        if found.ndim == 1 and fields is None:
            found = found[:, None]
        if found.ndim != (2 if fields is None else 1):
            wanted = "an array [rows, columns], one of which is the label, is expected"
            bad(path, f"its shape is {found.shape}, but {wanted}; an .npz file holds arrays of any shape")
        self._array = found
        self._names = [str(i) for i in range(found.shape[1])] if fields is None else list(fields)
        if not 0 < len(self._names) <= MOST_COLUMNS:
            bad(path, f"{len(self._names)} columns, but 1 to {MOST_COLUMNS} are possible")
        for name in self._names:
            dtype = found.dtype if fields is None else found.dtype[name]
            if dtype.kind not in "biufUM" or dtype.shape:
                bad(path, f"column {name!r}", f"it holds {dtype}; numbers, text or dates are expected")
            if dtype.kind == "U" and dtype.itemsize > 4 * MOST_TEXT:
                bad(path, f"column {name!r}", f"a text may have at most {MOST_TEXT:,} characters")

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return dict.fromkeys(self._names, ())

    def pieces(self, names: Collection[str]) -> Iterator[Piece]:
        named = self._array.dtype.names is not None
        width = max(len(self._names), self._array.dtype.itemsize * (1 if named else len(self._names)) // 16)
        count = rows_a_piece(width)
        for start in range(0, len(self._array), count):
            rows = self._array[start : start + count]
            columns = {
                name: with_missing(self._plain(name, rows[name] if named else rows[:, i]), self._missing)
                for i, name in enumerate(self._names)
                if name in names
            }
            yield Piece(columns, lambda i, first=start: f"row {first + i + 1}", len(rows))  # type: ignore[misc]

    def _plain(self, name: str, values: Values) -> Values:
        if values.dtype.kind == "U" and not is_valid_text(values):
            bad(self.path, f"column {name!r}", "it holds invalid text")
        return _plain(values)


def is_valid_text(values: Values) -> bool:
    """Whether an array of numpy's texts holds only numbers that are letters: the conversion of others would fail."""
    letters = np.ascontiguousarray(values).reshape(-1).view(np.dtype(np.uint32).newbyteorder(values.dtype.byteorder))
    return not bool(((letters > 0x10FFFF) | ((letters >= 0xD800) & (letters < 0xE000))).any())


def _plain(values: Values) -> Values:
    """Integers in this machine's byte order, other numbers as float64, text as objects."""
    if values.dtype.kind in "iu":
        return values.astype(values.dtype.newbyteorder("="))
    if values.dtype.kind == "M":
        return np.array(values)
    return values.astype(object if values.dtype.kind == "U" else np.float64)
