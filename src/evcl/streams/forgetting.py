"""How fast to forget is inferred: experts with different memories are weighed by how well they predicted.

`Shares` are the probabilities that each expert is the right one now (dynamic model averaging): Bayes' rule after every
row, and before every row a small chance that another expert becomes the right one (fixed share: Herbster & Warmuth,
1998). A `blend` multiplies the experts' class probabilities, each to a power that a Kalman filter learns: this also
corrects experts that are too sure or too unsure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from evcl.streams.experts import Experts
from evcl.streams.filters import Full
from evcl.streams.observing import Classes

SWITCH = 0.002  # the chance per row that another expert becomes the right one
LOST = -1e6  # the log-likelihood of an expert whose prediction is not a number
LEAST = 1e-6  # a probability that an expert's log is cut at
POWERS = 0.03  # the prior variance of a power
MEMORY = 1000  # rows that the powers are learned from
OVERTAKEN = 12.0  # nats by which a fast expert must predict better to replace a slow one


class Shares:
    """The probability [R] of each expert."""

    def __init__(self, experts: int) -> None:
        self.log = torch.full((experts,), -math.log(experts), dtype=torch.float64)

    @property
    def shares(self) -> Tensor:
        return self.log.exp()

    def learn(self, log_likelihood: Tensor) -> None:
        """Bayes' rule with the log-likelihoods [R, n] of n rows."""
        r, n = log_likelihood.shape
        after = (self.log + log_likelihood.sum(1).nan_to_num(LOST)).log_softmax(0).exp()
        stay = (1 - SWITCH) ** n
        self.log = (stay * after + (1 - stay) / r).log()

    def state(self) -> dict[str, Tensor]:
        return {"log": self.log}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.log = state["log"].clone()


class Powers:
    """p proportional to prod_r p_r^w_r as a network: its inputs are the experts' log odds of each class against the
    first, [n, K, R], and its weights the powers w, 1 / R each before any row.
    """

    def __init__(self, experts: int) -> None:
        self.start = torch.full((experts,), 1 / experts, dtype=torch.float64)
        self.prior = torch.full((experts,), POWERS, dtype=torch.float64)
        self.row = torch.empty(0, dtype=torch.float64)

    def jacobian(self, weights: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x @ weights[0]).unsqueeze(0), x.unsqueeze(0)

    @staticmethod
    def inputs(p: Tensor) -> Tensor:
        """[n, K, R], from the experts' probabilities p [R, n, K + 1]."""
        logs = p.clamp_min(LEAST).log()
        return (logs[..., 1:] - logs[..., :1]).permute(1, 2, 0)


def blend(experts: int) -> Experts:
    """Learns the powers of this many experts."""
    found = Experts(Powers(experts), Full, [MEMORY])
    found.observing = Classes()
    return found


class Overtaking:
    """Notices when an expert that forgets faster has predicted so much better that a slower one must be out of date:
    the sum of differences in log-likelihood since they were last level reaches `OVERTAKEN`.

    `comparable` [R, R]: whether the first expert has the shape of the second, and forgets faster.
    """

    def __init__(self, comparable: Tensor) -> None:
        self.comparable = comparable
        self.ahead = torch.zeros(comparable.shape, dtype=torch.float64)  # [a, b]: how far a is ahead of b

    def learn(self, log_likelihood: Tensor) -> list[tuple[int, int]]:
        """Pairs (slow, fast) in which fast has overtaken slow, from log-likelihoods [R, n] of experts."""
        total = log_likelihood.sum(1)
        self.ahead = (self.ahead + total.unsqueeze(1) - total).clamp_min(0) * self.comparable
        found = []
        while float(self.ahead.max()) > OVERTAKEN:
            fast, slow = divmod(int(self.ahead.argmax()), len(total))
            found.append((slow, fast))
            self.ahead[:, slow] = 0
            self.ahead[slow] = 0
        return found

    def state(self) -> dict[str, Tensor]:
        return {"ahead": self.ahead}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.ahead = state["ahead"].clone()
