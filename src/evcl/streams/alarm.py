"""An alarm when rows surprise the learner more than it expects itself to be surprised.

If nothing has changed, the predicted probabilities p are right. Then for any other prediction q made before the row,
the ratio q(y) / p(y) has the mean 1. Here q is the same prediction made less sure, proportional to p^(1 - s), for
several s. The sum over all possible moments of the change, D <- (D + 1) q(y) / p(y), reaches A after A rows on average,
or later (Shiryaev & Roberts; as an e-detector: Shin, Ramdas & Rinaldo, 2023). So with an alarm at A = 1 / rate there
are at most `rate` false alarms per row.

A learner may usually be a little too sure. Therefore each ratio is divided by its usual mean, if that is above 1, with
a standard error added: what is usual is no change.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from evcl.streams.arrays import Array, Stateful, total
from evcl.streams.observing import SOFTENINGS

QUIET_ROWS = 100  # rows after an alarm without another one, while the learner adapts
REFERENCE_ROWS = 2000.0  # rows that say what is usual
RECENT_ROWS = 40  # rows that are compared with earlier ones to find the columns that moved
FALSE_COLUMN_CHANCE = 0.01  # the chance that any column is named though none moved


class Alarm(NamedTuple):
    """A change that the learner noticed.

    Attributes:
        row: the number of the row at which the alarm was raised, from 0
        surprise: how much likelier the last rows are if something has changed, in nats
        columns: the places of the inputs that moved, or whose relation to the target did; the clearest first
        action: what the learner did
        reasons: for each of `columns`, whether it is the "inputs" that moved, or their "relation" to the target
    """

    row: int
    surprise: float
    columns: tuple[int, ...]
    action: str
    reasons: tuple[str, ...] = ()


class Detector(Stateful):
    """Raises at most `rate` false alarms per row."""

    names = ("sums", "mean", "square", "rows", "quiet")

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.sums = [0.0] * len(SOFTENINGS)
        self.mean = [1.0] * len(SOFTENINGS)  # of the ratios
        self.square = [1.0] * len(SOFTENINGS)
        self.rows = 0.0  # in those means
        self.quiet = 0

    def learn(self, softer: Array) -> tuple[int, float] | None:
        """The row of these at which the alarm is raised, and the mean of the sums; from log q(y) / p(y) [s, n]."""
        ratios, alarm = np.exp(softer), None
        count = min(self.rows + 1, REFERENCE_ROWS)
        usual = [
            max(m + math.sqrt(max(q - m * m, 0) / count), 1.0) for m, q in zip(self.mean, self.square, strict=True)
        ]
        sums = self.sums
        for i, each in enumerate(ratios.T.tolist()):
            if self.quiet:
                self.quiet -= 1
                continue
            sums = [(old + 1) * ratio / most for old, ratio, most in zip(sums, each, usual, strict=True)]
            if alarm is None and (height := sum(sums) / len(sums)) * self.rate >= 1:
                alarm = i, height
                self.quiet = QUIET_ROWS
                sums = [0.0] * len(sums)
        self.sums = sums
        if not self.quiet:  # just after a change, nothing is as usual
            n = ratios.shape[1]
            self.rows = min(self.rows + n, REFERENCE_ROWS)
            part = n / (self.rows + FIRST_RATIO_ROWS)
            means, squares = (total(a).tolist() for a in (ratios, ratios * ratios))
            self.mean = [m + part * (new / n - m) for m, new in zip(self.mean, means, strict=True)]
            self.square = [q + part * (new / n - q) for q, new in zip(self.square, squares, strict=True)]
        return alarm


FIRST_RATIO_ROWS = 100  # rows that the first value of the usual ratios counts for


class Columns(Stateful):
    """Which of D columns moved lately: their mean in the last rows, and the covariance of each with the error e of what
    was predicted, which is 0 as long as the prediction is right.
    """

    names = ("inputs", "relation", "expected")

    def __init__(self, columns: int, outputs: int) -> None:
        self.inputs = np.zeros(columns)
        self.relation = np.zeros((outputs, columns))
        self.expected = np.zeros((outputs, columns))  # the variance of `relation`

    def grow(self, outputs: int) -> None:
        more = np.zeros((outputs, len(self.inputs)))
        self.relation, self.expected = np.concatenate([self.relation, more]), np.concatenate([self.expected, more])

    def learn(self, z: Array, e: Array, b: Array) -> None:
        """From standardised inputs z [n, D] and the derivatives e [n, K], b [n, K, K] of the prediction."""
        kept = (1 - 1 / RECENT_ROWS) ** len(z)
        self.inputs = kept * self.inputs + (1 - kept) / len(z) * total(z, 0)
        self.relation = kept * self.relation + e.T @ z
        self.expected = kept**2 * self.expected + total(b * b).T @ (z * z)

    def moved(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """The columns, the clearest first, and whether it was their inputs or their relation to the target."""
        inputs = np.abs(self.inputs) * (2 * RECENT_ROWS) ** 0.5  # z has mean 0 and deviation 1
        relation = (np.abs(self.relation) / np.sqrt(np.maximum(self.expected, 1e-12))).max(0)
        tests = 2 * len(self.inputs) * (1 + len(self.relation))
        least = NormalDist().inv_cdf(1 - FALSE_COLUMN_CHANCE / tests)
        height = np.maximum(inputs, relation)
        columns = [int(i) for i in np.argsort(-height) if height[i] > least]
        return tuple(columns), tuple("inputs" if inputs[i] >= relation[i] else "relation" for i in columns)
