"""An alarm when rows surprise the learner more than it expects itself to be surprised.

If nothing has changed, the predicted probabilities p are right. Then for any other prediction q made before the row,
q(y) / p(y) has the mean 1. Here q is the same prediction, made less sure: q proportional to p^(1 - s), for several s.
The sum over all possible moments of the change, R <- (R + 1) q(y) / p(y), reaches A after A rows on average, or later
(Shiryaev & Roberts; as an e-detector: Shin, Ramdas & Rinaldo, 2023). So with an alarm at A = 1 / rate there are at most
`rate` false alarms per row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from evcl.streams.observing import SOFTER

QUIET = 100  # rows after an alarm without another one, while the learner adapts


class Alarm(NamedTuple):
    """A change that the learner noticed.

    Attributes:
        row: the number of the row at which the alarm was raised, from 0
        surprise: how much likelier the last rows are if something has changed, in nats
        columns: the places of the inputs that moved, or whose relation to the target did; the clearest first
        action: what the learner did
    """

    row: int
    surprise: float
    columns: tuple[int, ...]
    action: str


class Detector:
    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.sums = torch.zeros(len(SOFTER), dtype=torch.float64)
        self.quiet = 0

    def learn(self, softer: Tensor) -> tuple[int, float] | None:
        """The row of these at which the alarm is raised, and the mean of the sums; from log q(y) / p(y) [s, n]."""
        for i, each in enumerate(softer.exp().unbind(1)):
            self.sums = (self.sums + 1) * each
            if self.quiet:
                self.quiet -= 1
                self.sums = torch.zeros_like(self.sums)
            elif (height := float(self.sums.mean())) * self.rate >= 1:
                self.quiet = QUIET
                self.sums = torch.zeros_like(self.sums)
                return i, height
        return None

    def state(self) -> dict[str, Tensor]:
        return {"sums": self.sums, "quiet": torch.tensor(self.quiet)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.sums, self.quiet = state["sums"].clone(), int(state["quiet"])
