"""The three scenarios of continual learning (van de Ven and Tolias, 2019): what a prediction is told, and must tell.

- `task`: the task is given, and predictions are among its classes. Each task has its own head.
- `domain`: the task is not given, and not asked for: all tasks have the same outputs, in one head. The first class of
  every task is output 0, the second is output 1, and so on.
- `class`: the task is not given, and predictions are among all classes so far, in one head that grows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from evcl._core.errors import EvclError
from evcl._core.tasks import Examples, Task

SCENARIOS = ("task", "domain", "class")
"""The scenarios by name."""


def in_scenario(tasks: Sequence[Task], scenario: str) -> list[Task]:
    """The same tasks in this scenario."""
    if scenario not in SCENARIOS:
        raise EvclError(f"scenario must be one of {', '.join(SCENARIOS)}, not {scenario!r}", setting="scenario")
    if scenario == "task":
        return [replace(task, head=task.name) for task in tasks]
    first, shared = tasks[0], all(task.classes == tasks[0].classes for task in tasks)
    if scenario == "class":
        if shared and len(tasks) > 1:
            raise EvclError("scenario class: every task has the same classes, so there are none to add: use domain")
        seen: list[int] = []
        made = []
        for task in tasks:
            seen += [label for label in task.classes if label not in seen]
            made.append(replace(task, head=first.name, classes=tuple(seen)))
        return made
    if shared:
        return [replace(task, head=first.name) for task in tasks]
    sizes = {len(task.classes) for task in tasks}
    if len(sizes) > 1:
        raise EvclError(
            f"scenario domain: every task needs the same number of classes, but they have {sorted(sizes)}",
            setting="scenario",
        )
    return [_numbered(task, first.name) for task in tasks]


def _numbered(task: Task, head: str) -> Task:
    """The task with the positions of its classes as labels."""
    order = torch.tensor(task.classes)

    def numbered(part: Examples | None) -> Examples | None:
        if part is None:
            return None
        return replace(part, labels=(part.labels.unsqueeze(1) == order).int().argmax(1))

    train, test = numbered(task.train), numbered(task.test)
    assert train is not None
    assert test is not None
    classes = tuple(range(len(order)))
    return replace(task, head=head, classes=classes, train=train, test=test, validation=numbered(task.validation))
