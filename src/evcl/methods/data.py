"""The examples that a fit learns from, and the order in which it sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from evcl.nn import BayesianNetwork


@dataclass(frozen=True)
class TaskData:
    """x [U, N, ...] and y [U, N]: replica r learns from row r mod U, so that U = 1 is data that all of them share."""

    x: Tensor
    y: Tensor  # positions among the head's classes; for another likelihood, [U, N, ...]
    head: int
    weights: Tensor | None = None  # [U, N], what an example counts for: 1 on average; None: 1 each
    task: int = 0  # which of the tasks learned so far this is, from 0

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The examples `rows` [R, B], replica by replica: [R, B, ...] and [R, B]."""
        if self.x.shape[0] == 1:
            flat = rows.flatten()
            x, y = self.x[0].index_select(0, flat), self.y[0].index_select(0, flat)
            return x.unflatten(0, rows.shape), y.unflatten(0, rows.shape)
        own = (torch.arange(len(rows), device=rows.device) % len(self.x)).unsqueeze(1)
        return self.x[own, rows], self.y[own, rows]

    def take_weights(self, rows: Tensor) -> Tensor | None:
        """[R, B]: what the examples `rows` [R, B] count for."""
        if self.weights is None:
            return None
        own = (torch.arange(len(rows), device=rows.device) % len(self.weights)).unsqueeze(1)
        return self.weights[own, rows]

    def select(self, rows: Tensor) -> TaskData:
        """A copy of the examples `rows` [R, n]."""
        return TaskData(*self.take(rows), self.head, self.take_weights(rows), self.task)

    def replicas(self, rows: Sequence[int]) -> TaskData:
        """The data of these replicas; itself, not a copy, where that is the same."""
        own = [r % len(self.x) for r in rows]
        if len(self.x) == 1 or own == list(range(len(self.x))) * (len(own) // len(self.x)):
            return self
        weights = None if self.weights is None else self.weights[own]
        return TaskData(self.x[own], self.y[own], self.head, weights, self.task)


class Minibatch(NamedTuple):
    """What a loss is shown: the examples of a step, and which rows of the fit's data they are.

    Attributes:
        x: [R, B, ...], the inputs
        y: [R, B], positions among the classes of the fit's heads, side by side
        rows: [R, B], counted through the fit's data: those of its first task first
        features: [R, B, F], what the trunk makes of the inputs, if the step has computed it
    """

    x: Tensor
    y: Tensor
    rows: Tensor
    features: Tensor | None = None

    def logits(self, network: BayesianNetwork, heads: Sequence[int]) -> Tensor:
        """[R, B, classes of these heads]: what the network, as the step computes with it, says of the examples."""
        features = network(self.x.flatten(0, 1)) if self.features is None else self.features.flatten(0, 1)
        found: Tensor = network.apply_heads(features, heads).unflatten(0, self.rows.shape)
        return found

    def of(self, replicas: Tensor) -> Minibatch:
        """What these replicas are shown."""
        return Minibatch(*(None if part is None else part[replicas] for part in self))  # type: ignore[arg-type]


Sampler = Callable[[Sequence[int], int, torch.Generator], Tensor]
"""(examples of each of the fit's tasks, batch size, generator) -> the rows of an epoch in their order.

Every epoch has the same number of rows.
"""


def shuffled(sizes: Sequence[int], batch: int, source: torch.Generator) -> Tensor:
    """Every example once."""
    return torch.randperm(sum(sizes), generator=source)


@dataclass(frozen=True)
class Mixed:
    """Every example of the first task once, and in each batch a `share` of earlier examples, drawn with replacement.

    The fit's first task is the new one; the others are what was kept.
    """

    share: float

    def __call__(self, sizes: Sequence[int], batch: int, source: torch.Generator) -> Tensor:
        new, kept = sizes[0], sum(sizes[1:])
        old = min(round(self.share * batch), batch - 1) if kept else 0
        pieces = torch.randperm(new, generator=source).split(batch - old)
        if not old:
            return torch.cat(pieces)
        drawn = torch.randint(new, new + kept, (len(pieces), old), generator=source)
        return torch.cat([part for pair in zip(pieces, drawn, strict=True) for part in pair])
