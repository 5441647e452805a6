"""Experience replay (Chaudhry et al., 2019): earlier examples fill half of each batch.

L_t = mean NLL over batches of which one half is new, and the other drawn from what is kept of earlier tasks

The memory holds `memory` examples in all, as many of each task: random ones, fewer of each as tasks come.
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
    """Random examples of a task; the first few of them are random too."""
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
        shares="plugin-er",
    ),
    overwrite=True,
)
