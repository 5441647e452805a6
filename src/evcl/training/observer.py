"""Observers of training: one interface for callbacks, progress displays and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from evcl.training.step import Step


@dataclass(frozen=True)
class Progress:
    """The progress of a round at the end of an epoch; epochs are counted over all fits of the round."""

    epoch: int  # from 1
    epochs: int
    nll: Tensor  # [R], the mean over the epoch
    step: Step  # holds the current weights and terms
    lr: Tensor | float
    validation: tuple[Tensor, Tensor] | None = None  # [R] each: NLL and accuracy on held-out examples
    stage: str = "task"  # the fit's `stage`
    path: str = ""  # how its steps are computed: see paths.py


@dataclass(frozen=True)
class Position:
    """The position of a fit within an epoch. Everything else needed to resume it is in the step's buffers."""

    epoch: int  # from 0
    batch: int  # steps taken in this epoch
    total: Tensor  # [R]: the NLL summed over the examples of these steps
    noise: Sequence[Tensor] = ()  # the states of the replicas' generators; empty if the epoch has ended


class Observer:
    """Is called while a run learns one round after another. Subclass it and override what you need."""

    def begin(self, epochs: int) -> None:
        """Called when a round of at most this many epochs begins."""

    def end(self) -> None:
        """Called when the round is learned and its tasks are recorded."""

    def finished(self, stage: int, like: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """The result of the round's fit number `stage`, if it was finished before the run was stopped.

        It has tensors with the names, shapes and dtypes of `like`, and the trackers' results.
        """
        return None

    def end_fit(self, stage: int, result: dict[str, Tensor]) -> None:
        """Called when the round's fit number `stage` has ended with this result."""

    def begin_fit(self, stage: int, step: Step, stopped: Tensor, epochs: int, batches: int) -> Position | None:
        """Called when a fit begins. To resume it, restore `step` and `stopped` [R], and return its position."""
        return None

    def begin_epoch(self, epoch: int) -> None:
        """Called when an epoch begins; epochs count from 1."""

    def end_epoch(self, progress: Progress) -> bool | None:
        """Called when an epoch has ended. Return True to end the fit."""

    def due(self) -> bool:
        """Whether `save` should be called. Asked after each step in a single CPU process, else after each epoch."""
        return False

    def save(self, position: Position) -> None:
        """Called to save the fit at this position."""


class Observers(Observer):
    """Several observers, called in order."""

    def __init__(self, *observers: Observer) -> None:
        self.observers = observers

    def begin(self, epochs: int) -> None:
        for one in self.observers:
            one.begin(epochs)

    def end(self) -> None:
        for one in self.observers:
            one.end()

    def finished(self, stage: int, like: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        return next((found for one in self.observers if (found := one.finished(stage, like)) is not None), None)

    def end_fit(self, stage: int, result: dict[str, Tensor]) -> None:
        for one in self.observers:
            one.end_fit(stage, result)

    def begin_fit(self, stage: int, step: Step, stopped: Tensor, epochs: int, batches: int) -> Position | None:
        found = [one.begin_fit(stage, step, stopped, epochs, batches) for one in self.observers]
        return next((position for position in found if position is not None), None)

    def begin_epoch(self, epoch: int) -> None:
        for one in self.observers:
            one.begin_epoch(epoch)

    def end_epoch(self, progress: Progress) -> bool:
        answers = [
            one.end_epoch(progress) is True for one in self.observers
        ]  # a list, so that every observer is called
        return any(answers)

    def due(self) -> bool:
        return any(one.due() for one in self.observers)

    def save(self, position: Position) -> None:
        for one in self.observers:
            one.save(position)
