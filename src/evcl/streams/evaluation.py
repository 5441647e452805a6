"""Feed a stream row by row or batch by batch: predict, score, learn; also with labels that come late."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.settings import Setting
from evcl.streams.alarm import Alarm
from evcl.streams.prequential import Prequential, window_of

T = TypeVar("T")
BATCH_SETTING = Setting(16, "rows that are predicted before any of them is learned", low=1, high=100_000)
DELAY_SETTING = Setting(0, "rows that come between a row and its label", low=0, high=10_000_000)


@dataclass(frozen=True)
class Evaluation:
    """How well a stream was predicted.

    Attributes:
        rows: the number of rows
        window: rows per point of the curves
        overall: each measure over all rows
        decayed: each measure with earlier rows weighing less
        curves: each measure over each window
        alarms: those that the learner raised meanwhile
        seconds: the time it took
    """

    rows: int
    window: int
    overall: dict[str, float]
    decayed: dict[str, float]
    curves: dict[str, list[float]]
    alarms: list[Alarm]
    seconds: float

    def __str__(self) -> str:
        measures = ", ".join(f"{name} {value:.4g}" for name, value in self.overall.items())
        alarms = f"{len(self.alarms)} alarm{'s' * (len(self.alarms) != 1)}"
        return f"{self.rows:,} rows in {self.seconds:.1f} s: {measures}; {alarms}"


def evaluate(
    stream: Any, rows: Any, batch: int = 16, delay: int = 0, window: int | None = None, fading: float = 0.999
) -> Evaluation:
    """Predict every row before it is learned, and score the predictions.

    `rows` is a pair of arrays (x [n, inputs], y [n]), an iterable of such pairs or of single rows, or a named stream of
    `evcl.streams.get`; only a few rows are in memory at a time. `batch` rows are predicted before any of them is
    learned; the first batches are smaller, because nothing is known yet. With a `delay`, a row is learned this many
    rows after it was predicted, as if its label came that late; what is scored is the prediction that was made when the
    row came. `window` and `fading`: see `Prequential`.
    """
    batch, delay = int(BATCH_SETTING.check("batch", batch)), int(DELAY_SETTING.check("delay", delay))
    if stream.likelihood == "bernoulli":
        raise EvclError("evaluate scores classes, numbers and counts, not likelihood='bernoulli'")
    length = _length(rows)
    window = window or (None if length is None else window_of(length))
    scores = Prequential("classes" if stream.likelihood == "categorical" else "numbers", window, fading)
    feed, before, started = Feed(stream, scores, delay), len(stream.alarms), time.perf_counter()
    for x, y in batches(rows, batch, int(stream.rows)):
        feed(x, y)
    feed.end()
    if not scores.rows:
        raise EvclError("there are no rows to predict")
    seconds = time.perf_counter() - started
    alarms = list(stream.alarms[before:])
    return Evaluation(scores.rows, scores.window, scores.overall, scores.decayed, scores.curves, alarms, seconds)


def size_of(batch: int, rows: int) -> int:
    """The size of the batch that comes after this many rows: 1, 2, 4 and so on, up to `batch`."""
    return min(batch, rows + 1)


class Feed:
    """Predicts and scores rows when they come, and learns them `delay` rows later."""

    def __init__(self, stream: Any, scores: Prequential, delay: int = 0) -> None:
        self.stream, self.scores, self.delay = stream, scores, delay
        self.waiting: tuple[Tensor, ...] | None = None  # inputs and targets of rows that wait for their labels

    def __call__(self, x: Tensor, y: Tensor, names: Sequence[Hashable] | None = None) -> None:
        """The next rows. `names`: what the scores call the classes; None: as the stream does."""
        classes = list(self.stream.classes) if self.scores.kind == "classes" else []
        if not self.delay:
            predicted = self.stream.step(x, y)[0]
        elif self.stream.likelihood == "categorical":
            predicted = self.stream.predict_proba(x)
        else:
            predicted = self.stream.predictions(x)
        if self.scores.kind == "classes":
            labels = y.tolist()
            if names is not None:
                classes, labels = [names[c] for c in classes], [names[c] for c in labels]
            self.scores.add(np.asarray(predicted, dtype=np.float64)[:, : len(classes)], labels, classes)
        else:
            self.scores.add_numbers(predicted.mean, predicted.std, y)
        if self.delay:
            self.waiting = (
                (x, y) if self.waiting is None else tuple(map(torch.cat, zip(self.waiting, (x, y), strict=True)))
            )
            self._learn(len(self) - self.delay)

    def __len__(self) -> int:
        """How many rows wait for their labels."""
        return 0 if self.waiting is None else len(self.waiting[1])

    def end(self) -> None:
        """Learn the rows that still wait for their labels."""
        self._learn(len(self))

    def _learn(self, count: int) -> None:
        """Learn the `count` rows that came first."""
        if count > 0 and self.waiting is not None:
            x, y = self.waiting
            self.stream.learn(x[:count], y[:count])
            self.waiting = (x[count:].clone(), y[count:].clone()) if count < len(y) else None


def _length(rows: Any) -> int | None:
    if isinstance(rows, tuple) and len(rows) == 2:
        return len(rows[1])
    return getattr(rows, "rows", None)


def batches(rows: Any, batch: int, done: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The rows as tensors, `batch` at a time, after `done` others."""
    if hasattr(rows, "read"):
        pieces: Iterable[Any] = rows.read()
    elif isinstance(rows, tuple) and len(rows) == 2:
        pieces = [rows]
    elif isinstance(rows, Iterable):
        pieces = rows
    else:
        raise EvclError(f"rows must be a pair of arrays, pairs of them, or a named stream, not {type(rows).__name__}")
    for parts in cut(map(_pair, pieces), lambda pair: len(pair[1]), lambda rows: size_of(batch, done + rows)):
        xs, ys = zip(*((x[start:end], y[start:end]) for (x, y), start, end in parts), strict=True)
        yield torch.cat(xs), torch.cat(ys)


