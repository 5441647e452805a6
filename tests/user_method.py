"""A method as a user would write it: an L2 anchor, with a setting of its own and a term that only autograd knows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from evcl._core.settings import Setting, Settings
from evcl.methods import Fit, Learned, Learning, Method, Round, per_weight, register
from evcl.nn import Gaussian


@dataclass(frozen=True)
class Memory:
    prior: Gaussian = per_weight(Gaussian, "prior")  # where the last task ended
    used: Tensor = per_weight(low=0, high=1)  # 1 where an earlier task used the weight


@dataclass(frozen=True)
class HuberAnchor:
    """weight * sum_p huber(mu_p - mu*_p) over the weights that an earlier task used."""

    memory: Memory
    weight: float | Tensor

    def loss(self, q: Gaussian) -> Tensor:
        moved = torch.nn.functional.huber_loss(q.mean, self.memory.prior.mean, reduction="none", delta=0.1)
        return (self.weight * moved * self.memory.used).sum(1)


def learn(memory: Memory, round_: Round, s: Settings) -> Learning:
    fitted = yield Fit(round_.tasks, terms=[HuberAnchor(memory, s.anchor)])
    return Learned(fitted.q, Memory(fitted.q, torch.maximum(memory.used, fitted.used)))


HUBER = register(
    Method(
        name="huber",
        summary="a user's own method",
        bayesian=False,
        learn=learn,
        memory=Memory,
        settings={"anchor": Setting(0.1, "weight of the anchor")},
    ),
    overwrite=True,
)
