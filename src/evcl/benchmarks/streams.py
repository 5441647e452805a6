"""Two ways to make a stream of tasks from one data set: split its classes, or permute its pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from evcl.benchmarks.benchmark import Examples, Task, hold_out
from evcl.errors import EvclError
from evcl.randomness import generator


def split_tasks(
    train: Examples,
    test: Examples,
    groups: Sequence[Sequence[int]],
    validation: float = 0.0,
    words: Sequence[str] | None = None,
) -> list[Task]:
    """One task, with a head of its own, for each group of classes; `words` are the classes' names."""
    _check_groups(groups, set(train.labels.tolist()))
    tasks = []
    for k, group in enumerate(groups):
        name = "/".join(str(c) if words is None else words[c] for c in group)
        wanted = torch.tensor(list(group))
        parts = [part.select(torch.isin(part.labels, wanted).nonzero().flatten()) for part in (train, test)]
        task = Task(name, name, tuple(group), parts[0], parts[1])
        if validation:
            task = hold_out(task, validation, generator(0, "validation", k))
        tasks.append(task)
    return tasks


def _check_groups(groups: Sequence[Sequence[int]], known: set[int]) -> None:
    if not groups:
        raise EvclError("classes must be groups like [[0, 1], [2, 3]], and there is none")
    for group in groups:
        if len(group) < 2 or len(set(group)) != len(group):
            raise EvclError(f"a group must be at least two different classes, not {list(group)}")
        if not set(group) <= known:
            raise EvclError(f"the data has the classes {sorted(known)}; {sorted(set(group) - known)} is not among them")
    if len({tuple(group) for group in groups}) != len(groups):
        raise EvclError("the groups of classes must differ: each is a task's name")


def permuted_tasks(train: Examples, test: Examples, tasks: int, seed: int, validation: float = 0.0) -> list[Task]:
    """The same data with its pixels in another order, a random one a task, all through one head."""
    classes = tuple(train.labels.unique().tolist())
    base = Task("", "permutation 0", classes, train, test)
    if validation:
        base = hold_out(base, validation, generator(0, "validation", 0))
    made = []
    for k in range(tasks):
        order = torch.randperm(train.inputs.shape[1], generator=generator(seed, "permutation", k))
        parts = {
            key: replace(part, permutation=order)
            for key in ("train", "test", "validation")
            if (part := getattr(base, key)) is not None
        }
        made.append(replace(base, name=f"permutation {k}", **parts))
    return made
