"""Experience replay (Chaudhry et al., 2019): half of each batch consists of stored examples.

L_t = mean NLL over batches: one half from task t, the other drawn from the stored examples of earlier tasks

The memory holds at most `memory` examples, an equal share of each task, chosen at random. The shares shrink as tasks
are added.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from evcl._core.settings import Setting, Settings
from evcl.methods import Fit, Learned, Learning, Method, Mixed, Round, TaskData, examples, register


@dataclass(frozen=True)
class Memory:
    kept: tuple[TaskData, ...] = examples()


def some(task: TaskData, count: int, round_: Round) -> TaskData:
    """Random examples of a task, in random order, so that a smaller share can take the first of them."""
    rows = [torch.randperm(task.y.shape[1], generator=g)[:count] for g in round_.generators("kept", task.task)]
    return task.select(torch.stack(rows).to(task.y.device))


def first(task: TaskData, count: int) -> TaskData:
    rows = torch.arange(min(count, task.y.shape[1]), device=task.y.device)
    return task.select(rows.expand(len(task.y), -1))


def learn(memory: Memory, round_: Round, s: Settings) -> Learning:
    fitted = yield Fit([*round_.tasks, *memory.kept], sampler=Mixed(0.5))
    each = max(1, s.memory // (len(memory.kept) + len(round_.tasks)))
    new = [some(task, each, round_) for task in round_.tasks]
    return Learned(fitted.q, Memory((*(first(task, each) for task in memory.kept), *new)))


register(
    Method(
        name="plugin-er",
        summary="plain weights; examples of earlier tasks fill half of each batch",
        bayesian=False,
        learn=learn,
        memory=Memory,
        settings={"memory": Setting(200, "examples that are kept, of all tasks together", low=1)},
    ),
    overwrite=True,
)
