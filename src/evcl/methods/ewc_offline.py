"""Elastic weight consolidation in its first form (Kirkpatrick et al., 2017): one anchor and one Fisher per task.

L_t = mean NLL + lambda/2 sum_{k<t} sum_i F_ki (theta_i - theta_ki)^2

theta_k are the weights at the end of task k. Everything is kept, 2 P numbers per task, because that is what defines the
method: the sum alone could not be taken apart again. But a sum of quadratics is one quadratic, so a fit uses one
spring, however many tasks there were:

sum_k w_k (theta - theta_k)^2 = w (theta - c)^2 + sum_k w_k (theta_k - c)^2,   w = sum_k w_k,  c = sum_k w_k theta_k / w
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import ClassVar

import torch
from torch import Tensor

from evcl._core.settings import ELASTIC, Settings
from evcl.methods.importance import divisor
from evcl.methods.measures import IMPORTANCE
from evcl.methods.memory import per_weight
from evcl.methods.method import Fit, Learned, Learning, Method, Round
from evcl.methods.terms import Spring, Springs
from evcl.nn import Gaussian


@dataclass(frozen=True)
class Memory:
    anchors: tuple[Tensor, ...] = per_weight(tuple)  # theta_k
    importance: tuple[Tensor, ...] = per_weight(tuple, low=0)  # F_k


@dataclass(frozen=True)
class Anchors:
    """1/2 sum_p [w_p (mu_p - c_p)^2 + rest_p]: the penalties of all anchors together."""

    w: Tensor
    c: Tensor
    rest: Tensor
    name: ClassVar[str] = "elastic"

    @classmethod
    def of(cls, springs: list[Spring]) -> Anchors:
        both = reduce(add, springs)
        rest = torch.stack([one.w * (one.c - both.c).square() for one in springs]).sum(0)
        return cls(both.w, both.c, rest)

    def loss(self, q: Gaussian) -> Tensor:
        return 0.5 * (self.w * (q.mean - self.c).square() + self.rest).sum(1)

    def springs(self) -> Springs:
        return Springs(Spring(self.w, self.c))


def learn(memory: Memory, round_: Round, s: Settings) -> Learning:
    importance = IMPORTANCE[s.importance]
    none = Spring(torch.zeros_like(round_.posterior.mean), round_.posterior.mean)
    pairs = zip(memory.importance, memory.anchors, strict=True)
    term = Anchors.of([none, *(Spring(s.strength * f / divisor(round_.n, s), anchor) for f, anchor in pairs)])
    fitted = yield Fit(round_.tasks, terms=[term], trackers=importance.trackers())
    measured = importance.measure(fitted, round_, s)
    return Learned(fitted.q, Memory((*memory.anchors, fitted.q.mean.clone()), (*memory.importance, measured)))


EWC_OFFLINE = Method(
    name="ewc-offline",
    learn=learn,
    memory=Memory,
    settings={
        **{name: one for name, one in ELASTIC.items() if name not in ("fisher_decay", "fisher_floor")},
        "importance": replace(
            ELASTIC["importance"],
            choices=tuple(IMPORTANCE),
            refuses={"kfac": "use kfac-ewc with kfac_merge=tasks, which keeps the matrices of every task"},
        ),
        "fisher_temperature": replace(ELASTIC["fisher_temperature"], default=8.0),
    },
    apart=True,
)
