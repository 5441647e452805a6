"""Stochastic gradient descent with momentum, on a flat buffer: v <- momentum v + g, w <- w - lr v."""

from __future__ import annotations

import torch
from torch import Tensor


class SGD:
    """Updates `weights` [R, P] in place; `lr` and `momentum` are numbers or [R, 1]."""

    def __init__(self, weights: Tensor, lr: Tensor | float, momentum: Tensor | float = 0.0) -> None:
        self.weights, self.lr, self.momentum = weights, lr, momentum
        moving = isinstance(momentum, Tensor) or momentum > 0
        self.velocity = torch.zeros_like(weights) if moving else None
        self.count = torch.zeros((), device=weights.device)

    def state(self) -> list[Tensor]:
        return [self.weights, *([] if self.velocity is None else [self.velocity]), self.count]

    def step(self, grad: Tensor, scratch: Tensor) -> None:
        """One step against `grad`; `scratch`, of the same shape, is overwritten."""
        self.count.add_(1)
        if self.velocity is not None:
            grad = self.velocity.mul_(self.momentum).add_(grad)
        if isinstance(self.lr, Tensor):
            self.weights.sub_(torch.mul(grad, self.lr, out=scratch))
        else:
            self.weights.add_(grad, alpha=-self.lr)
