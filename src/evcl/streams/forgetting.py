"""How fast to forget is inferred: experts with different memories are weighed by how well they predicted.

`Shares` are the probabilities that each expert is the right one now (dynamic model averaging): Bayes' rule after every
row, and before every row a small chance that another expert becomes the right one (fixed share: Herbster & Warmuth,
1998). `Blend` multiplies the experts' class probabilities, each to a power that a Kalman filter learns: this also
corrects experts that are too sure or too unsure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from evcl.streams.filters import Blocks, reach, solved
from evcl.streams.observing import flattened

SWITCH = 0.002  # the chance per row that another expert becomes the right one
LEAST = 1e-6  # a probability that an expert's log is cut at
POWERS = 0.1  # the prior variance of a power
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
        after = (self.log + log_likelihood.sum(1)).log_softmax(0).exp()
        stay = (1 - SWITCH) ** n
        self.log = (stay * after + (1 - stay) / r).log()

    def state(self) -> dict[str, Tensor]:
        return {"log": self.log}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.log = state["log"].clone()


class Blend:
    """p proportional to prod_r p_r^w_r, with Gaussian powers w that start from 1 / R each."""

    def __init__(self, experts: int) -> None:
        start = torch.full((1, experts), 1 / experts, dtype=torch.float64)
        self.filter = Blocks(start, torch.full((experts,), POWERS, dtype=torch.float64), [(0, 1, experts)])
        self.kept = torch.tensor([1 - 1 / MEMORY], dtype=torch.float64)

    def predict(self, p: Tensor) -> Tensor:
        """[n, C], from the experts' probabilities p [R, n, C]."""
        jacobian = p.clamp_min(LEAST).log().permute(1, 2, 0).unsqueeze(0)
        self.found = reach(self.filter, jacobian)
        return flattened((jacobian @ self.filter.mean.view(-1, 1)).squeeze(3), self.found.rows)[0]

    def learn(self, p: Tensor, y: Tensor) -> None:
        """Learn from the experts' probabilities and the places y [n] of the right classes."""
        q = self.predict(p).unsqueeze(0)
        s = q.sqrt()
        b = torch.diag_embed(s) - q.unsqueeze(3) * s.unsqueeze(2)
        theta, root, failed = solved(self.filter, self.found, F.one_hot(y, q.shape[2]) - q, b)
        if not bool(failed):
            self.filter.shrink(self.found, b, root)
            self.filter.mean = theta
        self.filter.forget(self.kept ** len(y))

    def state(self) -> dict[str, Tensor]:
        return self.filter.state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.filter.restore(state)


class Overtaking:
    """Notices when an expert that forgets faster has predicted so much better that a slower one must be out of date:
    the sum of differences in log-likelihood since they were last level reaches `OVERTAKEN`.
    """

    def __init__(self, kept: Tensor) -> None:
        r = len(kept)
        self.ahead = torch.zeros(r, r, dtype=torch.float64)  # [a, b]: how far a is ahead of b
        self.faster = kept.unsqueeze(1) < kept.unsqueeze(0)

    def learn(self, log_likelihood: Tensor) -> list[tuple[int, int]]:
        """Pairs (slow, fast) in which fast has overtaken slow, from log-likelihoods [R, n] of experts."""
        total = log_likelihood.sum(1)
        self.ahead = (self.ahead + total.unsqueeze(1) - total).clamp_min(0) * self.faster
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
