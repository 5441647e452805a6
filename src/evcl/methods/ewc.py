"""Elastic weight consolidation (Kirkpatrick et al., 2017), in its online form: one anchor and an accumulated Fisher.

L_t = mean NLL + lambda/2 sum_i F_i (theta_i - theta*_i)^2,   F <- gamma F + F_t

`distill` adds a distillation loss on the outputs (see teacher.py); plain EWC has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from evcl import curvature
from evcl._core.settings import ELASTIC, Settings
from evcl._core.summaries import METHOD_SUMMARIES
from evcl.methods.data import TaskData
from evcl.methods.memory import per_task, per_weight
from evcl.methods.method import Fit, Fitted, Learned, Learning, Method, Round
from evcl.methods.teacher import DISTILLATION, Number, held, more_rows
from evcl.methods.terms import Elastic
from evcl.nn import Gaussian


@dataclass(frozen=True)
class Memory:
    """`prior`, the anchor, is the posterior at the end of the last task; for a new weight, it is the first prior."""

    prior: Gaussian = per_weight(Gaussian, "prior")
    importance: Tensor = per_weight(low=0)  # F
    used: Tensor = per_weight(low=0, high=1)  # 1 for weights that an earlier task used, otherwise 0
    rows: dict[int, Tensor] = per_task()  # head -> [R, 1]: number of rows it has learned from
    beta: dict[int, Tensor] = per_task()  # used by EVCL, as in VCL's memory

    def after(
        self, fitted: Fitted, round_: Round, importance: Tensor, decay: Number, beta: Mapping[int, Tensor] | None = None
    ) -> Memory:
        """The memory after one more round; only entries of the weights that the round used change."""
        used = fitted.used.expand_as(self.used)
        added = torch.where(used > 0, decay * self.importance + importance, self.importance)
        rows = more_rows(self.rows, round_)
        return Memory(fitted.q, added, torch.maximum(self.used, used), rows, dict(beta or {}))


def elastic(memory: Memory, s: Settings, n: int, part: Number = 1.0) -> Elastic:
    """`part` times lambda/2 sum F [(mu - mu*)^2 + (s2 - s2*)^2], with the floor added to lambda F. It is divided by n
    if `strength_scale` or `fisher_scale` is "examples".
    """
    importance = part * (s.strength * memory.importance + s.fisher_floor * memory.used)
    over = "examples" in (s.strength_scale, s.fisher_scale)
    return Elastic(memory.prior, importance / n if over else importance)


def learn(memory: Memory, round_: Round, s: Settings) -> Learning:
    past = held(memory.rows, round_, s)
    fitted = yield Fit(round_.tasks, terms=[elastic(memory, s, round_.n, past.elastic)], losses=past.lessons)
    return Learned(fitted.q, memory.after(fitted, round_, fisher(fitted, round_, s), s.fisher_decay))


def fisher(fitted: Fitted, round_: Round, s: Settings) -> Tensor:
    """[R, P]: the diagonal Fisher of the round's tasks over all weights; 0 for weights that the fit did not use."""
    total: Tensor | float = 0.0
    for i, task in enumerate(round_.tasks):
        total = total + _of_task(fitted, task, round_.generators("fisher", i), round_, s)
    whole = torch.zeros_like(fitted.q.mean)
    fitted.network.layout.scatter_(whole, fitted.layout, torch.as_tensor(total))
    return whole


def _of_task(fitted: Fitted, task: TaskData, generators: list[torch.Generator], round_: Round, s: Settings) -> Tensor:
    """The Fisher of one task over the fit's weights: at the point weights, at the posterior's means, or averaged over
    posterior draws.
    """
    rows = torch.stack([torch.randperm(task.y.shape[1], generator=g)[: s.fisher_examples] for g in generators])
    rows = rows.to(task.y.device)
    about: tuple[Any, ...] = (fitted.layout, *task.take(rows), [task.head], s.fisher, generators)
    options: dict[str, Any] = {"temperature": s.fisher_temperature, "spread": s.fisher_spread}
    options |= {"weights": task.take_weights(rows), "ranks": round_.ranks, "likelihood": round_.likelihood}
    options["task"] = task.task
    drawn = s.fisher_draws and fitted.own.log_std is not None
    points = _drawn(fitted.own, s.fisher_draws, generators) if drawn else [fitted.own.mean]
    found = torch.stack([curvature.fisher(fitted.network, point, *about, **options) for point in points]).mean(0)
    if s.fisher_scale == "examples":  # to second order, the distillation loss on the task's rows
        found = found * task.y.shape[1] * s.fisher_temperature**2
    if s.fisher_scale == "task":
        weights = sum(prod(shape) for shape in fitted.layout.shapes.values())
        found = found / (found.sum(1, keepdim=True) / weights).clamp_min(1e-30)
    return found


def _drawn(q: Gaussian, draws: int, generators: list[torch.Generator]) -> list[Tensor]:
    mean, log_std = q.mean, q.log_std
    assert log_std is not None
    points = []
    for _ in range(draws):
        rows = [torch.randn(mean.shape[1], generator=g, dtype=mean.dtype) for g in generators]
        points.append(mean + log_std.exp() * torch.stack(rows).to(mean.device))
    return points


EWC = Method(
    name="ewc",
    summary=METHOD_SUMMARIES["ewc"],
    bayesian=False,
    learn=learn,
    memory=Memory,
    settings={
        **ELASTIC,
        **DISTILLATION,
        "fisher_temperature": replace(ELASTIC["fisher_temperature"], default=8.0),
    },
    apart=True,
)
