"""The examples that a fit trains on, and their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from evcl._core.errors import retired

if TYPE_CHECKING:
    from evcl.nn import BayesianNetwork


NO_HEAD = -1
"""The head of examples that are explained by the trunk's own outputs."""


@dataclass(frozen=True)
class Reread:
    """Examples that are read anew in each epoch.

    Attributes:
        total: their number
        read: epoch -> all examples in pieces, x [n, ...] and y [n] each, on the CPU
    """

    total: int
    read: Callable[[int], Iterator[tuple[Tensor, Tensor]]]


@dataclass(frozen=True)
class TaskData:
    """x [U, N, ...] and y [U, N]. Replica r learns from row r mod U; with U = 1, all replicas share the data."""

    x: Tensor
    y: Tensor  # class indices within the head; for a likelihood other than the categorical, [U, N, ...]
    head: int  # its number, or NO_HEAD
    weights: Tensor | None = None  # [U, N]: the weight of each example, with mean 1; None: all 1
    task: int = 0  # the task's number in the order of learning, from 0
    reread: Reread | None = None  # if given, x and y are only a sample of the examples

    @property
    def n(self) -> int:
        """The number of examples."""
        return self.y.shape[1] if self.reread is None else self.reread.total

    @property
    def counts(self) -> Tensor:
        """[U, N]: the weight of each example, also if all are 1."""
        return self.x.new_ones(self.y.shape[:2]) if self.weights is None else self.weights

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The examples `rows` [R, B] of each replica: x [R, B, ...] and y [R, B]."""
        if self.x.shape[0] == 1:
            flat = rows.flatten()
            x, y = self.x[0].index_select(0, flat), self.y[0].index_select(0, flat)
            return x.unflatten(0, rows.shape), y.unflatten(0, rows.shape)
        own = (torch.arange(len(rows), device=rows.device) % len(self.x)).unsqueeze(1)
        return self.x[own, rows], self.y[own, rows]

    def seen_by(self, network: BayesianNetwork) -> tuple[TaskData, bool]:
        """The data with what the part of the network that never changes makes of the inputs, and True: see
        `BayesianNetwork.below`. If there is no such part, the data as they are, and False.
        """
        features = network.below(self.x)
        return (self, False) if features is None else (replace(self, x=features), True)

    def drawn(self, generators: Sequence[torch.Generator], most: int | None = None) -> Tensor:
        """[R, n]: the numbers of all examples in random order, or of up to `most` of them, by each generator."""
        orders = [torch.randperm(self.y.shape[1], generator=one)[:most] for one in generators]
        return torch.stack(orders).to(self.y.device)

    def take_weights(self, rows: Tensor) -> Tensor | None:
        """[R, B]: the weights of the examples `rows` [R, B]."""
        if self.weights is None:
            return None
        own = (torch.arange(len(rows), device=rows.device) % len(self.weights)).unsqueeze(1)
        return self.weights[own, rows]

    def select(self, rows: Tensor) -> TaskData:
        """A copy of the examples `rows` [R, n]."""
        x, y = self.take(rows)
        return replace(self, x=x, y=y, weights=self.take_weights(rows), reread=None)

    def replicas(self, rows: Sequence[int]) -> TaskData:
        """The data of these replicas. Returns this object itself, not a copy, if the data is the same."""
        retired("TaskData.replicas")
        own = [r % len(self.x) for r in rows]
        if len(self.x) == 1 or own == list(range(len(self.x))) * (len(own) // len(self.x)):
            return self
        weights = None if self.weights is None else self.weights[own]
        return replace(self, x=self.x[own], y=self.y[own], weights=weights)


class Minibatch(NamedTuple):
    """What a loss receives: the examples of one step, and their rows in the fit's data.

    Attributes:
        x: [R, B, ...], the inputs
        y: [R, B], class indices within the fit's heads, concatenated
        rows: [R, B], row numbers in the fit's data, with its tasks concatenated
        features: [R, B, F], the trunk's output for them, if the step has computed it
        below: [R, B, ...], what the part of the trunk that never changes makes of them, if that is known
    """

    x: Tensor
    y: Tensor
    rows: Tensor
    features: Tensor | None = None
    below: Tensor | None = None

    def through(self, network: BayesianNetwork) -> Tensor:
        """[R*B, F]: the trunk's output for the examples, with the weights of this step."""
        x = self.x if self.below is None else self.below
        features: Tensor = network(x.flatten(0, 1), from_below=self.below is not None)
        return features

    def logits(self, network: BayesianNetwork, heads: Sequence[int], tasks: Sequence[int | None] = ()) -> Tensor:
        """[R, B, classes of these heads]: the network's logits for the examples, with the weights of this step.

        `tasks`, one per head: the trunk is computed again for each of them, with that task's FiLM row.
        """
        if tasks:
            parts = []
            for task in dict.fromkeys(tasks):
                with network.using(task):
                    own = [k for k, t in zip(heads, tasks, strict=True) if t == task]
                    parts.append((own, self._replace(features=None).logits(network, own)))
            places = [k for own, _ in parts for k in own]
            pieces = [one for own, z in parts for one in z.split([network.classes(k) for k in own], 2)]
            return torch.cat([pieces[places.index(k)] for k in heads], 2)
        features = self.through(network) if self.features is None else self.features.flatten(0, 1)
        logits: Tensor = network.apply_heads(features, heads).unflatten(0, self.rows.shape)
        return logits

    def of(self, replicas: Tensor) -> Minibatch:
        """The minibatch of these replicas alone."""
        retired("Minibatch.of")
        return Minibatch(*(None if part is None else part[replicas] for part in self))  # type: ignore[arg-type]


Sampler = Callable[[Sequence[int], int, torch.Generator], Tensor]
"""(examples of each of the fit's tasks, batch size, generator) -> the rows of an epoch in their order.

Every epoch has the same number of rows.
"""


def shuffled(sizes: Sequence[int], batch: int, source: torch.Generator) -> Tensor:
    """Every example once, in random order."""
    return torch.randperm(sum(sizes), generator=source)
