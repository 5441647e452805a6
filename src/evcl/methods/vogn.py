"""VOGN, variational online Gauss-Newton (Khan et al., 2018; Osawa et al., 2019).

L_t = mean NLL + beta/N_t KL(q_t || q_{t-1}), minimised by a natural-gradient step in the mean and the precision of q:

    theta ~ q,   g = mean_b g_b(theta),   h = mean_b g_b(theta)^2,   g_b the gradient of example b
    m <- b1 m + (1 - b1) (g + d (mu - mu_{t-1})),   s <- (1 - b2) s + b2 h
    mu <- mu - lr m / (s + d),   sigma^2 = (beta / N_t) / (s + d),   d = beta / (N_t sigma_{t-1}^2)

h is the paper's: the gradients of single examples are squared, at their labels. m and s start at 0 and are corrected
for that as in Adam. At its fixed point, the precision is N_t h / beta + 1 / sigma_{t-1}^2, the optimum of L_t. Osawa et
al. have beta / sigma_{t-1}^2 there, which is the same for beta = 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from evcl._core.randomness import Noise
from evcl._core.settings import Setting
from evcl.curvature import StepCurvature
from evcl.methods.method import Method
from evcl.methods.natural import NO_MEMORY, NaturalRule, Rates, Source, learn_with
from evcl.methods.vcl import Memory
from evcl.nn import BayesianNetwork, Layout
from evcl.nn.chain import Chain


class VognRule(NaturalRule):
    def prepare(self) -> None:
        self.centre, self.width, self.damping = self.prior()
        self.momentum, self.squares = torch.zeros_like(self.mean), torch.zeros_like(self.mean)

    def source(self, network: BayesianNetwork, layout: Layout, pool: Any, at: Callable[..., Source]) -> Source:
        theta, grads = torch.empty_like(self.mean), torch.zeros_like(self.grads)
        fast = at(theta.unsqueeze(0), grads[:1]) if pool.weights is None else None
        fast = fast if isinstance(fast, Chain) else None
        slow, draws = StepCurvature(network, layout, pool, "empirical"), self.settings.draws

        def compute(rows: Tensor, noise: Noise) -> Tensor:
            nll = torch.zeros_like(self.mean[:, 0])
            self.grads.zero_()
            for _ in range(draws):
                noise.shared().normal_(theta)
                torch.addcmul(self.mean, self.variance.sqrt(), theta, out=theta)
                if fast is not None:
                    nll += fast(rows, noise) / draws
                    fast.squares(rows.shape[1], grads[1])
                else:
                    nll += slow(theta, rows, grads[0], grads[1], noise) / draws
                self.grads.add_(grads, alpha=1 / draws)
            return nll

        return compute

    def step(self) -> tuple[Tensor, Tensor]:
        s, (g, h) = self.settings, self.grads
        self.momentum.lerp_(g + self.damping * (self.mean - self.centre), 1 - s.momentum)
        self.squares.lerp_(h, s.curvature_rate)
        m = self.momentum / (1 - s.momentum**self.count)
        stiff = self.squares / (1 - (1 - s.curvature_rate) ** self.count) + self.damping
        return self.mean - self.lr * m / stiff, self.width * (self.damping / stiff)

    def state(self) -> list[Tensor]:
        return [self.momentum, self.squares]


# Chosen among lr 0.01 to 0.05, rate 0.003 to 0.1 and tempering 0.05 to 0.3, on held-out data of permuted-digits and
# split-digits. With a smaller tempering, tasks that are fitted exactly leave no curvature behind.
RATES = Rates(tempering=0.2, lr=0.01, curvature_rate=0.01)
VOGN = Method(
    name="vogn",
    bayesian=True,
    learn=learn_with(VognRule, RATES),
    memory=Memory,
    settings={
        **RATES.settings(),
        "draws": Setting(1, "number of draws of the weights per step", low=1, high=1000),
    },
    apart=True,
    no_memory=NO_MEMORY,
)
