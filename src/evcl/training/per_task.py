"""The weights of tasks (nn/per_task.py) that a fit trains. They have no terms and no standard deviation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from evcl._core.settings import Settings, decided
from evcl.nn import BayesianNetwork
from evcl.nn.per_task import TaskRows, TaskWeights
from evcl.training.rules import Adam, Rate


class TaskFit:
    """The rows of some tasks in one fit: `values` and `grads`, [R, K, ...] each. Adam updates them."""

    def __init__(self, network: BayesianNetwork, tasks: Sequence[int], width: float) -> None:
        """`width`: the standard deviation of initial weights to which lr is adapted."""
        assert network.task_weights is not None
        self.weights, self.tasks, self.width = network.task_weights, list(tasks), width
        self.values = self.weights.table[:, self.tasks].clone()
        self.grads = torch.zeros_like(self.values)
        each = zip(self.values.unbind(1), self.grads.unbind(1), strict=True)
        self.rows = TaskRows(self.weights.table, dict(zip(self.tasks, each, strict=True)))

    def begin(self, s: Settings) -> None:
        kind, flat = self.weights.kind, self.values.view(len(self.values), -1)
        self.rate = Rate(kind.rate / (self.width if kind.relative else 1.0) * decided(s.lr), flat)
        self.adam = Adam(flat, self.rate.value, kind.epsilon)
        self.flat_grads, self.scratch = self.grads.view_as(flat), torch.zeros_like(flat)

    def __call__(self) -> None:
        """Take a step."""
        self.adam.step(self.flat_grads, self.scratch)

    def buffers(self) -> list[Tensor]:
        """Every tensor that a step changes or reads."""
        return [*self.adam.state(), self.grads]

    def scale(self, factor: float) -> None:
        self.rate.scale(factor)
        self.adam.lr = self.rate.value

    def freeze(self, rows: Tensor) -> None:
        self.rate.freeze(rows)
        self.adam.lr = self.rate.value

    def resume(self, steps: int) -> None:
        self.adam.count.fill_(min(steps, 2**24))

    def weights_with(self, values: Tensor) -> TaskWeights:
        """Those of all tasks, with these values for the tasks of the fit."""
        table = self.weights.table.clone()
        table[:, self.tasks] = values
        return replace(self.weights, table=table)
