"""Adam on one flat buffer.

Torch's own, fused into one pass, where all replicas have one learning rate. Ours where each replica, a row of the
buffer, has its own: torch's takes one a tensor.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


class Adam:
    """Moves `weights` [R, P] in place; `lr` is a number or [R, 1]."""

    def __init__(self, weights: Tensor, lr: Tensor | float) -> None:
        self.weights, self.lr, self.steps = weights, lr, 0
        if isinstance(lr, Tensor):
            self.first, self.second = torch.zeros_like(weights), torch.zeros_like(weights)
        else:
            self.parameter = torch.nn.Parameter(weights)  # the same memory
            self.fused = torch.optim.Adam([self.parameter], lr, (BETA1, BETA2), EPSILON, fused=True)

    def step(self, grad: Tensor, scratch: Tensor) -> None:
        """One step against `grad`; `scratch`, of the same shape, is overwritten."""
        if not isinstance(self.lr, Tensor):
            self.parameter.grad = grad
            self.fused.step()
            return
        self.steps += 1
        self.first.lerp_(grad, 1 - BETA1)
        self.second.mul_(BETA2).addcmul_(grad, grad, value=1 - BETA2)
        torch.sqrt(self.second, out=scratch)
        scratch.div_(math.sqrt(1 - BETA2**self.steps)).add_(EPSILON)
        torch.div(self.first, scratch, out=scratch)
        self.weights.sub_(scratch.mul_(self.lr / (1 - BETA1**self.steps)))
