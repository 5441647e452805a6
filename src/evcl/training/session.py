"""Names of tasks, heads and classes. `Learner` and `evcl run` both use a `Session`, one round after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from evcl._core.density import Density
from evcl._core.errors import EvclError
from evcl._core.inputs import Label, positions
from evcl.methods import TaskData
from evcl.nn import Gaussian
from evcl.training.run import Run


class Given(NamedTuple):
    """A task as the caller passes it: inputs [U, N, ...] (see TaskData), and U lists of labels."""

    name: str
    head: str
    classes: Sequence[Label]  # classes that its head must have, even if no label uses them
    x: Tensor
    y: Sequence[Sequence[Label]]


class Session:
    """A run, the names of its tasks and heads, and the heads' classes."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.heads: dict[str, list[Label]] = {}  # head -> its classes, in the order of its outputs
        self.tasks: dict[str, str] = {}  # task -> its head
        self.density: Density | None = None  # summary of all training rows, if the learner keeps one
        self._drawn: tuple[Gaussian, int, list[Tensor]] | None = None  # weight draws of the last prediction

    @contextmanager
    def round(self, given: Sequence[Given], ended: Callable[[], None] = lambda: None) -> Iterator[list[TaskData]]:
        """Add or extend the heads of these tasks and yield their data; learn them inside this context.

        On success, the tasks are recorded and `ended` is called. If learning or `ended` fails, everything is restored.
        """
        state, before = self.run.state(), (self.heads, self.tasks, self.density)
        self._drawn = None
        self.heads = {name: list(classes) for name, classes in self.heads.items()}
        try:
            tasks = [self._prepared(task, len(self.tasks) + i) for i, task in enumerate(given)]
            yield tasks
            self.tasks = {**self.tasks, **{task.name: task.head for task in given}}
            ended()
        except BaseException as error:
            self.run.restore(state)
            self.heads, self.tasks, self.density = before
            if isinstance(error, EvclError):
                raise error.within(f"task {given[-1].name!r}") from error
            raise

    def _prepared(self, task: Given, number: int) -> TaskData:
        run, known = self.run, self.heads.get(task.head, [])
        classes = _merged(known, task.classes, [label for row in task.y for label in set(row)])
        if not known:
            run.add_head(run.features(task.x[:1, 0].to(run.network.posterior.mean)), len(classes))
        elif len(classes) > len(known):
            run.grow_head(list(self.heads).index(task.head), len(classes))
        self.heads[task.head] = classes
        run.add_film(number + 1)
        return replace(self.data(task), task=number)

    def classes_of(self, task: Given) -> list[Label]:
        """The classes of a task's head."""
        return self.heads[task.head]

    def seen(self) -> list[int]:
        """The number of the head of each task learned."""
        numbers = {name: k for k, name in enumerate(self.heads)}
        return [numbers[head] for head in self.tasks.values()]

    def data(self, task: Given) -> TaskData:
        """A task's data on the run's device; labels become class indices within its head."""
        mean = self.run.network.posterior.mean
        y = torch.stack([positions(row, self.heads[task.head]) for row in task.y])
        number = list(self.tasks).index(task.name) if task.name in self.tasks else 0
        return TaskData(task.x.to(mean), y.to(mean.device), list(self.heads).index(task.head), task=number)

    def predict(self, data: TaskData) -> Tensor:
        """Predictions [R, N, classes] for a task's inputs; with several processes, each predicts a part.

        Weight draws are kept from one task to the next, whatever their size.
        """
        run, heads = self.run, len(self.heads)
        weights = run.predictor(data.task)
        if self._drawn is None or self._drawn[0] is not weights or self._drawn[1] != heads:
            self._drawn = weights, heads, list(run.draws(range(heads), data.task))
        draws = self._drawn[2]
        if run.ranks is None:
            return run.predict(data.x, data.head, draws, task=data.task)
        mean, part = run.network.posterior.mean, run.ranks.part(data.x.shape[1])
        found = mean.new_zeros(len(mean), data.x.shape[1], run.classes(data.head))
        if part.stop > part.start:
            found[:, part] = run.predict(data.x[:, part], data.head, draws, task=data.task)
        return run.ranks.sum_(found)


def _merged(head: Sequence[Label], known: Sequence[Label], y: Sequence[Label]) -> list[Label]:
    """A head's classes followed by the new ones: those that the task declares, then those in its labels, sorted."""
    kinds = {type(label) for label in (*head, *known, *y)}
    if len(kinds) > 1:
        raise EvclError("a head's labels must be all integers or all strings; these are a mixture")
    classes = list(dict.fromkeys([*head, *known, *sorted(set(y))]))
    if len(classes) < 2:
        raise EvclError(
            f"a new head needs at least two classes, but the labels contain only {classes[0]!r}: "
            "name all classes with classes=[...]"
        )
    return classes
