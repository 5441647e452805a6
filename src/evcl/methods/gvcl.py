"""Generalised variational continual learning (Loo et al., 2021): VCL whose penalty on the means has its own strength.

L_t = mean NLL + beta/N_t KL_lambda(q_t || q_{t-1}),   q_{t-1} = N(m, s), the first prior N(., s0), q_t = N(mu, v):

KL_lambda = 1/2 sum_i [ v/s + (mu - m)^2 (1/s0 + lambda max(1/s - 1/s0, 0)) + log(s/v) - 1 ]

Only the precision that data added to the first prior is multiplied by lambda. lambda 1 is VCL. As beta falls to 0, the
added precision tends to H/beta, where H is the curvature of the earlier tasks' NLL, and the objective to that of online
EWC with strength lambda. The setting `distill` adds distillation (see distillation.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from evcl._core.settings import Setting, Settings
from evcl.methods.composed import DISTILLATION, TEMPERING, with_film
from evcl.methods.forgetting import FORGETTING
from evcl.methods.kl import first_precision, kl
from evcl.methods.label_noise import tempering
from evcl.methods.method import ALONE, Fit, Learned, Learning, Method, Past, Round
from evcl.methods.parts import compose
from evcl.methods.redraw import REDRAW, redrawn
from evcl.methods.terms import Number, Spring, Springs
from evcl.methods.vcl import Memory
from evcl.nn import Gaussian


@dataclass(frozen=True)
class ScaledKL:
    """weight * KL_lambda(q || prior); weight = beta / N."""

    prior: Gaussian
    first: Tensor  # 1/s0, the precision of the first prior: [1, P] or [R, 1]
    strength: Number  # lambda
    weight: Number
    name: ClassVar[str] = "kl"

    def stiffness(self) -> Tensor:
        """[R, P]: 1/s0 + lambda max(1/s - 1/s0, 0)"""
        added = (self.prior.precision() - self.first).clamp_min(0)
        return self.first + self.strength * added

    def loss(self, q: Gaussian) -> Tensor:
        variance, before = q.variance(), self.prior.variance()
        assert variance is not None
        assert before is not None
        moved = (q.mean - self.prior.mean).square() * self.stiffness()
        total = 0.5 * (variance / before + moved + (before / variance).log() - 1).sum(1)
        return total * (self.weight.reshape(-1) if isinstance(self.weight, Tensor) else self.weight)

    def springs(self) -> Springs:
        """a = weight (1/s0 + lambda max(1/s - 1/s0, 0)), k = weight / s; the centres are those of the KL."""
        variance = self.prior.variance()
        assert variance is not None
        mean = Spring(self.weight * self.stiffness(), self.prior.mean)
        return Springs(mean, Spring(self.weight / variance, variance))


def learn(memory: Memory, round_: Round, s: Settings, past: Past = ALONE) -> Learning:
    beta = tempering(s, round_)
    to = kl(memory.prior, beta, memory.beta, past, round_, s)
    term = ScaledKL(to.prior, first_precision(round_, s), s.strength, to.weight)
    fitted = yield Fit(round_.tasks, terms=[term], losses=past.losses, start=redrawn(round_, s))
    return Learned(fitted.q, memory.after(fitted.q, beta, past, round_, s))


# `strength` was chosen on the validation data of permuted-digits and split-digits: values from 10 to 100 are good.
PLAIN = Method(
    name="gvcl",
    bayesian=True,
    learn=learn,
    memory=Memory,
    settings={
        "strength": Setting(
            30.0, "lambda, the factor of the precision that earlier tasks added to the prior", high=1e12
        ),
        "redraw": REDRAW,
    },
)
GVCL = compose(PLAIN, TEMPERING, DISTILLATION, FORGETTING)
GVCL_FILM = with_film(GVCL)
