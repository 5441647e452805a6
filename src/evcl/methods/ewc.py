"""Elastic weight consolidation (Kirkpatrick et al., 2017), in its online form: one anchor and an accumulated Fisher.

L_t = mean NLL + lambda/2 sum_i F_i (theta_i - theta*_i)^2,   F <- gamma F + F_t

`importance` chooses another measure in place of the Fisher (see importance.py). `distill` adds a distillation loss on
the outputs (see teacher.py); plain EWC has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from evcl._core.settings import ELASTIC, Settings
from evcl._core.summaries import METHOD_SUMMARIES
from evcl.methods.importance import IMPORTANCE, fisher
from evcl.methods.memory import per_task, per_weight
from evcl.methods.method import Fit, Fitted, Learned, Learning, Method, Round
from evcl.methods.teacher import DISTILLATION, Number, held, more_rows
from evcl.methods.terms import Elastic
from evcl.nn import Gaussian

__all__ = ["EWC", "Memory", "elastic", "fisher"]


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
    past, importance = held(memory.rows, round_, s), IMPORTANCE[s.importance]
    terms, trackers = [elastic(memory, s, round_.n, past.elastic)], importance.trackers()
    fitted = yield Fit(round_.tasks, terms=terms, losses=past.lessons, trackers=trackers)
    return Learned(fitted.q, memory.after(fitted, round_, importance.measure(fitted, round_, s), s.fisher_decay))


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
