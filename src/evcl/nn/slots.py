"""Weights that belong to a task, and not to the trunk that all tasks share. A head is the first kind of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from evcl.nn.posterior import Shape


@dataclass(frozen=True)
class Slot:
    """The weights of one key, such as "head 0": they lie behind the trunk's in the layout, as "head 0.weight".

    A slot may be laid out again with more rows along its weights' first axes: what it knew stays.
    """

    key: str  # with a blank, so that no module of a user's has it too
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
