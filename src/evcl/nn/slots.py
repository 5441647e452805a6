"""Weights that belong to one task, not to the trunk that all tasks share. Heads are such weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from evcl.posterior import Shape


@dataclass(frozen=True)
class Slot:
    """The weights under one key, such as "head 0". They follow the trunk's in the layout, as "head 0.weight".

    A slot can be laid out again with more rows along the first axis of its weights; existing rows keep their values.
    """

    key: str  # contains a space, so that it cannot equal the name of a user's module
    shapes: Mapping[str, Shape]  # parameter -> shape
    fan_in: int  # new means are drawn He-uniform for this many inputs

    @property
    def named(self) -> dict[str, Shape]:
        return {f"{self.key}.{parameter}": shape for parameter, shape in self.shapes.items()}


def head_names(k: int) -> dict[str, str]:
    """The names of head k's weights."""
    return {"weight": f"head {k}.weight", "bias": f"head {k}.bias"}


def head(k: int, classes: int, features: int) -> Slot:
    """The linear layer from the trunk's features to the outputs of head k."""
    return Slot(f"head {k}", {"weight": (classes, features), "bias": (classes,)}, features)


def foreign(columns: Tensor, classes: int) -> Tensor:
    """[..., classes]: True for classes outside an example's `columns` [..., 2]."""
    place = torch.arange(classes, device=columns.device)
    return (place < columns[..., :1]) | (place >= columns[..., 1:])
