"""Callbacks: the events of training a task, and loggers that write them to files.

In: events of training. Out: rows of a CSV file, TensorBoard's files, or whatever a user's callback does.
To change: loggers can be added. Fixed: a callback sees numbers, never the state of a run, so that it changes no
result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evcl._core.lazy import lazily

if TYPE_CHECKING:
    from evcl.callbacks.logs import CsvLog, TensorBoard
else:
    __getattr__, __dir__ = lazily(__name__, {"evcl.callbacks.logs": "CsvLog TensorBoard"})

__all__ = ["Callback", "CsvLog", "Epoch", "TensorBoard"]


@dataclass(frozen=True)
class Epoch:
    """Measurements at the end of an epoch. Losses are in nats per example, and add up to `loss`, the objective.

    Attributes:
        task: the task's name; if several tasks are learned jointly, all their names
        epoch: the number of this epoch, from 1
        epochs: the maximum number of epochs
        nll: the mean NLL over the epoch, each example measured before the step that uses it; with class weights, the
            weighted mean
        terms: what the method adds to the objective, by name: its penalties at the end of the epoch, and its losses at
            the last step
        lr: the learning rate
        validation_nll: the NLL of predictions for the validation part after this epoch, weighted as `nll` is; None
            without a validation part
        validation_accuracy: the accuracy of the same predictions; None without a validation part
        stage: which of the method's fits this is: "task", or for example "coreset"
        path: how the steps were computed: "autograd", "chain" (an MLP on a CPU), "graph" (on a GPU), or "kernels" (an
            MLP on a GPU)
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
    path: str = ""

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
