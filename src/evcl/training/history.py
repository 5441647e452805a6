"""Reports a round to the callbacks of one network, and keeps its history."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from evcl._core.errors import EvclError
from evcl.callbacks import Callback, Epoch
from evcl.training.observer import Observer, Progress


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
