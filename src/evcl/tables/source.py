"""A file of examples, read in pieces: which columns it has, and then their values, some thousand rows at a time.

A reader knows nothing of the model. Whatever is wrong with a file is an error that names the file and the place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

from numpy.typing import NDArray

from evcl._core.errors import EvclError

# What a file may hold. The number of rows has no limit but memory: one copy of them, as float32 inputs.
ROWS_A_PIECE = 4096
MOST_LINE_BYTES = 1_000_000  # of a CSV line, or of all lines of one row
MOST_COLUMNS = 10_000
MOST_CATEGORIES = 1_000  # of a column
MOST_CLASSES = 1_000
MOST_INPUTS = 20_000  # numbers an example: columns, pixels and a number for each category
MOST_TEXT = 10_000  # letters of a text in an NPZ file, where all take the room of the longest
MOST_PIXELS = 16_000_000  # of an image as it is stored
MISSING = frozenset(("", "NA", "NaN", "nan", "null", "NULL"))  # in a CSV file, an empty cell

# Numbers [n, ...], whole ones as integers (NaN, or masked: missing); or text [n] as objects (None: missing).
Values = NDArray[Any]


@dataclass(frozen=True)
class Piece:
    """Some rows of a file. `place(i)` says where row i of the piece is found: "line 7"."""

    columns: Mapping[str, Values]
    place: Callable[[int], str]
    rows: int


class Source(Protocol):
    """A file that can be read from the beginning as often as it is asked."""

    path: Path
    untyped: bool  # numbers come as text
    images: bool  # the target, if any, is the name of an image's folder

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Its columns, and the shape of a value: () for a number or a text."""
        ...

    def pieces(self, names: Collection[str]) -> Iterator[Piece]:
        """The rows of these columns, in order."""
        ...


def bad(path: Path, *what: str) -> NoReturn:
    """Refuse a file: where, and what is the matter."""
    raise EvclError(f"{path}: {': '.join(what)}")


def as_number(text: str) -> float | None:
    """The number that a text spells, or None; "1_000" and other spellings of NaN are none."""
    try:
        number = float(text)
    except ValueError:
        return None
    return None if math.isnan(number) or "_" in text else number
