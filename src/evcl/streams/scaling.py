"""Standardise numbers online, with the mean and deviation of earlier rows alone."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from evcl.streams.arrays import Array, Stateful, within

MAX_MEMORY_ROWS = 10_000.0  # rows: the mean and deviation forget at this rate, so that they follow slow changes
MAX_DEVIATIONS = 10.0  # deviations: a number counts as if it were at most this far from the mean,
MIN_SCALE_ROWS = 30  # once there were this many rows
SQUASHED_DEVIATIONS = 3.0  # deviations: no squashed number is farther from the mean


class Scaling(Stateful):
    """The running mean and variance of D columns."""

    names = ("count", "mean", "variance")

    def __init__(self, columns: int) -> None:
        self.count = 0.0
        self.mean = np.zeros(columns)
        self.variance = np.zeros(columns)
        self.std = np.ones(columns)  # 1 for a column that has been constant so far

    def scaled(self, x: Array) -> Array:
        """(x - mean) / std for x [n, D]; before any row, with the mean and deviation of these rows."""
        if not self.count:
            own = Scaling(len(self.mean))
            own.add(x)
            return (x - own.mean) / own.std
        return (x - self.mean) / self.std

    def add(self, x: Array) -> None:
        """Learn from rows x [n, D]. Of a number far outside what was usual, only a part counts."""
        n = len(x)
        if self.count >= MIN_SCALE_ROWS:
            reach = MAX_DEVIATIONS * self.std
            x = within(x, self.mean - reach, self.mean + reach)
        part = n / (self.count + n)
        away = (x[0] if n == 1 else x.mean(0)) - self.mean
        inside = away * away * (1 - part)
        if n > 1:
            inside += x.var(0)
        self.mean = self.mean + part * away
        self.variance = (1 - part) * self.variance + part * inside
        self.count = min(self.count + n, MAX_MEMORY_ROWS)
        self._set_std()

    def _set_std(self) -> None:
        self.std = np.sqrt(np.where(self.variance > 1e-18 * (1 + self.mean * self.mean), self.variance, 1.0))

    def restore(self, arrays: Mapping[str, Array]) -> None:
        super().restore(arrays)
        self._set_std()


def squashed(z: Array) -> Array:
    """Standardised numbers within one deviation hardly change; none is farther than 3."""
    bounded: Array = SQUASHED_DEVIATIONS * np.tanh(z / SQUASHED_DEVIATIONS)
    return bounded
