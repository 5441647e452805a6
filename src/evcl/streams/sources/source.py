"""A named stream: labelled rows in a fixed order, read in pieces, so that its length does not matter for memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.registry import Registry

ROWS_AT_ONCE = 1024  # rows that are made at once


@dataclass(frozen=True)
class Rows:
    """Consecutive rows of a stream.

    Attributes:
        x: the inputs [n, inputs], float32
        y: the labels [n], int64: places in the stream's `classes`
        names: the names of the inputs
        when: the time of each row [n], datetime64, if the stream has one
    """

    x: Tensor
    y: Tensor
    names: tuple[str, ...]
    when: NDArray[np.datetime64] | None = None

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, rows: slice) -> Rows:
        when = None if self.when is None else self.when[rows]
        return replace(self, x=self.x[rows], y=self.y[rows], when=when)


@dataclass(frozen=True)
class Source:
    """A stream that can be read from any row on.

    Attributes:
        name: its name
        summary: a line on what is predicted
        rows: the number of rows
        names: the names of the inputs
        classes: the names of the classes
        drift: `none`, `sudden`, `gradual` or `recurring` for generated rows, `real` for real ones
        seeded: whether the rows depend on the seed
        part: `part(start, stop, seed)` makes the rows from `start` to before `stop`
        changes: the rows at which it is known to change
    """

    name: str
    summary: str
    rows: int
    names: tuple[str, ...]
    classes: tuple[str, ...]
    drift: str
    seeded: bool
    part: Callable[[int, int, int], Rows]
    changes: tuple[int, ...] = ()

    def read(self, size: int = ROWS_AT_ONCE, seed: int = 0, start: int = 0, stop: int | None = None) -> Iterator[Rows]:
        """The rows from `start` to before `stop`, `size` at a time; the last piece may be shorter."""
        end = self.rows if stop is None else min(stop, self.rows)
        if size < 1 or start < 0:
            raise EvclError(f"a stream is read from row 0 on, 1 or more rows at a time, not from {start}, {size}")
        step = size * max(1, ROWS_AT_ONCE // size)
        for first in range(start, end, step):
            block = self.part(first, min(first + step, end), seed)
            for begin in range(0, len(block), size):
                yield block[begin : begin + size]


SOURCES: Registry[Source] = Registry("stream")
"""All named streams, by name."""


def register(source: Source, *, overwrite: bool = False) -> Source:
    """Add a stream, so that `get` knows it."""
    SOURCES.add(source.name, source, overwrite=overwrite)
    return source


def get(name: str) -> Source:
    """The stream with this name. Real data is fetched when the first rows are read."""
    return SOURCES[name]
