"""What a method remembers between tasks: a frozen dataclass whose fields declare how they are stored.

    @dataclass(frozen=True)
    class Memory:
        prior: Gaussian = per_weight(Gaussian, "prior")    # [R, P]: grows with the network
        importance: Tensor = per_weight(low=0)
        factors: dict[str, Tensor] = per_layer()           # weight name -> [R, ...]
        masks: dict[int, Tensor] = per_task()              # task -> [R, ...]
        rows: dict[int, Tensor] = per_head(merge="sum")    # head -> [R, ...]
        kept: tuple[TaskData, ...] = examples()            # rows of earlier tasks
        teacher: Model = model()                           # a second network

The first axis of every tensor is the replica axis. A field holds a tensor or a `Gaussian`, or a tuple or dict of these.
The rest of the library handles memories only through memories.py: no other file knows a field by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from evcl.nn import BayesianNetwork, Gaussian

Start = Literal["zero", "prior", "posterior"]
Merge = Literal["", "sum", "mean", "max", "posterior"]
TRUNK_KEY = -1  # the key of the trunk beside those of heads
HOW = "evcl"  # the key under which a field's metadata says how it is stored


@dataclass(frozen=True)
class Nothing:
    """The memory of a method that remembers nothing."""


@dataclass(frozen=True)
class Model:
    """A second network beside the learner's own. Its weights and statistics are saved; its module is not."""

    network: BayesianNetwork
    posterior: Gaussian
    statistics: Mapping[str, Tensor]
    name: str = ""  # name of the memory field that holds it


class PerWeight(NamedTuple):
    kind: type
    start: Start
    low: float
    high: float
    merge: Merge = ""
    decay: str = ""


class ByKey(NamedTuple):
    """A dict of tensors [R, ...]; the other axes may have any size. `inputs`: whether that of a network's inputs is one
    of them.
    """

    key: type
    inputs: bool = False
    merge: Merge = ""
    widened: Callable[[Any, int], Any] | None = None


class KeptExamples(NamedTuple):
    """A tuple of kept examples."""


class Another(NamedTuple):
    make: Callable[[nn.Module], nn.Module] | None


def per_weight(
    kind: type = Tensor,
    start: Start = "zero",
    low: float = -math.inf,
    high: float = math.inf,
    merge: Merge = "",
    decay: str = "",
) -> Any:
    """[R, P], one number per weight: a tensor, a Gaussian, or a tuple or dict of these, which starts empty.

    `start` is the value for a new weight: 0, its first prior, or its initial posterior. When a file is loaded, values
    outside [low, high] are refused.

    `merge` is what `evcl.merge` makes of the values of several sites: their sum, in which what all have of the base
    counts once; their mean or maximum; or the merged posterior. Without it, models with this field are not merged. With
    a sum, `decay` names the setting by which each round multiplies what was there.
    """
    return field(default=None, metadata={HOW: PerWeight(kind, start, low, high, merge, decay)})


def per_layer(widened: Callable[[Any, int], Any] | None = None) -> Any:
    """A dict from weight names to tensors [R, ...], such as factors of the curvature. `widened`: (the dict, count) ->
    the dict for a network with this many more inputs, which were 0 in all rows so far.
    """
    return field(default_factory=dict, metadata={HOW: ByKey(str, inputs=True, widened=widened)})


def per_task(inputs: bool = False) -> Any:
    """A dict from task numbers to tensors [R, ...], such as masks of units. `inputs`: whether their size depends on the
    number of the network's inputs.
    """
    return field(default_factory=dict, metadata={HOW: ByKey(int, inputs)})


def per_head(merge: Merge = "") -> Any:
    """A dict from the numbers of heads to tensors [R, ...], such as numbers of rows; `merge` is as in `per_weight`."""
    return field(default_factory=dict, metadata={HOW: ByKey(int, merge=merge)})


def examples() -> Any:
    """A tuple of `TaskData` with a replica axis, [R, N, ...]: examples of earlier tasks."""
    return field(default=(), metadata={HOW: KeptExamples()})


def model(make: Callable[[nn.Module], nn.Module] | None = None) -> Any:
    """A second network with the same heads, whose initial weights are drawn from separate seeds.

    `make(network)` receives a copy of the learner's trunk and returns the second network's trunk; by default, that copy
    is used.
    """
    return field(default=None, metadata={HOW: Another(make)})
