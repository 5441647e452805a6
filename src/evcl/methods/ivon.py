"""IVON, improved variational online Newton (Shen et al., 2024).

L_t = mean NLL + beta/N_t KL(q_t || q_{t-1}), minimised by natural-gradient steps whose curvature needs no squares:

    theta = mu + sigma z,   g = gradient of the mean NLL at theta,   h^ = g (theta - mu) / sigma^2
    m <- b1 m + (1 - b1) g,   h <- h + b2 (h^ - h) + b2^2 (h - h^)^2 / (2 (h + d))
    mu <- mu - lr (m + d (mu - mu_{t-1})) / (h + d)
    sigma^2 = (beta / N_t) / (h + d),   d = beta / (N_t sigma_{t-1}^2)

h^ is an unbiased estimate of the curvature (Price's theorem). The last term of h keeps h + d positive: a step at most
halves it. m is corrected for its start at 0, as in Adam. h starts each task at `first_curvature`, which keeps the first
steps short. When a task has ended, what is left of it is subtracted: the h that a weight without data has by then, but
not so much that h becomes negative. Such a weight ends at sigma_{t-1}. The paper's lr is this one divided by h + d at
the start, and its prior is the same for all weights; here it is the last posterior.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from evcl._core.randomness import Noise
from evcl._core.settings import Setting
from evcl.methods.method import Method
from evcl.methods.natural import NO_MEMORY, NaturalRule, Rates, Source, learn_with
from evcl.methods.vcl import Memory
from evcl.nn import BayesianNetwork, Layout


class IvonRule(NaturalRule):
    def prepare(self) -> None:
        self.centre, self.width, self.damping = self.prior()
        self.momentum = torch.zeros_like(self.mean)
        self.curvature = torch.zeros_like(self.mean) + self.settings.first_curvature
        self.start = self.curvature.clone()  # what the curvature would be without data

    def source(self, network: BayesianNetwork, layout: Layout, pool: Any, at: Callable[..., Source]) -> Source:
        theta, grad, z = (torch.zeros_like(self.grads[:1]) for _ in range(3))
        gradient = at(theta, grad)

        def compute(rows: Tensor, noise: Noise) -> Tensor:
            std = self.variance.sqrt()
            noise.shared().normal_(z[0])
            torch.addcmul(self.mean, std, z[0], out=theta[0])
            nll = gradient(rows, noise)
            self.grads[0].copy_(grad[0])
            torch.div(z[0], std, out=self.grads[1]).mul_(grad[0])
            return nll

        return compute

    def step(self) -> tuple[Tensor, Tensor]:
        s, (g, seen), d, rate = self.settings, self.grads, self.damping, self.settings.curvature_rate
        self.momentum.lerp_(g, 1 - s.momentum)
        for h, new in ((self.curvature, seen), (self.start, 0.0)):
            off = rate * (new - h)
            torch.where(self.moves, h + off + off.square() / (2 * (h + d)), h, out=h)
        stiff = self.curvature + d
        m = self.momentum / (1 - s.momentum**self.count) + d * (self.mean - self.centre)
        return self.mean - self.lr * m / stiff, self.width * (d / stiff)

    def end(self) -> None:
        h = self.curvature.clamp(max=0).maximum(self.curvature - self.start)
        torch.mul(self.width, self.damping / (h + self.damping), out=self.variance)
        torch.mul(self.variance.log(), 0.5, out=self.log_std)

    def state(self) -> list[Tensor]:
        return [self.momentum, self.curvature, self.start]


# The best of lr 0.01 and 0.03, rate 0.001 to 0.01, first_curvature 0.003 to 0.03, tempering 0.03 and 0.1, on held-out
# data of permuted-digits; a smaller first_curvature makes the first steps unstable.
RATES = Rates(tempering=0.1, lr=0.02, curvature_rate=0.003)
IVON = Method(
    name="ivon",
    bayesian=True,
    learn=learn_with(IvonRule, RATES),
    memory=Memory,
    settings={
        **RATES.settings(),
        "first_curvature": Setting(0.03, "h, the curvature, before the first step of a task", open_low=True),
    },
    no_memory=NO_MEMORY,
)
