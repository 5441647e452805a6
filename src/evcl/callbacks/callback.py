"""The callback interface: what callbacks are told while a task is learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Callback", "Epoch"]


@dataclass(frozen=True)
class Epoch:
    """Measurements at the end of an epoch. Losses are in nats per example, and add up to `loss`, the objective.

    Attributes:
        task: the task's name; if several are learned jointly, all of their names
        epoch: this epoch, counted from 1
        epochs: how many there are at most
        nll: the mean over the epoch, each example before its step; with class weights, weighted
        terms: what the method adds, by name: its terms at the end of the epoch and its losses at the last step, as the
            objective has them
        lr: the learning rate
        validation_nll: the NLL of what would be predicted of the validation part now, weighted as `nll` is; None
            without a validation part
        validation_accuracy: the accuracy of the same predictions; None without a validation part
        stage: which of the method's fits this is: "task", or for example "coreset"
    """

    task: str
    epoch: int
    epochs: int
    nll: float
    terms: Mapping[str, float]
    lr: float
    validation_nll: float | None = None
    validation_accuracy: float | None = None
    stage: str = "task"

    @property
    def loss(self) -> float:
        """The objective: the NLL and all terms."""
        return self.nll + sum(self.terms.values())

    @property
    def kl(self) -> float:
        """The KL term, beta/N KL(q || prior): multiply by N/beta for the KL itself. 0 if the method has none."""
        return self.terms.get("kl", 0.0)

    @property
    def elastic(self) -> float:
        """The elastic penalty; 0 if the method has none."""
        return self.terms.get("elastic", 0.0)

    @property
    def other(self) -> float:
        """All other terms and losses."""
        return sum(value for name, value in self.terms.items() if name not in ("kl", "elastic"))

    @property
    def tuning(self) -> bool:
        """Whether this is an epoch on coresets, after the epochs on the task."""
        return self.stage == "coreset"


class Callback:
    """Subclass it and override what you need; `learner.learn(..., callbacks=[...])` calls callbacks in list order.

    An exception in a callback ends the task, and the learner is left as it was before the task. Callbacks cannot use
    the learner until `end_task`: by then it has learned the task, and can predict and be saved.
    """

    def begin_task(self, task: str, epochs: int) -> None:
        """Called when a task begins, with its maximum number of epochs."""

    def begin_epoch(self, task: str, epoch: int) -> None:
        """Called when an epoch begins; the first is 1."""

    def end_epoch(self, epoch: Epoch) -> bool | None:
        """Called when an epoch has ended. Return True to make it the task's last; the task is consolidated as usual."""

    def end_task(self, task: str, history: Sequence[Epoch]) -> None:
        """Called when the task has been learned and consolidated."""
