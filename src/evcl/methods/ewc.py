"""Elastic weight consolidation (Kirkpatrick et al., 2017), in its online form: one anchor, the accumulated Fisher.

L_t = mean NLL + lambda/2 sum_i F_i (theta_i - theta*_i)^2
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from evcl.curvature import fisher
from evcl.methods.method import FinishedTask, Memory, Method, elastic
from evcl.methods.terms import Term
from evcl.settings import ELASTIC, Settings


def terms(memory: Memory, s: Settings, n: int) -> list[Term]:
    return [elastic(memory, s, n)]


def importance(task: FinishedTask) -> Tensor:
    """The diagonal Fisher at the weights, at the posterior's means, or averaged over draws from it."""
    s = task.settings
    about = (task.layout, task.x, task.y, task.heads, s.fisher, task.generators)
    points = _drawn(task) if s.fisher_draws and task.q.log_std is not None else [task.q.mean]
    options: dict[str, Any] = {"temperature": s.fisher_temperature, "spread": s.fisher_spread}
    options |= {"weights": task.weights, "ranks": task.ranks}
    found = [fisher(task.network, point, *about, **options) for point in points]
    total = torch.stack(found).mean(0)
    if s.fisher_scale == "task":
        weights = sum(prod(shape) for shape in task.layout.shapes.values())
        total = total / (total.sum(1, keepdim=True) / weights).clamp_min(1e-30)
    return total


def _drawn(task: FinishedTask) -> list[Tensor]:
    mean, log_std = task.q.mean, task.q.log_std
    assert log_std is not None
    points = []
    for _ in range(task.settings.fisher_draws):
        rows = [torch.randn(mean.shape[1], generator=g, dtype=mean.dtype) for g in task.generators]
        points.append(mean + log_std.exp() * torch.stack(rows).to(mean.device))
    return points


EWC = Method(
    name="ewc",
    summary="plain weights, held where the Fisher says that earlier tasks need them",
    bayesian=False,
    terms=terms,
    importance=importance,
    settings=ELASTIC,
)
