"""Weights that belong to a task, beside the posterior, of one of two kinds:

    a <- gamma_t * a + b_t    FiLM (film.py): each task scales and shifts the trunk's units
    module(x; w_t)            private layers (private.py): a part of the network of which every task has its own

They are point estimates, without a prior and without a penalty: only task t trains them, so that no other task can
change them. A method never sees them. Whatever they are, those of task t are row t of a table [R, T, ...]: layers
compute with the row of the current task, and a fit trains the rows of its tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

Sources = Sequence[torch.Generator]  # one per replica
Selection = Sequence[int] | Tensor | slice  # of replicas


class Mixture(NamedTuple):
    """The task of each example of a batch, if they differ."""

    tasks: Sequence[int]
    places: Tensor  # [R, B]: position of each example's task in `tasks`

    def of(self, replicas: Selection) -> Mixture:
        return Mixture(self.tasks, self.places[replicas])


@dataclass(frozen=True)
class Kind:
    """What the rows of a table are, and how they learn.

    Attributes:
        parts: the places in the network that they belong to
        first: (parts, tasks, table, sources of each task or None) -> the rows [R, tasks, ...] that new tasks begin with
        rate: their learning rate, as a multiple of lr
        relative: whether it is divided by the standard deviation of initial weights to which lr is adapted
        epsilon: that of Adam
    """

    parts: Any
    first: Callable[[Any, int, Tensor, Sequence[Sources] | None], Tensor]
    rate: float
    relative: bool
    epsilon: float


@dataclass(frozen=True)
class TaskWeights:
    """The rows of all tasks, [R, T, ...]."""

    kind: Kind
    table: Tensor

    def __len__(self) -> int:
        return self.table.shape[1]

    def extended(self, tasks: int, sources: Callable[[int], Sources] | None = None) -> TaskWeights:
        """With rows for at least this many tasks. With `sources` of a task, new rows that are random are drawn."""
        have = len(self)
        if tasks <= have:
            return self
        drawn = None if sources is None else [sources(task) for task in range(have, tasks)]
        new = self.kind.first(self.kind.parts, tasks - have, self.table, drawn)
        return replace(self, table=torch.cat([self.table, new], 1))


class TaskRows:
    """The rows that a pass computes with. Those of `trained` tasks are values and gradients, [R, ...] each: layers get
    leaf tensors that share memory with the values, and `collect` adds what autograd found for them to the gradients.
    """

    def __init__(self, table: Tensor, trained: Mapping[int, tuple[Tensor, Tensor]] | None = None) -> None:
        self.table, self.trained = table, trained or {}
        self.leaves: dict[tuple[int, Hashable], tuple[Tensor, Tensor]] = {}

    def part(self, task: int, key: Hashable, of: Callable[[Tensor], Tensor]) -> Tensor:
        """A part of a task's row: `of` the row, [R, ...]; `key` names it."""
        if task not in self.trained:
            return of(self.table[:, task])
        if (task, key) not in self.leaves:
            values, grads = self.trained[task]
            self.leaves[task, key] = of(values).detach().requires_grad_(), of(grads)
        return self.leaves[task, key][0]

    def row(self, task: int) -> tuple[Tensor, Tensor | None]:
        """A task's row, and where its gradient is added; None if it is not trained."""
        return self.trained[task] if task in self.trained else (self.table[:, task], None)

    def of(self, replicas: Selection) -> TaskRows:
        """The rows of these replicas."""
        return _Selected(self, replicas)

    def collect(self) -> None:
        for leaf, grad in self.leaves.values():
            if leaf.grad is not None:
                grad.add_(leaf.grad)
                leaf.grad = None


class _Selected(TaskRows):
    def __init__(self, every: TaskRows, replicas: Selection) -> None:
        super().__init__(every.table)
        self.every, self.replicas = every, replicas

    def part(self, task: int, key: Hashable, of: Callable[[Tensor], Tensor]) -> Tensor:
        return self.every.part(task, key, of)[self.replicas]

    def row(self, task: int) -> tuple[Tensor, Tensor | None]:
        values, grads = self.every.row(task)
        return values[self.replicas], None if grads is None else grads[self.replicas]
