"""Two ways to make a stream of tasks from one data set: split its classes, or permute its pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from evcl.benchmarks.benchmark import Examples, Task, hold_out
from evcl.errors import EvclError
from evcl.randomness import generator


def split(train: Examples, test: Examples, groups: Sequence[Sequence[int]], validation: float = 0.0) -> list[Task]:
    """One task, with a head of its own, for each group of classes."""
    tasks = []
    for k, group in enumerate(groups):
        name = "/".join(str(c) for c in group)
        wanted = torch.tensor(list(group))
        parts = []
        for examples in (train, test):
            rows = torch.isin(examples.labels, wanted).nonzero().flatten()
            if len(rows) == 0:
                raise EvclError(f"task {name!r} has no examples: its classes are not in the data")
            parts.append(Examples(examples.inputs[rows], examples.labels[rows]))
        task = Task(name, name, tuple(group), parts[0], parts[1])
        if validation:
            task = hold_out(task, validation, generator(0, "validation", k))
        tasks.append(task)
    return tasks


def permuted(train: Examples, test: Examples, tasks: int, seed: int, validation: float = 0.0) -> list[Task]:
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
