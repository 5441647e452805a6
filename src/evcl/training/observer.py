"""Who looks on while a run learns: one contract for callbacks, progress and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from evcl.training.step import Step


@dataclass(frozen=True)
class Progress:
    """Where a round stands at the end of an epoch, counted through all of its fits."""

    epoch: int  # from 1
    epochs: int
    nll: Tensor  # [R], the mean over the epoch
    step: Step  # the weights and terms as they are now
    lr: Tensor | float
    validation: tuple[Tensor, Tensor] | None = None  # [R] each: NLL and accuracy on a part held out
    stage: str = "task"  # of the fit


@dataclass(frozen=True)
class Position:
    """Where a fit stands within an epoch; all else that it needs to be resumed is in the step's buffers."""

    epoch: int  # from 0
    batch: int  # steps taken in it
    total: Tensor  # [R], the sum of their examples' NLL
    noise: Sequence[Tensor] = ()  # the states of the replicas' generators; none: the epoch has ended


class Observer:
    """Looks on while a run learns one round after another. Subclass it and override what you need."""

    def begin(self, epochs: int) -> None:
        """A round begins, of at most this many epochs."""

    def end(self) -> None:
        """The round is learned, and its tasks are known."""

    def finished(self, stage: int, like: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """What the round's fit of this number ended with, if it was finished before the run was stopped.

        It has tensors of the names, shapes and types of `like`, and what trackers found.
        """
        return None

    def end_fit(self, stage: int, result: dict[str, Tensor]) -> None:
        """The round's fit of this number has ended, with this."""

    def begin_fit(self, stage: int, step: Step, stopped: Tensor, epochs: int, batches: int) -> Position | None:
        """A fit begins. To resume it: put `step` and `stopped` [R] where they were, and say where that was."""
        return None

    def begin_epoch(self, epoch: int) -> None:
        """An epoch begins, from 1."""

    def end_epoch(self, progress: Progress) -> bool | None:
        """An epoch has ended; True: it is the fit's last one."""

    def due(self) -> bool:
        """Whether `save` should be called. Asked after each step on one CPU, and after each epoch elsewhere."""
        return False

    def save(self, position: Position) -> None:
        """The fit stands here."""


class Observers(Observer):
    """Several, in their order."""

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
        answers = [one.end_epoch(progress) is True for one in self.observers]  # all of them hear of it
        return any(answers)

    def due(self) -> bool:
        return any(one.due() for one in self.observers)

    def save(self, position: Position) -> None:
        for one in self.observers:
            one.save(position)
