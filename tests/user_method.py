"""A method as a user would write it: an L2 anchor, with a setting of its own and a term that only autograd knows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from evcl.methods import Memory, Method, register
from evcl.nn import Gaussian
from evcl.settings import Setting, Settings


@dataclass(frozen=True)
class HuberAnchor:
    """weight * sum_p huber(mu_p - mu*_p) over the weights that an earlier task used."""

    memory: Memory
    weight: float | torch.Tensor

    def loss(self, q: Gaussian) -> torch.Tensor:
        moved = torch.nn.functional.huber_loss(q.mean, self.memory.prior.mean, reduction="none", delta=0.1)
        return (self.weight * moved * self.memory.used).sum(1)


def terms(memory: Memory, s: Settings, n: int) -> list[HuberAnchor]:
    return [HuberAnchor(memory, s.anchor)]


HUBER = register(
    Method(
        name="huber",
        summary="a user's own method",
        bayesian=False,
        terms=terms,
        settings={"anchor": Setting(0.1, "weight of the anchor")},
    ),
    overwrite=True,
)