def cut(
    pieces: Iterable[T],
    rows_of: Callable[[T], int],
    size: Callable[[int], int],
    skip: int = 0,
    alike: Callable[[T, T], bool] = lambda one, other: True,
) -> Iterator[list[tuple[T, int, int]]]:
    """The same rows from the row `skip` on, in batches whose sizes do not depend on those of the pieces: `size(rows)`
    is that of the next one, after this many rows. Each is a list of pieces, with the first row and the end in each. The
    last batch may be smaller, and so may one before a piece that is not `alike`.
    """
    parts: list[tuple[T, int, int]] = []
    count, done = 0, 0
    for piece in pieces:
        rows = rows_of(piece)
        start = min(skip, rows)
        skip -= start
        if parts and not alike(parts[0][0], piece):
            yield parts
            parts, count, done = [], 0, done + count
        while start < rows:
            wanted = size(done)
            end = min(rows, start + wanted - count)
            parts.append((piece, start, end))
            count, start = count + end - start, end
            if count == wanted:
                yield parts
                parts, count, done = [], 0, done + count
    if parts:
        yield parts


def _pair(piece: Any) -> tuple[Tensor, Tensor]:
    """x [n, inputs] and y [n] of a piece; a single row has one dimension less."""
    if not hasattr(piece, "x") and (not isinstance(piece, (tuple, list)) or len(piece) != 2):
        raise EvclError(f"expected pairs (x, y) of rows and their labels, not {type(piece).__name__}")
    x, y = (_tensor(one) for one in ((piece.x, piece.y) if hasattr(piece, "x") else piece))
    if y.ndim == 0:
        x, y = x.unsqueeze(0), y.unsqueeze(0)
    if x.ndim < 2 or len(x) != len(y) or y.ndim != 1:
        raise EvclError(f"expected rows [n, inputs] and labels [n], not {list(x.shape)} and {list(y.shape)}")
    if y.is_floating_point() and not bool(torch.isfinite(y).all()):
        raise EvclError("a target is not a finite number")
    return x if x.is_floating_point() else x.float(), y


def _tensor(values: ArrayLike) -> Tensor:
    if isinstance(values, Tensor):
        return values
    try:
        return torch.as_tensor(np.asarray(values))
    except (TypeError, ValueError):
        fix = "give each class a whole number, or call Stream.step and Prequential.add, which take texts"
        raise EvclError(f"evaluate takes rows and labels that are numbers: {fix}") from None
