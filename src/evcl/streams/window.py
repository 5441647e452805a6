"""MESU (Bonnet et al., 2025): independent weights that remember a window of rows.

With C the NLL of the rows, sigma the deviations and N(m_0, s_0^2) the prior, a batch moves the weights by

    d mu    = -sigma^2 dC/dmu + sigma^2 (m_0 - mu) / (w s_0^2)
    d sigma = -sigma^2 / 2 dC/dsigma + sigma (s_0^2 - sigma^2) / (2 w s_0^2)

for a window of w batches. Here the window is counted in rows, and dC/dsigma = sigma F with the Fisher's diagonal F. The
first part of d sigma is applied as sigma <- sigma / sqrt(1 + sigma^2 F). To first order in F this is the same, and it
stays above 0 for any F. The first part of d mu is the filter's update of the mean.
"""

from __future__ import annotations

import numpy as np

from evcl.streams.arrays import Array
from evcl.streams.filters import Diagonal
from evcl.streams.jacobian import Network


class Window(Diagonal):
    """`forget(kept)` with kept = 1 - rows / w moves mu and sigma towards the prior, `centre` [P] and `prior` [P]."""

    def __init__(self, network: Network, mean: Array, prior: Array) -> None:
        super().__init__(network, mean, prior)
        self.centre = mean[0].copy()

    def forget(self, kept: Array) -> None:
        part = (1 - kept)[:, None] / self.prior
        less = self.variance * part  # sigma^2 / (w s_0^2)
        self.mean = self.mean + less * (self.centre - self.mean)
        std = np.sqrt(self.variance) * (1 + 0.5 * (part * self.prior - less))
        self.variance = np.minimum(std * std, self.prior)

    def grow(self, mean: Array, prior: Array) -> None:
        super().grow(mean, prior)
        self.centre = np.concatenate([self.centre, mean])
