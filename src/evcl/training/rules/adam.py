"""Adam on a flat buffer. If all replicas have the same learning rate, torch's fused kernel does it in one pass. If each
replica, a row of the buffer, has its own, separate operations do: torch's kernel takes one rate per tensor.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from evcl._core.devices import limited

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


class Adam:
    """Updates `weights` [R, P] in place; `lr` is a number or [R, 1]."""

    def __init__(self, weights: Tensor, lr: Tensor | float, epsilon: float = EPSILON) -> None:
        self.weights, self.lr, self.epsilon = weights, lr, epsilon
        self.first, self.second = torch.zeros_like(weights), torch.zeros_like(weights)
        self.count = torch.zeros((), device=weights.device)

    def state(self) -> list[Tensor]:
        return [self.weights, self.first, self.second, self.count]

    def step(self, grad: Tensor, scratch: Tensor) -> None:
        """One step against `grad`; `scratch`, of the same shape, is overwritten."""
        self.count.add_(1)
        if not isinstance(self.lr, Tensor) and self._fused(self.lr, grad):
            return
        bias1, bias2 = (self._bias(beta) for beta in (BETA1, BETA2))
        self.first.lerp_(grad, 1 - BETA1)
        self.second.mul_(BETA2).addcmul_(grad, grad, value=1 - BETA2)
        torch.sqrt(self.second, out=scratch)
        scratch.div_(bias2.sqrt()).add_(self.epsilon)
        torch.div(self.first, scratch, out=scratch)
        self.weights.sub_(scratch.mul_(self.lr / bias1))

    def _bias(self, beta: float) -> Tensor:
        """1 - beta^steps, on the device, so that a graph can be made of this."""
        if limited(self.count.device):
            return -torch.expm1(math.log(beta) * self.count)  # accurate in float32, too
        return 1 - beta ** self.count.double()

    def _fused(self, lr: float, grad: Tensor) -> bool:
        """What torch.optim.Adam(fused=True) calls, without its overhead. The function is private: if this version of
        torch lacks it or takes other arguments, nothing has moved, and the answer is False.
        """
        try:
            torch._fused_adam_(
                [self.weights],
                [grad],
                [self.first],
                [self.second],
                [],
                [self.count],
                lr=lr,
                beta1=BETA1,
                beta2=BETA2,
                weight_decay=0.0,
                eps=self.epsilon,
                amsgrad=False,
                maximize=False,
            )
        except (AttributeError, TypeError, NotImplementedError):
            return False
        return True
