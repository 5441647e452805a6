"""The scaling of an estimator's inputs."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Scaling(NamedTuple):
    """Each column minus its mean, divided by its standard deviation, both of the first task in which it varies.

    They stay: the network's weights mean what they meant when they were learned. A column that has not varied yet is 0
    for the network, which has learned nothing from it, so its scale can still be chosen.
    """

    mean: Any  # [columns], float64
    std: Any  # [columns]; 0: the column has not varied yet

    @property
    def known(self) -> bool:
        """Whether there is one; if not, the columns are used as they are."""
        return not bool(np.isnan(self.mean).all())

    def after(self, x: Any) -> Scaling:
        """With the scale of the columns that vary in x for the first time."""
        x = np.asarray(x, dtype=np.float64)
        mean, std = x.mean(0), x.std(0)
        new = (self.std == 0) & (std > 1e-7 * np.abs(mean))
        centre = np.where(new | ((self.std == 0) & np.isnan(self.mean)), mean, self.mean)
        return Scaling(centre, np.where(new, std, self.std))

    def __call__(self, x: Any) -> Any:
        if not self.known:
            return x
        divisor = np.where(self.std == 0, 1.0, self.std)
        return np.where(self.std == 0, 0.0, (np.asarray(x, dtype=np.float64) - self.mean) / divisor).astype(np.float32)


def unscaled(columns: int) -> Scaling:
    """The scaling before any task."""
    return Scaling(np.full(columns, np.nan), np.zeros(columns))
