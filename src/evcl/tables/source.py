"""The interface of readers: they list a file's columns, then read their values, a few thousand rows at a time.

A reader knows nothing about the model. Every error names the file and the place in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

from numpy.typing import NDArray

from evcl._core.errors import EvclError

# Limits on files. Only memory limits the number of rows: one copy of them is held, as float32 inputs.
ROWS_A_PIECE = 4096
MOST_LINE_BYTES = 1_000_000  # per CSV line, or for all lines of one row
MOST_COLUMNS = 10_000
MOST_CATEGORIES = 1_000  # per column
MOST_CLASSES = 1_000
MOST_INPUTS = 20_000  # inputs per example: one per numeric column, pixel and category
MOST_TEXT = 10_000  # characters per text in an NPZ file, where every text takes the space of the longest
MOST_PIXELS = 16_000_000  # per image, before scaling
MISSING = frozenset(("", "NA", "NaN", "nan", "null", "NULL"))  # texts in a CSV file that mean a missing value

# Numbers [n, ...], kept as integers if they are whole (NaN or masked: missing); or text [n] as objects (None: missing).
Values = NDArray[Any]


@dataclass(frozen=True)
class Piece:
    """Some rows of a file. `place(i)` says where in the file row i of the piece is: "line 7"."""

    columns: Mapping[str, Values]
    place: Callable[[int], str]
    rows: int


class Source(Protocol):
    """A file that can be read from the beginning any number of times."""

    path: Path
    untyped: bool  # whether numbers are read as text
    images: bool  # whether it is an image folder; the target is then the name of an image's subfolder

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Maps each column to the shape of its values: () for a number or text."""
        ...

    def pieces(self, names: Collection[str]) -> Iterator[Piece]:
        """Yield the rows of these columns, in order."""
        ...


def bad(path: Path, *what: str) -> NoReturn:
    """Raise an error about a file: the place in it, then what is wrong."""
    raise EvclError(f"{path}: {': '.join(what)}")


def as_number(text: str) -> float | None:
    """The number that a text represents, or None if it is not one; "1_000" and spellings of NaN count as none."""
    try:
        number = float(text)
    except ValueError:
        return None
    return None if math.isnan(number) or "_" in text else number
