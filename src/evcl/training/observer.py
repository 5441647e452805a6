"""Observers of training: one interface for callbacks, progress displays, checkpoints and early stopping."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from evcl._core.errors import EvclError
from evcl.callbacks import Callback, Epoch
from evcl.methods import TaskData
from evcl.targets import Likelihood

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
        return next((result for one in self.observers if (result := one.finished(stage, like)) is not None), None)

    def end_fit(self, stage: int, result: dict[str, Tensor]) -> None:
        for one in self.observers:
            one.end_fit(stage, result)

    def begin_fit(self, stage: int, step: Step, stopped: Tensor, epochs: int, batches: int) -> Position | None:
        positions = [one.begin_fit(stage, step, stopped, epochs, batches) for one in self.observers]
        return next((position for position in positions if position is not None), None)

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


class History(Observer):
    """Reports a round to the callbacks of one network, replica `replica` of a run, and keeps a record of its epochs."""

    def __init__(self, task: str, callbacks: Any, replica: int = 0) -> None:
        self.task, self.replica = task, replica
        self.epochs: list[Epoch] = []
        self.callbacks: list[Callback] = list(callbacks) if isinstance(callbacks, Iterable) else [callbacks]
        for callback in self.callbacks:
            if not isinstance(callback, Callback):
                raise EvclError(f"callbacks must be a list of evcl.Callback objects, but one of them is {callback!r}")

    def begin(self, epochs: int) -> None:
        for callback in self.callbacks:
            callback.begin_task(self.task, epochs)

    def begin_epoch(self, epoch: int) -> None:
        for callback in self.callbacks:
            callback.begin_epoch(self.task, epoch)

    def end_epoch(self, progress: Progress) -> bool:
        """Copy the numbers from the device, once per epoch, and call all callbacks, even if one asks to stop."""
        p, losses = progress, progress.step.losses_now()
        numbers = [p.nll, *losses.values(), *(p.validation or ())]
        nll, *rest = torch.stack(numbers)[:, self.replica].tolist()
        terms, measured = rest[: len(losses)], rest[len(losses) :]
        lr = p.lr[self.replica] if isinstance(p.lr, torch.Tensor) else p.lr
        epoch = Epoch(
            task=self.task,
            epoch=p.epoch,
            epochs=p.epochs,
            nll=nll,
            terms=dict(zip(losses, terms, strict=True)),
            lr=float(lr),
            validation_nll=measured[0] if measured else None,
            validation_accuracy=measured[1] if measured else None,
            stage=p.stage,
            path=p.path,
        )
        self.epochs.append(epoch)
        stop = False
        for callback in self.callbacks:
            stop |= callback.end_epoch(epoch) is True
        return stop

    def end(self) -> None:
        for callback in self.callbacks:
            callback.end_task(self.task, tuple(self.epochs))


@dataclass(frozen=True)
class Validation:
    """Held-out examples. With `patience`, a task stops after that many epochs without a smaller validation NLL, and
    ends with the weights of the epoch that had the smallest.
    """

    data: TaskData
    patience: int | None = None

    def measure(self, p: Tensor, likelihood: Likelihood) -> tuple[Tensor, Tensor]:
        """[R] each: the NLL (the weighted mean) and the accuracy of the predictions p [R, M, classes]."""
        y = self.data.y
        nll, right = likelihood.score(p, y.repeat(len(p) // len(y), *[1] * (y.dim() - 1)))
        if self.data.weights is not None:
            nll = nll * self.data.weights
        return nll.mean(1), right.mean(1)


class Best:
    """The best epoch of one network: copies, on its device, of everything that predictions and trackers depend on."""

    def __init__(self, step: Step, patience: int) -> None:
        if len(step.q.mean) != 1:
            raise ValueError("early stopping works for one network only")
        own = None if step.task_fit is None else step.task_fit.values
        tracked = [buffer for tracker in step.trackers for buffer in tracker.buffers()]
        rule = [] if step.estimating is None else step.estimating.buffers()  # trackers may read the rule's state
        parts = (step.q.mean, step.q.log_std, own, *step.statistics, *tracked, *rule)
        self.live = [tensor for tensor in parts if tensor is not None]
        self.kept = [tensor.clone() for tensor in self.live]
        self.patience = patience
        self.nll, self.since = torch.full((1,), math.inf, dtype=torch.float64), torch.zeros(1, dtype=torch.long)

    def buffers(self) -> list[Tensor]:
        """Every tensor that an epoch changes."""
        return [*self.kept, self.nll, self.since]

    def enough(self, nll: float) -> bool:
        """Record an epoch's validation NLL; return True if it has not improved for `patience` epochs."""
        if nll < float(self.nll):
            self.nll.fill_(nll)
            self.since.zero_()
            self._copy(self.live, self.kept)
        else:
            self.since += 1
        return int(self.since) >= self.patience

    def restore(self) -> None:
        if float(self.nll) < math.inf:
            self._copy(self.kept, self.live)

    @staticmethod
    def _copy(source: list[Tensor], to: list[Tensor]) -> None:
        for a, b in zip(source, to, strict=True):
            b.copy_(a)
