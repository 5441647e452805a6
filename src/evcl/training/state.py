"""A snapshot of a run's state, and its buffers by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from evcl.methods import packing
from evcl.nn import Gaussian
from evcl.nn.per_task import TaskWeights


@dataclass(frozen=True)
class State:
    """A snapshot of a run's state. A run replaces its tensors and never changes them in place, so none is copied."""

    posterior: Gaussian
    statistics: dict[str, Tensor]
    memory: Any
    diverged: Tensor
    task_weights: tuple[TaskWeights | None, ...]  # of each network


def tensors_of(state: State) -> dict[str, Tensor]:
    """The buffers of a state, by name."""
    named = {f"statistics.{name}": tensor for name, tensor in state.statistics.items()}
    named["posterior.mean"] = state.posterior.mean
    if state.posterior.log_std is not None:
        named["posterior.log_std"] = state.posterior.log_std
    named |= {f"film {i}": own.table for i, own in enumerate(state.task_weights) if own is not None}
    return named | {f"memory/{name}": tensor for name, tensor in packing.tensors(state.memory).items()}


def under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names have this prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
