"""What the update rules of VOGN, IVON, noisy K-FAC and the Kalman filter have in common.

With a KL term of weight w to the prior N(m, s), and with g and h the mean and the curvature of the mean NLL's gradient,
the objective mean NLL + w KL(q || prior) is minimal where

    g + d (mu - m) = 0,    v = w / (h + d),    d = w / s
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.randomness import Noise
from evcl._core.settings import TRAINING, Setting, Settings, decided
from evcl.methods.doubt import tempering
from evcl.methods.method import Round
from evcl.methods.teacher import Number, Past, more_rows
from evcl.methods.terms import KL, Springs
from evcl.methods.vcl import Memory, betas, kl
from evcl.nn import BayesianNetwork, Gaussian, Layout

Source = Callable[[Tensor, Noise], Tensor]


class NaturalRule:
    """An update rule that computes its own gradient: subclasses define `source` and `step`. See `Fit.rule`."""

    passes = 1

    def __init__(
        self, q: Gaussian, variance: Tensor | None, grads: Tensor, pull: Springs | None, s: Settings, rounded: object
    ) -> None:
        if variance is None or q.log_std is None:
            raise EvclError(f"{type(self).__name__} needs a Bayesian method")
        self.mean, self.log_std, self.variance, self.grads, self.pull, self.settings = (
            q.mean, q.log_std, variance, grads, pull, s,
        )  # fmt: skip
        self.layout = q.layout
        self.count = torch.zeros((), dtype=q.mean.dtype, device=q.mean.device)
        lr = torch.as_tensor(decided(s.get("lr", 1.0)), dtype=q.mean.dtype, device=q.mean.device)
        self._base = lr.expand(len(q.mean), 1).clone(memory_format=torch.contiguous_format)
        self.lr = self._base.clone()  # [R, 1]; a CUDA graph reads it at each step
        self.moves = torch.ones_like(self._base, dtype=torch.bool)
        self.means: list[Tensor] = []  # what `source` fills beside `grads`

    def source(self, network: BayesianNetwork, layout: Layout, pool: Any, at: Callable[..., Source]) -> Source:
        """Make the function that computes a step's gradient: see `evcl.training.rules.Estimating`."""
        raise NotImplementedError

    def step(self) -> tuple[Tensor, Tensor]:
        """The new means and variances."""
        raise NotImplementedError

    def begin(self, examples: int) -> None:
        """A step begins."""
        self.count.add_(1)

    def __call__(self) -> None:
        mean, variance = self.step()
        torch.where(self.moves, mean, self.mean, out=self.mean)
        torch.where(self.moves, variance, self.variance, out=self.variance)
        torch.where(self.moves, 0.5 * self.variance.log(), self.log_std, out=self.log_std)

    def state(self) -> list[Tensor]:
        """The tensors of its own that a step changes."""
        return []

    def buffers(self) -> list[Tensor]:
        return [self.mean, self.log_std, self.variance, self.grads, self.count, *self.state()]

    def scale(self, factor: float) -> None:
        torch.mul(self._base, factor, out=self.lr)

    def freeze(self, rows: Tensor) -> None:
        self.moves &= ~rows.view(-1, 1)

    def resume(self, steps: int) -> None:
        self.count.fill_(steps)

    def prior(self) -> tuple[Tensor, Tensor, Tensor]:
        """m, s and d = w / s, [R, P] each, of the KL term."""
        if self.pull is None or self.pull.mean is None or self.pull.linear is None:
            raise EvclError(f"{type(self).__name__} needs a KL term")
        d = self.pull.linear.w.expand_as(self.mean)
        if not bool((d > 0).all()):
            raise EvclError("tempering must be above 0: without a KL term, the variances have no optimum")
        return self.pull.mean.c, self.pull.linear.c, d


WITHOUT: dict[str, Setting | None] = {
    **dict.fromkeys(("optimizer", "std_update", "std_rate", "std_lr_scale")),  # of the usual update rule
    "film": replace(
        TRAINING["film"],
        refuses={"true": "its steps change the posterior alone, and FiLM's scales and shifts are not part of it"},
    ),
}
NOTHING = Past([], 1.0, 1.0)


def kl_to_last(memory: Memory, round_: Round, s: Settings) -> tuple[KL, Number]:
    """VCL's KL term, and its beta."""
    beta = tempering(s, round_)
    return kl(memory.prior, beta, memory.beta, NOTHING, round_, s), beta


def remembered(q: Gaussian, memory: Memory, beta: Number, round_: Round, s: Settings) -> Memory:
    """VCL's memory after a round that ended at q."""
    return Memory(q, more_rows(memory.rows, round_), betas(beta, memory.beta, NOTHING, round_, s))
