"""Adam on flat buffers.

`Adam` moves one buffer: by torch's fused kernel, in one pass, where all replicas have one learning rate, and by our own
operations where each replica, a row of the buffer, has its own: torch's takes one a tensor. `fused_update` is a whole
update written as one expression, the plain form of the kernel in nn/gpu.py, and used where that is not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


class Adam:
    """Moves `weights` [R, P] in place; `lr` is a number or [R, 1]."""

    def __init__(self, weights: Tensor, lr: Tensor | float) -> None:
        self.weights, self.lr = weights, lr
        self.first, self.second = torch.zeros_like(weights), torch.zeros_like(weights)
        self.count = torch.zeros((), device=weights.device)

    def step(self, grad: Tensor, scratch: Tensor) -> None:
        """One step against `grad`; `scratch`, of the same shape, is overwritten."""
        if not isinstance(self.lr, Tensor):  # what torch.optim.Adam(fused=True) calls, less its overhead
            torch._fused_adam_(
                [self.weights],
                [grad],
                [self.first],
                [self.second],
                [],
                [self.count.add_(1)],
                lr=self.lr,
                beta1=BETA1,
                beta2=BETA2,
                weight_decay=0.0,
                eps=EPSILON,
                amsgrad=False,
                maximize=False,
            )
            return
        steps = self.count.add_(1).double()  # on the device, so that a graph can be made of this
        self.first.lerp_(grad, 1 - BETA1)
        self.second.mul_(BETA2).addcmul_(grad, grad, value=1 - BETA2)
        torch.sqrt(self.second, out=scratch)
        scratch.div_((1 - BETA2**steps).sqrt()).add_(EPSILON)
        torch.div(self.first, scratch, out=scratch)
        self.weights.sub_(scratch.mul_(self.lr / (1 - BETA1**steps)))


def fused_update(
    weights: Tensor,
    first: Tensor,
    second: Tensor,
    count: Tensor,
    lr: Tensor,
    grad: Tensor,
    variance: Tensor | None,
    springs: Sequence[tuple[Tensor, Tensor] | None],
) -> None:
    """One step of Adam on means (`variance` None) or log sigmas, the terms' pull included.

    The same as `Pull.add_mean_gradient` or `Pull.add_log_std_gradient` and then `Adam.step`, but without a number on
    the host, so that it can be captured in a graph.
    `springs` are the stiffness and centre of each part of the pull: the mean's, or the linear and the square one. For
    log sigmas `grad` is twice that of the variance, and `variance` is set for the next step.
    """
    if variance is None:
        g = grad
        if springs[0] is not None:
            g = g + springs[0][0] * (weights - springs[0][1])
    else:
        g = grad * variance
        if springs[0] is not None:
            g = g + springs[0][0] * (variance - springs[0][1])
        if springs[1] is not None:
            g = g + springs[1][0] * variance * (variance - springs[1][1])
    m = BETA1 * first + (1 - BETA1) * g
    v = BETA2 * second + (1 - BETA2) * g * g
    steps = count.double()
    new = weights - lr / (1 - BETA1**steps) * m / ((v / (1 - BETA2**steps)).sqrt() + EPSILON)
    first.copy_(m)
    second.copy_(v)
    weights.copy_(new)
    if variance is not None:
        variance.copy_((2 * new).exp())
