"""Prequential evaluation: each row is predicted before it is learned, and the prediction is scored.

Every measure is a function of sums over rows, so that measures over all rows, over a window, and decayed are the same
function of different sums. The sums of a row of classes, in this order:

    1, right, NLL, Brier score, [confidence in bin b] (right - confidence) for each bin,
    [label is c], [prediction is c] for each class c

Classes come at the end, because there may be more of them later. The sums of a row of numbers: 1, squared error, NLL,
[within its 95% interval].
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evcl._core.errors import EvclError
from evcl.metrics import reliability
from evcl.streams.arrays import Json

__all__ = ["CLASS_MEASURES", "NUMBER_MEASURES", "Prequential", "class_measures", "number_measures", "window_of"]

Floats = NDArray[np.float64]
CLASS_MEASURES = ("accuracy", "nll", "brier", "ece", "kappa")
NUMBER_MEASURES = ("rmse", "nll", "coverage")
ECE_BINS = 15
FIRST_CLASS = 4 + ECE_BINS  # the place of the first class
MIN_PROBABILITY = 1e-15  # a probability below it, such as that of a label that never came before, counts as this
CURVE_POINTS = 100  # a curve has about this many; between this and twice as many if the length is not known in advance
MIN_ROWS_PER_POINT = 25  # rows per point: a mean over fewer says little
NORMAL_975 = NormalDist().inv_cdf(0.975)


def window_of(rows: int) -> int:
    """Rows per point of a curve, so that a stream of this many rows has about 100 points, each of at least 25 rows."""
    return max(1, min(rows, MIN_ROWS_PER_POINT), round(rows / CURVE_POINTS))


# --- the sums of each row --------------------------------------------------------------------------------------------


def class_rows(probabilities: ArrayLike, places: ArrayLike, classes: int | None = None) -> Floats:
    """[n, 19 + 2 classes]: the sums of each row, for probabilities [n, C] and the places of the labels among their
    columns. A place beyond them, up to `classes`, is a label that had no probability.
    """
    p, y = np.asarray(probabilities, dtype=np.float64), np.asarray(places, dtype=np.int64)
    if p.ndim != 2 or y.shape != p.shape[:1]:
        raise ValueError(f"expected probabilities [n, classes] and labels [n], not {p.shape} and {y.shape}")
    n, wide = len(y), max(p.shape[1], classes or 0, int(y.max(initial=-1)) + 1)
    if wide > p.shape[1]:
        p = np.pad(p, ((0, 0), (0, wide - p.shape[1])))
    rows, stats = np.arange(n), np.zeros((n, FIRST_CLASS + 2 * wide))
    if not n:
        return stats
    said, confidence, own = p.argmax(1), p.max(1), p[rows, y]
    right = (said == y) & (confidence > 0)
    stats[:, 0], stats[:, 1] = 1.0, right
    stats[:, 2] = -np.log(np.maximum(own, MIN_PROBABILITY))
    stats[:, 3] = (p**2).sum(1) - 2 * own + 1
    bin_of = np.clip(np.ceil(confidence * ECE_BINS).astype(int) - 1, 0, ECE_BINS - 1)
    stats[rows, 4 + bin_of] = right - confidence
    stats[rows, FIRST_CLASS + 2 * y] = 1.0
    stats[rows[confidence > 0], FIRST_CLASS + 1 + 2 * said[confidence > 0]] = 1.0
    return stats


def number_rows(mean: ArrayLike, std: ArrayLike, targets: ArrayLike) -> Floats:
    """[n, 4]: the sums of each row, for predictions that are Gaussians with this mean and standard deviation, [n]."""
    mean, std, y = (np.asarray(values, dtype=np.float64) for values in (mean, std, targets))
    if mean.ndim != 1 or mean.shape != y.shape or std.shape != y.shape:
        raise ValueError(f"expected means, deviations and targets [n], not {mean.shape}, {std.shape} and {y.shape}")
    squared, variance = (y - mean) ** 2, np.maximum(std**2, 1e-300)
    nll = 0.5 * (squared / variance + np.log(2 * math.pi * variance))
    return np.stack([np.ones_like(y), squared, nll, squared <= NORMAL_975**2 * variance], 1)


# --- from sums to measures -------------------------------------------------------------------------------------------


def class_measures(sums: Floats) -> dict[str, float]:
    """Accuracy, NLL (the log-loss, in nats), Brier score (summed over the classes: 0 to 2), expected calibration error,
    and Cohen's kappa: `(accuracy - chance) / (1 - chance)`, where chance is the agreement of independent labels and
    predictions with these frequencies; 0 if that is 1.
    """
    n = sums[0]
    if not n:
        return dict.fromkeys(CLASS_MEASURES, math.nan)
    accuracy = sums[1] / n
    chance = float((sums[FIRST_CLASS::2] * sums[FIRST_CLASS + 1 :: 2]).sum() / n**2)
    kappa = (accuracy - chance) / (1 - chance) if chance < 1 else 0.0
    measures = (accuracy, sums[2] / n, sums[3] / n, np.abs(sums[4:FIRST_CLASS]).sum() / n, kappa)
    return dict(zip(CLASS_MEASURES, map(float, measures), strict=True))


def number_measures(sums: Floats) -> dict[str, float]:
    """RMSE, NLL in nats, and the fraction of targets within their 95% intervals."""
    n = sums[0]
    if not n:
        return dict.fromkeys(NUMBER_MEASURES, math.nan)
    return dict(zip(NUMBER_MEASURES, map(float, (math.sqrt(sums[1] / n), sums[2] / n, sums[3] / n)), strict=True))


class Prequential:
    """Scores predictions as they come: over all rows, over windows, and decayed. Memory is flat.

    `window`: rows per window. None: windows are doubled when there are 200 of them, so that a curve has 100 to 200
    points at any length. `fading`: the weight of a row in the decayed measures, relative to the next one (Gama et al.,
    2013); 0.999 looks back over about 1,000 rows.
    """

    def __init__(
        self, kind: Literal["classes", "numbers"] = "classes", window: int | None = None, fading: float = 0.999
    ) -> None:
        if kind not in ("classes", "numbers"):
            raise EvclError(f"kind must be classes or numbers, not {kind!r}")
        if window is not None and (not isinstance(window, int) or window < 1):
            raise EvclError(f"window must be a whole number of rows, at least 1, not {window!r}")
        if not 0 < fading < 1:
            raise EvclError(f"fading must be between 0 and 1, such as 0.999, not {fading!r}")
        self.kind, self.fading = kind, float(fading)
        self.rows = 0
        self._asked, self.window = window, window or 1
        self._labels: dict[Hashable, int] = {}  # label -> its place in the sums
        width = FIRST_CLASS if kind == "classes" else 4
        self._windows, self._decayed = np.zeros((0, width)), np.zeros(width)
        self._bins = np.zeros((ECE_BINS, 3))  # see `evcl.metrics.reliability`
        self._without = 0  # rows that came before any class was known, without a prediction

    # --- rows come ---------------------------------------------------------------------------------------------------

    def add(
        self, probabilities: ArrayLike, labels: Sequence[Hashable] | ArrayLike, classes: Sequence[Hashable]
    ) -> None:
        """Score predictions [n, classes] of rows with these labels [n]; `classes` names the columns."""
        if self.kind != "classes":
            raise EvclError("these scores are of numbers: call add_numbers")
        labels, classes = _listed(labels), _listed(classes)
        p = np.asarray(probabilities, dtype=np.float64)
        if p.ndim != 2 or p.shape[1] != len(classes):
            raise EvclError(f"expected probabilities [n, {len(classes)}], one column per class, not {list(p.shape)}")
        for label in (*classes, *labels):
            self._labels.setdefault(label, len(self._labels))
        places, own = ([self._labels[label] for label in some] for some in (classes, labels))
        if places != list(range(len(places))):
            moved = np.zeros((len(p), len(self._labels)))
            moved[:, places] = p
            p = moved
        self._add(class_rows(p, own, len(self._labels)))
        if own and p.shape[1]:
            self._bins += reliability(p, own, ECE_BINS)
        elif own:
            self._without += len(own)

    def add_numbers(self, mean: ArrayLike, std: ArrayLike, targets: ArrayLike) -> None:
        """Score predictions of numbers: Gaussians with this mean and standard deviation, [n]."""
        if self.kind != "numbers":
            raise EvclError("these scores are of classes: call add")
        self._add(number_rows(mean, std, targets))

    def _add(self, found: Floats) -> None:
        n, more = len(found), found.shape[1] - len(self._decayed)
        if more > 0:
            self._windows, self._decayed = np.pad(self._windows, ((0, 0), (0, more))), np.pad(self._decayed, (0, more))
        weights = self.fading ** np.arange(n - 1, -1, -1)
        self._decayed = self.fading**n * self._decayed + weights @ found
        while self._asked is None and self.rows + n > 2 * CURVE_POINTS * self.window:
            self.window *= 2
            windows = np.pad(self._windows, ((0, len(self._windows) % 2), (0, 0)))
            self._windows = windows[::2] + windows[1::2]
        last = -(-(self.rows + n) // self.window)
        if last > len(self._windows):
            self._windows = np.pad(self._windows, ((0, last - len(self._windows)), (0, 0)))
        np.add.at(self._windows, (self.rows + np.arange(n)) // self.window, found)
        self.rows += n

    # --- what they were worth ----------------------------------------------------------------------------------------

    @property
    def overall(self) -> dict[str, float]:
        """Each measure over all rows so far."""
        return self._measures(self._windows.sum(0))

    @property
    def decayed(self) -> dict[str, float]:
        """Each measure with earlier rows weighing less: how good the predictions are now."""
        return self._measures(self._decayed)

    @property
    def curves(self) -> dict[str, list[float]]:
        """Each measure over each window; the last window may have fewer rows."""
        measured = [self._measures(sums) for sums in self._windows]
        return {name: [one[name] for one in measured] for name in self.measures}

    @property
    def measures(self) -> tuple[str, ...]:
        """The names of the measures."""
        return CLASS_MEASURES if self.kind == "classes" else NUMBER_MEASURES

    @property
    def reliability(self) -> Floats | None:
        """`[bins, 3]` over all rows, as `evcl.metrics.reliability`; None for numbers, and for scores of a file that was
        saved without it.
        """
        known = self.kind == "classes" and self._bins[:, 0].sum() >= self.rows - self._without
        return self._bins.copy() if known else None

    def _measures(self, sums: Floats) -> dict[str, float]:
        return class_measures(sums) if self.kind == "classes" else number_measures(sums)

    # --- saving ------------------------------------------------------------------------------------------------------

    def state(self) -> tuple[Json, dict[str, Floats]]:
        """Everything it knows: a part for JSON, and arrays. Labels must be texts, numbers or truth values."""
        description: Json = {"kind": self.kind, "rows": self.rows, "window": self.window, "asked": self._asked}
        description |= {"fading": self.fading, "labels": list(self._labels)}
        description |= {"bins": self._bins.ravel().tolist(), "without": self._without}
        return description, {"windows": self._windows.copy(), "decayed": self._decayed.copy()}

    @staticmethod
    def restored(told: Json, arrays: Json) -> Prequential:
        """The scores whose state this is. Raises EvclError if it is none."""
        try:
            self = Prequential(told["kind"], told["asked"], told["fading"])
            self.rows, self.window = int(told["rows"]), int(told["window"])
            self._labels = {label: place for place, label in enumerate(told["labels"])}
            self._windows, self._decayed = (np.array(arrays[name], dtype=np.float64) for name in ("windows", "decayed"))
            self._bins = np.array(told.get("bins", [0.0] * 3 * ECE_BINS), dtype=np.float64).reshape(ECE_BINS, 3)
            self._without = int(told.get("without", 1))
            width = FIRST_CLASS + 2 * len(self._labels) if self.kind == "classes" else 4
            points = -(-self.rows // max(1, self.window))
            fits = self._windows.shape == (points, width) and self._decayed.shape == (width,) and self.window > 0
            finite = np.isfinite(self._windows).all() and np.isfinite(self._bins).all()
            if not fits or not finite or len(self._labels) != len(told["labels"]):
                raise ValueError("its sizes do not fit")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise EvclError(f"these are no scores ({type(error).__name__} {error})") from error
        return self


def _listed(values: Any) -> list[Hashable]:
    """The values as plain Python objects, which can be compared and saved."""
    return values.tolist() if hasattr(values, "tolist") else list(values)
