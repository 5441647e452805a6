"""The scaling of an estimator's inputs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Inputs = NDArray[np.float32]


class Scaling(NamedTuple):
    """Each column minus its mean, divided by its standard deviation, both of the first task in which it varies.

    They stay: the network's weights mean what they meant when they were learned. A column that has not varied yet is 0
    for the network, which has learned nothing from it, so its scale can still be chosen.
    """

    mean: Floats  # [columns], float64
    std: Floats  # [columns]; 0: the column has not varied yet

    @property
    def known(self) -> bool:
        """Whether there is one; if not, the columns are used as they are."""
        return not bool(np.isnan(self.mean).all())

    def after(self, rows: Inputs) -> Scaling:
        """With the scale of the columns that vary in x for the first time."""
        x = rows.astype(np.float64)
        mean, std = x.mean(0), x.std(0)
        new = (self.std == 0) & (std > 1e-7 * np.abs(mean))
        centre = np.where(new | ((self.std == 0) & np.isnan(self.mean)), mean, self.mean)
        return Scaling(centre, np.where(new, std, self.std))

    def __call__(self, x: Inputs) -> Inputs:
        if not self.known:
            return x
        divisor = np.where(self.std == 0, 1.0, self.std)
        return np.where(self.std == 0, 0.0, (x.astype(np.float64) - self.mean) / divisor).astype(np.float32)


def unscaled(columns: int) -> Scaling:
    """The scaling before any task."""
    return Scaling(np.full(columns, np.nan), np.zeros(columns))
