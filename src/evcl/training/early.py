"""Early stopping: evaluate on held-out examples after each epoch, and keep the weights of the best epoch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from evcl.methods import TaskData
from evcl.targets import Likelihood
from evcl.training.step import Step


@dataclass(frozen=True)
class Validation:
    """Held-out examples. With `patience`, a task stops after that many epochs without a smaller validation NLL, and
    ends with the weights of the epoch that had the smallest.
    """

    data: TaskData
    patience: int | None = None

    def measure(self, p: Tensor, likelihood: Likelihood) -> tuple[Tensor, Tensor]:
        """[R] each: the NLL (the weighted mean) and the accuracy of the predictions p [R, M, classes]."""
        y = self.data.y
        nll, right = likelihood.score(p, y.repeat(len(p) // len(y), *[1] * (y.dim() - 1)))
        if self.data.weights is not None:
            nll = nll * self.data.weights
        return nll.mean(1), right.mean(1)


class Best:
    """The best epoch of one network: copies, on its device, of everything that predictions and trackers depend on."""

    def __init__(self, step: Step, patience: int) -> None:
        if len(step.q.mean) != 1:
            raise ValueError("early stopping works for one network only")
        own = None if step.task_fit is None else step.task_fit.values
        tracked = [buffer for tracker in step.trackers for buffer in tracker.buffers()]
        rule = [] if step.estimating is None else step.estimating.buffers()  # trackers may read the rule's state
        parts = (step.q.mean, step.q.log_std, own, *step.statistics, *tracked, *rule)
        self.live = [tensor for tensor in parts if tensor is not None]
        self.kept = [tensor.clone() for tensor in self.live]
        self.patience = patience
        self.nll, self.since = torch.full((1,), math.inf, dtype=torch.float64), torch.zeros(1, dtype=torch.long)

    def buffers(self) -> list[Tensor]:
        """Every tensor that an epoch changes."""
        return [*self.kept, self.nll, self.since]

    def enough(self, nll: float) -> bool:
        """Record an epoch's validation NLL; return True if it has not improved for `patience` epochs."""
        if nll < float(self.nll):
            self.nll.fill_(nll)
            self.since.zero_()
            self._copy(self.live, self.kept)
        else:
            self.since += 1
        return int(self.since) >= self.patience

    def restore(self) -> None:
        if float(self.nll) < math.inf:
            self._copy(self.kept, self.live)

    @staticmethod
    def _copy(source: list[Tensor], to: list[Tensor]) -> None:
        for a, b in zip(source, to, strict=True):
            b.copy_(a)
