"""Two ways to make a stream of tasks from one data set: split its classes, or permute its pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from evcl._core.errors import EvclError
from evcl._core.randomness import Purpose, generator
from evcl._core.tasks import Examples, Task


def split_tasks(
    train: Examples, test: Examples, groups: Sequence[tuple[int, ...]], words: Sequence[str] | None = None
) -> list[Task]:
    """One task, with its own head, for each group of classes; `words` are the classes' names."""
    tasks = []
    for group in groups:
        for part, which in ((train, "data"), (test, "test data")):
            known = part.labels.unique().tolist()
            if missing := sorted(set(group) - set(known)):
                raise EvclError(f"the {which} has the classes {known}, but not {missing}")
        name = "/".join(str(c) if words is None else words[c] for c in group)
        wanted = torch.tensor(group)
        parts = [part.select(torch.isin(part.labels, wanted).nonzero().flatten()) for part in (train, test)]
        tasks.append(Task(name, name, group, parts[0], parts[1]))
    return tasks


def permuted_tasks(train: Examples, test: Examples, tasks: int, seed: int) -> list[Task]:
    """The same data with its pixels in a different random order for each task; all tasks share one head."""
    classes = tuple(train.labels.unique().tolist())
    made = []
    for k in range(tasks):
        order = torch.randperm(train.inputs.shape[1], generator=generator(seed, Purpose.PERMUTATION, k))
        parts = (replace(part, permutation=order) for part in (train, test))
        made.append(Task(f"permutation {k}", "permutation 0", classes, *parts))
    return made
