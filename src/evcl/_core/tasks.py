"""A task has a name, training examples and test examples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from evcl._core.errors import EvclError


@dataclass(frozen=True)
class Examples:
    """Inputs [N, ...] and labels [N].

    Images stay uint8 until they are used, and a permuted task stores the permutation, not a copy of the inputs.
    """

    inputs: Tensor
    labels: Tensor
    permutation: Tensor | None = None
    pixels: tuple[float, float] | None = None  # the values that 0 and 255 map to, for uint8 inputs

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        """The sizes, not the values."""
        return f"Examples(inputs {list(self.inputs.shape)}, labels {list(self.labels.shape)})"

    @property
    def x(self) -> Tensor:
        """The inputs as the task presents them, computed at each access so that no copy stays in memory."""
        x = self.inputs if self.permutation is None else self.inputs[:, self.permutation]
        if self.pixels is None:
            return x
        low, high = self.pixels
        return x.to(torch.float32, memory_format=torch.contiguous_format).mul_((high - low) / 255).add_(low)

    @property
    def y(self) -> Tensor:
        """The labels."""
        return self.labels

    def select(self, rows: Tensor) -> Examples:
        """A copy of these rows."""
        return replace(self, inputs=self.inputs[rows], labels=self.labels[rows])

    def __iter__(self) -> Iterator[Tensor]:
        """`x, y = task.train`"""
        return iter((self.x, self.y))


@dataclass(frozen=True)
class Task:
    """A named set of training and test examples.

    Attributes:
        name: the task's name
        head: the name of the task whose head this one uses: its own, or an earlier task's
        classes: the labels of that head, in the order of its outputs
        train: the training examples
        test: the test examples
        validation: examples held out of `train`, if requested
    """

    name: str
    head: str
    classes: tuple[int, ...]
    train: Examples
    test: Examples
    validation: Examples | None = None

    @property
    def held_out(self) -> Examples:
        """The examples that a run is measured on: the validation part if there is one, else the test set."""
        return self.test if self.validation is None else self.validation


def stratified(labels: Tensor, count: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
    """Split the rows in two, with each class in proportion: (kept, held), both sorted; `held` has `count` rows.

    Class quotas are rounded down; the largest remainders get one more, and on a tie the smaller class comes first.
    """
    classes, sizes = labels.unique(return_counts=True)
    if not 0 < count < len(labels):
        raise EvclError(f"cannot hold out {count} of {len(labels)} examples: both parts need at least one")
    exact = sizes.double() * count / len(labels)
    quotas = exact.floor().long()
    extra = (quotas - exact).argsort(stable=True)[: count - int(quotas.sum())]
    quotas[extra] += 1
    held = torch.zeros(len(labels), dtype=torch.bool)
    for label, quota in zip(classes.tolist(), quotas.tolist(), strict=True):
        rows = (labels == label).nonzero().flatten()
        held[rows[torch.randperm(len(rows), generator=source)[:quota]]] = True
    return (~held).nonzero().flatten(), held.nonzero().flatten()
