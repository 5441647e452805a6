"""Synaptic Intelligence (Zenke, Poole and Ganguli, 2017): a weight is important if moving it reduced the loss.

L_t = mean NLL + c sum_i Omega_i (theta_i - theta*_i)^2,   c = strength, theta* the weights after the last task
omega_i = -sum over steps of g_i (theta'_i - theta_i),     g the gradient of the NLL alone, theta' after the step
Omega_i <- Omega_i + max(0, omega_i / (Delta_i^2 + xi)),   Delta_i = theta_i - theta*_i at the task's end
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from evcl._core.settings import Setting, Settings
from evcl.methods import Elastic, Fit, Gradients, Learned, Learning, Method, Round, Tracker, per_weight, register
from evcl.nn import Gaussian


@dataclass(frozen=True)
class Memory:
    importance: Tensor = per_weight(low=0)  # Omega


class PathIntegral(Tracker):
    """Computes omega: how much the movement of each weight reduced the loss."""

    def begin(self, q: Gaussian) -> None:
        self.omega, self.grad, self.last = torch.zeros_like(q.mean), torch.zeros_like(q.mean), q.mean.clone()

    def before(self, q: Gaussian, grads: Gradients) -> None:
        self.grad.copy_(grads.mean)

    def after(self, q: Gaussian) -> None:
        self.omega.sub_(self.grad * (q.mean - self.last))
        self.last.copy_(q.mean)

    def buffers(self) -> Sequence[Tensor]:
        return [self.omega, self.grad, self.last]

    def result(self) -> Tensor:
        return self.omega


def learn(memory: Memory, round_: Round, s: Settings) -> Learning:
    anchor = round_.posterior
    pull = Elastic(anchor, 2 * s.strength * memory.importance)
    fitted = yield Fit(round_.tasks, terms=[pull], trackers=[PathIntegral()])
    moved = (fitted.q.mean - anchor.mean).square()
    return Learned(fitted.q, Memory(memory.importance + (fitted.tracked[0] / (moved + s.xi)).clamp_min(0)))


register(
    Method(
        name="plugin-si",
        summary="plain weights, held by how much their own movement brought the loss down",
        bayesian=False,
        learn=learn,
        memory=Memory,
        settings={
            "strength": Setting(3.0, "c, the weight of the penalty"),
            "xi": Setting(0.1, "keeps the importance of weights that hardly moved finite", open_low=True),
        },
    ),
    overwrite=True,
)
