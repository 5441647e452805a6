"""Looking on while a task is learned: what is told, and to whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Epoch:
    """What is known at the end of an epoch. Losses are in nats per example, and add up to `loss`, the objective.

    task                    its name; of several learned jointly, all of them
    epoch, epochs           this one, from 1, and how many there are at most
    nll                     the mean over the epoch, each example before its step; with class weights, weighted
    kl, elastic, other      the method's terms at the end of the epoch, as the objective has them: beta/N KL(q || prior)
                            (times N/beta, the KL itself), the elastic penalty, and terms of one's own; 0 if it has none
    lr                      Adam's learning rate
    validation_nll          of what would be predicted of the validation part now; weighted as `nll` is
    validation_accuracy     of the same; both None where there is no validation part
    tuning                  with coresets: an epoch on those, after the epochs on the task
    """

    task: str
    epoch: int
    epochs: int
    nll: float
    kl: float
    elastic: float
    other: float
    lr: float
    validation_nll: float | None = None
    validation_accuracy: float | None = None
    tuning: bool = False

    @property
    def loss(self) -> float:
        return self.nll + self.kl + self.elastic + self.other


class Callback:
    """Subclass it and override what you need; `learner.learn(..., callbacks=[...])` calls them in their order.

    An exception in any of them ends the task, and the learner is as it was before it. The learner itself is busy until
    `end_task`: there it knows the task already, and may predict and be saved.
    """

    def begin_task(self, task: str, epochs: int) -> None:
        """A task begins, of at most so many epochs."""

    def begin_epoch(self, task: str, epoch: int) -> None:
        """An epoch begins; the first is 1."""

    def end_epoch(self, epoch: Epoch) -> bool | None:
        """An epoch has ended; True makes it the task's last one. The task is then consolidated as ever."""

    def end_task(self, task: str, history: Sequence[Epoch]) -> None:
        """The task is learned and consolidated."""
