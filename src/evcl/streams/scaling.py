"""Standardise numbers online, with the mean and deviation of earlier rows alone."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

LONGEST = 10_000  # rows: the mean and deviation forget at this rate, so that they follow slow changes
FARTHEST = 10.0  # deviations: a number counts as if it were at most this far from the mean,
ENOUGH = 30  # once there were this many rows
FAR = 3.0  # deviations: no squashed number is farther from the mean


class Scaling:
    """The running mean and variance of D columns."""

    def __init__(self, columns: int) -> None:
        self.count = torch.zeros((), dtype=torch.float64)
        self.mean = torch.zeros(columns, dtype=torch.float64)
        self.variance = torch.zeros(columns, dtype=torch.float64)
        self.std = torch.ones(columns, dtype=torch.float64)  # 1 for a column that has been constant so far

    def scaled(self, x: Tensor) -> Tensor:
        """(x - mean) / std for x [n, D]; before any row, with the mean and deviation of these rows."""
        if not self.count:
            own = Scaling(len(self.mean))
            own.add(x)
            return (x - own.mean) / own.std
        return (x - self.mean) / self.std

    def add(self, x: Tensor) -> None:
        """Learn from rows x [n, D]. Of a number far outside what was usual, only a part counts."""
        n = len(x)
        if self.count >= ENOUGH:
            x = x.clamp(self.mean - FARTHEST * self.std, self.mean + FARTHEST * self.std)
        part = n / (float(self.count) + n)
        away = x.mean(0) - self.mean
        within = away.square() * (1 - part)
        if n > 1:
            within += x.var(0, correction=0)
        self.mean = self.mean + part * away
        self.variance = (1 - part) * self.variance + part * within
        self.count = (self.count + n).clamp_max(LONGEST)
        self._set_std()

    def _set_std(self) -> None:
        self.std = torch.where(self.variance > 1e-18 * (1 + self.mean.square()), self.variance, 1.0).sqrt()

    def state(self) -> dict[str, Tensor]:
        return {"count": self.count, "mean": self.mean, "variance": self.variance}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.count, self.mean, self.variance = (state[name].clone() for name in ("count", "mean", "variance"))
        self._set_std()


def squashed(z: Tensor) -> Tensor:
    """Standardised numbers within one deviation hardly change; none is farther than 3."""
    return FAR * (z / FAR).tanh()
