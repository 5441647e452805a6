"""Progress and compress (Schwarz et al., 2018), without lateral connections: one network learns the
task freely, then a second one takes it over by distillation.

progress:  the active column minimises the mean NLL of task t, without a penalty
compress:  the knowledge base minimises KL(p_active(.|x) || p(.|x)) + lambda/2 sum_i F_i (theta_i - theta*_i)^2,
           and F <- gamma F + F_t, as in online EWC; only the knowledge base predicts
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from evcl._core.settings import ELASTIC, Settings
from evcl.methods import (
    Distillation,
    Fit,
    Learned,
    Learning,
    Method,
    Model,
    Round,
    TaskData,
    elastic,
    fisher,
    model,
    register,
)
from evcl.methods.elastic_memory import Memory as ElasticMemory
from evcl.nn import outputs


@dataclass(frozen=True)
class Memory:
    base: ElasticMemory
    active: Model = model()


def said(active: Model, task: TaskData) -> Distillation:
    """The distillation loss that teaches the active column's predictions for a task's examples."""
    network = active.network
    z = outputs(network, active.posterior.mean, network.layout, task.x, [task.head])
    return Distillation([z.log_softmax(2)], temperature=1.0, strength=[1.0], heads=[task.head])


def unlabelled(task: TaskData) -> TaskData:
    return replace(task, weights=torch.zeros_like(task.y, dtype=task.x.dtype))


def learn(memory: Memory, round_: Round, s: Settings) -> Learning:
    (task,) = round_.tasks
    progress = yield Fit([task], model=memory.active, stage="progress")
    compress = yield Fit(
        [unlabelled(task)],
        losses=[said(progress.model, task)],
        terms=[elastic(memory.base, s, round_.n)],
        stage="compress",
    )
    base = memory.base.after(compress, round_, fisher(compress, round_, s), s.fisher_decay)
    return Learned(compress.q, Memory(base, progress.model))


register(
    Method(
        name="plugin-two-networks",
        summary="a second network learns each task, and teaches one held by the Fisher",
        bayesian=False,
        learn=learn,
        memory=Memory,
        settings=ELASTIC,
        stages=2,
        apart=True,
    ),
    overwrite=True,
)
