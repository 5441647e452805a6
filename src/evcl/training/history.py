"""What the callbacks of a task are told, and the history that is kept of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from evcl.callbacks import Callback, Epoch
from evcl.errors import EvclError
from evcl.training.task import Progress


class History:
    """Tells the callbacks of one network what happens in a task, and keeps the epochs."""

    def __init__(self, task: str, callbacks: Any) -> None:
        self.task = task
        self.epochs: list[Epoch] = []
        self.callbacks: list[Callback] = list(callbacks) if isinstance(callbacks, Iterable) else [callbacks]
        for callback in self.callbacks:
            if not isinstance(callback, Callback):
                raise EvclError(f"callbacks must be a list of objects of evcl.Callback, and one is {callback!r}")

    def begin_task(self, epochs: int) -> None:
        for callback in self.callbacks:
            callback.begin_task(self.task, epochs)

    def begin_epoch(self, epoch: int) -> None:
        for callback in self.callbacks:
            callback.begin_epoch(self.task, epoch)

    def end_epoch(self, p: Progress) -> bool:
        """The numbers come from the device in one piece, once an epoch. All callbacks are told before it stops."""
        losses = p.step.losses()
        numbers = [p.nll, losses["kl"], losses["elastic"], losses["other"], *(p.validation or ())]
        nll, kl, elastic, other, *measured = torch.stack(numbers)[:, 0].tolist()
        epoch = Epoch(
            task=self.task,
            epoch=p.epoch,
            epochs=p.epochs,
            nll=nll,
            kl=kl,
            elastic=elastic,
            other=other,
            lr=float(p.lr),
            validation_nll=measured[0] if measured else None,
            validation_accuracy=measured[1] if measured else None,
            tuning=p.tuning,
        )
        self.epochs.append(epoch)
        stop = False
        for callback in self.callbacks:
            stop |= callback.end_epoch(epoch) is True
        return stop

    def end_task(self) -> None:
        for callback in self.callbacks:
            callback.end_task(self.task, tuple(self.epochs))
