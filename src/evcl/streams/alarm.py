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

from collections.abc import Mapping
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

from evcl.streams.observing import SOFTER

QUIET = 100  # rows after an alarm without another one, while the learner adapts
USUAL = 2000  # rows that say what is usual
RECENT = 40  # rows that are compared with earlier ones to find the columns that moved
CLEAR = 0.01  # the chance that any column is named though none moved


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


class Detector:
    """Raises at most `rate` false alarms per row."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.sums = torch.zeros(len(SOFTER), dtype=torch.float64)
        self.mean = torch.ones(len(SOFTER), dtype=torch.float64)  # of the ratios
        self.square = torch.ones(len(SOFTER), dtype=torch.float64)
        self.rows = torch.zeros((), dtype=torch.float64)  # in those means
        self.quiet = 0

    def learn(self, softer: Tensor) -> tuple[int, float] | None:
        """The row of these at which the alarm is raised, and the mean of the sums; from log q(y) / p(y) [s, n]."""
        ratios, found = softer.exp(), None
        count = (self.rows + 1).clamp_max(USUAL)
        error = ((self.square - self.mean.square()).clamp_min(0) / count).sqrt()
        usual = (self.mean + error).clamp_min(1.0)
        sums = self.sums.tolist()
        for i, each in enumerate((ratios / usual.unsqueeze(1)).mT.tolist()):
            if self.quiet:
                self.quiet -= 1
                continue
            sums = [(old + 1) * ratio for old, ratio in zip(sums, each, strict=True)]
            if found is None and (height := sum(sums) / len(sums)) * self.rate >= 1:
                found = i, height
                self.quiet = QUIET
                sums = [0.0] * len(sums)
        self.sums = self.sums.new_tensor(sums)
        if not self.quiet:  # just after a change, nothing is as usual
            n = ratios.shape[1]
            self.rows = (self.rows + n).clamp_max(USUAL)
            part = n / (self.rows + FIRST)
            self.mean = self.mean + part * (ratios.mean(1) - self.mean)
            self.square = self.square + part * (ratios.square().mean(1) - self.square)
        return found

    def state(self) -> dict[str, Tensor]:
        names = ("sums", "mean", "square", "rows")
        return {name: getattr(self, name) for name in names} | {"quiet": torch.tensor(self.quiet)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        for name in ("sums", "mean", "square", "rows"):
            setattr(self, name, state[name].clone())
        self.quiet = int(state["quiet"])


FIRST = 100  # rows that the first value of the usual ratios counts for


class Columns:
    """Which of D columns moved lately: their mean in the last rows, and the covariance of each with the error e of what
    was predicted, which is 0 as long as the prediction is right.
    """

    def __init__(self, columns: int, outputs: int) -> None:
        self.inputs = torch.zeros(columns, dtype=torch.float64)
        self.relation = torch.zeros(outputs, columns, dtype=torch.float64)
        self.expected = torch.zeros(outputs, columns, dtype=torch.float64)  # the variance of `relation`

    def grow(self, outputs: int) -> None:
        more = self.relation.new_zeros(outputs, len(self.inputs))
        self.relation, self.expected = torch.cat([self.relation, more]), torch.cat([self.expected, more])

    def learn(self, z: Tensor, e: Tensor, b: Tensor) -> None:
        """From standardised inputs z [n, D] and the derivatives e [n, K], b [n, K, K] of the prediction."""
        kept = (1 - 1 / RECENT) ** len(z)
        self.inputs = kept * self.inputs + (1 - kept) * z.mean(0)
        self.relation = kept * self.relation + e.mT @ z
        self.expected = kept**2 * self.expected + b.square().sum(2).mT @ z.square()

    def moved(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """The columns, the clearest first, and whether it was their inputs or their relation to the target."""
        inputs = self.inputs.abs() * (2 * RECENT) ** 0.5  # z has mean 0 and deviation 1
        relation = (self.relation.abs() / self.expected.clamp_min(1e-12).sqrt()).amax(0)
        tests = 2 * len(self.inputs) * (1 + len(self.relation))
        least = NormalDist().inv_cdf(1 - CLEAR / tests)
        height = torch.maximum(inputs, relation)
        found = [int(i) for i in height.argsort(descending=True) if float(height[i]) > least]
        return tuple(found), tuple("inputs" if inputs[i] >= relation[i] else "relation" for i in found)

    def state(self) -> dict[str, Tensor]:
        return {"inputs": self.inputs, "relation": self.relation, "expected": self.expected}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.inputs, self.relation, self.expected = (state[name].clone() for name in self.state())
