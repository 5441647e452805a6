"""Standardise numbers online, with the mean and deviation of earlier rows alone."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

LONGEST = 10_000  # rows: the mean and deviation forget at this rate, so that they follow slow changes
FAR = 3.0  # deviations: where the squashing begins to matter


class Scaling:
    """The running mean and variance of D columns."""

    def __init__(self, columns: int) -> None:
        self.count = torch.zeros((), dtype=torch.float64)
        self.mean = torch.zeros(columns, dtype=torch.float64)
        self.variance = torch.zeros(columns, dtype=torch.float64)

    @property
    def std(self) -> Tensor:
        """1 for a column that has been constant so far."""
        return torch.where(self.variance > 1e-18 * (1 + self.mean.square()), self.variance, 1.0).sqrt()

    def scaled(self, x: Tensor) -> Tensor:
        """(x - mean) / std for x [n, D]; before any row, with the mean and deviation of these rows."""
        if not self.count:
            own = Scaling(len(self.mean))
            own.add(x)
            return (x - own.mean) / own.std
        return (x - self.mean) / self.std

    def add(self, x: Tensor) -> None:
        """Learn from rows x [n, D]."""
        n = len(x)
        part = n / (self.count + n)
        away = x.mean(0) - self.mean
        self.mean = self.mean + part * away
        self.variance = (1 - part) * self.variance + part * (x.var(0, correction=0) + (1 - part) * away.square())
        self.count = (self.count + n).clamp_max(LONGEST)

    def state(self) -> dict[str, Tensor]:
        return {"count": self.count, "mean": self.mean, "variance": self.variance}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.count, self.mean, self.variance = (state[name].clone() for name in ("count", "mean", "variance"))


def squashed(z: Tensor) -> Tensor:
    """Standardised numbers within 3 deviations hardly change; none is farther than 3."""
    return FAR * (z / FAR).tanh()
