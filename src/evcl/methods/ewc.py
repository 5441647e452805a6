"""Elastic weight consolidation (Kirkpatrick et al., 2017), in its online form: one anchor, the accumulated Fisher.

L_t = mean NLL + lambda/2 sum_i F_i (theta_i - theta*_i)^2,   F <- gamma F + F_t

`distill` adds a pull on what the network says, see teacher.py; plain EWC has none.
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
    """`prior` is the posterior at the end of the last task (for a new weight, the first prior): the anchor."""

    prior: Gaussian = per_weight(Gaussian, "prior")
    importance: Tensor = per_weight(low=0)  # F
    used: Tensor = per_weight(low=0, high=1)  # 1 where an earlier task used the weight, 0 where not
    rows: dict[int, Tensor] = per_task()  # head -> [R, 1]: how many it has learned
    beta: dict[int, Tensor] = per_task()  # of EVCL, as VCL's

    def after(
        self, fitted: Fitted, round_: Round, importance: Tensor, decay: Number, beta: Mapping[int, Tensor] | None = None
    ) -> Memory:
        """What is remembered after one more round; only the weights that it used are concerned."""
        used = fitted.used.expand_as(self.used)
        added = torch.where(used > 0, decay * self.importance + importance, self.importance)
        rows = more_rows(self.rows, round_)
        return Memory(fitted.q, added, torch.maximum(self.used, used), rows, dict(beta or {}))


def elastic(memory: Memory, s: Settings, n: int, part: Number = 1.0) -> Elastic:
    """`part` of lambda/2 sum F [(mu - mu*)^2 + (s2 - s2*)^2], with lambda F raised by the floor; over n, if so said."""
    importance = part * (s.strength * memory.importance + s.fisher_floor * memory.used)
    over = "examples" in (s.strength_scale, s.fisher_scale)
    return Elastic(memory.prior, importance / n if over else importance)


def learn(memory: Memory, round_: Round, s: Settings) -> Learning:
    past = held(memory.rows, round_, s)
    fitted = yield Fit(round_.tasks, terms=[elastic(memory, s, round_.n, past.elastic)], losses=past.lessons)
    return Learned(fitted.q, memory.after(fitted, round_, fisher(fitted, round_, s), s.fisher_decay))


def fisher(fitted: Fitted, round_: Round, s: Settings) -> Tensor:
    """[R, P]: the diagonal Fisher of the round's tasks, over all weights: 0 for those that the fit did not use."""
    total: Tensor | float = 0.0
    for i, task in enumerate(round_.tasks):
        total = total + _of_task(fitted, task, round_.generators("fisher", i), round_, s)
    whole = torch.zeros_like(fitted.q.mean)
    fitted.network.layout.scatter_(whole, fitted.layout, torch.as_tensor(total))
    return whole


def _of_task(fitted: Fitted, task: TaskData, generators: list[torch.Generator], round_: Round, s: Settings) -> Tensor:
    """At the weights, at the posterior's means, or averaged over draws from it; over the fit's weights."""
    rows = torch.stack([torch.randperm(task.y.shape[1], generator=g)[: s.fisher_examples] for g in generators])
    rows = rows.to(task.y.device)
    about: tuple[Any, ...] = (fitted.layout, *task.take(rows), [task.head], s.fisher, generators)
    options: dict[str, Any] = {"temperature": s.fisher_temperature, "spread": s.fisher_spread}
    options |= {"weights": task.take_weights(rows), "ranks": round_.ranks, "likelihood": round_.likelihood}
    drawn = s.fisher_draws and fitted.own.log_std is not None
    points = _drawn(fitted.own, s.fisher_draws, generators) if drawn else [fitted.own.mean]
    found = torch.stack([curvature.fisher(fitted.network, point, *about, **options) for point in points]).mean(0)
    if s.fisher_scale == "examples":  # to second order, the loss of the task's rows if they were taught
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
